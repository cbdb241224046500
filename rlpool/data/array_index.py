"""Which elements of an allocation a view shows, and what an index of that view means.

An allocation has a first dimension, the time, of which views see a window; the rows around the
window exist as well. A ``Region`` names elements of an allocation dimension by dimension:

- an ``int``: the dimension is gone, it was indexed with an int;
- a ``Span``: every ``step``-th element;
- an int array: whatever an index array or a mask selected. All dimensions selected together form
  the *group*: their arrays have the same shape, and its dimensions stand somewhere among the spans.

Indices of the time count from the start of the view, and whatever the allocation has can be
reached: -1 is the row before the first. In all other dimensions they mean what NumPy means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlpool.data.index_keys import (
    EVERYTHING,
    Indices,
    Part,
    absolute,
    broadcast_shape,
    for_numpy,
    from_end,
    read_key,
)
from rlpool.errors import compose


class Span(NamedTuple):
    """Elements ``start + step * i`` of a dimension, for ``0 <= i < length``."""

    start: int
    step: int
    length: int

    def reach(self, size: int) -> range:
        """Values of ``i``, within the length or not, that name one of ``size`` elements."""
        if self.step > 0:
            return range(-(self.start // self.step), (size - 1 - self.start) // self.step + 1)
        return range(-((size - 1 - self.start) // -self.step), self.start // -self.step + 1)

    def sliced(self, part: range) -> Span:
        """The span of some of its elements."""
        return Span(self.start + self.step * part.start, self.step * part.step, len(part))

    def as_slice(self) -> slice:
        """The same for NumPy."""
        if not self.length:
            return slice(0, 0)
        stop = self.start + self.step * self.length
        return slice(self.start, stop if stop >= 0 else None, self.step)


class Region:
    """Elements of an allocation, in the order in which a view shows them.

    Attributes:
        sizes: Shape of the allocation.
        dims: For each of its dimensions which elements.
        group_at: How many dimensions of the view come before those of the group.
        is_gathered: Whether there is a group, so that reading has to copy.
    """

    __slots__ = ("dims", "group_at", "is_gathered", "sizes")

    def __init__(
        self, sizes: tuple[int, ...], dims: tuple[int | Span | Indices, ...], group_at: int = 0
    ) -> None:
        self.sizes = sizes
        self.dims = dims
        self.group_at = group_at
        self.is_gathered = np.ndarray in map(type, dims)

    @property
    def group_shape(self) -> tuple[int, ...]:
        """Shape of the group, ``()`` if there is none."""
        for dim in self.dims:
            if isinstance(dim, np.ndarray):
                shape: tuple[int, ...] = dim.shape
                return shape
        return ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the view."""
        lengths = [dim.length for dim in self.dims if isinstance(dim, Span)]
        if not self.is_gathered:
            return tuple(lengths)
        return (*lengths[: self.group_at], *self.group_shape, *lengths[self.group_at :])

    def n_dims_from(self, n_dims: int) -> int:
        """How many leading dimensions of the view come from the first ``n_dims`` that there are."""
        spans = [number for number, dim in enumerate(self.dims) if isinstance(dim, Span)]
        in_group = [n for n, dim in enumerate(self.dims) if isinstance(dim, np.ndarray)]
        # The group counts where its first dimension counts.
        group = in_group[:1] * len(self.group_shape)
        origin = [*spans[: self.group_at], *group, *spans[self.group_at :]]
        return max((at + 1 for at, number in enumerate(origin) if number < n_dims), default=0)

    # Indexing -----------------------------------------------------------------------------------

    def index(self, key: Any) -> Region:
        """The region of an indexed view.

        Raises:
            IndexError: If the key is no index, or an int or an index array leaves the allocation.
        """
        simple = None if self.is_gathered else self._at_ints(key)
        if simple is not None:
            return simple
        parts = read_key(key, self.shape)
        if not any(isinstance(part, np.ndarray) for part in parts):
            return self._sliced(parts)
        if not self.is_gathered:
            return self._gathered(parts)
        return self._gathered_again(parts)

    def _at_ints(self, key: Any) -> Region | None:
        """Indexed with ints alone, as is done at every step; ``None`` for anything else."""
        dims = list(self.dims)
        number = -1
        for entry in key if type(key) is tuple else (key,):
            number += 1
            while number < len(dims) and type(dims[number]) is int:
                number += 1
            if number == len(dims) or type(entry) is not int:
                return None
            start, step, length = dims[number]  # type: ignore[misc]
            place = start + step * (entry if entry >= 0 or not number else entry + length)
            if number and not -length <= entry < length:
                return None
            if not 0 <= place < self.sizes[number]:
                return None
            dims[number] = place
        return Region(self.sizes, tuple(dims))

    def _sliced(self, parts: Sequence[Part]) -> Region:
        """Indexed with ints and slices only."""
        before, of_group, after = self._divide(parts)
        in_group = tuple(self._within_group(number, part) for number, part in enumerate(of_group))
        spans = iter((*before, *after))
        dims = tuple(
            self._part_of_span(number, dim, next(spans))
            if isinstance(dim, Span)
            else dim[in_group]
            if isinstance(dim, np.ndarray)
            else dim
            for number, dim in enumerate(self.dims)
        )
        return self._with(dims, sum(isinstance(part, slice) for part in before))

    def _gathered(self, parts: Sequence[Part]) -> Region:
        """Indexed with arrays for the first time."""
        remaining = iter(parts)
        dims = [
            self._part_of_span(number, dim, next(remaining)) if isinstance(dim, Span) else dim
            for number, dim in enumerate(self.dims)
        ]
        shape = broadcast_shape([dim for dim in dims if isinstance(dim, np.ndarray)])
        whole = tuple(
            np.array(np.broadcast_to(dim, shape))
            if isinstance(dim, np.ndarray) and dim.shape != shape
            else dim
            for dim in dims
        )
        first, is_together = _selecting(parts)
        return self._with(whole, first if is_together else 0)

    def _gathered_again(self, parts: Sequence[Part]) -> Region:
        """Indexed with arrays once more: NumPy indexes the coordinates of the elements."""
        group_end = self.group_at + len(self.group_shape)
        n_touched = 1 + max(
            at for at, part in enumerate(parts) if not isinstance(part, slice) or part != EVERYTHING
        )
        # One group has room for what was selected before and now, and for all between.
        end = max(n_touched, group_end)
        first, is_together = _selecting(parts)
        start = min(first, self.group_at) if is_together else 0
        dims: list[int | Span | Indices] = list(self.dims)
        key: list[Part] = []
        coordinates: dict[int, Indices] = {}
        for at, number in enumerate(self._origin()):
            dim = None if number is None else self.dims[number]
            if not isinstance(dim, Span) or number is None:
                key.append(self._within_group(at - self.group_at, parts[at]))
            elif not start <= at < end:
                dims[number] = self._part_of_span(number, dim, parts[at])
            elif isinstance(parts[at], int):
                dims[number] = self._part_of_span(number, dim, parts[at])
                key.append(0)
            else:
                # Of the time, all that can be reached; of other dimensions what is visible.
                within = range(dim.length) if number else dim.reach(self.sizes[0])
                places = dim.start + dim.step * np.arange(within.start, within.stop)
                coordinates[number] = places.reshape(-1, *[1] * (end - 1 - at))
                key.append(for_numpy(self._on_span(number, dim, parts[at]), -within.start))
        for number, dim in enumerate(self.dims):
            if isinstance(dim, np.ndarray):
                coordinates[number] = dim.reshape(*dim.shape, *[1] * (end - group_end))
        shape = broadcast_shape(list(coordinates.values()))
        shape = (*[1] * (end - start - len(shape)), *shape)
        for number, places in coordinates.items():
            dims[number] = np.array(np.broadcast_to(places, shape)[tuple(key)])
        return self._with(dims, start)

    def _with(self, dims: Sequence[int | Span | Indices | np.generic], group_at: int) -> Region:
        """Another region of this allocation; a group without dimensions is ints again."""
        clean = (
            dim
            if isinstance(dim, int | Span) or (isinstance(dim, np.ndarray) and dim.ndim)
            else int(dim)
            for dim in dims
        )
        return Region(self.sizes, tuple(clean), group_at)

    def _divide(self, parts: Sequence[Part]) -> tuple[Sequence[Part], ...]:
        """Parts before, on and behind the group."""
        end = self.group_at + len(self.group_shape)
        return parts[: self.group_at], parts[self.group_at : end], parts[end:]

    def _origin(self) -> Iterator[int | None]:
        """For each dimension of the view that of the allocation, ``None`` for the group's."""
        spans = [number for number, dim in enumerate(self.dims) if isinstance(dim, Span)]
        yield from spans[: self.group_at]
        yield from [None] * len(self.group_shape)
        yield from spans[self.group_at :]

    def _part_of_span(self, number: int, span: Span, part: Part) -> int | Span | Indices:
        part = self._on_span(number, span, part)
        if isinstance(part, slice):
            return span.sliced(range(part.start, part.stop, part.step))
        return span.start + span.step * part

    def _on_span(self, number: int, span: Span, part: Part) -> Part:
        """An index of a span: slices with three ints, all else checked and not negative."""
        if number == 0:
            return absolute(part, span.reach(self.sizes[0]), span.length)
        if isinstance(part, slice):
            return slice(*part.indices(span.length))
        return from_end(part, span.length)

    def _within_group(self, number: int, part: Part) -> Part:
        """An index of one of the group's dimensions, for NumPy."""
        length = self.group_shape[number]
        if number == 0 and isinstance(self.dims[0], np.ndarray):
            return for_numpy(absolute(part, range(length), length))
        return part if isinstance(part, slice) else from_end(part, length)

    # Time ---------------------------------------------------------------------------------------

    def shifted(self, n_steps: int) -> Region:
        """The same rows some time steps later.

        Raises:
            IndexError: If the allocation has no such rows.
        """
        time = self.dims[0]
        moved: int | Span | Indices
        if isinstance(time, Span):
            moved = time._replace(start=time.start + n_steps)
            ends = [moved.start, moved.start + moved.step * (moved.length - 1)]
            ends = ends if time.length else []
        else:
            moved = time + n_steps
            ends = [int(np.min(moved)), int(np.max(moved))] if np.size(moved) else []
        if ends and not 0 <= min(ends) <= max(ends) < self.sizes[0]:
            raise IndexError(
                compose(
                    f"there is no row one time step {'later' if n_steps > 0 else 'earlier'} for "
                    "all rows of this array",
                    fix="give the array padding, or ask for the neighbours of fewer rows",
                )
            )
        return Region(self.sizes, (moved, *self.dims[1:]), self.group_at)

    # Elements -----------------------------------------------------------------------------------

    def read(self, allocation: Indices) -> Indices:
        """The elements: a view, or a copy where index arrays are needed."""
        if not self.is_gathered:
            view: Indices = allocation[self._basic()]
            return view
        elements: Indices = self._group_first(allocation)[self._arrays()]
        if not self.group_at:
            return elements
        group = range(len(self.group_shape))
        return np.moveaxis(elements, group, [number + self.group_at for number in group])

    def write(self, allocation: Indices, values: Any) -> None:
        """Put values into the elements; raises what NumPy raises if they do not fit."""
        if not self.is_gathered:
            allocation[self._basic()] = values
            return
        if not isinstance(values, bool | int | float | complex):  # NumPy checks the range of these
            values = self._with_group_first(np.asarray(values))
        self._group_first(allocation)[self._arrays()] = values

    def _with_group_first(self, values: Indices) -> Indices:
        """Values to be written, with the dimensions of the group in front as well."""
        while values.ndim > len(self.shape) and values.shape[0] == 1:
            values = values[0]
        if self.group_at:
            values = np.broadcast_to(values, self.shape)
            group = range(len(self.group_shape))
            values = np.moveaxis(values, [number + self.group_at for number in group], group)
        return values

    def _basic(self) -> tuple[Any, ...]:
        """Index of the allocation that leaves dimensions of the group alone; gives a view."""
        basic = (
            dim.as_slice()
            if isinstance(dim, Span)
            else slice(None)
            if isinstance(dim, np.ndarray)
            else dim
            for dim in self.dims
        )
        return (*basic, ...)  # with an ellipsis, a single element is a view as well

    def _group_first(self, allocation: Indices) -> Indices:
        """The allocation with the dimensions that the group selects from in front."""
        left = [dim for dim in self.dims if not isinstance(dim, int)]
        axes = [axis for axis, dim in enumerate(left) if isinstance(dim, np.ndarray)]
        elements: Indices = allocation[self._basic()]
        if axes == list(range(len(axes))):
            return elements
        return np.moveaxis(elements, axes, range(len(axes)))

    def _arrays(self) -> tuple[Indices, ...]:
        return tuple(dim for dim in self.dims if isinstance(dim, np.ndarray))


def _selecting(parts: Sequence[Part]) -> tuple[int, bool]:
    """Where arrays and ints begin, and whether no slice stands between them.

    If one does, what they select comes first in the result, as in NumPy.
    """
    is_slice = [isinstance(part, slice) for part in parts]
    first = is_slice.index(False)
    last = len(parts) - 1 - is_slice[::-1].index(False)
    return first, not any(is_slice[first:last])
