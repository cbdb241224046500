"""Array: each sentence of what it promises, in one process."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlpool
from rlpool.data.array import Array
from rlpool.errors import SpecError, UsageError

STORAGES = ("local", "shared", "memmap")
each_storage = pytest.mark.parametrize("storage", STORAGES)


def counted(n_rows: int = 5, **options: Any) -> Array:
    """Every reachable row holds its own index: ``array[-1]`` is -1, ``array[7]`` is 7."""
    array = Array((n_rows,), np.int64, **options)
    low, high = -array.padding, array.full_size + array.padding
    array[low:high] = np.arange(low, high)
    return array


def values(array: Array) -> Any:
    return array.to_ndarray().tolist()


# Making one -------------------------------------------------------------------------------------


@each_storage
@pytest.mark.parametrize("padding", [0, 1, 5])
@pytest.mark.parametrize("full_size", [None, 5, 15])
def test_a_new_array_is_zero_and_has_the_attributes_that_were_asked_for(
    storage: str, padding: int, full_size: int | None
) -> None:
    array = Array(
        (5, 4),
        np.float32,
        feature_shape=(3,),
        storage=storage,
        padding=padding,
        full_size=full_size,
    )
    assert array.shape == (5, 4, 3)
    assert array.batch_shape == (5, 4)
    assert array.feature_shape == (3,)
    assert array.n_batch_dims == 2
    assert array.ndim == 3
    assert len(array) == 5
    assert array.dtype == np.float32
    assert isinstance(array.dtype, np.dtype)
    assert array.storage == storage
    assert array.padding == padding
    assert array.full_size == (full_size or 5)
    assert (array.first, array.last) == (0, 4)
    assert not array.full.to_ndarray().any()
    assert not array[-padding : array.full_size + padding].to_ndarray().any()
    array.close()


def test_the_allocation_has_full_size_and_padding_at_both_ends() -> None:
    array = counted(3, padding=2, full_size=6)
    assert values(array[-100:100]) == [-2, -1, 0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"batch_shape": ()}, "batch_shape"),
        ({"batch_shape": (0,)}, "batch_shape"),
        ({"batch_shape": (-1,)}, "batch_shape"),
        ({"batch_shape": (2.0,)}, "batch_shape"),
        ({"batch_shape": (True,)}, "batch_shape"),
        ({"batch_shape": "5"}, "batch_shape"),
        ({"feature_shape": (-1,)}, "feature_shape"),
        ({"feature_shape": (None,)}, "feature_shape"),
        ({"padding": -1}, "padding"),
        ({"padding": 5}, "padding"),
        ({"padding": 1.0}, "padding"),
        ({"padding": None}, "padding"),
        ({"full_size": 3}, "full_size"),
        ({"full_size": 0}, "full_size"),
        ({"full_size": 10}, "full_size"),
        ({"full_size": "8"}, "full_size"),
        ({"storage": "disk"}, "storage"),
        ({"storage": None}, "storage"),
        ({"dtype": object}, "dtype"),
        ({"dtype": list}, "dtype"),
        ({"dtype": str}, "dtype"),
        ({"dtype": "no such type"}, "dtype"),
        ({"dtype": None}, "dtype"),
        ({"dtype": "datetime64[s]"}, "dtype"),
        ({"dtype": [("a", int)]}, "dtype"),
        ({"dtype": torch.bfloat16}, "dtype"),
        ({"batch_shape": (1 << 60,)}, "in all"),
        ({"directory": "/tmp"}, "directory"),
        ({"storage": "memmap", "directory": "/no/such/place"}, "/no/such/place"),
        ({"storage": "memmap", "batch_shape": (1 << 58,)}, "EFBIG|ENOSPC"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        Array(**{"batch_shape": (4, 2), "dtype": np.float32, **arguments})


def test_a_full_disk_is_an_error_when_the_array_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(fd: int, start: int, n_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", is_full)
    with pytest.raises(SpecError, match="ENOSPC"):
        Array((1000,), "float64", storage="memmap")


def test_a_memmap_lies_where_it_was_told_to_and_leaves_nothing_there(tmp_path: Path) -> None:
    array = Array((3,), "int64", storage="memmap", directory=tmp_path)
    array[...] = 1
    assert list(tmp_path.iterdir()) == []
    assert values(copy.deepcopy(array)) == [1, 1, 1]


@pytest.mark.parametrize("given", [4, [4], (4,), np.int64(4), torch.Size([4])], ids=repr)
def test_shapes_may_be_an_int_or_any_sequence(given: Any) -> None:
    assert Array(given, bool, feature_shape=given).shape == (4, 4)


DTYPES = [bool, "uint8", np.int8, "int16", np.int32, "int64", np.float16, "float32", float, "c8"]
TORCH_DTYPES = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32]


@each_storage
@pytest.mark.parametrize("dtype", DTYPES + TORCH_DTYPES, ids=str)
def test_every_number_type_and_bool_is_stored_and_read_back(storage: str, dtype: Any) -> None:
    array = Array((2, 3), dtype, storage=storage)
    given = np.array([[1, 0, 1], [0, 1, 1]]).astype(array.dtype)
    array[...] = given
    assert array.to_ndarray().dtype == given.dtype
    assert (array.to_ndarray() == given).all()
    array[0] = torch.from_numpy(given[1])
    assert array.to_tensor()[0].equal(torch.from_numpy(given[1]))
    assert array.to_tensor().dtype == torch.from_numpy(given).dtype
    if isinstance(dtype, torch.dtype):
        assert array.to_tensor().dtype == dtype
    array.close()


# Indices of the time ----------------------------------------------------------------------------


def test_indices_count_from_the_start() -> None:
    array = counted(5, padding=1)
    assert int(array[-1]) == -1
    assert int(array[array.first - 1]) == -1
    assert int(array[array.last + 1]) == 5
    assert int(array[array.last]) == 4


def test_indices_of_views_of_views_count_from_their_start() -> None:
    array = counted(6)
    assert int(array[1:4][-1]) == 0
    assert int(array[1:4][3]) == 4
    assert int(array[2:5][1:][-2]) == 1
    assert values(array[2::2]) == [2, 4]
    assert int(array[2::2][-1]) == 0
    assert values(array[3::-1]) == [3, 2, 1, 0]
    assert int(array[3::-1][-2]) == 5


@pytest.mark.parametrize("index", [-2, 6, 100, [0, -2], [6, 0], np.array([[-3]]), np.int64(6)])
def test_ints_and_index_arrays_outside_of_the_allocation_raise(index: Any) -> None:
    array = counted(5, padding=1)
    with pytest.raises(IndexError, match="rows -1 to 5 exist"):
        array[index]
    with pytest.raises(IndexError, match="rows -1 to 5 exist"):
        array[index] = 1


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(-100, 100), [-1, 0, 1, 2, 3, 4, 5]),
        (slice(3, 100), [3, 4, 5]),
        (slice(-1, None), [-1, 0, 1, 2, 3, 4]),
        (slice(None, 100), [0, 1, 2, 3, 4, 5]),
        (slice(None, -1), []),
        (slice(50, 60), []),
        (slice(-60, -50), []),
        (slice(100, -100, -1), [5, 4, 3, 2, 1, 0, -1]),
        (slice(100, -100, -3), [5, 2, -1]),
        (slice(None, -2, -1), [4, 3, 2, 1, 0, -1]),
        (slice(5, None, -2), [5, 3, 1]),
        (slice(None, None, -1), [4, 3, 2, 1, 0]),
        (slice(None, None, 2), [0, 2, 4]),
        (slice(2, 2), []),
        (slice(np.int64(1), np.int8(3)), [1, 2]),
    ],
    ids=str,
)
def test_slices_are_clamped_to_the_rows_that_there_are(index: slice, expected: list[int]) -> None:
    assert values(counted(5, padding=1)[index]) == expected


def test_all_means_what_is_visible_and_never_the_padding() -> None:
    array = counted(4, padding=2, full_size=8)
    for everything in (slice(None), ..., (), (slice(None), ...)):
        assert values(array[everything]) == [0, 1, 2, 3]
        assert values(array[1:3][everything]) == [1, 2]
    array[:] = 9
    array[...] = 9
    assert values(array[-2:10]) == [-2, -1, 9, 9, 9, 9, 4, 5, 6, 7, 8, 9]


def test_reversed_and_stepped_slices_compose_as_in_numpy() -> None:
    array, plain = counted(20), np.arange(20)
    for first in (slice(None, None, -1), slice(1, 18, 3), slice(15, 2, -2), slice(4, 19)):
        for second in (slice(None, None, -1), slice(None, None, 2), slice(1, 4), slice(3, 0, -2)):
            for third in (slice(None), slice(None, None, -1), slice(1, None)):
                expected = plain[first][second][third].tolist()
                assert values(array[first][second][third]) == expected


def test_in_other_dimensions_indices_mean_what_numpy_means() -> None:
    array = Array((3, 4), np.int64, feature_shape=(5,), padding=1)
    plain = np.arange(60).reshape(3, 4, 5)
    array[...] = plain
    for key in [
        (0, -1),
        (slice(None), -1),
        (1, slice(-2, None)),
        (2, slice(None, -1), -2),
        (..., -1),
        (1, ..., slice(None, None, -2)),
        (slice(1, 3), [-1, 0]),
        (0, slice(-100, 100)),
        (0, [True, False, True, False]),
    ]:
        assert (array[key] == plain[key]).all()
        assert array[key].shape == plain[key].shape
    assert (array[1][-1] == plain[1][-1]).all()
    assert (array[2, [0, 1]][-1] == plain[2, 1]).all()
    for key in [(0, 4), (0, -5), (0, [0, 4]), (0, 0, 5)]:
        with pytest.raises(IndexError, match="out of bounds"):
            array[key]


# Other kinds of indices -------------------------------------------------------------------------


def test_index_arrays_lists_masks_and_numpy_ints_give_arrays_that_write_here() -> None:
    plain = np.arange(12).reshape(4, 3)
    for key in [
        [3, 1],
        np.array([[0, 1], [2, 2]]),
        torch.tensor([3, 0]),
        range(2),
        (slice(None), [2, 0]),
        ([0, 3], [1, 2]),
        (np.int64(2), np.int32(1)),
        np.array([True, False, True, True]),
        [False, True, False, False],
        torch.tensor([True, False, False, False]),
        plain % 2 == 0,
        (slice(None), np.array([True, False, True])),
        [],
        np.uint8(3),
        torch.tensor(2),
        np.array(1),
    ]:
        array = Array((4, 3), np.int64)
        array[...] = expected = plain.copy()
        numpy_key = key
        if isinstance(key, torch.Tensor | range):
            numpy_key = np.asarray(key)
        view = array[key]
        assert isinstance(view, Array)
        assert (view == plain[numpy_key]).all()
        assert view.shape == plain[numpy_key].shape
        view[...] = -1
        expected[numpy_key] = -1
        assert (array == expected).all()
        array[key] = -2
        expected[numpy_key] = -2
        assert (array == expected).all()


def test_single_elements_are_arrays() -> None:
    array = counted(4)
    element = array[2]
    assert isinstance(element, Array)
    assert element.shape == ()
    assert element.batch_shape == ()
    assert element.n_batch_dims == 0
    assert element.to_ndarray().shape == ()
    assert element.to_tensor().shape == ()
    element[...] = 7
    element.to_tensor().add_(1)
    assert values(array) == [0, 1, 8, 3]
    element[:] = 9
    element[()] = element.to_ndarray() + 1
    assert values(array) == [0, 1, 10, 3]
    for index in (0, slice(1, None), [0]):
        with pytest.raises(IndexError, match="too many"):
            element[index] = 1
    for ask in (len, iter, lambda a: a.last):
        with pytest.raises(TypeError, match="element"):
            ask(element)


def test_a_row_of_index_arrays_knows_no_row_before_it() -> None:
    view = counted(6)[[4, 2, 1]]
    assert values(view[0:2]) == [4, 2]
    assert values(view[-5:2]) == [4, 2]
    assert values(view[::-1]) == [1, 2, 4]
    for index in (-1, 3, [0, -1]):
        with pytest.raises(IndexError, match="rows 0 to 2 exist"):
            view[index]


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (None, "new dimensions"),
        (np.newaxis, "new dimensions"),
        ((0, None), "new dimensions"),
        (1.0, "no index"),
        ("a", "no index"),
        (True, "no index"),
        (np.True_, "no index"),
        ([0.5], "no index"),
        ([[1], [1, 2]], "no index"),
        (torch.tensor([1.0], dtype=torch.bfloat16), "no index"),
        (slice(0.5, 2), "slice needs ints"),
        (slice("a", None), "slice needs ints"),
        ((0, 0, 0), "too many indices"),
        ((..., 0, ...), "only one ellipsis"),
        ([True, False], "mask of shape"),
        (np.ones((4, 3, 1), bool), "too many indices"),
        (np.ones((3, 4), bool), "mask of shape"),
        (([0, 1], [0, 1, 2]), "do not fit together"),
        (object(), "no index"),
        ({0}, "no index"),
    ],
    ids=str,
)
def test_what_is_no_index_is_refused(index: Any, text: str) -> None:
    array = Array((4, 3), np.int64)
    with pytest.raises(IndexError, match=text):
        array[index]
    with pytest.raises(IndexError, match=text):
        array[index] = 1


def test_a_step_of_zero_is_refused_as_by_lists() -> None:
    with pytest.raises(ValueError, match="zero"):
        counted(4)[::0]


def test_shapes_tell_the_batch_from_the_features() -> None:
    array = Array((5, 4), "float32", feature_shape=(2, 3))
    for key, batch_shape, feature_shape in [
        (0, (4,), (2, 3)),
        ((0, 0), (), (2, 3)),
        ((0, 0, 0), (), (3,)),
        ((..., 0), (5, 4), (2,)),
        ((slice(None), slice(None), 1), (5, 4), (3,)),
        ([0, 1, 1], (3, 4), (2, 3)),
        (([0, 1], [2, 3]), (2,), (2, 3)),
        (np.ones((5, 4), bool), (20,), (2, 3)),
        ((slice(2), slice(1, None), [1, 0, 1]), (2, 3), (3, 3)),
        (([1, 2], slice(None), [0, 1]), (2, 4), (3,)),
    ]:
        view = array[key]
        assert view.batch_shape == batch_shape
        assert view.feature_shape == feature_shape
        assert view.n_batch_dims == len(batch_shape)


def test_a_later_change_of_an_index_array_changes_no_view() -> None:
    rows = np.array([0, 2])
    array = counted(4)
    view = array[rows]
    rows[:] = 3
    assert values(view) == [0, 2]


# Writing ----------------------------------------------------------------------------------------


def test_views_of_views_write_through() -> None:
    array = Array((6, 4), np.int64, padding=1)
    array[1:5][::-1][1, 2:][0] = 5
    assert array.to_ndarray()[3, 2] == 5
    array[1:3][-2] = 7
    assert values(array[-1]) == [7, 7, 7, 7]
    array[[1, 3]][:, [0, 2]][1][...] = 9
    assert values(array[3]) == [9, 0, 9, 0]
    assert array.to_ndarray().sum() == 18


@pytest.mark.parametrize("destination", [slice(None), [0, 1, 2], slice(None, None, -1)], ids=str)
def test_values_of_every_kind_can_be_written(destination: Any) -> None:
    source = Array((3, 2), np.int16, storage="shared")
    source[...] = [[1, 2], [3, 4], [5, 6]]
    expected = Array((3, 2), np.float32)
    expected[destination] = source.to_ndarray()
    for value in (
        source,
        source.to_ndarray(),
        source.to_tensor(),
        source.to_tensor().to(torch.bfloat16),
        source.to_tensor().float().requires_grad_(),
        values(source),
        list(source.to_tensor()),
    ):
        array = Array((3, 2), np.float32)
        array[destination] = value
        assert (array == expected).all()
    array[destination] = 3
    assert (array == 3).all()
    array[destination] = np.float64(2.5)
    assert (array == 2.5).all()
    array[destination] = torch.tensor([1.0, 2.0])
    assert (array == [1, 2]).all()
    array[destination] = np.ones((1, 1, 2))
    assert (array == 1).all()


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
        (slice(None), [1, 2, 3]),
        ([0, 1], np.zeros((3, 2))),
        (0, torch.zeros(5)),
        (0, "text"),
        (0, {"a": 1}),
        (0, None),
        (0, 10**30),
        ([0, 1], 10**30),
        ([0, 1], None),
        ((slice(None), [0, 1]), np.zeros(3)),
        (0, [[1], [1, 2]]),
    ],
    ids=str,
)
def test_values_that_do_not_fit_are_refused_and_nothing_is_written(key: Any, value: Any) -> None:
    array = Array((4, 2), np.int32)
    array[...] = 7
    with pytest.raises(SpecError, match=r"cannot write(.|\n)*int32"):
        array[key] = value
    assert (array == 7).all()


def test_there_is_no_arithmetic() -> None:
    array: Any = counted(3)
    with pytest.raises(TypeError):
        array + 1
    with pytest.raises(TypeError):
        array *= 2


# Reading ----------------------------------------------------------------------------------------


@each_storage
def test_to_ndarray_and_to_tensor_are_views(storage: str) -> None:
    array = Array((3, 2), np.float32, storage=storage)
    array.to_ndarray()[0, 0] = 1
    array.to_tensor()[1, 1] = 2
    array[1:].to_tensor()[1, 0] = 3
    array[2, 1].to_ndarray()[...] = 4
    array[::2].to_tensor()[0, 1] = 5
    assert values(array) == [[1, 5], [0, 2], [3, 4]]
    assert array.to_tensor().data_ptr() == array.to_ndarray().ctypes.data


def test_after_index_arrays_they_are_copies() -> None:
    array = counted(4)
    array[[0, 1]].to_ndarray()[...] = 9
    array[[0, 1]].to_tensor()[...] = 9
    assert values(array) == [0, 1, 2, 3]


def test_a_reversed_view_gives_a_reversed_tensor() -> None:
    array = Array((4, 3), np.int64)
    array[...] = np.arange(12).reshape(4, 3)
    tensor = array[::-1, ::-1].to_tensor()
    assert tensor.tolist() == array.to_ndarray()[::-1, ::-1].tolist()
    tensor.zero_()
    assert array.to_ndarray().sum() == 66  # a copy: tensors have no negative strides


def test_a_dtype_that_torch_does_not_have_is_refused() -> None:
    array = Array((2,), np.longdouble)
    array[...] = 1
    with pytest.raises(SpecError, match="torch has no dtype"):
        array.to_tensor()


def test_the_array_protocol_of_numpy_2() -> None:
    array = counted(4)
    assert np.shares_memory(np.asarray(array), array.to_ndarray())
    assert np.shares_memory(np.array(array, copy=False), array.to_ndarray())
    assert not np.shares_memory(np.array(array), array.to_ndarray())
    assert np.asarray(array, np.float32).dtype == np.float32
    assert np.array(array, np.float32).tolist() == [0, 1, 2, 3]
    assert np.array(array[[1, 2]]).tolist() == [1, 2]
    for part, dtype in [(array, np.float32), (array[[0]], None)]:
        with pytest.raises(ValueError, match="copy"):
            part.__array__(dtype, copy=False)
    assert np.array_equal(array, [0, 1, 2, 3])
    assert np.concatenate([array, array[1:3]]).tolist() == [0, 1, 2, 3, 1, 2]
    assert np.stack(list(array)).tolist() == [0, 1, 2, 3]


def test_torch_reads_an_array_without_a_copy() -> None:
    array = counted(4)
    for tensor in (torch.as_tensor(array), torch.from_dlpack(array)):
        assert tensor.tolist() == [0, 1, 2, 3]
        assert tensor.data_ptr() == array.to_tensor().data_ptr()


def test_functions_of_torch_take_arrays_for_tensors() -> None:
    array = counted(3)
    tensor = torch.zeros(2, 3, dtype=torch.int64)
    tensor[0] = array
    tensor[1, 2] = array[1]
    assert tensor.tolist() == [[0, 1, 2], [0, 0, 1]]
    assert torch.stack([array[0], array[2]]).tolist() == [0, 2]
    assert torch.equal(tensor[0], array)
    assert (tensor[0] == array).all()
    assert tensor[1].copy_(array).tolist() == [0, 1, 2]
    assert torch.tensor(array.to_ndarray()).sum() == 3


def test_equality_is_element_by_element() -> None:
    array = counted(3)
    assert (array == [0, 5, 2]).tolist() == [True, False, True]
    assert (array != torch.tensor([0, 5, 2])).tolist() == [False, True, False]
    assert (array == counted(3)).all()
    assert (np.array([0, 1, 2]) == array).all()
    assert (array == 1).tolist() == [False, True, False]
    with pytest.raises(TypeError, match="unhashable"):
        hash(array)


def test_iteration_and_length_are_those_of_the_visible_rows() -> None:
    array = counted(3, padding=1, full_size=6)
    rows = list(array)
    assert len(array) == len(rows) == 3
    assert [int(row) for row in rows] == [0, 1, 2]
    assert [int(row) for row in reversed(array)] == [2, 1, 0]
    rows[1][...] = 8
    assert values(array) == [0, 8, 2]
    assert 8 in array
    assert -1 not in array
    assert values(array[::-2]) == [int(row) for row in array[::-2]]


def test_elements_convert_to_python_numbers() -> None:
    array = counted(3)
    assert bool(array[1])
    assert not array[0]
    assert float(array[2]) == 2.0
    assert [10, 20, 30][array[1]] == 20
    with pytest.raises(ValueError, match="ambiguous"):
        bool(array)


def test_printing_shows_values_storage_dtype_and_padding() -> None:
    array = counted(3, padding=1, storage="shared")
    text = repr(array)
    assert text == "Array([0,1,2], storage=shared, dtype=int64, padding=1)"
    assert str(array) == text
    array.close()
    assert "closed" in repr(array)
    assert "shared" in repr(array)


# Windows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["local", "memmap"])
@pytest.mark.parametrize("padding", [1, 2, 3])
def test_rotating_brings_along_what_is_behind_and_what_was_last(storage: str, padding: int) -> None:
    array = counted(3, padding=padding, storage=storage)
    before = values(array[-padding : 3 + padding])
    array.rotate()
    assert values(array[-padding:padding]) == before[3:]
    assert values(array[padding:3]) == list(range(padding, 3))


def test_rotating_moves_along_full_size_and_starts_again() -> None:
    array = counted(2, padding=1, full_size=6)
    assert values(array) == [0, 1]
    array.rotate()
    assert values(array[-3:6]) == [-1, 0, 1, 2, 3, 4, 5, 6]
    assert values(array) == [2, 3]
    array.rotate()
    assert values(array) == [4, 5]
    assert values(array.full) == [0, 1, 2, 3, 4, 5]
    array.rotate()
    assert values(array[-1:3]) == [5, 6, 1, 2]
    assert values(array.full) == [6, 1, 2, 3, 4, 5]


def test_a_padding_as_large_as_the_window_rotates_rightly() -> None:
    array = counted(2, padding=2, full_size=4)
    array.rotate()
    assert values(array) == [2, 3]
    array.rotate()
    assert values(array[-2:2]) == [2, 3, 4, 5]


def test_without_padding_rotating_moves_nothing() -> None:
    array = counted(3)
    array.rotate()
    assert values(array) == [0, 1, 2]


def test_views_stay_where_they_were_made() -> None:
    array = counted(2, full_size=4)
    view, full, following = array[:], array.full, array.next
    array.rotate()
    assert values(array) == [2, 3]
    assert values(view) == [0, 1]
    assert values(full) == [0, 1, 2, 3]
    assert values(following) == [1, 2]


def test_reset_makes_the_next_rotation_begin_at_the_front() -> None:
    array = counted(2, full_size=6)
    array.reset()
    assert values(array) == [4, 5]
    array.rotate()
    assert values(array) == [0, 1]
    array.rotate()
    array.reset()
    array.rotate()
    assert values(array) == [0, 1]


@pytest.mark.parametrize("method", ["rotate", "reset"])
def test_only_a_whole_array_moves_its_window(method: str) -> None:
    array = counted(2, padding=1, full_size=4)
    for view in (array[:], array[0:1], array.full, array.next, array[[0, 1]], copy.copy(array)):
        with pytest.raises(UsageError, match="view"):
            getattr(view, method)()


@pytest.mark.parametrize("storage", ["shared", "memmap"])
def test_whole_arrays_on_the_same_memory_move_together_and_copies_do_not(storage: str) -> None:
    array = counted(2, padding=1, full_size=4, storage=storage)
    view, copied = array[...], copy.deepcopy(array)
    again, sent_view = pickle.loads(pickle.dumps((array, view)))
    again.rotate()
    assert values(array) == values(again) == [2, 3]
    assert values(view) == values(sent_view) == values(copied) == [0, 1]
    copied.rotate()
    copied[0] = 7
    assert values(copy.deepcopy(copied)) == [7, 3]  # with its window
    assert values(array) == [2, 3]
    again.reset()
    again.rotate()
    assert values(array) == [4, 1]  # what was behind the last window


def test_full_leaves_the_array_and_its_views_as_they_are() -> None:
    array = counted(2, padding=1, full_size=6)
    array.rotate()
    view = array[1]
    assert values(view.full) == [0, 1, 2, 3, 4, 5]
    assert int(view) == 3
    assert values(array) == [2, 3]
    assert int(view.full[-1]) == -1
    view.full[...] = 0
    assert int(view) == 0
    array.rotate()
    assert array.shape == (2,)


# Neighbours in time -----------------------------------------------------------------------------


def test_next_and_previous_are_the_same_rows_one_step_later_and_earlier() -> None:
    array = counted(6, padding=1)
    for view in (
        array,
        array[2],
        array[1:4],
        array[::2],
        array[::-1],
        array[4:0:-2],
        array[[3, 0, 5]],
        array[np.arange(6) % 2 == 1],
        array[2:2],
        array[1:4].next.previous,
        array.full,
    ):
        assert values(view.next) == (view.to_ndarray() + 1).tolist()
        assert values(view.previous) == (view.to_ndarray() - 1).tolist()
        assert view.next.shape == view.shape
    array[2].next[...] = 30
    assert int(array[3]) == 30


def test_neighbours_keep_the_other_dimensions() -> None:
    array = Array((4, 3), np.int64)
    array[...] = np.arange(12).reshape(4, 3)
    assert values(array[1, 1:].next) == [7, 8]
    assert values(array[1:3, -1].previous) == [2, 5]
    assert values(array[[0, 2], [1, 2]].next) == [4, 11]


@pytest.mark.parametrize(
    "view",
    [
        lambda array: array,
        lambda array: array[2],
        lambda array: array[::-1],
        lambda array: array[[0, 2]],
        lambda array: array[array.to_ndarray() == 2],
    ],
)
def test_without_room_there_are_no_neighbours(view: Any) -> None:
    array = counted(3)
    with pytest.raises(IndexError, match="later"):
        _ = view(array).next
    with pytest.raises(IndexError, match="earlier"):
        _ = view(array)[...].previous.previous.previous


def test_padding_gives_room_for_one_neighbour_only() -> None:
    array = counted(3, padding=1)
    with pytest.raises(IndexError):
        _ = array.next.next
    with pytest.raises(IndexError):
        _ = array.previous.previous


# The end ----------------------------------------------------------------------------------------

ACCESSES: dict[str, Any] = {
    "int": lambda array: array[0],
    "slice": lambda array: array[:],
    "write": lambda array: array.__setitem__(0, 1),
    "to_ndarray": lambda array: array.to_ndarray(),
    "to_tensor": lambda array: array.to_tensor(),
    "asarray": lambda array: np.asarray(array),
    "==": lambda array: array == 1,
    "iter": lambda array: list(array),
    "in": lambda array: 1 in array,
    "full": lambda array: array.full,
    "next": lambda array: array.next,
    "previous": lambda array: array.previous,
    "rotate": lambda array: array.rotate(),
    "reset": lambda array: array.reset(),
    "pickle": lambda array: pickle.dumps(array),
    "deepcopy": lambda array: copy.deepcopy(array),
}


@each_storage
@pytest.mark.parametrize("access", ACCESSES.values(), ids=ACCESSES)
def test_access_after_close_raises(storage: str, access: Any) -> None:
    array = counted(3, padding=1, storage=storage)
    view = array[1:2]
    array.close()
    array.close()
    for closed in (array, view):
        with pytest.raises(UsageError, match="closed"):
            access(closed)
    assert array.shape == (3,)
    assert view.last == 0


@each_storage
def test_arrays_and_tensors_made_before_close_stay_valid(storage: str) -> None:
    array = counted(4, storage=storage)
    plain, tensor = array.to_ndarray(), array[1:].to_tensor()
    array.close()
    del array
    gc.collect()
    plain[1] = 10
    assert tensor.tolist() == [10, 2, 3]


@each_storage
def test_a_view_keeps_the_memory_alive(storage: str) -> None:
    array = counted(4, storage=storage)
    view = array[1:3]
    gone = weakref.ref(array)
    del array
    gc.collect()
    assert gone() is None
    view[0] = 5
    assert values(view) == [5, 2]
    assert values(view.full) == [0, 5, 2, 3]


@each_storage
def test_memory_is_given_back_with_the_last_view(storage: str) -> None:
    array = counted(4, storage=storage)
    memory = weakref.ref(array._allocation._memory)
    view = array[1:][0]
    del array
    gc.collect()
    assert memory() is not None
    del view
    gc.collect()
    assert memory() is None


@each_storage
def test_a_deep_copy_has_memory_of_its_own(storage: str) -> None:
    array = counted(4, padding=1, storage=storage)
    twin, view = copy.deepcopy((array, array[1:3]))
    array[...] = 9
    assert values(twin[-1:5]) == [-1, 0, 1, 2, 3, 4]
    assert twin.storage == storage
    twin[1] = 7
    assert values(view) == [7, 2]
    shallow = copy.copy(array)
    shallow[0] = 1
    assert int(array[0]) == 1


def test_a_local_array_cannot_be_pickled_and_says_what_can() -> None:
    for array in (counted(3), counted(3)[1:]):
        with pytest.raises(UsageError, match=r'storage="shared"(.|\n)*to_ndarray'):
            pickle.dumps(array)


def test_array_is_exported() -> None:
    assert rlpool.Array is Array


@pytest.mark.parametrize("storage", ["local", "shared"])
def test_rows_that_are_iterated_over_are_those_of_one_window(storage: str) -> None:
    array = Array((2,), np.int64, full_size=4, storage=storage)
    array.full[...] = np.arange(4)
    rows = iter(array)
    first = int(next(rows))
    array.rotate()
    assert [first, *map(int, rows)] == [0, 1]
    array.close()
