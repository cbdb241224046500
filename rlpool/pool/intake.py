"""From trajectories to transitions that are ready to be written, without copying them first."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError
from rlpool.memory.storage import Array
from rlpool.slots.blocks import successor_key
from rlpool.slots.trajectories import DerivedTensors, Successor
from rlpool.specs import TensorSpec

_PAIRED_BYTES = 9
"""Rows of at least this size are not stored twice. Below, the link to a row's final value costs as
much as the value, and reading it more: single numbers and flags are stored as they are."""

_COMPARED_BYTES = 2**25
"""How much is compared at a time."""

_WORDS = (np.dtype(np.uint64), np.dtype(np.uint32), np.dtype(np.uint16), np.dtype(np.uint8))
_EVERY = slice(None)
_ENDS = ("_done", "_terminated", "_truncated")
_START = "initial_state"
_REWARDS = ("reward", "_reward")
_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Source:
    """Where the rows of one key come from.

    Attributes:
        array: ``[any, ...]``.
        rows: int64 ``[n]``, which of its rows are meant; ``None`` if all of them.
    """

    array: Array
    rows: Array | None

    def copy_to(self, target: Array, start: int) -> None:
        """Write rows from ``start`` on into ``target``, as many as it has."""
        stop = start + len(target)
        if self.rows is None:
            target[...] = self.array[start:stop]
        else:
            # Clipped because that is faster than "raise", which makes a copy of the target.
            self.array.take(self.rows[start:stop], axis=0, out=target, mode="clip")

    def at(self, places: Array | slice) -> Array:
        """Some of the rows, perhaps no copy."""
        if self.rows is None:
            return self.array[places]
        taken: Array = self.array.take(self.rows[places], axis=0, mode="clip")
        return taken

    def part(self, places: slice | Array) -> Source:
        """Some of the rows as a source of their own, no copy."""
        if self.rows is not None:
            return Source(self.array, self.rows[places])
        if isinstance(places, slice):
            return Source(self.array[places], None)
        return Source(self.array, places)


@dataclass(frozen=True)
class Intake:
    """Transitions, one after the other.

    Attributes:
        n: How many.
        columns: Key to source, for every key that is stored.
        is_last: bool ``[n]``: whether the next one does not go on with the same episode.
        finals: Paired key to a function that gives the values after the steps at some places, all
            of them places where ``is_last`` holds.
    """

    n: int
    columns: Mapping[str, Source]
    is_last: Array
    finals: Mapping[str, Callable[[Array], Array]]

    def part(self, places: slice | Array) -> Intake:
        """Some of the transitions, no copy: a range, or pieces that each end with a last one."""
        is_last = self.is_last[places]
        return Intake(
            len(is_last),
            {key: source.part(places) for key, source in self.columns.items()},
            is_last,
            {key: _moved(final, places) for key, final in self.finals.items()},
        )

    def alone(self, place: int) -> Intake:
        """One of the transitions, as if it were an episode of its own."""
        return replace(self.part(slice(place, place + 1)), is_last=np.ones(1, bool))


def _moved(final: Callable[[Array], Array], places: slice | Array) -> Callable[[Array], Array]:
    if isinstance(places, slice):
        return lambda chosen: final(places.start + chosen)
    return lambda chosen: final(places[chosen])


@dataclass(frozen=True)
class Schema:
    """What a pool stores.

    Attributes:
        columns: Key to what is stored per transition.
        paired: Those of them whose value after the step, ``_key``, follows from the next one.
    """

    columns: Mapping[str, TensorSpec]
    paired: tuple[str, ...]

    @classmethod
    def of(cls, specs: Mapping[str, TensorSpec]) -> Schema:
        """The schema for transitions of these keys; rewards are stored in float32."""
        specs = {key: stored_spec(key, spec) for key, spec in specs.items()}
        derived: set[str] = set()
        for key in sorted(specs, key=len):  # of x, _x and __x the first two are a pair
            is_pair = specs.get(successor_key(key)) == specs[key] and key not in derived
            if is_pair and specs[key].n_bytes >= _PAIRED_BYTES:
                derived.add(successor_key(key))
        paired = tuple(key for key in specs if successor_key(key) in derived)
        return cls({key: spec for key, spec in specs.items() if key not in derived}, paired)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Every key of a transition."""
        return {**self.columns, **{successor_key(key): self.columns[key] for key in self.paired}}


def stored_spec(key: str, spec: TensorSpec) -> TensorSpec:
    """What is stored of a value: rewards in float32, all else as it is."""
    return TensorSpec(spec.shape, _FLOAT32) if key in _REWARDS else spec


def specs_of(trajectories: TemporalDictTensor, keys: Sequence[str] | None) -> dict[str, TensorSpec]:
    """What a step of trajectories consists of, nothing being computed.

    Args:
        trajectories: Anything.
        keys: The keys to look at, ``None`` for all.

    Raises:
        SpecError: If a key is missing or has a dtype that NumPy lacks.
    """
    tensors = trajectories._steps._tensors
    missing = [key for key in keys or () if key not in tensors]
    if missing:
        raise SpecError(
            f"the trajectories lack {missing}, they have {list(tensors)}",
            fix="name keys they have, or let the agent or the environment add these",
        )
    specs: dict[str, TensorSpec] = {}
    for key in keys if keys is not None else list(tensors):
        derivation = _derivation(tensors, key)
        # A derived value after a step is like the value before it.
        like = key.removeprefix("_") if isinstance(derivation, Successor) else key
        specs[key] = _spec(key, tensors[like])
    return specs


def _spec(key: str, tensor: torch.Tensor) -> TensorSpec:
    try:
        dtype = _numpy_dtype(tensor.dtype)
    except (TypeError, RuntimeError):
        dtype = np.dtype(object)
    if not is_storable(dtype):
        raise SpecError(
            f"{key!r} has dtype {tensor.dtype}, which a pool cannot hold",
            fix="convert it first, complex numbers with torch.view_as_real for instance",
        )
    return TensorSpec(tuple(tensor.shape[2:]), dtype)


def is_storable(dtype: np.dtype[Any]) -> bool:
    """Whether a pool holds values of a dtype: bool, and integers and floats of up to 64 bits."""
    return dtype.kind in "biuf" and dtype.itemsize <= np.dtype(np.int64).itemsize


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype


def intake_of(trajectories: TemporalDictTensor, schema: Schema) -> Intake:
    """The transitions of trajectories, in row-then-time order.

    Values after a step that are derived from those before it are not computed.

    Args:
        trajectories: ``[B, T, ...]`` with all keys of the schema.
        schema: What is to be stored.

    Raises:
        SpecError: If a value does not fit into the dtype that is stored.
    """
    tensors = trajectories._steps._tensors
    lengths = trajectories.lengths.cpu().numpy()
    ends = np.cumsum(lengths)
    n = int(ends[-1]) if ends.size else 0
    steps = _Steps(lengths, ends)

    is_last = np.zeros(n, bool)
    is_last[ends[lengths > 0] - 1] = True
    for key in _ENDS:
        if key in tensors and _derivation(tensors, key) is None:
            is_last |= steps.flags(key, tensors[key])
    if _START in tensors and _derivation(tensors, _START) is None and n:
        is_last[:-1] |= steps.flags(_START, tensors[_START])[1:]

    columns = {key: steps.source(key, tensors[key], s) for key, s in schema.columns.items()}
    finals: dict[str, Callable[[Array], Array]] = {}
    for key in schema.paired:
        derivation = _derivation(tensors, successor_key(key))
        if isinstance(derivation, Successor) and np.array_equal(derivation.lengths, lengths):
            after_rows = converted(
                successor_key(key), derivation.finals(), schema.columns[key].dtype
            )
            finals[key] = _finals_of_rows(after_rows, ends)
        else:
            name = successor_key(key)
            after = steps.source(name, tensors[name], schema.columns[key])
            _mark_jumps(is_last, columns[key], after)
            finals[key] = after.at
    return Intake(n, columns, is_last, finals)


def intake_of_one(values: Mapping[str, Array], schema: Schema) -> Intake:
    """A single transition, the last of its episode as far as is known.

    Args:
        values: Every key of the schema, without a batch dimension.
        schema: What is to be stored.

    Raises:
        SpecError: If a value does not fit into the dtype that is stored.
    """

    def source(key: str, spec: TensorSpec) -> Source:
        return Source(converted(key, values[key], spec.dtype)[None], None)

    return Intake(
        1,
        {key: source(key, spec) for key, spec in schema.columns.items()},
        np.ones(1, bool),
        {key: source(successor_key(key), schema.columns[key]).at for key in schema.paired},
    )


class _Steps:
    """Finds the steps of trajectories in tensors ``[B, T, ...]``, copying none that lie in rows."""

    def __init__(self, lengths: Array, ends: Array) -> None:
        self._lengths = lengths
        self._starts = ends - lengths
        self._n = int(ends[-1]) if ends.size else 0
        self._known: dict[int, Array] = {}

    def source(self, key: str, tensor: torch.Tensor, spec: TensorSpec) -> Source:
        """The steps of one tensor, converted if they have another dtype."""
        return self._source(converted(key, tensor.numpy(force=True), spec.dtype), spec.n_bytes)

    def flags(self, key: str, tensor: torch.Tensor) -> Array:
        """The steps of one tensor, as flags ``[n]``."""
        array = tensor.numpy(force=True)
        if math.prod(array.shape[2:]) != 1:
            raise SpecError(
                f"{key!r} has shape {list(array.shape[2:])} per step",
                fix="give one flag per step, or another name",
            )
        flags = self._source(array, array.itemsize).at(_EVERY).reshape(-1)
        if flags.dtype.kind != "b" and not np.isin(flags, (0, 1)).all():
            raise SpecError(f"{key!r} has values that are neither true nor false", fix="pass bools")
        return flags.astype(bool, copy=False)

    def _source(self, array: Array, row_bytes: int) -> Source:
        n_rows, n_times, *shape = array.shape
        if array.flags.c_contiguous or not array.size or not _has_rows(array, row_bytes):
            stride = n_times
            array = array.reshape(n_rows * n_times, *shape)
            if self._n == len(array):
                return Source(array, None)
        else:
            stride = array.strides[0] // row_bytes
            flat_shape = ((n_rows - 1) * stride + n_times, *shape)
            array = np.lib.stride_tricks.as_strided(
                array, flat_shape, array.strides[1:], writeable=False
            )
        return Source(array, self._rows(stride))

    def _rows(self, stride: int) -> Array:
        """Every step's row, where rows of trajectories begin so many apart."""
        if stride not in self._known:
            shifts = np.arange(len(self._lengths)) * stride - self._starts
            self._known[stride] = np.repeat(shifts, self._lengths) + np.arange(self._n)
        return self._known[stride]


def converted(key: str, array: Array, dtype: np.dtype[Any]) -> Array:
    """An array in another dtype of its kind.

    Raises:
        SpecError: If that does not hold its values.
    """
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        new = array.astype(dtype)
    if np.can_cast(array.dtype, dtype, "safe"):
        return new
    is_lost = np.isfinite(array) & ~np.isfinite(new) if dtype.kind == "f" else new != array
    if is_lost.any():
        raise SpecError(
            f"{key!r} has values such as {array[is_lost].flat[0]}, the pool holds {dtype}",
            fix="scale the rewards"
            if key in _REWARDS
            else "let the first transitions have a dtype for all values",
        )
    return new


def _has_rows(array: Array, row_bytes: int) -> bool:
    """Whether every step lies in one piece, and all steps in a regular grid of such pieces."""
    return (
        row_bytes > 0
        and array[0, 0].flags.c_contiguous
        and array.strides[1] == row_bytes
        and array.strides[0] >= row_bytes
        and array.strides[0] % row_bytes == 0
    )


def _derivation(tensors: Mapping[str, torch.Tensor], key: str) -> Any:
    return tensors.derivation(key) if isinstance(tensors, DerivedTensors) else None


def _finals_of_rows(finals: Array, ends: Array) -> Callable[[Array], Array]:
    return lambda places: finals[np.searchsorted(ends, places, side="right")]


def _mark_jumps(is_last: Array, values: Source, after: Source) -> None:
    """Mark steps whose value after the step is not the value that the next one starts from."""
    row_bytes = values.array[:1].nbytes
    # Bits are compared, as NaN is not equal to itself; the widest words take the least time.
    word = next(dtype for dtype in _WORDS if row_bytes % dtype.itemsize == 0)
    n_words = row_bytes // word.itemsize
    n_at_once = max(1, _COMPARED_BYTES // row_bytes)
    for start in range(0, len(is_last) - 1, n_at_once):
        stop = min(start + n_at_once, len(is_last) - 1)
        here = after.at(slice(start, stop)).reshape(-1).view(word)
        there = values.at(slice(start + 1, stop + 1)).reshape(-1).view(word)
        is_last[start + (here != there).nonzero()[0] // n_words] = True
