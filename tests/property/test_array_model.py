"""Array against a plain model: a flat list of values, and views that list their positions.

For every index along the time dimension, the model of a view finds the row of the allocation by
counting; NumPy handles all other dimensions.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpool.data.array import Array

FAR = range(-40, 40)
"""Wider than the indices that are drawn, and than any allocation."""


@dataclass
class Model:
    """A view.

    Attributes:
        n_rows: Number of rows in the allocation.
        row_size: Number of elements per row.
        ids: What is visible: for each element its number in the allocation.
        axis: Time dimension, ``None`` if there is none any more.
        rest: ``ids`` of row 0 without the time.
        start: Row of index 0.
        step: From one index to the next; 0 after an index array or a mask selected rows, when only
            what is visible can be reached.
    """

    n_rows: int
    row_size: int
    ids: Any
    axis: int | None = None
    rest: Any = None
    start: int = 0
    step: int = 0

    def showing(self, rest: Any, axis: int, start: int, step: int, length: int) -> Model:
        """Return a view of rows and of those around them."""
        model = replace(self, axis=axis, rest=rest, start=start, step=step)
        return replace(model, ids=model.stacked(range(length)))

    def stacked(self, indices: Iterable[int]) -> Any:
        rows = [self.rest + (self.start + self.step * i) * self.row_size for i in indices]
        none = np.empty((*self.rest.shape[: self.axis], 0, *self.rest.shape[self.axis :]), int)
        return np.stack(rows, self.axis) if rows else none

    def gathered(self, ids: Any, axis: int | None) -> Model:
        return Model(self.n_rows, self.row_size, ids, axis)

    def shifted(self, n_steps: int) -> Model:
        later = self.ids // self.row_size + n_steps
        if ((later < 0) | (later >= self.n_rows)).any():
            raise IndexError
        ids = self.ids + n_steps * self.row_size
        return replace(self, ids=ids, start=self.start + n_steps)

    def index(self, parts: list[Any]) -> Model:
        """Index with one int, slice or index array per dimension of ``ids``."""
        if self.axis is None:
            return self.gathered(self.ids[tuple(parts)], None)
        part, key, length = parts[self.axis], [*parts], self.ids.shape[self.axis]
        reach = [*range(length)]
        if self.step:
            reach = [i for i in FAR if 0 <= self.start + self.step * i < self.n_rows]
        low, high = min(reach, default=0), max(reach, default=-1) + 1
        if not isinstance(part, slice):
            if not all(int(place) in reach for place in np.ravel(part)):
                raise IndexError
            key[self.axis] = part - low
            ids = self.stacked(reach) if self.step else self.ids
            return self.gathered(ids[tuple(key)], self.axis_after(key))
        key[self.axis] = slice(None)
        axis = self.axis_after(key)
        first, seen = counted(part, low, high, length)
        if not self.step:
            return self.gathered(np.take(self.ids, seen, self.axis)[tuple(key)], axis)
        assert axis is not None
        rest = np.take(np.expand_dims(self.rest, self.axis)[tuple(key)], 0, axis)
        start, step = self.start + self.step * first, self.step * (part.step or 1)
        return self.showing(rest, axis, start, step, len(seen))

    def axis_after(self, parts: list[Any]) -> int | None:
        """Return NumPy's position of the time dimension, found by giving it a unique length."""
        assert self.axis is not None
        part = parts[self.axis]
        if isinstance(part, int):
            return None
        sizes, length = [max(1, size) for size in self.ids.shape], 2
        if isinstance(part, slice):
            sizes[self.axis] = 103
        else:
            length = 103
        key = [
            np.zeros(length, int) if isinstance(each, np.ndarray) else 0 if each is int else each
            for each in (int if isinstance(part, int) else part for part in parts)
        ]
        return np.empty(sizes, np.int8)[tuple(key)].shape.index(103)


def counted(part: slice, low: int, high: int, length: int) -> tuple[int, list[int]]:
    """Return the first index of a slice along time, and all its indices."""
    step = 1 if part.step is None else part.step
    first, stop = 0, length
    if step < 0:
        first, stop, low, high = length - 1, -1, low - 1, high - 1
    if part.start is not None:
        first = min(max(part.start, low), high)
    if part.stop is not None:
        stop = min(max(part.stop, low), high)
    found, i = [], first
    while i < stop if step > 0 else i > stop:
        found.append(i)
        i += step
    return first, found


# Drawing ----------------------------------------------------------------------------------------

bounds = st.none() | st.integers(-5, 9)
steps = st.sampled_from([None, 1, 2, 3, -1, -2])
slices = st.builds(slice, bounds, bounds, steps)


@st.composite
def keys(draw: st.DrawFn, shape: tuple[int, ...], with_arrays: bool) -> tuple[Any, list[Any]]:
    """Draw a key for an array of this shape, and its meaning for every dimension."""
    n_arrays = draw(st.integers(1, 3))
    kinds = ["slice", "slice", "int", "all"] + ["array", "mask"] * with_arrays
    written: list[Any] = []
    meant: list[Any] = []
    for size in shape:
        kind = draw(st.sampled_from(kinds))
        if kind == "slice":
            part = draw(slices)
            written, meant = [*written, part], [*meant, part]
        elif kind == "int":
            place = draw(st.integers(-4, 8))
            kind_of_int = draw(st.sampled_from([int, np.int64, np.int16]))
            written, meant = [*written, kind_of_int(place)], [*meant, place]
        elif kind == "array":
            places = draw(st.lists(st.integers(-3, 6), min_size=n_arrays, max_size=n_arrays))
            convert = draw(st.sampled_from([list, np.array]))
            written, meant = [*written, convert(places)], [*meant, np.array(places)]
        elif kind == "mask" and size >= n_arrays:
            chosen = draw(st.permutations(range(size)))[:n_arrays]
            mask = np.isin(np.arange(size), chosen)
            written, meant = [*written, mask], [*meant, mask.nonzero()[0]]
        else:
            written, meant = [*written, slice(None)], [*meant, slice(None)]
    n_written = draw(st.integers(1, len(shape)))
    meant = [*meant[:n_written], *[slice(None)] * (len(shape) - n_written)]
    key: Any = tuple(written[:n_written])
    if draw(st.booleans()):
        key = (*key, ...)
    elif len(key) == 1 and draw(st.booleans()):
        key = key[0]
    return key, meant


@st.composite
def arrays(draw: st.DrawFn) -> tuple[Array, Model, np.ndarray]:  # type: ignore[type-arg]
    window = draw(st.integers(1, 5))
    padding = draw(st.integers(0, window))
    full_size = window * draw(st.integers(1, 3))
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    features = draw(st.lists(st.integers(1, 3), max_size=1))
    storage = draw(st.sampled_from(["local", "local", "shared", "memmap"]))
    array = Array(
        (window, *batch),
        np.int64,
        feature_shape=features,
        storage=storage,
        padding=padding,
        full_size=full_size,
    )
    n_rows = full_size + 2 * padding
    values = np.zeros(n_rows * int(np.prod([*batch, *features])), np.int64)
    return array, window_of(array, padding), values


def window_of(array: Array, start: int) -> Model:
    n_rows = array.full_size + 2 * array.padding
    sizes = array.shape[1:]
    row_size = int(np.prod(sizes))
    rest = np.arange(row_size).reshape(sizes)
    return Model(n_rows, row_size, None).showing(rest, 0, start, 1, array.shape[0])


def check(array: Array, model: Model, values: Any) -> None:
    expected = values[model.ids]
    assert array.shape == expected.shape
    found = array.to_ndarray()
    assert found.dtype == np.int64
    assert (found == expected).all()
    assert (array == expected).all()


def both(of_array: Any, of_model: Any) -> tuple[Array, Model] | None:
    """Run the same operation on both; ``None`` if both refuse it."""
    # NumPy before 2.3 warns about an invalid index if the result is empty, which is an error here.
    refused = (IndexError, DeprecationWarning)
    try:
        model = of_model()
    except refused:
        with pytest.raises(refused):
            of_array()
        return None
    return of_array(), model


@settings(max_examples=150)
@given(made=arrays(), data=st.data())
def test_any_sequence_of_indexing_writing_rotating_and_shifting_matches_the_model(
    made: tuple[Array, Model, Any], data: st.DataObject
) -> None:
    array, model, values = made
    is_local = array.storage == "local"
    twin = array if is_local else pickle.loads(pickle.dumps(array))
    padding, window = array.padding, array.shape[0]
    full_size = array.full_size
    start = padding
    views: list[tuple[Array, Model]] = []
    counter = 0
    for _ in range(data.draw(st.integers(1, 8), "n_operations")):
        known = [(array, model), *views]
        view, view_model = known[data.draw(st.integers(0, len(known) - 1), "view")]
        operation = data.draw(
            st.sampled_from(
                ["index", "index", "write", "write", "next", "rotate", "full", "pickle"]
            )
        )
        found: tuple[Array, Model] | None = None
        if operation in ("index", "write") and view.shape:
            may_gather = view_model.axis is not None
            key, meant = data.draw(keys(view.shape, may_gather), "key")
            if operation == "index":
                found = both(lambda v=view, k=key: v[k], lambda m=view_model, p=meant: m.index(p))
            else:
                counter += 100

                def write(v: Array = view, k: Any = key, c: int = counter) -> None:
                    v[k] = c

                written = both(write, lambda m=view_model, p=meant: m.index(p))
                if written is not None:
                    values[written[1].ids] = counter
        elif operation == "write":
            counter += 100
            view[...] = np.arange(counter, counter + view_model.ids.size).reshape(view.shape)
            values[view_model.ids.ravel()] = np.arange(counter, counter + view_model.ids.size)
        elif operation == "next" and view_model.ids.size:  # the model of an empty view has no rows
            step = data.draw(st.sampled_from([1, -1]), "step")
            found = both(
                lambda v=view, s=step: v.next if s == 1 else v.previous,
                lambda m=view_model, s=step: m.shifted(s),
            )
        elif operation == "rotate":
            moved = data.draw(st.sampled_from([array, twin]), "moved")
            if data.draw(st.integers(0, 5), "reset") == 0:
                moved.reset()
                start = padding + full_size - window
            else:
                moved.rotate()
                start += window
                if start == padding + full_size:
                    start = padding
                    n = model.row_size
                    values[: 2 * padding * n] = values[full_size * n :].copy()
            model = window_of(array, start)
        elif operation == "full":
            found = view.full, window_of(array.full, padding)
        elif operation == "pickle" and not is_local and view is not array:
            found = pickle.loads(pickle.dumps(view)), view_model
        if found is not None:
            check(*found, values)
            views.append(found)
        check(array, model, values)
        for other in views:
            check(*other, values)
        check(twin, model, values)
    assert (array._allocation.values.ravel() == values).all()
    copied = copy.deepcopy(array)
    check(copied, model, values)  # with its own window
    copied.rotate()
    copied.full[...] = -1
    check(array, model, values)
