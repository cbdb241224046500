"""Views of an array's memory, and indexing of views.

Indices of the first dimension (time) count from the start of the view and reach every row of the
memory: -1 is the row before the first. In all other dimensions they work as in NumPy.
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
class View:
    """The positions that a view shows in each dimension of the memory.

    Index arrays and masks turn the leading dimensions that they cover into index arrays that NumPy
    broadcasts. Time stays a range until rows are selected.

    Attributes:
        sizes: Shape of the memory.
        dims: For each dimension of the memory a position, a range, or an index array.
        axes: For each dimension of the index arrays, the (first) dimension of the memory it
            indexes. Where time is a range, they have size 1 in its dimension.
    """

    sizes: tuple[int, ...]
    dims: tuple[Any, ...]
    axes: tuple[int, ...] = ()

    @property
    def arrays(self) -> dict[int, Values]:
        """The index arrays, by dimension of the memory."""
        return {n: dim for n, dim in enumerate(self.dims) if isinstance(dim, np.ndarray)}

    @property
    def origins(self) -> list[int]:
        """For each dimension of the view, the first dimension of the memory it covers."""
        if not self.axes:
            return [number for number, dim in enumerate(self.dims) if type(dim) is range]
        tail = range(max(self.arrays) + 1, len(self.dims))
        return [*self.axes, *(number for number in tail if type(self.dims[number]) is range)]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the view."""
        if not self.axes:
            return tuple([len(dim) for dim in self.dims if type(dim) is range])
        selected = np.broadcast_shapes(*(array.shape for array in self.arrays.values()))
        shape = [*selected, *(len(self.dims[n]) for n in self.origins[len(self.axes) :])]
        if type(self.dims[0]) is range:
            shape[self.axes.index(0)] = len(self.dims[0])
        return tuple(shape)

    def index(self, key: Any) -> View:
        """Index a view.

        Raises:
            IndexError: If the key is not an index, or leaves the memory.
        """
        if not self.axes and (element := self._at_ints(key if type(key) is tuple else (key,))):
            return element
        parts = read_key(key, self.shape)
        if self.axes or any(isinstance(part, np.ndarray) for part in parts):
            return self._gathered(parts)
        return View(self.sizes, self._selected(self.origins, parts))

    def _at_ints(self, key: tuple[Any, ...]) -> View | None:
        """Index with valid ints, the fast path of every time step; ``None`` for anything else."""
        dims = [*self.dims]
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
        return View(self.sizes, tuple(dims))

    def _selected(self, origins: list[int], parts: list[Part]) -> tuple[Any, ...]:
        """Return the dims after ints and slices have selected from some of them."""
        dims = [*self.dims]
        for number, part in zip(origins, parts, strict=True):
            if number:
                try:
                    dims[number] = dims[number][part]
                except IndexError:
                    message = f"index {part} is out of bounds for size {len(dims[number])}"
                    raise IndexError(message) from None
            else:
                dims[0] = _rows(dims[0], self.sizes[0], part)
        return tuple(dims)

    def _gathered(self, parts: list[Any]) -> View:
        """Index with arrays, or index a view that has index arrays, by NumPy's rules."""
        origins, n_axes = self.origins, len(self.axes)
        n_leading = n_axes
        if any(isinstance(part, np.ndarray) for part in parts):
            # Next to arrays, ints act as one-element arrays: they affect the order of dimensions.
            selecting = [at for at, part in enumerate(parts) if not isinstance(part, slice)]
            n_leading = max(n_axes, selecting[-1] + 1)
        dims = [*self._selected(origins[n_leading:], parts[n_leading:])]
        leading, parts = origins[:n_leading], parts[:n_leading]
        sources = {
            number: array.reshape(array.shape + (1,) * (n_leading - n_axes))
            for number, array in self.arrays.items()
        }
        for at, number in enumerate(leading):
            if not number and type(dims[0]) is range:
                found = _rows(dims[0], self.sizes[0], parts[at])
                if type(found) is range:
                    dims[0], parts[at] = found, EVERYTHING  # other arrays do not vary by row
                else:
                    sources[0] = _along(at, np.arange(self.sizes[0]), n_leading)
                    parts[at] = found
            elif not number and 0 not in leading[:at]:
                found = _rows(range(self.shape[at]), self.shape[at], parts[at])
                parts[at] = _as_index(found) if type(found) is range else found
            elif number and at >= n_axes:
                sources[number] = _along(at, np.array(dims[number], np.int64), n_leading)
        places = [array[tuple(parts)] for array in np.broadcast_arrays(*sources.values())]
        axes = _axes_after(leading, parts, places[0].ndim)
        for number, place in zip(sources, places, strict=True):
            dims[number] = place if axes else int(place)  # a single position
        return View(self.sizes, tuple(dims), tuple(axes))

    def shifted(self, n_steps: int) -> View:
        """Return the same rows some time steps later.

        Raises:
            IndexError: If the memory has no such rows.
        """
        rows = self.dims[0]
        places = np.array(rows) + n_steps
        if places.size and not 0 <= places.min() <= places.max() < self.sizes[0]:
            side = "later" if n_steps > 0 else "earlier"
            raise _index_error(
                f"some rows have no row one time step {side}",
                "give the array padding, or select fewer rows first",
            )
        if type(rows) is range:
            later: Any = range(rows.start + n_steps, rows.stop + n_steps, rows.step)
        else:
            later = rows + n_steps
        return View(self.sizes, (later, *self.dims[1:]), self.axes)

    def place(self, values: Values) -> tuple[Values, Any]:
        """Return a NumPy view of the memory, and the index of this view's elements in it."""
        if not self.axes:
            key: list[Any] = [_as_index(dim) if type(dim) is range else dim for dim in self.dims]
            key.append(...)  # with an ellipsis, a single element is a view too
            return values[tuple(key)], ...
        dims, arrays = [*self.dims], tuple(self.arrays.values())
        if type(dims[0]) is range:
            rows = _along(self.axes.index(0), np.array(dims[0], np.int64), len(self.axes))
            dims[0], arrays = rows, (rows, *arrays)
        return values[tuple(map(_as_index, dims))], arrays


def _along(axis: int, numbers: Values, n_dims: int) -> Values:
    """Reshape numbers to lie along one of ``n_dims`` dimensions."""
    return numbers.reshape([-1 if axis == other else 1 for other in range(n_dims)])


def _as_index(dim: Any) -> Any:
    """Convert positions in one dimension to an int or slice; everything for index arrays."""
    if type(dim) is range:
        return slice(dim.start, dim.stop if dim.stop >= 0 else None, dim.step) if dim else slice(0)
    return EVERYTHING if isinstance(dim, np.ndarray) else dim


def _axes_after(axes: list[int], parts: list[Part], n_dims: int) -> list[int]:
    """Return the memory dimension of each dimension that is left after indexing."""
    selecting = [axis for axis, part in enumerate(parts) if not isinstance(part, slice)]
    arrays = [axis for axis in selecting if isinstance(parts[axis], np.ndarray)]
    after = [number for axis, number in enumerate(axes) if axis not in selecting]
    if arrays:
        # As in NumPy, the dimensions of arrays come first unless the arrays are adjacent.
        is_together = selecting[-1] - selecting[0] + 1 == len(selecting)
        at = selecting[0] if is_together else 0
        after[at:at] = [min(axes[axis] for axis in arrays)] * (n_dims - len(after))
    return after


def _rows(dim: range, n_rows: int, part: Part) -> int | range | Values:
    """Resolve an index of rows: ints and arrays are checked, slices are clipped.

    Args:
        dim: The rows of the view.
        n_rows: Number of rows in memory.
        part: The index, counted from the start of the view.
    """
    lowest, highest = sorted((-dim.start / dim.step, (n_rows - 1 - dim.start) / dim.step))
    low, high = math.ceil(lowest), math.floor(highest) + 1
    if not isinstance(part, slice):
        rows = [part] if isinstance(part, int) else [part.min(), part.max()] if part.size else []
        outside = [row for row in rows if not low <= row < high]
        if outside:
            exist = f"rows {low} to {high - 1} exist" if low < high else "no row exists"
            raise _index_error(
                f"row {outside[0]} is outside the array: counted from its start, {exist}",
                f"{len(dim)} rows are visible; padding or a larger full_size adds rows",
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


# Parsing of index keys --------------------------------------------------------------------------


def read_key(key: Any, shape: tuple[int, ...]) -> list[Part]:
    """Split a key into one part for each dimension of a view.

    Raises:
        IndexError: If the key is not an index of the view.
    """
    entries = [_entry(entry) for entry in (key if isinstance(key, tuple) else (key,))]
    if not shape and isinstance(key, slice) and key == EVERYTHING:
        return []  # [:] selects everything, even of a single element
    ellipses = [at for at, entry in enumerate(entries) if entry is Ellipsis]
    if len(ellipses) > 1:
        raise IndexError("an index can have only one ellipsis ('...')")
    n_indexed = sum(entry.ndim if _is_mask(entry) else 1 for entry in entries) - len(ellipses)
    if n_indexed > len(shape):
        raise IndexError(
            f"too many indices: the array has {len(shape)} dimensions, {n_indexed} were indexed"
        )
    at = ellipses[0] if ellipses else len(entries)
    entries[at : at + 1] = [EVERYTHING] * (len(shape) - n_indexed)
    parts: list[Part] = []
    for entry in entries:
        if not _is_mask(entry):
            parts.append(entry)
            continue
        sizes = shape[len(parts) : len(parts) + entry.ndim]
        if entry.shape != sizes:
            raise IndexError(f"a mask of shape {entry.shape} cannot select from shape {sizes}")
        parts.extend(entry.nonzero())
    return parts


def _is_mask(entry: Any) -> bool:
    return isinstance(entry, np.ndarray) and entry.dtype == np.bool_


def _entry(entry: Any) -> Any:
    """Convert a key entry to an int, a slice, an array of ints or bools, or an ellipsis."""
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
        array = array.astype(np.int64)  # NumPy reads an empty list as floats
    if array.dtype.kind in "iu":
        return array.astype(np.int64) if array.ndim else int(array)
    if array.dtype.kind == "b" and array.ndim:
        return array
    raise _index_error(
        f"{type(entry).__name__} {str(entry)[:60]!r} is not an index",
        "index with ints, slices of ints, '...', arrays of ints or masks, or a tuple of these; "
        "add dimensions to to_ndarray() or to_tensor()",
    )


def _index_error(message: str, fix: str) -> IndexError:
    return IndexError(compose(message, fix=fix))


def as_numpy(tensor: torch.Tensor) -> Values:
    """Convert a tensor to NumPy; bfloat16, which NumPy lacks, becomes float32.

    Raises TypeError or RuntimeError for a sparse tensor or one without values.
    """
    values = tensor.detach().cpu().resolve_conj().resolve_neg()
    array: Values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return array
