"""What lanes of a vector environment do that have no episode while others step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlpool.envs.lanes import Options
from rlpool.memory.storage import Array


class IdleLanes:
    """Lanes without an episode: they rest, or repeat one that is known to go through.

    That is the one in which a lane has come furthest, as far as it came.

    Args:
        n_lanes: Number of lanes.
        can_rest: Whether lanes can be left out of a step.

    Attributes:
        can_rest: As given.
        repeats: bool ``[n_lanes]``: lanes that repeat that episode.
    """

    def __init__(self, n_lanes: int, *, can_rest: bool) -> None:
        self.can_rest = can_rest
        self.repeats = np.zeros(n_lanes, bool)
        self._episodes: list[tuple[int, Options]] = [(0, None)] * n_lanes  # seed, options
        self._repeated: tuple[int, Options] | None = None
        self._n_steps = 1  # of that episode, which are known to go through

    def note_reset(self, lanes: Sequence[int], seeds: Sequence[int], options: Options) -> None:
        """Note which episodes some lanes begin."""
        if self._repeated is None:
            self._repeated = seeds[0], options
        for lane, seed in zip(lanes, seeds, strict=True):
            self._episodes[lane] = seed, options
        self.repeats[lanes] = False

    def to_reset(self, idle: Array, has_ended: Array, elapsed: Array) -> list[int]:
        """Idle lanes that have to begin the episode which is repeated, before another step.

        Args:
            idle: bool ``[n_lanes]``: the idle ones.
            has_ended: bool ``[n_lanes]``: those that refuse another step.
            elapsed: int64 ``[n_lanes]``: steps since the reset of each.
        """
        needs = has_ended
        if not self.can_rest:
            furthest = int(np.where(idle, 0, elapsed).argmax())
            if elapsed[furthest] > self._n_steps:
                self._n_steps = int(elapsed[furthest])
                if self._episodes[furthest] is not self._repeated:
                    self._repeated = self._episodes[furthest]
                    self.repeats[:] = False
            needs = has_ended | ~self.repeats | (elapsed >= self._n_steps)
        lanes: list[int] = np.flatnonzero(idle & needs).tolist()
        return lanes

    def episode(self, n: int) -> tuple[list[int], Options]:
        """The seed of the episode that is repeated, ``n`` times, and its options."""
        seed, options = self._repeated or (0, None)
        return [seed] * n, options
