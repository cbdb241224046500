"""Which episode a lane will run next, for a worker that was told beforehand."""

from __future__ import annotations

import numpy as np

from rlpool.envs.vec_env import Options
from rlpool.manager.env_messages import Announce
from rlpool.memory.storage import Array


class EpisodesAhead:
    """Announced episodes of a worker's lanes.

    A lane that begins one of them has the next one of its row ahead; one that begins any other
    episode has none.

    Args:
        first_lane: Number of the worker's first lane.
        message: The announcement, ``None`` if there was none.
    """

    def __init__(self, first_lane: int, message: Announce | None = None) -> None:
        self._message = message
        self._rows: dict[int, Array] = {}  # lane: rows of the announcement
        self._next: dict[int, int] = {}  # lane: which of those comes next
        if message is not None:
            lanes = message.numbers % message.stride - first_lane
            self._rows = {int(lane): np.flatnonzero(lanes == lane) for lane in np.unique(lanes)}

    def note_begin(self, lane: int, seed: int) -> None:
        """Take note that a lane begins the episode with this seed."""
        self._next.pop(lane, None)
        if self._message is not None and lane in self._rows:
            found = np.flatnonzero(self._message.seeds[self._rows[lane]] == seed)
            if found.size:
                self._next[lane] = int(found[0]) + 1

    def next(self, lane: int) -> tuple[int, int, Options] | None:
        """Number, seed and options of a lane's next episode, each once; ``None`` if unknown."""
        place = self._next.get(lane)
        if self._message is None or place is None or place >= len(self._rows[lane]):
            return None
        self._next[lane] = place + 1
        row = int(self._rows[lane][place])
        return (
            int(self._message.numbers[row]),
            int(self._message.seeds[row]),
            options_of_row(self._message, row),
        )


def options_of_row(message: Announce, row: int) -> Options:
    """Options of one episode, as the plans make them."""
    if not message.env_info:
        return None
    return {key: column[row].tolist() for key, column in message.env_info.items()}
