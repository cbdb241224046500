"""DictTensor against a plain model: a list of rows, each a dict of nested lists."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree

from rlpool.data.dict_tensor import DictTensor, masked_dicttensor, masked_tensor
from rlpool.errors import SpecError

Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]
Model = list[dict[str, Any]]

# A shared machine may stall for longer than any deadline; the files stay below seconds anyway.
few = settings(max_examples=200, deadline=None)

dtypes = st.sampled_from([torch.bool, torch.uint8, torch.int64, torch.float32])
row_shapes = st.lists(st.integers(0, 3), max_size=4).map(tuple)
keys = st.sampled_from(["frame", "_frame", "action", "agent_info/id", "agent_info/w"])
specs = st.dictionaries(keys, st.tuples(dtypes, row_shapes), min_size=1, max_size=4)
sizes = st.integers(0, 6)
seeds = st.integers(0, 2**32)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Random values that every dtype can hold exactly."""
    high = 2 if dtype is torch.bool else 256
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(wanted: Specs, n: int, seed: int) -> DictTensor:
    """A batch of random values: every other seed gives views on larger memory."""
    tensors = {}
    for number, (key, (dtype, shape)) in enumerate(wanted.items()):
        if seed % 2:
            tensors[key] = random_tensor(dtype, (2 * n + 1, *shape), seed + number)[1::2]
        else:
            tensors[key] = random_tensor(dtype, (n, *shape), seed + number)
    return DictTensor(tensors)


def model_of(batch: DictTensor) -> Model:
    """The rows of a batch as plain Python values."""
    columns = {key: tensor.tolist() for key, tensor in batch.items()}
    return [{key: columns[key][row] for key in columns} for row in range(batch.n_elems())]


def check(batch: DictTensor, model: Model, wanted: Specs) -> None:
    """Values, order of the keys, dtypes and row shapes are as expected."""
    assert model_of(batch) == model
    assert batch.n_elems() == len(model)
    assert list(batch) == list(wanted)
    assert batch.specs() == {
        key: {"size": torch.Size(shape), "dtype": dtype} for key, (dtype, shape) in wanted.items()
    }


@few
@given(specs, sizes, seeds, st.data())
def test_int_is_the_row(wanted: Specs, n: int, seed: int, data: st.DataObject) -> None:
    batch = make(wanted, n, seed)
    row = data.draw(st.integers(-n - 2, n + 1))
    if -n <= row < n:
        found = {key: tensor.tolist() for key, tensor in batch[row].items()}
        assert found == model_of(batch)[row]
        assert model_of(batch.slice(row % n, row % n + 1)) == [found]
    else:
        with pytest.raises(IndexError):
            batch.index(row)


@few
@given(specs, sizes, seeds, st.slices(6))
def test_slice_is_pythons_slice(wanted: Specs, n: int, seed: int, part: slice) -> None:
    batch = make(wanted, n, seed)
    if part.step is not None and part.step < 0:
        with pytest.raises(SpecError):
            batch[part]
        return
    check(batch[part], model_of(batch)[part], wanted)
    if part.start is not None and part.stop is not None:
        expected = model_of(batch)[part.start : part.stop]
        check(batch.slice(part.start, part.stop), expected, wanted)


@few
@given(specs, sizes, seeds, st.lists(st.integers(-7, 6), max_size=8))
def test_int_tensor_selects_rows(wanted: Specs, n: int, seed: int, rows: list[int]) -> None:
    batch = make(wanted, n, seed)
    selection = torch.tensor(rows, dtype=torch.int64)
    if all(-n <= row < n for row in rows):
        model = model_of(batch)
        check(batch[selection], [model[row] for row in rows], wanted)
    else:
        with pytest.raises(IndexError):
            batch[selection]


@few
@given(specs, seeds, st.lists(st.booleans(), max_size=6))
def test_mask_selects_rows(wanted: Specs, seed: int, mask: list[bool]) -> None:
    batch = make(wanted, len(mask), seed)
    kept = [row for row, is_kept in zip(model_of(batch), mask, strict=True) if is_kept]
    check(batch[torch.tensor(mask, dtype=torch.bool)], kept, wanted)
    with pytest.raises(SpecError):
        batch[torch.tensor([*mask, True])]


@few
@given(specs, sizes, seeds)
def test_unfold_is_the_list_of_rows_and_cat_its_inverse(wanted: Specs, n: int, seed: int) -> None:
    batch = make(wanted, n, seed)
    rows = batch.unfold()
    assert [model_of(row) for row in rows] == [[row] for row in model_of(batch)]
    if rows:
        check(DictTensor.cat(rows), model_of(batch), wanted)


@few
@given(specs, st.lists(sizes, min_size=1, max_size=4), seeds)
def test_cat_is_the_sum_of_the_lists(wanted: Specs, parts: list[int], seed: int) -> None:
    batches = [make(wanted, n, seed + number) for number, n in enumerate(parts)]
    expected = [row for batch in batches for row in model_of(batch)]
    check(DictTensor.cat(batches), expected, wanted)


@few
@given(specs, specs, st.integers(1, 3), seeds)
def test_cat_accepts_exactly_equal_specs(first: Specs, second: Specs, n: int, seed: int) -> None:
    parts = [make(first, n, seed), make(second, n, seed)]
    if first == second:
        assert DictTensor.cat(parts).n_elems() == 2 * n
    else:
        with pytest.raises(SpecError):
            DictTensor.cat(parts)


@few
@given(specs, sizes, seeds, st.lists(keys, max_size=3))
def test_get_keeps_keys(wanted: Specs, n: int, seed: int, kept: list[str]) -> None:
    batch = make(wanted, n, seed)
    if not set(kept) <= set(wanted):
        with pytest.raises(KeyError):
            batch.get(kept)
        return
    expected = [{key: row[key] for key in kept} for row in model_of(batch)]
    for clone in (False, True):
        if kept:
            check(batch.get(kept, clone), expected, {key: wanted[key] for key in kept})
        else:
            assert batch.get(kept, clone).empty()


@few
@given(specs, sizes, seeds)
def test_copies_are_equal_and_separate(wanted: Specs, n: int, seed: int) -> None:
    batch = make(wanted, n, seed)
    model = model_of(batch)
    leaves, spec = _pytree.tree_flatten(batch)
    for copied in (
        batch.clone(),
        copy.deepcopy(batch),
        pickle.loads(pickle.dumps(batch)),
        _pytree.tree_unflatten([leaf.clone() for leaf in leaves], spec),
    ):
        check(copied, model, wanted)
        for tensor in copied.values():
            tensor.zero_()
    check(batch, model, wanted)


@few
@given(specs, sizes, sizes, seeds, keys, dtypes, row_shapes)
def test_set_is_assignment_to_every_row(
    wanted: Specs,
    n: int,
    other_n: int,
    seed: int,
    key: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> None:
    batch = make(wanted, n, seed)
    model = model_of(batch)
    tensor = random_tensor(dtype, (other_n, *shape), seed)
    if other_n != n:
        with pytest.raises(SpecError):
            batch.set(key, tensor)
        check(batch, model, wanted)
        return
    batch.set(key, tensor)
    expected = [{**row, key: tensor[i].tolist()} for i, row in enumerate(model)]
    check(batch, expected, {**wanted, key: (dtype, shape)})


@few
@given(specs, sizes, seeds, st.sampled_from(["", "_", "agent_info/", "frame", "zzz"]))
def test_prefixes(wanted: Specs, n: int, seed: int, prefix: str) -> None:
    batch = make(wanted, n, seed)
    model = model_of(batch)
    longer = {prefix + key: spec for key, spec in wanted.items()}
    expected = [{prefix + key: value for key, value in row.items()} for row in model]
    check(batch.prepend_key(prefix), expected, longer)
    check(batch.prepend_key(prefix).truncate_key(prefix), model, wanted)
    left = {key[len(prefix) :]: key for key in wanted if key.startswith(prefix)}
    truncated = batch.truncate_key(prefix)
    assert list(truncated) == list(left)
    for key, old in left.items():
        assert truncated[key] is batch[old]


@few
@given(specs, specs, sizes, sizes, seeds)
def test_sum_is_the_union_of_the_rows(
    first: Specs, second: Specs, n: int, m: int, seed: int
) -> None:
    left, right = make(first, n, seed), make(second, m, seed + 9)
    if n != m or set(first) & set(second):
        with pytest.raises(SpecError):
            left + right
        return
    rows = zip(model_of(left), model_of(right), strict=True)
    check(left + right, [{**a, **b} for a, b in rows], {**first, **second})


@few
@given(specs, st.integers(1, 5), st.integers(1, 5), seeds, st.data())
def test_copy_is_assignment_of_rows(
    wanted: Specs, n: int, m: int, seed: int, data: st.DataObject
) -> None:
    target, source = make(wanted, n, seed), make(wanted, m, seed + 9)
    write = data.draw(st.lists(st.integers(0, n - 1), unique=True))
    read = data.draw(st.lists(st.integers(-m, m - 1), min_size=len(write), max_size=len(write)))
    expected, rows = model_of(target), model_of(source)
    for destination, origin in zip(write, read, strict=True):
        expected[destination] = rows[origin]
    target.copy_(
        source,
        torch.tensor(read, dtype=torch.int64),
        torch.tensor([row - n * (row % 2) for row in write], dtype=torch.int64),
    )
    check(target, expected, wanted)
    check(source, rows, wanted)


@few
@given(specs, seeds, st.lists(st.booleans(), max_size=6), st.sampled_from(["bool", "int", "float"]))
def test_masked_takes_whole_rows(wanted: Specs, seed: int, mask: list[bool], kind: str) -> None:
    n = len(mask)
    zeroth, first = make(wanted, n, seed), make(wanted, n, seed + 9)
    is_first = torch.tensor(mask, dtype={"bool": torch.bool, "int": torch.int64}.get(kind))
    rows = zip(model_of(zeroth), model_of(first), mask, strict=True)
    expected = [b if takes_first else a for a, b, takes_first in rows]
    check(masked_dicttensor(zeroth, first, is_first), expected, wanted)
    for key, tensor in zeroth.items():
        chosen = masked_tensor(tensor, first[key], is_first)
        assert chosen.dtype == tensor.dtype
        assert chosen.tolist() == [row[key] for row in expected]


@few
@given(specs, sizes, seeds)
def test_printing_names_every_key(wanted: Specs, n: int, seed: int) -> None:
    lines = repr(make(wanted, n, seed)).splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(wanted)
