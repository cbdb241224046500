"""When a healthy worker has run long enough: it decides that itself, between episodes."""

from __future__ import annotations

import logging
import time

from rlpool.machine.limits import human, resident_bytes
from rlpool.workers.failure_policy import FailurePolicy

_LOG = logging.getLogger("rlpool")

_LOOK_EVERY_S = 0.1
"""Asking the system for the size of this process takes longer than a short episode's step."""


class Recycling:
    """Says when this worker should be replaced by a fresh one.

    A worker always runs at least one episode, however large it is: otherwise workers would only be
    replaced and never work. One that is larger than the limit when it is ready, such as one that
    was spawned in place of a forked one, would be followed by another one of its size. So its limit
    is counted from there.

    Args:
        policy: The limits on episodes and resident memory.

    Attributes:
        n_begun: Episodes that it has begun.
        has_limits: Whether there is anything that makes it due.
    """

    def __init__(self, policy: FailurePolicy) -> None:
        self.n_begun = 0
        self._max_episodes = policy.max_episodes_per_worker
        self._max_rss_bytes = policy.max_rss_bytes
        self._is_measured = False
        self._next_look_s = 0.0
        self.has_limits = policy.recycles
        self._is_large = False

    def is_due(self, n_new: int = 1) -> bool:
        """Whether this process should be replaced before it begins ``n_new`` more episodes."""
        if not self.has_limits:
            return False
        if self._max_rss_bytes is not None and not self._is_measured:
            self._is_measured, ready_bytes = True, resident_bytes()
            if ready_bytes > self._max_rss_bytes:
                _LOG.warning(
                    "max_rss_bytes is %s, but this worker had %s of resident memory when it was "
                    "ready: it is replaced when it has grown by as much",
                    *(human(self._max_rss_bytes), human(ready_bytes)),
                )
                self._max_rss_bytes += ready_bytes
        if not self.n_begun:
            return False
        if self._max_episodes is not None and self.n_begun + n_new > self._max_episodes:
            return True
        now_s = time.monotonic()
        if self._max_rss_bytes is not None and not self._is_large and now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_EVERY_S
            self._is_large = resident_bytes() > self._max_rss_bytes
        return self._is_large

    def __str__(self) -> str:
        size = ""
        if self._max_rss_bytes is not None:
            size = f" with {human(resident_bytes())} of resident memory"
        return f"{self.n_begun} episodes{size}"
