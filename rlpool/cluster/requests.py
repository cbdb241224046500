"""Requests that are divided among nodes, and put together again in the caller's memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from rlpool.batch.messages import Infos
from rlpool.batch.requests import EpisodeRequest, Request, WindowRequest
from rlpool.batch.shares import Shares
from rlpool.cluster.shards import (
    EpisodeShard,
    PolicyAt,
    Rows,
    Shard,
    copy_into,
    with_padding,
)
from rlpool.slots.trajectories import Derivation, Glue


class Divided(Request):
    """A request whose rows are run in parts."""

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
        self._reproducible: Any = None

    @property
    def is_complete(self) -> bool:
        """See ``Request.is_complete``."""
        return self.error is None and bool(self._is_there.all())

    @property
    def n_left(self) -> int:
        """See ``Divided``."""
        return self.n_rows - self._next + sum(len(rows) for rows in self._again)

    def divide(self, n_parts: int, n_lanes: int) -> None:
        """Divide it into fixed parts of whole rows of a worker's lanes."""
        self.part_size = -(-self.n_rows // (n_parts * n_lanes)) * n_lanes

    @property
    def n_there(self) -> int:
        """See ``Divided``."""
        return int(self._is_there.sum())

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
            execution=self.execution,
            first=self.first + rows.start,
            start=rows.start,
            n_rows=len(rows),
            infos=_part_of(self.infos, rows),
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
        if result.reproducible is not None:
            if self._reproducible is None:
                self._reproducible = np.ones(self.n_rows, bool)
            self._reproducible[rows.start : rows.stop] = result.reproducible
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

    def _info(
        self, episodes: Sequence[int], seeds: Callable[[], Sequence[int]]
    ) -> dict[str, Derivation]:
        info = super()._info(episodes, seeds)
        if self._reproducible is not None:
            info["reproducible"] = partial(torch.from_numpy, self._reproducible)
        return info


@dataclass(eq=False, kw_only=True)
class DividedWindow(WindowRequest, Divided):
    """The next steps of every running lane; every node runs its own lanes.

    Attributes:
        n_node_lanes: Lanes of a node.
        n_nodes: Nodes.
        homes: Which node runs the lanes of which part, changed as nodes are lost.
        before: By part, the shard of its last window.
    """

    n_node_lanes: int
    homes: list[int]
    before: dict[int, int] = field(default_factory=dict)


def _part_of(infos: Infos, rows: range) -> Infos:
    """Rows of infos; views."""
    agent_info, env_info = (
        {key: array[rows.start : rows.stop] for key, array in info.items()} for info in infos
    )
    return agent_info, env_info
