"""Where a pool keeps its transitions: sub-pools, and a column of rows per key.

A key ``x`` that comes with ``_x``, such as ``frame`` and ``_frame``, is one column. The value
after a step is the next row's value, unless the row is the last of its piece of an episode. The
values after those are in ``finals``, which grows with the number of such rows::

    row         0   1   2   3   4
    frame       a   b   c   k   l
    is_last     -   -   x   -   x      after a step: b, c, finals[0], l, finals[1]
    final_row           0       1

A row that ends a window of a ``Batcher`` is a last one too. Where the episode goes on in the next
window, ``follower`` says which transition that is: by its number and sub-pool, so that it shows
whether it is still there.

Of a stack of frames, a row holds the newest one. The older ones are those of the rows before it, up
to the first row of its piece. The frames before that one are in ``heads``, once per piece. ``age``
says how many rows of the piece come before a row, at most all but one frame of a stack. Finals are
whole stacks.

Memory for the full size is mapped at once, and costs nothing until it is written to.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlpool.data.storage import Memory, NDArray, allocate, carve, carved_bytes
from rlpool.errors import SpecError
from rlpool.machine.limits import check_size
from rlpool.pool.ingest import NOTHING_CUT, NewRows
from rlpool.pool.priorities import PriorityTree
from rlpool.pool.schema import Schema
from rlpool.pool.sub_pool import SubPool, SubPools, WindowRules
from rlpool.slots.blocks import successor_key


class FreeRows:
    """Hands out rows of an array. Those that were given back come first.

    Args:
        capacity: Number of rows.

    Attributes:
        n_used: So many from the first on are or were in use.
    """

    def __init__(self, capacity: int) -> None:
        self.n_used = 0
        self._free = np.empty(capacity, np.int32)  # a stack of the first _n_free
        self._n_free = 0

    def n_used_with(self, n: int) -> int:
        """How many will be or have been in use after taking so many."""
        return self.n_used + max(0, n - self._n_free)

    def take(self, n: int) -> NDArray:
        """Free rows, int32 ``[n]``."""
        n_again = min(n, self._n_free)
        self._n_free -= n_again
        again = self._free[self._n_free : self._n_free + n_again]
        start, self.n_used = self.n_used, self.n_used + n - n_again
        return np.concatenate([again, np.arange(start, self.n_used, dtype=np.int32)])

    def give_back(self, rows: NDArray) -> None:
        """Let rows be taken again."""
        self._free[self._n_free : self._n_free + rows.size] = rows
        self._n_free += rows.size

    def reset(self, n_used: int, rows: NDArray) -> None:
        """Say how many are or were in use, and which of them still are."""
        self.n_used, self._n_free = n_used, 0
        is_free = np.ones(n_used, bool)
        is_free[rows] = False
        self.give_back(np.flatnonzero(is_free))


class Store:
    """Sub-pools of transitions.

    Args:
        schema: What is stored.
        sub_pools: The sub-pools, all of them empty.
        memory: For ``store_bytes`` bytes.
        rules: When sub-pools drop transitions.
        with_priorities: Whether rows have priorities.

    Attributes:
        columns: Key to array ``[n_rows, ...]``.
        finals: Paired key to the values after last rows.
        is_last: bool ``[n_rows]``: whether the next row does not continue the episode. The newest
            row of a sub-pool always is.
        is_terminal: bool ``[n_rows]``: whether the state after the step has no future.
        final_row: int32 ``[n_rows]``: where in ``finals`` a last row's values are.
        sub_pools: The sub-pools.
        has_followers: Whether any last row has a follower.
        ends_known: Whether it is known of all transitions where episodes end.
        terminal_known: Whether it is known of all transitions if they are terminal.
        shortest_cut: Steps of the shortest row that was added, ends within an episode, and cannot
            be joined with what follows; 0 once there was a warning.
        tree: The priorities, or ``None``.
    """

    def __init__(
        self,
        schema: Schema,
        sub_pools: SubPools,
        memory: Memory,
        rules: WindowRules,
        *,
        with_priorities: bool = False,
    ) -> None:
        self.schema, self.sub_pools, self._rules = schema, sub_pools, rules
        n_rows = sub_pools.n_rows
        self._memory, self._root = memory, memory.root()
        arrays = self._arrays = carve(self._root, schema.arrays(), n_rows)
        self.columns = {key: arrays[f"columns/{key}"] for key in schema.columns}
        self.finals = {key: arrays[f"finals/{key}"] for key in schema.paired}
        self._heads = {key: arrays[f"heads/{key}"] for key in schema.stacks}
        self.is_last, self.is_terminal = arrays["is_last"], arrays["is_terminal"]
        self._follower, self.has_followers = arrays["follower"], False
        self.final_row = arrays.get("final_row", self.is_last)  # none without pairs
        self._age = arrays.get("age", self.is_last)  # none without stacks
        self._head_row = arrays.get("head_row", self.is_last)
        self.tree = PriorityTree(n_rows) if with_priorities else None
        self._final_places, self._head_places = FreeRows(n_rows), FreeRows(n_rows)
        self.ends_known = self.terminal_known = True
        self.shortest_cut = NOTHING_CUT
        self._is_whole = True  # no change is under way, or was interrupted

    @classmethod
    def of_nothing(cls, n_sub_pools: int) -> Store:
        """What a pool has before its first transition: nothing can be added."""
        schema, sub_pools = Schema({}), SubPools(n_sub_pools, n_sub_pools)
        memory = Memory.local(store_bytes(schema, sub_pools.n_rows))
        return cls(schema, sub_pools, memory, WindowRules())

    @property
    def has_schema(self) -> bool:
        """Whether it is decided what is stored of a transition."""
        return bool(self.schema.columns)

    @property
    def nbytes(self) -> int:
        """Bytes in use: rows written so far, bookkeeping and priorities included."""
        rows = {index: slice(sub_pool.n_used) for index, sub_pool in enumerate(self.sub_pools)}
        n_bytes = sum(part.nbytes for part in self._parts(rows).values())
        return n_bytes + (0 if self.tree is None else self.tree.nbytes)

    def _parts(
        self, rows: Mapping[Any, slice], n_finals: int | None = None, n_heads: int | None = None
    ) -> dict[str, NDArray]:
        """Parts of all arrays that belong to some rows, by name; by default all finals and heads.

        They are views.
        """
        counts = {
            "finals": self._final_places.n_used if n_finals is None else n_finals,
            "heads": self._head_places.n_used if n_heads is None else n_heads,
        }
        parts: dict[str, NDArray] = {}
        for name, array in self._arrays.items():
            kind = name.partition("/")[0]
            pieces = {"": slice(counts[kind])} if kind in counts else rows
            parts |= {f"{name}{part}": array[piece] for part, piece in pieces.items()}
        return parts

    def __len__(self) -> int:
        return sum(self.sub_pools.lengths)

    # State -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All transitions; tensors of arrays are views."""
        rows = self.sub_pools.readable()
        arrays = self._parts(rows)
        if self.tree is not None:
            arrays |= {f"priorities{name}": self.tree.leaves[rows[name]] for name in rows}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return {
            "schema": self.schema.plain(),
            "numbers": torch.from_numpy(self.sub_pools.numbers.copy()),
            "n_finals": self._final_places.n_used,
            "n_heads": self._head_places.n_used,
            "ends_known": self.ends_known,
            "terminal_known": self.terminal_known,
            # Where a view has no bytes another one may begin, and torch.save wants one dtype per
            # place.
            "arrays": {n: t if t.numel() else t.clone() for n, t in tensors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Fill an empty store of the same schema, which is of no use afterwards if this raises.

        Raises:
            SpecError: If an array has another shape, or a disk is full.
        """
        self.sub_pools.numbers[...] = state["numbers"].numpy(force=True)
        rows, counts = self.sub_pools.readable(), (int(state["n_finals"]), int(state["n_heads"]))
        self._reserve(rows, *counts)
        targets, tensors = self._parts(rows, *counts), state["arrays"]
        if self.tree is not None:
            targets |= {f"priorities{name}": self.tree.leaves[rows[name]] for name in rows}
        for name in targets.keys() | tensors.keys():
            given, own = tensors[name].numpy(force=True), targets[name]
            if (given.shape, given.dtype) != (own.shape, own.dtype):
                raise SpecError(
                    f"{name!r} of the state is {given.dtype}{list(given.shape)} instead of "
                    f"{own.dtype}{list(own.shape)}",
                    fix="load another copy of what state_dict() returned",
                )
            own[...] = given
        self.ends_known = bool(state["ends_known"])
        self.terminal_known = bool(state["terminal_known"])
        self.has_followers = bool(self._follower.any())
        self._final_places.n_used, self._head_places.n_used = counts
        self._recover()

    # Writing ---------------------------------------------------------------------------------

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change rows and numbers within this; what was interrupted before is put right first."""
        if not self._is_whole:
            self._recover()
        self._is_whole = False
        yield
        self._is_whole = True

    def add(self, index: int, new: NewRows, priority: float = 1.0, *, joined: bool = False) -> None:
        """Add transitions to a sub-pool, and drop those that its rules name.

        Args:
            index: Number of the sub-pool.
            new: The transitions, whose last one ends its piece of an episode.
            priority: Priority of each.
            joined: Whether the first one continues the episode of the newest one there is.

        Raises:
            SpecError: If a disk is full; nothing was changed.
        """
        sub_pool, n = self.sub_pools[index], len(new.is_last)
        with self.changing():
            start, after = sub_pool.next, sub_pool.next + n
            n_kept = self._rules.length_after(sub_pool.capacity, len(sub_pool), start, n)
            if n_kept < n:  # the others would be dropped again
                new = new.part(slice(n - n_kept, n))
            oldest, first = after - n_kept, after - len(new.is_last)
            lasts = np.flatnonzero(new.is_last)
            pieces = sub_pool.pieces(first, after)
            n_finals = self._final_places.n_used_with(lasts.size)
            n_heads = self._head_places.n_used_with(lasts.size)
            self._reserve(dict(enumerate(pieces)), n_finals, n_heads)
            self._drop(sub_pool, min(start, oldest))
            newest = sub_pool.pieces(start - 1, start) if joined and len(sub_pool) else []
            self.ends_known &= new.ends_known
            self.terminal_known &= new.terminal_known
            rows = np.concatenate([np.arange(p.start, p.stop) for p in pieces] or [lasts])
            self._write(pieces, new, rows[lasts], lasts)
            if self.schema.stacks and rows.size:
                self._write_heads(rows, new, newest)
            sub_pool.numbers[0] = oldest
            sub_pool.numbers[1] = after
            for piece in newest:  # only now, as the newest row must always be a last one
                self._give_back_finals(piece)
                self.is_last[piece] = False
            if self.tree is not None:
                for piece in pieces:
                    self.tree.set(piece, priority)

    def _write(
        self, pieces: Sequence[slice], new: NewRows, last_rows: NDArray, lasts: NDArray
    ) -> None:
        start = 0
        for piece in pieces:
            stop = start + piece.stop - piece.start
            some = new if len(pieces) == 1 else new.part(slice(start, stop))
            for key, values in some.columns.items():
                values.values(self.columns[key][piece])
            self.is_last[piece], self.is_terminal[piece] = some.is_last, some.is_terminal
            if self.has_followers:
                self._follower[piece] = 0
            start = stop
        if self.schema.paired and lasts.size:
            finals = self._final_places.take(lasts.size)
            for key, values in new.finals.items():
                self.finals[key][finals] = values.part(lasts).values()
            self.final_row[last_rows] = finals

    def _write_heads(self, rows: NDArray, new: NewRows, newest: Sequence[slice]) -> None:
        """Write the ages of new rows and the frames before their pieces.

        Args:
            rows: Their rows.
            new: The transitions.
            newest: The row that the first one continues, if there is one.
        """
        numbers = np.arange(len(rows))
        begins = np.append(not newest, new.is_last[:-1])
        age = numbers - np.maximum.accumulate(np.where(begins, numbers, 0))
        firsts = np.flatnonzero(begins)
        heads = self._head_places.take(firsts.size)
        for key, stacks in new.stacks.items():
            self._heads[key][heads] = stacks.part(firsts).values()[:, :-1]
        for piece in newest:
            age[: new.is_last.argmax() + 1] += self._age[piece] + 1
            heads = np.append(self._head_row[piece], heads)
        piece_numbers = np.cumsum(begins) - (0 if newest else 1)
        self._age[rows] = np.minimum(age, self.schema.n_frames - 1)
        self._head_row[rows] = heads[piece_numbers]

    def join(self, before: NDArray, after: NDArray) -> None:
        """Let last rows be followed by others, both int64 ``[n]``: see ``SubPools.find``."""
        rows, is_there = self.sub_pools.find(before)
        self._follower[rows[is_there]] = after[is_there] + 1
        self.has_followers |= bool(is_there.any())

    def checksums(self, names: NDArray, *, after: bool) -> list[int]:
        """A checksum for each transition of what it starts from, or of what it led to."""
        rows, _ = self.sub_pools.find(names)
        keys = [*self.schema.paired, *self.schema.apart]
        if after:
            keys = list(map(successor_key, keys))
        values = self.take(rows, keys) | (self.take_after(rows) if after else {})
        flat = [values[key].reshape(len(rows), -1).view(np.uint8) for key in keys]
        return [zlib.crc32(row) for row in np.hstack([np.zeros((len(rows), 0), np.uint8), *flat])]

    def _drop(self, sub_pool: SubPool, stop: int) -> None:
        """Drop the transitions before number ``stop``."""
        pieces = sub_pool.pieces(sub_pool.oldest, stop)
        if self.tree is not None:  # first of all: what is gone is never drawn
            for piece in pieces:
                self.tree.set(piece, 0.0)
        if pieces:
            sub_pool.numbers[0] = stop
        for piece in pieces:
            self._give_back_finals(piece)
            if self.schema.stacks:
                self._head_places.give_back(self._heads_after(piece))

    def clear(self) -> None:
        """Drop all transitions; the next ones use the same rows, finals and heads."""
        with self.changing():
            if self.tree is not None:
                self.tree.set(slice(0, self.sub_pools.n_rows), 0.0)
            self.sub_pools.numbers[...] = self.sub_pools.numbers[:, 1:2]
            for places in (self._final_places, self._head_places):
                places.reset(0, np.zeros(0, int))
            self.ends_known = self.terminal_known = True
            self.shortest_cut = NOTHING_CUT

    def _recover(self) -> None:
        """Make the bookkeeping of finals, heads and priorities fit the rows in use."""
        self.sub_pools.numbers[:, 0] = self.sub_pools.numbers[:, :2].min(axis=1)
        rows = self.sub_pools.rows()
        if self.tree is not None:
            leaves = np.zeros(self.sub_pools.n_rows)
            leaves[rows] = self.tree.leaves[rows]
            self.tree.set(slice(0, len(leaves)), leaves)
        if self.schema.paired:
            finals = self.final_row[rows[self.is_last[rows]]]
            self._final_places.reset(self._final_places.n_used, finals)
        if self.schema.stacks:
            self._head_places.reset(self._head_places.n_used, self._heads_after(rows))

    def _give_back_finals(self, rows: slice) -> None:
        if self.schema.paired:
            self._final_places.give_back(self.final_row[rows][self.is_last[rows]])

    def _heads_after(self, rows: slice | NDArray) -> NDArray:
        """The heads that no row after these needs."""
        age, oldest = self._age[rows], self.schema.n_frames - 2
        is_end = (age == oldest) | (self.is_last[rows] & (age < oldest))
        heads: NDArray = self._head_row[rows][is_end]
        return heads

    def _reserve(self, rows: Mapping[Any, slice], n_finals: int, n_heads: int) -> None:
        """Make sure that a disk has room for rows, finals and heads before they are written.

        Raises:
            SpecError: If it has none.
        """
        if self._memory.kind != "memmap":
            return
        for part in self._parts(rows, n_finals, n_heads).values():
            start = part.ctypes.data - self._root.ctypes.data
            self._memory.reserve(start, start + part.nbytes)

    # Reading ---------------------------------------------------------------------------------

    # Rows past the end stand for those at the beginning: mode="wrap" costs nothing.

    def take(self, rows: NDArray, keys: Sequence[str] | None = None) -> dict[str, NDArray]:
        """Rows of those columns that are among some keys, copies ``[len(rows), ...]``."""
        wanted = self.columns if keys is None else [key for key in keys if key in self.columns]
        return {
            key: self._stacked(key, rows)
            if key in self._heads
            else self.columns[key].take(rows, 0, None, "wrap")
            for key in wanted
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
            if key in self._heads:
                values = self._stacked(key, rows, 1)
            else:
                values = self.columns[key].take(next_rows, 0, None, "wrap")
            values[ends] = self.finals[key].take(final_rows, 0)
            taken[successor_key(key)] = values
        return taken

    def followers(self, rows: NDArray) -> NDArray:
        """Rows with which the windows go on that some rows end; -1 where nothing is known of it."""
        names = self._follower.take(rows, 0, None, "wrap") - 1
        return np.where((found := self.sub_pools.find(names))[1], found[0], -1)

    def _stacked(self, key: str, rows: NDArray, n_ahead: int = 0) -> NDArray:
        """Stacks of frames, whose newest ones are so many rows ahead of some rows: 0 or 1."""
        n_frames = self.schema.n_frames
        back = np.arange(n_frames - 1, -1, -1) - n_ahead
        sources = self.sub_pools.ahead(rows[:, None], -back)
        stacks: NDArray = self.columns[key].take(sources, 0, None, "wrap")
        age = self._age.take(rows, 0, None, "wrap")
        numbers, frames = (back > age[:, None]).nonzero()
        heads = self._head_row.take(rows[numbers], 0, None, "wrap")
        stacks[numbers, frames] = self._heads[key][heads, frames + n_ahead + age[numbers]]
        return stacks

    def ends_in(self, index: int, state: Mapping[str, NDArray]) -> bool:
        """Whether the newest transition of a sub-pool ended in a state.

        Args:
            index: Number of the sub-pool.
            state: Values by key, others than those of the state among them.
        """
        newest = self.sub_pools.rows_of(np.array([index]), self.sub_pools.numbers[[index], 1] - 1)
        stored = self.take(newest) | self.take_after(newest)
        is_same = [
            stored[after].tobytes() == state[key].astype(stored[after].dtype).tobytes()
            for key in state.keys() & stored.keys()
            if (after := successor_key(key)) in stored
        ]
        return bool(is_same) and all(is_same)


def store_bytes(schema: Schema, n_rows: int) -> int:
    """Bytes of the memory of a store, most of which may never be touched."""
    return sum(carved_bytes(schema.arrays(), n_rows).values())


def make_store(
    schema: Schema,
    pool_size: int,
    n_sub_pools: int,
    rules: WindowRules,
    storage: str,
    directory: str | Path | None,
    *,
    with_priorities: bool,
) -> Store:
    """An empty store.

    Raises:
        SpecError: If the machine has not enough memory or the disk not enough room.
    """
    sub_pools = SubPools(pool_size, n_sub_pools, schema.n_frames - 1)
    n_rows = sub_pools.n_rows
    sizes = carved_bytes(schema.rows, n_rows)  # finals and heads are fewer

    def advice(n_free: int) -> str:
        fits = pool_size * n_free // sum(sizes.values())
        number = f" ({fits} would fit)" if fits else ""
        return f'lower pool_size{number}, or use storage="memmap"'

    if storage != "memmap":
        check_size(sizes, advice, f"a pool of {pool_size} transitions")
    n_bytes = store_bytes(schema, n_rows)
    memory = allocate(storage, n_bytes, directory=directory, n_used=sum(sizes.values()))
    return Store(schema, sub_pools, memory, rules, with_priorities=with_priorities)
