"""Which transitions a sub-pool holds: a window over the stream of all that were ever added.

Transitions are numbered as they come, and number ``i`` lies at place ``i % capacity`` for as long
as it is held. Only the oldest are ever dropped, so a sub-pool is two numbers: ``oldest`` and
``next``. Nothing moves when something is dropped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rlpool.batch.batcher_base import check_count
from rlpool.errors import SpecError
from rlpool.memory.storage import Array


@dataclass(frozen=True)
class WindowRules:
    """When a sub-pool drops transitions, after each one that is added to it.

    Attributes:
        window_size: When it overflows, keep that many of the newest; ``None`` to drop just one.
        clearing_freq: After every so many added transitions, drop some of the oldest.
        clearing_size: How many (the argument ``window_size_`` of ``Pool``).
    """

    window_size: int | None = None
    clearing_freq: int | None = None
    clearing_size: int = 0

    @classmethod
    def checked(cls, window_size: Any, clearing_freq: Any, clearing_size: Any) -> WindowRules:
        """Rules from what the user gave.

        Raises:
            SpecError: For sizes below 1, or one of the latter two without the other.
        """
        given = {
            "window_size": window_size,
            "clearing_freq": clearing_freq,
            "window_size_": clearing_size,
        }
        for name, value in given.items():
            if value is not None:
                check_count(name, value, 1)
        if (clearing_freq is None) != (clearing_size is None):
            raise SpecError(
                f"clearing_freq is {clearing_freq!r} and window_size_ is {clearing_size!r}",
                fix="give both, or neither",
            )
        return cls(window_size, clearing_freq, clearing_size or 0)

    def length_after(self, length: int, n_added: int, n_before: int, capacity: int) -> int:
        """Transitions held after some more were added one by one.

        Computed from one clearing to the next, not one by one.

        Args:
            length: Transitions held.
            n_added: Transitions added.
            n_before: Transitions ever added before.
            capacity: Most that can be held.
        """
        if self.clearing_freq is None:
            return self._grown(length, n_added, capacity)
        freq = self.clearing_freq
        done = 0
        while done < n_added:
            until_clearing = freq - (n_before + done) % freq
            if until_clearing > n_added - done:
                return self._grown(length, n_added - done, capacity)
            # The clearing comes before the look at the capacity.
            length = self._grown(length, until_clearing - 1, capacity) + 1
            length = max(0, length - self.clearing_size)
            length = self._cut(length, capacity)
            done += until_clearing
        return length

    def _grown(self, length: int, n_added: int, capacity: int) -> int:
        """Length after some were added, without a clearing."""
        if length + n_added <= capacity:
            return length + n_added
        if self.window_size is None:
            return capacity
        # From the first overflow on, the length runs in circles: kept, ..., capacity, kept, ...
        kept = min(self.window_size, capacity)
        return kept + (length + n_added - capacity - 1) % (capacity + 1 - kept)

    def _cut(self, length: int, capacity: int) -> int:
        if length <= capacity:
            return length
        return capacity if self.window_size is None else min(self.window_size, capacity)


@dataclass(frozen=True)
class Admission:
    """What adding transitions to a ring does.

    Attributes:
        n_skipped: How many of the new ones are gone again before the last one is added.
        first: Number of the first new one that stays.
        dropped: Numbers ``start, stop`` of the older ones that go.
    """

    n_skipped: int
    first: int
    dropped: tuple[int, int]


class Ring:
    """The window of one sub-pool.

    Args:
        offset: Row of the store where it begins.
        capacity: Rows that it has.
        rules: When transitions are dropped; by default the oldest when one too many is added.
        numbers: int64 ``[2]`` to keep ``oldest`` and ``next`` in, so that others may read them.
    """

    def __init__(
        self, offset: int, capacity: int, numbers: Array, rules: WindowRules | None = None
    ) -> None:
        self.offset = offset
        self.capacity = capacity
        self._numbers = numbers.data
        self._rules = rules or WindowRules()

    @property
    def oldest(self) -> int:
        """Number of the oldest transition that is held."""
        return int(self._numbers[0])

    @oldest.setter
    def oldest(self, number: int) -> None:
        self._numbers[0] = number

    @property
    def next(self) -> int:
        """Number that the next transition will get."""
        return int(self._numbers[1])

    @next.setter
    def next(self, number: int) -> None:
        self._numbers[1] = number

    def __len__(self) -> int:
        oldest, after = self._numbers
        return max(0, after - oldest)

    def move(self, oldest: int, after: int) -> None:
        """Set both numbers; a reader in between sees nothing rather than too much."""
        self.oldest = oldest
        self.next = after

    def settle(self) -> None:
        """Hold nothing, rather than less than that, after a ``move`` that was interrupted."""
        if self.oldest > self.next:
            self.oldest = self.next

    def admission(self, n_added: int) -> Admission:
        """What adding so many transitions would do; changes nothing."""
        after = self.length_after(len(self), n_added, self.next)
        oldest = self.next + n_added - after
        return Admission(
            n_skipped=max(0, n_added - after),
            first=max(self.next, oldest),
            dropped=(self.oldest, min(self.next, oldest)),
        )

    def length_after(self, length: int, n_added: int, n_before: int) -> int:
        """What it would hold after some were added, as ``WindowRules`` says; changes nothing."""
        return self._rules.length_after(length, n_added, n_before, self.capacity)

    def pieces(self, start: int, stop: int) -> list[slice]:
        """Rows of transitions ``start`` to ``stop``: at most two slices of the store."""
        if start == stop:
            return []
        first = self.offset + start % self.capacity
        n_rows = stop - start
        end = self.offset + self.capacity
        if first + n_rows <= end:
            return [slice(first, first + n_rows)]
        return [slice(first, end), slice(self.offset, first + n_rows - self.capacity)]

    def rows(self, numbers: Array) -> Array:
        """Rows of transitions."""
        rows = numbers % self.capacity
        return rows + self.offset if self.offset else rows


def capacities(pool_size: int, n_rings: int) -> list[int]:
    """Capacities of sub-pools that add up to the pool's size, the first ones one larger."""
    share, rest = divmod(pool_size, n_rings)
    return [share + (ring < rest) for ring in range(n_rings)]


def emptiest_first(lengths: Sequence[int]) -> list[float]:
    """Probabilities of sub-pools, inversely proportional to what they hold plus one."""
    weights = [1.0 / (length + 1.0) for length in lengths]
    total = sum(weights)
    return [weight / total for weight in weights]


def routes(rings: Sequence[Ring], sizes: Sequence[int], draws: Sequence[float]) -> list[int]:
    """Sub-pools for additions, each drawn as if those before had been made.

    Args:
        rings: The sub-pools; they are not changed.
        sizes: How many transitions are added at a time.
        draws: A number from 0 to below 1 for each addition.
    """
    lengths = [len(ring) for ring in rings]
    added = [ring.next for ring in rings]
    chosen = []
    for size, draw in zip(sizes, draws, strict=True):
        ends = list(accumulate(emptiest_first(lengths)))
        index = min(bisect_right(ends, draw), len(rings) - 1)
        lengths[index] = rings[index].length_after(lengths[index], size, added[index])
        added[index] += size
        chosen.append(index)
    return chosen
