"""The memory that all views of an ``Array`` share, and its layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rlpool.data.array_view import Values, View
from rlpool.data.specs import TensorSpec, numpy_dtype
from rlpool.data.storage import Memory, allocate
from rlpool.errors import SpecError, UsageError
from rlpool.machine.arguments import whole_number
from rlpool.machine.platform import HAS_ORDERED_STORES, NO_LOCK, FileLock

_WORD_BYTES = 8  # stored after the values: the start of the window


class Layout(NamedTuple):
    """Memory layout of an array.

    Attributes:
        spec: Shape ``(padding + full_size + padding, *batch_shape[1:], *feature_shape)``, dtype.
        n_batch_dims: Number of batch dimensions.
        padding: Extra rows at either end.
        window: Number of visible rows.
    """

    spec: TensorSpec
    n_batch_dims: int
    padding: int
    window: int

    @property
    def full_size(self) -> int:
        """Rows without padding."""
        return self.spec.shape[0] - 2 * self.padding

    def rows(self, start: int, n_rows: int) -> View:
        """Return a view of rows, counted from the first row of ``full_size``."""
        start += self.padding
        sizes = self.spec.shape
        return View(sizes, (range(start, start + n_rows), *map(range, sizes[1:])))


class Allocation:
    """The values and the window position, shared by every process that maps the memory.

    Attributes:
        layout: Memory layout.
        storage: Kind of memory.
        memory: Memory of the values; ``None`` after ``close``.
    """

    def __init__(self, memory: Memory, layout: Layout) -> None:
        self.memory: Memory | None = memory
        self.layout = layout
        self.storage = memory.kind
        root, spec = memory.root(), layout.spec
        self._values = root[: spec.n_bytes].view(spec.dtype).reshape(spec.shape)
        self._start: Any = root[-_WORD_BYTES:].view(np.int64).data

    @classmethod
    def new(cls, storage: str, layout: Layout, directory: str | Path | None = None) -> Allocation:
        """Allocate zeroed memory, with the window at the front."""
        n_bytes = layout.spec.n_bytes + -layout.spec.n_bytes % _WORD_BYTES + _WORD_BYTES
        memory = allocate(storage, n_bytes, directory=directory)
        # Writing to a page on a full disk would kill the process.
        memory.reserve(0, n_bytes)
        return cls(memory, layout)

    def open_memory(self) -> Memory:
        """The memory; UsageError after ``close``."""
        if self.memory is None:
            raise UsageError("this array was closed", fix="use or copy it before close()")
        return self.memory

    @property
    def values(self) -> Values:
        """All values, padding included; UsageError after ``close``."""
        self.open_memory()
        return self._values

    @property
    def visible(self) -> View:
        """The rows in the window now."""
        if not HAS_ORDERED_STORES and self.memory is not None:
            with self.locked():
                return self.layout.rows(self._start[0], self.layout.window)
        return self.layout.rows(self._start[0], self.layout.window)

    def rotate(self) -> None:
        """Advance the window as ``Array.rotate`` does; UsageError after ``close``."""
        values, padding, full_size = self.values, self.layout.padding, self.layout.full_size
        with self.locked():
            start = self._start[0] + self.layout.window
            if start == full_size:
                start = 0
                values[: 2 * padding] = values[full_size:]
            # Last, and in one store: concurrent views show the old or the new window.
            self._start[0] = start

    def go_to_end(self) -> None:
        """Move the window to the end; UsageError after ``close``."""
        with self.locked():
            self._start[0] = self.layout.full_size - self.layout.window

    def locked(self) -> AbstractContextManager[None]:
        """Exclude rotation by other processes in a ``with`` block; UsageError after ``close``."""
        memory = self.open_memory()
        return NO_LOCK if memory.kind == "local" else FileLock(memory.fd)

    def close(self) -> None:
        """Release the memory; repeatable."""
        if self.memory is not None:
            self.memory = None
            self._values = self._values[:0].copy()
            self._start = self._start.tolist()  # closed arrays still have a shape

    def copied(self) -> Allocation:
        """Copy to a new allocation of the same kind, with the same values and window."""
        copy = Allocation.new(self.storage, self.layout)
        with self.locked():
            np.copyto(copy.open_memory().root(), self.open_memory().root())
        return copy

    def __reduce__(self) -> tuple[Callable[..., Allocation], tuple[Any, ...]]:
        return Allocation, (self.open_memory(), self.layout)


def layout_of(
    batch_shape: Any, dtype: Any, feature_shape: Any, padding: Any, full_size: Any
) -> Layout:
    """Check the arguments of an ``Array`` and return its layout; SpecError if one is wrong."""
    batch, features = _sizes("batch_shape", batch_shape), _sizes("feature_shape", feature_shape)
    if not batch or not batch[0]:
        raise SpecError(f"batch_shape {batch} has to begin with at least one row")
    window, n_padding = batch[0], whole_number("padding", padding, 0)
    n_full = window if full_size is None else whole_number("full_size", full_size, 0)
    if n_padding > window:
        raise SpecError(f"padding={n_padding} exceeds the number of rows of batch_shape {batch}")
    if n_full < window or n_full % window:
        raise SpecError(f"full_size={n_full} is not a multiple of the rows of batch_shape {batch}")
    sizes = (n_full + 2 * n_padding, *batch[1:], *features)
    return Layout(TensorSpec(sizes, _dtype(dtype)), len(batch), n_padding, window)


def _sizes(name: str, sizes: Any) -> tuple[int, ...]:
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        sizes = (sizes,)
    return tuple(whole_number(f"{name}[{number}]", size, 0) for number, size in enumerate(sizes))


def _dtype(dtype: Any) -> np.dtype[Any]:
    try:
        found = numpy_dtype(dtype) if isinstance(dtype, torch.dtype) else np.dtype(dtype)
    except (TypeError, ValueError):
        found = np.dtype(object)
    if dtype is None or found.kind not in "biufc":  # None is float64 to NumPy
        raise SpecError(
            f"dtype={dtype!r} is not a numeric or bool dtype of NumPy",
            fix="use one such as numpy.float32, torch.int64 or bool",
        )
    return found
