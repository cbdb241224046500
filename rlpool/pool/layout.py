"""Where the arrays of a store lie in its memory."""

from __future__ import annotations

import numpy as np

from rlpool.pool.schema import Schema
from rlpool.specs import TensorSpec


def layout_of(schema: Schema, pool_size: int, n_sub_pools: int) -> dict[str, TensorSpec]:
    """Dtypes and whole shapes of all arrays by name, in the order in which they lie there.

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
    return {
        name: TensorSpec((n_rows, *spec.shape), spec.dtype)
        for name, (n_rows, spec) in specs.items()
    }
