"""Worker processes, and what is said between them and the caller, which listens while it waits."""

from __future__ import annotations

import math
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import is_exiting

from rlpool.data.storage import Memory
from rlpool.errors import (
    WorkerDiedError,
    WorkerStartupError,
    WorkerTimeoutError,
)
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.machine.limits import process_activity
from rlpool.observe.control import State, Word
from rlpool.workers.lifecycle import Life, LifeCycle
from rlpool.workers.poller import Events
from rlpool.workers.process_start import (
    reap_template,
    refuse_large_workers,
)
from rlpool.workers.stack_dumps import stack_sources
from rlpool.workers.stacks import ask, described
from rlpool.workers.wire import Failed, Message, Ready, Retiring

_LOOK_EVERY_S = 0.05
"""How often to ask the system for ended workers that their descriptors do not show."""


class Workers(LifeCycle):
    """Worker processes, and the caller's ends of their pipes; see ``LifeCycle``.

    Nothing happens in the background: a caller that waits calls ``poll`` or ``wait_until``.
    """

    _look_for_ends_s = 0.0

    # Talking to workers -----------------------------------------------------------------------

    def start(self, wake_fd: int = -1) -> None:
        """Start all workers and wait until they are ready.

        Args:
            wake_fd: A descriptor that ends every wait when it can be read, -1 for none.

        Raises:
            WorkerStartupError, WorkerDiedError, WorkerTimeoutError, UsageError: If one does not
                get ready.
            SpecError: If they are larger than ``max_rss_bytes`` already.
        """
        stack_sources.add(self)
        self._poller.wake_on(wake_fd)
        for n_started, life in enumerate(self._lives):
            try:
                self._start(life)
            except OSError as error:
                what = f"{n_started} of {self.n_workers} workers could be started: {error}"
                fix = "python -m rlpool doctor shows which limit that may be"
                raise WorkerStartupError(what, fix=fix) from error
        self.wait_until(lambda: self.all_up or self.fatal is not None)
        self.refuse_if_dead()
        refuse_large_workers(self.processes, self._policy.max_rss_bytes)
        self._has_started = True

    def send(self, worker: int, message: Message, memory: Memory | None = None) -> None:
        """Send a message to a worker that is ready; any other is briefed when it is.

        It does not wait for the worker: ``poll`` sends what its pipe does not take.
        """
        life = self._lives[worker]
        if life.state is State.UP:
            try:
                self._send(life, message, memory)
            except OSError as error:
                what = f"worker {worker} cannot be sent a message: {error}"
                fix = "raise the limit of file descriptors (ulimit -n), and start again"
                self.fail(WorkerDiedError(what, exitcode=None, fix=fix))

    def refuse_if_dead(self) -> None:
        """Raise the error that ended everything, if there is one."""
        if self.fatal is not None:
            raise self.fatal

    # Waiting ----------------------------------------------------------------------------------

    @property
    def patience_s(self) -> float:
        """How long to wait at most before looking for workers that hang or are due to start."""
        if self.all_up:
            return self._watch.patience_s
        due_s = min(life.deadline_s for life in self._lives)
        return min(self._watch.patience_s, max(0.0, due_s - time.monotonic()) + 0.001)

    def fileno(self) -> int:
        """A descriptor that can be read when a worker has sent something or has ended."""
        return self._poller.fileno()

    def wait_until(
        self, is_over: Callable[[], bool], every_s: float = math.inf, until_s: float = math.inf
    ) -> None:
        """Handle messages until a condition holds, and look for workers that hang.

        Args:
            is_over: The condition.
            every_s: How often to test it, whether or not a message arrives.
            until_s: When to give up, by ``time.monotonic``.
        """
        while not is_over() and (left_s := until_s - time.monotonic()) > 0.0:
            self.poll(min(self.patience_s, every_s, left_s))
            if not is_over():
                self.look_for_hang()

    def poll(self, timeout_s: float) -> bool:
        """Deliver what has arrived, logs included, and start workers that are due.

        Args:
            timeout_s: Longest wait for something to arrive.

        Returns:
            Whether the wake descriptor can be read.
        """
        if not self.all_up:
            timeout_s = min(timeout_s, self.patience_s)
        events = self._poller.wait(timeout_s)
        is_woken = self._poller.is_woken_by(events)
        if is_woken and len(events) == 1 and self.all_up:
            return True
        if not self._end.still_active():
            self._rest_at_exit()
            return False
        self._deliver_all(events)
        self.deliver_logs()
        if not self.all_up:
            with InterruptsHeld():
                self._advance()
        return is_woken

    def _rest_at_exit(self) -> None:
        """Let a daemon thread wait for the end of Python, which has ended its workers.

        It would take their ends for deaths and start others.
        """
        if is_exiting() and not self._end.still_active() and threading.current_thread().daemon:
            threading.Event().wait()

    def _deliver_all(self, events: Events) -> None:
        """Handle messages and ends of workers, and send what a pipe did not take before."""
        ready = self._poller.workers_of(events)
        now_s = time.monotonic()
        if not events or now_s > self._look_for_ends_s:
            # A process that a dead worker had forked may keep its descriptors open.
            self._look_for_ends_s = now_s + _LOOK_EVERY_S
            for life in self._lives:
                if life.pipe is not None and life.process and not life.process.is_alive():
                    ready.add(life.worker)
            reap_template()
        if not ready:
            return
        with InterruptsHeld():
            try:
                for worker in sorted(ready):
                    self._deliver_from(self._lives[worker])
            except BaseException as error:
                if isinstance(error, ValueError) and self.fatal is not None:
                    return  # another thread has closed them meanwhile, processes included
                self.abort()  # a message may be lost
                raise

    def _deliver_from(self, life: Life) -> None:
        """Handle a worker's messages, its last words before its death."""
        if life.pipe is not None and life.pipe.events & select.POLLOUT:
            with suppress(OSError):  # it is gone, which is handled below
                life.pipe.flush()
            self._poller.watch_writing(life.pipe)
        while life.pipe is not None and life.process is not None:
            try:
                message = life.pipe.receive()
                if message is None and life.process.is_alive():
                    return
                if message is None:
                    message = life.pipe.receive()  # sent just before the death
            except (EOFError, OSError):
                message = None
            if message is not None:
                self._take(life, message)
            else:
                self._bury(life, life.pipe, life.process)

    def _take(self, life: Life, message: Message) -> None:
        if isinstance(message, Ready):
            self._set_state(life, State.UP)
            self._client.brief(life.worker, message.report)
        elif isinstance(message, Retiring):
            life.retires = message.why
            self._let_leave(life)
        elif isinstance(message, Failed) and message.command is None:
            self.expect_end(life.worker, message.error)
            if not self._has_started:
                self.fail(message.error)
        else:
            self._client.take(life.worker, message)

    # Looking at workers -------------------------------------------------------------------------

    def look_from_now_on(self) -> None:
        """Count time without progress from now on: the caller was not waiting before."""
        self._watch.begin()

    def look_for_hang(self) -> None:
        """Kill a worker that has something to do and makes no progress."""
        if self._timeout_s is None or self.fatal is not None or not self._watch.is_due():
            return
        busy = self._client.busy() if self._has_started else ()
        watched = {
            life.worker
            for life in self._lives
            if life.state is State.STARTING or (life.state is State.UP and life.worker in busy)
        }
        worker = self._watch.hanging(self._progress(), watched)
        if worker is None:
            return
        error = WorkerTimeoutError(
            f"worker {worker} made no progress for {self._timeout_s:g} s",
            where=self._client.where(worker),
            fix="look for an endless wait in the environment or the agent, or raise timeout",
            traceback_text=self.stacks_of(worker),
        )
        self.kill(worker, error)

    def _progress(self) -> list[int]:
        """Per worker, a number that changes when it does anything.

        It counts steps, and the lane within a step, as each of many lanes may be slow. While a
        worker starts it is the processor time, as a negative number, or 0 if that is unknown.
        """
        rows = self.control.rows
        progress: list[int] = ((rows[:, Word.STEPS] << 20) + rows[:, Word.LANE]).tolist()
        for life in self._lives:
            if not rows[life.worker, Word.STEPS] and life.pipe is not None and life.process:
                progress[life.worker] = -process_activity(life.process.pid)
        return progress

    def stacks(self) -> str:
        """What each worker is doing; may be called from a signal handler."""
        return described(ask(range(self.n_workers), self.processes), self._client.where)

    def stacks_of(self, worker: int) -> str:
        """What one worker is doing; empty if it cannot answer."""
        process = self.process(worker)
        answers = ask([worker], [] if process is None else [process])
        return "".join(answer.text for answer in answers)
