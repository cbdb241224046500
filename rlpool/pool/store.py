"""Where a pool keeps its transitions: sub-pools, and a column of rows per key.

A key ``x`` that comes with ``_x``, such as ``frame`` and ``_frame``, is one column. The value
after a step is the next row's value, unless the row is the last of its piece of an episode. The
values after those are in ``finals``, once per piece::

    row         0   1   2   3   4
    frame       a   b   c   k   l
    is_last     -   -   x   -   x      after a step: b, c, finals[0], l, finals[1]
    piece       0   0   0   1   1

A row that ends a window of a ``Batcher`` is a last one too. Where the episode goes on in the next
window, ``follower`` says which transition that is: by its number and sub-pool, so that it shows
whether it is still there.

Of a stack of frames, a row holds the newest one. The older ones are those of the rows before it, up
to the first row of its piece. The frames before that one are in ``heads``, once per piece. ``age``
says how many rows of the piece come before a row, at most all but one frame of a stack. Finals are
whole stacks.

The number of a piece is used again when its last row is dropped. Memory for the full size is mapped
at once, and costs nothing until it is written to.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlpool.data.storage import Memory, NDArray, allocate, carve, carved_bytes
from rlpool.errors import SpecError
from rlpool.machine.interrupts import defer_signals
from rlpool.machine.limits import check_size
from rlpool.pool.ingest import NOTHING_CUT, NewRows
from rlpool.pool.priorities import PriorityTree
from rlpool.pool.schema import OF_PIECES, Schema
from rlpool.pool.sub_pool import SubPool, SubPools, WindowRules
from rlpool.slots.blocks import successor_key


@dataclass(frozen=True)
class Settings:
    """What a pool is made with; see ``Pool``."""

    pool_size: int
    n_workers: int
    rules: WindowRules
    random: bool
    keys: list[str] | None
    info_keys: list[str]
    storage: str
    directory: str | Path | None
    priority_exponent: float | None
    frame_stack: int | None

    def saved(self) -> dict[str, Any]:
        """Those that a saved pool and the one that loads it must have in common."""
        kept = {k: v for k, v in vars(self).items() if k not in ("rules", "storage", "directory")}
        return {**kept, **vars(self.rules)}


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

    def reserve(self, n: int) -> NDArray:
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


class Store:
    """Sub-pools of transitions.

    Args:
        schema: What is stored.
        settings: What the pool is made with.

    Attributes:
        columns: Key to array ``[n_rows, ...]``.
        finals: Paired key to the value after the last row of each piece.
        is_last: bool ``[n_rows]``: whether the next row does not continue the episode. The newest
            row of a sub-pool always is.
        is_terminal: bool ``[n_rows]``: whether the state after the step has no future.
        piece: int32 ``[n_rows]``: the number of a row's piece.
        sub_pools: The sub-pools.
        has_followers: Whether any last row has a follower.
        ends_known: Whether it is known of all transitions where episodes end.
        terminal_known: Whether it is known of all transitions if they are terminal.
        shortest_cut: Steps of the shortest row that was added, ends within an episode, and cannot
            be joined with what follows; 0 once there was a warning.
        tree: The priorities, or ``None``.

    Raises:
        SpecError: If the machine has not enough memory or the disk not enough room.
    """

    def __init__(self, schema: Schema, settings: Settings) -> None:
        self.schema, self._rules = schema, settings.rules
        self.sub_pools = SubPools(settings.pool_size, settings.n_workers, schema.n_frames - 1)
        n_rows = self.sub_pools.n_rows
        self._memory = _allocated(schema, settings, n_rows)
        self._root = self._memory.root()
        arrays = self._arrays = carve(self._root, schema.arrays(), n_rows)
        self.columns = {key: arrays[f"columns/{key}"] for key in schema.columns}
        self.finals = {key: arrays[f"finals/{key}"] for key in schema.paired}
        self._heads = {key: arrays[f"heads/{key}"] for key in schema.stacks}
        self.is_last, self.is_terminal = arrays["is_last"], arrays["is_terminal"]
        self._follower, self.has_followers = arrays["follower"], False
        self.piece, self._age = arrays["piece"], arrays.get("age", self.is_last)
        self.tree = None if settings.priority_exponent is None else PriorityTree(n_rows)
        self._piece_numbers = FreeRows(n_rows)
        self.ends_known = self.terminal_known = True
        self.shortest_cut = NOTHING_CUT

    @property
    def has_schema(self) -> bool:
        """Whether it is decided what is stored of a transition."""
        return bool(self.schema.columns)

    @property
    def nbytes(self) -> int:
        """Bytes in use: rows written so far, bookkeeping and priorities included."""
        rows = {
            index: slice(min(each.next - each.origin, each.n_rows))  # used since all was cleared
            for index, each in enumerate(self.sub_pools)
        }
        n_bytes = sum(part.nbytes for part in self._parts(rows).values())
        return n_bytes + (0 if self.tree is None else self.tree.nbytes)

    def _parts(self, rows: Mapping[Any, slice], n_pieces: int | None = None) -> dict[str, NDArray]:
        """Parts of all arrays that belong to some rows and pieces, by name; by default all pieces.

        They are views.
        """
        pieces = {"": slice(self._piece_numbers.n_used if n_pieces is None else n_pieces)}
        return {
            f"{name}{part}": array[some]
            for name, array in self._arrays.items()
            for part, some in (pieces if name.startswith(OF_PIECES) else rows).items()
        }

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
            "specs": {
                key: torch.empty(0, *spec.shape, dtype=spec.torch_dtype, device="cpu")
                for key, spec in self.schema.specs.items()
            },
            "infos": list(self.schema.infos),
            "numbers": torch.from_numpy(self.sub_pools.numbers.copy()),
            "n_pieces": self._piece_numbers.n_used,
            "ends_known": self.ends_known,
            "terminal_known": self.terminal_known,
            # Where a view has no bytes another one may begin, and torch.save wants one dtype per
            # place.
            "arrays": {n: t if t.numel() else t.clone() for n, t in tensors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Fill an empty store of the same schema, which is of no use afterwards if this raises.

        Raises:
            SpecError: If a disk is full; this and other errors if an array is missing, or another.
        """
        self.sub_pools.numbers[...] = state["numbers"].numpy(force=True)
        rows, n_pieces = self.sub_pools.readable(), int(state["n_pieces"])
        self._reserve(rows, n_pieces)
        targets, tensors = self._parts(rows, n_pieces), state["arrays"]
        if self.tree is not None:
            targets |= {f"priorities{name}": self.tree.leaves[rows[name]] for name in rows}
        for name, target in targets.items():
            given = tensors[name].numpy(force=True)
            if given.shape != target.shape:
                raise SpecError(f"{name!r} has shape {given.shape} instead of {target.shape}")
            np.copyto(target, given, "no")
        self.ends_known = bool(state["ends_known"])
        self.terminal_known = bool(state["terminal_known"])
        self.has_followers = bool(self._follower.any())
        numbers, used = self._piece_numbers.reserve(n_pieces), self.piece[self.sub_pools.rows()]
        self._piece_numbers.give_back(np.setdiff1d(numbers, used))
        if self.tree is not None:
            self.tree.set(slice(0, self.sub_pools.n_rows), self.tree.leaves)

    # Writing ---------------------------------------------------------------------------------

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
        start, after = sub_pool.next, sub_pool.next + n
        n_kept = self._rules.length_after(sub_pool.capacity, len(sub_pool), start, n)
        if n_kept < n:  # the others would be dropped again
            new = new.part(slice(n - n_kept, n))
        oldest, first = after - n_kept, after - len(new.is_last)
        lasts = np.flatnonzero(new.is_last)
        slices = sub_pool.slices(first, after)
        self._reserve(dict(enumerate(slices)), self._piece_numbers.n_used_with(lasts.size))
        with defer_signals():
            try:
                self._drop(sub_pool, min(start, oldest))
                before = sub_pool.slices(start - 1, start) if joined and len(sub_pool) else []
                if slices:
                    self._write(slices, new, lasts, [each.start for each in before])
                sub_pool.numbers[0], sub_pool.numbers[1] = oldest, after
                self.ends_known &= new.ends_known
                self.terminal_known &= new.terminal_known
                if self.tree is not None:
                    for each in slices:
                        self.tree.set(each, priority)
            except BaseException:  # of a handler that ran out of patience: half is written
                self.clear()
                raise

    def _write(
        self, slices: Sequence[slice], new: NewRows, lasts: NDArray, newest: Sequence[int]
    ) -> None:
        """Write new rows.

        Args:
            slices: Where they are.
            new: The transitions.
            lasts: Which of them end a piece.
            newest: The row that the first one continues, if there is one.
        """
        pieces = self._piece_numbers.reserve(len(lasts) - len(newest))
        if newest:
            pieces = np.concatenate([self.piece[newest], pieces])
        for key, values in new.finals.items():
            self.finals[key][pieces] = values.part(lasts).values()
        number = new.is_last.cumsum() - new.is_last  # of each row's piece
        own = {"piece": pieces[number], "is_last": new.is_last, "is_terminal": new.is_terminal}
        if self.schema.stacks:
            firsts = np.append(0, lasts[:-1] + 1)
            for key, heads in self._heads.items():
                starts = new.columns[key].part(firsts[len(newest) :])
                heads[pieces[len(newest) :]] = starts.values()[:, :-1]
            age = np.arange(len(number)) - firsts[number]
            if newest:
                age[number == 0] += self._age[newest] + 1
            own["age"] = np.minimum(age, self.schema.n_frames - 1)
        start = 0
        for each in slices:
            stop = start + each.stop - each.start
            for key, values in new.columns.items():
                some = values if len(slices) == 1 else values.part(slice(start, stop))
                some = some.newest_frames() if key in self._heads else some
                some.values(self.columns[key][each])
            for name, array in own.items():
                self._arrays[name][each] = array[start:stop]
            if self.has_followers:
                self._follower[each] = 0
            start = stop
        self.is_last[newest] = False

    def join(self, before: NDArray, after: NDArray) -> None:
        """Let last rows be followed by others, both int64 ``[n]``: see ``SubPools.find``."""
        rows, present = self.sub_pools.find(before)
        self._follower[rows[present]] = after[present] + 1
        self.has_followers |= bool(present.any())

    def checksums(self, names: NDArray, *, after: bool) -> list[int]:
        """A checksum for each transition of what it starts from, or of what it led to."""
        rows, _ = self.sub_pools.find(names)
        values = self.take_after(rows) if after else self.take(rows, self.schema.paired)
        flat = [each.reshape(len(rows), -1).view(np.uint8) for each in values.values()]
        return [zlib.crc32(row) for row in np.hstack([np.zeros((len(rows), 0), np.uint8), *flat])]

    def _drop(self, sub_pool: SubPool, stop: int) -> None:
        """Drop the transitions before number ``stop``."""
        slices = sub_pool.slices(sub_pool.oldest, stop)
        for each in slices:
            if self.tree is not None:
                self.tree.set(each, 0.0)
            self._piece_numbers.give_back(self.piece[each][self.is_last[each]])
        if slices:
            sub_pool.numbers[0] = stop

    def clear(self) -> None:
        """Drop all transitions; the next ones use the same rows and pieces."""
        with defer_signals():
            if self.tree is not None:
                self.tree.set(slice(0, self.sub_pools.n_rows), 0.0)
            self.sub_pools.numbers[...] = self.sub_pools.numbers[:, 1:2]
            self._piece_numbers = FreeRows(self.sub_pools.n_rows)
            self.ends_known = self.terminal_known = True
            self.shortest_cut = NOTHING_CUT

    def _reserve(self, rows: Mapping[Any, slice], n_pieces: int) -> None:
        """Make sure that a disk has room for rows and pieces before they are written.

        Raises:
            SpecError: If it has none.
        """
        if self._memory.kind != "memmap":
            return
        for part in self._parts(rows, n_pieces).values():
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
        pieces = self.piece.take(rows.take(ends), 0, None, "wrap")
        for key in wanted:
            if key in self._heads:
                values = self._stacked(key, rows, 1)
            else:
                values = self.columns[key].take(next_rows, 0, None, "wrap")
            values[ends] = self.finals[key].take(pieces, 0)
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
        pieces = self.piece.take(rows[numbers], 0, None, "wrap")
        stacks[numbers, frames] = self._heads[key][pieces, frames + n_ahead + age[numbers]]
        return stacks

    def ends_in(self, index: int, new: NewRows) -> bool:
        """Whether the newest transition of a sub-pool ended where a new one starts."""
        newest = self.sub_pools.rows_of(np.array([index]), self.sub_pools.numbers[[index], 1] - 1)
        ends = self.take_after(newest)
        starts = {successor_key(key): new.columns[key].values() for key in self.schema.paired}
        return bool(ends) and all(ends[key].tobytes() == starts[key].tobytes() for key in ends)


def _allocated(schema: Schema, settings: Settings, n_rows: int) -> Memory:
    """Memory for a store."""
    pool_size, sizes = settings.pool_size, carved_bytes(schema.rows, n_rows)  # pieces are fewer
    n_bytes = sum(carved_bytes(schema.arrays(), n_rows).values())
    if settings.storage == "memmap":
        return allocate("memmap", n_bytes, directory=settings.directory)

    def advice(n_free: int) -> str:
        fits = pool_size * n_free // sum(sizes.values())
        number = f" ({fits} would fit)" if fits else ""
        return f'lower pool_size{number}, or use storage="memmap"'

    check_size(sizes, advice, f"a pool of {pool_size} transitions")
    return Memory.local(n_bytes)  # most of it is never touched
