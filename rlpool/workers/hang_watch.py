"""Notices workers that make no progress."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence

_LONGEST_LOOK_S = 0.5
_LOOKS_PER_TIMEOUT = 4
"""The time between two looks counts up to this long, or this part of the timeout: a caller that
seldom looks cannot tell a worker that hangs from one that waited for the caller."""

_LOOKS_PER_PATIENCE = 4
"""A look costs time for each worker, and messages may arrive every few microseconds: so one that
comes sooner than this part of the patience after the last one is left out."""

_START_S = 20.0
"""A worker that is starting may be idle for at least this long: importing may be slow."""


class HangWatch:
    """Adds up how long each worker was watched without making a step.

    Args:
        timeout_s: Seconds after which a worker counts as hanging, ``None`` for never.

    Attributes:
        patience_s: How long to wait at most before the next look.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._progress: dict[int, int] = {}
        self._idle_s: dict[int, float] = {}
        self.patience_s = min(_LONGEST_LOOK_S, self._timeout_s / _LOOKS_PER_TIMEOUT)
        self._counted_to_s = time.monotonic()
        self._watched_s = 0.0  # since the last look

    def forget(self, worker: int) -> None:
        """Watch a worker anew: its successor may make the same number of steps, very soon."""
        self._progress.pop(worker, None)
        self._idle_s.pop(worker, None)

    def is_due(self) -> bool:
        """Whether the caller has watched so long since the last look that another is worth it."""
        self._count()
        return self._watched_s >= self.patience_s / _LOOKS_PER_PATIENCE

    def _count(self) -> None:
        now_s = time.monotonic()
        self._watched_s += min(now_s - self._counted_to_s, self.patience_s)
        self._counted_to_s = now_s

    def hanging(self, progress: Sequence[int], watched: Collection[int]) -> int | None:
        """A worker that hangs, ``None`` if none does.

        Args:
            progress: Per worker, a number that changes when it does anything: negative while it
                starts, 0 if nothing is known.
            watched: The workers that have something to do.
        """
        self._count()
        passed_s, self._watched_s = min(self._watched_s, self.patience_s), 0.0
        for worker, number in enumerate(progress):
            if number and number == self._progress.get(worker) and worker in watched:
                self._idle_s[worker] += passed_s
            else:
                self._progress[worker], self._idle_s[worker] = number, 0.0
        for worker, idle_s in self._idle_s.items():
            is_starting = progress[worker] < 0
            if idle_s > (max(self._timeout_s, _START_S) if is_starting else self._timeout_s):
                return worker
        return None
