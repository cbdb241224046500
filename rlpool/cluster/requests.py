"""Requests that are divided among nodes, and put together again in the caller's memory."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlpool.batch.claims import Shares
from rlpool.batch.requests import EpisodeRequest, Request, WindowRequest, part_of
from rlpool.cluster.assignment import Assignment
from rlpool.cluster.shards import (
    EpisodeShard,
    PolicyAt,
    Rows,
    Shard,
    WindowShard,
    copy_into,
    with_padding,
)
from rlpool.errors import WorkerError
from rlpool.memory.storage import Array
from rlpool.slots.blocks import StepSpecs
from rlpool.slots.trajectories import Glue


class Divided(Request):
    """A request whose rows are run in parts."""

    @abstractmethod
    def begin(
        self, assignment: Assignment, part_size: int, n_lanes: int, step: StepSpecs | None
    ) -> None:
        """Prepare to be run by nodes.

        Args:
            assignment: Which node runs which part of all lanes.
            part_size: Lanes of a part.
            n_lanes: Lanes of a worker.
            step: What a step consists of, if it is known.

        Raises:
            RlpoolError: If lanes are in the middle of episodes that are lost.
        """

    @property
    @abstractmethod
    def n_left(self) -> int:
        """Rows that were not given to anybody."""

    @property
    @abstractmethod
    def n_there(self) -> int:
        """Rows that were put."""

    @abstractmethod
    def next_rows(self, node: int, size: int) -> range | None:
        """Take rows that nobody runs, for a node; ``None`` if there are none for it.

        Args:
            node: Number of the node.
            size: How many at most, a multiple of the lanes of a worker.
        """

    @abstractmethod
    def lose(self, rows: range) -> None:
        """Let rows be run again."""

    @abstractmethod
    def shard(self, rows: range, number: int, policy: PolicyAt) -> Shard:
        """What a node is told."""

    @abstractmethod
    def put(self, rows: range, result: Rows) -> None:
        """Copy what a node returned to where it belongs."""


@dataclass(eq=False)
class Flight:
    """A shard that was sent.

    Attributes:
        number: Its number.
        request: What it is a part of.
        rows: Which rows.
    """

    number: int
    request: Divided
    rows: range


@dataclass(eq=False, kw_only=True)
class DividedEpisodes(EpisodeRequest, Divided):
    """Complete episodes, one per row.

    Attributes:
        part_size: Rows of the fixed parts into which it is divided if lanes are reset together:
            what an episode is depends on the part that it is in. 0 to divide it as nodes have time.
    """

    part_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._next = 0  # the first row that was not given to anybody
        self._again: list[range] = []  # lost
        self._is_there = np.zeros(self.n_rows, bool)

    @property
    def is_complete(self) -> bool:
        """See ``Request.is_complete``."""
        return self.error is None and bool(self._is_there.all())

    @property
    def n_left(self) -> int:
        """See ``Divided``."""
        return self.n_rows - self._next + sum(len(rows) for rows in self._again)

    def begin(
        self, assignment: Assignment, part_size: int, n_lanes: int, step: StepSpecs | None
    ) -> None:
        """See ``Divided``.

        Which of several nodes runs a fixed part depends on time, and unseeded lanes on the node.
        """
        if step is None or step.resets_together:
            self.is_reproducible = assignment.n_parts == 1
            self.part_size = -(-self.n_rows // (assignment.n_parts * n_lanes)) * n_lanes

    @property
    def n_there(self) -> int:
        """See ``Divided``."""
        return int(self._is_there.sum())

    def _at_home(self) -> Array:
        n_slots = self.running_block.layout.n_slots
        is_at_home: Array = (self._is_there & ~self._arrived)[:n_slots]
        return is_at_home

    def slots_wanted(self, n_free: int, n_slots: int) -> int:
        """One slot per episode; all of them if it has more episodes than there are slots."""
        self._in_place = self.n_rows <= n_slots
        if not self._in_place:
            return n_slots if n_free == n_slots else 0
        return self.n_rows if n_free >= self.n_rows else 0

    def next_rows(self, node: int, size: int) -> range | None:
        """See ``Divided``; what was lost comes first."""
        if self._again:
            return self._again.pop(0)
        if self._next == self.n_rows:
            return None
        size = self.part_size or size
        rows = range(self._next, min(self._next + size, self.n_rows))
        self._next = rows.stop
        return rows

    def lose(self, rows: range) -> None:
        """See ``Divided``."""
        self._again.append(rows)

    def shard(self, rows: range, number: int, policy: PolicyAt) -> EpisodeShard:
        """See ``Divided``."""
        return EpisodeShard(
            number=number,
            root=self.root,
            first=self.first + rows.start,
            given_seeds=self.given_seeds and self.given_seeds[rows.start : rows.stop],
            start=rows.start,
            n_rows=len(rows),
            infos=part_of(self.infos, rows),
            policy=policy,
        )

    def put(self, rows: range, result: Rows) -> None:
        """See ``Divided``."""
        if self._is_there[rows.start]:
            return  # it arrived twice
        block = self.running_block
        if self._in_place and result.lengths.max(initial=0) <= block.layout.n_timesteps:
            copy_into(block, rows.start, result)
        else:
            if self._glue is None:
                self._glue = Glue(block.layout, self.n_rows)
            self._glue.add(np.array(rows), 0, with_padding(result))
            self._arrived[rows.start : rows.stop] = True
        self._is_there[rows.start : rows.stop] = True

    @property
    def _seeds(self) -> Callable[[], list[int]]:
        layout = self.running_block.layout
        if not layout.step.resets_together:
            return super()._seeds
        parts = range(0, self.n_rows, self.part_size)
        sizes = [min(self.part_size, self.n_rows - start) for start in parts]

        def seeds() -> list[int]:
            return [
                seed
                for start, size in zip(parts, sizes, strict=True)
                for seed in Shares(layout, size).seeds(self.root, self.first + start)
            ]

        return seeds


@dataclass(eq=False, kw_only=True)
class DividedWindow(WindowRequest, Divided):
    """The next steps of every running lane; the lanes of each part are run together."""

    def begin(
        self, assignment: Assignment, part_size: int, n_lanes: int, step: StepSpecs | None
    ) -> None:
        """See ``Divided``."""
        self._assignment, self._part_size = assignment, part_size
        self._left = {lane // part_size for lane in self.lanes}  # that nobody runs
        self._missing = set(self._left)
        if self.can_be_repeated():
            assignment.balance()
            return
        for part in self._left & assignment.moved.keys():
            raise assignment.moved[part] or WorkerError(
                f"lanes from {part * part_size} on are lost"
            )

    @property
    def is_complete(self) -> bool:
        """See ``Request.is_complete``."""
        return self.block is not None and not self._missing and self.error is None

    @property
    def n_left(self) -> int:
        """See ``Divided``."""
        return sum(len(self._rows_in(part)) for part in self._left)

    @property
    def n_there(self) -> int:
        """See ``Divided``."""
        return self.n_rows - sum(len(self._rows_in(part)) for part in self._missing)

    def next_rows(self, node: int, size: int) -> range | None:
        """See ``Divided``."""
        for part in self._assignment.parts_of(node):
            if part in self._left:
                self._left.remove(part)
                return self._rows_in(part)
        return None

    def _rows_in(self, part: int) -> range:
        first = part * self._part_size
        bounds = bisect_left(self.lanes, first), bisect_left(self.lanes, first + self._part_size)
        return range(*bounds)

    def _part_with(self, rows: range) -> int:
        return self.lanes[rows.start] // self._part_size

    def lose(self, rows: range) -> None:
        """See ``Divided``; whoever ran it is past it."""
        part = self._part_with(rows)
        self._left.add(part)
        self._assignment.move(part)

    def shard(self, rows: range, number: int, policy: PolicyAt) -> WindowShard:
        """See ``Divided``."""
        part = self._part_with(rows)
        first = part * self._part_size
        lanes = [lane - first for lane in self.lanes[rows.start : rows.stop]]
        tapes = None
        if part in self._assignment.moved and not self.is_first and self.tapes is not None:
            tapes = {lane: self.tapes.tapes[first + lane] for lane in lanes}
        return WindowShard(
            number=number,
            root=self.root,
            part=part,
            parts=frozenset(self._assignment.parts_with(part)),
            first_lane=first,
            lanes=lanes,
            n_resets=self.n_resets,
            n_windows=self.n_windows,
            is_first=self.is_first,
            infos=part_of(self.infos, range(first, first + self._part_size)),
            policy=policy,
            tapes=tapes,
        )

    def put(self, rows: range, result: Rows) -> None:
        """See ``Divided``."""
        part = self._part_with(rows)
        if part not in self._missing:
            return  # it arrived twice
        block, first = self.running_block, part * self._part_size
        copy_into(block, rows.start, result)
        control = block.arrays.control
        for lane, steps_before in result.lanes_left.items():
            control["running"].reshape(-1)[first + lane] = first + lane
            control["steps_before"].reshape(-1)[first + lane] = steps_before
        self._assignment.moved.pop(part, None)
        self._missing.remove(part)
