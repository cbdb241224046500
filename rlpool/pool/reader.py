"""``PoolReader``: what a ``Pool`` becomes in another process."""

from __future__ import annotations

import os

import numpy as np

from rlpool.data.storage import Memory
from rlpool.errors import UsageError
from rlpool.pool.sampling import Sampler
from rlpool.pool.schema import Schema
from rlpool.pool.store import Store
from rlpool.seeding import root_from


class PoolReader(Sampler):
    """Draws from a pool that another process fills: what a ``Pool`` becomes when it is sent.

    It sees every transition as soon as it is added, and never a part of one. It samples uniformly,
    whatever the priorities of the pool. Its memory is the pool's, and stays when the pool's process
    ends.

    Not for use by several threads at once.
    """

    def __init__(self, schema: Schema, pool_size: int, n_sub_pools: int, memory: Memory) -> None:
        store = Store(schema, pool_size, n_sub_pools, lambda _: memory, is_reader=True)
        super().__init__(store, None)

    def seed(self, seed: int) -> None:
        """Seed the draws; without this, every reader draws differently."""
        self._generator = np.random.Generator(np.random.PCG64(root_from(seed)))
        self._pid = os.getpid()

    def __reduce__(self) -> tuple[object, ...]:
        raise UsageError(
            "a reader cannot be sent on or copied", fix="send the pool to every reader"
        )
