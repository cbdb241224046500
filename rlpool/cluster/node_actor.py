"""The process that Ray starts on a node: a ``Node``, its logs, and its name.

Every method may wait; Ray runs them in threads.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from typing import Any

import ray

from rlpool.cluster.node import Node
from rlpool.cluster.shards import Look, NodeReport, NodeSetup, Outcome, Shard
from rlpool.observe.stats import Stats
from rlpool.workers.logs import Levels, encode, set_levels

_MOST_RECORDS = 10_000
"""Records that wait for the caller to ask; older ones are dropped and counted."""

N_CALLS = 32
"""Calls at once: two shards, what was cancelled, and questions."""


class _Records(logging.Handler):
    """Keeps what this process logs until the caller asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[bytes] = deque()
        self._n_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record, of this process or of a worker."""
        if len(self._lines) >= _MOST_RECORDS:
            self._n_dropped += 1
            return
        try:
            self._lines.append(encode(record, getattr(record, "worker", -1)))
        except Exception:  # from the user's objects
            self._n_dropped += 1

    def take(self) -> tuple[list[bytes], int]:
        """The lines since the last time, and how many were dropped."""
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        n_dropped, self._n_dropped = self._n_dropped, 0
        return lines, n_dropped


Said = tuple[list[bytes], int]
"""Lines of logs, and how many were dropped."""


class NotBegunError(LookupError):
    """This process knows no batcher: Ray has started it in place of one that died."""


class NodeActor:
    """What a node runs.

    Args:
        number: Number of this node among all.
    """

    _node: Node | None = None

    def __init__(self, number: int) -> None:
        self._number = number
        self._levels: Levels = {}
        self._records = _Records()
        logging.root.addHandler(self._records)

    def begin(self, setup: NodeSetup, path: list[str], levels: Levels) -> tuple[NodeReport, str]:
        """Start the workers and wait until they are ready.

        Called again, which a caller does that could not reach this process for a while, it gives up
        what it was told to do before.

        Args:
            setup: What to start.
            path: The caller's ``sys.path``, so that modules are found as they are on one machine.
            levels: Levels of the caller's loggers.

        Returns:
            What this node knows about itself, and Ray's id of it.
        """
        self._follow(levels)
        node_id = ray.get_runtime_context().get_node_id()
        if self._node is not None:
            self._node.cancel()
            return self._node.report(), node_id
        known = {*sys.path}
        sys.path += [part for part in path if part not in known and os.path.exists(part)]
        address_of: Any = ray.util.get_node_ip_address  # without annotations
        self._node = Node(setup, f"{address_of()} ({node_id[:6]})", self._number)
        return self._node.report(), node_id

    def run(self, shard: Shard) -> Outcome:
        """Run a shard."""
        return self._begun.run(shard, lambda: ray.get(shard.policy.reference)).result()

    def cancel(self, numbers: list[int]) -> None:
        """Stop shards."""
        self._begun.cancel(numbers)

    def look(self, levels: Levels) -> tuple[Look, Said]:
        """What this node is doing and has logged."""
        self._follow(levels)
        return self._begun.look(), self._records.take()

    def stacks(self) -> str:
        """What the workers are doing."""
        return self._begun.stacks()

    def stats(self) -> Stats:
        """What the workers are doing, in numbers."""
        return self._begun.stats()

    def close(self) -> Said:
        """End the workers; returns what was logged last."""
        self._begun.close()
        return self._records.take()

    @property
    def _begun(self) -> Node:
        if self._node is None:
            raise NotBegunError("this process was not told to begin")
        return self._node

    def _follow(self, levels: Levels) -> None:
        set_levels(self._levels, levels)
        self._levels = levels
