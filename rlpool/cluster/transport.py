"""What a caller needs of the machinery that connects it with its nodes.

Nodes are numbered in the order in which they are found. A transport finds further ones, and starts
a node's process again if it ends; the caller is told with events, and says when it is enough.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from rlpool.cluster.shards import Look, NodeReport, NodeSetup, Outcome, Published, Shard
from rlpool.errors import RlpoolError, WorkerError
from rlpool.observe.stats import Stats


@dataclass(frozen=True)
class Joined:
    """A node is ready for shards, for the first time or again.

    Attributes:
        node: Its number.
        report: What it knows about itself.
    """

    node: int
    report: NodeReport


@dataclass(frozen=True)
class Left:
    """A node is gone, and what it was sent is lost; another process is started in its place.

    Attributes:
        node: Its number.
        error: Why.
        is_machine: Whether its machine is gone, or cannot be reached. Otherwise its process has
            ended, which counts as a restart.
    """

    node: int
    error: WorkerError
    is_machine: bool


@dataclass(frozen=True)
class Refused:
    """A node could not start its workers, and waits for ``restart`` or ``dismiss``."""

    node: int
    error: RlpoolError


@dataclass(frozen=True)
class Finished:
    """A shard has come to an end; its arrays may be views, and are not to be kept."""

    node: int
    number: int
    outcome: Outcome


@dataclass(frozen=True)
class Looked:
    """A node answered ``look``."""

    node: int
    look: Look


Event = Joined | Left | Refused | Finished | Looked


class Arrivals:
    """A descriptor that can be read after another thread has said that something arrived."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Once it is closed, its number may be that of another file.
        self._writes_or_closes = threading.Lock()

    def fileno(self) -> int:
        """Its number."""
        return self._fd

    def tell(self, _: object = None) -> None:
        """Say that something arrived; called in any thread."""
        with self._writes_or_closes:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Forget what was said so far; call it before looking for what arrived."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close it. May be repeated."""
        with self._writes_or_closes:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)


class Transport(Protocol):
    """Carries shards to nodes and what becomes of them back. Used from one thread.

    Attributes:
        store_bytes: How much may be on the way from one node, ``None`` for any amount.
        n_expected: Nodes that are, or will be, there, once they are reserved.
    """

    store_bytes: int | None
    n_expected: int

    def reserve(self) -> None:
        """Find the nodes, and see that nobody else uses them until ``close``."""

    def start(self, setup: NodeSetup) -> None:
        """Start the nodes; returns before they are ready."""

    def send(self, node: int, shard: Shard) -> None:
        """Send a shard to a node; ``Finished`` or ``Left`` follows."""

    def wait(self, timeout_s: float) -> None:
        """Wait until something has happened."""

    def fileno(self) -> int:
        """A descriptor that can be read when something has happened that needs no timeout."""

    def next_event(self) -> Event | None:
        """Take the next of what has happened, ``None`` if that was all."""

    def look(self, node: int) -> None:
        """Ask a node what it is doing; ``Looked`` follows, unless an answer is still awaited."""

    def cancel(self, node: int, numbers: Sequence[int]) -> None:
        """Stop shards; whatever becomes of them is dropped."""

    def publish(self, published: Published) -> Any:
        """Make a packed object available to all nodes; returns what shards refer to it with."""

    def end(self, node: int) -> None:
        """End a node that does not answer; ``Left`` follows."""

    def restart(self, node: int) -> None:
        """Start a node's process and workers anew; ``Joined``, ``Left`` or ``Refused`` follows."""

    def dismiss(self, node: int) -> None:
        """End a node for good; nothing follows."""

    def stacks(self) -> str:
        """What all nodes are doing."""

    def stats(self) -> dict[int, Stats]:
        """What the workers are doing in numbers, by node; without those that do not answer."""

    def deliver_logs(self) -> None:
        """Hand what nodes have logged to the loggers of this process."""

    def close(self) -> None:
        """End all nodes. May be repeated, and does not need to be if it was interrupted."""


TransportMaker = Callable[[], Transport]
