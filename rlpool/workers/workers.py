"""The life of worker processes: they start, work, end, and are replaced.

Every worker goes through the same states, whatever it runs::

    DOWN --due--> STARTING --ready--> UP --retiring, failed, dismissed--> LEAVING --> DOWN
    any state --the process ends--> DOWN
    STARTING or UP, busy, without progress for timeout --> killed
    LEAVING past its deadline --> killed

Every end is judged in ``_judge``: by the worker's last words if it left any, else by how it died.
Then either a successor is due, now or later, or nothing works any more (``fatal``).
"""

from __future__ import annotations

import logging
import math
import select
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
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
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.machine.limits import n_oom_kills, process_activity
from rlpool.machine.torch_settings import torch_settings
from rlpool.observe.control import Control, State, Word
from rlpool.workers.failure_policy import FailurePolicy, Restarts
from rlpool.workers.hang_watch import HangWatch
from rlpool.workers.logs import Logs
from rlpool.workers.process_end import end_all, reap, signal_name
from rlpool.workers.process_start import (
    launch,
    prepare,
    reap_template,
    starting_processes,
)
from rlpool.workers.wire import (
    CallerPipe,
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
"""How long one that is replaced may take to close its environments before it is killed."""

_UNKILLABLE_S = 10.0
"""A process that is still there this long after it was killed will not end soon."""

_OUT_OF_MEMORY = (
    "most likely the system ran out of memory (dmesg shows it): run fewer workers, "
    "or set max_episodes_per_worker if the environment leaks"
)

_CRASHED = "look there for what ends a process: native code that crashes, or os._exit"

_KILLED = (
    "find out what kills it from outside, or which code of the environment closes file descriptors "
    "that it has not opened (os.closerange, os.close)"
)


class Life:
    """One worker.

    Args:
        worker: Its number.

    Attributes:
        state: What it is doing.
        process: Its process, the last one if it has none.
        pipe: The caller's end of its pipe, ``None`` without a process.
        last_words: Why it is about to end, if that is a failure.
        retires: Whether it is about to end because it has run long enough.
        is_dismissed: Whether it ends for good.
        n_oom_kills: How many processes of the system had run out of memory before it started.
        deadline_s: When it starts again while it is down, when it is killed while it is leaving.
    """

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.state = State.DOWN
        self.process: SpawnProcess | None = None
        self.pipe: CallerPipe | None = None
        self.last_words: WorkerError | None = None
        self.retires = False
        self.is_dismissed = False
        self.n_oom_kills = 0
        self.deadline_s = 0.0


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

    def judge(self, worker: int, failure: WorkerError) -> int:
        """Decide about the work of a worker that failed, before ``lost``.

        Returns:
            How often the episode has failed that it was running, if that is not run again; 0 if
            the successor does everything again.
        """

    def busy(self) -> Collection[int]:
        """The workers that have something to do."""

    def running_in(self, worker: int) -> dict[str, Any]:
        """``where`` of a worker, ``options`` and ``actions`` of its episode, as far as known."""


class Workers:
    """Worker processes, and the caller's ends of their pipes.

    Nothing happens in the background: a caller that waits calls ``poll`` or ``wait_until``. Each
    worker costs the caller three descriptors: its pipe, and two by which multiprocessing lets
    caller and worker notice each other's end. The shared record and what waits for all of
    them cost one each.

    Args:
        runs: The main function of each worker process.
        root: Root of all seeds.
        policy: What happens to workers that fail.
        timeout_s: Seconds without progress after which a worker counts as hanging, ``None`` for
            never.
        client: Gives them work.

    Attributes:
        fatal: Why nothing works any more.
        control: The shared record.
        all_up: Whether every worker is ready.
        restarts: How many were replaced because they failed, and why.
    """

    def __init__(
        self,
        runs: Sequence[WorkerMain],
        root: int,
        policy: FailurePolicy,
        timeout_s: float | None,
        client: Client,
    ) -> None:
        n_workers = self.n_workers = len(runs)
        self.fatal: RlpoolError | None = None
        self.all_up = False
        self._root = root
        self._settings = torch_settings()  # now: a successor has the same
        self._runs = runs
        self._policy = policy
        self._timeout_s = timeout_s
        self._client = client
        self.restarts = Restarts(n_workers, policy.max_restarts)
        self._watch = HangWatch(timeout_s)
        self._lives = [Life(worker) for worker in range(n_workers)]
        self._epoll: select.epoll | None = select.epoll()  # None after close()
        self._worker_of: dict[int, int] = {}  # descriptor: worker
        self._wake_fd = -1
        self.control = Control.create(n_workers)
        self._logs = Logs()
        self.deliver_logs = self._logs.deliver
        # Runs once: on close(), when this object is collected, or before multiprocessing waits for
        # its children at exit; never in a process that was forked from this one.
        self._closing = threading.RLock()
        arguments = (self._lives, self._logs, self._closing)
        self._end = Finalize(self, _close, arguments, exitpriority=10)

    def all_processes(self) -> list[SpawnProcess]:
        """The process of each worker, the last one if it has ended; none after ``close``."""
        return [life.process for life in self._lives if life.process is not None]

    @property
    def up(self) -> list[int]:
        """The workers that are ready."""
        return [life.worker for life in self._lives if life.state is State.UP]

    # Starting ---------------------------------------------------------------------------------

    def _start(self, life: Life) -> None:
        """Start a worker, or the successor of one that ended; returns before it is ready.

        Raises:
            OSError: If the system allows no further process or descriptor.
        """
        start_method = self._policy.start_method
        prepare(start_method)
        self.control.worker_starts(life.worker)
        self._watch.forget(life.worker)
        life.n_oom_kills = n_oom_kills()
        place = Place(life.worker, self.n_workers, self._root, self._settings, self._policy)
        with starting_processes():
            life.pipe, life.process = launch(
                self._runs[life.worker], place, self.control.fd, start_method
            )
            self.control.rows[life.worker, Word.PID] = life.process.pid or 0
            self._set_state(life, State.STARTING)
            for fd in (life.pipe.fileno(), life.process.sentinel):
                self._worker_of[fd] = life.worker
                if self._epoll is not None:
                    self._epoll.register(fd, select.POLLIN)
            try:
                self._send(life, *self._client.setup(life.worker))
            except OSError:
                life.process.kill()
                raise

    def _send(self, life: Life, message: Message, memory: Memory | None = None) -> None:
        pipe = life.pipe
        if pipe is not None:
            # Descriptors that are sent must not leak. poll() notices a worker's death.
            with InterruptsHeld(), suppress(ConnectionError):
                pipe.send(message, memory)
            if pipe.events & select.POLLOUT and self._epoll is not None:
                self._epoll.modify(pipe, pipe.events)

    def _advance(self) -> None:
        """Start workers that are due, and kill those that take too long to end."""
        now_s = time.monotonic()
        for life in self._lives:
            if now_s < life.deadline_s or self.fatal is not None:
                continue
            if life.state is State.LEAVING:
                self.kill(life.worker)
                if now_s > life.deadline_s + _UNKILLABLE_S:
                    self.fatal = life.last_words or self._death(life.worker, None)
            elif life.state is State.DOWN:
                try:
                    self._start(life)
                except OSError as error:
                    what = f"worker {life.worker} could not be started again: {error}"
                    fix = "free memory, processes or descriptors"
                    failure = WorkerDiedError(what, exitcode=None, fix=fix)
                    if life.pipe is None:
                        self._restart(life, failure)
                    else:
                        self.expect_end(life.worker, failure)

    def _set_state(self, life: Life, state: State, seconds: float = math.inf) -> None:
        """Change a worker's state, for some time if it is down or leaving."""
        life.state, life.deadline_s = state, time.monotonic() + seconds
        self.control.set_state(life.worker, state)
        self.all_up = all(life.state is State.UP or life.is_dismissed for life in self._lives)

    # Ending -----------------------------------------------------------------------------------

    def expect_end(self, worker: int, failure: WorkerError) -> None:
        """Record that a worker will end because of a failure; if it does not, it is killed."""
        life = self._lives[worker]
        life.last_words = failure
        self._set_state(life, State.LEAVING, LEAVE_S)

    def dismiss(self, worker: int) -> None:
        """Record that a worker ends for good: it has no successor."""
        self._lives[worker].is_dismissed = True

    def fail(self, error: RlpoolError) -> None:
        """Put an end to everything; the first error is the one that is raised."""
        self.fatal = self.fatal or error

    def kill(self, worker: int, failure: WorkerError | None = None) -> None:
        """End a worker at once, for a failure if there is one; ``poll`` notices its death."""
        process = self._lives[worker].process
        if failure is not None:
            self.expect_end(worker, failure)
        if process is not None:
            process.kill()

    def _bury(self, life: Life, pipe: CallerPipe, process: SpawnProcess) -> None:
        """Clear away what is left of a worker that ended, and judge its end."""
        reap(process)  # first: if it is interrupted, close() ends what is left
        # Those that a forked copy of this process has, too, would be watched for ever.
        for fd in (pipe.fileno(), process.sentinel):
            self._worker_of.pop(fd, None)
            if self._epoll is not None:
                with suppress(OSError):  # it could not be registered
                    self._epoll.unregister(fd)
        pipe.close()
        life.pipe = None
        self._set_state(life, State.DOWN)
        if self.fatal is None and not life.is_dismissed:
            self._judge(life, process.exitcode)
        if self.fatal is not None or life.is_dismissed:
            self.control.set_state(life.worker, State.GONE)

    def _judge(self, life: Life, exitcode: int | None) -> None:
        """Decide what follows from a worker's end."""
        failure, retires = life.last_words, life.retires
        life.last_words, life.retires = None, False
        guard = missing_guard_error(exitcode)
        if guard is not None:
            self.fatal = guard
        elif retires and failure is None:
            _LOG.info("worker %d has run max_episodes_per_worker and is replaced", life.worker)
            self._set_state(life, State.DOWN, 0.0)
            self._client.lost(life.worker, None)
        else:
            failure = failure or self._death(life.worker, exitcode)
            if not self._policy.restarts_on(failure):
                self.fatal = failure
                return
            if self.control.rows[life.worker, Word.DONE]:  # messages come only after whole requests
                self.restarts.note_success(life.worker)
            self._restart(life, failure)

    def _restart(self, life: Life, failure: WorkerError) -> None:
        """Let a worker that failed start again when it is due."""
        where = f" ({failure.where})" if str(failure.where) else ""
        n_failures = self._client.judge(life.worker, failure)
        try:
            delay_s, what = self.restarts.judge(life.worker, failure, n_failures)
        except WorkerDiedError as error:
            self.fatal = error
            return
        self._set_state(life, State.DOWN, delay_s)
        _LOG.warning("%s%s: %s", failure.what, where, what)
        self._client.lost(life.worker, failure)

    def _death(self, worker: int, exitcode: int | None) -> WorkerDiedError:
        name, fix = signal_name(exitcode), _CRASHED
        if name == "SIGKILL":
            fix = _KILLED if n_oom_kills() == self._lives[worker].n_oom_kills else _OUT_OF_MEMORY
        return WorkerDiedError(
            f"worker {worker} died ({name or f'exit code {exitcode}'})",
            exitcode=exitcode,
            signal_name=name,
            **self._client.running_in(worker),
            fix=fix,
        )

    def abort(self) -> None:
        """End all workers at once; none is replaced, and ``close`` does not wait."""
        what = "the workers were ended after an interruption"
        self.fail(WorkerDiedError(what, exitcode=None, fix="make a new one"))
        for worker in range(self.n_workers):
            self.kill(worker)

    def close(self) -> None:
        """End all workers; if it is repeated after an interruption, it does the rest."""
        _close(self._lives, self._logs, self._closing)
        with suppress(TypeError):  # at the end of Python multiprocessing has no registry any more
            self._end.cancel()
        self._epoll = None  # a wait of another thread goes on
        reap_template()
        self.control.close()

    # Talking to workers -----------------------------------------------------------------------

    def start(self, wake_fd: int = -1) -> None:
        """Start all workers and wait until they are ready.

        Args:
            wake_fd: A descriptor that ends every wait when it can be read, -1 for none.

        Raises:
            WorkerStartupError, WorkerDiedError, WorkerTimeoutError, UsageError: If one does not
                get ready.
        """
        self._wake_fd = wake_fd
        if wake_fd >= 0 and self._epoll is not None:
            self._epoll.register(wake_fd, select.POLLIN)
        for n_started, life in enumerate(self._lives):
            try:
                self._start(life)
            except OSError as error:
                what = f"{n_started} of {self.n_workers} workers could be started: {error}"
                fix = "use fewer, or raise the limits of processes and files: ulimit -u, ulimit -n"
                raise WorkerStartupError(what, fix=fix) from error
        self.wait_until(lambda: self.all_up or self.fatal is not None)
        self.refuse_if_dead()
        self.restarts.has_started = True

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
        """A descriptor that can be read when a worker has sent something or has ended.

        It is open until ``close``; -1 after it.
        """
        return -1 if self._epoll is None else self._epoll.fileno()

    def wait_until(self, is_over: Callable[[], bool], until_s: float = math.inf) -> None:
        """Handle messages until a condition holds, and look for workers that hang.

        Args:
            is_over: The condition.
            until_s: When to give up, by ``time.monotonic``.
        """
        while not is_over() and (left_s := until_s - time.monotonic()) > 0.0:
            self.poll(min(self.patience_s, left_s))
            if not is_over():
                self.look_for_hang()

    def poll(self, timeout_s: float) -> bool:
        """Deliver what has arrived, logs included, and start workers that are due.

        Args:
            timeout_s: Longest wait for something to arrive.

        Returns:
            Whether the wake descriptor can be read.
        """
        epoll = self._epoll  # open as long as it is used here, even if a handler calls close()
        fds = {fd for fd, _ in epoll.poll(timeout_s)} if epoll is not None else set()
        if not self._end.still_active():
            if is_exiting() and threading.current_thread().daemon:
                # Python has ended the workers: this thread would take their ends for deaths.
                threading.Event().wait()
            return False
        is_woken = self._wake_fd in fds
        if not fds and timeout_s > 0.0:
            # A process that a dead worker had forked may keep its descriptors open.
            self._deliver_all(range(self.n_workers))
        else:
            self._deliver_all({self._worker_of[fd] for fd in fds if fd in self._worker_of})
        self.deliver_logs()
        if not self.all_up:
            self._advance()
        return is_woken

    def _deliver_all(self, ready: Iterable[int]) -> None:
        """Handle messages and ends of workers, and send what a pipe did not take before."""
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
            with InterruptsHeld(), suppress(ConnectionError):  # a death is handled below
                life.pipe.flush()
            if self._epoll is not None:
                self._epoll.modify(life.pipe, life.pipe.events)
        while life.pipe is not None and life.process is not None:
            try:
                message = life.pipe.receive()
                if message is None and life.process.is_alive():
                    return
                if message is None:
                    message = life.pipe.receive()  # sent just before the death
            except (EOFError, ConnectionError):
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
            life.retires = True
            self._set_state(life, State.LEAVING, LEAVE_S)
        elif isinstance(message, Failed) and message.command is None:
            self.expect_end(life.worker, message.error)
            if not self.restarts.has_started:
                self.fail(message.error)
        elif isinstance(message, Logged | Dropped):
            self._logs.add(life.worker, message)
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
        busy = self._client.busy() if self.restarts.has_started else ()
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
            **self._client.running_in(worker),
            fix="look for an endless wait in the environment or the agent, or raise timeout",
            traceback_text=stacks_of(self._lives[worker].process),
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


def _close(lives: list[Life], logs: Logs, closing: threading.RLock) -> None:
    """Close all workers; also run when a forgotten owner is collected or Python exits."""

    def read() -> None:
        for life in lives:
            for message in life.pipe.rest() if life.pipe else ():
                if isinstance(message, Logged | Dropped):
                    logs.add(life.worker, message)

    with closing:  # Python may exit while another thread closes them
        end_all([(life.pipe, life.process) for life in lives if life.pipe and life.process], read)
        for life in lives:
            life.pipe = life.process = None
    logs.deliver()  # last: it runs handlers of the user's
