"""Failure policy: which workers are restarted, when, and when they are not."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from rlpool.errors import EnvError, WorkerDiedError, WorkerError
from rlpool.machine.arguments import check_choice, whole_number

DEFAULT_TIMEOUT_S = 600.0
"""A worker without a step for this long counts as hung; far longer than any slow ``step``."""

DEFAULT_MAX_RESTARTS = 16
"""Restarts of all workers of one owner: enough for rare deaths, few enough to be noticed."""

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 2.0
"""Delays before the second and later restarts in a row of one worker double up to this one."""

_MOST_AT_FIRST = 3
_MOST_IN_A_ROW = 10
"""Failures in a row of one worker, without any work in between, after which it is not started
again: before all workers were ready for the first time, and later, when this many kills from
outside are no coincidence and the delays add up to ten seconds."""

DEFAULT_MAX_EPISODE_RESTARTS = 2
"""Failures of one episode: the first may be an accident, a second is not."""

_LONGEST_HISTORY = 1000
"""Failures kept: an owner without a limit may live for months."""


@dataclass(frozen=True)
class FailurePolicy:
    """How workers start, what happens to those that fail, and when healthy ones are replaced.

    Attributes:
        on_worker_failure: ``"restart"`` replaces workers that died or hung, ``"raise"`` reports
            them.
        max_restarts: Maximum number of replacements, ``None`` for no limit.
        on_env_error: ``"raise"`` reports an environment that raises, ``"restart"`` replaces its
            worker and runs the episode again, ``"truncate"`` replaces it and ends the episode.
        max_episode_restarts: An episode that fails this often at one step is not run again:
            it is truncated, or reported with ``on_env_error="raise"``. ``None`` for no limit.
        max_episodes_per_worker: A worker is replaced after this many episodes, ``None`` for never.
        start_method: How processes are started, ``"auto"`` or ``"spawn"``: docs/processes.md.

    Raises:
        SpecError: If a value is invalid; the message names it.
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
        check_choice("start_method", self.start_method, ("auto", "spawn"), fix=fix)

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
        if isinstance(failure, EnvError):
            return self.restarts_on_env_errors
        return self.on_worker_failure == "restart"

    def abandons(self, failure: WorkerError, n_failures: int) -> bool:
        """Whether an episode with this many failures is not run again."""
        if self.truncates and failure.can_be_repeated:
            return True
        return self.max_episode_restarts is not None and n_failures >= self.max_episode_restarts


class PolicyOptions(TypedDict, total=False):
    """The arguments of ``FailurePolicy``, for functions that take them as keywords."""

    on_worker_failure: str
    max_restarts: int | None
    on_env_error: str
    max_episode_restarts: int | None
    max_episodes_per_worker: int | None
    start_method: str


def policy_of(owner: str, options: Mapping[str, Any]) -> FailurePolicy:
    """Make the policy from a class's keywords.

    Raises:
        SpecError: If a value is wrong.
        TypeError: For an unknown keyword.
    """
    for name in options:
        if name not in PolicyOptions.__annotations__:
            raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}")
    return FailurePolicy(**options)


class BatcherOptions(PolicyOptions, total=False):
    """Also the alternative names of a batcher's arguments, which ``also_takes`` replaces."""

    seed: int | None
    n_threads: int


class Restarts:
    """Decides when failed workers start again, and which episodes they do not run again.

    A worker is restarted at once after its first failure. If it fails again without having done any
    work, each further restart waits twice as long as the last, up to a maximum number of failures.

    Args:
        n_workers: Number of workers.
        policy: The limits.

    Attributes:
        n_restarts: Restarts so far.
        has_started: Whether all workers were ready once.
    """

    def __init__(self, n_workers: int, policy: FailurePolicy) -> None:
        self.n_restarts = 0
        self.has_started = False
        self._policy = policy
        self._n_in_a_row = [0] * n_workers
        self._history: deque[WorkerError] = deque(maxlen=_LONGEST_HISTORY)
        # Episode to the step of its last failure, and its number of failures in a row at that step.
        self._failed: dict[Any, tuple[int | None, int]] = {}

    def abandons(self, failure: WorkerError) -> bool:
        """Count a failure; returns whether its episode should not be run again.

        Failures at different steps are not attributed to the episode.
        """
        episode, step = _episode_of(failure), failure.where.step
        last, n = self._failed.pop(episode, (step, 0))
        n = n + 1 if step == last else 1
        self._failed[episode] = step, n
        if len(self._failed) > _LONGEST_HISTORY:
            del self._failed[next(iter(self._failed))]
        return self._policy.abandons(failure, n)

    def forget(self, lane: int, seed: int) -> None:
        """Reset the count for the episode that a lane begins."""
        self._failed.pop((None, lane, seed), None)

    def judge(
        self, worker: int, failure: WorkerError, is_abandoned: bool = False
    ) -> tuple[float, str]:
        """Decide what follows a failure.

        Args:
            worker: The worker that failed.
            failure: The failure.
            is_abandoned: Whether its episode is not run again: then the failures that
                ``abandons`` has counted will not recur and do not count.

        Returns:
            The delay before the worker starts again, and a message for the log.

        Raises:
            WorkerDiedError: If it is not started again; its ``history`` contains all failures.
        """
        if is_abandoned:
            _, n = self._failed.pop(_episode_of(failure))
            self.n_restarts = max(0, self.n_restarts - n + 1)
            self._n_in_a_row[worker] = 0
            first = "the episode is" if n == 1 else f"the same episode failed {n} times: it is"
            return 0.0, f"{first} not run again"
        self._history.append(failure)
        n = self._n_in_a_row[worker] = self._n_in_a_row[worker] + 1
        most = self._policy.max_restarts
        if most == 0:
            raise self._final(failure, "max_restarts=0 allows no restart")
        if most is not None and self.n_restarts >= most:
            why = f"all {most} restarts (max_restarts) are used up"
            advice = "; if that many failures are expected, pass a larger max_restarts"
            raise self._final(failure, why, advice)
        if n >= (_MOST_IN_A_ROW if self.has_started else _MOST_AT_FIRST):
            raise self._final(failure, f"it failed {n} times without having done any work")
        self.n_restarts += 1
        delay_s = 0.0 if n == 1 else min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** (n - 2))
        of_how_many = "" if most is None else f" of {most}"
        return delay_s, f"restart {self.n_restarts}{of_how_many}"

    def note_success(self, worker: int) -> None:
        """Record that a worker has done some work: its next failure counts as the first."""
        self._n_in_a_row[worker] = 0

    def _final(self, failure: WorkerError, why: str, advice: str = "") -> WorkerDiedError:
        n = self.n_restarts
        after = "" if not n else f" after {n} restart{'s' * (n > 1)} in all"
        fix = failure.fix or "look at the failures in this error's .history"
        message = f"{failure.what}{after}, and is not restarted: {why}"
        given = {"exitcode": None, **failure._constructor_arguments()}
        changes = {"what": message, "fix": fix + advice, "history": tuple(self._history)}
        return WorkerDiedError(**{**given, **changes})


def _episode_of(failure: WorkerError) -> Any:
    """Identify the episode of a failure: by its row or its lane, and its seed."""
    where = failure.where
    return where.row, where.lane if where.row is None else None, where.seed


class Recycling:
    """Decides when this worker should be replaced by a fresh one.

    A worker always runs at least one episode; otherwise workers would be replaced forever without
    working.

    Args:
        policy: The limit on episodes.

    Attributes:
        n_begun: Episodes it has begun.
        max_episodes: The limit, ``None`` for no limit.
    """

    def __init__(self, policy: FailurePolicy) -> None:
        self.n_begun = 0
        self.max_episodes = policy.max_episodes_per_worker

    def is_due(self, n_new: int = 1) -> bool:
        """Whether this process should be replaced before it begins ``n_new`` more episodes."""
        if self.max_episodes is None or not self.n_begun:
            return False
        return self.n_begun + n_new > self.max_episodes
