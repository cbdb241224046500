"""The crew of worker processes: they start, work, end, and are replaced.

All workers have the same states::

    DOWN --due--> STARTING --ready--> UP --retiring, failed, dismissed--> LEAVING --> DOWN
    any state --the process ends--> DOWN
    STARTING or UP, busy, without progress for timeout --> killed
    LEAVING past its deadline --> killed

Each end is judged once, in ``_judge``, by the worker's last message if any, otherwise by how it
died. Then either a successor is due, now or later, or nothing works any more (``fatal``). Later
ends are not judged, nor is the end of a dismissed worker.
"""

from __future__ import annotations

import logging
import math
import select
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize, is_exiting
from typing import Any, Protocol

from rlpool.data.storage import Memory
from rlpool.errors import (
    RlpoolError,
    WorkerDiedError,
    WorkerError,
    WorkerStartupError,
    WorkerTimeoutError,
)
from rlpool.machine.imports import missing_guard_error
from rlpool.machine.interrupts import defer_signals
from rlpool.machine.own_state import torch_settings
from rlpool.machine.platform import n_oom_kills, process_activity
from rlpool.observe.control import Control, State, Word
from rlpool.workers.failure_policy import FailurePolicy, Restarts
from rlpool.workers.logs import Logs
from rlpool.workers.process_end import end_all, reap, signal_name
from rlpool.workers.process_start import (
    launch,
    prepare,
    starting_processes,
)
from rlpool.workers.wake import Wake
from rlpool.workers.wire import (
    CallerPipe,
    Close,
    Dropped,
    Failed,
    Logged,
    Message,
    Ready,
    Retiring,
)
from rlpool.workers.worker_process import Place, WorkerMain, stacks_of

_LOG = logging.getLogger("rlpool")

LEAVE_S = 3.0
"""Time for a worker that is replaced to close its environments before it is killed."""

_UNKILLABLE_S = 10.0
"""A process that still exists this long after it was killed will not end soon."""

_LONGEST_LOOK_S = 0.5
_LOOKS_PER_TIMEOUT = 4
"""The time between two looks counts up to this long, or this part of the timeout: a caller that
seldom looks cannot distinguish a worker that hangs from one that waited for the caller."""

_LOOKS_PER_PATIENCE = 4
"""A look costs time for each worker, and messages may arrive every few microseconds. So a look is
skipped if the last one was less than this part of the patience ago."""

_START_S = 20.0
"""Minimum time that a starting worker may be idle, because importing may be slow."""

_OUT_OF_MEMORY = (
    "most likely the system ran out of memory (dmesg shows it): run fewer workers, "
    "or set max_episodes_per_worker if the environment leaks"
)

_HANGS = "look for an endless wait in the environment or the agent, or raise timeout"

_LIMITED = "use fewer, or raise the limits of processes and files: ulimit -u, ulimit -n"

_CRASHED = "look there for code that ends a process: a crash in native code, or os._exit"

_KILLED = (
    "find out which program kills it, or which code of the environment closes file descriptors "
    "that it has not opened (os.closerange, os.close)"
)


@dataclass(eq=False)
class Link:
    """The caller's record of one worker.

    Attributes:
        worker: Its number.
        state: Its state.
        process: Its process, or its last one.
        pipe: The caller's end of its pipe, ``None`` without a process.
        last_words: The failure because of which it is about to end.
        is_dismissed: Whether it ends for good.
        n_oom_kills: The system's out-of-memory kills before it started.
        deadline_s: When it starts again if it is down, or is killed if it is leaving.
        progress: A number that changes with any activity: negative while it starts.
        idle_s: Observed time with work to do but no progress.
    """

    worker: int
    state: State = State.DOWN
    process: SpawnProcess | None = None
    pipe: CallerPipe | None = None
    last_words: WorkerError | None = None
    is_dismissed: bool = False
    n_oom_kills: int = 0
    deadline_s: float = 0.0
    progress: int = 0
    idle_s: float = 0.0


class Client(Protocol):
    """Gives the workers their work."""

    def on_message(self, worker: int, message: Message) -> None:
        """Handle a message from a worker, the first of which is ``Ready``.

        After ``Ready``, a worker is sent all outstanding work, whether or not it is a successor.
        """

    def lost(self, worker: int, failure: WorkerError | None, abandons: bool) -> bool:
        """Take back the unfinished work of a worker that is gone and will be replaced.

        Args:
            worker: The worker.
            failure: Why it ended, if it failed.
            abandons: Whether the episode of ``failure.where`` should not be run again.

        Returns:
            Whether that episode was abandoned: truncated, or reported as a failure.
        """

    def busy(self) -> Collection[int]:
        """Return the workers that have work to do."""

    def running_in(self, worker: int) -> dict[str, Any]:
        """Return a worker's ``where``, and its episode's ``options`` and ``actions`` if known."""


class Crew:
    """Worker processes, and the caller's ends of their pipes.

    Nothing happens in the background: a caller that waits calls ``look`` or ``wait_until``. Each
    worker costs the caller three descriptors: its pipe, and two with which multiprocessing detects
    the end of caller and worker. The shared record and the ``epoll`` of all workers cost one each.

    Args:
        runs: For each worker process, its main function, its first message (the set-up), and the
            memory of that message.
        root: Root of all seeds.
        policy: What to do with workers that fail.
        timeout_s: Seconds without progress after which a worker counts as hung, ``None`` for never.
        client: Gives them work.
        wake: Ends every wait when it is signalled.

    Attributes:
        fatal: The error after which nothing works any more.
        control: The shared record.
        all_up: Whether every worker is ready.
        restarts: Counts replacements of failed workers.
        patience_s: How long to wait at most before looking for workers that hang.
    """

    def __init__(
        self,
        runs: Sequence[tuple[WorkerMain, Message, Memory | None]],
        root: int,
        policy: FailurePolicy,
        timeout_s: float | None,
        client: Client,
        wake: Wake | None = None,
    ) -> None:
        n_workers = self.n_workers = len(runs)
        self.fatal: RlpoolError | None = None
        self.all_up = False
        self._root = root
        self._settings = torch_settings()  # read now, so that successors have the same
        self._runs = runs
        self._policy = policy
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self.patience_s = min(_LONGEST_LOOK_S, self._timeout_s / _LOOKS_PER_TIMEOUT)
        self._looked_s = time.monotonic()
        self._watched_s = 0.0  # since the last look for workers that hang
        self._client = client
        self.restarts = Restarts(n_workers, policy)
        self._links = [Link(worker) for worker in range(n_workers)]
        self._epoll: select.epoll | None = select.epoll()  # None after close()
        self._worker_of: dict[int, int] = {}  # descriptor: worker
        self._wake = wake
        if wake is not None:
            self._epoll.register(wake.fd, select.POLLIN)
        self.control = Control.create(n_workers)
        self._logs = Logs()
        # Runs once: on close(), when this object is collected, or before multiprocessing waits for
        # its children at exit; never in a process that was forked from this one.
        self._closing = threading.RLock()
        arguments = (self._links, self._logs, self._closing)
        self._end = Finalize(self, _close, arguments, exitpriority=10)

    def all_processes(self) -> list[SpawnProcess]:
        """Return each worker's process, the last one if it has ended; none after ``close``."""
        return [link.process for link in self._links if link.process is not None]

    @property
    def up(self) -> list[int]:
        """The workers that are ready."""
        return [link.worker for link in self._links if link.state is State.UP]

    # Starting ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all workers and wait until they are ready.

        Raises:
            WorkerStartupError, WorkerDiedError, WorkerTimeoutError, UsageError: If one does not
                become ready.
        """
        self._advance()
        self.wait_until(lambda: self.all_up or self.fatal is not None)
        self.refuse_if_dead()
        self.restarts.has_started = True

    def _start(self, link: Link) -> None:
        """Start a worker, or the successor of one that ended; returns before it is ready.

        Raises:
            OSError: If the system allows no further process or descriptor.
        """
        start_method = self._policy.start_method
        prepare(start_method)
        self.control.worker_starts(link.worker)
        link.progress = 0
        link.n_oom_kills = n_oom_kills()
        run, *setup = self._runs[link.worker]
        place = Place(link.worker, self.n_workers, self._root, self._settings, self._policy)
        with starting_processes():
            link.pipe, link.process = launch(run, place, self.control.fd, start_method)
            self.control.rows[link.worker, Word.PID] = link.process.pid or 0
            self._set_state(link, State.STARTING)
            for fd in (link.pipe.fileno(), link.process.sentinel):
                self._worker_of[fd] = link.worker
                if self._epoll is not None:
                    self._epoll.register(fd, select.POLLIN)
            self._send(link, *setup)

    def _advance(self) -> None:
        """Start workers that are due, and kill those that take too long to end."""
        now_s = time.monotonic()
        for link in self._links:
            if now_s < link.deadline_s or self.fatal is not None:
                continue
            if link.state is State.LEAVING:
                self.kill(link.worker)
                if now_s > link.deadline_s + _UNKILLABLE_S:
                    self.fatal = link.last_words or self._death(link.worker, None)
            elif link.state is State.DOWN:
                try:
                    self._start(link)
                except OSError as error:
                    n, n_all = link.worker, self.n_workers
                    if self.restarts.has_started:
                        message = f"worker {n} could not be restarted: {error}"
                        self._restart(link, WorkerDiedError(message, exitcode=None, fix=_LIMITED))
                    else:
                        message = f"{n} of {n_all} workers could be started: {error}"
                        self.fail(WorkerStartupError(message, fix=_LIMITED))

    def _set_state(self, link: Link, state: State, seconds: float = math.inf) -> None:
        """Change a worker's state; the deadline applies if it is down or leaving."""
        link.state, link.deadline_s = state, time.monotonic() + seconds
        self.control.rows[link.worker, Word.STATE] = state
        self.all_up = all(link.state is State.UP or link.is_dismissed for link in self._links)

    # Ending -----------------------------------------------------------------------------------

    def expect_end(self, worker: int, failure: WorkerError) -> None:
        """Record that a worker will end because of a failure; it is killed if it does not."""
        link = self._links[worker]
        link.last_words = failure
        self._set_state(link, State.LEAVING, LEAVE_S)

    def dismiss(self, worker: int) -> None:
        """Let a worker end for good: it has no successor."""
        self.send(worker, Close())
        self._links[worker].is_dismissed = True

    def fail(self, error: RlpoolError) -> None:
        """End all work; the first error is the one that is raised."""
        self.fatal = self.fatal or error

    def refuse_if_dead(self) -> None:
        """Raise ``fatal`` if it is set."""
        if self.fatal is not None:
            raise self.fatal

    def kill(self, worker: int, failure: WorkerError | None = None) -> None:
        """End a worker at once, because of a failure if given; ``look`` notices its death."""
        process = self._links[worker].process
        if failure is not None:
            self.expect_end(worker, failure)
        if process is not None:
            process.kill()

    def _bury(self, link: Link, pipe: CallerPipe, process: SpawnProcess) -> None:
        """Clean up after a worker that ended, and judge its end."""
        reap(process)  # first: if it is interrupted, close() ends the rest
        # Otherwise those that a forked copy of this process also holds would be polled for ever.
        for fd in (pipe.fileno(), process.sentinel):
            self._worker_of.pop(fd, None)
            if self._epoll is not None:
                with suppress(OSError):  # it could not be registered
                    self._epoll.unregister(fd)
        pipe.close()
        link.pipe = None
        before, failure, link.last_words = link.state, link.last_words, None
        self._set_state(link, State.DOWN)
        if self.fatal is None and not link.is_dismissed:
            if before is not State.LEAVING:
                failure = self._death(link.worker, process.exitcode)
            self._judge(link, failure, process.exitcode)
        if self.fatal is not None or link.is_dismissed:
            self._set_state(link, State.GONE)

    def _judge(self, link: Link, failure: WorkerError | None, exitcode: int | None) -> None:
        """Decide what follows a worker's end."""
        guard = missing_guard_error(exitcode)
        if guard is not None:
            self.fatal = guard
        elif failure is None:
            _LOG.info("worker %d has run max_episodes_per_worker and is replaced", link.worker)
            self._set_state(link, State.DOWN, 0.0)
            self._client.lost(link.worker, None, False)
        elif not self._policy.restarts_on(failure):
            self.fatal = failure
        else:
            if self.control.rows[link.worker, Word.DONE]:
                self.restarts.note_success(link.worker)
            self._restart(link, failure)

    def _restart(self, link: Link, failure: WorkerError) -> None:
        """Let a failed worker start again when it is due."""
        where = f" ({failure.where})" if str(failure.where) else ""
        abandons = self.restarts.abandons(failure)
        is_abandoned = self._client.lost(link.worker, failure, abandons)
        try:
            delay_s, message = self.restarts.judge(link.worker, failure, is_abandoned)
        except WorkerDiedError as error:
            self.fatal = error
            return
        self._set_state(link, State.DOWN, delay_s)
        _LOG.warning("%s%s: %s", failure.what, where, message)

    def _death(self, worker: int, exitcode: int | None) -> WorkerDiedError:
        name, fix = signal_name(exitcode), _CRASHED
        if name == "SIGKILL":
            fix = _KILLED if n_oom_kills() == self._links[worker].n_oom_kills else _OUT_OF_MEMORY
        return WorkerDiedError(
            f"worker {worker} died ({name or f'exit code {exitcode}'})",
            exitcode=exitcode,
            signal_name=name,
            **self._client.running_in(worker),
            fix=fix,
        )

    def abort(self) -> None:
        """End all workers at once; none is replaced, and ``close`` does not wait."""
        message = "the workers were ended after an interruption"
        self.fail(WorkerDiedError(message, exitcode=None, fix="make a new one"))
        for worker in range(self.n_workers):
            self.kill(worker)

    def close(self) -> None:
        """End all workers; a repeated call completes an interrupted one."""
        _close(self._links, self._logs, self._closing)
        with suppress(TypeError):  # at interpreter exit multiprocessing no longer has a registry
            self._end.cancel()
        self._epoll = None  # a wait in another thread continues
        self.control.close()

    # Messages to workers ----------------------------------------------------------------------

    def send(self, worker: int, message: Message, memory: Memory | None = None) -> None:
        """Send a message to a ready worker; any other is sent all work when it becomes ready.

        It does not wait for the worker: ``look`` sends the rest when its pipe is full.
        """
        link = self._links[worker]
        if link.state is State.UP:
            self._send(link, message, memory)

    def _send(self, link: Link, message: Message, memory: Memory | None = None) -> None:
        pipe: Any = link.pipe
        try:
            try:
                if memory is None:
                    pipe.send(message)
                else:
                    with defer_signals():  # the duplicated descriptor must not leak
                        pipe.send(message, memory)
            except ConnectionError:
                return  # the worker's death is noticed elsewhere
        except OSError as error:
            text = f"worker {link.worker} cannot be sent a message: {error}"
            self.fail(WorkerDiedError(text, exitcode=None, fix=_LIMITED))
        if pipe.events & select.POLLOUT and self._epoll is not None:
            self._epoll.modify(pipe, pipe.events)

    def fileno(self) -> int:
        """Return a descriptor that is readable when a worker has sent something or has ended.

        It stays open until ``close``, and is -1 afterwards.
        """
        return -1 if self._epoll is None else self._epoll.fileno()

    def wait_until(self, is_over: Callable[[], bool], until_s: float = math.inf) -> None:
        """Handle messages until a condition holds, and look for hung workers.

        Args:
            is_over: The condition.
            until_s: When to stop waiting, as ``time.monotonic``.
        """
        while not is_over() and (left_s := until_s - time.monotonic()) > 0.0:
            self.look(left_s)

    def look(self, longest_s: float = 0.0) -> None:
        """Handle all messages and logs that have arrived; start due workers and kill hung ones.

        Args:
            longest_s: Maximum wait for something to arrive.
        """
        timeout_s = min(longest_s, self.patience_s)
        if not self.all_up:
            due_s = min(link.deadline_s for link in self._links) - time.monotonic()
            timeout_s = min(timeout_s, max(0.0, due_s) + 0.001)
        epoll = self._epoll  # stays open while it is used here, even if a handler calls close()
        fds = {fd for fd, _ in epoll.poll(timeout_s)} if epoll is not None else set()
        if not self._end.still_active():
            if is_exiting() and threading.current_thread().daemon:
                # Python has ended the workers: this thread would mistake that for their deaths.
                threading.Event().wait()
            return
        if self._wake is not None and self._wake.fd in fds:
            self._wake.wait()
        if not fds and timeout_s > 0.0:
            # A dead worker's descriptors may be kept open by a process that it had forked.
            self._deliver_all(range(self.n_workers))
        else:
            self._deliver_all({self._worker_of[fd] for fd in fds if fd in self._worker_of})
        self._logs.deliver()
        if not self.all_up:
            self._advance()
        self._look_for_hang()

    def _deliver_all(self, ready: Iterable[int]) -> None:
        """Handle messages and ends of workers, and send what did not fit into a pipe before."""
        try:
            for worker in sorted(ready):
                self._deliver_from(self._links[worker])
        except BaseException as error:
            if isinstance(error, ValueError) and self.fatal is not None:
                return  # another thread has closed them, including processes
            self.abort()  # a message may be lost
            raise

    def _deliver_from(self, link: Link) -> None:
        """Handle a worker's messages, and its death after the last one."""
        if link.pipe is not None and link.pipe.events & select.POLLOUT:
            with defer_signals(), suppress(ConnectionError):  # a death is handled below
                link.pipe.flush()
            if self._epoll is not None:
                self._epoll.modify(link.pipe, link.pipe.events)
        while link.pipe is not None and link.process is not None:
            try:
                message = link.pipe.receive()
                if message is None and link.process.is_alive():
                    return
                if message is None:
                    message = link.pipe.receive()  # sent just before the death
            except (EOFError, ConnectionError):
                message = None
            if message is None:
                self._bury(link, link.pipe, link.process)
                return
            self._on_message(link, message)

    def _on_message(self, link: Link, message: Message) -> None:
        if isinstance(message, Logged | Dropped):
            self._logs.add(link.worker, message)
        elif isinstance(message, Retiring):
            self._set_state(link, State.LEAVING, LEAVE_S)
        elif isinstance(message, Failed) and message.command is None:
            self.expect_end(link.worker, message.error)
            if not self.restarts.has_started:
                self.fail(message.error)
        else:
            if isinstance(message, Ready):
                self._set_state(link, State.UP)
            self._client.on_message(link.worker, message)

    # Hung workers -------------------------------------------------------------------------------

    def _look_for_hang(self) -> None:
        """Kill workers that have work to do but make no progress."""
        now_s = time.monotonic()
        self._watched_s += min(now_s - self._looked_s, self.patience_s)
        self._looked_s = now_s
        if self._watched_s < self.patience_s / _LOOKS_PER_PATIENCE or self.fatal is not None:
            return
        passed_s, self._watched_s = min(self._watched_s, self.patience_s), 0.0
        busy = self._client.busy() if self.restarts.has_started else ()
        for link in self._links:
            before, link.progress = link.progress, self._progress_of(link)
            is_busy = (
                link.worker in busy if link.state is State.UP else link.state is State.STARTING
            )
            is_idle = is_busy and link.progress == before != 0
            link.idle_s = link.idle_s + passed_s if is_idle else 0.0
            limit_s = max(self._timeout_s, _START_S) if link.progress < 0 else self._timeout_s
            if link.idle_s > limit_s:
                error = WorkerTimeoutError(
                    f"worker {link.worker} made no progress for {self._timeout_s:g} s",
                    **self._client.running_in(link.worker),
                    fix=_HANGS,
                    traceback_text=stacks_of(link.process),
                )
                self.kill(link.worker, error)

    def _progress_of(self, link: Link) -> int:
        """Return a number that changes with a worker's activity, 0 if it is unknown.

        It counts steps, and the lane within a step, as each of many lanes may be slow. While a
        worker starts, it is the negative processor time.
        """
        n_steps, lane = self.control.rows[link.worker, [Word.STEPS, Word.LANE]].tolist()
        if n_steps or link.pipe is None or link.process is None:
            return int((n_steps << 20) + lane)
        return -process_activity(link.process.pid)


def _close(links: list[Link], logs: Logs, closing: threading.RLock) -> None:
    """Close all workers; also run when an unclosed owner is collected or Python exits."""

    def read() -> None:
        for link in links:
            for message in link.pipe.rest() if link.pipe else ():
                if isinstance(message, Logged | Dropped):
                    logs.add(link.worker, message)

    with closing:  # Python may exit while another thread closes them
        end_all([(link.pipe, link.process) for link in links if link.pipe and link.process], read)
        for link in links:
            link.pipe = link.process = None
    logs.deliver()  # last, because it runs the user's handlers
