"""Shape and dtype specs of named tensors, and their mapping from Gymnasium spaces and values.

A *structure* defines how a nested value (an observation, an action) splits into named leaves::

    space = Dict(image=Box(84, 84, 4), pose=Tuple(Box(3), Discrete(4)))
    leaves = {"image": [84, 84, 4], "pose/0": [3], "pose/1": []}

It is a torch pytree of dicts, tuples and ``Leaf`` objects. Spaces are recognised by class name, so
those of the old ``gym`` package work too and neither package is imported.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree

from rlpool.errors import SpecError

DEFAULT_OBSERVATION_KEY = "frame"
"""Key of an observation that is not a dict, as in rlstructures."""


@functools.cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the NumPy dtype with the same bits, or the object dtype if there is none."""
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except (TypeError, RuntimeError):
        return np.dtype(object)


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


REWARD_SPEC = TensorSpec((), np.dtype(np.float32))

FLAGS = ("terminated", "truncated", "done", "initial_state")
"""Rows of ``VecEnv.flags``."""


@dataclass(frozen=True, repr=False)
class Leaf:
    """A leaf of a structure.

    Attributes:
        spec: Shape and dtype in storage.
        is_scalar: Whether the environment returns and expects Python numbers, not arrays.
        native: The dtype that the environment expects; ``None`` without a space that declares it.
        choices: For discrete spaces, the first number and the number of choices of each element.
    """

    spec: TensorSpec
    is_scalar: bool
    native: np.dtype[Any] | None = field(default=None, compare=False)
    choices: tuple[Any, Any] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"a single {self.spec.dtype}" if self.is_scalar else str(self.spec)


Structure = Leaf | Mapping[str, "Structure"] | tuple["Structure", ...]


class Declaration(NamedTuple):
    """The values that environments report in every step.

    Attributes:
        observation: The structure of an observation.
        infos: Specs of the requested keys of infos.
    """

    observation: Structure
    infos: Mapping[str, TensorSpec]


def fitted(name: str, values: Any, dtype: np.dtype[Any], fix: str = "") -> np.ndarray[Any, Any]:
    """Convert numbers from outside to a dtype, or refuse them.

    - Floats convert to floats of any width, and complex numbers to complex numbers. They are
      rounded; finite values have to stay finite, infinities and NaN are kept.
    - Any other conversion has to be exact: 300 fits int16 but not int8, -1 does not fit an unsigned
      dtype, 2**24 + 1 does not fit float32. 1.0 fits an int, 0.5 and NaN do not. Only 0 and 1 fit a
      bool. Real numbers fit complex dtypes; complex numbers fit only those.

    Args:
        name: Name of the numbers in errors.
        values: The numbers, of any shape.
        dtype: The dtype to store them in.
        fix: Advice if they do not fit.

    Returns:
        ``values`` itself if it has the dtype, else a new array.

    Raises:
        SpecError: Naming the first number that does not fit.
    """
    array = np.asarray(values)
    if array.dtype == dtype:
        return array
    source, target = array.dtype.kind, dtype.kind
    if source not in "fiubc" or (source == "c") > (target == "c"):
        raise SpecError(f"{name} should be numbers that fit {dtype}, got {values!r:.60}", fix=fix)
    if source in "fc" and target in "fc":
        try:
            with np.errstate(over="raise"):
                return array.astype(dtype)
        except FloatingPointError:
            with np.errstate(over="ignore"):
                fits = ~np.isfinite(array) | np.isfinite(array.astype(dtype))
    else:
        with np.errstate(all="ignore"):
            new = array.astype(dtype)
            number = new.real if target == "c" else new
            fits = (number.astype(array.dtype) == array) & ((number < 0) == (array < 0))
            ints, floats = (number, array) if source == "f" else (array, number)
            if ints.dtype.kind in "iu" and floats.dtype.kind == "f":
                # Some processors convert values out of range to the largest int.
                n_bits = 8 * ints.dtype.itemsize - (ints.dtype.kind == "i")
                fits &= np.isfinite(floats) & (floats < 2.0**n_bits)
        if fits.all():
            return new
    got = array[~fits].flat[0] if array.ndim else array
    raise SpecError(f"{name} should fit {dtype}, got {got}", fix=fix or f"give numbers of {dtype}")


def fitted_rewards(name: str, rewards: Any) -> np.ndarray[Any, Any]:
    """Convert rewards to float32, the stored dtype; ints are rounded as well.

    Raises:
        SpecError: Naming a finite reward that is out of the range of float32.
    """
    rewards = np.asarray(rewards)
    if rewards.dtype.kind in "iu":
        rewards = rewards.astype(np.float64)
    return fitted(name, rewards, REWARD_SPEC.dtype, "scale the rewards")


def join_key(prefix: str, key: str) -> str:
    """Join a prefix and a key: ``join_key("agent_info", "id") == "agent_info/id"``."""
    return f"{prefix}/{key}" if prefix else key


def structure_of_space(space: Any, *, name: str) -> Structure:
    """Describe a Gymnasium (or old gym) space, with the dtypes that environments return.

    Args:
        space: The space.
        name: The name of the space in errors.

    Raises:
        SpecError: For ``Text``, ``Graph``, ``Sequence``, ``OneOf`` and unknown spaces.
    """

    def inner(key: Any, space: Any) -> Structure:
        return structure_of_space(space, name=f"{name}[{key!r}]")

    kinds = {base.__name__ for base in type(space).__mro__}
    if "Dict" in kinds:
        return {key: inner(key, part) for key, part in space.spaces.items()}
    if "Tuple" in kinds:
        return tuple(inner(number, part) for number, part in enumerate(space.spaces))
    first = getattr(space, "start", 0)
    if "Discrete" in kinds:
        native = np.dtype(getattr(space, "dtype", np.int64))
        return Leaf(TensorSpec((), np.dtype(np.int64)), True, native, (first, space.n))
    if kinds & {"Box", "MultiDiscrete", "MultiBinary"}:
        dtype = np.dtype(space.dtype)
        choices = None if "Box" in kinds else (first, getattr(space, "nvec", 2))
        return Leaf(TensorSpec(tuple(space.shape), dtype), False, dtype, choices)
    raise SpecError(
        f"{name} is a {type(space).__name__} space, which does not have a fixed shape",
        fix="wrap the environment so that it uses Box, Discrete, MultiDiscrete, MultiBinary, "
        f"Dict or Tuple; {PADDING}",
    )


def leaf_spaces(space: Any) -> list[Any]:
    """Return the leaves of nested ``Dict`` and ``Tuple`` spaces, in the order of ``leaves_of``."""
    parts = getattr(space, "spaces", None)
    if parts is None:
        return [space]
    parts = parts.values() if isinstance(parts, Mapping) else parts
    return [leaf for part in parts for leaf in leaf_spaces(part)]


PADDING = (
    'docs/episodes.md, "Values of different lengths", has a wrapper that pads texts, sequences and '
    "arrays, with a key for their length"
)
"""Advice for values without a fixed shape."""


def structure_of_value(value: Any, *, name: str) -> Structure:
    """Describe a value without a declared space.

    Python numbers become scalars of float32 or int64, arrays keep their dtype, dicts and tuples
    are traversed, lists are read as arrays.

    Raises:
        SpecError: If it does not consist of numbers.
    """

    def inner(key: Any, value: Any) -> Structure:
        return structure_of_value(value, name=f"{name}[{key!r}]")

    if isinstance(value, Mapping):
        return {str(key): inner(key, part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(inner(number, part) for number, part in enumerate(value))
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise SpecError(
            f"{name} is a {type(value).__name__} of dtype {array.dtype}, not numbers",
            fix=f"return numbers, NumPy arrays, or dicts and tuples of them; {PADDING}",
        )
    return Leaf(TensorSpec(array.shape, array.dtype), is_scalar=array.ndim == 0)


def stored_dtype(dtype: np.dtype[Any], keep_float64: bool) -> np.dtype[Any]:
    """Return the dtype for storage: float32 in place of float64, unless that is kept."""
    is_narrowed = dtype == np.float64 and not keep_float64
    return np.dtype(np.float32) if is_narrowed else dtype


def narrowed(structure: Structure, keep_float64: bool | Collection[str]) -> Structure:
    """Store float64 as float32, except under the keys of ``keep_float64`` (True keeps all).

    Raises:
        SpecError: If one of these keys does not exist.
    """
    if keep_float64 is True:
        return structure
    kept, leaves = keep_float64 or (), leaves_of(structure, DEFAULT_OBSERVATION_KEY)
    refuse_missing("observations", leaves, kept, 'name keys in keep_float64, such as ["frame"]')
    dtypes = [stored_dtype(leaf.spec.dtype, key in kept) for key, leaf in leaves.items()]
    return _with_dtypes(structure, dtypes)


def merged_structures(first: Structure, second: Structure, name: str) -> Structure:
    """Merge the structures of two values, with dtypes that hold both without loss.

    Args:
        first: The structure of one value.
        second: The structure of the other.
        name: Key of the values; prefix of the keys of their parts.

    Raises:
        SpecError: If keys, lengths or shapes differ, naming both sides.
    """
    parts, others = (leaves_of({name: each}, "") for each in (first, second))
    if parts.keys() != others.keys():
        got = f"{list(parts)} and then {list(others)}"
        raise SpecError(f"{name} should keep its structure, got the parts {got}")
    pairs = [(key, leaf.spec, others[key].spec) for key, leaf in parts.items()]
    for key, one, other in pairs:
        if one.shape != other.shape:
            got = f"{list(one.shape)} and then {list(other.shape)}"
            raise SpecError(f"{key!r} should keep its shape, got {got}")
    return _with_dtypes(first, [np.result_type(one.dtype, other.dtype) for _, one, other in pairs])


def _with_dtypes(structure: Structure, dtypes: Sequence[np.dtype[Any]]) -> Structure:
    """Return the structure with other storage dtypes of its leaves."""
    pairs = zip(_pytree.tree_leaves(structure), dtypes, strict=True)
    leaves = [replace(leaf, spec=TensorSpec(leaf.spec.shape, dtype)) for leaf, dtype in pairs]
    result: Structure = nester(structure)(leaves)
    return result


def leaves_of(structure: Structure, default_key: str) -> dict[str, Leaf]:
    """Name the leaves of a structure.

    The keys of a top-level dict are used as they are; anything else is named ``default_key``.

    Raises:
        SpecError: If two joined keys are equal.
    """
    prefix = "" if isinstance(structure, Mapping) else default_key
    leaves: dict[str, Leaf] = {}
    for path, leaf in _pytree.tree_flatten_with_path(structure)[0]:
        names = [str(getattr(step, "key", getattr(step, "idx", ""))) for step in path]
        key = "/".join([prefix, *names] if prefix else names)
        if key in leaves:
            raise SpecError(
                f"two parts of one space are both called {key!r}", fix="rename one of them"
            )
        leaves[key] = leaf
    return leaves


def flattener(structure: Structure, name: str) -> Callable[[Any], list[Any]]:
    """Compile a function that flattens a nested value, in the order of ``leaves_of``.

    It runs in every step and is several times as fast as torch's pytree. It raises SpecError if
    keys or lengths do not match the structure.
    """
    if isinstance(structure, Leaf):
        return lambda value: [value]
    is_dict = isinstance(structure, Mapping)
    items: Any = structure.items() if isinstance(structure, Mapping) else enumerate(structure)
    parts = [(key, flattener(inner, f"{name}[{key!r}]")) for key, inner in items]
    keys = {key for key, _ in parts}
    wanted = f"have the keys {sorted(keys)}" if is_dict else f"be a tuple of {len(parts)} parts"

    def flatten(value: Any) -> list[Any]:
        if is_dict:
            fits = isinstance(value, Mapping) and value.keys() == keys
        else:
            fits = isinstance(value, tuple | list) and len(value) == len(parts)
        if not fits:
            got: Any = len(value) if isinstance(value, tuple | list) else type(value).__name__
            fix = ""
            if isinstance(value, Mapping):
                got, extra = sorted(map(str, value)), [key for key in value if key not in keys]
                fix = f"omit {extra}, or add it to the space" if is_dict and extra else ""
            raise SpecError(f"{name} should {wanted}, got {got}", fix=fix)
        return [leaf for key, part in parts for leaf in part(value[key])]

    return flatten


def nester(structure: Structure) -> Callable[[Sequence[Any]], Any]:
    """Compile the inverse of ``flattener``: from leaves in order to the nested value."""
    tree = _pytree.tree_structure(structure)
    return lambda leaves: _pytree.tree_unflatten(leaves, tree)


def is_action(key: str) -> bool:
    """Whether a key belongs to an action."""
    return key == "action" or key.startswith("action/")


def action_fix(got: TensorSpec | None, wanted: TensorSpec | None) -> str:
    """Return the fix for actions that do not have the shape or dtype of their space."""
    is_choice = got and wanted and got.dtype.kind == "f" and wanted.dtype.kind != "f"
    if got and wanted and got.shape == (*wanted.shape, 1):
        return f"drop the last axis: action.squeeze(-1){'.long()' if is_choice else ''}"
    if is_choice:
        return "choose an action: logits.argmax(-1), or sample_categorical(logits, noise)[0]"
    return "return actions of the action space's shape and kind"


def row_specs(arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, TensorSpec]:
    """Return the specs of the rows of batch arrays ``[B, ...]``."""
    return {key: TensorSpec(array.shape[1:], array.dtype) for key, array in arrays.items()}


def refuse_missing(name: str, values: Collection[str], keys: Iterable[str], fix: str) -> None:
    """Refuse values that lack keys.

    Args:
        name: Name of the values in errors.
        values: The existing keys.
        keys: The required keys.
        fix: Advice of the error.

    Raises:
        SpecError: Naming the missing and the existing keys.
    """
    missing = [key for key in keys if key not in values]
    if missing:
        raise SpecError(f"{name} should have the keys {missing}, got {list(values)}", fix=fix)


def refuse_collisions(groups: Mapping[str, Sequence[str]]) -> None:
    """Refuse keys that are in two groups.

    Args:
        groups: The keys of each group, by the group's name in errors.

    Raises:
        SpecError: Naming the key and both groups.
    """
    owner: dict[str, str] = {}
    for group, keys in groups.items():
        for key in keys:
            if key in owner:
                fix = "rename or omit it in the environment or the agent"
                raise SpecError(f"key {key!r} comes from both {owner[key]} and {group}", fix=fix)
            owner[key] = group
