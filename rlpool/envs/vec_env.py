"""A batch of environments that reset and step lane by lane, with rlstructures' interface."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, MutableSequence, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from rlpool.data.array_view import as_numpy
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.infos import Info, info_rows, options_of
from rlpool.data.rows import kind
from rlpool.data.specs import (
    DEFAULT_OBSERVATION_KEY,
    FLAGS,
    REWARD_SPEC,
    Declaration,
    Leaf,
    Structure,
    TensorSpec,
    action_fix,
    is_action,
    narrowed,
    refuse_collisions,
)
from rlpool.data.storage import NDArray, batch_array
from rlpool.envs.columns import BadValue, Choices, Columns, Results, checked_results, fitted_rows
from rlpool.envs.info_keys import InfoColumns
from rlpool.errors import EnvSpecError, RlpoolError, SpecError, UsageError, Where
from rlpool.machine.interrupts import ctrl_c
from rlpool.seeding import LaneSeeds, Seeding, root_from

Observed = tuple[DictTensor, torch.Tensor]
"""An observation ``[n, ...]`` and the indices of its environments, int64 ``[n]``."""

Options = Mapping[str, Any] | None
"""One row of ``env_info`` as Python values: the ``options`` of a reset."""

_ALL: Any = slice(None)
_FLAGS = frozenset([bool, np.bool_])
_REWARDS = frozenset([float, np.float64, np.float32])
_LARGEST = float(np.finfo(np.float32).max)


class LaneError(Exception):
    """An environment failed; ``__cause__`` is its exception.

    Attributes:
        lane: The lane.
        call: ``"reset"`` or ``"step"``.
    """

    def __init__(self, lane: int, call: str) -> None:
        super().__init__(f"lane {lane} failed in {call}")
        self.lane = lane
        self.call = call


class VecEnv(ABC):
    """A batch of environments.

    ``reset_lanes`` and ``step_lanes`` are the interface of the rollout loop, which resets lanes
    with its own seeds and options. ``reset`` and ``step``, the interface of rlstructures, are built
    on them. Subclasses define ``_reset_lanes`` and ``_step_lanes``.

    Args:
        n_lanes: Number of environments.
        seed: Root of the seeds of ``reset(env_info)``. The rollout loop uses its own seeds.

    Attributes:
        n_lanes: Number of environments.
        auto_reset: Whether lanes of a ``Batcher`` or of ``step`` restart automatically.
        current: Arrays ``[n_lanes, ...]`` by key, overwritten in place: each lane's current
            observation, the requested keys of its info, ``reward``, ``terminated``, ``truncated``,
            ``done``, ``initial_state`` (bool), and ``last_action`` (or ``last_action/...``).
            Observations and infos are present after the first reset, last actions after
            ``declare_actions``.
        flags: bool ``[4, n_lanes]``. Its rows are ``terminated``, ``truncated``, ``done`` and
            ``initial_state`` of ``current``, as views.
        columns: The columns of observations and infos, ``None`` until a first reset if that
            determines them.
        action_leaves: Keys of the actions, ``None`` without an action space.
        is_declared: Whether spaces declare the observations; else the first reset determines them.
        steps_all_lanes: Whether every step steps all lanes. The steps of an omitted lane are
            dropped, and it needs a reset before it can be stepped again.
        seeding: Unit of seeding, as in ``VectorGymEnv``.
        min_ready: Number of lanes the rollout loop waits for at a time, ``None`` for all.
        max_steps: Number of steps after which the loop truncates an episode, in addition to the
            environments' own limits.
        description: Class, wrappers etc. of environments in other processes, ``None`` for those in
            this process.
        state_keepers: Fixes for wrappers that are known to carry state from one episode to the
            next, by their name.
        seen_keys: One element, a bit for each key of ``info_keys`` that has occurred in an info.
        shares_current: Whether ``current`` has other users, so that the agent gets a copy.
        lane_in_use: One element: the lane whose environment is running, used to report the death of
            this process.

    Example:
        >>> env = create_env(seed=0)
        >>> isinstance(env, VecEnv), env.n_lanes
        (True, 2)
        >>> observation, lanes = env.reset()
        >>> list(observation)
        ['frame', 'reward', 'terminated', 'truncated', 'done', 'initial_state', 'last_action']
    """

    auto_reset = False
    is_declared = True
    steps_all_lanes = False
    seeding: Seeding = "episode"
    min_ready: int | None = None
    shares_current = False
    max_steps: int | None = None
    state_keepers: Mapping[str, str] = {}
    description: Mapping[str, Any] | None = None
    step_keys: Collection[str] = ()  # observations that are results of a step, like its reward
    _key = DEFAULT_OBSERVATION_KEY  # of the observations' columns
    columns: Columns | None = None
    _keep_float64: bool | Collection[str] = True  # of declared observations
    _info_specs: Mapping[str, TensorSpec] = {}
    _infos: InfoColumns | None = None  # if keys of the infos are requested
    action_leaves: dict[str, Leaf] | None = None
    _choices: Sequence[Choices] = ()  # of discrete actions
    _action_dtypes: Mapping[str, np.dtype[Any]] = {}  # dtypes that actions have to fit

    def __init__(self, n_lanes: int, seed: int | Sequence[int] | None = None) -> None:
        self.n_lanes = n_lanes
        self.current: dict[str, NDArray] = {}
        self.lane_in_use: MutableSequence[int] | memoryview = [0]
        self.seen_keys: MutableSequence[int] | memoryview = [0]
        self._some_lane_is_initial = False
        self._last_actions: dict[str, NDArray] = {}
        self._place_results(
            batch_array(REWARD_SPEC, n_lanes), np.zeros((len(FLAGS), n_lanes), bool)
        )
        self._all_lanes = list(range(n_lanes))
        self._running: list[int] = []
        self._root = root_from(seed)
        self._seeds = LaneSeeds(self._root, 0)
        self._numbers = [-1] * n_lanes  # of each lane's episode, for its seed
        self._env_options: list[Options] = [None] * n_lanes

    def place(self, arrays: Mapping[str, NDArray], reward: NDArray, flags: NDArray) -> None:
        """Move ``current`` to other memory, for example shared memory.

        Its values are discarded: all lanes need a reset.

        Args:
            arrays: Arrays ``[n_lanes, ...]`` by observation key; empty to keep those in use.
            reward: float32 ``[n_lanes]``.
            flags: bool ``[4, n_lanes]``.
        """
        if self.columns is not None and arrays:
            self.columns.place(arrays)
            self.current.update(self.columns.arrays)
        self._place_results(reward, flags)

    def _place_results(self, reward: NDArray, flags: NDArray) -> None:
        self.flags = flags
        results = {"reward": reward, **dict(zip(FLAGS, flags, strict=True))}
        self.current |= results
        self._reward = reward
        self._initial_state = results["initial_state"]
        self._cleared = [*results.values(), *self._last_actions.values()]  # zeroed by a reset

    # The lane contract ---------------------------------------------------------------------

    @property
    def info_keys(self) -> list[str]:
        """Keys of infos that are keys of a step."""
        return list(self._info_specs)

    @property
    def declaration(self) -> Declaration | None:
        """The structure of observations and infos, ``None`` while it is unknown."""
        columns = self.columns
        return None if columns is None else Declaration(columns.structure, self._info_specs)

    def declare(self, declaration: Declaration) -> Columns:
        """Adopt the structures found by other environments of the same kind."""
        self._info_specs = declaration.infos
        return self._declare_structure(declaration.observation)

    @abstractmethod
    def _reset_lanes(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> None:
        """Reset lanes and write their observations and infos to ``columns``."""

    @abstractmethod
    def _step_lanes(self, lanes: Sequence[int], actions: Mapping[str, NDArray]) -> Results:
        """Step lanes, write observations and infos; returns rewards, terminated, truncated."""

    def close(self) -> None:  # noqa: B027  (optional)
        """Close the environments."""

    def outermost(self) -> Any:
        """Return the first environment, or the vector environment, with its wrappers."""
        return self

    def declare_actions(self, specs: Mapping[str, TensorSpec]) -> None:
        """Fix keys, shapes and dtypes of ``last_action``; the first declaration wins.

        Args:
            specs: Specs of the environments' actions by key.
        """
        if not self._last_actions:
            self._last_actions = {
                key: batch_array(spec, self.n_lanes) for key, spec in specs.items()
            }
            self._action_dtypes = {key: spec.dtype for key, spec in specs.items()}
            self.current |= {f"last_{key}": array for key, array in self._last_actions.items()}
            self._cleared += self._last_actions.values()

    def forget(self) -> None:
        """Return to the state before a failed first reset.

        Without a space, the next reset determines the keys of observations again.
        """
        if not self.is_declared:
            self._forget_columns()

    def _declare_structure(self, structure: Structure) -> Columns:
        """Create columns for observations of this structure, replacing any others."""
        self._forget_columns()
        structure = narrowed(structure, self._keep_float64)
        own = sorted({*self.current, "last_action"})
        self._infos = InfoColumns(self._info_specs, self.n_lanes) if self._info_specs else None
        others = self._infos.columns if self._infos is not None else ()
        columns = Columns(structure, self._key, self.n_lanes, others)
        observed, asked = list(columns.observed), list(self._info_specs)
        refuse_collisions({"rlpool": own, "the observation": observed, "info_keys": asked})
        self.columns = columns
        self.current = {**columns.arrays, **self.current}
        return columns

    def _forget_columns(self) -> None:
        for key in self.columns.leaves if self.columns is not None else ():
            del self.current[key]
        self.columns = None

    def seed_used(self, lane: int) -> int | None:
        """Return the seed of a lane's episode if it differs from the one passed to reset."""
        return None

    def report_failures(self) -> None:  # noqa: B027  (optional)
        """Let environment errors propagate: the caller decides the fate of an episode."""

    def watch_infos(self, seen: MutableSequence[int] | memoryview) -> None:
        """Set a bit of one element for each key of ``info_keys`` that occurs in an info."""
        self.seen_keys = seen

    def reset_all_next(self) -> None:  # noqa: B027  (optional)
        """Make the next ``reset_lanes`` reset all lanes, with its first seed and its options.

        For lanes that cannot be reset one by one. Without it, their ``reset_lanes`` only begins
        episodes of lanes that are at the start of one (``ready_lanes``).
        """

    def ready_lanes(self, lanes: Sequence[int]) -> Sequence[int]:
        """Return the lanes that can begin an episode, by a reset or automatically."""
        return lanes

    def advance(self) -> bool:
        """Step idle lanes until some restart; returns False if that is impossible."""
        return False

    def reset_lanes(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> None:
        """Start an episode on some lanes.

        Args:
            lanes: Ascending lane numbers.
            seeds: One seed per lane.
            options: One dict per lane, or ``None`` for none.

        Raises:
            LaneError: If an environment raises or returns an invalid value.
        """
        try:
            self._reset_lanes(lanes, seeds, options)
        except BaseException as error:
            self._fail("reset", error)
        self.begin_lanes(lanes)

    def begin_lanes(self, lanes: Sequence[int]) -> None:
        """Mark lanes as at the start of an episode, keeping their observations."""
        for lane in lanes:
            for array in self._cleared:
                array[lane] = 0
            self._initial_state[lane] = True
        self._some_lane_is_initial = True

    def truncate_lanes(self, lanes: Sequence[int], actions: Mapping[str, NDArray]) -> None:
        """Truncate episodes by a last step without the environments.

        Observations are kept; results of the step, such as its reward, are 0.

        Args:
            lanes: Lane numbers.
            actions: As for ``step_lanes``.
        """
        rows = list(lanes)
        for key, array in self._last_actions.items():
            array[rows] = actions[key][rows]
        for key in ("reward", "initial_state", "terminated", *self.step_keys):
            self.current[key][rows] = 0
        self.current["truncated"][rows] = self.current["done"][rows] = True

    def step_lanes(self, lanes: Sequence[int], actions: Mapping[str, NDArray]) -> list[int]:
        """Step some lanes.

        Args:
            lanes: Ascending lane numbers.
            actions: Arrays ``[n_lanes, ...]`` by action key; only the rows of ``lanes`` are read.

        Returns:
            The lanes whose episode ended with this step.

        Raises:
            LaneError: If an environment raises or returns an invalid value, or an action does not
                fit its dtype in the environments or trajectories.
        """
        try:
            for key, dtype in self._action_dtypes.items():
                if key in actions and actions[key].dtype is not dtype:
                    fitted_rows(f"the action {key!r}", actions[key], lanes, dtype)
            for choices in self._choices:
                chosen = actions[choices.key]
                if choices.allowed:
                    are_valid = choices.allowed.issuperset(chosen.tolist())
                else:
                    are_valid = bool(
                        ((chosen - choices.first).view(np.uint64) < choices.size).all()
                    )
                if not are_valid:
                    choices.refuse(chosen, lanes)  # other rows may hold any value
            results = rewards, terminated, truncated = self._step_lanes(lanes, actions)
            # The fast path for valid results: rewards fit float32 if their norm does. Others are
            # converted or refused one by one.
            if not (
                type(rewards) is tuple
                and _REWARDS.issuperset(map(type, rewards))
                and _FLAGS.issuperset(map(type, terminated))
                and _FLAGS.issuperset(map(type, truncated))
                and math.hypot(*rewards) < _LARGEST
            ):
                rewards, terminated, truncated = checked_results(lanes, results)
        except BaseException as error:
            self._fail("step", error)
        all_step = len(lanes) == self.n_lanes
        rows = _ALL if all_step else list(lanes)
        self._reward[rows] = rewards
        for key, array in self._last_actions.items():
            array[rows] = actions[key][rows]
        if self._some_lane_is_initial:
            self._initial_state[rows] = False
            self._some_lane_is_initial = not all_step
        ends: list[int] = []
        if isinstance(terminated, np.ndarray) and isinstance(truncated, np.ndarray):
            ends = np.flatnonzero(terminated | truncated).tolist()
        elif any(terminated) or any(truncated):
            flags = zip(terminated, truncated, strict=True)
            ends = [row for row, (one, other) in enumerate(flags) if one or other]
        ended = []
        for row in ends:
            ended.append(lanes[row])
            # As bools: old NumPy and torch warn about tensors.
            self.flags[:3, lanes[row]] = bool(terminated[row]), bool(truncated[row]), True
        if ended and self._infos is not None and self._infos.is_watching:
            self._infos.report_seen(self.seen_keys)
        return ended

    def step_some(
        self,
        min_ready: int = 1,
        lanes: Sequence[int] = (),
        actions: Mapping[str, NDArray] | None = None,
    ) -> list[int]:
        """Start steps of some lanes, and return the lanes that have finished theirs.

        Args:
            min_ready: Wait for this many of the stepping lanes, or for all if there are fewer.
            lanes: Ascending numbers of lanes to step; they must not be stepping.
            actions: Their actions, as for ``step_lanes``.

        Returns:
            Lanes that have finished their step, ascending. Environments in this process finish
            within the call: these are ``lanes``.
        """
        if lanes:
            self.step_lanes(lanes, actions or {})
        return list(lanes)

    def _fail(self, call: str, error: BaseException) -> NoReturn:
        """Raise an environment's exception as a ``LaneError``."""
        if isinstance(error, (LaneError, *ctrl_c())):
            raise error
        lane = error.lane if isinstance(error, BadValue) else self.lane_in_use[0]
        raise LaneError(lane, call) from error

    # The interface of rlstructures ---------------------------------------------------------

    def n_envs(self) -> int:
        """Number of environments."""
        return self.n_lanes

    def reset(self, env_info: Info = None) -> Observed:
        """Reset all environments.

        Args:
            env_info: ``[n_envs, ...]`` or empty: a ``DictTensor``, or a dict of tensors, NumPy
                arrays, lists, or numbers for all environments. Environment *n* gets row *n* as
                ``reset(options={...})``, also at automatic resets. Without it no options are
                passed, so the environment's own defaults apply.

        Returns:
            The observation ``[n_envs, ...]``, a copy, and the indices of the running
            environments, int64 ``[n_envs]``.

        Raises:
            SpecError: If a value of ``env_info`` is not numeric or has the wrong number of rows.
        """
        rows = info_rows("env_info", env_info, self.n_lanes)
        self._env_options = [options_of(rows, lane) for lane in range(self.n_lanes)]
        self._numbers = [max(self._numbers) + 1] * self.n_lanes
        self._running = []
        self.reset_all_next()
        self._restart(self._all_lanes)
        return self._observation()

    def step(self, policy_output: DictTensor) -> tuple[Observed, Observed]:
        """Step the running environments.

        Args:
            policy_output: ``action`` (or ``action/...``) with one row per running environment.

        Returns:
            ``((observation, running), (next_observation, next_running))``: the result of this
            step, and the start of the next one. Environments whose episode ended are only in the
            first, unless they restart automatically; then the second has the first observation of
            their new episode. All tensors are copies.

        Raises:
            UsageError: Before ``reset``, or if no environment is running.
            SpecError: If rows or keys do not match.
            EnvSpecError: If an environment returns an invalid value, such as a flag that is neither
                true nor false, or a finite reward that overflows float32. ``where`` has the lane.
        """
        if not self._running:
            raise UsageError("step() with no running environment", fix="call reset() first")
        actions = self._actions_of(policy_output)
        ended = self._call(self.step_lanes, self._running, actions)
        stepped = self._observation()
        self._running = [lane for lane in self._running if lane not in ended]
        if self.auto_reset:
            for lane in ended:
                self._numbers[lane] += 1
            idle = [lane for lane in self._all_lanes if lane not in self._running]
            while not self._running and not self.ready_lanes(idle):
                self._call(self.advance)
            if ready := self.ready_lanes(idle):
                self._restart(ready)
        return stepped, self._observation()

    def _restart(self, lanes: Sequence[int]) -> None:
        """Begin the lanes' next episodes."""
        seeds = [self._seeds.seed(lane, self._numbers[lane]) for lane in lanes]
        options = [self._env_options[lane] for lane in lanes]
        self._call(self.reset_lanes, lanes, seeds, options)
        if self.action_leaves is not None:
            self.declare_actions({key: leaf.spec for key, leaf in self.action_leaves.items()})
        self._running = sorted([*self._running, *lanes])

    def _observation(self) -> Observed:
        """Copy the observations of the running environments."""
        rows = np.asarray(self._running, np.int64)
        values = {key: torch.from_numpy(array[rows]) for key, array in self.current.items()}
        return DictTensor(values), torch.from_numpy(rows)

    def _actions_of(self, policy_output: Any) -> dict[str, NDArray]:
        """Convert the actions of the running environments for ``step_lanes``."""
        if not isinstance(policy_output, DictTensor):
            if not isinstance(policy_output, Mapping):
                message = f"policy_output is {kind(policy_output)}"
                raise SpecError(message, fix='pass DictTensor({"action": ...})')
            policy_output = DictTensor(policy_output)
        keys = [key for key in policy_output if is_action(key)]
        leaves = self.action_leaves
        expected = list(leaves) if leaves is not None else keys
        if not expected or sorted(keys) != sorted(expected):
            raise SpecError(f"policy_output should have the keys {expected}, got {keys}")
        actions, specs, n_running = {}, {}, len(self._running)
        for key in expected:
            values = as_numpy(policy_output[key])
            got = TensorSpec(values.shape[1:], values.dtype)
            wanted = specs[key] = got if leaves is None else leaves[key].spec
            if values.shape != (n_running, *wanted.shape):
                raise SpecError(
                    f"{key!r} should have shape {[n_running, *wanted.shape]}, one row for each "
                    f"running environment, got {list(values.shape)}",
                    fix=action_fix(got, wanted),
                )
            actions[key] = batch_array(got, self.n_lanes)
            actions[key][self._running] = values
        self.declare_actions(specs)
        return actions

    def _call(self, method: Any, *arguments: Any) -> Any:
        # Outside a batcher, the user's own exception is more helpful than the lane.
        try:
            return method(*arguments)
        except LaneError as error:
            cause = error.__cause__
            if cause is None or isinstance(error, RlpoolError):
                raise
            if not isinstance(cause, SpecError):
                raise cause from None
            message, where = f"env.{error.call}: {cause.what}", Where(lane=error.lane)
            raise EnvSpecError(message, where=where, fix=cause.fix) from cause
