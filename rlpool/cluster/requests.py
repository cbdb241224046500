"""Requests that are divided among nodes, and put together again in the caller's memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from rlpool.batch.claims import Shares
from rlpool.batch.requests import EpisodeRequest, Policy, Request, WindowRequest
from rlpool.cluster.assignment import Assignment
from rlpool.cluster.shards import PolicyAt, Rows, Shard, copy_into, with_padding
from rlpool.data.infos import part_of
from rlpool.errors import WorkerError
from rlpool.record.tape import WindowTapes
from rlpool.slots.blocks import StepSpecs
from rlpool.slots.trajectories import Glue


class Divided(Request):
    """A request whose rows are run in parts.

    Attributes:
        left: Ranges of rows that nobody runs; what was lost comes first.
        n_there: How many rows were put.
    """

    left: list[range]
    n_there = 0

    @property
    def is_complete(self) -> bool:
        """See ``Request.is_complete``."""
        return self.n_there == self.n_rows and self.error is None

    @property
    def n_left(self) -> int:
        """Rows that were not given to anybody."""
        return sum(map(len, self.left))

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

    @abstractmethod
    def next_rows(self, node: int, size: int) -> range | None:
        """Take rows that nobody runs, for a node; ``None`` if there are none for it.

        Args:
            node: Number of the node.
            size: How many at most, a multiple of the lanes of a worker.
        """

    def lose(self, rows: range) -> None:
        """Let rows be run again."""
        self.left.insert(0, rows)

    @abstractmethod
    def shard(self, rows: range, number: int, node: int, policy: PolicyAt) -> Shard:
        """What a node is told, with a number for the shard."""

    def put(self, rows: range, result: Rows) -> None:
        """Copy what a node returned to where it belongs."""
        copy_into(self.running_block, rows.start, result)


@dataclass(eq=False)
class Flight:
    """A shard that was sent.

    Attributes:
        request: What it is a part of.
        rows: Which rows.
    """

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
        self.left = [range(self.n_rows)]
        self._next = 0  # the first row that was not given to anybody

    def begin(
        self, assignment: Assignment, part_size: int, n_lanes: int, step: StepSpecs | None
    ) -> None:
        """See ``Divided``.

        Which of several nodes runs a fixed part depends on time, and unseeded lanes on the node.
        """
        if step is None or step.resets_together:
            self.is_reproducible = assignment.n_parts == 1
            self.part_size = -(-self.n_rows // (assignment.n_parts * n_lanes)) * n_lanes

    def slots_wanted(self, n_free: int, n_slots: int) -> int:
        """One slot per episode; all of them if it has more episodes than there are slots."""
        self._in_place = self.n_rows <= n_slots
        if not self._in_place:
            return n_slots if n_free == n_slots else 0
        return self.n_rows if n_free >= self.n_rows else 0

    def next_rows(self, node: int, size: int) -> range | None:
        """See ``Divided``; what was lost is not divided differently."""
        if not self.left:
            return None
        rows = self.left.pop(0)
        if rows.start == self._next:
            size = self.part_size or size
            rows, rest = rows[:size], rows[size:]
            self.left += [rest] if rest else []
            self._next = rows.stop
        return rows

    def shard(self, rows: range, number: int, node: int, policy: PolicyAt) -> Shard:
        """See ``Divided``."""
        request = EpisodeRequest(
            number=number,
            n_rows=len(rows),
            infos=part_of(self.infos, rows),
            policy=Policy(),
            root=self.root,
            first=self.first + rows.start,
            given_seeds=self.given_seeds and self.given_seeds[rows.start : rows.stop],
        )
        return Shard(request=request, policy=policy, first=rows.start)

    def put(self, rows: range, result: Rows) -> None:
        """See ``Divided``."""
        layout = self.running_block.layout
        if self._in_place and result.lengths.max(initial=0) <= layout.n_timesteps:
            super().put(rows, result)
            return
        if self._glue is None:
            self._glue = Glue(layout, self.n_rows)
        self._glue.add(np.array(rows), 0, with_padding(result))
        self._arrived[rows.start : rows.stop] = True

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
                for seed in Shares(layout, size, self.first + start).seeds(self.root)
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
        parts = [list(rows) for _, rows in groupby(range(self.n_rows), self._part_of)]
        self.left = [range(rows[0], rows[-1] + 1) for rows in parts]
        self.remaining.update(lane // self.n_lanes for lane in self.lanes)
        if self.can_be_repeated():
            assignment.balance()
            return
        for part in {self._part_of(rows[0]) for rows in parts} & assignment.moved.keys():
            raise assignment.moved[part] or WorkerError(
                f"lanes from {part * part_size} on are lost"
            )

    def _part_of(self, row: int) -> int:
        return self.lanes[row] // self._part_size

    def next_rows(self, node: int, size: int) -> range | None:
        """See ``Divided``."""
        parts = self._assignment.parts_of(node)
        for rows in self.left:
            if self._part_of(rows.start) in parts:
                self.left.remove(rows)
                return rows
        return None

    def lose(self, rows: range) -> None:
        """See ``Divided``; whoever ran it is past it."""
        super().lose(rows)
        self._assignment.move(self._part_of(rows.start))

    def shard(self, rows: range, number: int, node: int, policy: PolicyAt) -> Shard:
        """See ``Divided``."""
        part = self._part_of(rows.start)
        first = part * self._part_size
        lanes = [lane - first for lane in self.lanes[rows.start : rows.stop]]
        tapes = None
        if part in self._assignment.moved and not self.is_first and self.tapes is not None:
            tapes = WindowTapes(self._part_size)
            tapes.tapes = {lane: self.tapes.tapes[first + lane] for lane in lanes}
        request = WindowRequest(
            number=number,
            n_rows=len(rows),
            infos=part_of(self.infos, range(first, first + self._part_size)),
            policy=Policy(),
            root=self.root,
            lanes=lanes,
            n_lanes=self.n_lanes,
            n_resets=self.n_resets,
            n_windows=self.n_windows,
            is_first=self.is_first,
            first_lane=first,
            tapes=tapes,
        )
        parts = frozenset(self._assignment.parts_of(node))
        return Shard(request=request, policy=policy, first=first, part=part, parts=parts)

    def put(self, rows: range, result: Rows) -> None:
        """See ``Divided``."""
        super().put(rows, result)
        part, lanes = self._part_of(rows.start), self.lanes[rows.start : rows.stop]
        self.remaining.difference_update(lane // self.n_lanes for lane in lanes)
        first, control = part * self._part_size, self.running_block.arrays.control
        for lane, steps_before in result.lanes_left.items():
            control["running"].reshape(-1)[first + lane] = first + lane
            control["steps_before"].reshape(-1)[first + lane] = steps_before
        self._assignment.moved.pop(part, None)
