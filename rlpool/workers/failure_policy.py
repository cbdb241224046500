"""What becomes of workers that fail: which are started again, when, and when to give up."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypedDict

from rlpool.errors import EnvError, Where, WorkerDiedError, WorkerError, WorkerTimeoutError
from rlpool.machine.arguments import check_choice, whole_number

START_METHODS = ("auto", "spawn")
"""How worker processes may be started, see docs/start_methods.md."""

DEFAULT_TIMEOUT_S = 600.0
"""A worker that makes no step for this long counts as hanging: far beyond any slow ``step``."""

DEFAULT_MAX_RESTARTS = 16
"""Restarts of all workers of one owner: enough for odd deaths, few enough to be noticed."""

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0
"""Delays before the second and later restarts in a row of one worker: they double up to here."""

_MOST_FAILED_STARTS = 3
_MOST_BROKEN_STARTS = 10
_MOST_BROKEN_RESTARTS = 25
"""Failures in a row before a worker is ready after which it is given up: the first number is for
failures of its own, and for crashes and hangs where no worker was ever ready; the second for
signals that may come from outside; the third for signals and hangs where one was ready before,
which with the delays takes a minute and a half."""

_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")
"""Signals that a process mostly sends itself."""

DEFAULT_MAX_EPISODE_RESTARTS = 2
"""Failures of one episode: the first may be an accident, a second is not."""

_LONGEST_HISTORY = 1000
"""Failures that are remembered: an owner without a limit may live for months."""


@dataclass(frozen=True)
class FailurePolicy:
    """How workers start, what becomes of those that fail, and when healthy ones are replaced.

    Attributes:
        on_worker_failure: ``"restart"`` replaces workers that died or hang, ``"raise"`` reports
            them.
        max_restarts: The most replacements in all, ``None`` for no limit.
        on_env_error: ``"raise"`` reports an environment that raises, ``"restart"`` replaces its
            worker and runs the episode again, ``"truncate"`` replaces it and ends the episode.
        max_episode_restarts: An episode that fails this often is not run again:
            it is truncated, or reported with ``on_env_error="raise"``. ``None`` for no limit.
        max_episodes_per_worker: A worker is replaced after this many episodes, ``None`` for never.
        start_method: How processes are started, one of ``START_METHODS``.

    Raises:
        SpecError: If a value is none of these; the message names it.
    """

    on_worker_failure: str = "restart"
    max_restarts: int | None = DEFAULT_MAX_RESTARTS
    on_env_error: str = "raise"
    max_episode_restarts: int | None = DEFAULT_MAX_EPISODE_RESTARTS
    max_episodes_per_worker: int | None = None
    start_method: str = "auto"

    def __post_init__(self) -> None:
        check_choice("on_worker_failure", self.on_worker_failure, ("restart", "raise"))
        check_choice("on_env_error", self.on_env_error, ("restart", "raise", "truncate"))
        for name, least in (
            ("max_restarts", 0),
            ("max_episode_restarts", 1),
            ("max_episodes_per_worker", 1),
        ):
            if (value := getattr(self, name)) is not None:
                whole_number(name, value, least, fix=f"pass {name}=None for no limit")
        fix = "'auto' forks workers from a template where that is safe, 'spawn' never does"
        check_choice("start_method", self.start_method, START_METHODS, fix=fix)

    @property
    def restarts_workers(self) -> bool:
        """Whether workers that died or hang are replaced."""
        return self.on_worker_failure == "restart"

    @property
    def restarts_on_env_errors(self) -> bool:
        """Whether workers whose environment raised are replaced."""
        return self.on_env_error != "raise"

    @property
    def truncates(self) -> bool:
        """Whether an episode whose environment raised is truncated there."""
        return self.on_env_error == "truncate"

    def restarts_on(self, failure: WorkerError) -> bool:
        """Whether a worker that ended with this failure is replaced."""
        is_env_error = isinstance(failure, EnvError)
        return self.restarts_on_env_errors if is_env_error else self.restarts_workers

    def gives_up(self, failure: WorkerError, n_failures: int) -> bool:
        """Whether an episode that failed so often is not run again."""
        if self.truncates and isinstance(failure, EnvError):
            return True
        return self.max_episode_restarts is not None and n_failures >= self.max_episode_restarts

    @property
    def recycles(self) -> bool:
        """Whether healthy workers are ever replaced."""
        return self.max_episodes_per_worker is not None

    @property
    def may_restart(self) -> bool:
        """Whether workers are ever replaced."""
        return self.restarts_workers or self.restarts_on_env_errors or self.recycles


class PolicyOptions(TypedDict, total=False):
    """The arguments of ``FailurePolicy``, for functions that take them as keywords."""

    on_worker_failure: str
    max_restarts: int | None
    on_env_error: str
    max_episode_restarts: int | None
    max_episodes_per_worker: int | None
    start_method: str


class BatcherOptions(PolicyOptions, total=False):
    """They, and second names of a batcher's arguments, which ``also_takes`` replaces."""

    seed: int | None
    n_threads: int


@dataclass
class _Record:
    """The failures in a row of one worker.

    Attributes:
        n: All of them, without any work done in between.
        is_ready: Whether it got ready since the last one.
        n_failed_starts: Failures of its own before it was ready.
        n_broken_starts: Failures before it was ready that may come from outside.
    """

    n: int = 0
    is_ready: bool = False
    n_failed_starts: int = 0
    n_broken_starts: int = 0


class Restarts:
    """Decides when workers that failed start again.

    A worker's first failure is followed by a restart at once. While it fails again without having
    done any work, each restart waits twice as long as the one before. A worker that fails again and
    again before it is ready is given up: soon if it fails by itself, later if signals end it and
    starting has worked before.

    Args:
        n_workers: Number of workers.
        max_restarts: The most restarts in all, ``None`` for no limit.

    Attributes:
        n_restarts: Restarts so far.
    """

    def __init__(self, n_workers: int, max_restarts: int | None) -> None:
        self.n_restarts = 0
        self._max_restarts = max_restarts
        self._records = [_Record() for _ in range(n_workers)]
        self._history: deque[WorkerError] = deque(maxlen=_LONGEST_HISTORY)
        self._was_any_ready = False
        self._has_failed_starts = False  # in any record

    @property
    def failures(self) -> tuple[WorkerError, ...]:
        """All failures so far, of the last ones only if they are very many."""
        return tuple(self._history)

    def __str__(self) -> str:
        most = self._max_restarts
        return f"{self.n_restarts}" if most is None else f"{self.n_restarts} of {most}"

    def delay_s(self, worker: int, failure: WorkerError) -> float:
        """Record a failure; returns how long to wait before the worker starts again.

        Args:
            worker: Which worker.
            failure: Why it failed.

        Raises:
            WorkerDiedError: If it does not; its ``history`` has all failures.
        """
        record = self._records[worker]
        self._history.append(failure)
        record.n += 1
        if self._max_restarts is not None and self.n_restarts >= self._max_restarts:
            if not self._max_restarts:
                raise self._final(failure, "max_restarts=0 allows no restart")
            why = f"all {self._max_restarts} restarts (max_restarts) are used up"
            advice = "; if that many failures are expected, pass a larger max_restarts"
            raise self._final(failure, why, advice)
        if not record.is_ready and self._start_is_hopeless(record, failure):
            n_starts = record.n_failed_starts + record.n_broken_starts
            raise self._final(failure, f"it failed {n_starts} times before it was ready")
        record.is_ready = False
        self.n_restarts += 1
        if record.n == 1:
            return 0.0
        return float(min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(record.n - 2, 16)))

    def forgive(self, worker: int, n_before: int) -> None:
        """Record a failure that will not come again, like ``n_before`` earlier ones."""
        self.n_restarts = max(0, self.n_restarts - n_before)
        self._records[worker] = _Record()

    def note_ready(self, worker: int) -> None:
        """Record that a worker has its environments, before it has done any work."""
        record = self._records[worker]
        record.is_ready, record.n_failed_starts, record.n_broken_starts = True, 0, 0
        self._was_any_ready = True

    def note_success(self, worker: int) -> None:
        """Record that a worker has done some work: its next failure counts as a first one."""
        self._records[worker].n = 0
        if self._has_failed_starts:  # where one can work, so can the others
            for record in self._records:
                record.n_failed_starts = record.n_broken_starts = 0
            self._has_failed_starts = False
        self._was_any_ready = True

    def _start_is_hopeless(self, record: _Record, failure: WorkerError) -> bool:
        """Whether a worker has failed too often in a row before it was ready."""
        signal_name = getattr(failure, "signal_name", None)
        hangs = isinstance(failure, WorkerTimeoutError)
        self._has_failed_starts = True
        may_be_its_own = not self._was_any_ready and (hangs or signal_name in _CRASHES)
        if may_be_its_own or not (hangs or signal_name):
            record.n_failed_starts += 1
            return record.n_failed_starts >= _MOST_FAILED_STARTS
        record.n_broken_starts += 1
        most = _MOST_BROKEN_RESTARTS if self._was_any_ready else _MOST_BROKEN_STARTS
        return record.n_broken_starts >= most

    def _final(self, failure: WorkerError, why: str, advice: str = "") -> WorkerDiedError:
        n = self.n_restarts
        after = "" if not n else f" after {n} restart{'s' * (n > 1)} in all"
        fix = failure.fix or "look at the failures in this error's .history"
        what = f"{failure.what}{after}, and is not started again: {why}"
        return final_error(what, failure, self.failures, fix + advice)


def final_error(
    what: str, latest: WorkerError | None, history: Iterable[WorkerError], fix: str
) -> WorkerDiedError:
    """The error of an owner that starts what has failed no more.

    Args:
        what: What has happened.
        latest: The last failure, whose place and traceback it has.
        history: All failures.
        fix: What to do.
    """
    return WorkerDiedError(
        what,
        exitcode=getattr(latest, "exitcode", None),
        signal_name=getattr(latest, "signal_name", None),
        where=getattr(latest, "where", Where()),
        fix=fix,
        traceback_text=getattr(latest, "traceback_text", ""),
        history=tuple(history),
    )


class Recycling:
    """Says when this worker should be replaced by a fresh one.

    A worker always runs at least one episode: otherwise workers would only be replaced and never
    work.

    Args:
        policy: The limit on episodes.

    Attributes:
        n_begun: Episodes that it has begun.
        has_limits: Whether there is anything that makes it due.
    """

    def __init__(self, policy: FailurePolicy) -> None:
        self.n_begun = 0
        self._max_episodes = policy.max_episodes_per_worker
        self.has_limits = policy.recycles

    def is_due(self, n_new: int = 1) -> bool:
        """Whether this process should be replaced before it begins ``n_new`` more episodes."""
        if self._max_episodes is None or not self.n_begun:
            return False
        return self.n_begun + n_new > self._max_episodes

    def __str__(self) -> str:
        return f"{self.n_begun} episodes"
