"""Single transitions as a pool is given them, and the keys under which it holds their parts."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from rlpool.data.specs import DEFAULT_OBSERVATION_KEY, fitted, join_key
from rlpool.data.storage import NDArray
from rlpool.errors import SpecError
from rlpool.slots.blocks import successor_key

ACTION_KEY = "action"
REWARD_KEY, DONE_KEY, TERMINATED_KEY = "_reward", "_done", "_terminated"
TRUNCATED_KEY = "_truncated"

TRANSITION_KEYS = (
    *(DEFAULT_OBSERVATION_KEY, ACTION_KEY, successor_key(DEFAULT_OBSERVATION_KEY)),
    *(REWARD_KEY, DONE_KEY),
)
"""What ``get_pool`` returns."""

_MOST_FLOAT32 = float(np.finfo(np.float32).max)


def transition_of(
    s: Any, a: Any, next_s: Any, r: Any, done: Any, terminated: Any
) -> dict[str, NDArray]:
    """A transition as arrays by key, without a batch dimension.

    Raises:
        SpecError: If the two states differ in shape, reward or flags are no single numbers, or an
            episode terminates without being done.
    """
    before, after = (_named(state, "", DEFAULT_OBSERVATION_KEY) for state in (s, next_s))
    shapes, after_shapes = ({k: v.shape for k, v in each.items()} for each in (before, after))
    if shapes != after_shapes:
        raise SpecError(
            f"s has shapes {shapes}, next_s has {after_shapes}",
            fix="both are single states of one shape",
        )
    refuse_taken(before, "s")
    values = {**before, **_named(a, ACTION_KEY, ACTION_KEY)}
    for key, state in before.items():
        # One dtype for both: that of s, unless it holds no fractions and next_s may.
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


def refuse_taken(state_keys: Collection[str], what: str) -> None:
    """Refuse states with keys that a transition uses for something else."""
    own = {ACTION_KEY, REWARD_KEY, DONE_KEY, TERMINATED_KEY, *map(successor_key, state_keys)}
    taken = sorted(own & set(state_keys))
    if taken:
        raise SpecError(f"{what} has keys that are taken: {taken}", fix="rename them")


def _named(value: Any, prefix: str, only: str) -> dict[str, NDArray]:
    """Arrays by key, of a value or of a nested dict of values."""
    if not isinstance(value, Mapping):
        return {only: as_array(value)}
    arrays: dict[str, NDArray] = {}
    for key, inner in value.items():
        whole = join_key(prefix, str(key))
        arrays.update(_named(inner, whole, whole))
    return arrays


def _single(name: str, value: Any) -> NDArray:
    array = as_array(value)
    if array.size != 1:
        raise SpecError(f"{name} should be one number, got shape {list(array.shape)}")
    return array.reshape(())


def as_array(value: Any) -> NDArray:
    """A value as an array, of objects if it is none of numbers.

    Python's floats become float32 if that holds them; a NumPy scalar keeps its dtype.
    """
    try:
        array = value.numpy(force=True) if isinstance(value, torch.Tensor) else np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        array = np.asarray(None)
    if type(value) is float and not _MOST_FLOAT32 < abs(value) < math.inf:
        return array.astype(np.float32)
    return array.astype(array.dtype.newbyteorder("="), copy=False)
