"""Waiting for another process: spin for a moment, then sleep until woken.

Waking a sleeping process costs far more than a short environment step. So the waiting process looks
at shared memory first, and records there when it sleeps; only then is a system call made::

    waiting process                            signalling process
      look, for half a millisecond               change the state that the other looks at
      asleep = 1                                 asleep?
      look again, sleep  <------ eventfd ------    yes: write

If either process does not yet see the other's latest write, a wake-up can be missed. So the first
sleep is short, and another look follows it. On processors that reorder stores, the descriptor is
always written.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from typing import Any

from rlpool.machine.interrupts import defer_signals
from rlpool.machine.platform import HAS_ORDERED_STORES
from rlpool.workers.wire import Inherited

_ONE = (1).to_bytes(8, "little")

_LOOK_S = 0.0005
"""How long to look: most steps of a batch of environments are shorter."""

_PREEMPTED_S = 0.002
"""A yield that takes longer has given the core to a program that keeps it for a whole slice (3 to 4
ms by default), not to the other side's step."""

_REST = 50
"""After losing the core, a process does not look for this many times as long, because a woken
process gets the core sooner than one that yielded it."""

_FIRST_SLEEP_S = 0.01
"""Long enough for every write to have become visible, and rare enough to cost nothing."""


class Wake:
    """An event that processes share: ``signal`` in one process ends the sleep of another.

    A child receives it when it starts.

    Args:
        fd: Descriptor of an ``eventfd``; a new one by default.
    """

    fd = -1

    def __init__(self, fd: int | None = None) -> None:
        with defer_signals():  # otherwise the descriptor might stay open
            self.fd = os.eventfd(0, os.EFD_CLOEXEC) if fd is None else fd
        self._asleep: Any = [1]  # until it is shared, the other process has to assume this
        self._look_until_s = 0.0
        self._rest_until_s = 0.0
        self._sleep_s = 0.0  # next

    def share(self, asleep: memoryview) -> None:
        """Record in shared memory from now on whether the waiting process sleeps.

        Args:
            asleep: One element, the same in both processes; the waiting process writes it.
        """
        if HAS_ORDERED_STORES:
            self._asleep = asleep

    def signal(self) -> None:
        """Wake the waiting process, unless it will look again before it sleeps."""
        if self._asleep[0]:
            os.write(self.fd, _ONE)

    def begin(self) -> None:
        """Begin to wait: look for a moment before sleeping."""
        self._asleep[0] = 0
        now_s = time.perf_counter()
        self._look_until_s = now_s + _LOOK_S if now_s >= self._rest_until_s else 0.0

    def pause(self, longest_s: float) -> float:
        """Let other processes run between two looks; another look must follow every call.

        Args:
            longest_s: Longest sleep.

        Returns:
            Seconds to wait for the descriptor before the next look; 0 for no wait.
        """
        if self._asleep[0]:
            sleep_s, self._sleep_s = min(self._sleep_s, longest_s), math.inf
            return sleep_s
        now_s = time.perf_counter()
        if now_s < self._look_until_s:
            os.sched_yield()
            away_s = time.perf_counter() - now_s
            if away_s > _PREEMPTED_S:
                self._rest_until_s = now_s + _REST * away_s
        else:
            self._asleep[0], self._sleep_s = 1, _FIRST_SLEEP_S
        return 0.0

    def wait(self) -> int:
        """Wait for a signal; returns the number of signals since the last call."""
        return int.from_bytes(os.read(self.fd, 8), "little")

    def close(self) -> None:
        """Close the descriptor. Can be repeated."""
        with suppress(OSError):
            fd, self.fd = self.fd, -1  # the number may soon belong to another file
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Wake, (Inherited(self.fd),)
