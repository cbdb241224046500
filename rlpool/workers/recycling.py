"""When a healthy worker has run long enough."""

from __future__ import annotations

import time
from collections.abc import Callable

from rlpool.machine.limits import human, resident_bytes
from rlpool.machine.worker_limits import refuse_small_limit
from rlpool.workers.failure_policy import FailurePolicy

_LOOK_S = 0.1
"""A worker's memory is looked at no more often: it costs some ten microseconds."""


class Recycling:
    """Counts what workers have done, between their episodes.

    Args:
        policy: The limits.
        n_workers: Number of workers.
        pid_of: Gives a worker's process id.
    """

    def __init__(
        self, policy: FailurePolicy, n_workers: int, pid_of: Callable[[int], int | None]
    ) -> None:
        self._policy = policy
        self._pid_of = pid_of
        self._n_episodes = [0] * n_workers
        self._next_look_s = [0.0] * n_workers
        self.is_on = policy.recycles

    def refuse_small_limit(self) -> None:
        """Refuse a limit that workers exceed before they have done anything.

        Raises:
            SpecError: Naming the limit and what they need.
        """
        workers = range(len(self._n_episodes))
        refuse_small_limit(self._policy.max_rss_bytes, map(self._pid_of, workers))

    def reason(self, worker: int, n_new: int) -> str:
        """Why a worker is to be replaced before it begins new episodes, empty if it is not."""
        policy = self._policy
        if policy.max_episodes_per_worker is not None:
            n_done = self._n_episodes[worker]
            if n_done and n_done + n_new > policy.max_episodes_per_worker:
                return f"has run {n_done} episodes (max_episodes_per_worker)"
        if policy.max_rss_bytes is not None and time.monotonic() >= self._next_look_s[worker]:
            self._next_look_s[worker] = time.monotonic() + _LOOK_S
            n_bytes = resident_bytes(self._pid_of(worker))
            if n_bytes > policy.max_rss_bytes:
                return f"has {human(n_bytes)} of resident memory (max_rss_bytes)"
        return ""

    def note_begun(self, worker: int, n_new: int) -> None:
        """Take note that a worker begins new episodes."""
        self._n_episodes[worker] += n_new

    def note_replaced(self, worker: int, n_begun: int) -> None:
        """Take note that a worker has a successor, and of what that has begun."""
        self._n_episodes[worker] = n_begun
