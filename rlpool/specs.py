"""Specifications of named tensors, and how Gymnasium spaces and values map to them.

A *structure* says how a nested value (an observation, an action) falls into named leaves::

    space = Dict(image=Box(84, 84, 4), pose=Tuple(Box(3), Discrete(4)))
    leaves = {"image": [84, 84, 4], "pose/0": [3], "pose/1": []}

Spaces are recognised by the names of their classes, so that those of the old ``gym`` package work
as well and neither package has to be imported here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlpool.errors import SpecError

DEFAULT_OBSERVATION_KEY = "frame"
"""Key of an observation that is not a dict: the name that rlstructures gave it."""

_REFUSED_SPACES = {"Text", "Graph", "Sequence", "OneOf"}


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one row of a named tensor.

    Attributes:
        shape: Shape without the batch dimension.
        dtype: NumPy dtype; ``torch_dtype`` is its counterpart.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype with the same bits."""
        return torch.from_numpy(np.empty(0, self.dtype)).dtype

    @property
    def n_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Leaf:
    """A leaf of a structure.

    Attributes:
        spec: What is stored.
        is_scalar: The environment hands out and expects Python numbers, not arrays.
    """

    spec: TensorSpec
    is_scalar: bool


Structure = Leaf | Mapping[str, "Structure"] | tuple["Structure", ...]


def join_key(prefix: str, key: str) -> str:
    """Name of a key below a prefix: ``join_key("agent_info", "id") == "agent_info/id"``."""
    return f"{prefix}/{key}" if prefix else key


def structure_of_space(space: Any, *, keep_float64: bool, name: str) -> Structure:
    """Describe a Gymnasium (or old gym) space.

    Args:
        space: The space.
        keep_float64: Store float64 as it is, otherwise as float32.
        name: How an error calls the space.

    Raises:
        SpecError: For ``Text``, ``Graph``, ``Sequence``, ``OneOf`` and unknown spaces.
    """
    kinds = {base.__name__ for base in type(space).__mro__}
    if "Dict" in kinds:
        return {
            key: structure_of_space(inner, keep_float64=keep_float64, name=f"{name}[{key!r}]")
            for key, inner in space.spaces.items()
        }
    if "Tuple" in kinds:
        return tuple(
            structure_of_space(inner, keep_float64=keep_float64, name=f"{name}[{number}]")
            for number, inner in enumerate(space.spaces)
        )
    if "Discrete" in kinds:
        return Leaf(TensorSpec((), np.dtype(np.int64)), is_scalar=True)
    if kinds & {"Box", "MultiDiscrete", "MultiBinary"}:
        dtype = stored_dtype(np.dtype(space.dtype), keep_float64=keep_float64)
        return Leaf(TensorSpec(tuple(space.shape), dtype), is_scalar=False)
    refused = sorted(kinds & _REFUSED_SPACES)
    raise SpecError(
        f"{name} is a {refused[0] if refused else type(space).__name__} space, "
        "which has no fixed shape to put into a tensor",
        fix="wrap the environment so that it uses Box, Discrete, MultiDiscrete, MultiBinary, "
        "Dict or Tuple",
    )


def structure_of_value(value: Any, *, keep_float64: bool, name: str) -> Structure:
    """Describe a value for which no space was declared.

    Python numbers become scalars of float32 or int64, arrays keep their dtype, dicts and tuples
    are entered, lists are read as arrays.

    Raises:
        SpecError: If it is not made of numbers.
    """
    if isinstance(value, Mapping):
        return {
            str(key): structure_of_value(inner, keep_float64=keep_float64, name=f"{name}[{key!r}]")
            for key, inner in value.items()
        }
    if isinstance(value, tuple):
        return tuple(
            structure_of_value(inner, keep_float64=keep_float64, name=f"{name}[{number}]")
            for number, inner in enumerate(value)
        )
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise SpecError(
            f"{name} is a {type(value).__name__} of dtype {array.dtype}, not numbers",
            fix="return numbers, NumPy arrays, or dicts and tuples of them",
        )
    dtype = stored_dtype(array.dtype, keep_float64=keep_float64)
    return Leaf(TensorSpec(array.shape, dtype), is_scalar=array.ndim == 0)


def merged_structures(first: Structure, second: Structure, name: str) -> Structure:
    """One structure for two values of the same kind: dtypes that hold both without loss.

    Args:
        first: The structure of one value.
        second: That of the other.
        name: How an error calls the values.

    Raises:
        SpecError: If keys, lengths or shapes differ, naming both sides.
    """
    if isinstance(first, Leaf) and isinstance(second, Leaf):
        if first.spec.shape != second.spec.shape:
            shapes = f"{list(first.spec.shape)} and then {list(second.spec.shape)}"
            raise SpecError(f"{name} should keep its shape, got {shapes}")
        dtype = np.result_type(first.spec.dtype, second.spec.dtype)
        return Leaf(TensorSpec(first.spec.shape, dtype), is_scalar=first.is_scalar)
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        if first.keys() != second.keys():
            raise SpecError(
                f"{name} should keep its keys, got {sorted(first)} and then {sorted(second)}"
            )
        return {
            key: merged_structures(inner, second[key], f"{name}[{key!r}]")
            for key, inner in first.items()
        }
    if isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second):
        return tuple(
            merged_structures(inner, other, f"{name}[{number}]")
            for number, (inner, other) in enumerate(zip(first, second, strict=True))
        )
    raise SpecError(f"{name} should keep its structure, got {first} and then {second}")


def with_dtypes(
    structure: Structure, dtypes: Mapping[str, np.dtype[Any]], key: str = ""
) -> Structure:
    """A structure with other dtypes for some leaves.

    Args:
        structure: The structure.
        dtypes: Key of a leaf, as ``leaves_of`` names it, to dtype.
        key: Key of ``structure`` itself.
    """
    if isinstance(structure, Leaf):
        dtype = dtypes.get(key, structure.spec.dtype)
        return Leaf(TensorSpec(structure.spec.shape, dtype), structure.is_scalar)
    if isinstance(structure, Mapping):
        return {k: with_dtypes(inner, dtypes, join_key(key, k)) for k, inner in structure.items()}
    return tuple(
        with_dtypes(inner, dtypes, join_key(key, str(number)))
        for number, inner in enumerate(structure)
    )


def stored_dtype(dtype: np.dtype[Any], *, keep_float64: bool) -> np.dtype[Any]:
    """The dtype in which values of ``dtype`` are stored."""
    if dtype == np.float64 and not keep_float64:
        return np.dtype(np.float32)
    return dtype


def leaves_of(structure: Structure, default_key: str) -> dict[str, Leaf]:
    """Name the leaves of a structure.

    A dict at the top gives its own keys; anything else stands under ``default_key``.

    Raises:
        SpecError: If joining makes two keys the same.
    """
    leaves: dict[str, Leaf] = {}
    for key, leaf in _walk(structure, "" if isinstance(structure, Mapping) else default_key):
        if key in leaves:
            raise SpecError(
                f"two parts of one space are both called {key!r}", fix="rename one of them"
            )
        leaves[key] = leaf
    return leaves


def _walk(structure: Structure, prefix: str) -> Iterator[tuple[str, Leaf]]:
    if isinstance(structure, Leaf):
        yield prefix, structure
    elif isinstance(structure, Mapping):
        for key, inner in structure.items():
            yield from _walk(inner, join_key(prefix, str(key)))
    else:
        for number, inner in enumerate(structure):
            yield from _walk(inner, join_key(prefix, str(number)))


def flattener(structure: Structure, name: str) -> Callable[[Any], list[Any]]:
    """Compile a function that takes a nested value apart, in the order of ``leaves_of``.

    The compiled function raises SpecError when keys or lengths do not fit the structure.
    """

    def visit(node: Structure, value: Any, path: str, out: list[Any]) -> None:
        if isinstance(node, Leaf):
            out.append(value)
            return
        if isinstance(node, Mapping):
            if not isinstance(value, Mapping) or value.keys() != node.keys():
                got = (
                    sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
                )
                raise SpecError(f"{path} should have the keys {sorted(node)}, got {got}")
            for key, inner in node.items():
                visit(inner, value[key], f"{path}[{key!r}]", out)
            return
        if not isinstance(value, tuple | list) or len(value) != len(node):
            n_parts = len(value) if isinstance(value, tuple | list) else type(value)
            raise SpecError(f"{path} should be a tuple of {len(node)} parts, got {n_parts}")
        for number, inner in enumerate(node):
            visit(inner, value[number], f"{path}[{number}]", out)

    def flatten(value: Any) -> list[Any]:
        out: list[Any] = []
        visit(structure, value, name, out)
        return out

    return flatten


def nester(structure: Structure) -> Callable[[Sequence[Any]], Any]:
    """Compile the inverse of ``flattener``: leaves in order to the nested value."""

    def build(node: Structure, leaves: Iterator[Any]) -> Any:
        if isinstance(node, Leaf):
            return next(leaves)
        if isinstance(node, Mapping):
            return {key: build(inner, leaves) for key, inner in node.items()}
        return tuple(build(inner, leaves) for inner in node)

    def nest(leaves: Sequence[Any]) -> Any:
        return build(structure, iter(leaves))

    return nest


def row_specs(arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, TensorSpec]:
    """Specs of the rows of batch arrays ``[B, ...]``."""
    return {key: TensorSpec(array.shape[1:], array.dtype) for key, array in arrays.items()}


def refuse_collisions(groups: Mapping[str, Sequence[str]]) -> None:
    """Refuse keys that two groups both claim.

    Args:
        groups: For each group, a name for messages and its keys.

    Raises:
        SpecError: Naming the key and both groups.
    """
    owner: dict[str, str] = {}
    for group, keys in groups.items():
        for key in keys:
            if key in owner:
                raise SpecError(
                    f"key {key!r} is given by {owner[key]} and by {group}",
                    fix="give it another name in the environment or in the agent",
                )
            owner[key] = group
