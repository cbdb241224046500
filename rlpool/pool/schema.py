"""The schema of a pool: one column per key of a transition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlpool.data.specs import FLAGS, TensorSpec
from rlpool.errors import SpecError
from rlpool.slots.blocks import successor_key

OF_PIECES = ("finals/", "heads/")
"""Prefixes of the names of arrays with one entry per piece of an episode instead of per row."""

_MOST_BYTES = 8  # per number
REWARDS = ("reward", "_reward")
_SIGNALS = ("reward", *FLAGS)  # users change rewards of steps, and resets clear flags


@dataclass(frozen=True)
class Schema:
    """The stored columns of a transition.

    Attributes:
        columns: Shape and dtype of a value by key.
        paired: Columns whose value after the step, ``_key``, is taken from the next row.
        infos: Columns from the ``info`` of trajectories, with one value per trajectory.
        n_frames: Frames of a stack.
        stacks: Columns that are stacks of ``n_frames``; a row holds only the newest.
    """

    columns: Mapping[str, TensorSpec]
    paired: tuple[str, ...] = ()
    infos: tuple[str, ...] = ()
    n_frames: int = 1
    stacks: tuple[str, ...] = ()

    @classmethod
    def from_specs(cls, specs: Mapping[str, TensorSpec], n_frames: int | None = None) -> Schema:
        """Make the schema of transitions with these keys; rewards are stored in float32.

        Raises:
            SpecError: For anything but numbers of up to 64 bits and bools, and if ``n_frames`` is
                given but no column is a stack.
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
        for key in sorted(specs, key=len):  # of x, _x and __x, the first two form a pair
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
                f"frame_stack is {n_frames}, but no observation has the shape [{n_frames}, ...]: "
                f"{schema}",
                fix="move the axis of the frames to the front, or omit frame_stack",
            )
        return schema

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Specs of all keys of a transition."""
        return {**self.columns, **{successor_key(key): self.columns[key] for key in self.paired}}

    @property
    def rows(self) -> dict[str, TensorSpec]:
        """Specs of a row: a whole value of each column, or the newest frame of a stack."""
        return {
            key: TensorSpec(spec.shape[1:], spec.dtype) if key in self.stacks else spec
            for key, spec in self.columns.items()
        }

    def arrays(self) -> dict[str, TensorSpec]:
        """Return the specs per row of a store's arrays by name, in memory order."""
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
        """Refuse transitions, with all keys present, whose shapes differ from the schema.

        Raises:
            SpecError: Naming the key and both specs.
        """
        for key, spec in self.specs.items():
            if specs[key].shape != spec.shape:
                raise SpecError(
                    f"{key!r} of {source} is {specs[key]}, but the pool holds {spec}",
                    fix="use another pool for other transitions",
                )
