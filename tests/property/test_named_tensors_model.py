"""DictTensor and TemporalDictTensor against plain models: lists of rows made of nested lists."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree

from rlpool import DictTensor, SpecError, TemporalDictTensor, masked_dicttensor, masked_tensor

Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class Row(NamedTuple):
    """One trajectory: all T steps of every key, padding included, its length and its info."""

    steps: dict[str, list[Any]]
    length: int
    info: dict[str, Any]


class Sample(NamedTuple):
    """A random batch and what it was made from."""

    batch: TemporalDictTensor
    steps: Specs
    info: Specs
    n_timesteps: int


# A shared machine may stall for longer than any deadline; the files stay below seconds anyway.
few = settings(max_examples=100, deadline=None)

dtypes = st.sampled_from([torch.bool, torch.uint8, torch.int64, torch.float32])
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
seeds = st.integers(0, 2**32)
step_specs = st.dictionaries(
    st.sampled_from(["frame", "_frame", "action", "reward"]),
    st.tuples(dtypes, shapes),
    min_size=1,
    max_size=3,
)
info_specs = st.dictionaries(st.sampled_from(["task", "seed"]), st.tuples(dtypes, shapes))


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Random values that every dtype can hold exactly."""
    high = 2 if dtype is torch.bool else 256
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def steps_in_memory(
    dtype: torch.dtype, shape: tuple[int, ...], lengths: Tensor, n_timesteps: int, seed: int
) -> Tensor:
    """Random steps with zeros as padding, in memory as it comes from various places."""
    n = len(lengths)
    layout = seed % 4
    if layout == 0:  # a tensor of its own
        tensor = random_tensor(dtype, (n, n_timesteps, *shape), seed)
    elif layout == 1:  # slots with one more step
        tensor = random_tensor(dtype, (n, n_timesteps + 1, *shape), seed)[:, 1:]
    elif layout == 2:  # time first
        tensor = random_tensor(dtype, (n_timesteps, n, *shape), seed).transpose(0, 1)
    else:  # every other slot and step
        tensor = random_tensor(dtype, (2 * n, 2 * n_timesteps, *shape), seed)[::2, ::2]
    for row, length in enumerate(lengths.tolist()):
        tensor[row, length:] = 0
    return tensor


def make(
    steps: Specs, info: Specs, lengths: list[int], n_timesteps: int, seed: int
) -> TemporalDictTensor:
    """A batch of random values."""
    sizes = torch.tensor(lengths, dtype=torch.int64)
    tensors = {
        key: steps_in_memory(dtype, shape, sizes, n_timesteps, seed + number)
        for number, (key, (dtype, shape)) in enumerate(steps.items())
    }
    rows = {
        key: random_tensor(dtype, (len(lengths), *shape), seed)
        for key, (dtype, shape) in info.items()
    }
    return TemporalDictTensor(tensors, sizes, DictTensor(rows))


@st.composite
def samples(draw: st.DrawFn, min_n: int = 0) -> Sample:
    """Batches with B from 0 to 4 and T from 0 to 5."""
    n_timesteps = draw(st.integers(0, 5))
    lengths = draw(st.lists(st.integers(0, n_timesteps), min_size=min_n, max_size=4))
    steps, info = draw(step_specs), draw(info_specs)
    return Sample(make(steps, info, lengths, n_timesteps, draw(seeds)), steps, info, n_timesteps)


def model_of(batch: TemporalDictTensor) -> list[Row]:
    """The rows of a batch as plain Python values."""
    steps = {key: tensor.tolist() for key, tensor in batch.items()}
    info = {key: tensor.tolist() for key, tensor in batch.info.items()}
    return [
        Row({k: v[row] for k, v in steps.items()}, length, {k: v[row] for k, v in info.items()})
        for row, length in enumerate(batch.lengths.tolist())
    ]


def check(
    batch: TemporalDictTensor, model: list[Row], steps: Specs, info: Specs, n_timesteps: int
) -> None:
    """Values, lengths, info, keys, dtypes and shapes are as expected, and padding is zero."""
    assert model_of(batch) == model
    assert list(batch) == list(steps)
    assert list(batch.info) == list(info)
    assert batch.n_elems() == len(model)
    assert batch.n_timesteps() == n_timesteps
    assert batch.lengths.dtype is torch.int64
    for key, (dtype, shape) in steps.items():
        assert batch[key].shape == (len(model), n_timesteps, *shape)
        assert batch[key].dtype is dtype
        for row, length in enumerate(batch.lengths.tolist()):
            assert not batch[key][row, length:].any()
    for key, (dtype, shape) in info.items():
        assert batch.info[key].shape == (len(model), *shape)
        assert batch.info[key].dtype is dtype
    assert batch.specs() == {
        key: {"size": torch.Size(shape), "dtype": dtype} for key, (dtype, shape) in steps.items()
    }


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Zeros as nested lists."""
    return torch.zeros(shape, dtype=dtype).tolist()


def padded(row: Row, steps: Specs, n_timesteps: int) -> Row:
    """A row with zeros up to ``n_timesteps``."""
    longer = {}
    for key, (dtype, shape) in steps.items():
        missing = n_timesteps - len(row.steps[key])
        longer[key] = row.steps[key] + [zeros(shape, dtype) for _ in range(missing)]
    return row._replace(steps=longer)


def cut(row: Row, start: int, stop: int) -> Row:
    """Steps ``start`` to ``stop`` of a row."""
    length = min(max(row.length - start, 0), stop - start)
    return row._replace(
        steps={key: values[start:stop] for key, values in row.steps.items()}, length=length
    )


@few
@given(samples(), st.integers(-6, 6), st.slices(4))
def test_int_and_slice(sample: Sample, row: int, part: slice) -> None:
    batch, model = sample.batch, model_of(sample.batch)
    if part.step is None or part.step > 0:
        check(batch[part], model[part], *sample[1:])
    if not -len(model) <= row < len(model):
        for select in (batch.index, batch.slice):
            with pytest.raises(IndexError):
                select(row)
        return
    check(batch.slice(row), [model[row]], *sample[1:])
    single = batch[row]
    assert {key: tensor.tolist() for key, tensor in single.items()} == model[row].steps
    assert single.lengths.item() == model[row].length
    assert {key: tensor.tolist() for key, tensor in single.info.items()} == model[row].info
    assert single.mask().tolist() == batch.mask()[row].tolist()
    assert single.specs() == batch.specs()


@few
@given(samples(), st.lists(st.integers(-5, 4), max_size=6), st.lists(st.booleans(), max_size=4))
def test_int_tensor_and_mask_select_rows(sample: Sample, rows: list[int], mask: list[bool]) -> None:
    batch, model = sample.batch, model_of(sample.batch)
    selection = torch.tensor(rows, dtype=torch.int64)
    if all(-len(model) <= row < len(model) for row in rows):
        check(batch[selection], [model[row] for row in rows], *sample[1:])
    else:
        with pytest.raises(IndexError):
            batch[selection]
    if len(mask) == len(model):
        kept = [row for row, is_kept in zip(model, mask, strict=True) if is_kept]
        check(batch[torch.tensor(mask, dtype=torch.bool)], kept, *sample[1:])
    else:
        with pytest.raises(SpecError):
            batch[torch.tensor(mask, dtype=torch.bool)]


@few
@given(samples())
def test_mask_full_and_shorten_follow_the_lengths(sample: Sample) -> None:
    batch, model = sample.batch, model_of(sample.batch)
    n_timesteps = sample.n_timesteps
    assert batch.mask().shape == (len(model), n_timesteps)
    assert batch.mask().dtype is torch.float32
    assert batch.mask().tolist() == [
        [float(time < row.length) for time in range(n_timesteps)] for row in model
    ]
    assert batch.full() == all(row.length == n_timesteps for row in model)
    longest = max((row.length for row in model), default=0)
    expected = [cut(row, 0, longest) for row in model]
    check(batch.shorten(), expected, sample.steps, sample.info, longest)


@few
@given(samples(), st.integers(-1, 5))
def test_temporal_index_is_a_column(sample: Sample, step: int) -> None:
    batch, model = sample.batch, model_of(sample.batch)
    if not 0 <= step < sample.n_timesteps:
        for select in (batch.temporal_index, batch.masked_temporal_index):
            with pytest.raises(SpecError):
                select(step)
        return
    for key, tensor in batch.temporal_index(step).items():
        assert tensor.tolist() == [row.steps[key][step] for row in model]
    running, numbers = batch.masked_temporal_index(step)
    assert numbers.tolist() == [i for i, row in enumerate(model) if step < row.length]
    assert list(running) == list(batch)
    for key, tensor in running.items():
        assert tensor.tolist() == [row.steps[key][step] for row in model if step < row.length]
        assert tensor.dtype is batch[key].dtype


@few
@given(samples(min_n=1), st.data())
def test_temporal_multi_index_is_a_step_of_every_row(sample: Sample, data: st.DataObject) -> None:
    batch, model = sample.batch, model_of(sample.batch)
    steps = [data.draw(st.integers(-1, sample.n_timesteps)) for _ in model]
    if not all(0 <= step < sample.n_timesteps for step in steps):
        with pytest.raises(SpecError):
            batch.temporal_multi_index(torch.tensor(steps))
        return
    chosen = batch.temporal_multi_index(torch.tensor(steps))
    assert list(chosen) == list(batch)
    for key, tensor in chosen.items():
        expected = [row.steps[key][step] for row, step in zip(model, steps, strict=True)]
        assert tensor.tolist() == expected
        assert tensor.dtype is batch[key].dtype


@few
@given(samples())
def test_flatten_is_row_then_time_and_from_packed_its_inverse(sample: Sample) -> None:
    batch, model = sample.batch, model_of(sample.batch)
    flat = batch.flatten(with_info=True)
    assert list(flat) == [*sample.steps, *sample.info]
    for key, (dtype, shape) in sample.steps.items():
        expected = [value for row in model for value in row.steps[key][: row.length]]
        assert flat[key].tolist() == expected
        assert flat[key].shape == (len(expected), *shape)
        assert flat[key].dtype is dtype
    for key in sample.info:
        assert flat[key].tolist() == [row.info[key] for row in model for _ in range(row.length)]
    longest = max((row.length for row in model), default=0)
    again = TemporalDictTensor.from_packed(batch.flatten(), batch.lengths, batch.info)
    expected_rows = [cut(row, 0, longest) for row in model]
    check(again, expected_rows, sample.steps, sample.info, longest)


@few
@given(
    step_specs,
    info_specs,
    st.lists(
        st.integers(0, 4).flatmap(
            lambda n_timesteps: st.tuples(
                st.just(n_timesteps), st.lists(st.integers(0, n_timesteps), max_size=3)
            )
        ),
        min_size=1,
        max_size=4,
    ),
    seeds,
)
def test_cat_is_the_sum_of_the_lists_padded_with_zeros(
    steps: Specs, info: Specs, parts: list[tuple[int, list[int]]], seed: int
) -> None:
    batches = [
        make(steps, info, lengths, n_timesteps, seed + number)
        for number, (n_timesteps, lengths) in enumerate(parts)
    ]
    longest = max(n_timesteps for n_timesteps, _ in parts)
    expected = [padded(row, steps, longest) for batch in batches for row in model_of(batch)]
    check(TemporalDictTensor.cat(batches), expected, steps, info, longest)


@few
@given(samples(), st.integers(0, 7))
def test_expand_adds_rows_of_zeros(sample: Sample, n: int) -> None:
    model = model_of(sample.batch)
    if n < len(model):
        with pytest.raises(SpecError):
            sample.batch.expand(n)
        return
    empty = Row(
        {
            k: zeros((sample.n_timesteps, *shape), dtype)
            for k, (dtype, shape) in sample.steps.items()
        },
        0,
        {k: zeros(shape, dtype) for k, (dtype, shape) in sample.info.items()},
    )
    check(sample.batch.expand(n), model + [empty] * (n - len(model)), *sample[1:])


@few
@given(samples())
def test_copies_are_equal_and_separate(sample: Sample) -> None:
    batch, model = sample.batch, model_of(sample.batch)
    leaves, spec = _pytree.tree_flatten(batch)
    for copied in (
        batch.clone(),
        batch.get(list(batch), clone=True),
        copy.deepcopy(batch),
        pickle.loads(pickle.dumps(batch)),
        _pytree.tree_unflatten([leaf.clone() for leaf in leaves], spec),
    ):
        check(copied, model, *sample[1:])
        for tensor in (*copied.values(), *copied.info.values(), copied.lengths):
            tensor.zero_()
    check(batch, model, *sample[1:])


@few
@given(samples(), st.sampled_from(["frame", "new"]), dtypes, st.integers(0, 4), st.integers(0, 5))
def test_set_needs_the_same_rows_and_steps(
    sample: Sample, key: str, dtype: torch.dtype, n: int, n_timesteps: int
) -> None:
    batch, model = sample.batch, model_of(sample.batch)
    tensor = torch.zeros((n, n_timesteps), dtype=dtype)
    if (n, n_timesteps) != (len(model), sample.n_timesteps):
        with pytest.raises(SpecError):
            batch.set(key, tensor)
        check(batch, model, *sample[1:])
        return
    batch.set(key, tensor)
    expected = [
        row._replace(steps={**row.steps, key: tensor[i].tolist()}) for i, row in enumerate(model)
    ]
    steps = {**sample.steps, key: (dtype, ())}
    check(batch, expected, steps, sample.info, sample.n_timesteps)


@few
@given(samples(min_n=1), st.integers(0, 7), st.data())
def test_copy_is_assignment_of_rows(sample: Sample, n_timesteps: int, data: st.DataObject) -> None:
    target, n = sample.batch, sample.batch.n_elems()
    lengths = data.draw(st.lists(st.integers(0, n_timesteps), min_size=1, max_size=4))
    source = make(sample.steps, sample.info, lengths, n_timesteps, data.draw(seeds))
    write = data.draw(st.lists(st.integers(0, n - 1), unique=True))
    last = len(lengths) - 1
    read = [data.draw(st.integers(0, last)) for _ in write]
    expected, rows = model_of(target), model_of(source)

    def copy_rows() -> None:
        arguments = [torch.tensor(indexes, dtype=torch.int64) for indexes in (read, write)]
        target.copy_(source, *arguments)

    if any(lengths[row] > sample.n_timesteps for row in read):
        with pytest.raises(SpecError):
            copy_rows()
    else:
        copy_rows()
        for destination, origin in zip(write, read, strict=True):
            row = padded(rows[origin], sample.steps, sample.n_timesteps)
            cut_row = cut(row, 0, sample.n_timesteps)
            expected[destination] = cut_row
    check(target, expected, *sample[1:])
    check(source, rows, sample.steps, sample.info, n_timesteps)


# Chains of operations, since each must leave what the next one relies on


def _rows_backwards(batch: TemporalDictTensor, model: list[Row]) -> Any:
    order = list(range(len(model)))[::-1]
    return batch[torch.tensor(order, dtype=torch.int64)], [model[i] for i in order]


def _without_first_step(batch: TemporalDictTensor, model: list[Row]) -> Any:
    last = batch.n_timesteps()
    start = min(1, last)
    return batch.temporal_slice(start, last), [cut(row, start, last) for row in model]


def _through_transitions(batch: TemporalDictTensor, model: list[Row]) -> Any:
    longest = max((row.length for row in model), default=0)
    packed = TemporalDictTensor.from_packed(batch.flatten(), batch.lengths, batch.info)
    return packed, [cut(row, 0, longest) for row in model]


def _first_over_last(batch: TemporalDictTensor, model: list[Row]) -> Any:
    if model:
        batch = batch.clone()
        batch.copy_(batch, torch.tensor([0]), torch.tensor([-1]))
    return batch, [*model[:-1], *model[:1]]


def _apart_and_together(batch: TemporalDictTensor, model: list[Row]) -> Any:
    parts = [part.shorten() for part in batch.unfold()]
    longest = max((row.length for row in model), default=0)
    joined = TemporalDictTensor.cat(parts) if parts else batch.shorten()
    return joined, [cut(row, 0, longest) for row in model]


operations: list[Callable[..., Any]] = [
    _rows_backwards,
    _without_first_step,
    _through_transitions,
    _first_over_last,
    _apart_and_together,
]


@few
@given(samples(), st.lists(st.sampled_from(operations), max_size=6))
def test_chains_of_operations(sample: Sample, chain: list[Callable[..., Any]]) -> None:
    batch, model = sample.batch, model_of(sample.batch)
    for operation in chain:
        if len(model) > 16:
            break
        batch, model = operation(batch, model)
        check(batch, model, sample.steps, sample.info, batch.n_timesteps())


# DictTensor: what it does in its own way


def rows_of(batch: DictTensor) -> list[dict[str, Any]]:
    """The rows of a batch as plain Python values."""
    columns = {key: tensor.tolist() for key, tensor in batch.items()}
    return [{key: columns[key][row] for key in columns} for row in range(batch.n_elems())]


def batch_of(specs: Specs, n: int, seed: int) -> DictTensor:
    return make({}, specs, [0] * n, 0, seed).info


specs = st.dictionaries(
    st.sampled_from(["frame", "action", "_frame"]), st.tuples(dtypes, shapes), min_size=1
)
sizes = st.integers(0, 5)


@few
@given(specs, sizes, seeds, st.integers(-6, 6), st.integers(-6, 6))
def test_rows_of_a_dict_tensor(wanted: Specs, n: int, seed: int, row: int, stop: int) -> None:
    batch = batch_of(wanted, n, seed)
    model = rows_of(batch)
    assert rows_of(batch.slice(row, stop)) == model[row:stop]
    assert [rows_of(part) for part in batch.unfold()] == [[expected] for expected in model]
    if -n <= row < n:
        assert {key: tensor.tolist() for key, tensor in batch[row].items()} == model[row]
        assert rows_of(batch[torch.tensor([row, 0])]) == [model[row], model[0]]
    else:
        for selection in (row, torch.tensor([row])):
            with pytest.raises(IndexError):
                batch.index(selection)


@few
@given(specs, specs, sizes, sizes, seeds, st.sampled_from(["", "_", "info/", "zzz"]))
def test_set_sum_and_prefixes(
    first: Specs, second: Specs, n: int, m: int, seed: int, prefix: str
) -> None:
    left, right = batch_of(first, n, seed), batch_of(second, m, seed + 9)
    longer = left.prepend_key(prefix)
    assert list(longer) == [prefix + key for key in first]
    assert dict(longer.truncate_key(prefix)) == dict(left)
    assert list(left.truncate_key("_")) == [key[1:] for key in first if key.startswith("_")]
    if n != m or set(first) & set(second):
        with pytest.raises(SpecError):
            left + right
    else:
        rows = zip(rows_of(left), rows_of(right), strict=True)
        assert rows_of(left + right) == [{**a, **b} for a, b in rows]
    for key, tensor in right.items():
        if n != m:
            with pytest.raises(SpecError):
                left.set(key, tensor)
        else:
            left.set(key, tensor)
            assert left[key] is tensor


@few
@given(specs, seeds, st.lists(st.booleans(), max_size=5), st.sampled_from(["bool", "int", "float"]))
def test_masked_takes_whole_rows(wanted: Specs, seed: int, mask: list[bool], kind: str) -> None:
    zeroth, first = (batch_of(wanted, len(mask), seed + number) for number in (0, 9))
    is_first = torch.tensor(mask, dtype={"bool": torch.bool, "int": torch.int64}.get(kind))
    rows = zip(rows_of(zeroth), rows_of(first), mask, strict=True)
    expected = [b if takes_first else a for a, b, takes_first in rows]
    chosen = masked_dicttensor(zeroth, first, is_first)
    assert rows_of(chosen) == expected
    assert chosen.specs() == zeroth.specs()
    for key, tensor in zeroth.items():
        assert torch.equal(masked_tensor(tensor, first[key], is_first), chosen[key])


@few
@given(specs, st.integers(1, 5), st.integers(1, 5), seeds, st.data())
def test_copy_of_a_dict_tensor(
    wanted: Specs, n: int, m: int, seed: int, data: st.DataObject
) -> None:
    target, source = batch_of(wanted, n, seed), batch_of(wanted, m, seed + 9)
    write = data.draw(st.lists(st.integers(-n, -1), unique=True))
    read = data.draw(st.lists(st.integers(-m, m - 1), min_size=len(write), max_size=len(write)))
    expected, rows = rows_of(target), rows_of(source)
    for destination, origin in zip(write, read, strict=True):
        expected[destination] = rows[origin]
    indexes = [torch.tensor(rows, dtype=torch.int64) for rows in (read, write)]
    target.copy_(source, *indexes)
    assert rows_of(target) == expected
    assert rows_of(source) == rows
