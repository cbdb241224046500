"""``PoolReader``: what a pool is in another process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from rlpool.errors import UsageError
from rlpool.memory.storage import Memory
from rlpool.pool.intake import Schema
from rlpool.pool.reader import TransitionReader
from rlpool.pool.ring import Ring, capacities
from rlpool.pool.row_store import RowStore
from rlpool.pool.sharing import Sync
from rlpool.seeding import root_from

_T = TypeVar("_T")


class PoolReader(TransitionReader):
    """Draws from a pool that another process fills: what a ``Pool`` becomes when it is sent.

    It sees every transition as soon as it was added, and never a part of one. It samples uniformly,
    whatever the priorities of the pool. Its memory is the pool's, and stays when the pool's process
    ends.

    Not for use by several threads at once.
    """

    def __init__(self, schema: Schema, pool_size: int, n_rings: int, *memories: Memory) -> None:
        control, *rest = memories
        self._sync = Sync(control, n_rings)
        self._memories = rest
        rings, offset = [], 0
        for number, capacity in enumerate(capacities(pool_size, n_rings)):
            rings.append(Ring(offset, capacity, self._sync.numbers[number]))
            offset += capacity
        super().__init__(rings, root_from(None))
        waiting = iter(rest)
        self._schema = schema
        self._store = RowStore(schema.columns, schema.paired, pool_size, lambda _: next(waiting))

    @classmethod
    def attached(cls, *parts: Any) -> PoolReader:
        """A reader of the pool that these parts were sent by."""
        return cls(*parts)

    def seed(self, seed: int) -> None:
        """Start drawing anew from a seed; before, every reader draws differently."""
        self._generator = np.random.Generator(np.random.PCG64(root_from(seed)))

    def _unchanged(self, look: Callable[[], _T]) -> _T:
        return self._sync.read(look)

    def __reduce__(self) -> tuple[Any, ...]:
        raise UsageError("a reader cannot be sent on", fix="send the pool itself to every reader")
