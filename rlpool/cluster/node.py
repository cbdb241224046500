"""What runs on a node: the workers of a batcher, or of several where it has several parts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from rlpool.cluster.node_workers import NodeWorkers
from rlpool.cluster.shards import Look, NodeReport, NodeSetup, Outcome, Published, Shard
from rlpool.observe.stats import Stats, stats_of


class Node:
    """Runs shards on one machine; every method may be called from any thread.

    Episodes need one set of workers. So do the windows of one part of all lanes: a node that has to
    take over the part of another starts a second set, and ends it when it has the part no more.

    Args:
        setup: What to start.
        name: What errors call this node.
        number: Number of this node among all.
    """

    def __init__(self, setup: NodeSetup, name: str, number: int) -> None:
        self.name = name
        self._setup = setup
        self._lock = threading.Lock()
        self._first = NodeWorkers(setup, name, number)
        self._sets = {number: self._first}  # by part
        self._ended: list[NodeWorkers] = []
        self._is_closed = False

    def report(self) -> NodeReport:
        """Wait until the workers are ready.

        Raises:
            RlpoolError: If they do not get ready.
        """
        return self._first.report()

    def run(self, shard: Shard, read: Callable[[], Published]) -> Future[Outcome]:
        """Run a shard after those that its workers were given before.

        Args:
            shard: The shard.
            read: Reads its policy's object, called if the workers do not have it.
        """
        return self._workers_for(shard).run(shard, read)

    def _workers_for(self, shard: Shard) -> NodeWorkers:
        """The workers of a shard's part; those of parts that the node has no more are ended."""
        if shard.part is None:
            return self._first
        with self._lock:
            spare = [part for part in self._sets if part not in shard.parts]
            if shard.part not in self._sets and not self._is_closed:
                self._sets[shard.part] = (
                    self._sets.pop(spare.pop())
                    if spare
                    else NodeWorkers(self._setup, self.name, shard.part)
                )
            for part in spare:
                self._sets[part].end()
                self._ended.append(self._sets.pop(part))
            return self._sets.get(shard.part, self._first)

    def cancel(self, numbers: Sequence[int] | None = None) -> None:
        """Stop shards, by default all; nobody waits for their results."""
        for workers in self._all():
            workers.cancel(numbers)

    def look(self) -> Look:
        """What this node is doing, as far as shared memory shows."""
        looks = [workers.look() for workers in (*self._all(), *self._ended)]
        n_finished = {number: n for look in looks for number, n in look.n_finished.items()}
        failures = [failure for look in looks for failure in look.failures]
        return Look(n_finished, sum(look.n_restarts for look in looks), failures)

    def stacks(self) -> str:
        """What the workers are doing."""
        return "\n".join(workers.stacks() for workers in self._all())

    def stats(self) -> Stats:
        """What the workers are doing, in numbers."""
        every = [workers.stats() for workers in self._all() if workers.is_ready]
        requests = [request for stats in every for request in stats.requests]
        workers = [worker for stats in every for worker in stats.workers]
        return stats_of(self.name, os.getpid(), requests, workers)

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        with self._lock:
            self._is_closed = True
        every = [*self._all(), *self._ended]
        for workers in every:
            workers.end()
        for workers in every:
            workers.join()

    def _all(self) -> list[NodeWorkers]:
        with self._lock:
            return list(self._sets.values())
