"""Waiting for another process: look for a moment, then sleep until it wakes you.

Waking a process that sleeps costs far more than a short step of an environment. So whoever waits
looks at shared memory first, and says there when it sleeps; only then is a system call made::

    one that waits                             one that signals
      look, for half a millisecond               change what the other looks at
      asleep = 1                                 asleep?
      look again, sleep  <------ eventfd ------    yes: write

If either does not see yet what the other has just written, nobody is woken. So the first sleep is
short, and another look follows it. On processors that reorder stores the descriptor is always
written.
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
"""How long to look: most steps of a batch of environments take less."""

_PREEMPTED_S = 0.002
"""A yield that takes longer has given the core to a program that keeps it for a whole slice (3 to 4
ms by default), not to the other side's step."""

_REST = 50
"""Nobody looks for so many times as long as the core was taken, as one that is woken gets the core
sooner than one that has yielded it."""

_FIRST_SLEEP_S = 0.01
"""Long after every write has become visible, and seldom enough to cost nothing."""


class Wake:
    """Something to wait for: ``signal`` in one process ends the sleep of another.

    A child gets it when it starts.

    Args:
        fd: Descriptor of an ``eventfd``; a new one by default.
    """

    fd = -1

    def __init__(self, fd: int | None = None) -> None:
        with defer_signals():  # else the descriptor might stay open
            self.fd = os.eventfd(0, os.EFD_CLOEXEC) if fd is None else fd
        self._asleep: Any = [1]  # until it is shared, the other process has to assume it
        self._look_until_s = 0.0
        self._rest_until_s = 0.0
        self._sleep_s = 0.0  # next

    def share(self, asleep: memoryview) -> None:
        """Say from now on in shared memory whether the one that waits sleeps.

        Args:
            asleep: One element, the same in both processes; the one that waits writes it.
        """
        if HAS_ORDERED_STORES:
            self._asleep = asleep

    def signal(self) -> None:
        """Wake the process that waits, unless it will look again before it sleeps."""
        if self._asleep[0]:
            os.write(self.fd, _ONE)

    def begin(self) -> None:
        """Begin to wait: look for a moment before sleeping."""
        self._asleep[0] = 0
        now_s = time.perf_counter()
        self._look_until_s = now_s + _LOOK_S if now_s >= self._rest_until_s else 0.0

    def pause(self, longest_s: float) -> float:
        """Let other processes run; call it between two looks, the last of which is never skipped.

        Args:
            longest_s: Longest sleep.

        Returns:
            How long to wait for the descriptor before the next look, in seconds; 0 for not at all.
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
        """Wait for a signal; returns how many came since the last time."""
        return int.from_bytes(os.read(self.fd, 8), "little")

    def close(self) -> None:
        """Close the descriptor. May be repeated."""
        with suppress(OSError):
            fd, self.fd = self.fd, -1  # the number may soon be that of another file
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Wake, (Inherited(self.fd),)
