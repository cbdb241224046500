"""Rows of transitions in memory, one column per key.

What is large and follows from the next row is not stored: a key ``x`` with a ``_x`` beside it, such
as ``frame`` and ``_frame``, is one column. The value after a step is the next row's value, unless a
row is the last of its piece of an episode; those have their value after the step in ``finals``,
a second column that is only as long as there are such rows.

Memory is asked for at once and for the full size, and costs nothing before it is written to. It is
read as it lies, by whoever maps it, so nothing ever moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rlpool.memory.storage import Array, Memory, carve, carved_bytes
from rlpool.pool.intake import Intake
from rlpool.slots.blocks import successor_key
from rlpool.specs import TensorSpec

_INT32 = TensorSpec((), np.dtype(np.int32))
_BOOL = TensorSpec((), np.dtype(bool))

LAST_KEY = "is_last"
FINAL_ROW_KEY = "final_row"

_RESERVED_ROWS = 64
_NO_ROWS = np.zeros(0, np.int32)


class RowStore:
    """Columns ``[capacity, ...]`` and the values after steps that end a piece.

    Args:
        columns: Key to what is stored per row.
        paired: Those of them whose ``_key`` follows from the next row.
        capacity: Rows.
        make_memory: Makes so many zeroed bytes.

    Attributes:
        columns: Key to array ``[capacity, ...]``.
        finals: Paired key to array ``[capacity, ...]``, of which the first ``n_finals`` rows are
            or were in use.
        is_last: bool ``[capacity]``: whether the next row does not go on with the same episode.
        final_row: int32 ``[capacity]``: where in ``finals`` a last row's values are. Without
            paired keys it has no meaning.
    """

    def __init__(
        self,
        columns: Mapping[str, TensorSpec],
        paired: Sequence[str],
        capacity: int,
        make_memory: Callable[[int], Memory],
    ) -> None:
        self.specs = dict(columns)
        self.paired = tuple(paired)
        self.capacity = capacity
        bookkeeping = {LAST_KEY: _BOOL, **({FINAL_ROW_KEY: _INT32} if paired else {})}
        regions = {**bookkeeping, **{f"column/{key}": spec for key, spec in columns.items()}}
        self._rows = _Region(regions, capacity, make_memory)
        self._finals = _Region({key: columns[key] for key in paired}, capacity, make_memory)
        self.columns = {key: self._rows.arrays[f"column/{key}"] for key in columns}
        self.finals = self._finals.arrays
        self.is_last = self._rows.arrays[LAST_KEY]
        self.final_row = self._rows.arrays.get(FINAL_ROW_KEY, _NO_ROWS)
        # Rows of finals that were given back, a stack of the first n_free.
        self._free = np.empty(capacity if paired else 0, np.int32)
        self._n_free = 0
        self.n_finals = 0

    @property
    def memories(self) -> list[Memory]:
        """The memory of everything, in the order in which it was asked for."""
        return [region.memory for region in (self._rows, self._finals) if region.memory is not None]

    def n_bytes(self, n_rows: int) -> int:
        """Bytes that are in use when so many rows have been written."""
        return n_rows * self._rows.row_bytes + self.n_finals * self._finals.row_bytes

    # Finals ----------------------------------------------------------------------------------

    def take_finals(self, n: int) -> Array:
        """Rows of ``finals`` that nobody uses, int32 ``[n]``."""
        n_again = min(n, self._n_free)
        n_new = n - n_again
        taken = np.empty(n, np.int32)
        self._n_free -= n_again
        taken[:n_again] = self._free[self._n_free : self._n_free + n_again]
        taken[n_again:] = np.arange(self.n_finals, self.n_finals + n_new)
        self.n_finals += n_new
        return taken

    def _give_back(self, finals: Array) -> None:
        self._free[self._n_free : self._n_free + len(finals)] = finals
        self._n_free += len(finals)

    def drop(self, rows: slice) -> None:
        """Give back what belongs to rows that are dropped."""
        if self.paired:
            self._give_back(self.final_row[rows][self.is_last[rows]])
        self.is_last[rows] = False

    def write(self, rows: slice, intake: Intake, start: int) -> None:
        """Write transitions from number ``start`` of an intake on, all but their finals."""
        n_rows = rows.stop - rows.start
        for key, source in intake.columns.items():
            source.copy_to(self.columns[key][rows], start)
        self.is_last[rows] = intake.is_last[start : start + n_rows]

    def write_finals(self, rows: Array, places: Array, intake: Intake) -> None:
        """Write the values after the steps in last rows, which are at some places of an intake."""
        if not self.paired or not rows.size:
            return
        finals = self.take_finals(rows.size)
        for key in self.paired:
            self.finals[key][finals] = intake.finals[key](places)
        self.final_row[rows] = finals

    def link(self, row: int) -> None:
        """Let a last row be followed by the next one."""
        self.is_last[row] = False
        if self.paired:
            self._give_back(self.final_row[row : row + 1])

    def lacks_finals(self, n: int) -> bool:
        """Whether ``take_finals`` would fail: some are lost where an addition was interrupted."""
        return bool(self.paired) and self.n_finals + n - self._n_free > self.capacity

    def recover_finals(self, n_finals: int, rows: Sequence[slice]) -> None:
        """Find out which finals are free, from the rows that there are."""
        self.n_finals = n_finals
        self._n_free = 0
        if self.paired:
            is_free = np.ones(n_finals, bool)
            for piece in rows:
                is_free[self.final_row[piece][self.is_last[piece]]] = False
            self._give_back(np.flatnonzero(is_free))

    # Room ------------------------------------------------------------------------------------

    def reserve(self, rows: Sequence[slice], n_finals: int) -> None:
        """Make sure that there is room on the disk before anything is written.

        Raises:
            SpecError: If there is none; nothing was changed.
        """
        self._rows.reserve(max((piece.stop for piece in rows), default=0))
        self._finals.reserve(min(self.capacity, self.n_finals + n_finals))

    # Reading ---------------------------------------------------------------------------------

    # Rows past the end stand for those at the beginning: mode="wrap" costs nothing.

    def take(self, key: str, rows: Array) -> Array:
        """Rows of a column, a copy ``[len(rows), ...]``."""
        taken: Array = self.columns[key].take(rows, 0, None, "wrap")
        return taken

    def take_all(self, rows: Array) -> dict[str, Array]:
        """Rows of every column, copies."""
        return {key: column.take(rows, 0, None, "wrap") for key, column in self.columns.items()}

    def take_after(self, keys: Sequence[str], rows: Array, next_rows: Array) -> dict[str, Array]:
        """Values of paired keys after the step of some rows, copies.

        Args:
            keys: The keys, without ``_``.
            rows: int64 rows.
            next_rows: The row behind each of them.

        Returns:
            ``_key`` to values ``[len(rows), ...]``, for every key.
        """
        taken: dict[str, Array] = {}
        if not keys:
            return taken
        ends = self.is_last.take(rows, 0, None, "wrap").nonzero()[0]
        final_rows = self.final_row.take(rows.take(ends), 0, None, "wrap")
        for key in keys:
            values = self.columns[key].take(next_rows, 0, None, "wrap")
            values[ends] = self.finals[key].take(final_rows, 0)
            taken[successor_key(key)] = values
        return taken


class _Region:
    """Arrays ``[capacity, ...]`` in one piece of memory, of which the first rows have room.

    Args:
        specs: Key to what is stored per row.
        capacity: Rows.
        make_memory: Makes so many zeroed bytes.
    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        capacity: int,
        make_memory: Callable[[int], Memory],
    ) -> None:
        self._specs = dict(specs)
        self._capacity = capacity
        self._n_reserved = 0
        self.row_bytes = sum(spec.n_bytes for spec in specs.values())
        self.arrays: dict[str, Array] = {}
        self.memory: Memory | None = None
        if specs:
            self.memory = make_memory(sum(carved_bytes(specs, capacity).values()))
            self.arrays = carve(self.memory.root(), specs, capacity)

    def reserve(self, n_rows: int) -> None:
        """Make room for the first rows, and somewhat ahead of need."""
        if n_rows <= self._n_reserved or self.memory is None:
            return
        n_rows = min(self._capacity, n_rows + n_rows // 8 + _RESERVED_ROWS)
        start = 0
        for key, n_bytes in carved_bytes(self._specs, self._capacity).items():
            size = self._specs[key].n_bytes
            self.memory.reserve(start + self._n_reserved * size, start + n_rows * size)
            start += n_bytes
        self._n_reserved = n_rows
