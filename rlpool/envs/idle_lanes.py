"""What lanes of a vector environment do that have no episode while others step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlpool.data.storage import NDArray
from rlpool.envs.vec_env import Options

_MOST = 1000  # steps that are recorded of an episode


class _Episode:
    """An episode as far as it has gone, and can go again.

    Args:
        lane: The lane that runs it.
        seed: Of its reset.
        options: Of its reset.

    Attributes:
        lane: As given, -1 once it is over.
        begin: Seed and options.
        n_steps: Steps that have been made.
        actions: Arrays ``[_MOST, ...]``: of these steps, and of the one being made.
    """

    def __init__(self, lane: int, seed: int, options: Options) -> None:
        self.lane, self.begin = lane, (seed, options)
        self.n_steps = 0
        self.actions: list[NDArray] = []


class IdleLanes:
    """Lanes without an episode: they rest, or repeat one that has gone well, action by action.

    That is the longest one of those recorded: the first, and others after it was too short. Lanes
    may have caught up with the lane that runs it: then they make the same step together.

    Args:
        n_lanes: Number of lanes.
        can_rest: Whether lanes can be left out of a step.

    Attributes:
        can_rest: As given.
    """

    def __init__(self, n_lanes: int, *, can_rest: bool) -> None:
        self.can_rest = can_rest
        self._follows = np.zeros(n_lanes, bool)  # lanes that repeat ``_known``
        self._begun: list[tuple[int, Options]] = [(0, None)] * n_lanes  # seed, options
        self._known = self._recorded = _Episode(-1, 0, None)
        self._wants_longer = True  # than the known one

    def note_reset(self, lanes: Sequence[int], seeds: Sequence[int], options: Options) -> None:
        """Note which episodes some lanes begin."""
        for lane, seed in zip(lanes, seeds, strict=True):
            self._begun[lane] = seed, options
        self._follows[lanes] = False
        if self.can_rest:
            self._known.begin = seeds[0], options
        elif self._recorded.lane in lanes or (self._recorded.lane < 0 and self._wants_longer):
            self._record(lanes[0])

    def _record(self, lane: int) -> None:
        self._recorded = _Episode(lane, *self._begun[lane])
        if self._known.n_steps == 0:
            self._known = self._recorded
            self._follows[:] = False

    def to_reset(self, idle: NDArray, has_ended: NDArray, elapsed: NDArray) -> list[int]:
        """Idle lanes that have to begin the episode which is repeated, before another step.

        Args:
            idle: bool ``[n_lanes]``: the idle ones.
            has_ended: bool ``[n_lanes]``: those that refuse another step.
            elapsed: int64 ``[n_lanes]``: steps since the reset of each.
        """
        needs = has_ended
        if not self.can_rest:
            lane = self._recorded.lane
            is_led = self._known is self._recorded and lane >= 0 and not idle[lane]
            if self._known.n_steps == 0 and not is_led:
                self._record(int(idle.argmin()))
                is_led = True
            is_done = self._follows & (elapsed >= self._known.n_steps + is_led)
            if np.count_nonzero(idle & is_done):
                self._wants_longer = self._known.n_steps < _MOST
            needs = has_ended | ~self._follows | is_done
        found: list[int] = np.flatnonzero(idle & needs).tolist()
        self._follows[found] = True
        return found

    def episode(self, n: int) -> tuple[list[int], Options]:
        """The seed of the episode that is repeated, ``n`` times, and its options."""
        seed, options = self._known.begin
        return [seed] * n, options

    def act(self, parts: Sequence[NDArray], idle: NDArray | None, elapsed: NDArray) -> None:
        """Record the action of one lane, and give idle lanes theirs.

        Args:
            parts: The actions of the step, ``[n_lanes, ...]`` each; changed in place.
            idle: bool ``[n_lanes]``: the idle ones, ``None`` if there are none.
            elapsed: int64 ``[n_lanes]``: steps since the reset of each.
        """
        recorded = self._recorded
        if recorded.lane >= 0:
            if not recorded.actions:
                recorded.actions = [np.empty((_MOST, *p.shape[1:]), p.dtype) for p in parts]
            for kept, part in zip(recorded.actions, parts, strict=True):
                kept[recorded.n_steps] = part[recorded.lane]
        if idle is not None:
            for kept, part in zip(self._known.actions, parts, strict=True):
                part[idle] = kept[elapsed[idle]]

    def note_step(self, lanes: Sequence[int], elapsed: NDArray, over: NDArray) -> None:
        """Note that a step has been made.

        Args:
            lanes: Those that have an episode.
            elapsed: int64 ``[n_lanes]``: steps since the reset of each.
            over: bool ``[len(lanes)]``: whose episode it has ended.
        """
        recorded = self._recorded
        if recorded.lane < 0 or recorded.lane not in lanes:
            return
        if elapsed[recorded.lane] == recorded.n_steps + 1:
            recorded.n_steps += 1
        if recorded.n_steps > self._known.n_steps:
            self._known = recorded
            self._follows[:] = False
        if over[lanes.index(recorded.lane)] or recorded.n_steps == _MOST:
            recorded.lane, self._wants_longer = -1, False
