"""What a pool stores of a transition: a column per key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlpool.data.specs import FLAGS, TensorSpec
from rlpool.errors import SpecError
from rlpool.slots.blocks import successor_key

OF_PIECES = ("finals/", "heads/")
"""What the names of arrays begin with that have an entry per piece of an episode, not per row."""

_MOST_BYTES = 8  # per number
REWARDS = ("reward", "_reward")
_SIGNALS = ("reward", *FLAGS)  # callers change rewards of steps, and resets clear flags


@dataclass(frozen=True)
class Schema:
    """What is stored of a transition.

    Attributes:
        columns: Key to the shape and dtype of a value.
        paired: Those of them whose value after the step, ``_key``, follows from the next row.
        infos: Those that come from the ``info`` of trajectories: one value per trajectory.
        n_frames: Frames of a stack.
        stacks: Columns that are stacks of so many frames, of which a row holds the newest.
    """

    columns: Mapping[str, TensorSpec]
    paired: tuple[str, ...] = ()
    infos: tuple[str, ...] = ()
    n_frames: int = 1
    stacks: tuple[str, ...] = ()

    @classmethod
    def from_specs(cls, specs: Mapping[str, TensorSpec], n_frames: int | None = None) -> Schema:
        """The schema of transitions with these keys; rewards are stored in float32.

        Raises:
            SpecError: For anything but numbers of up to 64 bits and bools, and if there should be
                stacks of ``n_frames`` and are none.
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
            is_pair = specs.get(successor_key(key)) == specs[key] and specs[key].n_bytes
            if is_pair and key not in (*_SIGNALS, *derived):
                derived.add(successor_key(key))
        paired = tuple(key for key in specs if successor_key(key) in derived)
        columns = {key: spec for key, spec in specs.items() if key not in derived}
        shapes = {key: columns[key].shape for key in paired or columns}
        stacks = tuple(
            key
            for key, shape in shapes.items()
            if len(shape) > 1 and shape[0] == n_frames and 0 not in shape
        )
        schema = cls(columns, paired, (), n_frames or 1, stacks)
        if n_frames is not None and not stacks:
            raise SpecError(
                f"frame_stack is {n_frames}, but no observation has the shape [{n_frames}, ...] of "
                f"so many frames: {schema}",
                fix="move the axis of the frames to the front, or leave frame_stack out",
            )
        return schema

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Every key of a transition."""
        return {**self.columns, **{successor_key(key): self.columns[key] for key in self.paired}}

    @property
    def rows(self) -> dict[str, TensorSpec]:
        """What a row holds of each column: all of it, or the newest frame of a stack."""
        return {
            key: TensorSpec(spec.shape[1:], spec.dtype) if key in self.stacks else spec
            for key, spec in self.columns.items()
        }

    def arrays(self) -> dict[str, TensorSpec]:
        """Shapes and dtypes per row of a store's arrays by name, in the order in which they lie."""
        flag, number = TensorSpec((), np.dtype(np.bool_)), TensorSpec((), np.dtype(np.int32))
        arrays = {"is_last": flag, "is_terminal": flag, "piece": number}
        arrays["follower"], rows = TensorSpec((), np.dtype(np.int64)), self.rows
        if self.stacks:
            arrays["age"] = number
        arrays |= {f"columns/{key}": spec for key, spec in rows.items()}
        arrays |= {f"finals/{key}": self.columns[key] for key in self.paired}
        for key in self.stacks:
            shape = (self.n_frames - 1, *rows[key].shape)
            arrays[f"heads/{key}"] = TensorSpec(shape, rows[key].dtype)
        return arrays

    def __str__(self) -> str:
        each = {key: f"{key} {spec}" for key, spec in self.specs.items()}
        for key in self.stacks:
            each[key] += f" as {self.n_frames} frames"
        return ", ".join(each.values())

    def check(self, specs: Mapping[str, TensorSpec], source: str) -> None:
        """Refuse transitions with all keys, one of which has another shape.

        Raises:
            SpecError: Naming the key and both sides.
        """
        for key, spec in self.specs.items():
            if specs[key].shape != spec.shape:
                raise SpecError(
                    f"{key!r} of {source} is {specs[key]}, the pool holds {spec}",
                    fix="use another pool for other transitions",
                )
