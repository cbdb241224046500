"""Episodes that were announced to a worker, which begins them ahead of time."""

from __future__ import annotations

import numpy as np

from rlpool.data.infos import options_of
from rlpool.envs.vec_env import Options
from rlpool.manager.messages import Announce


class ComingEpisodes:
    """Announced episodes of a worker's lanes.

    A lane that begins one of them has the next one ahead; one that begins any other episode has
    none.

    Args:
        message: The announcement, ``None`` if there was none.
    """

    def __init__(self, message: Announce | None = None) -> None:
        self._message = message
        self._next: dict[int, int] = {}  # lane: index of its next episode

    def note_begin(self, lane: int, seed: int) -> None:
        """Record that a lane begins the episode with this seed."""
        self._next.pop(lane, None)
        if self._message is not None:
            found = np.flatnonzero(self._message.seeds[lane] == seed)
            if found.size:
                self._next[lane] = int(found[0]) + 1

    def next(self, lane: int) -> tuple[int, int, Options] | None:
        """Index, seed and options of a lane's next episode, each once; ``None`` if unknown."""
        index, message = self._next.get(lane), self._message
        if message is None or index is None or index >= len(message.seeds[lane]):
            return None
        self._next[lane] = index + 1
        options = options_of(message.env_info[lane], index)
        return index, int(message.seeds[lane][index]), options
