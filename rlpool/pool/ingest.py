"""From trajectories and single transitions to rows that are ready to be written.

Nothing is copied on the way, unless it has another dtype than what is stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.specs import (
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
from rlpool.pool.schema import REWARDS, Schema, Stack
from rlpool.pool.stacks import Incoming, Source, unstacked, widest_words
from rlpool.pool.transition import DONE_KEY, TERMINATED_KEY, TRUNCATED_KEY
from rlpool.slots.blocks import successor_key
from rlpool.slots.trajectories import DerivedTensors, Successor

Tails = Mapping[str, NDArray]
"""Places of frames by key, int64 ``[B, n_frames]``, see ``Store.tails``."""

_COMPARED_BYTES = 2**25  # at a time
_START = "initial_state"
_FLAGS = (DONE_KEY, TERMINATED_KEY, TRUNCATED_KEY, _START)
_TELLING = ({DONE_KEY}, {_START}, {TERMINATED_KEY, TRUNCATED_KEY})
"""Flags that tell every end of an episode within a row."""


def infos_of(
    trajectories: TemporalDictTensor, names: Sequence[str], *, are_exact: bool
) -> dict[str, torch.Tensor]:
    """Values of the ``info`` of trajectories for every step, ``[B, T, ...]``, not copied.

    Args:
        trajectories: The trajectories.
        names: Keys of their ``info``.
        are_exact: Whether the names are whole keys. Otherwise ``"agent_info"`` means all keys that
            begin with it and a slash.

    Raises:
        SpecError: If there is no such key, or the steps have the same one.
    """
    found, n_times = {}, trajectories.mask().shape[1]
    for name in names:
        if name in trajectories and name not in trajectories.info:
            continue  # a key of the steps, kept as such
        keys = [k for k in (name,) if k in trajectories.info]
        keys = keys if are_exact else matching(name, trajectories.info)
        if not keys:
            raise SpecError(
                f"the info of the trajectories has no {name!r}, it has {list(trajectories.info)}",
                fix="execute(agent_info=..., env_info=...) gives keys of these names; name others "
                "in info_keys, or use another pool",
            )
        if taken := [key for key in keys if key in trajectories]:
            raise SpecError(f"steps and info both have {taken}", fix="rename one of them")
        for key in keys:
            tensor = trajectories.info[key].unsqueeze(1)
            found[key] = tensor.expand(len(tensor), n_times, *tensor.shape[2:])
    return found


def matching(name: str, keys: Iterable[str]) -> list[str]:
    """The keys that a name of ``info_keys`` stands for."""
    return [key for key in keys if key == name or key.startswith(join_key(name, ""))]


def from_trajectories(
    trajectories: TemporalDictTensor,
    schema: Schema,
    tails: Tails,
    infos: Mapping[str, torch.Tensor],
    *,
    is_strict: bool = True,
) -> Incoming:
    """Every step of trajectories ``[B, T, ...]``, in row-then-time order.

    Values after a step that are derived from those before it are not computed.

    Args:
        trajectories: The trajectories.
        schema: What is stored.
        tails: Where the frames of the first steps' stacks may lie already.
        infos: Columns that are not among the steps, see ``infos_of``.
        is_strict: Whether to refuse stacks that are not shifted by each step.

    Raises:
        SpecError: If a value does not fit into the dtype that is stored, a flag is neither true nor
            false, or a stack is none.
    """
    tensors = trajectories._steps._tensors
    lengths = trajectories.lengths.cpu().numpy()
    steps = _Steps(lengths)
    ends = np.where(lengths > 0, lengths.cumsum() - 1, -1)
    is_last = np.zeros(lengths.sum(), bool)
    is_last[ends[ends >= 0]] = True

    def flags(key: str) -> NDArray:
        return _flags(key, steps.source(tensors[key].numpy(force=True)).values())

    for key in _FLAGS:
        if key in tensors and _derivation(tensors, key) is None:
            is_last[:-1] |= flags(key)[1:] if key == _START else flags(key)[:-1]

    def source(key: str, spec: TensorSpec) -> Source:
        tensor = infos[key] if key in infos else tensors[key]
        return steps.source(converted(key, tensor.numpy(force=True), spec.dtype))

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
    for key in schema.apart:
        _mark_jumps(is_last, columns[key], columns[successor_key(key)])
    # A row may hold several episodes. Values that follow from each other are no proof of one: a
    # reset may lead to the very state in which an episode ended.
    is_told = lengths.max() <= 1 or any(keys <= tensors.keys() for keys in _TELLING)
    is_checked = bool(schema.stacks) and is_strict and DONE_KEY in tensors
    incoming = Incoming(columns, is_last, finals, {}, ends, is_told)
    return _with_frames(incoming, schema, tails, flags(DONE_KEY) if is_checked else None)


def from_single(values: Mapping[str, NDArray], schema: Schema, tails: Tails) -> Incoming:
    """A single transition of arrays without a batch dimension.

    Raises:
        SpecError: If a value does not fit into the dtype that is stored, or a stack is none.
    """
    first = np.zeros(1, np.int64)

    def source(key: str, spec: TensorSpec) -> Source:
        return Source(converted(key, values[key], spec.dtype)[None], first)

    columns = {key: source(key, spec) for key, spec in schema.columns.items()}
    finals = {key: source(successor_key(key), schema.columns[key]) for key in schema.paired}
    incoming = Incoming(columns, np.ones(1, bool), finals, {}, first)
    return _with_frames(incoming, schema, tails, values[DONE_KEY].reshape(1))


def _with_frames(
    incoming: Incoming, schema: Schema, tails: Tails, is_done: NDArray | None
) -> Incoming:
    """The same with numbers of frames in place of stacks.

    Args:
        incoming: Transitions with whole values.
        schema: What is stored.
        tails: See ``Store``.
        is_done: Whether steps ended their episodes: values after those need not be what follows.
            ``None`` if none need be.

    Raises:
        SpecError: If a value after another step is not the one before it, shifted by one frame.
    """
    if not schema.stacks:
        return incoming
    columns, finals, frames = dict(incoming.columns), dict(incoming.finals), {}
    every = np.arange(len(incoming.is_last))
    starts = np.append(0, np.maximum.accumulate(incoming.ends) + 1)
    for key, stack in schema.stacks.items():
        known = None
        if key in tails:
            # Row i begins where row i of the trajectories before it may have ended.
            rows = np.flatnonzero(incoming.ends[: len(tails[key])] >= 0)
            known = starts[rows], tails[key][rows]
        each = unstacked(columns[key], finals.get(key), incoming.is_last, stack, known)
        if is_done is not None and not (each.is_shifted | is_done).all():
            _refuse_stack(key, stack, starts, int((each.is_shifted | is_done).argmin()))
        columns[key], frames[key] = Source(each.before, every), each.frames
        if each.after is not None:
            finals[key] = Source(each.after, every)
    return incoming._replace(columns=columns, finals=finals, frames=frames)


def _refuse_stack(key: str, stack: Stack, starts: NDArray, number: int) -> NoReturn:
    """Raise the error for a transition whose value after the step is not what follows."""
    row = int(np.searchsorted(starts, number, side="right")) - 1
    raise SpecError(
        f"{successor_key(key)!r} of row {row}, step {number - starts[row]} is not {key!r} shifted "
        f"by one frame: {key!r} is stored as {stack.n_frames} frames along axis {stack.axis}, the "
        "newest last",
        fix=f'name the axis, frame_stack={{"{key}": ({stack.n_frames}, -1)}}, or leave '
        "frame_stack out: it is for stacks from which each step drops the oldest frame",
    )


class _Steps:
    """Finds the steps of trajectories in arrays ``[B, T, ...]``, mostly without a copy."""

    def __init__(self, lengths: NDArray) -> None:
        self._lengths = lengths
        self._places: dict[int, NDArray] = {}  # by stride

    def source(self, array: NDArray) -> Source:
        """The steps of an array, which is copied unless its rows lie at whole numbers of steps."""
        n_rows, n_times, *shape = array.shape
        step_bytes = math.prod(shape) * array.itemsize
        lie_together = array.size and array[0].flags.c_contiguous  # the steps of a row
        stride, rest = divmod(array.strides[0], step_bytes) if lie_together else (0, 0)
        if rest or stride < n_times:
            array, stride = np.ascontiguousarray(array), n_times
        flat_shape = ((n_rows - 1) * stride + n_times, *shape)
        strides = (step_bytes, *array.strides[2:])
        array = np.lib.stride_tricks.as_strided(array, flat_shape, strides, writeable=False)
        if stride not in self._places:
            starts = np.cumsum(self._lengths) - self._lengths
            shifts = np.arange(len(self._lengths)) * stride - starts
            n_steps = self._lengths.sum()
            self._places[stride] = np.repeat(shifts, self._lengths) + np.arange(n_steps)
        return Source(array, self._places[stride])


def _derivation(tensors: Mapping[str, torch.Tensor], key: str) -> Any:
    return tensors.derivation(key) if isinstance(tensors, DerivedTensors) else None


def _flags(key: str, values: NDArray) -> NDArray:
    """The flags of steps, bool ``[n]``."""
    are_flags = values.dtype.kind == "b" or np.isin(values, (0, 1)).all()
    if math.prod(values.shape[1:]) != 1 or not are_flags:
        raise SpecError(
            f"{key!r} has values that are neither true nor false, or several per step",
            fix="pass a bool per step",
        )
    return values.reshape(-1).astype(bool, copy=False)


def _mark_jumps(is_last: NDArray, values: Source, after: Source) -> None:
    """Mark steps whose value after the step is not the value that the next one starts from.

    They end a piece that can be joined to nothing, whether an episode ends there or steps are
    missing. Which of them do is told by flags.
    """
    n_at_once = max(1, _COMPARED_BYTES // values.array[:1].nbytes)
    for start in range(0, len(is_last) - 1, n_at_once):
        n = min(n_at_once, len(is_last) - 1 - start)
        here = after.part(slice(start, start + n)).values().reshape(n, -1)
        there = values.part(slice(start + 1, start + 1 + n)).values().reshape(n, -1)
        differs = (widest_words(here) != widest_words(there)).reshape(n, -1)
        is_last[start + differs.reshape(-1).nonzero()[0] // differs.shape[1]] = True


def converted(key: str, array: NDArray, dtype: np.dtype[Any]) -> NDArray:
    """Values in the dtype of their column, see ``fitted``."""
    if key in REWARDS:
        return fitted_rewards(repr(key), array)
    return fitted(repr(key), array, dtype, "let the first transitions have a dtype for all values")


# Specs ------------------------------------------------------------------------------------------


def specs_of(trajectories: TemporalDictTensor, keys: Sequence[str] | None) -> dict[str, TensorSpec]:
    """Shapes and dtypes of a step of trajectories; nothing is computed.

    Args:
        trajectories: Any trajectories.
        keys: The keys to look at, ``None`` for all.

    Raises:
        SpecError: If a key is missing.
    """
    tensors = trajectories._steps._tensors
    specs = {}
    for key in chosen(tensors, keys, "the trajectories"):
        # A derived value after a step is like the value before it.
        is_derived = isinstance(_derivation(tensors, key), Successor)
        specs[key] = spec_of(key, tensors[key.removeprefix("_") if is_derived else key])
    return specs


def spec_of(key: str, tensor: torch.Tensor) -> TensorSpec:
    """Shape and dtype of a step in a tensor ``[B, T, ...]``.

    Raises:
        SpecError: For a dtype that NumPy lacks.
    """
    dtype = numpy_dtype(tensor.dtype)
    if dtype.kind == "O":
        raise SpecError(
            f"a pool cannot hold {key!r}, which is {tensor.dtype}, unknown to NumPy",
            fix="convert it, to float32 say",
        )
    return TensorSpec(tuple(tensor.shape[2:]), dtype)


def chosen(values: Mapping[str, Any], keys: Sequence[str] | None, what: str) -> list[str]:
    """The keys to store, ``None`` for all.

    Raises:
        SpecError: If one of them is missing.
    """
    refuse_missing(what, values, keys or (), "choose other keys, or use another pool")
    return list(values if keys is None else keys)


def one_row(steps: DictTensor) -> TemporalDictTensor:
    """Steps as a trajectory, no copy."""
    return TemporalDictTensor({key: tensor[None] for key, tensor in steps.items()})


def order_in_time(lengths: Sequence[int]) -> NDArray:
    """The order in which the steps of episodes came to be that began together: int64 ``[n]``."""
    episodes = np.repeat(np.arange(len(lengths)), lengths)
    times = np.concatenate([np.arange(length) for length in lengths])
    return np.lexsort((episodes, times))
