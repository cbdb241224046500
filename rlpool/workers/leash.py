"""Ends workers whose caller ends while they are starting, when no code of ours runs in them yet.

A new process first imports the caller's main module and all that this imports, which may take
long. Until then it cannot watch its caller by itself. So the caller arranges it from outside: the
kernel kills the new process when the last writing end of a pipe is closed, which only the caller
has.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from multiprocessing.reduction import DupFd
from typing import Any

CAN_KILL = sys.platform == "linux" and hasattr(fcntl, "F_SETSIG")
"""Whether the kernel can send any signal when a pipe is closed."""

_held: list[int] = []
"""In a worker: the descriptor of its leash, until ``let_go``."""


def kill_when_closed(fd: int, pid: int) -> None:
    """Let the kernel end a process when the other end of a pipe is closed, where it can.

    That needs no thread of ours, which an environment that never gives Python's lock back would
    keep from running.

    Args:
        fd: The reading end. What counts is the open file behind it, whoever has it.
        pid: The process; a negative number for a process group.
    """
    if CAN_KILL:
        fcntl.fcntl(fd, fcntl.F_SETOWN, pid)
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | fcntl.FASYNC)


def let_go() -> None:
    """Untie this process, a worker that watches its caller by itself from now on."""
    while _held:
        fd = _held.pop()
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~fcntl.FASYNC)
        os.close(fd)


class LeashEnd:
    """What a worker gets of its leash, as a part of what it is given when it starts.

    Args:
        fd: A reading end with an open file of its own, -1 for none.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        """The descriptor, to be inherited; -1 for none."""
        return self._fd

    def tie(self, pid: int | None) -> None:
        """Let the process that has got it end when its caller does."""
        if self._fd >= 0 and pid is not None:
            kill_when_closed(self._fd, pid)

    def close(self) -> None:
        """Close it here. May be repeated."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_hold, (DupFd(self._fd),)) if self._fd >= 0 else (LeashEnd, (-1,))


def _hold(passed: Any) -> None:
    """Keep the end, in the worker."""
    _held.append(passed.detach())


class Leash:
    """What ties starting workers to their caller; one descriptor, whatever their number.

    It may be closed when all of them have let go or died. Without a kernel that can do it, it does
    nothing.
    """

    def __init__(self) -> None:
        self._fd = -1
        if CAN_KILL:
            reading_end, self._fd = os.pipe()
            os.close(reading_end)

    def end(self) -> LeashEnd:
        """The end for one more worker."""
        if self._fd < 0:
            return LeashEnd(-1)
        # Opened, not duplicated: an open file has one owner only, who gets the signal.
        return LeashEnd(os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """End workers that have not let go. May be repeated."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()
