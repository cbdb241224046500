"""Which elements of an allocation a view shows, and what an index of that view means.

Indices of the first dimension, the time, count from the start of the view, and whatever the
allocation has can be reached: -1 is the row before the first. In all other dimensions they mean
what they mean to NumPy.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from functools import lru_cache
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
    """Elements of an allocation, in the order in which a view shows them.

    Attributes:
        sizes: Shape of the allocation.
        dims: For each of its dimensions an int, if it was indexed with one, or a range, or
            ``None``, if index arrays or masks selected from it.
        numbers: What these selected, as flat element numbers over the dimensions that are ``None``.
        at: How many dimensions of the view come before those of ``numbers``.
    """

    sizes: tuple[int, ...]
    dims: tuple[int | range | None, ...]
    numbers: Values | None = None
    at: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the view."""
        lengths = [len(dim) for dim in self.dims if type(dim) is range]
        if self.numbers is None:
            return tuple(lengths)
        return (*lengths[: self.at], *self.numbers.shape, *lengths[self.at :])

    def origins(self) -> list[int | None]:
        """For each dimension of the view that of the allocation; ``None`` for those of numbers."""
        ranges: list[int | None] = [n for n, dim in enumerate(self.dims) if type(dim) is range]
        n_numbers = 0 if self.numbers is None else self.numbers.ndim
        return [*ranges[: self.at], *[None] * n_numbers, *ranges[self.at :]]

    def n_dims_from(self, n_dims: int) -> int:
        """How many leading dimensions of the view come from the first ``n_dims`` that there are."""
        # Numbers count where the first dimension counts that they select from.
        selected = self.dims.index(None) if None in self.dims else 0
        origins = [selected if number is None else number for number in self.origins()]
        return max((at + 1 for at, number in enumerate(origins) if number < n_dims), default=0)

    # Indexing -----------------------------------------------------------------------------------

    def index(self, key: Any) -> Region:
        """The region of an indexed view.

        Raises:
            IndexError: If the key is no index, or an int or an index array leaves the allocation.
        """
        element = self._at_ints(key)
        if element is not None:
            return element
        parts = read_key(key, self.shape)
        at, merged = self._merged(parts)
        dims = list(self.dims)
        of_numbers: list[Part] = []  # index of the dimensions that become numbers
        sources: list[tuple[int, Values]] = []  # what is added up, and along which of these
        for axis, (number, part) in enumerate(zip(self.origins(), parts, strict=True)):
            if number is None:
                if axis == self.at:
                    sources.append((len(of_numbers), self.numbers))  # type: ignore[arg-type]
                of_numbers.append(self._within_numbers(axis - self.at, part))
                continue
            places = self._within_range(number, part)
            if isinstance(places, int) or (isinstance(places, range) and axis not in merged):
                dims[number] = places
                if axis in merged:
                    of_numbers.append(0)
                continue
            dims[number] = None
            if isinstance(places, range):
                places, chosen = np.arange(places.start, places.stop, places.step), EVERYTHING
            else:
                chosen = np.arange(places.size).reshape(places.shape)
            sources.append((len(of_numbers), places.ravel() * _strides(self.sizes)[number]))
            of_numbers.append(chosen)
        numbers = _added_up(sources, of_numbers)
        if numbers is None or numbers.ndim:
            return Region(self.sizes, tuple(dims), numbers, at)
        for number, dim in enumerate(dims):  # of a single element nothing is left to be selected
            if dim is None:
                dims[number] = int(numbers) // _strides(self.sizes)[number] % self.sizes[number]
        return Region(self.sizes, tuple(dims))

    def _at_ints(self, key: Any) -> Region | None:
        """Indexed with ints alone, as is done at every step; ``None`` for anything else."""
        dims = list(self.dims)
        number = -1
        for entry in key if type(key) is tuple else (key,):
            number += 1
            while number < len(dims) and type(dims[number]) is int:
                number += 1
            if self.numbers is not None or number == len(dims) or type(entry) is not int:
                return None
            dim: range = dims[number]  # type: ignore[assignment]
            place = dim.start + dim.step * (entry if entry >= 0 or not number else entry + len(dim))
            if not 0 <= place < self.sizes[number] or (number and place not in dim):
                return None
            dims[number] = place
        return Region(self.sizes, tuple(dims))

    def _merged(self, parts: list[Part]) -> tuple[int, range | list[int]]:
        """Where numbers stand after an index, and which dimensions of the view become numbers."""
        n_numbers = 0 if self.numbers is None else self.numbers.ndim
        if not any(isinstance(part, np.ndarray) for part in parts):
            before = sum(isinstance(part, slice) for part in parts[: self.at])
            return before, range(self.at, self.at + n_numbers)
        selecting = [axis for axis, part in enumerate(parts) if not isinstance(part, slice)]
        # As in NumPy, what arrays select comes first unless all of them stand together.
        is_together = selecting[-1] - selecting[0] + 1 == len(selecting)
        start = selecting[0] if is_together else 0
        if self.numbers is None:
            return start, [axis for axis in selecting if isinstance(parts[axis], np.ndarray)]
        start = min(start, self.at)
        return start, range(start, max(selecting[-1] + 1, self.at + n_numbers))

    def _within_range(self, number: int, part: Part) -> int | range | Values:
        """Places that a part means in a dimension of the allocation."""
        dim: range = self.dims[number]  # type: ignore[assignment]
        if number == 0:
            return _in_time(dim, self.sizes[0], part)
        if isinstance(part, np.ndarray):
            places: Values = np.arange(dim.start, dim.stop, dim.step)[part]
            return places
        if isinstance(part, int) and not -len(dim) <= part < len(dim):
            raise IndexError(f"index {part} is out of bounds for a dimension of size {len(dim)}")
        return dim[part]

    def _within_numbers(self, axis: int, part: Part) -> Part:
        """A part of a dimension of the numbers, for NumPy."""
        if axis or self.dims[0] is not None:
            return part
        length = self.shape[self.at]
        places = _in_time(range(length), length, part)
        return _as_slice(places) if isinstance(places, range) else places

    def shifted(self, n_steps: int) -> Region:
        """The same rows some time steps later.

        Raises:
            IndexError: If the allocation has no such rows.
        """
        time, numbers = self.dims[0], self.numbers
        ends: list[int] = []
        if isinstance(time, int):
            time += n_steps
            ends = [time]
        elif isinstance(time, range):
            time = range(time.start + n_steps, time.stop + n_steps, time.step)
            ends = [time[0], time[-1]] if time else []
        elif numbers is not None and numbers.size:
            numbers = numbers + n_steps * _strides(self.sizes)[0]
            ends = [int(end) // _strides(self.sizes)[0] for end in (numbers.min(), numbers.max())]
        if ends and not 0 <= min(ends) <= max(ends) < self.sizes[0]:
            raise IndexError(
                compose(
                    f"there is no row one time step {'later' if n_steps > 0 else 'earlier'} for "
                    "all rows of this array",
                    fix="give the array padding, or ask for the neighbours of fewer rows",
                )
            )
        return replace(self, dims=(time, *self.dims[1:]), numbers=numbers)

    # Elements -----------------------------------------------------------------------------------

    def read(self, allocation: Values) -> Values:
        """The elements: a view, or a copy if there are numbers."""
        target, key = self._in(allocation)
        elements: Values = target[key]
        return elements

    def write(self, allocation: Values, values: Any) -> None:
        """Put values into the elements; raises what NumPy raises if they do not fit."""
        target, key = self._in(allocation)
        target[key] = values

    def _in(self, allocation: Values) -> tuple[Values, Any]:
        """A view of the allocation, and the index that gives the elements of it."""
        if self.numbers is None:
            key = [_as_slice(dim) if type(dim) is range else dim for dim in self.dims]
            return allocation, (*key, ...)  # with an ellipsis, a single element is a view as well
        # Dimensions at the end that are shown in full stay as they are.
        partial = [n for n, dim in enumerate(self.dims) if dim != range(self.sizes[n])]
        n_leading = partial[-1] + 1
        origins = self.origins()
        origins = [number for number in origins if number is None or number < n_leading]
        sources = [(self.at, self.numbers)]
        for number, dim in enumerate(self.dims[:n_leading]):
            if type(dim) is range:
                places = np.arange(dim.start, dim.stop, dim.step) * _strides(self.sizes)[number]
                sources.append((origins.index(number), places))
        numbers: Any = _added_up(sources, [EVERYTHING] * len(origins))
        for number, dim in enumerate(self.dims):
            if type(dim) is int:
                numbers = numbers + dim * _strides(self.sizes)[number]
        flat = allocation.reshape(math.prod(self.sizes[:n_leading]), *self.sizes[n_leading:])
        return flat, numbers // _strides(self.sizes)[n_leading - 1]


@lru_cache(maxsize=256)
def _strides(sizes: tuple[int, ...]) -> list[int]:
    """Of each dimension of an allocation; sizes of 0 count as 1, so that none is 0."""
    return [math.prod(size or 1 for size in sizes[number:]) for number in range(1, len(sizes) + 1)]


def _added_up(sources: list[tuple[int, Values]], key: list[Part]) -> Values | None:
    """The indexed sum of arrays that lie along some of as many dimensions as the key has parts."""
    sizes = [1] * len(key)
    for axis, numbers in sources:
        sizes[axis : axis + numbers.ndim] = numbers.shape
    total = None
    for axis, numbers in sources:
        wide = numbers.reshape(*numbers.shape, *[1] * (len(key) - axis - numbers.ndim))
        selected = np.asarray(np.broadcast_to(wide, sizes)[tuple(key)])
        total = selected if total is None else total + selected
    return total


def _as_slice(dim: range) -> slice:
    if not dim:
        return slice(0, 0)
    return slice(dim.start, dim.stop if dim.stop >= 0 else None, dim.step)


def _in_time(dim: range, n_rows: int, part: Part) -> int | range | Values:
    """Rows that a part means: ints and arrays checked, slices clamped to the rows that there are.

    Args:
        dim: The rows that a view shows.
        n_rows: Rows that there are.
        part: Counts from the start of the view.
    """
    if dim.step > 0:
        reach = range(-(dim.start // dim.step), (n_rows - 1 - dim.start) // dim.step + 1)
    else:
        reach = range(-((n_rows - 1 - dim.start) // -dim.step), dim.start // -dim.step + 1)
    if not isinstance(part, slice):
        outside = np.ravel(part)[np.ravel((part < reach.start) | (part >= reach.stop))]
        if outside.size:
            there = f"rows {reach.start} to {reach.stop - 1} exist" if reach else "no row exists"
            raise IndexError(
                compose(
                    f"row {outside[0]} is outside of the array: counted from its first row, "
                    f"{there}",
                    fix=f"{len(dim)} rows are visible; padding or a larger full_size give more",
                )
            )
        return dim.start + dim.step * part
    step = 1 if part.step is None else part.step
    low, high, first, last = reach.start, reach.stop, 0, len(dim)
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
            f"{type(entry).__name__} {str(entry)[:60]!r} is no index",
            fix="index with ints, slices of ints, '...', arrays of ints or masks, or a tuple of "
            "these; to_ndarray() and to_tensor() can get new dimensions",
        )
    )


def as_numpy(tensor: torch.Tensor) -> Values:
    """A tensor's values; TypeError or RuntimeError for a sparse tensor, or one without values."""
    values = tensor.detach().cpu().resolve_conj().resolve_neg()
    array: Values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return array
