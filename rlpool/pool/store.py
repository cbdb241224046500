"""Where a pool keeps its transitions: sub-pools, and a column of rows per key.

A key ``x`` that comes with ``_x``, such as ``frame`` and ``_frame``, is one column. The value
after a step is the next row's value, unless the row is the last of its piece of an episode. The
values after those lie in ``finals``, which grows with the number of such rows. Of a stack of frames
both hold the places of its frames in a ``FrameStore``.

Memory for the full size is mapped at once, and costs nothing until it is written to. A writer first
drops the rows that it will overwrite, then writes them, then publishes them: whenever it is
interrupted or dies, the rows from ``oldest`` to ``next`` are whole transitions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from rlpool.data.sequence_lock import SequenceLock
from rlpool.data.storage import Memory, NDArray, carve, carved_bytes
from rlpool.errors import UsageError
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.pool.frames import FrameStore, Places
from rlpool.pool.priorities import PriorityTree
from rlpool.pool.schema import Schema
from rlpool.pool.stacks import Incoming
from rlpool.pool.sub_pool import SubPool, SubPools, WindowRules
from rlpool.slots.blocks import successor_key


class Store:
    """Sub-pools of transitions in memory that others may read.

    Args:
        schema: What is stored.
        pool_size: Rows of all sub-pools.
        n_sub_pools: Number of sub-pools.
        make_memory: Makes the memory, of so many bytes, or hands over what others have made.
        rules: When sub-pools drop transitions.
        with_priorities: Whether rows have priorities.
        is_reader: Whether the store is another process's.

    Attributes:
        columns: Key to array ``[pool_size, ...]``.
        frames: Key of a stack to its frames.
        finals: Paired key to the values after last rows ``[pool_size, ...]``.
        final_places: Which of these are in use.
        is_last: bool ``[pool_size]``: whether the next row does not continue the episode. The
            newest row of a sub-pool always is.
        final_row: int32 ``[pool_size]``: where in ``finals`` a last row's values are.
        sub_pools: The sub-pools.
        is_untold: int64 ``[1]``: not 0 if transitions were added, since the store was empty, of
            which it is not known where episodes end.
        tree: The priorities, or ``None``.
        tails: Where the frames lie that the last trajectories ended with, by the sub-pool that was
            named for them: the next ones may go on there. See ``Incoming.tails``.
        version: Lets readers look between changes.
        has_schema: Whether it is decided what is stored of a transition.
    """

    has_schema = True

    def __init__(
        self,
        schema: Schema,
        pool_size: int,
        n_sub_pools: int,
        make_memory: Callable[[int], Memory],
        rules: WindowRules | None = None,
        *,
        with_priorities: bool = False,
        is_reader: bool = False,
    ) -> None:
        self.schema, self.pool_size = schema, pool_size
        self._rules = rules or WindowRules()
        specs = schema.arrays(pool_size, n_sub_pools)
        self.memory = make_memory(sum(carved_bytes(specs, 1).values()))
        self._root = self.memory.root()
        arrays = {name: array[0] for name, array in carve(self._root, specs, 1).items()}
        self._arrays, table = arrays, arrays["numbers"]
        self.sub_pools = SubPools(pool_size, table[:-1])
        self.is_untold: NDArray = table[-1, 1:2]
        self.columns = {key: arrays[f"columns/{key}"] for key in schema.columns}
        self.finals = {key: arrays[f"finals/{key}"] for key in schema.paired}
        self.frames = {
            key: FrameStore(schema.columns[key], stack, arrays[f"frames/{key}"])
            for key, stack in schema.stacks.items()
        }
        self.is_last = arrays["is_last"]
        self.final_row = arrays.get("final_row", self.is_last)  # none without pairs
        self._tree = PriorityTree(pool_size) if with_priorities else None
        self.final_places = Places(pool_size)
        self.tails: dict[int | None, dict[str, NDArray]] = {}
        self._is_whole = True  # no change is under way, or was interrupted
        self.version = SequenceLock(table[-1].data, self.memory.shared_fd)
        self._writer_pid = None if is_reader else os.getpid()
        self.memory.reserve(0, table.nbytes)

    @classmethod
    def of_nothing(cls, n_sub_pools: int) -> Store:
        """What a pool has before its first transition: nothing can be added."""
        store = cls(Schema({}, ()), n_sub_pools, n_sub_pools, Memory.local)
        store.has_schema = False
        return store

    @property
    def nbytes(self) -> int:
        """Bytes in use: rows written so far, bookkeeping and priorities included."""
        rows = {index: slice(sub_pool.n_used) for index, sub_pool in enumerate(self.sub_pools)}
        n_bytes = sum(part.nbytes for part in self._parts(rows, *self.n_extra).values())
        return n_bytes + (0 if self.tree is None else self.tree.nbytes)

    @property
    def n_extra(self) -> tuple[int, dict[str, int]]:
        """Finals, and frames of each stack, that are or were in use."""
        frames = {key: frames.places.n_used for key, frames in self.frames.items()}
        return self.final_places.n_used, frames

    @property
    def counts(self) -> dict[str, Any]:
        """Which rows, finals and frames are in use, as a saved pool says it; may be set."""
        n_finals, n_frames = self.n_extra
        return {
            "rings": self.sub_pools.numbers.tolist(),
            "origins": self.sub_pools.origins.tolist(),
            "n_finals": n_finals,
            "n_frames": n_frames,
            "is_untold": bool(self.is_untold[0]),
        }

    @counts.setter
    def counts(self, counts: Mapping[str, Any]) -> None:
        self.sub_pools.numbers[...] = counts["rings"]
        # Versions before 0.3 say neither: origins were 0, and what they stored goes on as it did.
        self.sub_pools.origins[...] = counts.get("origins", 0)
        self.is_untold[:] = counts.get("is_untold", False)
        self.final_places.n_used = counts["n_finals"]
        for key, frames in self.frames.items():
            frames.places.n_used = counts["n_frames"][key]

    def arrays_in_use(self) -> dict[str, NDArray]:
        """Where the values of all transitions lie: views, named as in a saved pool."""
        rows = self.sub_pools.pieces()
        arrays = self._parts(rows, *self.n_extra)
        if self.tree is not None:
            arrays |= {f"priorities{name}": self.tree.leaves[rows[name]] for name in rows}
        return arrays

    def _parts(
        self, rows: Mapping[Any, slice], n_finals: int, n_frames: Mapping[str, int]
    ) -> dict[str, NDArray]:
        """Parts of all arrays that belong to some rows, by name, finals and frames; views."""
        pieces = dict.fromkeys(self._arrays, rows)
        pieces |= {f"finals/{key}": {"": slice(n_finals)} for key in self.finals}
        pieces |= {f"frames/{key}": {"": slice(n)} for key, n in n_frames.items()}
        del pieces["numbers"]
        return {
            f"{name}{part}": self._arrays[name][piece]
            for name, parts in pieces.items()
            for part, piece in parts.items()
        }

    def __len__(self) -> int:
        return sum(self.sub_pools.lengths)

    # Writing ---------------------------------------------------------------------------------

    @property
    def is_writer(self) -> bool:
        """Whether this process may write: the one that made it, if others see the memory too."""
        return self.memory.kind == "local" or os.getpid() == self._writer_pid

    @property
    def tree(self) -> PriorityTree | None:
        """The priorities; ``None`` without any, and for readers, who do not see them change."""
        return self._tree if self.is_writer else None

    def refuse_others(self) -> None:
        """Raise ``UsageError`` in a process that was forked from the writer's."""
        if not self.is_writer:
            raise UsageError(
                "a pool is filled by the process that made it, and this is another one",
                fix="send trajectories to that process, or make a pool of your own here",
            )

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change rows and numbers within this; readers see all of it, or nothing.

        Raises:
            UsageError: In a process that was forked from the writer's.
        """
        self.refuse_others()
        with self.version.changing():
            if not self._is_whole:
                self.recover()
            self._is_whole = False
            yield
            self._is_whole = True

    def add(
        self, index: int, incoming: Incoming, priority: float = 1.0, *, joined: bool = False
    ) -> None:
        """Add transitions to a sub-pool, and drop those that its rules name.

        Args:
            index: Number of the sub-pool.
            incoming: The transitions, whose last one ends its piece of an episode.
            priority: Priority of each.
            joined: Whether the first one continues the episode of the newest one there is.

        Raises:
            SpecError: If a disk is full; nothing was changed.
        """
        sub_pool, n = self.sub_pools[index], len(incoming.is_last)
        with self.changing():
            start = sub_pool.next
            n_kept = self._rules.length_after(sub_pool.capacity, len(sub_pool), start, n)
            after = start + n
            if n_kept < n:  # the others would be dropped again
                incoming = incoming.part(slice(n - n_kept, n))
            oldest, first = after - n_kept, after - len(incoming.is_last)
            lasts = np.flatnonzero(incoming.is_last)
            pieces = sub_pool.pieces(first, after)
            # Frames that are here already are kept, even if the rows are dropped that hold them.
            named = {key: incoming.frames_named(key) for key in self.frames}
            new = {key: f.find(incoming.frames[key], named[key]) for key, f in self.frames.items()}
            n_frames = {k: f.places.n_used_with(len(new[k])) for k, f in self.frames.items()}
            self.reserve(
                dict(enumerate(pieces)), self.final_places.n_used_with(lasts.size), n_frames
            )
            self.drop(sub_pool, min(start, oldest))
            self.is_untold |= not incoming.is_told
            for key, frames in self.frames.items():
                frames.put(incoming.frames[key], new[key])
            self._write(pieces, incoming, lasts)
            for key, frames in self.frames.items():
                frames.release(incoming.frames[key].places[named[key]])
            newest = sub_pool.pieces(start - 1, start) if joined and len(sub_pool) else []
            # First the oldest: a reader sees nothing rather than too much.
            sub_pool.numbers[0] = oldest
            sub_pool.numbers[1] = after
            for piece in newest:  # only now, as the newest row must always be a last one
                self._give_back_finals(piece)
                self.is_last[piece] = False
            if self.tree is not None:
                for piece in pieces:
                    self.tree.set(piece, priority)

    def _write(self, pieces: Sequence[slice], incoming: Incoming, lasts: NDArray) -> None:
        start = 0
        for piece in pieces:
            part = slice(start, start + piece.stop - piece.start)
            some = incoming if len(pieces) == 1 else incoming.part(part)
            for key, source in some.columns.items():
                if key in self.frames:
                    self.columns[key][piece] = some.frames[key].places[source.values()]
                    self.frames[key].refer(self.columns[key][piece])
                else:
                    source.values(self.columns[key][piece])
            self.is_last[piece] = some.is_last
            start = part.stop
        if self.schema.paired and lasts.size:
            finals = self.final_places.take(lasts.size)
            for key, source in incoming.finals.items():
                values = source.part(lasts).values()
                if key in self.frames:
                    values = incoming.frames[key].places[values]
                    self.frames[key].refer(values)
                self.finals[key][finals] = values
            rows = np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces])
            self.final_row[rows[lasts]] = finals

    def drop(self, sub_pool: SubPool, stop: int) -> None:
        """Drop the transitions before number ``stop``."""
        pieces = sub_pool.pieces(sub_pool.oldest, stop)
        if self.tree is not None:  # first of all: what is gone is never drawn
            for piece in pieces:
                self.tree.set(piece, 0.0)
        if pieces:
            sub_pool.numbers[0] = stop
        for piece in pieces:
            self._give_back_finals(piece)
            for key, frames in self.frames.items():
                frames.release(self.columns[key][piece])

    def clear(self) -> None:
        """Drop all transitions; the next ones use the same rows, finals and frames."""
        after = self.sub_pools.numbers[:, [1, 1]]
        counts = {"n_finals": 0, "n_frames": dict.fromkeys(self.frames, 0)}
        self.become({"rings": after, "origins": after[:, 0], **counts}, lambda arrays: None)

    def become(
        self, counts: Mapping[str, Any], write: Callable[[Mapping[str, NDArray]], None]
    ) -> None:
        """Drop all transitions, and have others.

        Args:
            counts: What will be in use.
            write: Writes the values into the arrays that are then in use.
        """
        with InterruptsHeld(), self.changing():
            for sub_pool in self.sub_pools:
                self.drop(sub_pool, sub_pool.next)
            self.counts = counts
            write(self.arrays_in_use())
            self.recover()

    def recover(self) -> None:
        """Make the bookkeeping of finals, frames and priorities fit the rows in use."""
        self.sub_pools.numbers[:, 0] = self.sub_pools.numbers.min(axis=1)
        if self.tree is not None:
            self.tree.set(slice(0, self.pool_size), self.tree.leaves.copy())
        self.tails = {}
        rows = self.sub_pools.rows()
        finals = self.final_row[rows[self.is_last[rows]]]
        if self.schema.paired:
            is_free = np.ones(self.final_places.n_used, bool)
            is_free[finals] = False
            self.final_places.recount(is_free)
        for key, frames in self.frames.items():
            places = [self.columns[key][rows]]
            places += [self.finals[key][finals]] if key in self.finals else []
            frames.recount(places)

    def _give_back_finals(self, rows: slice) -> None:
        if self.schema.paired:
            finals = self.final_row[rows][self.is_last[rows]]
            for key in self.frames.keys() & self.finals.keys():
                self.frames[key].release(self.finals[key][finals])
            self.final_places.give_back(finals)

    def reserve(
        self, rows: Mapping[Any, slice], n_finals: int, n_frames: Mapping[str, int]
    ) -> None:
        """Make sure that a disk has room for rows, finals and frames before they are written.

        Raises:
            SpecError: If it has none.
        """
        if self.memory.kind != "memmap":
            return
        for part in self._parts(rows, n_finals, n_frames).values():
            start = part.ctypes.data - self._root.ctypes.data
            self.memory.reserve(start, start + part.nbytes)

    # Reading ---------------------------------------------------------------------------------

    # Rows past the end stand for those at the beginning: mode="wrap" costs nothing.

    def take(self, rows: NDArray, keys: Sequence[str] | None = None) -> dict[str, NDArray]:
        """Rows of those columns that are among some keys, copies ``[len(rows), ...]``."""
        wanted = self.columns if keys is None else [key for key in keys if key in self.columns]
        return {
            key: self._whole(key, self.columns[key].take(rows, 0, None, "wrap")) for key in wanted
        }

    def take_after(self, rows: NDArray, keys: Sequence[str] | None = None) -> dict[str, NDArray]:
        """Values after some rows' steps, copies.

        Args:
            rows: int64 rows.
            keys: Some of the keys that are returned; by default all of them.

        Returns:
            ``_key`` of the paired keys to values ``[len(rows), ...]``.
        """
        taken: dict[str, NDArray] = {}
        wanted = [k for k in self.schema.paired if keys is None or successor_key(k) in keys]
        if not wanted:
            return taken
        next_rows = self.sub_pools.ahead(rows, 1)
        ends = self.is_last.take(rows, 0, None, "wrap").nonzero()[0]
        final_rows = self.final_row.take(rows.take(ends), 0, None, "wrap")
        for key in wanted:
            values = self.columns[key].take(next_rows, 0, None, "wrap")
            values[ends] = self.finals[key].take(final_rows, 0)
            taken[successor_key(key)] = self._whole(key, values)
        return taken

    def _whole(self, key: str, values: NDArray) -> NDArray:
        """Values of a column, put together from their frames if they are stacks."""
        return self.frames[key].take(values) if key in self.frames else values
