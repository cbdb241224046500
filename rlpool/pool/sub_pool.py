"""Which transitions a sub-pool holds, and when it drops some.

A sub-pool is a window over the stream of all transitions that were ever added to it. They are
numbered as they come, number ``i`` lies in row ``(i - origin) % capacity`` of the sub-pool, and
only the oldest are ever dropped: what a sub-pool holds is two numbers, ``oldest`` and ``next``.
Nothing moves when something is added or dropped. When all is dropped, the next one becomes the
``origin``: its row has been in use already.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
                whole_number(name, value, 1)
        if (self.clearing_freq is None) != (self.window_size_ is None):
            raise SpecError(
                f"clearing_freq is {self.clearing_freq}, window_size_ is {self.window_size_}",
                fix="give both, or neither",
            )

    def arguments(self) -> dict[str, int | None]:
        """The numbers by name, as files of pools have them."""
        whole = {name: value and int(value) for name, value in vars(self).items()}
        return {**whole, "window_size_": whole["window_size_"] or 0}

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
        capacity: Rows that it has.
        numbers: ``oldest``, ``next`` and ``origin``, in memory that readers see.
    """

    def __init__(self, offset: int, capacity: int, numbers: memoryview) -> None:
        self.offset = offset
        self.capacity = capacity
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
    def n_used(self) -> int:
        """Rows that are or were in use since all was dropped."""
        return min(self.next - int(self.numbers[2]), self.capacity)

    def __len__(self) -> int:
        return max(0, self.next - self.oldest)

    def place(self, number: int) -> int:
        """Where a transition lies, counted from the first row."""
        return (number - int(self.numbers[2])) % self.capacity

    def pieces(self, start: int, stop: int) -> list[slice]:
        """Rows of transitions ``start`` to ``stop``: at most two slices of the store."""
        if start >= stop:
            return []
        first, end = self.offset + self.place(start), self.offset + self.capacity
        last = first + stop - start
        if last <= end:
            return [slice(first, last)]
        return [slice(first, end), slice(self.offset, last - self.capacity)]


def routes(
    sub_pools: Sequence[SubPool],
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
    lengths, added = list(map(len, sub_pools)), [sub_pool.next for sub_pool in sub_pools]
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
