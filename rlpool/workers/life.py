"""One worker's life as its caller sees it, and who gives workers something to do."""

from __future__ import annotations

from collections.abc import Collection
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol

from rlpool.errors import WorkerError
from rlpool.memory.storage import Memory
from rlpool.observe.control import State
from rlpool.workers.wire import CallerPipe, Message


class Life:
    """One worker.

    Args:
        worker: Its number.

    Attributes:
        state: What it is doing.
        process: Its process, the last one if it has none.
        pipe: The caller's end of its pipe, ``None`` without a process.
        last_words: Why it is about to end, if that is a failure.
        retires: Why it is about to end, if it is healthy; empty otherwise.
        is_dismissed: Whether it ends for good.
        deadline_s: When it starts again while it is down, when it is killed while it is leaving.
    """

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.state = State.DOWN
        self.process: SpawnProcess | None = None
        self.pipe: CallerPipe | None = None
        self.last_words: WorkerError | None = None
        self.retires = ""
        self.is_dismissed = False
        self.deadline_s = 0.0

    @property
    def has_ended(self) -> bool:
        """Whether its process is no more."""
        return self.process is not None and not self.process.is_alive()


class Client(Protocol):
    """Gives the workers something to do."""

    def setup(self, worker: int) -> tuple[Message, Memory | None]:
        """The first message to a worker: what it has to create."""

    def brief(self, worker: int, report: Any) -> None:
        """A worker has created it: send it all outstanding work."""

    def take(self, worker: int, message: Message) -> None:
        """Handle a message from a worker."""

    def lost(self, worker: int, failure: WorkerError | None) -> None:
        """A worker is gone and will be replaced; ``failure`` says why, if it failed."""

    def blames(self, worker: int, failure: WorkerError) -> int | None:
        """How often what a worker was running had failed before, if it will not run it again.

        The failure does not count as the worker's then; ``None`` if it does.
        """

    def busy(self) -> Collection[int]:
        """The workers that have something to do."""

    def where(self, worker: int) -> Any:
        """A ``Where``: what a worker is doing, as far as shared memory shows."""
