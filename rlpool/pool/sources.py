"""Values that are to be added: where they lie, and how they are compared, without a copy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlpool.memory.storage import Array

_WORDS = tuple(map(np.dtype, (np.uint64, np.uint32, np.uint16, np.uint8)))


class Source(NamedTuple):
    """Values of a key, one per transition: some rows of an array."""

    array: Array
    rows: Array

    def part(self, places: slice | Array) -> Source:
        """Some of the values, no copy."""
        return Source(self.array, self.rows[places])

    def values(self, out: Array | None = None) -> Array:
        """The values ``[n, ...]``, copied to an array or a new one."""
        # Clipped because that is faster than "raise", which makes a copy of the target.
        values: Array = self.array.take(self.rows, 0, out, "clip")
        return values


def widest_words(array: Array) -> Array:
    """An array whose last axis lies in one piece, as the widest words that this axis is made of.

    Bits are to be compared, as NaN is not equal to itself; the widest words take the least time.
    """
    n_bytes = array.shape[-1] * array.itemsize
    return array.view(next(word for word in _WORDS if n_bytes % word.itemsize == 0))
