"""Conversion of trajectories and single transitions to rows that are ready to be written.

Values are not copied unless their dtype differs from the stored one. The next observation is
usually that of the next row, so it is not stored. A row is the last of a piece if an episode ends,
or if the next row does not start from the value after the step::

    frame         a   b   c   k   l
    _frame        b   c   d   l   m
    is_last       -   -   x   -   x     d and m are terminal values: they are stored separately
"""

from __future__ import annotations

import functools
import math
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rlpool.data.array_view import as_numpy
from rlpool.data.rows import step_entries
from rlpool.data.specs import (
    DEFAULT_OBSERVATION_KEY,
    TensorSpec,
    fitted,
    fitted_rewards,
    join_key,
    numpy_dtype,
    refuse_missing,
)
from rlpool.data.storage import NDArray
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError
from rlpool.pool.schema import REWARDS, Schema
from rlpool.slots.blocks import successor_key
from rlpool.slots.trajectories import StepTensors

ACTION_KEY = "action"
REWARD_KEY, DONE_KEY, TERMINATED_KEY = "_reward", "_done", "_terminated"
TRUNCATED_KEY = "_truncated"

TRANSITION_KEYS = (
    *(DEFAULT_OBSERVATION_KEY, ACTION_KEY, successor_key(DEFAULT_OBSERVATION_KEY)),
    *(REWARD_KEY, DONE_KEY),
)
"""Names of the results of ``get_pool``."""

_MOST_FLOAT32 = float(np.finfo(np.float32).max)
_COMPARED_BYTES = 2**25  # at a time
_START = "initial_state"
_END_FLAGS = (DONE_KEY, TERMINATED_KEY, TRUNCATED_KEY)
_SUFFICIENT = ({DONE_KEY}, {_START}, {TERMINATED_KEY, TRUNCATED_KEY})
"""Sets of flags that determine every end of an episode within a row."""

NOTHING_CUT = 2**63 - 1  # more steps than any row has
_WORDS = tuple(map(np.dtype, (np.uint64, np.uint32, np.uint16, np.uint8)))


class LazyRows(NamedTuple):
    """Values of a key, one per transition, as a selection of rows of an array."""

    array: NDArray
    rows: NDArray

    def part(self, places: slice | NDArray) -> LazyRows:
        """Select some of the values, without copying."""
        return LazyRows(self.array, self.rows[places])

    def values(self, out: NDArray | None = None) -> NDArray:
        """Copy the values ``[n, ...]`` to an array, by default a new one."""
        # "clip" is faster than "raise", which copies the target.
        values: NDArray = self.array.take(self.rows, 0, out, "clip")
        return values

    def newest_frames(self) -> LazyRows:
        """Return the last frames of stacks, without copying."""
        n_frames = self.array.shape[1]
        frames = self.array.reshape(-1, *self.array.shape[2:])
        return LazyRows(frames, self.rows * n_frames + n_frames - 1)


class NewRows(NamedTuple):
    """Transitions to be added, in order.

    Attributes:
        columns: Values by key, for every column of the schema, with whole stacks.
        is_last: bool ``[n]``: whether the next one does not continue the episode.
        finals: Values after the step by paired key, valid where ``is_last`` is True.
        is_terminal: bool ``[n]``: whether the state after it is terminal.
        ends_known: Whether the ends of episodes are known.
        terminal_known: Whether it is known which transitions are terminal.
        shortest_cut: Steps of the shortest row that ends within an episode.
    """

    columns: Mapping[str, LazyRows]
    is_last: NDArray
    finals: Mapping[str, LazyRows]
    is_terminal: NDArray
    ends_known: bool = True
    terminal_known: bool = True
    shortest_cut: int = NOTHING_CUT

    def part(self, places: slice | NDArray) -> NewRows:
        """Select a range, or pieces that each end with a last transition, without copying."""
        columns, finals = (
            {key: values.part(places) for key, values in every.items()}
            for every in (self.columns, self.finals)
        )
        new = self._replace(columns=columns, finals=finals, is_last=self.is_last[places])
        return new._replace(is_terminal=self.is_terminal[places])


Tensors = ChainMap[str, torch.Tensor]


def tensors_of(trajectories: TemporalDictTensor, names: Sequence[str]) -> Tensors:
    """Return values of steps ``[B, T, ...]``, not copied.

    Args:
        trajectories: The trajectories.
        names: Keys of their ``info``; ``"agent_info"`` means all keys ``agent_info/...``.

    Returns:
        Values of the ``info`` for every step, then those of the steps, which may be lazy.

    Raises:
        SpecError: If a key is missing, or the steps have the same key.
    """
    found: Any = {}
    n_times, info = trajectories.n_timesteps(), trajectories.info
    for name in names:
        if name in trajectories and name not in info:
            continue  # a key of the steps
        keys = [key for key in info if key == name or key.startswith(join_key(name, ""))]
        if not keys:
            raise SpecError(
                f"the info of the trajectories has no {name!r}, it has {list(info)}",
                fix="execute(agent_info=..., env_info=...) adds keys of these names; change "
                "info_keys, or use another pool",
            )
        if taken := [key for key in keys if key in trajectories]:
            raise SpecError(f"steps and info both have {taken}", fix="rename one of them")
        for key in keys:
            tensor = info[key].unsqueeze(1)
            found[key] = tensor.expand(len(tensor), n_times, *tensor.shape[2:])
    return ChainMap(found, trajectories._steps._tensors)


def from_trajectories(tensors: Tensors, lengths: NDArray, schema: Schema) -> NewRows:
    """Return all steps of trajectories ``[B, T, ...]``, in row-then-time order.

    Values after a step that can be derived from those before it are not computed.

    Args:
        tensors: The result of ``tensors_of``.
        lengths: Steps of each trajectory.
        schema: The schema of the store.

    Raises:
        SpecError: If a value does not fit the stored dtype, a flag is not a single bool, 0 or 1, or
            a stack is not the previous one shifted by a frame.
    """
    rows = np.arange(len(lengths)).repeat(lengths)
    times = np.arange(len(rows)) - (lengths.cumsum() - lengths).repeat(lengths)
    places_at = functools.cache(lambda pitch: rows * pitch + times)

    def steps_of(array: NDArray) -> LazyRows:
        entries, pitch = step_entries(torch.from_numpy(array))
        return LazyRows(entries.numpy(), places_at(pitch))

    flags = {
        key: _flags(key, steps_of(tensors[key].numpy(force=True)).values())
        for key in (*_END_FLAGS, _START)
        if key in tensors
    }
    never = np.zeros(len(rows), bool)
    is_last = np.logical_or.reduce([flags.get(key, never) for key in _END_FLAGS])
    sizes = lengths[lengths > 0]
    last_steps = sizes.cumsum() - 1
    shortest_cut = sizes[~is_last[last_steps]].min(initial=NOTHING_CUT)
    is_last[:-1] |= flags.get(_START, never)[1:]
    is_last[last_steps] = True
    not_truncated = flags.get(DONE_KEY, never) & ~flags.get(TRUNCATED_KEY, never)
    is_terminal = flags.get(TERMINATED_KEY, not_truncated)

    def rows_of(key: str, spec: TensorSpec) -> LazyRows:
        return steps_of(converted(key, tensors[key].numpy(force=True), spec.dtype))

    columns = {key: rows_of(key, spec) for key, spec in schema.columns.items()}
    finals = {}
    steps: Any = tensors.maps[-1]
    for key in schema.paired:
        name, spec = successor_key(key), schema.columns[key]
        after = _finals(tensors, name)
        if after is not None and np.array_equal(steps.part.lengths, lengths):
            finals[key] = LazyRows(converted(name, after, spec.dtype), rows)
        else:
            finals[key] = rows_of(name, spec)
            _mark_jumps(is_last, columns[key], finals[key])
    # A row may hold several episodes, even if each state is the next one's start: a reset may lead
    # to exactly the state in which an episode ended.
    ends_known = lengths.max() <= 1 or any(keys <= tensors.keys() for keys in _SUFFICIENT)
    for key in schema.stacks:
        for some in _parts(len(is_last) - 1, columns[key].array):
            with_next = columns[key].part(slice(some.start, some.stop + 1)).values()
            _check_shifted(key, with_next, is_last[some])
    known = bool(ends_known), TERMINATED_KEY in flags or DONE_KEY in flags
    return NewRows(columns, is_last, finals, is_terminal, *known, int(shortest_cut))


def from_single(values: Mapping[str, NDArray], schema: Schema) -> NewRows:
    """Convert a single transition of arrays without a batch dimension.

    Raises:
        SpecError: If a value does not fit the stored dtype, or a stack is not the previous one
            shifted by a frame.
    """
    first = np.zeros(1, np.int64)

    def rows_of(key: str, spec: TensorSpec) -> LazyRows:
        return LazyRows(converted(key, values[key], spec.dtype)[None], first)

    columns = {key: rows_of(key, spec) for key, spec in schema.columns.items()}
    finals = {key: rows_of(successor_key(key), schema.columns[key]) for key in schema.paired}
    if not values[DONE_KEY]:
        for key in finals.keys() & set(schema.stacks):
            both = np.concatenate([columns[key].values(), finals[key].values()])
            _check_shifted(key, both, np.zeros(1, bool))
    return NewRows(columns, np.ones(1, bool), finals, values[TERMINATED_KEY][None])


def _check_shifted(key: str, stacks: NDArray, is_last: NDArray) -> None:
    """Refuse stacks ``[n + 1, ...]`` that are not the previous stack shifted by one frame.

    Args:
        key: Their key.
        stacks: The stacks.
        is_last: bool ``[n]``: stacks that may be followed by any other.

    Raises:
        SpecError: Naming the key.
    """
    words = _as_words(stacks, 2)
    differs = (words[:-1, 1:] != words[1:, :-1]).any(axis=(1, 2))
    if (differs & ~is_last).any():
        raise SpecError(
            f"a step within an episode does not shift the stack {key!r} by one frame, but a pool "
            "with frame_stack stores only the newest frame",
            fix=f"omit frame_stack; if episodes end there, add {DONE_KEY!r}",
        )


def _finals(tensors: Tensors, key: str) -> NDArray | None:
    steps: Any = tensors.maps[-1]
    return steps.finals_of(key) if isinstance(steps, StepTensors) else None


def _flags(key: str, values: NDArray) -> NDArray:
    """Return the flags of steps, bool ``[n]``."""
    are_flags = values.dtype.kind == "b" or np.isin(values, (0, 1)).all()
    if math.prod(values.shape[1:]) != 1 or not are_flags:
        raise SpecError(
            f"{key!r} has values other than True and False, or several per step",
            fix="pass a bool per step",
        )
    return values.reshape(-1).astype(bool, copy=False)


def _mark_jumps(is_last: NDArray, values: LazyRows, after: LazyRows) -> None:
    """Mark steps whose value after the step differs from the value before the next one.

    They end a piece, whether an episode ends there or steps are missing; flags mark the ends of
    episodes.
    """
    for some in _parts(len(is_last) - 1, values.array):
        next_ones = slice(some.start + 1, some.stop + 1)
        here = _as_words(after.part(some).values(), 1)
        there = _as_words(values.part(next_ones).values(), 1)
        # Several times faster than any(axis=1), since few differ.
        is_last[some.start + np.flatnonzero(here != there) // here.shape[1]] = True


def _parts(n: int, array: NDArray) -> Iterator[slice]:
    """Iterate over ranges of n values ``array[0]``, of a few megabytes each."""
    n_at_once = max(1, _COMPARED_BYTES // max(1, array[:1].nbytes))
    for start in range(0, n, n_at_once):
        yield slice(start, min(start + n_at_once, n))


def _as_words(array: NDArray, n_leading: int) -> NDArray:
    """View values as rows of bits after ``n_leading`` dimensions.

    Bits are compared because NaN is not equal to itself; the widest words are fastest.
    """
    shape = (*array.shape[:n_leading], math.prod(array.shape[n_leading:]))
    flat = np.ascontiguousarray(array).reshape(shape)
    n_bytes = flat.shape[-1] * flat.itemsize
    return flat.view(next(word for word in _WORDS if n_bytes % word.itemsize == 0))


def converted(key: str, array: NDArray, dtype: np.dtype[Any]) -> NDArray:
    """Convert values to the dtype of their column with ``fitted``."""
    if key in REWARDS:
        return fitted_rewards(repr(key), array)
    return fitted(repr(key), array, dtype, "start a pool with a dtype that fits all values")


# Specs ------------------------------------------------------------------------------------------


def specs_of(tensors: Tensors, keys: Sequence[str] | None) -> dict[str, TensorSpec]:
    """Return shapes and dtypes of a step of trajectories, without computing values.

    Args:
        tensors: The result of ``tensors_of``.
        keys: The keys, ``None`` for all.

    Raises:
        SpecError: If a key is missing, or for a dtype that NumPy lacks.
    """
    specs = {}
    for key in chosen(tensors, keys, "the trajectories"):
        # A derived value after a step has the spec of the value before it.
        is_derived = _finals(tensors, key) is not None
        tensor = tensors[key.removeprefix("_") if is_derived else key]
        dtype = numpy_dtype(tensor.dtype)
        if dtype.kind == "O":
            raise SpecError(
                f"a pool cannot hold {key!r}: NumPy does not have the dtype {tensor.dtype}",
                fix="pass tensor.float()",
            )
        specs[key] = TensorSpec(tuple(tensor.shape[2:]), dtype)
    return specs


def chosen(values: Mapping[str, Any], keys: Sequence[str] | None, source: str) -> list[str]:
    """Return the keys to store, ``None`` for all.

    Raises:
        SpecError: If a key is missing.
    """
    refuse_missing(source, values, keys or (), "choose other keys, or use another pool")
    return list(values if keys is None else keys)


# Single transitions -------------------------------------------------------------------------------


def transition_of(
    s: Any, a: Any, next_s: Any, r: Any, done: Any, terminated: Any
) -> dict[str, NDArray]:
    """Convert a transition to arrays by key, without a batch dimension.

    Raises:
        SpecError: If the two states differ in shape, reward or flags are not single numbers, or
            ``terminated`` is True without ``done``.
    """
    before, after = (_named(state, "", DEFAULT_OBSERVATION_KEY) for state in (s, next_s))
    shapes, after_shapes = ({k: v.shape for k, v in each.items()} for each in (before, after))
    if shapes != after_shapes:
        raise SpecError(
            f"s has shapes {shapes}, next_s has {after_shapes}",
            fix="pass single states of the same shape",
        )
    refuse_taken(before, "s")
    values = {**before, **_named(a, ACTION_KEY, ACTION_KEY)}
    for key, state in before.items():
        # One dtype for both: that of s, unless only next_s can hold fractions.
        dtype = state.dtype
        if not np.can_cast(after[key].dtype, dtype, "same_kind"):
            dtype = np.result_type(dtype, after[key].dtype)
        values[key] = fitted(f"{key!r} of s", state, dtype)
        values[successor_key(key)] = fitted(f"{key!r} of next_s", after[key], dtype)
    values[REWARD_KEY] = _single("r", r)
    terminated = done if terminated is None else terminated
    for key, name, flag in (DONE_KEY, "done", done), (TERMINATED_KEY, "terminated", terminated):
        value = _single(name, flag)
        if value not in (0, 1):
            raise SpecError(f"{name} should be True or False, got {flag!r}", fix="pass a bool")
        values[key] = value.astype(bool)
    if values[TERMINATED_KEY] and not values[DONE_KEY]:
        raise SpecError("terminated is true, but done is not", fix="done=True ends the episode")
    return values


def refuse_taken(state_keys: Collection[str], source: str) -> None:
    """Refuse states whose keys have another meaning in a transition."""
    own = {ACTION_KEY, REWARD_KEY, DONE_KEY, TERMINATED_KEY, *map(successor_key, state_keys)}
    taken = sorted(own & set(state_keys))
    if taken:
        raise SpecError(f"{source} has keys that are taken: {taken}", fix="rename them")


def _named(value: Any, prefix: str, only: str) -> dict[str, NDArray]:
    """Return arrays by key of a value or of a nested dict of values."""
    if not isinstance(value, Mapping):
        return {only: as_array(value)}
    arrays: dict[str, NDArray] = {}
    for key, inner in value.items():
        full_name = join_key(prefix, str(key))
        arrays.update(_named(inner, full_name, full_name))
    return arrays


def _single(name: str, value: Any) -> NDArray:
    array = as_array(value)
    if array.size != 1:
        raise SpecError(f"{name} should be one number, got shape {list(array.shape)}")
    return array.reshape(())


def as_array(value: Any) -> NDArray:
    """Convert a value to an array, of objects if it does not consist of numbers.

    Python floats become float32 if they fit; a NumPy scalar keeps its dtype.
    """
    try:
        array = as_numpy(value) if isinstance(value, torch.Tensor) else np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        array = np.asarray(None)
    if type(value) is float and not _MOST_FLOAT32 < abs(value) < math.inf:
        return array.astype(np.float32)
    return array.astype(array.dtype.newbyteorder("="), copy=False)
