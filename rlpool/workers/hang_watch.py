"""Notices workers that make no progress."""

from __future__ import annotations

import time

_LONGEST_LOOK_S = 0.5
_LOOKS_PER_TIMEOUT = 4
"""Time between two looks counts up to so much, and to such a part of the timeout: who looks seldom
cannot tell a worker that hangs from one that waited for him."""


_START_S = 20.0
"""A worker that is starting may be idle so long at least: importing may be slow."""


class HangWatch:
    """Adds up how long each worker was watched without making a step.

    Args:
        timeout_s: Seconds after which a worker counts as hanging, ``None`` for never.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._steps: list[int] = []
        self._idle_s: list[float] = []
        self._last_look_s = time.monotonic()

    @property
    def patience_s(self) -> float:
        """How long to wait at most before the next look."""
        if self._timeout_s is None:
            return _LONGEST_LOOK_S
        return min(_LONGEST_LOOK_S, self._timeout_s / _LOOKS_PER_TIMEOUT)

    def hanging(self, steps: list[int], watched: set[int]) -> int | None:
        """A worker that hangs, if there is one.

        Args:
            steps: Steps that each worker has done; while it is starting, negative numbers that
                change as long as it does anything; 0 if that is not known.
            watched: The workers that have something to do.
        """
        if self._timeout_s is None:
            return None
        if len(self._steps) != len(steps):
            self._steps, self._idle_s = [-1] * len(steps), [0.0] * len(steps)
        now_s = time.monotonic()
        passed_s = min(now_s - self._last_look_s, self.patience_s)
        self._last_look_s = now_s
        for worker, n_steps in enumerate(steps):
            if n_steps != self._steps[worker] or worker not in watched or not n_steps:
                self._steps[worker], self._idle_s[worker] = n_steps, 0.0
            else:
                self._idle_s[worker] += passed_s
        for worker, idle_s in enumerate(self._idle_s):
            patience_s = self._timeout_s if steps[worker] > 0 else max(self._timeout_s, _START_S)
            if idle_s > patience_s:
                return worker
        return None
