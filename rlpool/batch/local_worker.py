"""The worker of ``n_workers=0``: the same code in the caller's process, without a pipe."""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from rlpool.batch.messages import Run, Setup
from rlpool.batch.worker import Collector
from rlpool.data.storage import Memory
from rlpool.errors import RlpoolError, WorkerError
from rlpool.machine.own_state import OwnState, torch_settings
from rlpool.observe.control import Control, State, Word
from rlpool.workers.crew import Client
from rlpool.workers.failure_policy import FailurePolicy
from rlpool.workers.logs import SAID
from rlpool.workers.wire import Failed, Message
from rlpool.workers.worker_process import Place

_LOG = logging.getLogger("rlpool")


class LocalWorker:
    """A worker that runs while the caller waits for it, in place of a ``Crew``.

    While it runs, the process's global random generators are the worker's, for all threads.

    Args:
        setup: The environments and agent to create.
        root: Root of all seeds.
        client: Receives its messages.
        policy: Used only for whether episodes are truncated when their environment raises.
        notice: Called when episodes have ended.

    Attributes:
        fatal: The error after which nothing works any more.
        control: The shared record.
    """

    n_workers = 1
    up = (0,)
    _readable: socket.socket | None = None

    def __init__(
        self,
        setup: Setup,
        root: int,
        client: Client,
        policy: FailurePolicy,
        notice: Callable[[], None],
    ) -> None:
        self.fatal: RlpoolError | None = None
        self._setup, self._client, self._notice = setup, client, notice
        self._inbox: deque[tuple[Message, Memory | None]] = deque()
        self.control = Control.create(1)
        SAID.clear()
        self.control.worker_starts(0)
        self.control.rows[0, [Word.PID, Word.STATE]] = os.getpid(), State.UP
        self._record = self.control.of_worker(0)
        how = FailurePolicy(on_env_error="truncate") if policy.truncates else FailurePolicy()
        self._place = Place(0, 1, root, torch_settings(), how)
        self._collector = self._new_collector()
        self._own = OwnState()
        self._is_closed = False
        self._is_at_work = False
        self._failure: WorkerError | None = None  # of an environment that is to be created again

    def _new_collector(self) -> Collector:
        # The worker's end of the pipe is also the caller's.
        link: Any = SimpleNamespace(
            send=self._on_message, receive=self._inbox.popleft, poll=lambda: bool(self._inbox)
        )
        return Collector(self._place, link, self._record, notice=self._notice)

    def start(self) -> None:
        """Create environments and agent, in this process.

        Raises:
            WorkerStartupError: If that fails.
        """
        self._inbox.append((self._setup, None))
        with self._at_work():
            self._collector.start()
        self.refuse_if_dead()

    def _on_message(self, message: Message) -> None:
        """Pass the worker's message to the caller's bookkeeping."""
        if isinstance(message, Failed) and message.command is None:
            self.fatal = message.error
        else:
            self._client.on_message(0, message)

    def send(self, worker: int, message: Message, memory: Memory | None = None) -> None:
        """Queue a message for the worker; ``look`` handles it."""
        self._inbox.append((message, memory))

    def refuse_if_dead(self) -> None:
        """Raise ``fatal`` if it is set."""
        if self.fatal is not None:
            raise self.fatal

    def fileno(self) -> int:
        """Return a descriptor that is always readable: there is nothing to wait for."""
        if self._readable is None:
            self._readable, other = socket.socketpair()  # Windows waits for nothing but sockets
            other.close()
        return self._readable.fileno()

    def wait_until(self, is_over: Callable[[], bool], until_s: float = 0.0) -> None:
        """Handle messages until a condition holds, however long that takes."""
        while not is_over():
            if not self.look():
                raise LookupError("waiting for a local worker that has nothing to do")

    def look(self) -> bool:
        """Handle messages up to the first request; False if there was nothing to do."""
        if self._failure is None and self._collector.peek() is None:
            return False
        with self._at_work():
            if self._failure is not None:
                self._begin_again(self._failure)
            is_over = False
            while not is_over and self._collector.peek() is not None:
                message, memory = self._collector.receive()
                self._collector.handle(message, memory)
                is_over = isinstance(message, Run)
        return True

    def expect_end(self, worker: int, failure: WorkerError) -> None:
        """Create environments and agent again before handling anything else."""
        self._failure = failure

    def _begin_again(self, failure: WorkerError) -> None:
        """Create environments and agent again; they continue like a successor."""
        self._inbox.clear()
        if not self._client.lost(0, failure, True):
            self.fail(failure)
            return
        _LOG.warning("%s (%s): the episode is truncated", failure.what, failure.where)
        self._collector.close()
        self._collector = self._new_collector()
        self.start()
        self._failure = None

    def fail(self, error: RlpoolError) -> None:
        """Refuse all further work."""
        self.fatal = self.fatal or error

    def kill(self, worker: int, failure: WorkerError) -> None:
        """Refuse all further work: there is no successor."""
        self.fail(failure)

    def abort(self) -> None:
        """Do nothing: the worker is not running now."""

    def close(self) -> None:
        """Close environments and agent."""
        if not self._is_closed:
            self._inbox.clear()
            with self._at_work():
                self._collector.close()
            self.control.close()
            if self._readable is not None:
                self._readable.close()
            self._is_closed = True  # last, so an interrupted call can be repeated

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Give users' code the environment of a worker process: generators and torch settings."""
        if self._is_at_work:  # closed by the user's code that it runs
            yield
            return
        with self._own.in_use():
            try:
                self._is_at_work = True
                self._record.end_wait()
                yield
            finally:
                self._is_at_work = False
                self._record.begin_wait()
