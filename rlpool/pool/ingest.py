"""From trajectories and single transitions to rows that are ready to be written.

Nothing is copied on the way, unless it has another dtype than what is stored.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError
from rlpool.memory.storage import Array
from rlpool.pool.store import Schema
from rlpool.slots.blocks import successor_key
from rlpool.slots.trajectories import DerivedTensors, Successor
from rlpool.specs import DEFAULT_OBSERVATION_KEY, TensorSpec, join_key

ACTION_KEY = "action"
REWARD_KEY, DONE_KEY, TERMINATED_KEY = "_reward", "_done", "_terminated"

_MOST_POWER = 1e290  # of a priority: a great many of them can be added up
_MOST_FLOAT32 = float(np.finfo(np.float32).max)
_COMPARED_BYTES = 2**25  # at a time
_WORDS = tuple(map(np.dtype, (np.uint64, np.uint32, np.uint16, np.uint8)))
_START = "initial_state"
_FLAGS = (DONE_KEY, TERMINATED_KEY, "_truncated", _START)


class Source(NamedTuple):
    """Values of a key, one per transition: some rows of an array."""

    array: Array
    rows: Array

    def part(self, places: slice | Array) -> Source:
        """Some of the values, no copy."""
        return Source(self.array, self.rows[places])

    def values(self, out: Array | None = None) -> Array:
        """The values ``[n, ...]``, copied to an array or a new one."""
        # Clipped because that is faster than "raise", which makes a copy of the target.
        values: Array = self.array.take(self.rows, 0, out, "clip")
        return values


class Incoming(NamedTuple):
    """Transitions to be added, in order.

    Attributes:
        columns: Key to values, for every column of the schema.
        is_last: bool ``[n]``: whether the next one does not continue the episode.
        finals: Paired key to values after the step, right wherever ``is_last`` holds.
    """

    columns: Mapping[str, Source]
    is_last: Array
    finals: Mapping[str, Source]

    @classmethod
    def of_trajectories(cls, trajectories: TemporalDictTensor, schema: Schema) -> Incoming:
        """Every step of trajectories ``[B, T, ...]``, in row-then-time order.

        Values after a step that are derived from those before it are not computed.

        Raises:
            SpecError: If a value does not fit into the dtype that is stored, or a flag is none.
        """
        tensors = trajectories._steps._tensors
        lengths = trajectories.lengths.cpu().numpy()
        steps = _Steps(lengths)
        is_last = np.zeros(lengths.sum(), bool)
        is_last[lengths.cumsum()[lengths > 0] - 1] = True
        for key in _FLAGS:
            if key in tensors and _derivation(tensors, key) is None:
                flags = _flags(key, steps.of(tensors[key].numpy(force=True)).values())
                is_last[:-1] |= flags[1:] if key == _START else flags[:-1]

        def source(key: str, spec: TensorSpec) -> Source:
            return steps.of(converted(key, tensors[key].numpy(force=True), spec.dtype))

        columns = {key: source(key, spec) for key, spec in schema.columns.items()}
        finals = {}
        for key in schema.paired:
            name, spec = successor_key(key), schema.columns[key]
            derivation = _derivation(tensors, name)
            if isinstance(derivation, Successor) and np.array_equal(derivation.lengths, lengths):
                array = converted(name, derivation.finals(), spec.dtype)
                finals[key] = Source(array, np.repeat(np.arange(len(lengths)), lengths))
            else:
                finals[key] = source(name, spec)
                _mark_jumps(is_last, columns[key], finals[key])
        return cls(columns, is_last, finals)

    @classmethod
    def of_one(cls, values: Mapping[str, Array], schema: Schema) -> Incoming:
        """A single transition of arrays without a batch dimension.

        Raises:
            SpecError: If a value does not fit into the dtype that is stored.
        """
        first = np.zeros(1, np.int64)

        def source(key: str, spec: TensorSpec) -> Source:
            return Source(converted(key, values[key], spec.dtype)[None], first)

        columns = {key: source(key, spec) for key, spec in schema.columns.items()}
        finals = {key: source(successor_key(key), schema.columns[key]) for key in schema.paired}
        return cls(columns, np.ones(1, bool), finals)

    def part(self, places: slice | Array) -> Incoming:
        """Some of the transitions, no copy: a range, or pieces that each end with a last one."""
        columns, finals = (
            {key: source.part(places) for key, source in sources.items()}
            for sources in (self.columns, self.finals)
        )
        return Incoming(columns, self.is_last[places], finals)


class _Steps:
    """Finds the steps of trajectories in arrays ``[B, T, ...]``, copying none that lie in rows."""

    def __init__(self, lengths: Array) -> None:
        self._lengths = lengths
        self._places: dict[int, Array] = {}  # by stride

    def of(self, array: Array) -> Source:
        """The steps of an array."""
        n_rows, n_times, *shape = array.shape
        row_bytes = math.prod(shape) * array.itemsize
        stride = n_times
        if not array.flags.c_contiguous and array.size and _is_grid(array, row_bytes):
            stride = array.strides[0] // row_bytes
            flat_shape = ((n_rows - 1) * stride + n_times, *shape)
            array = np.lib.stride_tricks.as_strided(
                array, flat_shape, array.strides[1:], writeable=False
            )
        else:
            array = array.reshape(n_rows * n_times, *shape)
        if stride not in self._places:
            starts = np.cumsum(self._lengths) - self._lengths
            shifts = np.arange(len(self._lengths)) * stride - starts
            n_steps = self._lengths.sum()
            self._places[stride] = np.repeat(shifts, self._lengths) + np.arange(n_steps)
        return Source(array, self._places[stride])


def _is_grid(array: Array, row_bytes: int) -> bool:
    """Whether every step lies in one piece, and all steps in a regular grid of such pieces."""
    row_stride, step_stride = array.strides[:2]
    is_regular = step_stride == row_bytes <= row_stride and row_stride % row_bytes == 0
    return is_regular and array[0, 0].flags.c_contiguous


def _derivation(tensors: Mapping[str, torch.Tensor], key: str) -> Any:
    return tensors.derivation(key) if isinstance(tensors, DerivedTensors) else None


def _flags(key: str, values: Array) -> Array:
    """The flags of steps, bool ``[n]``."""
    are_flags = values.dtype.kind == "b" or np.isin(values, (0, 1)).all()
    if math.prod(values.shape[1:]) != 1 or not are_flags:
        raise SpecError(
            f"{key!r} has values that are neither true nor false, or several per step",
            fix="pass a bool per step",
        )
    return values.reshape(-1).astype(bool, copy=False)


def _mark_jumps(is_last: Array, values: Source, after: Source) -> None:
    """Mark steps whose value after the step is not the value that the next one starts from."""
    row_bytes = values.array[:1].nbytes
    # Bits are compared, as NaN is not equal to itself; the widest words take the least time.
    word = next(dtype for dtype in _WORDS if row_bytes % dtype.itemsize == 0)
    n_words = row_bytes // word.itemsize
    n_at_once = max(1, _COMPARED_BYTES // row_bytes)
    for start in range(0, len(is_last) - 1, n_at_once):
        stop = min(start + n_at_once, len(is_last) - 1)
        here = after.part(slice(start, stop)).values().reshape(-1).view(word)
        there = values.part(slice(start + 1, stop + 1)).values().reshape(-1).view(word)
        is_last[start + (here != there).nonzero()[0] // n_words] = True


def converted(key: str, array: Array, dtype: np.dtype[Any]) -> Array:
    """An array in another dtype of its kind.

    Raises:
        SpecError: If that does not hold its values.
    """
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        new = array.astype(dtype)
    is_lost = np.isfinite(array) & ~np.isfinite(new) if dtype.kind == "f" else new != array
    if is_lost.any():
        fix = "let the first transitions have a dtype for all values"
        raise SpecError(
            f"{key!r} has values such as {array[is_lost].flat[0]}, the pool holds {dtype}",
            fix="scale the rewards" if "reward" in key else fix,
        )
    return new


# Specs ------------------------------------------------------------------------------------------


def specs_of(trajectories: TemporalDictTensor, keys: Sequence[str] | None) -> dict[str, TensorSpec]:
    """What a step of trajectories consists of, nothing being computed.

    Args:
        trajectories: Anything.
        keys: The keys to look at, ``None`` for all.

    Raises:
        SpecError: If a key is missing or has a dtype that a pool does not hold.
    """
    tensors = trajectories._steps._tensors
    specs = {}
    for key in chosen(tensors, keys, "the trajectories"):
        # A derived value after a step is like the value before it.
        is_derived = isinstance(_derivation(tensors, key), Successor)
        tensor = tensors[key.removeprefix("_") if is_derived else key]
        dtype = _numpy_dtype(tensor.dtype)
        if not _is_storable(dtype):
            raise SpecError(
                f"{key!r} has dtype {tensor.dtype}, which a pool cannot hold",
                fix="convert it first, complex numbers with torch.view_as_real for instance",
            )
        specs[key] = TensorSpec(tuple(tensor.shape[2:]), dtype)
    return specs


def chosen(there: Mapping[str, Any], keys: Sequence[str] | None, what: str) -> list[str]:
    """The keys to look at, ``None`` for all.

    Raises:
        SpecError: If one of them is missing.
    """
    missing = [key for key in keys or () if key not in there]
    if missing:
        raise SpecError(
            f"{what} should have the keys {missing}, got {list(there)}",
            fix="name keys that are there, or use another pool",
        )
    return list(there if keys is None else keys)


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except (TypeError, RuntimeError):
        return np.dtype(object)


def _is_storable(dtype: np.dtype[Any]) -> bool:
    """Whether it is bool, or an integer or float of up to 64 bits."""
    return dtype.kind in "biuf" and dtype.itemsize <= np.dtype(np.int64).itemsize


# Single transitions -----------------------------------------------------------------------------


def transition_of(
    s: Any, a: Any, next_s: Any, r: Any, done: Any, terminated: Any
) -> dict[str, Array]:
    """A transition as arrays by key, without a batch dimension.

    Raises:
        SpecError: If something cannot be an array, the two states differ in shape, or an episode
            terminates without being done.
    """
    before = _named("s", s, "", DEFAULT_OBSERVATION_KEY)
    after = _named("next_s", next_s, "", DEFAULT_OBSERVATION_KEY)
    shapes, after_shapes = ({k: v.shape for k, v in each.items()} for each in (before, after))
    if shapes != after_shapes:
        raise SpecError(
            f"s has shapes {shapes}, next_s has {after_shapes}",
            fix="both are single states of one shape",
        )
    refuse_taken(before, "s")
    values = {**before, **_named("a", a, ACTION_KEY, ACTION_KEY)}
    for key, state in before.items():
        # One dtype for both: that of s, unless it holds no fractions and next_s may.
        dtype = state.dtype
        if not np.can_cast(after[key].dtype, dtype, "same_kind"):
            dtype = np.result_type(dtype, after[key].dtype)
        values[key] = state.astype(dtype, copy=False)
        values[successor_key(key)] = after[key].astype(dtype, copy=False)
    values[REWARD_KEY] = _single("r", r)
    for key, name, flag in (DONE_KEY, "done", done), (TERMINATED_KEY, "terminated", terminated):
        value = _single(name, flag)
        if value not in (0, 1):
            raise SpecError(f"{name} should be True or False, got {flag!r}", fix="pass a bool")
        values[key] = value.astype(bool)
    if values[TERMINATED_KEY] and not values[DONE_KEY]:
        raise SpecError("terminated is true, but done is not", fix="done=True ends the episode")
    return values


def refuse_taken(state_keys: Collection[str], what: str) -> None:
    """Refuse states with keys that a transition uses for something else."""
    own = {ACTION_KEY, REWARD_KEY, DONE_KEY, TERMINATED_KEY, *map(successor_key, state_keys)}
    taken = sorted(own & set(state_keys))
    if taken:
        raise SpecError(f"{what} has keys that are taken: {taken}", fix="rename them")


def _named(name: str, value: Any, prefix: str, only: str) -> dict[str, Array]:
    """Arrays by key, of a value or of a nested dict of values."""
    if not isinstance(value, Mapping):
        return {only: _as_array(name, value)}
    arrays: dict[str, Array] = {}
    for key, inner in value.items():
        whole = join_key(prefix, str(key))
        arrays.update(_named(f"{name}[{key!r}]", inner, whole, whole))
    return arrays


def _single(name: str, value: Any) -> Array:
    array = _as_array(name, value)
    if array.size != 1:
        raise SpecError(f"{name} should be one number, got shape {list(array.shape)}")
    return array.reshape(())


def _array_of(value: Any) -> Array:
    """A value as an array, of objects if it cannot be one of numbers."""
    try:
        return value.numpy(force=True) if isinstance(value, torch.Tensor) else np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        return np.asarray(None)


def _as_array(name: str, value: Any) -> Array:
    """A value as an array; Python's floats become float32 if that holds them."""
    array = _array_of(value)
    if not _is_storable(array.dtype):
        raise SpecError(
            f"{name} should be a number or an array of numbers, got {type(value).__name__} "
            f"of {array.dtype}",
            fix="pass arrays of one shape",
        )
    if type(value) is float and not _MOST_FLOAT32 < abs(value) < math.inf:
        return array.astype(np.float32)  # a NumPy scalar says what it wants
    return array.astype(array.dtype.newbyteorder("="), copy=False)


# Priorities --------------------------------------------------------------------------------------


def checked_priorities(index: Any, priorities: Any, alpha: float) -> tuple[Array, Array]:
    """Indexes int64 ``[n]``, and priorities float64 ``[n]`` to the power alpha.

    Raises:
        SpecError: For other shapes, and for values that are not finite or negative.
    """
    given = _array_of(index)
    if isinstance(priorities, torch.Tensor) and not priorities.is_complex():
        priorities = priorities.detach().double()  # NumPy lacks bfloat16
    values = _array_of(priorities)
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        shape = f"{given.dtype}{list(given.shape)}"
        raise SpecError(f"index should be int64 [n] as sample() gave it, got {shape}")
    is_right = values.dtype.kind in "biuf" and values.shape == given.shape
    if is_right:
        with np.errstate(over="ignore", invalid="ignore"):
            powers = values.astype(np.float64) ** alpha
        is_right = (np.isfinite(values) & (values >= 0) & (powers <= _MOST_POWER)).all()
    if not is_right:
        raise SpecError(
            f"priorities should be finite numbers [{given.size}], none of them negative or huge, "
            f"got {values}",
            fix="pass absolute errors, and look for NaN or divergence in the loss",
        )
    return given.astype(np.int64), powers
