"""The lane contract: a batch of environments that reset and step lane by lane.

Everything that steps environments goes through it: the rollout loop, which resets lanes with seeds
and options of its choosing, and ``reset`` and ``step`` of ``VecEnv``, which sit on the same two
methods. A new kind of environments is a subclass of ``VecEnv`` with ``_reset_lanes`` and
``_step_lanes``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, MutableSequence, Sequence
from typing import Any, NoReturn

import numpy as np

from rlpool.data.specs import (
    DEFAULT_OBSERVATION_KEY,
    FLAGS,
    REWARD_SPEC,
    Declaration,
    Leaf,
    Structure,
    TensorSpec,
    refuse_collisions,
)
from rlpool.data.storage import NDArray, batch_array
from rlpool.envs.columns import BadValue, Columns, Results, checked_results, fitted_rows
from rlpool.envs.info_columns import InfoColumns
from rlpool.errors import SpecError
from rlpool.machine.interrupts import ctrl_c
from rlpool.seeding import Seeding

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


class Lanes(ABC):
    """What the rollout loop and the workers need of a batch of environments, see ``VecEnv``.

    Args:
        n_lanes: Number of environments.
    """

    auto_reset = False
    is_declared = True
    steps_all_lanes = False
    seeding: Seeding = "episode"
    min_ready: int | None = None
    shares_current = False
    step_keys: Collection[str] = ()  # of observations: what a step did, besides its reward
    _widens, _prefix = False, ""  # of the observations' columns
    _columns: Columns | None = None
    _info_specs: Mapping[str, TensorSpec] = {}
    _infos: InfoColumns | None = None  # where keys of the infos are asked for
    _action_leaves: dict[str, Leaf] | None = None
    _action_dtypes: Mapping[str, np.dtype[Any]] = {}  # which actions have to fit

    def __init__(self, n_lanes: int) -> None:
        self.n_lanes = n_lanes
        self.current: dict[str, NDArray] = {}
        self.lane_in_use: MutableSequence[int] | memoryview = [0]
        self._some_lane_is_initial = False
        self._last_actions: dict[str, NDArray] = {}
        self._place_results(
            batch_array(REWARD_SPEC, n_lanes), np.zeros((len(FLAGS), n_lanes), bool)
        )

    def place(self, arrays: Mapping[str, NDArray], reward: NDArray, flags: NDArray) -> None:
        """Move ``current`` to other memory, for instance shared memory.

        Its values are lost: all lanes need a reset.

        Args:
            arrays: Observation key to array ``[n_lanes, ...]``; empty to leave observations.
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
        self._cleared = [*results.values(), *self._last_actions.values()]  # zero after a reset

    # The lane contract ---------------------------------------------------------------------

    @property
    def columns(self) -> Columns | None:
        """The columns of observations and infos, ``None`` before a first reset that shows them."""
        return self._columns

    @property
    def declaration(self) -> Declaration | None:
        """What observations and infos consist of, ``None`` while it is unknown."""
        if self._columns is None:
            return None
        return Declaration(self._columns.structure, self._info_specs)

    def declare(self, declaration: Declaration) -> Columns:
        """Adopt what other environments of the same kind have shown."""
        self._info_specs = declaration.infos
        return self._declare_structure(declaration.observation)

    @property
    def action_leaves(self) -> dict[str, Leaf] | None:
        """Keys of the actions, ``None`` if the environments declare no action space."""
        return self._action_leaves

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

    def declare_actions(self, specs: Mapping[str, TensorSpec]) -> None:
        """Fix keys, shapes and dtypes of ``last_action``; the first declaration wins.

        Args:
            specs: Action key to spec, as the environments take them.
        """
        if not self._last_actions:
            self._last_actions = self._action_arrays(specs)
            self._action_dtypes = {key: spec.dtype for key, spec in specs.items()}
            self.current |= {f"last_{key}": array for key, array in self._last_actions.items()}
            self._cleared += self._last_actions.values()

    def forget(self) -> None:
        """Return to the state before the first reset, which failed.

        Without a space, the next reset determines the keys of observations again.
        """
        if not self.is_declared:
            self._forget_columns()

    def _declare_structure(self, structure: Structure) -> Columns:
        """Make columns for observations of this structure, in place of any others."""
        self._forget_columns()
        own = sorted({*self.current, "last_action"})
        self._infos = InfoColumns(self._info_specs, self.n_lanes) if self._info_specs else None
        columns = Columns(
            structure,
            DEFAULT_OBSERVATION_KEY,
            self.n_lanes,
            widens=self._widens,
            prefix=self._prefix,
            others=self._infos.columns if self._infos is not None else (),
        )
        observed, asked = list(columns.observed), list(self._info_specs)
        refuse_collisions({"rlpool": own, "the observation": observed, "info_keys": asked})
        self._columns = columns
        self.current = {**columns.arrays, **self.current}
        return columns

    def _forget_columns(self) -> None:
        for key in self._columns.leaves if self._columns is not None else ():
            del self.current[key]
        self._columns = None

    def _action_arrays(self, specs: Mapping[str, TensorSpec]) -> dict[str, NDArray]:
        """Arrays for the last actions."""
        return {key: batch_array(spec, self.n_lanes) for key, spec in specs.items()}

    def announce_episodes(  # noqa: B027  (optional)
        self, seeds: Sequence[int], env_info: Mapping[str, NDArray]
    ) -> None:
        """Announce the next resets: episode *i* in lane *i* % n_lanes.

        This is a hint. Episodes may be cancelled, and other resets may come instead.

        Args:
            seeds: Seed of each episode.
            env_info: ``[len(seeds), ...]`` per key, one row per episode.
        """

    def seed_used(self, lane: int) -> int | None:
        """The seed of a lane's episode, if it differs from the one that was passed to reset."""
        return None

    def report_failures(self) -> None:  # noqa: B027  (optional)
        """Raise whatever environments raise: who calls this decides what becomes of an episode."""

    def begin_anew(self) -> None:  # noqa: B027  (optional)
        """Let the next ``reset_lanes`` reset all lanes, with its first seed and its options.

        That is how lanes begin which cannot be reset one by one: without it ``reset_lanes`` lets
        lanes begin the episodes at whose start they are, see ``ready_lanes``.
        """

    def ready_lanes(self, lanes: Sequence[int]) -> Sequence[int]:
        """Those of some lanes that can begin an episode: by a reset, or by themselves."""
        return lanes

    def advance(self) -> bool:
        """Step lanes that run nothing, until some restart; False if that is no use."""
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
        self._reset_lanes(lanes, seeds, options)
        self.begin_lanes(lanes)

    def begin_lanes(self, lanes: Sequence[int]) -> None:
        """Let lanes be at the start of an episode, whatever they show."""
        for lane in lanes:
            for array in self._cleared:
                array[lane] = 0
            self._initial_state[lane] = True
        self._some_lane_is_initial = True

    def truncate_lanes(self, lanes: Sequence[int], actions: Mapping[str, NDArray]) -> None:
        """Let lanes make a last step, in which the environments do nothing.

        They show what they showed before, and what the step did, such as its reward, is 0.

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
            actions: Action key to array ``[n_lanes, ...]``; only the rows of ``lanes`` are read.

        Returns:
            The lanes whose episode ended with this step.

        Raises:
            LaneError: If an environment raises or returns an invalid value, or an action does not
                fit the dtype in which the environments or trajectories have it.
        """
        for key, dtype in self._action_dtypes.items():
            if key in actions and actions[key].dtype is not dtype:
                self._refuse_unfit(key, actions[key], lanes)
        results = rewards, terminated, truncated = self._step_lanes(lanes, actions)
        # What nearly every environment returns, and float32 holds rewards if it holds their norm;
        # anything else is converted, or refused, one by one.
        if not (
            type(rewards) is tuple
            and _REWARDS.issuperset(map(type, rewards))
            and _FLAGS.issuperset(map(type, terminated))
            and _FLAGS.issuperset(map(type, truncated))
            and math.hypot(*rewards) < _LARGEST
        ):
            try:
                rewards, terminated, truncated = checked_results(lanes, results)
            except BadValue as error:
                self._fail("step", error)
        all_step = len(lanes) == self.n_lanes
        rows = _ALL if all_step else list(lanes)
        self._reward[rows] = rewards
        for key, array in self._last_actions.items():
            array[rows] = actions[key][rows]
        if self._some_lane_is_initial:
            self._initial_state[rows] = False
            self._some_lane_is_initial = not all_step
        ended: list[int] = []
        if isinstance(terminated, np.ndarray) and isinstance(truncated, np.ndarray):
            ends = np.flatnonzero(terminated | truncated).tolist()
        elif any(terminated) or any(truncated):
            flags = zip(terminated, truncated, strict=True)
            ends = [row for row, (one, other) in enumerate(flags) if one or other]
        else:
            return ended
        is_terminated, is_truncated, is_done, _ = self.flags
        for row in ends:
            lane = lanes[row]
            is_terminated[lane], is_truncated[lane] = terminated[row], truncated[row]
            is_done[lane] = True
            ended.append(lane)
        if ended and self._infos is not None:
            self._infos.note_end()
        return ended

    def _refuse_unfit(self, key: str, values: NDArray, lanes: Sequence[int]) -> None:
        """Raise unless actions fit the dtype in which the environments have them."""
        try:
            fitted_rows(f"the action {key!r}", values, lanes, self._action_dtypes[key])
        except SpecError as error:
            self._fail("step", error)

    def step_some(
        self,
        min_ready: int = 1,
        lanes: Sequence[int] = (),
        actions: Mapping[str, NDArray] | None = None,
    ) -> list[int]:
        """Start steps of some lanes, and return the lanes that have finished theirs.

        Args:
            min_ready: Wait for this many of the stepping lanes, or for all if they are fewer.
            lanes: Ascending numbers of lanes to step; none of them may be stepping.
            actions: Their actions, as for ``step_lanes``.

        Returns:
            Lanes that have finished their step, ascending. Environments in this process finish
            within the call, so these are ``lanes``.
        """
        if lanes:
            self.step_lanes(lanes, actions or {})
        return list(lanes)

    def _fail(self, call: str, error: BaseException) -> NoReturn:
        """Raise an environment's exception as a ``LaneError``."""
        if isinstance(error, ctrl_c()):
            raise error
        lane = error.lane if isinstance(error, BadValue) else self.lane_in_use[0]
        raise LaneError(lane, call) from error
