"""Actions as single environments take them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np

from rlpool.data.specs import Leaf, Structure, leaves_of, nester
from rlpool.data.storage import NDArray
from rlpool.envs.info_keys import value_of


def some_action(space: Any, info: Any = None) -> Any:
    """An action, always the same, that is not masked by an ``action_mask`` in the info."""
    space = copy.deepcopy(space)
    space.seed(0)
    mask = value_of(info, "action_mask") if isinstance(info, Mapping) else None
    if mask is None or type(space) is not gymnasium.spaces.Discrete:
        return space.sample()
    return space.sample(mask=np.asarray(mask, np.int8))


def action_decoder(structure: Structure) -> Callable[[Mapping[str, NDArray]], list[Any]]:
    """Compile a function from action arrays ``[B, ...]`` to a list of one action per lane.

    Actions are NumPy arrays and scalars of the space's dtypes, as from Gymnasium's vector
    environments. They are copies: an environment may keep its action, and the agent may reuse its
    tensor.
    """
    if isinstance(structure, Leaf):
        return _splitter("action", structure)
    splitters = [_splitter(*pair) for pair in leaves_of({"action": structure}, "").items()]
    nest = nester(structure)

    def decode(actions: Mapping[str, NDArray]) -> list[Any]:
        parts = (split(actions) for split in splitters)
        return [nest(row) for row in zip(*parts, strict=True)]

    return decode


def _splitter(key: str, leaf: Leaf) -> Callable[[Mapping[str, NDArray]], list[Any]]:
    dtype = leaf.spec.dtype
    if leaf.is_scalar or leaf.spec.shape:
        return lambda actions: list(np.array(actions[key], dtype))
    return lambda actions: [np.asarray(value) for value in np.array(actions[key], dtype)]


def undeclared_actions(actions: Mapping[str, NDArray]) -> list[Any]:
    """Actions for environments without an action space: Python numbers or arrays."""
    array = np.array(actions["action"])
    return array.tolist() if array.ndim == 1 else list(array)
