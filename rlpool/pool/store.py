"""Storage of a pool's transitions: sub-pools, and a column of rows per key.

A pair of keys ``x`` and ``_x``, such as ``frame`` and ``_frame``, is one column. The value after a
step is the next row's value, unless the row is the last of its piece of an episode. The values
after last rows are in ``finals``, once per piece::

    row         0   1   2   3   4
    frame       a   b   c   k   l
    is_last     -   -   x   -   x      after a step: b, c, finals[0], l, finals[1]
    piece       0   0   0   1   1

A row that ends a window of a ``Batcher`` is also a last one. If the episode continues in the next
window, ``follower`` identifies that transition by number and sub-pool, so that it can be checked
whether it still exists.

A row holds the newest frame of a stack. The older frames are those of the previous rows, back to
the first row of its piece, and before that in ``heads``, once per piece. ``age`` is the number of
rows of the piece before a row, at most the number of frames minus one. Finals are whole stacks.

The number of a piece is reused after its last row is dropped. Memory for the full size is mapped at
once; it costs nothing until it is written to.
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
    """Settings of a pool, with the meaning of the arguments of ``Pool``."""

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
        """Return the settings that a saved pool and the one that loads it must share."""
        kept = {k: v for k, v in vars(self).items() if k not in ("rules", "storage", "directory")}
        return {**kept, **vars(self.rules)}


class FreeRows:
    """Hands out rows of an array, returned ones first.

    Args:
        capacity: Number of rows.

    Attributes:
        n_used: Number of leading rows that are or have been in use.
    """

    def __init__(self, capacity: int) -> None:
        self.n_used = 0
        self._free = np.empty(capacity, np.int32)  # a stack of the first _n_free
        self._n_free = 0

    def n_used_with(self, n: int) -> int:
        """Return ``n_used`` after taking ``n`` more rows."""
        return self.n_used + max(0, n - self._n_free)

    def reserve(self, n: int) -> NDArray:
        """Reserve ``n`` free rows, int32 ``[n]``."""
        n_again = min(n, self._n_free)
        self._n_free -= n_again
        again = self._free[self._n_free : self._n_free + n_again]
        start, self.n_used = self.n_used, self.n_used + n - n_again
        return np.concatenate([again, np.arange(start, self.n_used, dtype=np.int32)])

    def give_back(self, rows: NDArray) -> None:
        """Return rows to the free ones."""
        self._free[self._n_free : self._n_free + rows.size] = rows
        self._n_free += rows.size


class Store:
    """Sub-pools of transitions.

    Args:
        schema: The schema.
        settings: Settings of the pool.

    Attributes:
        columns: Arrays ``[n_rows, ...]`` by key.
        finals: Values after the last row of each piece, by paired key.
        is_last: bool ``[n_rows]``: whether the next row does not continue the episode. Always True
            for the newest row of a sub-pool.
        is_terminal: bool ``[n_rows]``: whether the state after the step is terminal.
        piece: int32 ``[n_rows]``: the number of a row's piece.
        sub_pools: The sub-pools.
        has_followers: Whether any last row has a follower.
        ends_known: Whether the ends of episodes are known for all transitions.
        terminal_known: Whether terminal states are known for all transitions.
        shortest_cut: Steps of the shortest added row that ends within an episode and cannot be
            joined with the next one; 0 after the warning.
        tree: The priorities, or ``None``.

    Raises:
        SpecError: If there is not enough memory or disk space.
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
        """Whether the first transitions have determined the schema."""
        return bool(self.schema.columns)

    @property
    def nbytes(self) -> int:
        """Bytes in use: rows written so far, including bookkeeping and priorities."""
        rows = {
            index: slice(min(each.next - each.origin, each.n_rows))  # used since the last clear
            for index, each in enumerate(self.sub_pools)
        }
        n_bytes = sum(part.nbytes for part in self._parts(rows).values())
        return n_bytes + (0 if self.tree is None else self.tree.nbytes)

    def _parts(self, rows: Mapping[Any, slice], n_pieces: int | None = None) -> dict[str, NDArray]:
        """Return views of all arrays for some rows and pieces (by default all), by name."""
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
        """Return all transitions; tensors of arrays are views."""
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
            # An empty view may share its address with another, but torch.save requires one dtype
            # per address.
            "arrays": {n: t if t.numel() else t.clone() for n, t in tensors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Fill an empty store of the same schema, which is unusable if this raises.

        Raises:
            SpecError: If the disk is full; this or another error if an array is missing or wrong.
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
        """Add transitions to a sub-pool, and drop others by its rules.

        Args:
            index: Number of the sub-pool.
            new: The transitions; the last one ends its piece of an episode.
            priority: Priority of each.
            joined: Whether the first one continues the episode of the newest stored one.

        Raises:
            SpecError: If the disk is full; nothing has changed.
        """
        sub_pool, n = self.sub_pools[index], len(new.is_last)
        start, after = sub_pool.next, sub_pool.next + n
        n_kept = self._rules.length_after(sub_pool.capacity, len(sub_pool), start, n)
        if n_kept < n:  # the others would be dropped immediately
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
            except BaseException:  # from a signal handler: half is written
                self.clear()
                raise

    def _write(
        self, slices: Sequence[slice], new: NewRows, lasts: NDArray, newest: Sequence[int]
    ) -> None:
        """Write new rows.

        Args:
            slices: Their rows.
            new: The transitions.
            lasts: Indices of those that end a piece.
            newest: The row that the first one continues, if any.
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
        """Set the followers of last rows, both int64 ``[n]`` as for ``SubPools.find``."""
        rows, present = self.sub_pools.find(before)
        self._follower[rows[present]] = after[present] + 1
        self.has_followers |= bool(present.any())

    def checksums(self, names: NDArray, *, after: bool) -> list[int]:
        """Return a checksum of the values before or after each transition."""
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
        """Drop all transitions; the next ones reuse their rows and pieces."""
        with defer_signals():
            if self.tree is not None:
                self.tree.set(slice(0, self.sub_pools.n_rows), 0.0)
            self.sub_pools.numbers[...] = self.sub_pools.numbers[:, 1:2]
            self._piece_numbers = FreeRows(self.sub_pools.n_rows)
            self.ends_known = self.terminal_known = True
            self.shortest_cut = NOTHING_CUT

    def _reserve(self, rows: Mapping[Any, slice], n_pieces: int) -> None:
        """Reserve disk space for rows and pieces before they are written.

        Raises:
            SpecError: If the disk is full.
        """
        if self._memory.kind != "memmap":
            return
        for part in self._parts(rows, n_pieces).values():
            start = part.ctypes.data - self._root.ctypes.data
            self._memory.reserve(start, start + part.nbytes)

    # Reading ---------------------------------------------------------------------------------

    # Rows past the end wrap around to the beginning: mode="wrap" costs nothing.

    def take(self, rows: NDArray, keys: Sequence[str] | None = None) -> dict[str, NDArray]:
        """Copy rows ``[len(rows), ...]`` of the columns among ``keys``."""
        wanted = self.columns if keys is None else [key for key in keys if key in self.columns]
        return {
            key: self._stacked(key, rows)
            if key in self._heads
            else self.columns[key].take(rows, 0, None, "wrap")
            for key in wanted
        }

    def take_after(self, rows: NDArray, keys: Sequence[str] | None = None) -> dict[str, NDArray]:
        """Copy the values after the steps of some rows.

        Args:
            rows: int64 rows.
            keys: The keys to return, by default all.

        Returns:
            Values ``[len(rows), ...]`` by ``_key`` of the paired keys.
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
        """Return the rows that follow last rows in the next window, -1 where unknown."""
        names = self._follower.take(rows, 0, None, "wrap") - 1
        return np.where((found := self.sub_pools.find(names))[1], found[0], -1)

    def _stacked(self, key: str, rows: NDArray, n_ahead: int = 0) -> NDArray:
        """Return stacks of frames whose newest frame is ``n_ahead`` (0 or 1) rows ahead."""
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
        """Whether new transitions start in the state after the newest one of a sub-pool."""
        newest = self.sub_pools.rows_of(np.array([index]), self.sub_pools.numbers[[index], 1] - 1)
        ends = self.take_after(newest)
        starts = {successor_key(key): new.columns[key].values() for key in self.schema.paired}
        return bool(ends) and all(ends[key].tobytes() == starts[key].tobytes() for key in ends)


def _allocated(schema: Schema, settings: Settings, n_rows: int) -> Memory:
    """Allocate the memory of a store."""
    pool_size, sizes = settings.pool_size, carved_bytes(schema.rows, n_rows)  # pieces are fewer
    n_bytes = sum(carved_bytes(schema.arrays(), n_rows).values())
    if settings.storage == "memmap":
        return allocate("memmap", n_bytes, directory=settings.directory)

    def advice(n_free: int) -> str:
        fits = pool_size * n_free // sum(sizes.values())
        number = f" ({fits} would fit)" if fits else ""
        return f'lower pool_size{number}, or use storage="memmap"'

    check_size(sizes, advice, f"a pool of {pool_size} transitions")
    return Memory.local(n_bytes)  # most of it may never be touched
