"""The rlstructures-style interface of environments: ``reset`` and ``step`` on DictTensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlpool.data.array_view import as_numpy
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.infos import Info, info_rows, options_of
from rlpool.data.rows import kind
from rlpool.data.specs import TensorSpec, is_action
from rlpool.data.storage import NDArray
from rlpool.envs.lanes import LaneError, Lanes, Options
from rlpool.errors import EnvSpecError, RlpoolError, SpecError, UsageError, Where
from rlpool.seeding import LaneSeeds, root_from

Observed = tuple[DictTensor, torch.Tensor]
"""An observation ``[n, ...]`` and the numbers of its environments, int64 ``[n]``."""


class VecEnv(Lanes):
    """A batch of environments.

    Subclasses implement ``_reset_lanes`` and ``_step_lanes``. What all of them share is here and in
    ``Lanes``: flags, rewards, last actions, and ``reset`` and ``step`` as rlstructures has them.

    Args:
        n_lanes: Number of environments.
        seed: Root of the seeds of ``reset(env_info)``. The rollout loop brings its own seeds.

    Attributes:
        n_lanes: Number of environments.
        auto_reset: Whether lanes of a ``Batcher`` or of ``step`` restart on their own.
        current: Key to array ``[n_lanes, ...]``: each lane's current observation, the keys of its
            info that are asked for, ``reward``, ``terminated``, ``truncated``, ``done``,
            ``initial_state`` bool, and ``last_action`` (or ``last_action/...``). Rewritten in
            place. Observations and infos are present after the first reset, last actions after
            ``declare_actions``.
        flags: bool ``[4, n_lanes]``. Its rows are ``terminated``, ``truncated``, ``done`` and
            ``initial_state`` of ``current``, as views.
        is_declared: Whether spaces declare the observations, and dtypes all keys of infos that are
            asked for; else the first reset shows them.
        steps_all_lanes: Whether every step steps all lanes. A lane that is left out goes on unseen,
            and needs a reset before it can be stepped again.
        seeding: What can be seeded, see ``VectorGymEnv``.
        min_ready: How many lanes the rollout loop waits for at a time, ``None`` for all.
        shares_current: Whether others use ``current`` as well, so that the agent gets a copy.
        lane_in_use: One element: the lane whose environment is running. It explains the death of
            this process.

    Example:
        >>> env = create_env(seed=0)
        >>> isinstance(env, VecEnv), env.n_lanes
        (True, 2)
        >>> observation, lanes = env.reset()
        >>> list(observation)
        ['frame', 'reward', 'terminated', 'truncated', 'done', 'initial_state', 'last_action']
    """

    def __init__(self, n_lanes: int, seed: int | Sequence[int] | None = None) -> None:
        super().__init__(n_lanes)
        self._all_lanes = list(range(n_lanes))
        self._running: list[int] = []
        self._root = root_from(seed)
        self._n_resets = 0
        self._lane_seeds = LaneSeeds(self._root, 0)
        self._restarting: list[int] = []  # lanes that ended and cannot be reset yet
        self._restarts = [0] * n_lanes  # since the reset
        self._n_restarts_before = 0  # the most of any lane before that reset
        self._n_steps = np.zeros(n_lanes, np.int64)  # of each lane's episode
        self._env_options: list[Options] = [None] * n_lanes

    def in_this_process(self, lane: int) -> tuple[VecEnv, int]:
        """Bring a lane's environment into this process, where a debugger sees it.

        Args:
            lane: Which one.

        Returns:
            Environments and the lane in them: this object and ``lane``, unless environments are in
            other processes. Then this object is closed, and the lane's environment is made anew.
        """
        return self, lane

    def n_envs(self) -> int:
        """Number of environments."""
        return self.n_lanes

    def reset(self, env_info: Info = None) -> Observed:
        """Reset all environments.

        Args:
            env_info: ``[n_envs, ...]`` or empty: a ``DictTensor``, or a dict of tensors, NumPy
                arrays, lists, or numbers for all environments. Environment *n* gets row *n* as
                ``reset(options={...})``, also at automatic resets. Without it nothing is passed,
                so the environment's own default applies.

        Returns:
            The observation ``[n_envs, ...]``, a copy, and the numbers of the running
            environments, int64 ``[n_envs]``.

        Raises:
            SpecError: If a value of ``env_info`` is not numeric or has the wrong number of rows.
        """
        rows = info_rows("env_info", env_info, self.n_lanes)
        self._env_options = [options_of(rows, lane) for lane in range(self.n_lanes)]
        n_before = self._n_restarts_before + max(self._restarts)
        # In one statement: a reset interrupted by a signal handler may be repeated.
        self._n_restarts_before, self._restarts = n_before, [0] * self.n_lanes
        self._lane_seeds = LaneSeeds(self._root, self._n_resets, n_before)
        self._n_resets += 1
        self._running, self._restarting = [], []
        self.begin_anew()
        self._restart(self._all_lanes)
        self._running = list(self._all_lanes)
        return self._observation(self._running)

    def step(self, policy_output: DictTensor) -> tuple[Observed, Observed]:
        """Step the running environments.

        Args:
            policy_output: ``action`` (or ``action/...``) with one row per running environment.

        Returns:
            ``((observation, running), (next_observation, next_running))``: the result of this
            step, and what the next step starts from. Environments whose episode ended are only in
            the first, unless they restart on their own; then the second has the first observation
            of their new episode. All tensors are copies.

        Raises:
            UsageError: Before ``reset``, or when no environment is running.
            SpecError: If rows or keys do not fit.
            EnvSpecError: If an environment returns an invalid value, such as a flag that is
                neither true nor false, or a finite reward that overflows float32. ``where`` has
                the lane and the step of the episode.
        """
        result, self._running = self._made_step(policy_output)
        return result

    def _made_step(self, policy_output: DictTensor) -> tuple[tuple[Observed, Observed], list[int]]:
        """What ``step`` returns, and the environments that run from then on."""
        if not self._running:
            raise UsageError("step() with no running environment", fix="call reset() first")
        stepped, ended, restarts = self._stepped(self._actions_of(policy_output))
        if self.auto_reset:
            self._restarts = restarts
            running = self._restart_those_ready(ended)
        else:
            running = [lane for lane in self._running if lane not in ended]
        return (stepped, self._observation(running)), running

    def _stepped(self, actions: dict[str, NDArray]) -> tuple[Observed, list[int], list[int]]:
        """Step the running environments.

        Returns:
            Their observation, the lanes whose episode ended, and each lane's number of restarts
            once these have restarted.
        """
        ended = self._call(self.step_lanes, self._running, actions)
        self._n_steps[self._running] += 1
        restarts = [n + (lane in ended) for lane, n in enumerate(self._restarts)]
        return self._observation(self._running), ended, restarts

    def _restart_those_ready(self, ended: Sequence[int]) -> list[int]:
        """Restart lanes that ended, now or as soon as they can be; returns those that run."""
        lanes = sorted({*self._restarting, *ended})
        while len(lanes) == self.n_lanes and not self.ready_lanes(lanes):
            self._call(self.advance)
        ready = self.ready_lanes(lanes)
        self._restart(ready)
        self._restarting = [lane for lane in lanes if lane not in ready]
        return [lane for lane in self._all_lanes if lane not in self._restarting]

    def _restart(self, lanes: Sequence[int]) -> None:
        if not lanes:
            return
        seeds = [self._lane_seeds.seed(lane, self._restarts[lane]) for lane in lanes]
        options = [self._env_options[lane] for lane in lanes]
        self._n_steps[list(lanes)] = 0
        self._call(self.reset_lanes, lanes, seeds, options)
        if self.action_leaves is not None:
            self.declare_actions({key: leaf.spec for key, leaf in self.action_leaves.items()})

    def _observation(self, lanes: Sequence[int]) -> Observed:
        rows = np.asarray(lanes, np.int64)
        values = {key: torch.from_numpy(array[rows]) for key, array in self.current.items()}
        return DictTensor(values), torch.from_numpy(rows)

    def _actions_of(self, policy_output: Any) -> dict[str, NDArray]:
        """Actions of the running environments as ``step_lanes`` takes them."""
        if not isinstance(policy_output, DictTensor):
            if not isinstance(policy_output, Mapping):
                what, fix = f"policy_output is {kind(policy_output)}", 'DictTensor({"action": ...})'
                raise SpecError(what, fix=f"pass {fix}")
            policy_output = DictTensor(policy_output)
        keys = [key for key in policy_output if is_action(key)]
        leaves = self.action_leaves
        expected = list(leaves) if leaves is not None else keys
        if not expected or sorted(keys) != sorted(expected):
            raise SpecError(f"policy_output should have the keys {expected}, got {keys}")
        actions = {}
        for key in expected:
            values = as_numpy(policy_output[key])
            shape = values.shape[1:] if leaves is None else leaves[key].spec.shape
            if values.shape != (len(self._running), *shape):
                raise SpecError(
                    f"{key!r} should have shape {[len(self._running), *shape]}, one row for each "
                    f"running environment, got {list(values.shape)}"
                )
            actions[key] = np.zeros((self.n_lanes, *shape), values.dtype)
            actions[key][self._running] = values
        if leaves is None:
            self.declare_actions(
                {key: TensorSpec(a.shape[1:], a.dtype) for key, a in actions.items()}
            )
        return actions

    def _call(self, method: Any, *arguments: Any) -> Any:
        # Outside a batcher, the user's own exception says more than the lane.
        try:
            return method(*arguments)
        except LaneError as error:
            cause = error.__cause__
            if cause is None or isinstance(error, RlpoolError):
                raise
            if not isinstance(cause, SpecError):
                raise cause from None
            step = int(self._n_steps[error.lane]) if error.call == "step" else 0
            what, where = f"env.{error.call}: {cause.what}", Where(lane=error.lane, step=step)
            raise EnvSpecError(what, where=where, fix=cause.fix) from cause
