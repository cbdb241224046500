"""Adds transitions to the rings: which go where, what is dropped, what is written."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError, UsageError
from rlpool.machine.limits import check_size
from rlpool.memory.storage import Array, Memory, allocate, carved_bytes
from rlpool.pool.intake import Intake, Schema, intake_of, intake_of_one, specs_of
from rlpool.pool.priorities import PriorityTree
from rlpool.pool.reader import RESULT_KEYS, TransitionReader
from rlpool.pool.ring import Ring, WindowRules, capacities, routes
from rlpool.pool.row_store import RowStore
from rlpool.pool.sharing import Sync
from rlpool.pool.transition import DONE_KEY
from rlpool.slots.blocks import successor_key
from rlpool.specs import TensorSpec

_T = TypeVar("_T")

_SAMPLING, _ROUTING = 1, 2  # what a generator's seed is for


class TransitionWriter(TransitionReader):
    """A reader that also adds. What comes in was checked.

    Args:
        pool_size: Transitions to hold in all.
        n_rings: Sub-pools.
        rules: When they drop transitions.
        random: Whether transitions of different processes are mixed.
        root: Root of all randomness.
        keys: Keys to store, ``None`` for all.
        storage: Kind of memory.
        directory: Where a memmap lies.
        alpha: Power of the priorities, ``None`` for uniform sampling.
    """

    def __init__(
        self,
        pool_size: int,
        n_rings: int,
        rules: WindowRules,
        *,
        random: bool,
        root: int,
        keys: Sequence[str] | None,
        storage: str,
        directory: str | Path | None,
        alpha: float | None,
    ) -> None:
        allocate(storage, 1, directory=directory)  # refuses what cannot be
        self._pool_size = pool_size
        self._storage, self._directory = storage, directory
        self._keys = None if keys is None else list(dict.fromkeys(keys))
        self._random = random
        self._alpha = alpha
        self._rules = rules
        self._pid = os.getpid()
        self._sync = Sync.make(storage, n_rings)
        rings, offset = [], 0
        for number, capacity in enumerate(capacities(pool_size, n_rings)):
            rings.append(Ring(offset, capacity, self._sync.numbers[number], rules))
            offset += capacity
        super().__init__(rings, [_SAMPLING, root])
        self._router = np.random.Generator(np.random.PCG64([_ROUTING, root]))
        self._open_rows: dict[int, int] = {}  # sub-pool to a last row that may still go on
        self._fed = [False] * n_rings  # processes whose first transition was stored
        self._max_priority = 1.0

    def _unchanged(self, look: Callable[[], _T]) -> _T:
        # In a process that was forked from the writer's, the pool is a reader like any other.
        if self._sync.is_writer:
            return look()
        if self._pid != os.getpid():
            # Not the draws of its siblings and of the process that it came from.
            self._pid = os.getpid()
            self._generator = np.random.Generator(np.random.PCG64())
        return self._sync.read(look)

    def clear(self) -> None:
        """Drop all transitions; their keys stay fixed."""
        with self._sync.writing():
            for ring in self._rings:
                self._drop(ring, ring.oldest, ring.next)
        self._open_rows.clear()

    # How it is stored ------------------------------------------------------------------------

    def _checked_index(self, index: Any) -> int | None:
        if index is None:
            return None
        try:
            number = -1 if isinstance(index, bool) else operator.index(index)
        except (TypeError, RuntimeError):
            number = -1
        if number not in range(len(self._rings)):
            raise SpecError(
                f"index should be the number of a sub-pool, got {index!r}",
                fix=f"there are {len(self._rings)} (processes), counted from 0",
            )
        return number

    def _known_keys(self) -> Sequence[str] | None:
        return self._keys if self._schema is None else list(self._schema.specs)

    def _known_schema(self) -> Schema:
        if self._schema is None:
            raise LookupError("nothing was admitted yet")
        return self._schema

    def _admit(self, specs: Mapping[str, TensorSpec], what: str) -> Schema:
        """The schema that transitions of these specs are stored by; the first ones decide."""
        if self._schema is None:
            taken = [key for key in RESULT_KEYS if key in specs]
            if taken:
                raise SpecError(
                    f"{what} have the keys {taken}, which samples use", fix="rename them"
                )
            schema = Schema.of(specs)
            self._store = self._make_store(schema)
            if self._alpha is not None:
                self._tree = PriorityTree(self._pool_size)
            self._schema = schema
            return schema
        for key, spec in self._schema.specs.items():
            mine = specs.get(key)
            if mine is None or mine.shape != spec.shape or not _fits(mine.dtype, spec.dtype):
                raise SpecError(
                    f"{key!r} of {what} is {mine or 'missing'}, the pool holds {spec}",
                    fix="use another pool for other transitions",
                )
        return self._schema

    @contextmanager
    def _first_decides(self) -> Iterator[None]:
        """Let the first transitions decide what is stored, unless they are refused after all."""
        is_first = self._schema is None
        try:
            yield
        except BaseException:
            if is_first and not any(ring.next for ring in self._rings):
                self._schema = self._store = self._tree = None
            raise

    def _make_store(self, schema: Schema) -> RowStore:
        def make_memory(n_bytes: int) -> Memory:
            return allocate(self._storage, n_bytes, directory=self._directory)

        if self._storage != "memmap":
            self._check_size(carved_bytes(schema.columns, self._pool_size))
        return RowStore(schema.columns, schema.paired, self._pool_size, make_memory)

    def _check_size(self, sizes: Mapping[str, int]) -> None:
        """Refuse more transitions than the machine can hold; warn of more than it can hold now."""

        def advice(n_free: int) -> str:
            fits = self._pool_size * n_free // sum(sizes.values())
            number = f" ({fits} would fit)" if fits else ""
            return f'lower pool_size{number}, or use storage="memmap"'

        what = f"a pool of {self._pool_size} transitions"
        check_size(sizes, advice, what, private=self._storage == "local")

    def _shared_parts(self) -> tuple[Any, ...]:
        """What a ``PoolReader`` in another process is made of."""
        if self._storage == "local" or self._store is None or self._schema is None:
            raise UsageError(
                "the pool's memory is this process's own, so that it cannot be sent",
                fix='make it with storage="shared"',
            )
        return (
            self._schema,
            self._pool_size,
            len(self._rings),
            self._sync.memory,
            *(self._store.memories),
        )

    def _route(self) -> int:
        """A sub-pool, drawn with probability proportional to 1 / (its length + 1)."""
        return self._routes([1])[0]

    def _routes(self, sizes: Sequence[int]) -> list[int]:
        """Sub-pools for several additions, one after the other."""
        if len(self._rings) == 1:
            return [0] * len(sizes)
        return routes(self._rings, sizes, self._router.random(len(sizes)).tolist())

    def _add_one(
        self, index: int, values: Mapping[str, Array], schema: Schema, *, may_go_on: bool
    ) -> None:
        """Add a transition, joined to the one before if it follows from that."""
        open_row = self._open_rows.get(index)
        is_last = bool(values[DONE_KEY])
        intake = intake_of_one(values, schema)
        goes_on = open_row is not None and self._follows(open_row, values)
        self._add(index, intake, links=open_row if goes_on else None)
        if may_go_on and not is_last:
            ring = self._rings[index]
            self._open_rows[index] = ring.rows(np.array(ring.next - 1)).item()

    def _follows(self, row: int, values: Mapping[str, Array]) -> bool:
        """Whether a transition starts from what the one in a row led to."""
        store = self._store
        if store is None:
            return False
        here, is_known = np.array([row]), False
        for key in self._known_schema().specs:
            if successor_key(key) in self._known_schema().specs and key in values:
                name = successor_key(key)
                after = (
                    store.take_after([key], here, here)[name]
                    if key in store.paired
                    else store.take(name, here)
                )
                if after[0].tobytes() != values[key].astype(after.dtype).tobytes():
                    return False
                is_known = True
        return is_known

    def _add(self, index: int, intake: Intake, links: int | None = None) -> None:
        """Add transitions to a sub-pool."""
        ring, store, tree = self._rings[index], self._store, self._tree
        if store is None:
            raise LookupError("nothing was admitted yet")
        ring.settle()
        admission = ring.admission(intake.n)
        if admission.n_skipped:
            intake = intake.part(slice(admission.n_skipped, intake.n))
        first, after = admission.first, admission.first + intake.n
        pieces = ring.pieces(first, after)
        lasts = np.flatnonzero(intake.is_last)
        store.reserve(pieces, lasts.size)
        self._open_rows.pop(index, None)
        with self._sync.writing():
            self._drop(ring, *admission.dropped)
            start = 0
            for piece in pieces:
                store.write(piece, intake, start)
                start += piece.stop - piece.start
            if store.lacks_finals(lasts.size):
                store.recover_finals(store.n_finals, self._held_rows())
            store.write_finals(ring.rows(first + lasts), lasts, intake)
            goes_on = links is not None and len(ring) > 0  # it may just have been dropped
            ring.move(first if admission.n_skipped else ring.oldest, after)
            if links is not None and goes_on:
                store.link(links)  # only now: the newest transition must always be a last one
            if tree is not None:
                for piece in pieces:
                    tree.fill(piece, self._max_priority)  # only now: what has one may be drawn

    def _held_rows(self) -> list[slice]:
        return [piece for ring in self._rings for piece in ring.pieces(ring.oldest, ring.next)]

    def _drop(self, ring: Ring, oldest: int, stop: int) -> None:
        if self._store is None or oldest == stop:
            return
        pieces = ring.pieces(oldest, stop)
        if self._tree is not None:
            for piece in pieces:
                self._tree.fill(piece, 0.0)
        # Before anything is written over: a reader may see less than there was, never half of it.
        ring.oldest = stop
        for piece in pieces:
            self._store.drop(piece)

    def _scatter(self, trajectories: Sequence[TemporalDictTensor]) -> None:
        """Send transitions to sub-pools one by one, in the order in which they came to be."""
        for trajectory in trajectories:
            self._admit(specs_of(trajectory, self._known_keys()), "the episode")
        intakes = [intake_of(trajectory, self._known_schema()) for trajectory in trajectories]
        for step in range(max(intake.n for intake in intakes)):
            for process, intake in enumerate(intakes):
                if step < intake.n:
                    index = self._route() if self._fed[process] else process
                    self._fed[process] = True
                    self._add(index, intake.alone(step))


def _fits(given: np.dtype[Any], held: np.dtype[Any]) -> bool:
    """Whether there are values that both hold; those that only one holds are refused later."""
    both_ints = given.kind in "iu" and held.kind in "iu"
    return both_ints or np.can_cast(given, held, "same_kind")
