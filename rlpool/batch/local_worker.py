"""The worker of ``n_threads=0``: it does the same in the caller's process, without a pipe."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from rlpool.batch.messages import Execute, Window
from rlpool.batch.worker import Collector
from rlpool.errors import RlpoolError, WorkerError
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.memory.storage import Memory
from rlpool.observe.control import Control, State, Word
from rlpool.record.failures import described
from rlpool.record.tape import Tape
from rlpool.seeding import OwnGenerators
from rlpool.workers.lifecycle import Client
from rlpool.workers.stacks import Stacks, own_stacks
from rlpool.workers.wire import Done, Failed, Message, Ready
from rlpool.workers.worker_process import Place


class LocalClient(Client, Protocol):
    """Gives a worker in the same process something to do."""

    def again(self, worker: int, number: int) -> tuple[Message, Memory | None] | None:
        """What is left of a request that was interrupted, ``None`` if nothing is."""


class LocalWorker:
    """One worker that runs while the caller waits for it, in place of ``Workers``.

    While it runs, the process's global generators are the worker's, for all threads.

    Args:
        root: Root of all seeds.
        client: Is told what happens.

    Attributes:
        fatal: Why nothing will work any more.
        control: The shared record.
    """

    n_workers = 1
    is_repeatable = False
    control_fd = -1
    n_restarts = 0
    failures: tuple[WorkerError, ...] = ()
    up = (0,)

    def __init__(self, root: int, client: LocalClient) -> None:
        self.fatal: RlpoolError | None = None
        self._client = client
        self._inbox: deque[tuple[Message, Memory | None]] = deque()
        self.control = Control.create(1)
        self.control.worker_starts(0)
        self.control.rows[0, Word.PID] = os.getpid()
        self.control.set_state(0, State.STARTING)
        self._record = self.control.of_worker(0)
        # The worker's end of the line, which is the caller's as well.
        link: Any = SimpleNamespace(
            send=self._take, receive=self._inbox.popleft, poll=lambda: bool(self._inbox)
        )
        self._look: Callable[[], bool] | None = None  # somebody looks while it runs
        self._is_awaited = False
        self._is_looking = False
        self._collector = Collector(Place(0, 1, root), link, self._record, notice=self._notice)
        self._generators = OwnGenerators()
        self._is_closed = False
        self._is_at_work = False
        self._message: tuple[Message, Memory | None] | None = None  # being carried out

    def allocate(self, n_bytes: int) -> Memory:
        """Memory that the worker can see: any."""
        return Memory.local(n_bytes)

    def start(self, wake_fd: int = -1) -> None:
        """Create environments and agent, here and now.

        Raises:
            WorkerStartupError: If that fails.
        """
        self._inbox.append(self._client.setup(0))
        with self._at_work():
            self._collector.start()
        self.refuse_if_dead()

    def _take(self, message: Message) -> None:
        """Hand the worker's message to the caller's bookkeeping."""
        if isinstance(message, Ready):
            self.control.set_state(0, State.UP)
            self._client.brief(0, message.report)
        elif isinstance(message, Failed) and message.command is None:
            self.fatal = message.error
        else:
            self._client.take(0, message)

    def send(self, worker: int, message: Message, memory: Memory | None = None) -> None:
        """Give the worker a message, to be carried out by ``poll``."""
        self._inbox.append((message, memory))

    def refuse_if_dead(self) -> None:
        """Raise ``fatal`` if there is one."""
        if self.fatal is not None:
            raise self.fatal

    def wait_until(self, is_over: Callable[[], bool], every_s: float = math.inf) -> None:
        """Carry out messages until a condition holds.

        Args:
            is_over: The condition.
            every_s: If it is finite, the condition is also tested whenever an episode ends or
                fills a slot.
        """
        self._look = is_over if every_s < math.inf else None
        self._is_awaited = True
        try:
            while not is_over():
                self.poll(1.0)
        finally:
            self._look = None
            self._is_awaited = False

    def _notice(self) -> None:
        if self._look is not None:
            self._is_looking = True
            self._look()
            self._is_looking = False

    def rest(self) -> None:
        """Carry out one message."""
        self.poll(1.0)

    def poll(self, timeout_s: float) -> None:
        """Carry out messages up to the first request, however long that takes.

        If it is interrupted, a request is lost, unless whoever looks has done that; anything else
        is carried out by the next call.
        Called without patience by what it runs itself, or by the condition that somebody waits
        for, such as a function that shows progress, it does nothing.
        """
        if (self._is_at_work or self._is_awaited) and timeout_s == 0.0:
            return
        if self._has_message():
            try:
                with self._at_work():
                    while not self._carry_out() and self._has_message():
                        pass
            except BaseException as error:
                with InterruptsHeld():
                    if self._message is not None:
                        self._interrupted(self._message[0], error)
                raise
        elif timeout_s != 0.0:
            raise LookupError("waiting for a local worker that has nothing to do")

    def tapes(self) -> dict[int, Tape]:
        """See ``Rollout.tapes``."""
        return self._collector.tapes()

    def _has_message(self) -> bool:
        return self._message is not None or self._collector.inbox.peek() is not None

    def _carry_out(self) -> bool:
        """Carry out one message; returns whether it was a request."""
        if self._message is None:
            with InterruptsHeld():
                self._message = self._collector.inbox.receive()
        self._is_looking = False
        self._collector.handle(*self._message)
        message, _ = self._message
        self._message = None
        return isinstance(message, Execute | Window)

    def _interrupted(self, message: Message, error: BaseException) -> None:
        """Keep what is left of a request, or give it up if users' code was interrupted."""
        if isinstance(message, Execute) and self._is_looking:
            self._collector.inbox.read()  # slots that came back are part of what is left
            self._message = self._client.again(0, message.number)
        elif isinstance(message, Execute | Window):
            self._message = None
            failure = WorkerError(
                f"the request was interrupted by {described(error)}", fix="request it again"
            )
            self._take(Failed(failure, message.number))
            self._take(Done(message.number))

    def lane_in_use(self, worker: int) -> int:
        """The lane whose environment ran last."""
        return int(self._record.lane[0])

    def deliver_logs(self) -> None:
        """Do nothing: what is logged in this process needs no delivery."""

    def look_for_hang(self) -> None:
        """Do nothing: nobody could look while it runs."""

    def note_ready(self, worker: int) -> None:
        """Do nothing: it has no successor."""

    note_success = kill = note_ready

    def stacks(self) -> list[Stacks]:
        """What the threads of this process and the processes of environments are doing."""
        dump = getattr(self._collector.env, "dump_stacks", None)
        return [Stacks(0, os.getpid(), own_stacks() + (dump(file=None) if dump else ""))]

    def fail(self, error: RlpoolError) -> None:
        """Refuse everything from now on."""
        self.fatal = self.fatal or error

    def expect_end(self, worker: int, failure: WorkerError) -> None:
        """Refuse everything from now on: it has no successor."""
        self.fail(failure)

    def abort(self) -> None:
        """Do nothing: it does not run now."""

    def close(self) -> None:
        """Close environments and agent."""
        if not self._is_closed:
            self._is_closed = True
            self._inbox.clear()
            with self._at_work():
                self._collector.close()
            self.control.close()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """What users' code finds in a worker process: its own generators, one torch thread."""
        if self._is_at_work:  # and closed by what it runs
            yield
            return
        with self._generators.in_use():
            n_threads = torch.get_num_threads()
            try:
                self._is_at_work = True
                self._record.end_wait()
                if n_threads != 1:  # the bits of a result can depend on it
                    torch.set_num_threads(1)
                yield
            finally:
                self._is_at_work = False
                if n_threads != 1:
                    torch.set_num_threads(n_threads)
                self._record.begin_wait()
