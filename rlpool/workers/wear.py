"""How used up a worker process is: episodes begun, memory grown."""

from __future__ import annotations

import time

from rlpool.machine.limits import resident_bytes

_LOOK_EVERY_S = 0.1
"""Asking the system for the size of this process takes longer than a short episode's step."""


class Wear:
    """Says when a worker should be replaced by a fresh one.

    A worker always runs at least one episode, however large it is: else its successors would do
    nothing but follow each other.

    Args:
        max_episodes: Episodes after which it is worn, ``None`` for any number.
        max_rss_bytes: Resident memory of its own above which it is worn, ``None`` for any size.

    Attributes:
        n_begun: Episodes that it has begun.
    """

    def __init__(self, max_episodes: int | None = None, max_rss_bytes: int | None = None) -> None:
        self.n_begun = 0
        self._max_episodes = max_episodes
        self._max_rss_bytes = max_rss_bytes
        self._next_look_s = 0.0
        self._has_limits = max_episodes is not None or max_rss_bytes is not None
        self._is_large = False

    @property
    def is_worn(self) -> bool:
        """Whether this process should begin no further episode."""
        if not self._has_limits or not self.n_begun:
            return False
        if self._max_episodes is not None and self.n_begun >= self._max_episodes:
            return True
        now_s = time.monotonic()
        if self._max_rss_bytes is not None and not self._is_large and now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_EVERY_S
            self._is_large = resident_bytes() > self._max_rss_bytes
        return self._is_large

    def __str__(self) -> str:
        size = f", {resident_bytes() >> 20} MiB" if self._max_rss_bytes is not None else ""
        return f"{self.n_begun} episodes{size}"
