"""Which transitions a sub-pool holds, and when it drops some.

A sub-pool is a window over the stream of all transitions that were ever added to it. They are
numbered as they come, number ``i`` lies in row ``(i - origin) % n_rows`` of the sub-pool, and only
the oldest are ever dropped: two numbers, ``oldest`` and ``next``, say what a sub-pool holds.
Nothing moves when something is added or dropped. When all is cleared, the next one becomes the
``origin``: its row has been in use already. A sub-pool may have some more rows than it holds
transitions, so that the rows before the oldest one can still be read.
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
    """When a sub-pool drops transitions, after each one that is added; see ``Pool``."""

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
        """Transitions that a sub-pool holds after some were added one by one.

        Computed from one clearing to the next, not one by one.

        Args:
            capacity: The most that it holds.
            length: Transitions in it.
            n_before: Transitions ever added before.
            n_added: Transitions added.
        """
        kept = min(self.window_size or capacity, capacity)
        freq = self.clearing_freq
        while n_added:
            n = min(n_added, freq - n_before % freq) if freq else n_added
            is_clearing = freq is not None and (n_before + n) % freq == 0
            length += n - is_clearing
            if length > capacity:
                # From the first overflow on the length runs in circles: kept, ..., capacity, kept.
                length = kept + (length - capacity - 1) % (capacity + 1 - kept)
            if is_clearing:  # before its last transition is compared with the capacity
                length = max(0, length + 1 - (self.window_size_ or 0))
            n_before, n_added = n_before + n, n_added - n
        return length


class SubPool:
    """The window of one sub-pool.

    Args:
        offset: Row of the store where it begins.
        capacity: Transitions that it holds at most.
        n_rows: Rows that it has.
        numbers: ``oldest``, ``next`` and ``origin``.
    """

    def __init__(self, offset: int, capacity: int, n_rows: int, numbers: memoryview) -> None:
        self.offset = offset
        self.capacity = capacity
        self.n_rows = n_rows
        self.numbers = numbers

    @property
    def oldest(self) -> int:
        """Number of the oldest transition in it."""
        return int(self.numbers[0])

    @property
    def next(self) -> int:
        """Number that the next transition will get."""
        return int(self.numbers[1])

    @property
    def origin(self) -> int:
        """Number of the transition in the first row."""
        return int(self.numbers[2])

    def __len__(self) -> int:
        return max(0, self.next - self.oldest)

    def place(self, number: int) -> int:
        """Where a transition lies, counted from the first row."""
        return (number - self.origin) % self.n_rows

    def slices(self, start: int, stop: int) -> list[slice]:
        """Rows of transitions ``start`` to ``stop``: at most two slices of the store."""
        if start >= stop:
            return []
        first, end = self.offset + self.place(start), self.offset + self.n_rows
        last = first + stop - start
        if last <= end:
            return [slice(first, last)]
        return [slice(first, end), slice(self.offset, last - self.n_rows)]


class SubPools(list[SubPool]):
    """All sub-pools of a store, and where their transitions lie in it.

    Args:
        pool_size: Transitions of all sub-pools; the first ones have one more if need be.
        n: Number of sub-pools.
        n_spare: Rows that each of them has more than transitions.

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
        """Transitions that each of them holds."""
        return [len(sub_pool) for sub_pool in self]

    @property
    def n_rows(self) -> int:
        """Rows of all of them."""
        return int(self._n_rows.sum())

    def readable(self) -> dict[str, slice]:
        """Rows of all transitions, and those before them that can still be read.

        By what the state of a pool adds to the names of their arrays.
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
        """Rows of all transitions, int64 ``[n]``: sub-pool by sub-pool, the oldest first."""
        slices = (rows for each in self for rows in each.slices(each.oldest, each.next))
        ranges = (np.arange(rows.start, rows.stop) for rows in slices)
        return np.concatenate([np.zeros(0, np.int64), *ranges])

    def rows_of(self, index: NDArray, numbers: NDArray) -> NDArray:
        """Rows of transitions, by sub-pool and number."""
        places = (numbers - self.numbers[index, 2]) % self._n_rows[index]
        rows: NDArray = self._offsets[index] + places
        return rows

    def find(self, names: NDArray) -> tuple[NDArray, NDArray]:
        """Rows of transitions, and whether they are still there.

        Args:
            names: ``number * len(self) + sub-pool`` of each.
        """
        numbers, index = np.divmod(names, len(self))
        oldest, after, _ = self.numbers[index].T
        return self.rows_of(index, numbers), (oldest <= numbers) & (numbers < after)

    def ahead(self, rows: NDArray, n_steps: int | NDArray) -> NDArray:
        """Rows so many places after others, of the same sub-pool."""
        if len(self) == 1:
            return rows + n_steps
        index = self._index(rows)
        offsets = self._offsets[index]
        after: NDArray = offsets + (rows - offsets + n_steps) % self._n_rows[index]
        return after

    def transitions_at(self, rows: NDArray) -> tuple[NDArray, NDArray]:
        """The transitions at some rows, by sub-pool and number."""
        index = self._index(rows)
        # The one that lies there is less than all rows before the next one.
        newest = self.numbers[index, 1] - 1
        return index, newest - (self.rows_of(index, newest) - rows) % self._n_rows[index]

    def _index(self, rows: NDArray) -> NDArray:
        """The sub-pool of each row."""
        return np.searchsorted(self._offsets, rows, side="right") - 1


def routes(
    sub_pools: SubPools,
    rules: WindowRules,
    sizes: Sequence[int],
    draws: Sequence[float],
) -> list[int]:
    """Numbers of sub-pools for additions, each drawn as if those before had been made.

    The probability of a sub-pool is proportional to 1 / (its length + 1).

    Args:
        sub_pools: The sub-pools.
        rules: When they drop transitions.
        sizes: How many transitions are added at a time.
        draws: A float from 0 to below 1 for each addition; an int names the sub-pool.
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
