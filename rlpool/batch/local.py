"""The worker of ``n_threads=0``: the same collector, in the caller's process, without a pipe."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.context import SpawnProcess

import torch

from rlpool.batch.claims import ClaimLock
from rlpool.batch.collector import Collector, Deliver
from rlpool.errors import WorkerError
from rlpool.generators import OwnGenerators
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.memory.storage import Memory
from rlpool.record.failures import DEBUG_HINT, LOCAL_HINT, described
from rlpool.workers.messages import (
    Close,
    Execute,
    Failed,
    Message,
    Ready,
    RequestDone,
    Setup,
    Window,
)
from rlpool.workers.stacks import Stacks, own_stacks


class LocalLink:
    """Both ends of the line between the caller and its local worker.

    Args:
        deliver: Takes the worker's messages at once, so that slots are emptied while it runs.
    """

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self.inbox: deque[tuple[Message, Memory | None]] = deque()

    def send(self, message: Message) -> None:
        """Hand a message to the caller's bookkeeping."""
        if isinstance(message, Ready | Failed) and isinstance(message.error, WorkerError):
            error = message.error
            if DEBUG_HINT in error.fix:  # it does run in this process
                fix = error.fix.replace(DEBUG_HINT, LOCAL_HINT)
                message = replace(message, error=error.reworded(what=error.what, fix=fix))
        self._deliver(0, message)

    def receive(self) -> tuple[Message, Memory | None]:
        """The next message; there is always one when this is called."""
        return self.inbox.popleft()

    def poll(self) -> bool:
        """Whether a message is there."""
        return bool(self.inbox)


class LocalWorker:
    """One worker that runs while the caller waits for it.

    Meanwhile the process's global generators are the worker's, for all threads.

    Args:
        setup: What to create.
        deliver: Takes the worker's messages.
    """

    n_workers = 1
    is_aborted = False
    processes: tuple[SpawnProcess, ...] = ()
    claim_lock = ClaimLock(None)

    def __init__(self, setup: Setup, deliver: Deliver) -> None:
        self._link = LocalLink(deliver)
        self._numbers = memoryview(bytearray(16)).cast("q")
        self._collector = Collector(
            setup, self._link, ClaimLock(None), self._numbers[1:], self._numbers[:1]
        )
        self._generators = OwnGenerators()
        self._is_closed = False
        self._message: tuple[Message, Memory | None] | None = None  # that is being carried out

    def allocate(self, n_bytes: int) -> Memory:
        """Memory that the worker can see: any."""
        return Memory.local(n_bytes)

    def start(self) -> None:
        """Create environments and agent, here and now."""
        with self._at_work():
            self._collector.start()

    def send(self, worker: int, message: Message, memory: Memory | None = None) -> None:
        """Give the worker a message, to be carried out by ``poll``."""
        self._link.inbox.append((message, memory))

    def poll(self, timeout_s: float | None) -> None:
        """Carry out one message, however long that takes.

        What interrupts it is raised. A request is lost then, anything else is carried out by the
        next call.
        """
        if self._message is None and self._collector.has_messages():
            with InterruptsHeld():
                self._message = self._collector.next_message()
        if self._message is not None:
            try:
                with self._at_work():
                    self._collector.handle(*self._message)
            except BaseException as error:
                with InterruptsHeld():
                    self._give_up(self._message[0], error)
                raise
            self._message = None
        elif timeout_s != 0.0:
            raise LookupError("waiting for a local worker that has nothing to do")

    def _give_up(self, message: Message, error: BaseException) -> None:
        """Tell the caller's bookkeeping that a request will not be completed."""
        if isinstance(message, Execute | Window):
            self._message = None
            failure = WorkerError(
                f"the request was interrupted by {described(error)}", fix="request it again"
            )
            self._link.send(Failed(failure, message.request))
            self._link.send(RequestDone(message.request))

    def progress(self) -> list[int]:
        """Steps done."""
        return [self._numbers[0]]

    def lane_in_use(self, worker: int) -> int:
        """The lane whose environment ran last."""
        return self._numbers[1]

    def deliver_logs(self) -> None:
        """What is logged in this process is where it belongs."""

    def stacks(self) -> list[Stacks]:
        """What the threads of this process are doing."""
        return [Stacks(0, os.getpid(), own_stacks())]

    def stacks_of(self, worker: int) -> str:
        """Never asked for: whoever would ask is busy running it."""
        return ""

    def stacks_of_environments(self) -> str:
        """What processes are doing that environments run in, if they do."""
        dump = getattr(self._collector.env, "dump_stacks", None)
        return "" if dump is None else str(dump(file=None))

    def holder_of_claims(self, otherwise: int) -> int:
        """Nobody else is there to hold the lock."""
        return otherwise

    def replace(self, worker: int) -> None:
        """A worker in this process does not die."""
        raise LookupError("a local worker has no successor")

    def kill(self, worker: int) -> None:
        """A worker in this process cannot be killed."""

    def abort(self) -> None:
        """Nothing runs in this process when this is called."""

    def close(self) -> None:
        """Close environments and agent."""
        if not self._is_closed:
            self._is_closed = True
            self._link.inbox.clear()
            self._link.inbox.append((Close(), None))
            with self._at_work():
                self._collector.close()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """What users' code finds in a worker process: generators of its own, one torch thread."""
        with self._generators.in_use(), _one_thread():
            yield


@contextmanager
def _one_thread() -> Iterator[None]:
    """One torch thread, as in a worker process: the bits of a result can depend on it."""
    n_threads = torch.get_num_threads()
    if n_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)
