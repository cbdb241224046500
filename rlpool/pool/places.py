"""Places that are taken and given back, such as rows of an array."""

from __future__ import annotations

import numpy as np

from rlpool.memory.storage import Array


class Places:
    """Hands out places of an array. Those that were given back come first.

    Args:
        capacity: Number of places.

    Attributes:
        n_used: So many from the first on are or were in use.
    """

    def __init__(self, capacity: int) -> None:
        self.n_used = 0
        self._free = np.empty(capacity, np.int32)  # a stack of the first _n_free
        self._n_free = 0

    def n_used_with(self, n: int) -> int:
        """How many will be or have been in use after taking so many."""
        return self.n_used + max(0, n - self._n_free)

    def take(self, n: int) -> Array:
        """Free places, int32 ``[n]``."""
        n_again = min(n, self._n_free)
        self._n_free -= n_again
        again = self._free[self._n_free : self._n_free + n_again]
        start, self.n_used = self.n_used, self.n_used + n - n_again
        return np.concatenate([again, np.arange(start, self.n_used, dtype=np.int32)])

    def give_back(self, places: Array) -> None:
        """Let places be taken again."""
        self._free[self._n_free : self._n_free + places.size] = places
        self._n_free += places.size

    def recount(self, is_free: Array) -> None:
        """Free the places that are said to be: bool ``[n_used]``, and no others."""
        self._n_free = 0
        self.give_back(np.flatnonzero(is_free))
