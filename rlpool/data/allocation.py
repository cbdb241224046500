"""What all views of one ``Array`` share: its memory, and how that memory is divided."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from rlpool.data.array_index import Region, Span
from rlpool.data.index_keys import as_numpy
from rlpool.errors import SpecError, UsageError
from rlpool.memory.storage import Memory, allocate
from rlpool.memory.versions import Version

Values = np.ndarray[Any, Any]

_T = TypeVar("_T")

MAX_INDEX_BYTES = 256
"""Larger index arrays travel in shared memory of their own: every pickle of a view is small."""


_WORD = np.dtype(np.int64)
_N_WORDS = 2  # behind the values: the first row of the window, and the version


class Allocation:
    """Values of shape ``(padding + full_size + padding, *batch_shape[1:], *feature_shape)``.

    Behind them stands where the window is, for every process that maps the memory.

    Attributes:
        sizes: That shape.
        dtype: Of the values.
        storage: Kind of the memory.
        n_batch_dims: How many dimensions belong to the batch.
        padding: Rows before and behind the others.
        window: How many rows the whole array shows.
        directory: Where a memmap was made; ``None`` if nobody said.
    """

    def __init__(
        self,
        memory: Memory,
        sizes: tuple[int, ...],
        dtype: np.dtype[Any],
        n_batch_dims: int,
        padding: int,
        window: int,
        directory: str | Path | None = None,
    ) -> None:
        self._memory: Memory | None = memory
        n_bytes = math.prod(sizes) * dtype.itemsize
        self._values: Values | None = memory.root()[:n_bytes].view(dtype).reshape(sizes)
        words = memory.root()[-_N_WORDS * _WORD.itemsize :].view(_WORD)
        self._start, fd = words.data, None if memory.kind == "local" else memory.fd
        self._version = Version(words[1:].data, fd)
        self.sizes = sizes
        self.dtype = dtype
        self.storage = memory.kind
        self.n_batch_dims = n_batch_dims
        self.padding = padding
        self.window = window
        self.directory = directory
        self._visible = padding, self.rows(padding, window)

    @classmethod
    def _made(
        cls,
        storage: str,
        sizes: tuple[int, ...],
        dtype: np.dtype[Any],
        n_batch_dims: int,
        padding: int,
        window: int,
        directory: str | Path | None,
    ) -> Allocation:
        """An allocation in new memory, all zero, with the window at its beginning."""
        n_bytes = math.prod(sizes) * dtype.itemsize
        n_bytes += -n_bytes % _WORD.itemsize + _N_WORDS * _WORD.itemsize
        memory = allocate(storage, n_bytes, directory=directory)
        # A disk that turns out to be full when a page is written to would end the process.
        memory.reserve(0, n_bytes)
        made = cls(memory, sizes, dtype, n_batch_dims, padding, window, directory)
        made._start[0] = padding
        return made

    @classmethod
    def of_arguments(
        cls,
        batch_shape: Any,
        dtype: Any,
        feature_shape: Any,
        storage: str,
        padding: Any,
        full_size: Any,
        directory: str | Path | None,
    ) -> Allocation:
        """Check the arguments of an ``Array`` and make its memory; SpecError if one is wrong."""
        batch = _sizes("batch_shape", batch_shape)
        if not batch or batch[0] < 1:
            raise SpecError(f"batch_shape {batch} has to begin with one row or more")
        n_padding = _size("padding", padding)
        if n_padding > batch[0]:
            raise SpecError(
                f"padding={n_padding} is more than the {batch[0]} rows of batch_shape {batch}"
            )
        n_full = batch[0] if full_size is None else _size("full_size", full_size)
        if n_full < batch[0] or n_full % batch[0]:
            raise SpecError(
                f"full_size={n_full} is no multiple of the {batch[0]} rows of batch_shape {batch}"
            )
        kind = _dtype(dtype)
        sizes = (n_full + 2 * n_padding, *batch[1:], *_sizes("feature_shape", feature_shape))
        return cls._made(storage, sizes, kind, len(batch), n_padding, batch[0], directory)

    @property
    def full_size(self) -> int:
        """Rows without padding."""
        return self.sizes[0] - 2 * self.padding

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._values is None

    @property
    def values(self) -> Values:
        """All values, padding included; UsageError after ``close``."""
        self.refuse_if_closed()
        return self._values  # type: ignore[return-value]

    def refuse_if_closed(self) -> None:
        """Raise UsageError after ``close``."""
        if self._values is None:
            raise UsageError("this array was closed", fix="use it, or copy it, before close()")

    def rows(self, start: int, n_rows: int) -> Region:
        """The region of some rows, counted from the very first one."""
        behind = (Span(0, 1, size) for size in self.sizes[1:])
        return Region(self.sizes, (Span(start, 1, n_rows), *behind))

    # The window ---------------------------------------------------------------------------------

    @property
    def visible(self) -> Region:
        """The rows that the window shows now."""
        start = self._start[0]
        if self._visible[0] != start:
            self._visible = start, self.rows(start, self.window)
        return self._visible[1]

    def rotate(self) -> None:
        """Move the window on, as ``Array.rotate`` says; UsageError after ``close``."""
        values, padding, full_size = self.values, self.padding, self.full_size
        with self._version.changing():
            start = self._start[0] + self.window
            if start == padding + full_size:
                start = padding
                values[: 2 * padding] = values[full_size:]
            # Last, and in one store: who looks without asking sees the old window or the new one.
            self._start[0] = start

    def go_to_end(self) -> None:
        """Move the window to the last rows; UsageError after ``close``."""
        self.refuse_if_closed()
        with self._version.changing():
            self._start[0] = self.padding + self.full_size - self.window

    def unrotated(self, look: Callable[[], _T]) -> _T:
        """The result of looking at values while no process rotates; ``look`` may run repeatedly."""
        return self._version.read(look)

    # Lifetime -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the memory up; repeatable."""
        if self._memory is not None:
            self._memory.recall()
            # What is shown has a shape still.
            self._start = np.array(self._start).data
            self._version = Version(self._start, None)
        self._values = self._memory = None

    def copied(self) -> Allocation:
        """Another allocation of the same kind, with the same values and window."""
        division = self.n_batch_dims, self.padding, self.window, self.directory
        copy = Allocation._made(self.storage, self.sizes, self.dtype, *division)

        def take_over() -> None:
            copy.values[...] = self.values
            copy._start[0] = self._start[0]

        self.refuse_if_closed()
        self.unrotated(take_over)
        return copy

    def __reduce__(self) -> tuple[Callable[..., Allocation], tuple[Any, ...]]:
        if self._memory is None:
            raise UsageError(
                "this array was closed and cannot be sent", fix="send it before close()"
            )
        if self.storage == "local":
            raise UsageError(
                'an array with storage="local" belongs to one process and cannot be pickled',
                fix='use storage="shared", or send what to_ndarray() returns, which is a copy',
            )
        division = self.n_batch_dims, self.padding, self.window
        return _received, (self._memory, self.sizes, self.dtype.str, *division)


def _received(
    memory: Memory,
    sizes: tuple[int, ...],
    dtype: str,
    n_batch_dims: int,
    padding: int,
    window: int,
) -> Allocation:
    return Allocation(memory, sizes, np.dtype(dtype), n_batch_dims, padding, window)


def packed_region(region: Region, sent: Memory | None) -> tuple[tuple[Any, ...], Memory | None]:
    """A region in plain values, to be pickled, and the memory of its index arrays.

    Args:
        region: The region.
        sent: The memory that an earlier call gave, to be used again.

    Returns:
        What ``unpacked_region`` takes. The memory is ``None`` if the index arrays are small; it has
        to be kept until it was received.
    """
    arrays = [dim for dim in region.dims if isinstance(dim, np.ndarray)]
    is_large = sum(array.nbytes for array in arrays) > MAX_INDEX_BYTES
    if is_large and sent is None:
        sent = allocate("shared", sum(array.nbytes for array in arrays))
        sent.root().view(np.int64)[:] = np.concatenate([array.ravel() for array in arrays])
    dims = tuple(
        tuple(dim)
        if isinstance(dim, Span)
        else None
        if is_large and isinstance(dim, np.ndarray)
        else dim
        for dim in region.dims
    )
    return (dims, region.group_at, region.group_shape), sent


def unpacked_region(
    sizes: tuple[int, ...], packed: tuple[Any, ...], indices: Memory | None
) -> Region:
    """The region that ``packed_region`` packed."""
    dims, group_at, group_shape = packed
    arrays: Iterator[Values] = iter(())
    if indices is not None:
        arrays = iter(indices.root().view(np.int64).copy().reshape(-1, *group_shape))
    unpacked = (
        next(arrays) if dim is None else Span(*dim) if isinstance(dim, tuple) else dim
        for dim in dims
    )
    return Region(sizes, tuple(unpacked), group_at)


def _sizes(name: str, sizes: Any) -> tuple[int, ...]:
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        sizes = (sizes,)
    return tuple(_size(f"{name}[{number}]", size) for number, size in enumerate(sizes))


def _size(name: str, size: Any) -> int:
    try:
        number = -1 if isinstance(size, bool) else operator.index(size)
    except (TypeError, RuntimeError):
        number = -1
    if number < 0:
        raise SpecError(f"{name} has to be an int of 0 or more, not {size!r}")
    return number


def _dtype(dtype: Any) -> np.dtype[Any]:
    try:
        if isinstance(dtype, torch.dtype):
            found: np.dtype[Any] = torch.empty(0, dtype=dtype).numpy().dtype
        elif dtype is None:
            raise TypeError("None")  # float64 to NumPy
        else:
            found = np.dtype(dtype)
    except (TypeError, ValueError):
        found = np.dtype(object)
    if found.kind not in "biufc":
        raise SpecError(
            f"dtype={dtype!r} is not among the number types and bool of NumPy",
            fix="use one such as numpy.float32, torch.int64 or bool",
        )
    return found


def plain(value: Any) -> Any:
    """A value to be written or compared, as NumPy takes it."""
    if not isinstance(value, torch.Tensor):
        return value
    try:
        return as_numpy(value)
    except (TypeError, RuntimeError) as error:
        raise SpecError(f"NumPy cannot take this tensor: {error}") from error
