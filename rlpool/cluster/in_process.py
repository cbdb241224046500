"""Nodes in the caller's process, each with worker processes of its own: no network, for tests."""

from __future__ import annotations

import pickle
import queue
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from rlpool.cluster.node import Node
from rlpool.cluster.shards import NodeSetup, Outcome, Published, Shard
from rlpool.cluster.transport import Event, Finished, Joined, Left, Looked, Lost, Refused
from rlpool.errors import RlpoolError, WorkerDiedError


class InProcess:
    """A ``Transport`` without a network.

    Args:
        n_nodes: Nodes at the beginning.
        store_bytes: How much may be on the way from one node.

    Attributes:
        nodes: Number to node.
        ready: Nodes that are there and have said so.
        sent: All shards, with the node that each was sent to.
    """

    def __init__(self, n_nodes: int, store_bytes: int | None = None) -> None:
        self.n_expected = n_nodes
        self.store_bytes = store_bytes
        self.nodes: dict[int, Node] = {}
        self.ready: set[int] = set()
        self.sent: list[tuple[int, Shard]] = []
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._setup: NodeSetup
        self._published: list[Published] = []
        self._outcomes: dict[int, list[Future[Outcome]]] = {}  # by node
        self._losing: set[int] = set()  # nodes whose next outcome is lost

    def start(self, setup: NodeSetup) -> None:
        """See ``Transport``."""
        self._setup = setup
        for number in range(self.n_expected):
            self.add(number)

    def add(self, number: int, *, is_restart: bool = False) -> None:
        """Let a node join, or one that has left come back."""
        self.nodes[number] = node = Node(self._setup, f"node-{number}", number)
        node.when_ready(partial(self._report, number, node, is_restart))

    def remove(self, number: int, *, when_done: bool = False) -> None:
        """Let a node leave as if its machine had died.

        Args:
            number: Its number.
            when_done: Wait until it has done what it was sent; else what was not received is lost.
        """
        node = self.nodes[number]
        if when_done:
            wait(self._outcomes.get(number, ()))
        node.close()
        del self.nodes[number]
        self.ready.discard(number)
        for event in self.receive(0.0):
            if event.node != number or when_done:
                self._events.put(event)
        self._events.put(Left(number, WorkerDiedError(f"{node.name} died", exitcode=None)))

    def lose_next(self, number: int) -> None:
        """Lose the next outcome of a node."""
        self._losing.add(number)

    def _report(self, number: int, node: Node, is_restart: bool) -> None:
        try:
            self._events.put(Joined(number, node.report(), is_restart))
            self.ready.add(number)
        except RlpoolError as error:
            self._events.put(Refused(number, error))

    def send(self, node: int, shard: Shard) -> None:
        """See ``Transport``."""
        self.sent.append((node, shard))
        if node in self.nodes:
            runner = self.nodes[node]
            copy = pickle.loads(pickle.dumps(shard))
            future = runner.run(copy, lambda: self._published[shard.policy.reference])
            self._outcomes.setdefault(node, []).append(future)
            future.add_done_callback(lambda done: self._done(node, runner, shard, done.result()))

    def _done(self, number: int, node: Node, shard: Shard, outcome: Outcome) -> None:
        if self.nodes.get(number) is not node:
            return  # it has left
        if number in self._losing and outcome.rows is not None:
            self._losing.discard(number)
            self._events.put(Lost(number, shard.number, "it was lost on purpose"))
        else:
            self._events.put(Finished(number, shard.number, outcome))

    def receive(self, timeout_s: float) -> Sequence[Event]:
        """See ``Transport``."""
        events: list[Event] = []
        try:
            events.append(self._events.get(timeout_s > 0, timeout_s))
            while True:
                events.append(self._events.get(False))
        except queue.Empty:
            return events

    def look(self, node: int) -> None:
        """See ``Transport``."""
        if node in self.nodes:
            self._events.put(Looked(node, self.nodes[node].look()))

    def cancel(self, node: int, numbers: Sequence[int]) -> None:
        """See ``Transport``."""
        if node in self.nodes:
            self.nodes[node].cancel(numbers)

    def publish(self, published: Published) -> Any:
        """See ``Transport``."""
        self._published.append(published)
        return len(self._published) - 1

    def end(self, node: int) -> None:
        """See ``Transport``."""
        self.remove(node)

    def stacks(self) -> str:
        """See ``Transport``."""
        return "\n".join(f"{node.name}:\n{node.stacks()}" for node in self.nodes.values())

    def deliver_logs(self) -> None:
        """See ``Transport``; nodes in this process log in it."""

    def close(self) -> None:
        """See ``Transport``."""
        for node in self.nodes.values():
            node.close()
        self.nodes.clear()
