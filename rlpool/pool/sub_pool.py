"""The contents of sub-pools, and their rules for dropping transitions.

A sub-pool is a window over the stream of all transitions ever added to it. They are numbered in
order, number ``i`` is in row ``(i - origin) % n_rows`` of the sub-pool, and only the oldest are
dropped: the numbers ``oldest`` and ``next`` determine the contents. Adding and dropping do not move
transitions. After ``clear``, the next number becomes the ``origin``, so that rows already in use
are used first. A sub-pool may have a few more rows than transitions, so that the rows before the
oldest one can still be read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from rlpool.data.storage import NDArray
from rlpool.errors import SpecError
from rlpool.machine.arguments import whole_number


@dataclass(frozen=True)
class WindowRules:
    """The rules by which a sub-pool drops transitions after each addition; see ``Pool``."""

    window_size: int | None = None
    clearing_freq: int | None = None
    window_size_: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                object.__setattr__(self, name, whole_number(name, value, 1))
        if (self.clearing_freq is None) != (self.window_size_ is None):
            raise SpecError(
                f"clearing_freq is {self.clearing_freq}, window_size_ is {self.window_size_}",
                fix="give both, or neither",
            )

    def length_after(self, capacity: int, length: int, n_before: int, n_added: int) -> int:
        """Return the length of a sub-pool after additions one by one.

        Computed from one clearing to the next, not one by one.

        Args:
            capacity: Its capacity.
            length: Its length before.
            n_before: Number of earlier additions.
            n_added: Number of additions.
        """
        kept = min(self.window_size or capacity, capacity)
        freq = self.clearing_freq
        while n_added:
            n = min(n_added, freq - n_before % freq) if freq else n_added
            is_clearing = freq is not None and (n_before + n) % freq == 0
            length += n - is_clearing
            if length > capacity:
                # After the first overflow, the length cycles: kept, ..., capacity, kept.
                length = kept + (length - capacity - 1) % (capacity + 1 - kept)
            if is_clearing:  # before its last transition is compared with the capacity
                length = max(0, length + 1 - (self.window_size_ or 0))
            n_before, n_added = n_before + n, n_added - n
        return length


class SubPool:
    """The window of one sub-pool.

    Args:
        offset: Its first row in the store.
        capacity: Maximum number of transitions.
        n_rows: Number of rows.
        numbers: ``oldest``, ``next`` and ``origin``.
    """

    def __init__(self, offset: int, capacity: int, n_rows: int, numbers: memoryview) -> None:
        self.offset = offset
        self.capacity = capacity
        self.n_rows = n_rows
        self.numbers = numbers

    @property
    def oldest(self) -> int:
        """Number of its oldest transition."""
        return int(self.numbers[0])

    @property
    def next(self) -> int:
        """Number of the next transition to be added."""
        return int(self.numbers[1])

    @property
    def origin(self) -> int:
        """Number of the transition in the first row."""
        return int(self.numbers[2])

    def __len__(self) -> int:
        return max(0, self.next - self.oldest)

    def place(self, number: int) -> int:
        """Return the row of a transition, counted from the sub-pool's first row."""
        return (number - self.origin) % self.n_rows

    def slices(self, start: int, stop: int) -> list[slice]:
        """Return the rows of transitions ``start`` to ``stop``, at most two slices of the store."""
        if start >= stop:
            return []
        first, end = self.offset + self.place(start), self.offset + self.n_rows
        last = first + stop - start
        if last <= end:
            return [slice(first, last)]
        return [slice(first, end), slice(self.offset, last - self.n_rows)]


class SubPools(list[SubPool]):
    """All sub-pools of a store, and the rows of their transitions.

    Args:
        pool_size: Total capacity; the first sub-pools have one more if it is not divisible.
        n: Number of sub-pools.
        n_spare: Additional rows of each sub-pool.

    Attributes:
        numbers: ``oldest``, ``next`` and ``origin`` of the sub-pools, int64 ``[n, 3]``.
    """

    def __init__(self, pool_size: int, n: int, n_spare: int = 0) -> None:
        share, rest = divmod(pool_size, n)
        capacities = share + (np.arange(n) < rest)
        self._n_rows = capacities + n_spare
        self._n_spare = n_spare
        self._offsets = np.cumsum(self._n_rows) - self._n_rows
        self.numbers = np.zeros((n, 3), np.int64)
        super().__init__(
            SubPool(int(offset), int(capacity), int(capacity) + n_spare, row.data)
            for offset, capacity, row in zip(self._offsets, capacities, self.numbers, strict=True)
        )

    @property
    def lengths(self) -> list[int]:
        """Number of transitions in each sub-pool."""
        return [len(sub_pool) for sub_pool in self]

    @property
    def n_rows(self) -> int:
        """Total number of rows."""
        return int(self._n_rows.sum())

    def readable(self) -> dict[str, slice]:
        """Return the rows of all transitions, and earlier ones that can still be read.

        Keys are the suffixes of the names of arrays in the state of a pool.
        """
        return {
            f"/{index}.{number}": rows
            for index, sub_pool in enumerate(self)
            for number, rows in enumerate(
                sub_pool.slices(
                    max(sub_pool.origin, sub_pool.oldest - self._n_spare), sub_pool.next
                )
            )
        }

    def rows(self) -> NDArray:
        """Return the rows of all transitions, int64 ``[n]``, sub-pool by sub-pool, oldest first."""
        slices = (rows for each in self for rows in each.slices(each.oldest, each.next))
        ranges = (np.arange(rows.start, rows.stop) for rows in slices)
        return np.concatenate([np.zeros(0, np.int64), *ranges])

    def rows_of(self, index: NDArray, numbers: NDArray) -> NDArray:
        """Return the rows of transitions, given by sub-pool and number."""
        places = (numbers - self.numbers[index, 2]) % self._n_rows[index]
        rows: NDArray = self._offsets[index] + places
        return rows

    def find(self, names: NDArray) -> tuple[NDArray, NDArray]:
        """Return the rows of transitions, and whether they are still stored.

        Args:
            names: ``number * len(self) + sub-pool`` of each.
        """
        numbers, index = np.divmod(names, len(self))
        oldest, after, _ = self.numbers[index].T
        return self.rows_of(index, numbers), (oldest <= numbers) & (numbers < after)

    def ahead(self, rows: NDArray, n_steps: int | NDArray) -> NDArray:
        """Return the rows ``n_steps`` after others in the same sub-pool."""
        if len(self) == 1:
            return rows + n_steps
        index = self._index(rows)
        offsets = self._offsets[index]
        after: NDArray = offsets + (rows - offsets + n_steps) % self._n_rows[index]
        return after

    def transitions_at(self, rows: NDArray) -> tuple[NDArray, NDArray]:
        """Return the transitions at some rows, by sub-pool and number."""
        index = self._index(rows)
        # The transition in a row is less than ``n_rows`` before the next one.
        newest = self.numbers[index, 1] - 1
        return index, newest - (self.rows_of(index, newest) - rows) % self._n_rows[index]

    def _index(self, rows: NDArray) -> NDArray:
        """Return the sub-pool of each row."""
        return np.searchsorted(self._offsets, rows, side="right") - 1


def routes(
    sub_pools: SubPools,
    rules: WindowRules,
    sizes: Sequence[int],
    draws: Sequence[float],
) -> list[int]:
    """Choose sub-pools for successive additions, each drawn as if the previous had been made.

    The probability of a sub-pool is proportional to 1 / (its length + 1).

    Args:
        sub_pools: The sub-pools.
        rules: Their rules for dropping transitions.
        sizes: Number of transitions of each addition.
        draws: A float in [0, 1) for each addition, or an int to choose the sub-pool.
    """
    lengths, added = sub_pools.lengths, [sub_pool.next for sub_pool in sub_pools]
    chosen = []
    for size, draw in zip(sizes, draws, strict=True):
        index = int(draw)
        if not isinstance(draw, int):
            ends = list(accumulate(1.0 / (length + 1.0) for length in lengths))
            index = min(bisect_right(ends, draw * ends[-1]), len(ends) - 1)
        capacity = sub_pools[index].capacity
        lengths[index] = rules.length_after(capacity, lengths[index], added[index], size)
        added[index] += size
        chosen.append(index)
    return chosen
