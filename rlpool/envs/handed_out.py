"""What environments of two protocols hand out: recognised, described, copied.

See ``rlpool.envs.one_env`` for the protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch

from rlpool.envs.columns import Columns
from rlpool.errors import SpecError
from rlpool.specs import Leaf, Structure, TensorSpec, flattener, nester, structure_of_value

_LANE = (0,)

BOTH_PROTOCOLS = (
    "return (state, action) from reset() and (action, next_state, reward, done) from step(action), "
    "or as in Gymnasium (observation, info) with a dict as info, and (observation, reward, "
    "terminated, truncated, info)"
)


class Row:
    """One lane's current value, in arrays by key.

    Args:
        key: Key of the value, and prefix of its parts' keys.
        structure: What it is made of.
        read: Makes a value of that structure from what the environment hands out.

    Attributes:
        columns: Its columns, of one row each.
        arrays: Key to array ``[1, ...]``, rewritten in place.
    """

    def __init__(self, key: str, structure: Structure, read: Callable[[Any], Any]) -> None:
        self._key = key
        self._is_leaf = isinstance(structure, Leaf)
        self.columns = Columns(structure if self._is_leaf else {key: structure}, key, 1)
        self.arrays = self.columns.arrays
        self._specs = [leaf.spec for leaf in self.columns.leaves.values()]
        self._read = read
        self._flatten = flattener(structure, key)
        self._nest = nester(structure)

    def write(self, value: Any) -> None:
        """Copy a value into the arrays.

        Raises:
            SpecError: If it does not fit, naming key and both sides.
        """
        parts = self._flatten(self._read(value))
        value = self._nest([*map(_widened, parts, self._specs)])
        self.columns.write(_LANE, (value if self._is_leaf else {self._key: value},))

    def nested(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """A value from the rows 0 of tensors ``[1, ...]``, copied; numbers are NumPy's."""
        rows = [tensors[key].numpy()[0] for key in self.arrays]
        return self._nest([np.array(row) if np.ndim(row) else row for row in rows])


def is_pair_with_info(result: Any) -> bool:
    """Whether this came from the ``reset`` of a Gymnasium environment."""
    return isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)


def is_gymnasium(env: Any, result: Any) -> bool:
    """Whether an environment that returned this from ``reset`` is Gymnasium's, or older."""
    if isinstance(result, tuple) and len(result) == 2:
        return isinstance(result[1], dict)
    return isinstance(env, gymnasium.Env) or any(
        getattr(env, f"{name}_space", None) is not None for name in ("observation", "action")
    )


def pair_of(result: Any) -> tuple[Any, Any]:
    """What the ``reset`` of the pool's own protocol returned: state and action.

    Raises:
        SpecError: If it is no pair.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise SpecError(
            f"reset() returned {counted(result)}, which belongs to neither protocol",
            fix=BOTH_PROTOCOLS,
        )
    return result


def four_of(result: Any) -> tuple[Any, Any, Any, Any]:
    """What the ``step`` of the pool's own protocol returned: action, state, reward, done.

    Raises:
        SpecError: If it is not four values.
    """
    if not isinstance(result, tuple) or len(result) != 4:
        raise SpecError(
            "step() should return (action, next_state, reward, done), as reset() returned "
            f"(state, action), got {counted(result)}",
            fix=BOTH_PROTOCOLS,
        )
    return result


def counted(result: Any) -> str:
    """What somebody returned, in few words."""
    if isinstance(result, tuple):
        return f"a tuple of {len(result)}"
    shape = getattr(result, "shape", None)
    return type(result).__name__ + (f" of shape {list(shape)}" if shape is not None else "")


def described(value: Any, name: str) -> Structure:
    """The structure of an undeclared value, dtypes kept."""
    return structure_of_value(plain(value), keep_float64=True, name=name)


def as_it_is(value: Any) -> Any:
    """A declared value, which is of its space's structure already."""
    return value


def number_of(value: Any) -> Any:
    """A number that may be a tensor."""
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


def plain(value: Any) -> Any:
    """An undeclared value as arrays, numbers, dicts, and tuples where shapes differ; no copy.

    Lists and tuples of numbers, nested or not, are read as arrays.
    """
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, RuntimeError):  # shapes differ, tensors with gradients
            array = np.empty(0, object)
        if array.dtype.kind in "fiub":
            return array
        return tuple(plain(inner) for inner in value)
    return value


def copied(value: Any) -> Any:
    """A copy of what ``plain`` returned, down to its arrays."""
    if isinstance(value, np.ndarray):
        return np.array(value)
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(map(copied, value))
    return value


def _widened(value: Any, spec: TensorSpec) -> Any:
    """An array in the dtype of its column, if that holds all values of its own."""
    if (
        isinstance(value, np.ndarray | np.generic)
        and value.dtype != spec.dtype
        and np.can_cast(value.dtype, spec.dtype)
    ):
        return value.astype(spec.dtype)
    return value
