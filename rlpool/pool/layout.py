"""Where the arrays of a store lie in its memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlpool.memory.storage import Array, carve, carved_bytes
from rlpool.pool.schema import Schema
from rlpool.specs import TensorSpec


class Region(NamedTuple):
    """The place of an array ``[n_rows, *shape]``.

    Attributes:
        start: Its first byte.
        n_rows: Length of its first dimension.
        spec: Shape and dtype of a row.
    """

    start: int
    n_rows: int
    spec: TensorSpec

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes, in whole pages."""
        return carved_bytes({"": self.spec}, self.n_rows)[""]

    def array(self, root: Array) -> Array:
        """The array, not copied, in memory that begins with ``root``."""
        return carve(root[self.start :], {"": self.spec}, self.n_rows)[""]


def layout_of(schema: Schema, pool_size: int, n_sub_pools: int) -> dict[str, Region]:
    """The regions of all arrays by name, one after another.

    ``numbers`` come first: a row per sub-pool, and one with the version and whether ends of
    episodes are unknown. Then what there is per row of the pool: ``is_last``, ``final_row``,
    ``columns/key`` and ``finals/key``; and last ``frames/key``.
    """
    rows = {"is_last": TensorSpec((), np.dtype(np.bool_))}
    if schema.paired:
        rows["final_row"] = TensorSpec((), np.dtype(np.int32))
    rows |= {f"columns/{key}": spec for key, spec in schema.rows.items()}
    rows |= {f"finals/{key}": schema.rows[key] for key in schema.paired}
    specs = {"numbers": (n_sub_pools + 1, TensorSpec((3,), np.dtype(np.int64)))}
    specs |= {name: (pool_size, spec) for name, spec in rows.items()}
    for key, spec in schema.frames.items():
        # At most: no transition shares a frame, before or after its step.
        specs[f"frames/{key}"] = 2 * schema.stacks[key].n_frames * pool_size, spec
    regions, start = {}, 0
    for name, (n_rows, spec) in specs.items():
        regions[name] = Region(start, n_rows, spec)
        start += regions[name].n_bytes
    return regions
