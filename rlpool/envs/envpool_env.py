"""EnvPool's vector environments as lanes, in step or asynchronous."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils import _pytree as pytree

from rlpool.envs.columns import Results, as_array
from rlpool.envs.envpool_lanes import EnvPoolLanes, is_asynchronous
from rlpool.envs.info_keys import InfoKeys
from rlpool.envs.vec_env import Options
from rlpool.envs.vector_gym_env import VectorGymEnv
from rlpool.errors import SpecError, UsageError
from rlpool.machine.arguments import names_arguments
from rlpool.memory.storage import Array


class EnvPoolEnv(VectorGymEnv):
    """What ``envpool.make(..., env_type="gymnasium")`` returns, one lane per environment.

    EnvPool takes its seed when it is made and never again, so ``seeding`` is ``"stream"``: see
    ``VectorGymEnv``. Make it with the ``seed`` that ``create_env`` gets. Lanes restart by
    themselves; the steps in which they do are not in the data.

    With ``batch_size < num_envs`` it is asynchronous: a slow environment does not hold up the
    others. Which lanes step how often between their episodes depends on timing then, so that no
    data can be reproduced: ``info["reproducible"]`` is False.

    Args:
        pool: The environments. This object closes them.
        auto_reset: Whether lanes of a ``Batcher`` or of ``step`` restart on their own. Not with an
            asynchronous pool.
        max_episode_steps: Truncate episodes after this many steps, see ``VectorGymEnv``; a limit
            given to ``envpool.make`` costs less.
        keep_float64: Store float64 values as float64, see ``VectorGymEnv``.
        info_keys: Keys of the infos that become keys of a step, such as ``["lives"]``, see
            ``GymEnv``. Those of ``players`` cannot be asked for.

    Raises:
        SpecError: For anything else, for actions that are not one array, for an asynchronous pool
            with ``auto_reset``, or whose ``batch_size`` does not divide its ``num_envs``.

    Example:
        >>> import envpool
        >>> def create_env(seed):
        ...     return EnvPoolEnv(
        ...         envpool.make("CartPole-v1", env_type="gymnasium", num_envs=8, seed=seed)
        ...     )
        >>> evaluate(create_agent(), create_env, n_episodes=8).returns.shape
        torch.Size([8])
    """

    def __new__(cls, pool: Any = None, **options: Any) -> EnvPoolEnv:
        """An ``AsyncEnvPoolEnv``, if the pool is asynchronous."""
        return super().__new__(AsyncEnvPoolEnv if is_asynchronous(pool) else cls)

    @names_arguments
    def __init__(
        self,
        pool: Any,
        *,
        auto_reset: bool = False,
        max_episode_steps: int | None = None,
        keep_float64: bool = False,
        info_keys: InfoKeys = None,
    ) -> None:
        super().__init__(
            EnvPoolLanes(pool),
            seeding="stream",
            auto_reset=auto_reset,
            max_episode_steps=max_episode_steps,
            keep_float64=keep_float64,
            info_keys=info_keys,
        )


class AsyncEnvPoolEnv(EnvPoolEnv):
    """An ``EnvPoolEnv`` whose pool steps ``batch_size`` of its lanes at a time.

    Args:
        pool: The environments.
        **options: The other arguments of ``EnvPoolEnv``.
    """

    min_ready: int

    def __init__(self, pool: Any, **options: Any) -> None:
        super().__init__(pool, **options)
        n_lanes, batch_size = self.n_lanes, pool.config["batch_size"]
        if self.auto_reset or n_lanes % batch_size:
            raise SpecError(
                f"an asynchronous pool of {n_lanes} environments in batches of {batch_size}"
                + (" cannot restart lanes within windows" if self.auto_reset else ""),
                fix="leave out batch_size, or let it divide num_envs, without auto_reset",
            )
        self.min_ready, self.depends_on_timing = batch_size, True
        self._flying = np.zeros(n_lanes, bool)  # lanes whose step is not received
        self._received: set[int] = set()  # lanes of episodes whose step nobody was told of
        self._results = np.zeros((3, n_lanes))
        self._sent: dict[str, Array] = {}  # each lane's last action

    def step_some(
        self,
        min_ready: int = 1,
        lanes: Sequence[int] = (),
        actions: Mapping[str, Array] | None = None,
    ) -> list[int]:
        """See ``VecEnv.step_some``; ``min_ready`` is the pool's ``batch_size``."""
        try:
            self._send(lanes, actions or {})
            while not self._received and (self._flying & self._in_episode).any():
                self._receive()
        except BaseException as error:
            self._fail("step", error)
        ready = sorted(self._received)
        if ready:
            self.step_lanes(ready, self._sent)
        return ready

    def _step_lanes(self, lanes: Sequence[int], actions: Mapping[str, Array]) -> Results:
        rows = np.asarray(lanes, np.int64)
        self.lane_in_use[0] = lanes[0] if lanes else 0
        try:
            self._send([lane for lane in lanes if lane not in self._received], actions)
            if not lanes:
                self._receive()  # until some lane restarts
            while self._flying[rows].any():
                self._receive()
            if lanes:
                self._write(lanes, self._shown, self._shown_infos)
        except BaseException as error:
            self._fail("step", error)
        self._received.difference_update(lanes)
        rewards, *flags = self._results[:, rows]
        terminated, truncated = (flag.astype(bool) for flag in flags)
        self._in_episode[rows] = ~(terminated | truncated)
        return rewards, terminated, truncated

    def _send(self, lanes: Sequence[int], actions: Mapping[str, Array]) -> None:
        """Start steps of lanes."""
        if not lanes:
            return
        rows = list(lanes)
        if not self._sent:
            self._sent = {key: np.array(array) for key, array in actions.items()}
        for key, array in self._sent.items():
            array[rows] = actions[key][rows]
        self._post(rows)

    def _post(self, lanes: list[int]) -> None:
        parts = [
            np.array(self._sent[key][lanes], leaf.spec.dtype)
            for key, leaf in self._native_actions.items()
        ]
        self.vector_env.send(self._nest_action(parts), lanes)
        self._flying[lanes], self._at_start[lanes] = True, False

    def _receive(self, *, drains: bool = False) -> None:
        """Wait for ``batch_size`` lanes, some of which may have to step on unseen for that.

        Args:
            drains: Whether no others are to start a step.
        """
        idle = ~self._flying & ~self._in_episode
        idle[list(self._received)] = False
        stepping_on = np.flatnonzero(idle & ~self._at_start).tolist()  # until they restart
        n_missing = self.min_ready - int(self._flying.sum())
        n_more = n_missing if drains else max(n_missing, len(stepping_on))
        more = [*stepping_on, *np.flatnonzero(idle & self._at_start).tolist()][: max(0, n_more)]
        if more:
            self._post(more)
        if self._flying.sum() < self.min_ready:
            raise UsageError(
                f"fewer than batch_size={self.min_ready} lanes step",
                fix="step all lanes whose episodes go on together",
            )
        rows, observation, *results, infos = self.vector_env.receive()
        old, new = map(pytree.tree_leaves, ((self._shown, self._shown_infos), (observation, infos)))
        for shown, values in zip(old, new, strict=True):
            shown[rows] = as_array(values)
        self._results[:, rows] = results
        self._flying[rows] = False
        self._at_start[rows] = self._has_ended[rows]
        self._has_ended[rows] = self._results[1:, rows].any(0)
        self._elapsed[rows] += 1
        if self._limit is not None:
            self._results[2, rows] += self._elapsed[rows] >= self._limit
        self._received.update(rows[self._in_episode[rows]].tolist())

    def _reset_all(self, seed: int, number: int, options: Options) -> None:
        self._in_episode[:] = False
        self._received.clear()
        while self._flying.any():
            self._receive(drains=True)
        super()._reset_all(seed, number, options)
