"""What a pool stores of a transition: a column per key, and which columns are stacks of frames."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlpool.data.rows import listed
from rlpool.data.specs import FLAGS, TensorSpec
from rlpool.errors import SpecError
from rlpool.machine.arguments import whole_number
from rlpool.slots.blocks import successor_key

_PAIRED_BYTES = 9
"""Values of at least this size are not stored twice. Below, the link to a row's final value costs
as much as the value, and takes longer to read."""

_MOST_BYTES = 8  # per number
REWARDS = ("reward", "_reward")
_SIGNALS = ("reward", *FLAGS)  # callers change rewards of steps, and resets clear flags


@dataclass(frozen=True)
class Stack:
    """How the frames of a value lie in it.

    Attributes:
        n_frames: Frames per value.
        axis: The axis of the value along which they follow each other, the newest last.
    """

    n_frames: int
    axis: int

    def parts(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """The shape of a value as ``[before, n_frames, after]`` the axis."""
        after = math.prod(shape[self.axis :]) // self.n_frames
        return math.prod(shape[: self.axis]), self.n_frames, after


@dataclass(frozen=True)
class Schema:
    """What is stored of a transition.

    Attributes:
        columns: Key to the values of a row.
        paired: Those of them whose value after the step, ``_key``, follows from the next row.
        stacks: Those whose frames are stored once each. A row holds where they are.
        infos: Those that come from the ``info`` of trajectories: one value per trajectory.
    """

    columns: Mapping[str, TensorSpec]
    paired: tuple[str, ...]
    stacks: Mapping[str, Stack] = field(default_factory=dict)
    infos: tuple[str, ...] = ()

    @classmethod
    def from_specs(cls, specs: Mapping[str, TensorSpec]) -> Schema:
        """The schema of transitions with these keys; rewards are stored in float32.

        Raises:
            SpecError: For anything but numbers of up to 64 bits and bools.
        """
        for key, spec in specs.items():
            if spec.dtype.kind not in "biuf" or spec.dtype.itemsize > _MOST_BYTES:
                raise SpecError(
                    f"a pool cannot hold {key!r}, which is {spec}",
                    fix="pass numbers or arrays of one shape; torch.view_as_real splits complex "
                    "numbers",
                )
        specs = {
            key: TensorSpec(spec.shape, np.dtype(np.float32)) if key in REWARDS else spec
            for key, spec in specs.items()
        }
        derived: set[str] = set()
        for key in sorted(specs, key=len):  # of x, _x and __x the first two are a pair
            is_pair = specs.get(successor_key(key)) == specs[key] and key not in derived
            if is_pair and specs[key].n_bytes >= _PAIRED_BYTES:
                derived.add(successor_key(key))
        paired = tuple(key for key in specs if successor_key(key) in derived)
        return cls({key: spec for key, spec in specs.items() if key not in derived}, paired)

    @property
    def apart(self) -> list[str]:
        """Columns whose value after the step is another column, as the values are small."""
        return [
            key
            for key, spec in self.columns.items()
            if self.columns.get(successor_key(key)) == spec and spec.n_bytes and key not in _SIGNALS
        ]

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Every key of a transition."""
        return {**self.columns, **{successor_key(key): self.columns[key] for key in self.paired}}

    @property
    def rows(self) -> dict[str, TensorSpec]:
        """What a row holds of each column."""
        places = {
            key: TensorSpec((stack.n_frames,), np.dtype(np.int32))
            for key, stack in self.stacks.items()
        }
        return {**self.columns, **places}

    @property
    def frames(self) -> dict[str, TensorSpec]:
        """A single frame of each stack, ``[before, after]`` the axis."""
        specs = {}
        for key, stack in self.stacks.items():
            before, _, after = stack.parts(self.columns[key].shape)
            specs[key] = TensorSpec((before, after), self.columns[key].dtype)
        return specs

    def arrays(self, pool_size: int, n_sub_pools: int) -> dict[str, TensorSpec]:
        """Dtypes and whole shapes of a store's arrays by name, in the order in which they lie.

        ``numbers`` come first: a row per sub-pool, and one with the version and whether ends of
        episodes are unknown. Then what there is per row of the pool: ``is_last``, ``final_row``,
        ``columns/key`` and ``finals/key``; and last ``frames/key``.
        """
        rows = {"is_last": TensorSpec((), np.dtype(np.bool_))}
        if self.paired:
            rows["final_row"] = TensorSpec((), np.dtype(np.int32))
        rows |= {f"columns/{key}": spec for key, spec in self.rows.items()}
        rows |= {f"finals/{key}": self.rows[key] for key in self.paired}
        specs = {"numbers": (n_sub_pools + 1, TensorSpec((3,), np.dtype(np.int64)))}
        specs |= {name: (pool_size, spec) for name, spec in rows.items()}
        for key, spec in self.frames.items():
            # At most: no transition shares a frame, before or after its step.
            specs[f"frames/{key}"] = 2 * self.stacks[key].n_frames * pool_size, spec
        return {
            name: TensorSpec((n_rows, *spec.shape), spec.dtype)
            for name, (n_rows, spec) in specs.items()
        }

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Schema:
        """The schema that ``plain`` described, in this or an earlier version."""
        columns = {
            key: TensorSpec(tuple(shape), np.dtype(text))
            for key, (text, shape) in values["columns"].items()
        }
        schema = cls.from_specs(cls(columns, tuple(values["paired"])).specs)
        stacks = values.get("stacks", {})  # none in files of version 0.1
        asked = {key: (int(n_frames), int(axis)) for key, (n_frames, axis) in stacks.items()}
        infos = tuple(values.get("infos", ()))  # none in files of version 0.3
        return replace(schema, stacks=stacks_of(asked, schema), infos=infos)

    def plain(self) -> dict[str, Any]:
        """The schema as plain values."""
        columns = {key: [s.dtype.str, list(s.shape)] for key, s in self.columns.items()}
        stacks = {key: [stack.n_frames, stack.axis] for key, stack in self.stacks.items()}
        plain = {"columns": columns, "paired": list(self.paired), "stacks": stacks}
        return {**plain, "infos": list(self.infos)} if self.infos else plain

    def __str__(self) -> str:
        each = {key: f"{key} {spec}" for key, spec in self.specs.items()}
        for key, stack in self.stacks.items():
            each[key] += f" as {stack.n_frames} frames along axis {stack.axis}"
        return ", ".join(each.values())

    def check(self, specs: Mapping[str, TensorSpec], what: str) -> None:
        """Refuse transitions that lack a key, or have another shape or kind of number.

        Raises:
            SpecError: Naming the key and both sides.
        """
        for key, spec in self.specs.items():
            given = specs.get(key)
            if given is None or given.shape != spec.shape or not _fits(given.dtype, spec.dtype):
                raise SpecError(
                    f"{key!r} of {what} is {given or 'missing'}, the pool holds {spec}",
                    fix="use another pool for other transitions",
                )


def _fits(given: np.dtype[Any], stored: np.dtype[Any]) -> bool:
    """Whether some values fit both dtypes; those that fit only one are refused later."""
    return given.kind + stored.kind in ("iu", "ui") or np.can_cast(given, stored, "same_kind")


def checked_keys(keys: Sequence[str] | None) -> list[str] | None:
    """Check ``keys`` of a pool: names, each once; ``None`` for all there are."""
    if keys is None:
        return None
    keys = list(dict.fromkeys(listed(keys, str, "keys")))
    if not keys:
        raise SpecError("keys are empty", fix="leave keys out to store all")
    return keys


# Stacks of frames --------------------------------------------------------------------------------

FrameStack = int | Mapping[str, int | tuple[int, int]] | None
"""Which keys are stacks: see ``Pool``."""

_MOST_AXES = 64  # of an array
_WRAPPERS = {"FrameStackObservation": "stack_size", "FrameStack": "num_stack"}


def checked_frame_stack(frame_stack: Any) -> FrameStack:
    """The argument of that name.

    Raises:
        SpecError: If it is neither a number of at least 2 frames nor a mapping to such numbers, or
            pairs of number and axis.
    """
    if frame_stack is None:
        return None
    if not isinstance(frame_stack, Mapping):
        fix = "leave frame_stack out if observations are no stacks"
        return whole_number("frame_stack", frame_stack, 2, fix=fix)
    checked: dict[str, int | tuple[int, int]] = {}
    for key, value in frame_stack.items():
        name, pair = f"frame_stack[{key!r}]", isinstance(value, tuple | list)
        if not isinstance(key, str) or (pair and len(value) != 2):
            raise SpecError(
                f"{name} is {value!r}",
                fix='map keys to numbers of frames, or to pairs with the axis: {"frame": (4, -1)}',
            )
        n_frames, axis = value if pair else (value, 0)
        n_frames = whole_number(name, n_frames, 2)
        checked[key] = (n_frames, whole_number(name, axis, -_MOST_AXES)) if pair else n_frames
    return checked


def stacks_of(frame_stack: FrameStack, schema: Schema) -> dict[str, Stack]:
    """The stacks among the columns of a schema.

    Raises:
        SpecError: If a key that was named is missing or has no such stack, or no key has one.
    """
    if frame_stack is None:
        return {}
    if isinstance(frame_stack, Mapping):
        return {key: _stack(key, value, schema) for key, value in frame_stack.items()}
    n_frames = frame_stack
    shapes = {key: schema.columns[key].shape for key in schema.paired or schema.columns}
    stacks = {
        key: Stack(n_frames, axis)
        for key, shape in shapes.items()
        for axis in (len(shape) - 1, 0)  # of both, the first axis counts
        if shape and shape[axis] == n_frames and 0 not in shape
        if len(shape) > 1 or key in schema.paired
    }
    if stacks:
        # Next to images, a vector is rather one of as many numbers than a stack of single ones.
        return {key: stack for key, stack in stacks.items() if len(shapes[key]) > 1} or stacks
    fix = "leave frame_stack out if observations are no stacks"
    for key, shape in shapes.items():
        if advice := _named_axis(key, n_frames, shape):
            fix += f", or name the key and the axis: {advice}"
            break
    raise SpecError(
        f"frame_stack is {n_frames}, but no observation has {n_frames} frames along its first or "
        f"last axis: {schema}",
        fix=fix,
    )


def _named_axis(key: str, n_frames: int, shape: Sequence[int]) -> str:
    """How to name the last axis that may be made of so many frames; empty if none may be."""
    axes = [axis for axis, size in enumerate(shape) if size % n_frames == 0 and 0 not in shape]
    return f"frame_stack={{{key!r}: ({n_frames}, {axes[-1]})}}" if axes else ""


def _stack(key: str, value: int | tuple[int, int], schema: Schema) -> Stack:
    """The stack that was asked for under a key."""
    if key not in schema.columns:
        raise SpecError(
            f"frame_stack names {key!r}, the transitions have {list(schema.columns)}",
            fix="name one of these; values after a step are those of the key without its _",
        )
    shape = schema.columns[key].shape
    if isinstance(value, tuple):
        n_frames, axis = value
    else:
        n_frames, is_last = value, shape[:1] != (value,) and shape[-1:] == (value,)
        axis = -1 if is_last else 0
    if not -len(shape) <= axis < len(shape) or shape[axis] % n_frames or 0 in shape:
        advice = _named_axis(key, n_frames, shape) or f"frame_stack={{{key!r}: (4, -1)}}"
        raise SpecError(
            f"{key!r} is {schema.columns[key]}, which has no {n_frames} frames along axis {axis}",
            fix=f"give as many frames as an axis has, and the axis: {advice}",
        )
    return Stack(n_frames, axis % len(shape))


def recognised_frame_stack(envs: Sequence[Any]) -> int | None:
    """Frames that a wrapper of Gymnasium stacks in all environments alike, ``None`` without one."""
    sizes = {_stack_size(env) for env in envs}
    size = sizes.pop() if len(sizes) == 1 else None
    return size if size and size > 1 else None


def _stack_size(env: Any) -> int | None:
    while env is not None:
        name = _WRAPPERS.get(type(env).__name__, "")
        if isinstance(size := getattr(env, name, None) if name else None, int):
            return size
        env = vars(env).get("env") if hasattr(env, "__dict__") else None
    return None
