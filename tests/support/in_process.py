"""A cluster without a network: nodes in this process, each with worker processes of its own."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

from rlpool.cluster.node import Node
from rlpool.cluster.shards import NodeSetup, Outcome, Published, Shard
from rlpool.cluster.transport import (
    Arrivals,
    Event,
    Finished,
    Joined,
    Left,
    Looked,
    Refused,
)
from rlpool.errors import RlpoolError, WorkerDiedError, WorkerError, WorkerStartupError
from rlpool.observe.stats import Stats


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
        self._events: deque[Event] = deque()
        self._has_events = threading.Condition()
        self._arrivals = Arrivals()
        self._setup: NodeSetup
        self._refusals: list[str] = []
        self._published: list[Published] = []
        self._outcomes: dict[int, list[Future[Outcome]]] = {}  # by node
        self._losing: set[int] = set()  # nodes whose next outcome is lost

    def reserve(self) -> None:
        """See ``Transport``."""

    def start(self, setup: NodeSetup) -> None:
        self._setup = setup
        for number in range(self.n_expected):
            self.add(number)

    def add(self, number: int) -> None:
        """Let a node join, or one that has left come back."""
        self.nodes[number] = node = Node(self._setup, f"node-{number}", number)
        threading.Thread(target=self._report, args=(number, node), daemon=True).start()

    def remove(self, number: int, *, when_done: bool = False, is_machine: bool = True) -> None:
        """Let a node leave as if its machine had died.

        Args:
            number: Its number.
            when_done: Wait until it has done what it was sent; else what was not received is lost.
            is_machine: Whether the machine is gone; otherwise only its process, and ``add`` makes
                its successor.
        """
        node = self.nodes[number]
        if when_done:
            wait(self._outcomes.get(number, ()))
        node.close()
        del self.nodes[number]
        self.ready.discard(number)
        with self._has_events:
            received = [event for event in self._events if event.node != number or when_done]
            self._events = deque(received)
        error = WorkerDiedError(f"{node.name} died", exitcode=None)
        self._happened(Left(number, error, is_machine))

    @property
    def n_published(self) -> int:
        """How many objects were published."""
        return len(self._published)

    def lose_next(self, number: int) -> None:
        """Lose the next outcome of a node."""
        self._losing.add(number)

    def refuse_next(self, why: str, times: int = 1) -> None:
        """Let the next nodes that join, or try again, fail to start."""
        self._refusals = [why] * times

    def _report(self, number: int, node: Node) -> None:
        event: Event
        try:
            event = Joined(number, node.report())
            if self._refusals:
                raise WorkerStartupError(self._refusals.pop())
        except RlpoolError as error:
            event = Refused(number, error)
        if self.nodes.get(number) is node:
            self._happened(event)
            if isinstance(event, Joined):
                self.ready.add(number)

    def send(self, node: int, shard: Shard) -> None:
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
            outcome = Outcome(error=WorkerError("it was lost on purpose"), is_lost=True)
        self._happened(Finished(number, shard.request.number, outcome))

    def _happened(self, event: Event) -> None:
        with self._has_events:
            self._events.append(event)
            self._has_events.notify()
        self._arrivals.tell()

    def fileno(self) -> int:
        return self._arrivals.fileno()

    def wait(self, timeout_s: float) -> None:
        self._arrivals.clear()
        with self._has_events:
            self._has_events.wait_for(lambda: self._events, timeout_s)

    def next_event(self) -> Event | None:
        return self._events.popleft() if self._events else None

    def look(self, node: int) -> None:
        if node in self.nodes:
            self._happened(Looked(node, self.nodes[node].look()))

    def cancel(self, node: int, numbers: Sequence[int]) -> None:
        if node in self.nodes:
            self.nodes[node].cancel(numbers)

    def publish(self, published: Published) -> Any:
        self._published.append(published)
        return len(self._published) - 1

    def end(self, node: int) -> None:
        self.remove(node)

    def restart(self, node: int) -> None:
        self.nodes.pop(node).close()
        self.add(node)

    def dismiss(self, node: int) -> None:
        self.nodes.pop(node).close()

    def stacks(self) -> str:
        return "\n".join(f"{node.name}:\n{node.stacks()}" for node in self.nodes.values())

    def stats(self) -> dict[int, Stats]:
        return {n: node.stats() for n, node in self.nodes.items() if n in self.ready}

    def deliver_logs(self) -> None:
        """See ``Transport``; nodes in this process log in it."""

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()
        self.nodes.clear()
        self._arrivals.close()
