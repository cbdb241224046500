"""Array in one process: arguments, kinds of indices and values, conversions, windows, closing.

The property test compares the elements selected by an index with a model.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import Array, SpecError, UsageError

from support.machines import limit_disk


def counted(n_rows: int = 5, **options: Any) -> Array:
    """Every reachable row holds its own index: ``array[-1]`` is -1, ``array[7]`` is 7."""
    array = Array((n_rows,), np.int64, **options)
    low, high = -array.padding, array.full_size + array.padding
    array[low:high] = np.arange(low, high)
    return array


PLAIN = np.arange(12).reshape(4, 3)


def values(array: Array) -> Any:
    return array.to_ndarray().tolist()


# Construction -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("storage", "padding", "full_size"), [("local", 0, None), ("memmap", 5, 15)]
)
def test_a_new_array_is_zero_and_has_the_given_attributes(
    storage: str, padding: int, full_size: int | None
) -> None:
    options: Any = {"storage": storage, "padding": padding, "full_size": full_size}
    array = Array((5, 4), np.float32, feature_shape=(3,), **options)
    assert (array.shape, array.batch_shape, array.feature_shape) == ((5, 4, 3), (5, 4), (3,))
    assert (array.ndim, array.n_batch_dims, len(array)) == (3, 2, 5)
    assert (array.dtype, type(array.dtype)) == (np.float32, type(np.dtype(np.float32)))
    assert (array.storage, array.padding, array.full_size) == (storage, padding, full_size or 5)
    assert (array.first, array.last) == (0, 4)
    everything = array[-padding : array.full_size + padding]
    assert len(everything) == array.full_size + 2 * padding
    assert not everything.to_ndarray().any()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        *(({"batch_shape": value}, "batch_shape") for value in ((), (0,), (2.0,))),
        *(({"feature_shape": value}, "feature_shape") for value in ((-1,), (None,))),
        *(({"padding": value}, "padding") for value in (-1, 5, 1.0)),
        *(({"full_size": value}, "full_size") for value in (3, 10)),
        *(({"dtype": value}, "dtype") for value in (object, "no such type", torch.bfloat16)),
        ({"storage": "disk"}, "storage"),
        ({"directory": "/tmp"}, "directory"),
        ({"storage": "memmap", "directory": "/no/such/place"}, "/no/such/place"),
        ({"storage": "memmap", "batch_shape": (1 << 58,)}, "EFBIG|ENOSPC"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        Array(**{"batch_shape": (4, 2), "dtype": np.float32, **arguments})


def test_a_memmap_reserves_its_space(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_disk(monkeypatch, lambda start, n_bytes: True)
    with pytest.raises(SpecError, match="ENOSPC"):
        Array((1000,), "float64", storage="memmap")


def test_numbers_and_bools_are_stored_and_read_back() -> None:
    for dtype in (bool, "uint8", "c8", torch.float16):
        array = Array((2, 3), dtype)
        given = np.array([[1, 0, 1], [0, 1, 1]]).astype(array.dtype)
        array[...] = given
        array[0] = torch.from_numpy(given[1])
        assert array.to_ndarray().dtype == given.dtype
        assert array.to_tensor()[0].equal(torch.from_numpy(given[1]))


# Indices ----------------------------------------------------------------------------------------


def test_an_array_is_a_sequence_of_its_visible_elements_without_padding() -> None:
    array = counted(4, padding=2, full_size=8)
    assert [int(row.to_ndarray()) for row in reversed(array)] == [3, 2, 1, 0]
    assert (3 in array, -1 in array, len(array)) == (True, False, 4)
    assert values(array[1:3][()]) == [1, 2]
    with pytest.raises(IndexError, match="rows -2 to 9 exist"):
        array[10]


def test_single_elements_are_arrays() -> None:
    array = counted(4)
    for element in (array[2], array[[1, 2]][1]):
        assert (element.shape, element.n_batch_dims) == ((), 0)
        element[...] = 7
        element.to_tensor().add_(1)
        assert values(array) == [0, 1, 8, 3]
        with pytest.raises(IndexError):
            element[0] = 1
        for ask in (len, iter, lambda a: a.last):
            with pytest.raises(TypeError, match="element"):
                ask(element)
    assert (bool(array[1]), bool(array[0])) == (True, False)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(array)


def test_lists_tensors_and_ranges_select_like_arrays_and_give_writable_views() -> None:
    for key in (
        *(np.array([[0, 1], [2, 2]]), torch.tensor([3, 0]), range(2), [], np.uint8(3)),
        *(torch.tensor(2), PLAIN % 2 == 0, torch.tensor([True, False, False, False])),
    ):
        array, expected = Array((4, 3), np.int64), PLAIN.copy()
        array[...] = PLAIN
        numpy_key = np.asarray(key) if isinstance(key, torch.Tensor | range) else key
        view = array[key]
        assert view.to_ndarray().tolist() == PLAIN[numpy_key].tolist()
        if view.ndim == 3:  # only its first dimension is time
            assert values(view[:, -1]) == PLAIN[key][:, -1].tolist()
        view[...] = expected[numpy_key] = -1
        assert (array == expected).all()
        array[key] = expected[numpy_key] = -2
        assert (array == expected).all()


@pytest.mark.parametrize(
    "index",
    [
        *(None, 1.0, "a", True, [0.5], [[1], [1, 2]], slice(0.5, 2), torch.zeros(1).bfloat16()),
        *((0, 0, 0), (..., 0, ...), [True, False], np.ones((4, 3, 1), bool), ([0, 1], [0, 1, 2])),
    ],
    ids=str,
)
def test_other_objects_are_refused_as_indices(index: Any) -> None:
    with pytest.raises(IndexError):
        Array((4, 3), np.int64)[index] = 1


def test_shapes_distinguish_batch_from_features() -> None:
    array = Array((5, 4), "float32", feature_shape=(2, 3))
    array[...] = np.arange(120).reshape(5, 4, 2, 3)
    for key, batch_shape, feature_shape in [
        ((0, 0, 0), (), (3,)),
        ((..., 0), (5, 4), (2,)),
        (([0, 1], [2, 3]), (2,), (2, 3)),
        (np.ones((5, 4), bool), (20,), (2, 3)),
        (([1, 2], slice(None), [0, 1]), (2, 4), (3,)),
        ((slice(None), [0, 1], slice(None), [0, 1]), (2, 5), (2,)),
    ]:
        view = array[key]
        assert (view == array.to_ndarray()[key]).all()
        assert view.batch_shape == batch_shape
        assert view.feature_shape == feature_shape


# Writing ----------------------------------------------------------------------------------------


# NumPy 2 warns about tensors of earlier versions of torch.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
def test_values_of_every_kind_can_be_written() -> None:
    source = Array((3, 2), np.int16, storage="shared")
    source[...] = [[1, 2], [3, 4], [5, 6]]
    for value in (
        *(source, source.to_ndarray(), source.to_tensor(), values(source)),
        *(source.to_tensor().to(torch.bfloat16), source.to_tensor().float().requires_grad_()),
        list(source.to_tensor()),
    ):
        array = Array((3, 2), np.float32)
        array[[2, 1, 0]] = value
        assert (array[::-1] == source).all()


def test_overlapping_values_are_written_as_if_copied_first() -> None:
    for destination, source in [
        (slice(1, None), slice(0, 4)),
        (slice(None), slice(None, None, -1)),
        ([0, 1, 2, 3, 4], slice(None, None, -1)),
        ([1, 2, 3], slice(0, 3)),
    ]:
        array, plain = counted(5), np.arange(5)
        array[destination] = array[source]
        plain[destination] = plain[source].copy()
        assert (array == plain).all()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((slice(None), [1, 2, 3]), ([0, 1], np.zeros((3, 2))), (0, torch.zeros(5))),
        *((0, "text"), ([0, 1], 10**30), ([0, 1], None), (0, [[1], [1, 2]])),
    ],
    ids=str,
)
def test_incompatible_values_are_refused_and_nothing_is_written(key: Any, value: Any) -> None:
    array = Array((4, 2), np.int32)
    array[...] = 7
    with pytest.raises(SpecError, match="int32"):
        array[key] = value
    assert (array == 7).all()


def test_writing_converts_as_numpys_assignment_does() -> None:
    for dtype in (np.int32, np.bool_, np.float32):
        for value in (1.9, -1.5, [[2.5], [-0.5]], np.float64(3.7), torch.ones(2) / 3):
            array, plain = Array((4, 2), dtype), np.zeros((4, 2), dtype)
            for key in (slice(1, 3), [3, 0]):
                array[key], plain[key] = value, np.asarray(value)
            assert (array == plain).all()


# Reading ----------------------------------------------------------------------------------------


def test_reading_gives_views_or_copies_after_index_arrays() -> None:
    array = Array((3, 2), np.float32)
    array.to_ndarray()[0, 0] = 1
    array[1:].to_tensor()[1, 0] = 3
    array[2, 1].to_ndarray()[...] = 4
    array[::2].to_tensor()[0, 1] = 5
    for tensor in (array.to_tensor(), torch.as_tensor(np.asarray(array))):
        assert tensor.data_ptr() == array.to_ndarray().ctypes.data
    for plain in (np.asarray(array), np.array(array, copy=False)):
        assert np.shares_memory(plain, array.to_ndarray())
    backwards = array[::-1, ::-1].to_tensor()  # a copy: tensors have no negative strides
    assert backwards.tolist() == [[4, 3], [0, 0], [5, 1]]
    copies = [backwards, array[[0, 1]].to_ndarray(), array[[0, 1]].to_tensor(), np.array(array)]
    for copied in copies:
        copied[...] = 9
    assert values(array) == [[1, 5], [0, 0], [3, 4]]


def test_numpy_functions_accept_arrays() -> None:
    array: Any = counted(4)
    assert np.array(array, np.float32).tolist() == [0, 1, 2, 3]
    assert np.asarray(array, np.float32).dtype == np.float32
    for part, dtype in [(array, np.float32), (array[[0]], None)]:
        with pytest.raises(ValueError, match="copy"):
            part.__array__(dtype, copy=False)
    assert np.concatenate([array, array[1:3]]).tolist() == [0, 1, 2, 3, 1, 2]
    for found, expected in [
        (array == [0, 5, 2, 3], [True, False, True, True]),
        (array != torch.tensor([0, 5, 2, 3]), [False, True, False, False]),
        (np.array([0, 1, 2, 2]) == array, [True, True, True, False]),
        (array == counted(4), [True] * 4),
        (array == 1, [False, True, False, False]),
    ]:
        assert found.tolist() == expected
    for wrong in (lambda: array + 1, lambda: hash(array), Array((2,), np.longdouble).to_tensor):
        with pytest.raises(TypeError):
            wrong()


# Windows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["rotate", "reset"])
def test_only_a_whole_array_moves_its_window(method: str) -> None:
    array = counted(2, padding=1, full_size=4)
    for view in (array[:], array[0:1], array.full, array.next, array[[0, 1]], copy.copy(array)):
        with pytest.raises(UsageError, match="view"):
            getattr(view, method)()


# Closing ----------------------------------------------------------------------------------------


def test_access_after_close_raises() -> None:
    array = counted(3, padding=1, storage="shared")
    view = array[1:2]
    array.close()
    array.close()
    for access in (
        *(lambda array: array[0], lambda array: array.__setitem__(9, 1), Array.to_ndarray),
        *(Array.to_tensor, np.asarray, lambda array: array == 1, list, lambda array: 1 in array),
        *(lambda array: array.full, lambda array: array.next, Array.rotate, Array.reset),
        *(pickle.dumps, copy.deepcopy),
    ):
        for closed in (array, view):
            with pytest.raises(UsageError):
                access(closed)
    assert (array.shape, view.last) == ((3,), 0)


@pytest.mark.parametrize("storage", ["local", "shared", "memmap"])
def test_memory_lives_as_long_as_it_is_used(storage: str) -> None:
    array = counted(4, padding=1, storage=storage)
    memory = weakref.ref(array._allocation.memory)
    twin, part = copy.deepcopy((array, array[1:3]))
    view, plain, tensor = array[1:3], array.to_ndarray(), array[1:].to_tensor()
    copy.copy(array)[1] = 5
    del array
    gc.collect()
    assert values(view.full) == [0, 5, 2, 3]
    assert memory() is not None
    view.close()
    del view
    gc.collect()
    assert memory() is None
    plain[1] = 10
    assert tensor.tolist() == [10, 2, 3]
    assert (values(twin[-1:5]), twin.storage) == ([-1, 0, 1, 2, 3, 4], storage)
    twin[1] = 7
    assert values(part) == [7, 2]


def test_pickling_a_local_array_raises_and_names_an_alternative() -> None:
    for array in (counted(3), counted(3)[1:]):
        with pytest.raises(UsageError, match='storage="shared"'):
            pickle.dumps(array)


@pytest.mark.promise("I7")
def test_a_pickle_of_any_view_is_smaller_than_a_kilobyte() -> None:
    array = Array((5, 3), np.int64, (2,), padding=1, full_size=10, storage="shared")
    array.full[...] = np.arange(60).reshape(10, 3, 2)
    for part in (array[np.arange(1000) % 5], array[:, np.arange(1000) % 3], array[1:4][0][1:]):
        sent = pickle.dumps(part)
        assert len(sent) < 1000
        received = pickle.loads(sent)
        assert received.batch_shape == part.batch_shape
        received[...] = 42
        assert (part == 42).all()
    array.close()
