"""Which elements of an allocation a view shows, and what an index of that view means.

Indices of the first dimension, the time, count from the start of the view, and whatever the
allocation has can be reached: -1 is the row before the first. In all other dimensions they mean
what they mean to NumPy.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np
import torch

from rlpool.errors import compose

Values: TypeAlias = np.ndarray[Any, Any]

# The index of one dimension. Masks have become index arrays.
Part: TypeAlias = "int | slice | Values"

EVERYTHING = slice(None)


@dataclass(slots=True)
class Region:
    """What ints and slices select.

    Attributes:
        sizes: Shape of the allocation.
        dims: For each of its dimensions the one place that was selected, or a range of places.
    """

    sizes: tuple[int, ...]
    dims: tuple[int | range, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the view."""
        return tuple([len(dim) for dim in self.dims if type(dim) is range])

    @property
    def origins(self) -> list[int]:
        """For each dimension of the view that of the allocation."""
        return [number for number, dim in enumerate(self.dims) if type(dim) is range]

    def index(self, key: Any) -> Region | Selection:
        """What an indexed view shows.

        Raises:
            IndexError: If the key is no index, or an int or an index array leaves the allocation.
        """
        dims, sizes = self.dims, self.sizes
        if type(key) is int and type(dims[0]) is range:  # what is done at every step, and fast
            row = dims[0].start + dims[0].step * key
            if 0 <= row < sizes[0]:
                return Region(sizes, (row, *dims[1:]))
        elif type(key) is tuple and (element := self._at_ints(key)):
            return element
        parts = read_key(key, self.shape)
        if any(isinstance(part, np.ndarray) for part in parts):
            return self._numbered(parts).select(parts)
        selected: list[Any] = list(dims)
        for number, part in zip(self.origins, parts, strict=True):
            dim: Any = dims[number]
            if not number:
                selected[0] = _in_time(dim, sizes[0], part)
            elif isinstance(part, int) and not -len(dim) <= part < len(dim):
                raise IndexError(
                    f"index {part} is out of bounds for a dimension of size {len(dim)}"
                )
            else:
                selected[number] = dim[part]
        return Region(sizes, tuple(selected))

    def _at_ints(self, key: tuple[Any, ...]) -> Region | None:
        """Indexed with ints that exist, as is done at every step; ``None`` for anything else."""
        dims: list[Any] = list(self.dims)
        number = -1
        for entry in key:
            number += 1
            while number < len(dims) and type(dims[number]) is int:
                number += 1
            if number == len(dims) or type(entry) is not int:
                return None
            dim = dims[number]
            place = dim.start + dim.step * (entry if entry >= 0 or not number else entry + len(dim))
            if not 0 <= place < self.sizes[number] or (number and place not in dim):
                return None
            dims[number] = place
        return Region(self.sizes, tuple(dims))

    def _numbered(self, parts: list[Part]) -> Selection:
        """The same elements, with numbers for those dimensions that index arrays may change."""
        last = [n for n, dim in enumerate(self.dims) if dim != range(self.sizes[n])]
        last += [n for n, part in zip(self.origins, parts, strict=True) if not _is_all(part)]
        depth = max(last) + 1
        numbers, time = np.zeros((), np.int64), self.dims[0]
        for number, dim in enumerate(self.dims[:depth]):
            stride = math.prod(self.sizes[number + 1 : depth])
            if type(dim) is int:
                numbers = numbers + dim * stride
            elif number:
                numbers = numbers[..., None] + np.array(dim, np.int64) * stride
            else:
                numbers = numbers[None]
        axes = [number for number in self.origins if number < depth]
        return Selection(self.sizes, depth, numbers, axes, time if type(time) is range else None)

    def shifted(self, n_steps: int) -> Region:
        """The same rows some time steps later; IndexError if the allocation has no such rows."""
        time = _moved(self.dims[0], n_steps, self.sizes[0])
        return Region(self.sizes, (time, *self.dims[1:]))

    def place(self, allocation: Values) -> tuple[Values, Any]:
        """A view of the allocation, and the index that gives the elements of it."""
        key = [_as_slice(dim) if type(dim) is range else dim for dim in self.dims]
        return allocation, (*key, ...)  # with an ellipsis, a single element is a view as well


@dataclass(slots=True)
class Selection:
    """What index arrays and masks select: numbered blocks, each of whole trailing dimensions.

    Attributes:
        sizes: Shape of the allocation.
        depth: How many of its dimensions are numbered, counting in C order; a block has the others.
        numbers: The blocks, in the shape in which the view shows them.
        axes: For each dimension of ``numbers`` the (first) one of the allocation that it is from.
        time: If no index array selected rows, a range of rows: ``numbers`` are those of row 0, and
            have size 1 in the dimension of the time.
        sent: Where a pickle finds many numbers.
    """

    sizes: tuple[int, ...]
    depth: int
    numbers: Values
    axes: list[int]
    time: range | None = None
    sent: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the view."""
        shape = list(self.numbers.shape)
        if self.time is not None:
            shape[self.axes.index(0)] = len(self.time)
        return (*shape, *self.sizes[self.depth :])

    @property
    def origins(self) -> list[int]:
        """For each dimension of the view the first one of the allocation that it is from."""
        return [*self.axes, *range(self.depth, len(self.sizes))]

    @property
    def _row_stride(self) -> int:
        return math.prod(self.sizes[1 : self.depth])

    def _all_numbers(self) -> Values:
        if self.time is None:
            return self.numbers
        rows = np.array(self.time, np.int64) * self._row_stride
        return self.numbers + _along(self.axes.index(0), rows, self.numbers.ndim)

    def index(self, key: Any) -> Region | Selection:
        """As for a region."""
        return self.select(read_key(key, self.shape))

    def select(self, parts: list[Part]) -> Region | Selection:
        """What a view shows that was indexed with one part for each dimension."""
        n_dims = self.numbers.ndim
        if not all(map(_is_all, parts[n_dims:])):
            return self._deepest().select(parts)
        parts, time = parts[:n_dims], self.time
        sources = [self.numbers]
        if 0 in self.axes:
            axis = self.axes.index(0)
            if time is None:
                length = self.numbers.shape[axis]
                found = _in_time(range(length), length, parts[axis])
                parts[axis] = _as_slice(found) if isinstance(found, range) else found
            else:
                found = _in_time(time, self.sizes[0], parts[axis])
                time, parts[axis] = None, EVERYTHING
                if isinstance(found, range):
                    time = found
                else:
                    rows = np.array(found)
                    sources.append(_along(axis, rows.ravel() * self._row_stride, n_dims))
                    parts[axis] = np.arange(rows.size).reshape(rows.shape) if rows.ndim else 0
        numbers = sum(source[tuple(parts)] for source in np.broadcast_arrays(*sources))
        return self._of(np.asarray(numbers), self._axes_after(parts, np.ndim(numbers)), time)

    def _of(self, numbers: Values, axes: list[int], time: range | None) -> Region | Selection:
        if numbers.ndim:
            return Selection(self.sizes, self.depth, numbers, axes, time)
        places = np.unravel_index(int(numbers), self.sizes[: self.depth])  # nothing more to select
        return Region(self.sizes, (*map(int, places), *map(range, self.sizes[self.depth :])))

    def _axes_after(self, parts: list[Part], n_dims: int) -> list[int]:
        """Where the dimensions of the numbers are from after an index."""
        selecting = [axis for axis, part in enumerate(parts) if not isinstance(part, slice)]
        arrays = [axis for axis in selecting if isinstance(parts[axis], np.ndarray)]
        axes = [axis for number, axis in enumerate(self.axes) if number not in selecting]
        if arrays:
            # As in NumPy, what arrays select comes first unless all of them stand together.
            is_together = selecting[-1] - selecting[0] + 1 == len(selecting)
            at = selecting[0] if is_together else 0
            axes[at:at] = [min(self.axes[axis] for axis in arrays)] * (n_dims - len(axes))
        return axes

    def _deepest(self) -> Selection:
        """The same elements, each of them numbered."""
        block = self.sizes[self.depth :]
        within = np.arange(math.prod(block)).reshape(block)
        numbers = self.numbers.reshape(*self.numbers.shape, *[1] * len(block)) * within.size
        return Selection(self.sizes, len(self.sizes), numbers + within, self.origins, self.time)

    def shifted(self, n_steps: int) -> Selection:
        """As for a region."""
        time, numbers = self.time, self.numbers
        if time is not None:
            time = _moved(time, n_steps, self.sizes[0])
        elif numbers.size:
            numbers = numbers + n_steps * self._row_stride
            ends = [int(end) // self._row_stride for end in (numbers.min(), numbers.max())]
            _check_rows(ends, n_steps, self.sizes[0])
        return Selection(self.sizes, self.depth, numbers, self.axes, time)

    def place(self, allocation: Values) -> tuple[Values, Any]:
        """As for a region."""
        sizes = self.sizes
        flat = allocation.reshape(math.prod(sizes[: self.depth]), *sizes[self.depth :])
        return flat, self._all_numbers()


def _along(axis: int, numbers: Values, n_dims: int) -> Values:
    """Numbers that lie along one of some dimensions."""
    return numbers.reshape(-1, *[1] * (n_dims - axis - 1))


def _is_all(part: Part) -> bool:
    return isinstance(part, slice) and part == EVERYTHING


def _as_slice(dim: range) -> slice:
    if not dim:
        return slice(0, 0)
    return slice(dim.start, dim.stop if dim.stop >= 0 else None, dim.step)


def _moved(time: Any, n_steps: int, n_rows: int) -> Any:
    """A row, or a range of rows, some steps later."""
    if isinstance(time, int):
        _check_rows([time + n_steps], n_steps, n_rows)
        return time + n_steps
    later = range(time.start + n_steps, time.stop + n_steps, time.step)
    _check_rows([*later[:1], *later[-1:]], n_steps, n_rows)
    return later


def _check_rows(ends: list[int], n_steps: int, n_rows: int) -> None:
    if ends and not 0 <= min(ends) <= max(ends) < n_rows:
        raise IndexError(
            compose(
                f"some rows have no row one time step {'later' if n_steps > 0 else 'earlier'}",
                fix="give the array padding, or ask for the neighbours of fewer rows",
            )
        )


def _in_time(dim: range, n_rows: int, part: Part) -> int | range | Values:
    """Rows that a part means: ints and arrays checked, slices clamped to the rows that there are.

    Args:
        dim: The rows that a view shows.
        n_rows: Rows that there are.
        part: Counts from the start of the view.
    """
    lowest, highest = sorted((-dim.start / dim.step, (n_rows - 1 - dim.start) / dim.step))
    low, high = math.ceil(lowest), math.floor(highest) + 1
    if not isinstance(part, slice):
        rows = [part] if isinstance(part, int) else [part.min(), part.max()] if part.size else []
        outside = [row for row in rows if not low <= row < high]
        if outside:
            there = f"rows {low} to {high - 1} exist" if low < high else "no row exists"
            raise IndexError(
                compose(
                    f"row {outside[0]} is outside of the array: counted from its start, {there}",
                    fix=f"{len(dim)} rows are visible; padding or a larger full_size give more",
                )
            )
        return dim.start + dim.step * part
    step = 1 if part.step is None else part.step
    first, last = 0, len(dim)
    if step < 0:
        low, high, first, last = low - 1, high - 1, last - 1, -1
    start, stop = (
        min(max(default if bound is None else bound, low), high)
        for bound, default in ((part.start, first), (part.stop, last))
    )
    return range(dim.start + dim.step * start, dim.start + dim.step * stop, dim.step * step)


# What users write between brackets --------------------------------------------------------------


def read_key(key: Any, shape: tuple[int, ...]) -> list[Part]:
    """One part for each dimension of a view.

    Raises:
        IndexError: If the key is no index for it.
    """
    entries = [_entry(entry) for entry in (key if isinstance(key, tuple) else (key,))]
    if not shape and isinstance(key, slice) and key == EVERYTHING:
        return []  # [:] is all, of an element too
    ellipses = [at for at, entry in enumerate(entries) if entry is Ellipsis]
    if len(ellipses) > 1:
        raise IndexError("an index can have only one ellipsis ('...')")
    n_named = sum(entry.ndim if _is_mask(entry) else 1 for entry in entries) - len(ellipses)
    if n_named > len(shape):
        raise IndexError(
            f"too many indices: the array has {len(shape)} dimensions, {n_named} were indexed"
        )
    at = ellipses[0] if ellipses else len(entries)
    entries[at : at + 1] = [EVERYTHING] * (len(shape) - n_named)
    parts: list[Part] = []
    for entry in entries:
        if not _is_mask(entry):
            parts.append(entry)
        elif entry.shape == shape[len(parts) : len(parts) + entry.ndim]:
            parts.extend(entry.nonzero())
        else:
            raise IndexError(
                f"a mask of shape {entry.shape} cannot select from dimensions of shape "
                f"{shape[len(parts) : len(parts) + entry.ndim]}"
            )
    return parts


def _is_mask(entry: Any) -> bool:
    return isinstance(entry, np.ndarray) and entry.dtype == np.bool_


def _entry(entry: Any) -> Any:
    """An int, a slice of ints, an array of ints or bools, or an ellipsis."""
    if type(entry) is int or isinstance(entry, EllipsisType):
        return entry
    try:
        if isinstance(entry, slice):
            bounds = (entry.start, entry.stop, entry.step)
            return slice(*(None if bound is None else operator.index(bound) for bound in bounds))
        array = as_numpy(entry) if isinstance(entry, torch.Tensor) else np.asarray(entry)
    except (TypeError, ValueError, RuntimeError):
        array = np.empty((), object)
    if not array.size and not hasattr(entry, "__array__"):
        array = array.astype(np.int64)  # an empty list is one of floats to NumPy
    if array.dtype.kind in "iu":
        return array.astype(np.int64, copy=False) if array.ndim else int(array)
    if array.dtype.kind == "b" and array.ndim:
        return array
    raise IndexError(
        compose(
            "a view cannot get new dimensions (None, np.newaxis)"
            if entry is None
            else f"{type(entry).__name__} {str(entry)[:60]!r} is no index",
            fix="index with ints, slices of ints, '...', arrays of ints or masks, or a tuple of "
            "these; to_ndarray() and to_tensor() can get new dimensions",
        )
    )


def as_numpy(tensor: torch.Tensor) -> Values:
    """A tensor's values; TypeError or RuntimeError for a sparse tensor, or one without values."""
    values = tensor.detach().cpu().resolve_conj().resolve_neg()
    array: Values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return array
