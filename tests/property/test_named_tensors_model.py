"""DictTensor and TemporalDictTensor against plain models: rows as nested lists."""

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

from rlpool import DictTensor, SpecError, TemporalDictTensor

Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class Row(NamedTuple):
    """One trajectory: all T steps of every key, padding included, its length and its info."""

    steps: dict[str, list[Any]]
    length: int
    info: dict[str, Any]


class Sample(NamedTuple):
    """A random batch and the data it was created from."""

    batch: TemporalDictTensor
    model: list[Row]
    steps: Specs
    info: Specs


UNSIGNED = torch.uint16  # torch supports few operations on it
signed = st.sampled_from([torch.bool, torch.uint8, torch.int64, torch.float32])
dtypes = signed | st.just(UNSIGNED)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
seeds = st.integers(0, 2**32)
specs = st.dictionaries(
    st.sampled_from(["frame", "_frame", "reward"]), st.tuples(dtypes, shapes), min_size=1
)
info_specs = st.dictionaries(st.sampled_from(["task", "seed"]), st.tuples(dtypes, shapes))


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Draw random values that every dtype can represent exactly."""
    high = {torch.bool: 2, UNSIGNED: 2**16}.get(dtype, 256)
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_batch(specs: Specs, n: int, seed: int) -> DictTensor:
    return DictTensor(
        {key: random_tensor(dtype, (n, *shape), seed) for key, (dtype, shape) in specs.items()}
    )


def make(
    steps: Specs, info: Specs, lengths: list[int], n_timesteps: int, seed: int
) -> TemporalDictTensor:
    """Draw random values with zeros as padding; every other tensor is stored time first."""
    tensors, n = {}, len(lengths)
    for number, (key, (dtype, shape)) in enumerate(steps.items()):
        tensor = random_tensor(dtype, (n_timesteps, n, *shape), seed + number).transpose(0, 1)
        tensors[key] = tensor if (seed + number) % 2 else tensor.contiguous()
        for row, length in enumerate(lengths):
            tensors[key][row, length:] = 0
    return TemporalDictTensor(
        tensors, torch.tensor(lengths, dtype=torch.int64), random_batch(info, n, seed)
    )


@st.composite
def samples(draw: st.DrawFn, min_n: int = 0) -> Sample:
    """Draw batches with B from 0 to 4 and T from 0 to 5."""
    n_timesteps = draw(st.integers(0, 5))
    lengths = draw(st.lists(st.integers(0, n_timesteps), min_size=min_n, max_size=4))
    steps, info = draw(specs), draw(info_specs)
    batch = make(steps, info, lengths, n_timesteps, draw(seeds))
    return Sample(batch, model_of(batch), steps, info)


def plain(batch: DictTensor | TemporalDictTensor) -> dict[str, Any]:
    return {key: tensor.tolist() for key, tensor in batch.items()}


def rows_of(batch: DictTensor) -> list[dict[str, Any]]:
    columns = plain(batch)
    return [{key: columns[key][row] for key in columns} for row in range(batch.n_elems())]


def model_of(batch: TemporalDictTensor) -> list[Row]:
    steps, info = plain(batch), plain(batch.info)
    return [
        Row({k: v[row] for k, v in steps.items()}, length, {k: v[row] for k, v in info.items()})
        for row, length in enumerate(batch.lengths.tolist())
    ]


def check(batch: TemporalDictTensor, model: list[Row], sample: Sample) -> None:
    """Values, lengths, info, keys, dtypes and shapes are as expected, and padding is zero."""
    assert model_of(batch) == model
    assert batch.n_elems() == len(model)
    assert batch.lengths.dtype is torch.int64
    assert [*batch, *batch.info] == [*sample.steps, *sample.info]
    for key, (dtype, shape) in sample.steps.items():
        assert batch[key].shape == (len(model), batch.n_timesteps(), *shape)
        assert batch.specs()[key] == {"size": torch.Size(shape), "dtype": dtype}
        assert not batch[key].numpy()[batch.mask().numpy() == 0].any()
    for key, (dtype, shape) in sample.info.items():
        assert (batch.info[key].shape, batch.info[key].dtype) == ((len(model), *shape), dtype)


def cut(row: Row, start: int, stop: int) -> Row:
    """Return steps ``start`` to ``stop`` of a row."""
    steps = {key: values[start:stop] for key, values in row.steps.items()}
    return row._replace(steps=steps, length=min(max(row.length - start, 0), stop - start))


def padded(row: Row, n_timesteps: int, specs: Specs) -> Row:
    zeros = {k: torch.zeros((n_timesteps, *s), dtype=d).tolist() for k, (d, s) in specs.items()}
    return row._replace(steps={k: (v + zeros[k])[:n_timesteps] for k, v in row.steps.items()})


def longest(model: list[Row]) -> int:
    return max((row.length for row in model), default=0)


# Selecting and joining in sequence, since each must preserve the invariants of the next ----------


def _select(sample: Sample, data: st.DataObject) -> Any:
    batch, model = sample[:2]
    rows = data.draw(st.lists(st.integers(-len(model), len(model) - 1) if model else st.nothing()))
    return batch[torch.tensor(rows, dtype=torch.int32)], [model[row] for row in rows]


def _mask(sample: Sample, data: st.DataObject) -> Any:
    kept = [data.draw(st.booleans()) for _ in sample.model]
    mask = torch.tensor(kept, dtype=torch.bool)
    return sample.batch[mask], [
        row for row, is_kept in zip(sample.model, kept, strict=True) if is_kept
    ]


def _slice(sample: Sample, data: st.DataObject) -> Any:
    part = data.draw(st.slices(4).filter(lambda part: part.step is None or part.step > 0))
    return sample.batch[part], sample.model[part]


def _slice_time(sample: Sample, data: st.DataObject) -> Any:
    start, stop = sorted(data.draw(st.integers(0, sample.batch.n_timesteps())) for _ in range(2))
    return sample.batch.temporal_slice(start, stop), [cut(row, start, stop) for row in sample.model]


def _shorten(sample: Sample, data: st.DataObject) -> Any:
    return sample.batch.shorten(), [cut(row, 0, longest(sample.model)) for row in sample.model]


def _pack(sample: Sample, data: st.DataObject) -> Any:
    batch = sample.batch
    packed = TemporalDictTensor.from_packed(batch.flatten(), batch.lengths, batch.info)
    return packed, _shorten(sample, data)[1]


def _apart_and_together(sample: Sample, data: st.DataObject) -> Any:
    parts = [part.shorten() for part in sample.batch.unfold()] or [sample.batch.shorten()]
    return TemporalDictTensor.cat(parts), _shorten(sample, data)[1]


def _expand(sample: Sample, data: st.DataObject) -> Any:
    batch, more = sample.batch, data.draw(st.integers(0, 3))
    shape = (batch.n_timesteps(),)
    empty = Row(
        {k: torch.zeros(shape + s, dtype=d).tolist() for k, (d, s) in sample.steps.items()},
        0,
        {k: torch.zeros(s, dtype=d).tolist() for k, (d, s) in sample.info.items()},
    )
    return batch.expand(len(sample.model) + more), sample.model + [empty] * more


def _leaves(batch: Any) -> list[torch.Tensor]:
    temporal = [batch.lengths, *batch.info.values()] if hasattr(batch, "info") else []
    return [*batch.values(), *temporal]


def _copy(sample: Sample, data: st.DataObject) -> Any:
    copied = [
        *(sample.batch.clone(), copy.deepcopy(sample.batch)),
        sample.batch.get(list(sample.batch), clone=True),
    ]
    if all(leaf.dtype is not UNSIGNED for leaf in _leaves(sample.batch)):
        copied.append(pickle.loads(pickle.dumps(sample.batch)))
    chosen = copied.pop(data.draw(st.integers(0, len(copied) - 1)))
    for other in copied:
        for tensor in _leaves(other):
            tensor.zero_()
    return chosen, sample.model


def _assign(sample: Sample, data: st.DataObject) -> Any:
    """Overwrite some rows with those of another batch, which may have more or fewer steps."""
    target, n_timesteps = sample.batch.clone(), sample.batch.n_timesteps()
    n_longer = n_timesteps + data.draw(st.integers(-n_timesteps, 2))
    lengths = data.draw(
        st.lists(st.integers(0, min(n_longer, n_timesteps)), min_size=1, max_size=4)
    )
    source = make(sample.steps, sample.info, lengths, n_longer, data.draw(seeds))
    n, rows, expected = len(sample.model), model_of(source), [*sample.model]
    write = data.draw(st.lists(st.integers(0, n - 1) if n else st.nothing(), unique=True))
    read = [data.draw(st.integers(-len(rows), len(rows) - 1)) for _ in write]
    target.copy_(source, *(torch.tensor(each, dtype=torch.int64) for each in (read, write)))
    for destination, origin in zip(write, read, strict=True):
        expected[destination] = padded(rows[origin], n_timesteps, sample.steps)
    return target, expected


OPERATIONS: list[Callable[..., Any]] = [
    *(_select, _mask, _slice, _slice_time, _shorten, _pack, _apart_and_together, _expand),
    *(_copy, _assign),
]


@settings(max_examples=400)
@given(samples(), st.data())
def test_any_chain_of_operations_matches_the_model(sample: Sample, data: st.DataObject) -> None:
    seen = [sample]
    for operation in data.draw(st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=6)):
        batch, model = operation(seen[-1], data)
        check(batch, model, sample)
        seen.append(Sample(batch, model, sample.steps, sample.info))
    for each in seen:
        check(each.batch, each.model, sample)  # nothing was written to its source


# Access -------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(samples(min_n=1), st.data())
def test_access_to_rows_and_steps_respects_the_lengths(sample: Sample, data: st.DataObject) -> None:
    batch, model = sample.batch, sample.model
    n_timesteps = batch.n_timesteps()
    mask = [[float(time < row.length) for time in range(n_timesteps)] for row in model]
    assert batch.mask().tolist() == mask
    assert batch.full() == all(row.length == n_timesteps for row in model)

    row = data.draw(st.integers(-len(model), len(model) - 1))
    check(batch.slice(row), [model[row]], sample)
    single = batch[row]
    assert (plain(single), single.lengths.item(), plain(single.info)) == tuple(model[row])
    assert single.mask().tolist() == mask[row]
    assert single.specs() == batch.specs()

    flat = batch.flatten(with_info=True)
    steps = [
        {**{key: values[time] for key, values in row.steps.items()}, **row.info}
        for row in model
        for time in range(row.length)
    ]
    assert rows_of(flat) == steps
    assert flat.specs() == {**batch.specs(), **batch.info.specs()}

    if n_timesteps:
        step = data.draw(st.integers(0, n_timesteps - 1))
        column = [{key: values[step] for key, values in row.steps.items()} for row in model]
        assert rows_of(batch.temporal_index(step)) == column
        running, numbers = batch.masked_temporal_index(step)
        assert numbers.tolist() == [i for i, row in enumerate(model) if step < row.length]
        assert rows_of(running) == [column[i] for i in numbers.tolist()]
        times = [data.draw(st.integers(0, n_timesteps - 1)) for _ in model]
        chosen = batch.temporal_multi_index(torch.tensor(times))
        assert chosen.specs() == running.specs() == batch.specs()
        assert rows_of(chosen) == [
            {key: values[time] for key, values in row.steps.items()}
            for row, time in zip(model, times, strict=True)
        ]


# DictTensor: its own behaviour --------------------------------------------------------------------


@given(specs, specs, st.integers(0, 4), st.integers(0, 4), seeds, st.data())
def test_a_dict_tensor_behaves_like_a_list_of_rows(
    first: Specs, second: Specs, n: int, m: int, seed: int, data: st.DataObject
) -> None:
    batch, other = random_batch(first, n, seed), random_batch(second, m, seed + 9)
    model = rows_of(batch)
    start, stop = (data.draw(st.integers(-6, 6)) for _ in range(2))
    assert rows_of(batch.slice(start, stop)) == model[start:stop]
    assert [rows_of(part) for part in batch.unfold()] == [[row] for row in model]
    if -n <= start < n:
        assert plain(batch[start]) == model[start]
        assert rows_of(batch[torch.tensor([start, 0])]) == [model[start], model[0]]
    longer = batch.prepend_key("_")
    assert list(longer) == ["_" + key for key in first]
    assert dict(longer.truncate_key("_")) == dict(batch)
    assert list(batch.truncate_key("_")) == [key[1:] for key in first if key.startswith("_")]
    if n != m or set(first) & set(second):
        with pytest.raises(SpecError):
            batch + other
    else:
        assert rows_of(batch + other) == [
            {**a, **b} for a, b in zip(model, rows_of(other), strict=True)
        ]
