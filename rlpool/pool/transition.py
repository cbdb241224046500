"""Single transitions, and episodes of environments, in the names that trajectories use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError
from rlpool.memory.storage import Array
from rlpool.pool.intake import is_storable
from rlpool.pool.transitions import Transitions
from rlpool.slots.blocks import successor_key
from rlpool.specs import DEFAULT_OBSERVATION_KEY, TensorSpec, join_key

ACTION_KEY = "action"
REWARD_KEY, DONE_KEY, TERMINATED_KEY = "_reward", "_done", "_terminated"
_MOST_FLOAT32 = float(np.finfo(np.float32).max)


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
    if {k: v.shape for k, v in before.items()} != {k: v.shape for k, v in after.items()}:
        raise SpecError(
            f"s has {_shapes(before)}, next_s has {_shapes(after)}",
            fix="both are single states of one shape",
        )
    values = {**before, **_named("a", a, ACTION_KEY, ACTION_KEY)}
    taken = {ACTION_KEY, REWARD_KEY, DONE_KEY, TERMINATED_KEY, *map(successor_key, before)}
    if not taken.isdisjoint(before):
        names = sorted(taken & set(before))
        raise SpecError(f"s has keys that are taken: {names}", fix="rename them")
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


def trajectory_of(episode: Transitions) -> TemporalDictTensor:
    """The transitions of an episode as a trajectory of one row, no copy."""
    values: dict[str, Array] = {}
    values.update(_named("state", episode.state, "", DEFAULT_OBSERVATION_KEY))
    after = _named("next_state", episode.next_state, "", DEFAULT_OBSERVATION_KEY)
    values.update(_named("action", episode.action, ACTION_KEY, ACTION_KEY))
    values.update({successor_key(key): array for key, array in after.items()})
    values[REWARD_KEY] = episode.reward
    values[DONE_KEY] = episode.done
    values[TERMINATED_KEY] = episode.done & ~episode.truncated
    return TemporalDictTensor({key: torch.from_numpy(a[None]) for key, a in values.items()})


def specs_of_arrays(
    values: Mapping[str, Array], keys: Sequence[str] | None
) -> dict[str, TensorSpec]:
    """What a transition consists of.

    Args:
        values: The transition, without a batch dimension.
        keys: The keys to look at, ``None`` for all.

    Raises:
        SpecError: If a key is missing.
    """
    missing = [key for key in keys or () if key not in values]
    if missing:
        raise SpecError(
            f"a single transition lacks {missing}, it has {list(values)}",
            fix="use extend(), or another pool",
        )
    wanted = values if keys is None else {key: values[key] for key in keys}
    return {key: TensorSpec(array.shape, array.dtype) for key, array in wanted.items()}


def _named(name: str, value: Any, prefix: str, only: str) -> dict[str, Array]:
    """Arrays by key, of a value or of a nested dict of values."""
    if not isinstance(value, Mapping):
        return {only: as_array(name, value)}
    arrays: dict[str, Array] = {}
    for key, inner in value.items():
        whole = join_key(prefix, str(key))
        arrays.update(_named(f"{name}[{key!r}]", inner, whole, whole))
    return arrays


def _single(name: str, value: Any) -> Array:
    array = as_array(name, value)
    if array.size != 1:
        raise SpecError(f"{name} should be one number, got shape {list(array.shape)}")
    return array.reshape(())


def as_array(name: str, value: Any) -> Array:
    """A value as an array; Python numbers become float32 or int64, everything else keeps its dtype.

    A float that is too large for float32 becomes float64.

    Raises:
        SpecError: If it is no array of numbers.
    """
    try:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().numpy()
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        array = np.asarray(None)
    if not is_storable(array.dtype):
        raise SpecError(
            f"{name} should be a number or an array of numbers, got {type(value).__name__} "
            f"of {array.dtype}",
            fix="pass arrays of one shape",
        )
    if type(value) is float and (abs(value) <= _MOST_FLOAT32 or not math.isfinite(value)):
        return array.astype(np.float32)  # a NumPy scalar says what it wants
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _shapes(arrays: Mapping[str, Array]) -> str:
    return ", ".join(f"{key} {list(array.shape)}" for key, array in arrays.items())
