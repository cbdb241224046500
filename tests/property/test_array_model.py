"""Array against a plain model: a flat list of values, and views that list where theirs are.

The model of a view knows for every index of the time which row of the allocation it means, found by
counting, and leaves all other dimensions to NumPy.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpool.data.array import Array

FAR = 40  # more than any index that is drawn, and than any allocation has rows


@dataclass
class Model:
    """A view.

    Attributes:
        n_rows: Rows of the allocation.
        ids: What is visible: for each element its number in the allocation.
        axis: Which dimension is the time, ``None`` if there is none any more.
        rows: Index to row of the allocation, for all indices that exist; ``None`` after an index
            array or a mask selected rows, when only what is visible can be reached.
        rest: ``ids`` of row 0 without the time, if there are ``rows``.
    """

    n_rows: int
    row_size: int
    ids: Any
    axis: int | None = 0
    rows: dict[int, int] | None = None
    rest: Any = None

    def showing(self, rest: Any, axis: int, rows: dict[int, int], length: int) -> Model:
        """A view that can reach some rows, of which so many are visible."""
        ids = self.stacked(rest, [rows[i] for i in range(length)], axis)
        return replace(self, ids=ids, axis=axis, rows=rows, rest=rest)

    def stacked(self, rest: Any, rows: list[int], axis: int) -> Any:
        if not rows:
            return np.empty((*rest.shape[:axis], 0, *rest.shape[axis:]), int)
        return np.stack([rest + row * self.row_size for row in rows], axis)

    def gathered(self, ids: Any, axis: int | None) -> Model:
        return replace(self, ids=ids, axis=axis, rows=None)

    def shifted(self, n_steps: int) -> Model:
        later = self.ids // self.row_size + n_steps
        if ((later < 0) | (later >= self.n_rows)).any():
            raise IndexError
        if self.rows is None:
            return self.gathered(self.ids + n_steps * self.row_size, self.axis)
        rows = reachable(self.start() + n_steps, self.step(), self.n_rows)
        assert self.axis is not None
        return self.showing(self.rest, self.axis, rows, self.ids.shape[self.axis])

    def start(self) -> int:
        assert self.rows
        i = min(self.rows)
        return self.rows[i] - i * self.step()

    def step(self) -> int:
        assert self.rows is not None
        if len(self.rows) < 2:
            return FAR
        i = min(self.rows)
        return self.rows[i + 1] - self.rows[i]

    def index(self, parts: list[Any]) -> Model:
        """Index with one part per dimension of ``ids``, an int, a slice or an index array."""
        if self.axis is None:
            return self.gathered(self.ids[tuple(parts)], None)
        part, key, length = parts[self.axis], [*parts], self.ids.shape[self.axis]
        reach = range(length) if self.rows is None else self.rows
        low, high = min(reach, default=0), max(reach, default=-1) + 1
        if not isinstance(part, slice):
            if not all(int(place) in reach for place in np.ravel(part)):
                raise IndexError
            ids = self.ids
            if self.rows is not None:
                ids = self.stacked(self.rest, [self.rows[i] for i in sorted(reach)], self.axis)
            key[self.axis] = part - low
            return self.gathered(ids[tuple(key)], self.axis_after(key))
        key[self.axis] = slice(None)
        axis = self.axis_after(key)
        seen = counted(part, low, high, length)
        if self.rows is None:
            return self.gathered(np.take(self.ids, seen, self.axis)[tuple(key)], axis)
        assert axis is not None
        rest = np.take(np.expand_dims(self.rest, self.axis)[tuple(key)], 0, axis)
        step, begin = part.step or 1, first_of(part, low, high, length)
        places = {i: begin + step * i for i in range(-FAR, FAR)}
        rows = {i: self.rows[place] for i, place in places.items() if place in self.rows}
        return self.showing(rest, axis, rows, len(seen))

    def axis_after(self, parts: list[Any]) -> int | None:
        """Where NumPy puts the time: tried with a length that no other dimension has."""
        assert self.axis is not None
        if isinstance(parts[self.axis], int):
            return None
        sizes = list(self.ids.shape)
        key = [np.zeros_like(part) if isinstance(part, np.ndarray) else part for part in parts]
        key = [0 if isinstance(part, int) else part for part in key]
        if isinstance(parts[self.axis], np.ndarray):
            key = [np.zeros(103, int) if isinstance(part, np.ndarray) else part for part in key]
        else:
            sizes[self.axis] = 103
        sizes = [max(1, size) for size in sizes]
        return np.empty(sizes, np.int8)[tuple(key)].shape.index(103)


def reachable(start: int, step: int, n_rows: int) -> dict[int, int]:
    places = {i: start + step * i for i in range(-FAR, FAR)}
    return {i: row for i, row in places.items() if 0 <= row < n_rows}


def first_of(part: slice, low: int, high: int, length: int) -> int:
    forward = part.step is None or part.step > 0
    if part.start is None:
        return 0 if forward else length - 1
    return min(max(part.start, low if forward else low - 1), high if forward else high - 1)


def counted(part: slice, low: int, high: int, length: int) -> list[int]:
    """Indices that a slice of the time means, one by one."""
    step = 1 if part.step is None else part.step
    i = first_of(part, low, high, length)
    stop = part.stop if part.stop is not None else (length if step > 0 else -1)
    found = []
    while (i < min(stop, high)) if step > 0 else (i > max(stop, low - 1)):
        found.append(i)
        i += step
    return found


# Drawing ----------------------------------------------------------------------------------------

bounds = st.none() | st.integers(-5, 9)
steps = st.sampled_from([None, 1, 2, 3, -1, -2])
slices = st.builds(slice, bounds, bounds, steps)


@st.composite
def keys(draw: st.DrawFn, shape: tuple[int, ...], with_arrays: bool) -> tuple[Any, list[Any]]:
    """A key for an array of this shape, and what it means for every dimension."""
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
    rows = reachable(start, 1, n_rows)
    return Model(n_rows, row_size, None).showing(rest, 0, rows, array.shape[0])


def check(array: Array, model: Model, values: Any) -> None:
    expected = values[model.ids]
    assert array.shape == expected.shape
    found = array.to_ndarray()
    assert found.dtype == np.int64
    assert (found == expected).all()
    assert (array == expected).all()


def both(of_array: Any, of_model: Any) -> tuple[Array, Model] | None:
    """The same operation on both; ``None`` if both refuse it."""
    try:
        model = of_model()
    except IndexError:
        with pytest.raises(IndexError):
            of_array()
        return None
    return of_array(), model


def hold_arrays(pipe: Connection) -> None:
    """Keep what arrives, move the window of the first, tell what all of them show."""
    held: list[Array] = []
    while (message := pipe.recv()) is not None:
        command, received = message
        if command == "forget":
            held.clear()
        elif command == "hold":
            held.append(received)
        elif command:
            getattr(held[0], command)()
        pipe.send([array.to_ndarray() for array in held])


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Connection]:
    """A pipe to a process that holds arrays."""
    with warnings.catch_warnings():  # Python 3.12 warns of forking with threads
        warnings.simplefilter("ignore", DeprecationWarning)
        context = get_context("fork")
        here, there = context.Pipe()
        process = context.Process(target=hold_arrays, args=(there,))
        process.start()
    there.close()
    yield here
    here.send(None)
    process.join()
    process.close()
    here.close()


@settings(max_examples=400)
@given(made=arrays(), data=st.data())
def test_any_sequence_of_indexing_writing_rotating_and_shifting_is_that_of_the_model(
    elsewhere: Connection, made: tuple[Array, Model, Any], data: st.DataObject
) -> None:
    array, model, values = made
    is_local = array.storage == "local"
    sent: list[Model] = []  # the views that the other process has, behind the whole array

    def ask(command: str | None, sends: Array | None = None) -> list[Any]:
        elsewhere.send((command, sends))
        answer: list[Any] = elsewhere.recv()
        return answer

    ask("forget")
    if not is_local:
        ask("hold", array)
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
            may_gather = view_model.rows is not None or view_model.axis is not None
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
        elif operation == "next" and view_model.ids.size:  # of nothing, the model has no row
            step = data.draw(st.sampled_from([1, -1]), "step")
            found = both(
                lambda v=view, s=step: v.next if s == 1 else v.previous,
                lambda m=view_model, s=step: m.shifted(s),
            )
        elif operation == "rotate":
            there = not is_local and data.draw(st.booleans(), "there")
            if data.draw(st.integers(0, 5), "reset") == 0:
                ask("reset") if there else array.reset()
                start = padding + full_size - window
            else:
                ask("rotate") if there else array.rotate()
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
            ask("hold", view)
            sent.append(view_model)
        if found is not None:
            check(*found, values)
            views.append(found)
        check(array, model, values)
        for other in views:
            check(*other, values)
        if not is_local:
            for shown, meant in zip(ask(None), [model, *sent], strict=True):
                np.testing.assert_array_equal(shown, values[meant.ids], strict=True)
    assert (array._allocation.values.ravel() == values).all()
    assert (copy.deepcopy(array).full == array.full).all()
