"""When workers that failed are started again, how often, and when to give up."""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlpool.errors import (
    EnvError,
    SpecError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)

START_METHODS = ("auto", "spawn")
"""How worker processes may be started, see ``workers.warm_start``."""

DEFAULT_MAX_RESTARTS = 16
"""Restarts of all workers of one owner: enough for odd deaths, few enough to be noticed."""

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0
"""Delays before the second and later restarts in a row of one worker: they double up to here."""

_MOST_FAILED_STARTS = 3
_MOST_BROKEN_STARTS = 10
"""A worker that fails so often in a row before it is ready will not get ready the next time: the
first number is for failures of its own, the second for signals and hangs, which may come from
outside and then hit a worker that is starting as well as any other."""

_CALM_S = 90.0
"""Where a worker has been ready before, starting works, and signals come from outside as long as
anybody sends them. So long without one worker that gets ready or makes a step, they are taken for
the start's own all the same: far more than any start takes."""

_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")
"""Signals that a process mostly sends itself."""

_LONGEST_HISTORY = 1000
"""Failures that are remembered: an owner without a limit may live for months."""

_LEAST_RSS_BYTES = 2**20
"""No process that imported this library is as small: a smaller limit is a mistaken unit."""


@dataclass(frozen=True)
class FailurePolicy:
    """How workers start, what becomes of those that fail, and when healthy ones are replaced.

    Attributes:
        on_worker_failure: ``"restart"`` replaces workers that died or hang, ``"raise"`` reports
            them.
        max_restarts: How many replacements there may be in all, ``None`` for no limit.
        on_env_error: ``"raise"`` reports an environment that raises, ``"restart"`` replaces its
            worker.
        max_episodes_per_worker: A worker that has completed so many episodes is replaced, ``None``
            for never.
        max_rss_bytes: A worker whose resident memory is larger is replaced, ``None`` for never.
        start_method: How processes are started, one of ``START_METHODS``.

    Raises:
        SpecError: If a value is none of those; the message names it.
    """

    on_worker_failure: str = "restart"
    max_restarts: int | None = DEFAULT_MAX_RESTARTS
    on_env_error: str = "raise"
    max_episodes_per_worker: int | None = None
    max_rss_bytes: int | None = None
    start_method: str = "auto"

    def __post_init__(self) -> None:
        for name in ("on_worker_failure", "on_env_error"):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in ("restart", "raise"):
                raise SpecError(f"{name} should be 'restart' or 'raise', got {value!r}")
        for name, least in (
            ("max_restarts", 0),
            ("max_episodes_per_worker", 1),
            ("max_rss_bytes", _LEAST_RSS_BYTES),
        ):
            _check_limit(name, getattr(self, name), least)
        if not isinstance(self.start_method, str) or self.start_method not in START_METHODS:
            raise SpecError(
                f"start_method should be 'auto' or 'spawn', got {self.start_method!r}",
                fix="'auto' forks workers from a template where that is safe, 'spawn' never does",
            )

    @property
    def restarts_workers(self) -> bool:
        """Whether workers that died or hang are replaced."""
        return self.on_worker_failure == "restart"

    def restarts_on(self, failure: WorkerError) -> bool:
        """Whether the worker that a failure put an end to is replaced."""
        if isinstance(failure, EnvError):
            return self.restarts_on_env_errors
        return self.restarts_workers

    @property
    def restarts_on_env_errors(self) -> bool:
        """Whether workers whose environment raised are replaced."""
        return self.on_env_error == "restart"

    @property
    def recycles(self) -> bool:
        """Whether healthy workers are ever replaced."""
        return self.max_episodes_per_worker is not None or self.max_rss_bytes is not None

    @property
    def may_restart(self) -> bool:
        """Whether workers are ever replaced, for whatever reason."""
        return self.restarts_workers or self.restarts_on_env_errors or self.recycles


class Restarts:
    """Notes the failures of one owner's workers and says when which of them starts again.

    The first failure of a worker is followed by a restart at once. While the same worker fails
    again without success in between, each restart waits twice as long as the one before. One that
    fails again and again before it is ready is given up: soon if it fails by itself, with more
    patience if signals end it and starting has worked before.

    Args:
        max_restarts: How many restarts there may be in all, ``None`` for no limit.
        clock: Seconds that never go back.

    Attributes:
        n_restarts: Restarts that were granted.
    """

    def __init__(
        self, max_restarts: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.n_restarts = 0
        self._max_restarts = max_restarts
        self._clock = clock
        self._history: deque[WorkerError] = deque(maxlen=_LONGEST_HISTORY)
        self._due_s: dict[int, float] = {}  # worker: when it starts again
        self._in_a_row: dict[int, int] = {}  # worker: failures without success in between
        self._ready: set[int] = set()
        self._failed_starts: dict[int, int] = {}  # worker: those of its own since it was ready
        self._broken_starts: dict[int, int] = {}  # worker: those by signals and hangs
        self._moved_s: float | None = None  # when any worker got ready, or had made a step, last
        self._steps: dict[int, int] = {}

    @property
    def history(self) -> tuple[WorkerError, ...]:
        """The failures so far, the latest last."""
        return tuple(self._history)

    def note(self, worker: int, failure: WorkerError) -> WorkerDiedError | None:
        """Take note of a failure.

        Args:
            worker: Whose.
            failure: What happened.

        Returns:
            What to raise if there will be no restart; ``None`` if ``due`` will name the worker.
        """
        self._history.append(failure)
        n_in_a_row = self._in_a_row[worker] = self._in_a_row.get(worker, 0) + 1
        if self._max_restarts is not None and self.n_restarts >= self._max_restarts:
            if not self._max_restarts:
                return self._final(failure, "max_restarts=0 allows no restart", "")
            raise_it = "; if that many failures are expected, raise max_restarts"
            spent = f"all {self._max_restarts} restarts (max_restarts) are used up"
            return self._final(failure, spent, raise_it)
        if worker not in self._ready and (n_starts := self._failed_to_start(worker, failure)):
            return self._final(failure, f"it failed {n_starts} times before it was ready", "")
        self._ready.discard(worker)
        self.n_restarts += 1
        delay_s = 0.0
        if n_in_a_row > 1:
            delay_s = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(n_in_a_row - 2, 16))
        self._due_s[worker] = self._clock() + delay_s
        return None

    def due(self) -> list[int]:
        """Workers that are to be started now, ascending, each told once."""
        now_s = self._clock()
        workers = sorted(worker for worker, due_s in self._due_s.items() if due_s <= now_s)
        for worker in workers:
            del self._due_s[worker]
        return workers

    def next_due_s(self) -> float | None:
        """Seconds until ``due`` names a worker, at least 0; ``None`` if none is waiting."""
        if not self._due_s:
            return None
        return max(0.0, min(self._due_s.values()) - self._clock())

    def is_waiting(self, worker: int) -> bool:
        """Whether a worker failed and was not named by ``due`` since."""
        return worker in self._due_s

    def ready(self, worker: int) -> None:
        """Take note that a worker has its environments; that is no success of its work yet."""
        self._ready.add(worker)
        self._moved_s = self._clock()
        self._failed_starts.pop(worker, None)
        self._broken_starts.pop(worker, None)

    def succeeded(self, worker: int) -> None:
        """Take note that a worker has done some work: its next failure is a first one again."""
        self._moved_s = self._clock()
        self._failed_starts.clear()  # where one can work, so can the others
        self._broken_starts.clear()
        self._in_a_row.pop(worker, None)

    def look_at(self, steps: Mapping[int, int]) -> None:
        """Take note of how many steps workers that are ready have made until now."""
        if any(n_steps != self._steps.get(worker) for worker, n_steps in steps.items()):
            self._moved_s = self._clock()
        self._steps = dict(steps)

    def _failed_to_start(self, worker: int, failure: WorkerError) -> int:
        """How often a worker has failed in a row before it was ready, if that is too often."""
        has_started = self._moved_s is not None
        signal_name = getattr(failure, "signal_name", None)
        is_hit = isinstance(failure, WorkerTimeoutError) or signal_name is not None
        if signal_name in _CRASHES and not has_started:
            is_hit = False
        counts = self._broken_starts if is_hit else self._failed_starts
        counts[worker] = counts.get(worker, 0) + 1
        if counts[worker] < (_MOST_BROKEN_STARTS if is_hit else _MOST_FAILED_STARTS):
            return 0
        if is_hit and self._moved_s is not None and self._clock() - self._moved_s < _CALM_S:
            return 0
        return self._failed_starts.get(worker, 0) + self._broken_starts.get(worker, 0)

    def _final(self, failure: WorkerError, why: str, advice: str) -> WorkerDiedError:
        n = self.n_restarts
        after = "" if not n else f" after {n} restart{'s' * (n > 1)} in all"
        fix = failure.fix or "look at the failures in this error's .history"
        return WorkerDiedError(
            f"{failure.what}{after}, and is not started again: {why}",
            exitcode=getattr(failure, "exitcode", None),
            signal_name=getattr(failure, "signal_name", None),
            where=failure.where,
            fix=fix + advice,
            traceback_text=failure.traceback_text,
            history=self.history,
        )


def _check_limit(name: str, value: Any, least: int) -> None:
    if value is None:
        return
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except (TypeError, RuntimeError):
        number = least - 1
    if number < least:
        raise SpecError(
            f"{name} should be an int of at least {least} or None, got {value!r}",
            fix=f"pass {name}=None for no limit",
        )
