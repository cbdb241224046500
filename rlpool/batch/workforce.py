"""The workers of a batcher: they get ready, they agree, and those that fail are replaced."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rlpool.batch.claims import ClaimLock
from rlpool.batch.local import LocalWorker
from rlpool.errors import (
    RlpoolError,
    SpecError,
    Where,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
    compose,
)
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.machine.worker_limits import refuse_small_limit
from rlpool.memory.storage import Memory
from rlpool.record.failures import DEBUG_HINT
from rlpool.slots.blocks import StepSpecs
from rlpool.workers.failure_policy import FailurePolicy, Restarts
from rlpool.workers.hang_watch import HangWatch
from rlpool.workers.messages import Failed, Message, Probe, Ready, Retiring, Setup
from rlpool.workers.stack_dumps import described
from rlpool.workers.supervisor import LEAVE_S, Died, Supervisor, missing_guard_error

_LOG = logging.getLogger("rlpool")

_LOCK_S = 1.0
"""Whoever has the lock of claims has it for microseconds; after so long its owner is stuck."""

_LOCK_LOOK_S = 0.001

_OUT_OF_MEMORY = (
    "mostly that is the system, for want of memory (dmesg tells): run fewer workers, lower "
    "n_slots, or set max_rss_bytes"
)

Packed = tuple[Any, Memory]

_GONE, _STARTING, _PROBING, _UP, _LEAVING = range(5)


class WorkersDisagree(SpecError):
    """Workers whose steps consist of different things.

    Attributes:
        specs: What each worker reports.
    """

    def __init__(self, message: str, specs: list[StepSpecs]) -> None:
        super().__init__(message)
        self.specs = specs

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.specs)


class Client(Protocol):
    """Who gives the workers something to do."""

    def take(self, worker: int, message: Message) -> None:
        """A message of a worker."""

    def lost(self, worker: int, failure: WorkerError | None) -> None:
        """A worker is gone and will be replaced; ``failure`` says why, if it is one."""

    def returned(self, worker: int) -> None:
        """A worker's successor is ready."""

    def reported(self) -> None:
        """All workers have said again what their steps consist of, see ``Workforce.probe``."""

    def n_finished(self, worker: int) -> int:
        """Episodes that a worker has finished lately."""

    def where(self, worker: int) -> Where:
        """What a worker is doing."""


class Workforce:
    """The workers, as far as they are there.

    Args:
        setups: One per worker process; with ``in_process`` the only one.
        in_process: Run the one worker in this process.
        policy: What becomes of workers that fail.
        timeout_s: Seconds without progress after which a worker counts as hanging, ``None`` for
            never.
        client: Is told what happens.

    Attributes:
        fatal: Why nothing will work any more.
        n_lanes: Lanes of each worker, once they have started.
        specs: What a step consists of, once the workers have agreed on it.
        infos: What the workers were probed with, if they were.
    """

    def __init__(
        self,
        setups: Sequence[Setup],
        *,
        in_process: bool,
        policy: FailurePolicy,
        timeout_s: float | None,
        client: Client,
    ) -> None:
        self.fatal: RlpoolError | None = None
        self.n_lanes = 0
        self.specs: StepSpecs | None = None
        self.n_workers = len(setups)
        self._client = client
        self._policy = policy
        self._restarts = Restarts(policy.max_restarts)
        self._timeout_s = timeout_s
        self._watch = HangWatch(timeout_s)
        self._states = [_STARTING] * self.n_workers
        self._reports: dict[int, Ready] = {}
        self._failed_start: WorkerError | None = None
        self._has_started = False
        self.infos: Packed | None = None
        self._is_probing = False
        self._last_words: dict[int, WorkerError] = {}
        self._retiring: dict[int, str] = {}
        self._leave_by_s: dict[int, float] = {}  # when leaving workers are killed
        self._n_finished: dict[int, int] = {}  # episodes of each worker when one failed last
        self._workers: LocalWorker | Supervisor
        if in_process:
            self._workers = LocalWorker(setups[0], self._deliver)
        else:
            self._workers = Supervisor(setups, self._deliver, start_method=policy.start_method)

    def start(self) -> None:
        """Start all workers and wait until they are ready.

        Raises:
            WorkerStartupError, WorkerDiedError, WorkerTimeoutError, UsageError: If one does not
                get ready.
            RlpoolError: If they do not agree, or are larger than ``max_rss_bytes`` already.
        """
        self._workers.start()
        self.wait_until(
            lambda: (
                len(self._reports) == self.n_workers
                or self._failed_start is not None
                or self.fatal is not None
            ),
            set,
        )
        if self._failed_start is not None:
            raise self._failed_start
        self.refuse_if_dead()
        pids = [process.pid for process in self._workers.processes]
        refuse_small_limit(self._policy.max_rss_bytes, pids)
        self._has_started = True
        self.agree()
        most = self._policy.max_episodes_per_worker
        if self.repeats and most is not None and most < self.n_lanes:
            _LOG.warning(
                "max_episodes_per_worker=%d lets no more than so many of a worker's %d "
                "environments run at a time",
                most,
                self.n_lanes,
            )

    # Talking to workers -----------------------------------------------------------------------

    @property
    def allocate(self) -> Callable[[int], Memory]:
        """Makes memory that the workers can map."""
        return self._workers.allocate

    @property
    def repeats(self) -> bool:
        """Whether what was sent may have to be sent again."""
        return self._policy.may_restart and isinstance(self._workers, Supervisor)

    @property
    def patience_s(self) -> float:
        """How long to wait at most before looking for workers that hang."""
        return self._watch.patience_s

    @property
    def is_probing(self) -> bool:
        """Whether workers are finding out their keys."""
        return self._is_probing

    @property
    def ready(self) -> list[int]:
        """The workers that are there."""
        return [worker for worker, state in enumerate(self._states) if state == _UP]

    def send(self, worker: int, message: Message, memory: Memory | None = None) -> None:
        """Send a message to a worker that is ready; any other will not get it."""
        if self._states[worker] == _UP:
            self._workers.send(worker, message, memory)

    def poll(self, timeout_s: float | None) -> None:
        """Deliver what has arrived, and start workers whose time has come.

        Args:
            timeout_s: Longest wait for something to arrive.
        """
        due_s = self._restarts.next_due_s()
        if due_s is None:
            self._workers.poll(timeout_s)
        else:
            self._workers.poll(due_s if timeout_s is None else min(due_s, timeout_s))
            with InterruptsHeld():
                for worker in self._restarts.due() if self.fatal is None else ():
                    self._replace(worker)
        for worker, deadline_s in self._leave_by_s.items():
            if time.monotonic() > deadline_s:
                self._workers.kill(worker)

    def wait_until(self, is_over: Callable[[], bool], busy: Callable[[], set[int]]) -> None:
        """Handle messages until a condition holds.

        Args:
            is_over: The condition.
            busy: The workers that have something to do.
        """
        while not is_over():
            self.poll(self.patience_s)
            if not is_over():
                self.look_for_hang(busy())

    def look_for_hang(self, busy: set[int]) -> None:
        """Kill a worker that has something to do and makes no progress."""
        if self._timeout_s is None or self.fatal is not None:
            return
        busy = busy.intersection(self.ready)
        busy.update(w for w, state in enumerate(self._states) if state in (_STARTING, _PROBING))
        worker = self._watch.hanging(self._progress(), busy)
        if worker is None:
            return
        # Whoever waits for the lock hangs as well, but not by a fault of its own.
        worker = self._workers.holder_of_claims(worker)
        error = WorkerTimeoutError(
            f"worker {worker} made no progress for {self._timeout_s:g} s",
            where=self._client.where(worker),
            fix="look for an endless wait in the environment or the agent, or raise timeout",
            traceback_text=self._workers.stacks_of(worker),
        )
        self.note_last_words(worker, error)
        if not self._policy.restarts_on(error):
            self.fatal = error
        self._workers.kill(worker)

    def _progress(self) -> list[int]:
        """Numbers that change whenever a worker does anything: steps, and lanes within a step."""
        steps = self._workers.progress()
        return [
            n_steps * (self.n_lanes + 1) + self._workers.lane_in_use(worker)
            if n_steps > 0
            else n_steps
            for worker, n_steps in enumerate(steps)
        ]

    def progressed(self, worker: int) -> None:
        """Take note that a worker has finished something."""
        self._restarts.succeeded(worker)

    @contextmanager
    def claims_locked(self) -> Iterator[ClaimLock]:
        """A section in which no worker claims anything; one that keeps the lock is ended."""
        lock, waited_s = self._workers.claim_lock, 0.0
        while not lock.try_acquire() and waited_s < 2 * _LOCK_S:
            worker = -1 if waited_s < _LOCK_S else self._workers.holder_of_claims(-1)
            if worker >= 0:
                self._workers.kill(worker)
            time.sleep(_LOCK_LOOK_S)
            waited_s += _LOCK_LOOK_S
        try:
            yield lock
        finally:
            lock.release()

    def lane_in_use(self, worker: int) -> int:
        """The lane whose environment a worker ran last."""
        return self._workers.lane_in_use(worker)

    def deliver_logs(self) -> None:
        """Hand what workers logged to this process's loggers."""
        self._workers.deliver_logs()

    def stacks(self) -> str:
        """What the workers are doing, in words."""
        text = described(self._workers.stacks(), self._client.where)
        if isinstance(self._workers, LocalWorker):
            text += self._workers.stacks_of_environments()
        return text

    def abort(self) -> None:
        """End all workers at once; none is replaced."""
        self.fatal = self.fatal or WorkerDiedError(
            "the workers were ended after an interruption", exitcode=None, fix="make a new batcher"
        )
        self._workers.abort()

    def close(self) -> None:
        """End the workers."""
        self._workers.close()

    def refuse_if_dead(self) -> None:
        """Raise what has put an end to everything, if anything has."""
        if self.fatal is not None:
            raise self.fatal

    # Agreeing ---------------------------------------------------------------------------------

    def probe(self, infos: Packed) -> None:
        """Let all workers find out their keys with some infos; ``reported`` tells the end."""
        if self._is_probing:
            return
        self._is_probing = True
        self.infos = infos
        for worker in self.ready:
            self._ask(worker)

    def _ask(self, worker: int) -> None:
        if self.infos is not None:
            parcel, memory = self.infos
            self.send(worker, Probe(parcel), memory)
            self._states[worker] = _PROBING
            self._reports.pop(worker, None)

    def agree(self) -> RlpoolError | None:
        """Take over the workers' specs, if they know them; they must be the same.

        Returns:
            Why they do not know them.

        Raises:
            SpecError: If they are not the same.
        """
        reports = [self._reports[worker] for worker in sorted(self._reports)]
        self.n_lanes = reports[0].n_lanes
        for worker, report in enumerate(reports):
            if report.n_lanes != self.n_lanes:
                raise SpecError(
                    f"worker 0 has {self.n_lanes} environments, "
                    f"worker {worker} has {report.n_lanes}",
                    fix="create the same number of environments in every worker",
                )
            if report.error is not None and not isinstance(report.error, WorkerError):
                raise report.error
            if report.specs is None:
                _LOG.debug("keys are unknown until the first execute: %s", report.error)
                return report.error
        self.specs = _common_specs([report.specs for report in reports if report.specs])
        return None

    def _note_ready(self, worker: int, report: Ready) -> None:
        was_starting = self._states[worker] == _STARTING
        self._states[worker] = _UP
        wants_infos = report.specs is None and self.infos is not None
        if was_starting and wants_infos and (self._is_probing or self.specs is not None):
            self._ask(worker)
            return
        self._reports[worker] = report
        if self.specs is not None:
            self._welcome(worker, report)
            return
        self._restarts.ready(worker)
        if self._is_probing and len(self._reports) == self.n_workers:
            self._is_probing = False
            self._client.reported()

    def _welcome(self, worker: int, report: Ready) -> None:
        """Let a successor take part, if it is like the one before."""
        if report.specs is None and isinstance(report.error, WorkerError):
            self.note_last_words(worker, report.error)
            self._workers.kill(worker)
        elif report.specs != self.specs or report.n_lanes != self.n_lanes:
            self.fatal = SpecError(
                f"worker {worker} was started again, and its steps are different: "
                f"{report.error or report.specs}, before: {self.specs}",
                fix="create_env and create_agent must always make the same",
            )
        else:
            self._restarts.ready(worker)
            self._client.returned(worker)

    # Failing ----------------------------------------------------------------------------------

    def _deliver(self, worker: int, message: Message) -> None:
        """Take a worker's message."""
        if isinstance(message, Ready):
            self._note_ready(worker, message)
        elif isinstance(message, Retiring):
            self._retiring[worker] = message.why
            self._let_leave(worker)
        elif isinstance(message, Died):
            self._note_death(worker, message)
        elif isinstance(message, Failed) and message.request is None:
            self.note_last_words(worker, message.error)
            if not self._has_started:
                self._failed_start = self._failed_start or message.error
        else:
            self._client.take(worker, message)

    def note_last_words(self, worker: int, error: WorkerError) -> None:
        """Take note of why a worker is about to end."""
        self._last_words[worker] = error
        self._let_leave(worker)

    def _let_leave(self, worker: int) -> None:
        """Give a worker that is about to end a while to close its environments."""
        self._states[worker] = _LEAVING
        self._leave_by_s[worker] = time.monotonic() + LEAVE_S

    def _note_death(self, worker: int, died: Died) -> None:
        self._states[worker] = _GONE
        self._leave_by_s.pop(worker, None)
        self._reports.pop(worker, None)
        last_words, why = self._last_words.pop(worker, None), self._retiring.pop(worker, None)
        self.fatal = self.fatal or missing_guard_error(died)
        if why is not None and last_words is None and self.fatal is None:
            _LOG.info("worker %d is replaced after %s", worker, why)
            self._client.lost(worker, None)
            self._replace(worker)
            return
        failure = last_words or self._error_of(worker, died)
        if self.fatal is None and (
            self._failed_start is not None
            or self._workers.is_aborted
            or not self._policy.restarts_on(failure)
        ):
            self.fatal = failure
        self._note_progress()
        if self.fatal is None:
            self.fatal = self._restarts.note(worker, failure)
        if self.fatal is None:
            _LOG.warning("worker %d is started again: %s (%s)", worker, failure.what, failure.where)
            self._client.lost(worker, failure)

    def _note_progress(self) -> None:
        """Look at what the workers have done, of which there are messages only when it is over."""
        for worker in range(self.n_workers):
            n_finished = self._client.n_finished(worker)
            if n_finished != self._n_finished.get(worker, 0):
                self._n_finished[worker] = n_finished
                self._restarts.succeeded(worker)
        steps = self._workers.progress()
        self._restarts.look_at({worker: steps[worker] for worker in self.ready})

    def _error_of(self, worker: int, died: Died) -> WorkerDiedError:
        how = died.signal_name or f"exit code {died.exitcode}"
        return WorkerDiedError(
            f"worker {worker} died ({how})",
            exitcode=died.exitcode,
            signal_name=died.signal_name,
            where=self._client.where(worker),
            fix=_OUT_OF_MEMORY if died.signal_name == "SIGKILL" else DEBUG_HINT,
        )

    def _replace(self, worker: int) -> None:
        self._states[worker] = _STARTING
        try:
            self._workers.replace(worker)
        except OSError as error:
            self._states[worker] = _GONE
            failure = WorkerDiedError(
                f"worker {worker} could not be started again: {error}",
                exitcode=None,
                where=Where(worker),
                fix="free memory, processes or descriptors",
            )
            self.fatal = self._restarts.note(worker, failure)


def _common_specs(specs: list[StepSpecs]) -> StepSpecs:
    """What all workers report.

    Raises:
        WorkersDisagree: If they do not report the same.
    """
    for worker, other in enumerate(specs):
        if other != specs[0]:
            message = compose(
                f"workers 0 and {worker} disagree about their steps: {specs[0]} and {other}",
                fix="create_env and create_agent must not depend on the worker",
            )
            raise WorkersDisagree(message, specs)
    return specs[0]
