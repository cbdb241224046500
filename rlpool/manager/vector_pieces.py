"""Actions of spaces without a fixed shape: pickles that travel in pieces of one size.

A row of the shared buffer of actions has the same size for all lanes and steps, so a longer pickle
takes several steps of the manager, in all but the last of which no environment steps. All of them
are on the lanes' tapes: a worker's successor puts the same actions together again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlpool.memory.storage import Array

PIECE_BYTES = 8192
"""Size of a row, its first byte included, which says what follows."""

_ROOM = PIECE_BYTES - 1
_NOTHING, _PART, _LAST = 0, 1, 2  # values of the first byte


def in_pieces(pickles: Sequence[bytes]) -> list[Array]:
    """The rows of some lanes for the steps that it takes, uint8 ``[n_lanes, PIECE_BYTES]`` each."""
    n_steps = max(1, *(-(-len(pickled) // _ROOM) for pickled in pickles))
    steps = [np.zeros((len(pickles), PIECE_BYTES), np.uint8) for _ in range(n_steps)]
    for lane, pickled in enumerate(pickles):
        n_pieces = max(1, -(-len(pickled) // _ROOM))
        for number, step in enumerate(steps[n_steps - n_pieces :]):
            piece = np.frombuffer(pickled[number * _ROOM : (number + 1) * _ROOM], np.uint8)
            step[lane, 0] = _LAST if number == n_pieces - 1 else _PART
            step[lane, 1 : 1 + len(piece)] = piece
    return steps


class Pieces:
    """The pieces of a lane's next action that have arrived."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def joined(self, row: Array) -> bytes | None:
        """Take a row; returns the pickle, with zeros behind it, once it is complete."""
        if row[0] != _NOTHING:
            self._parts.append(row[1:].tobytes())
        if row[0] != _LAST:
            return None
        pickled, self._parts = b"".join(self._parts), []
        return pickled
