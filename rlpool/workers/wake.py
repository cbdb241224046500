"""A way to wake another process that waits, for the price of one system call on either side."""

from __future__ import annotations

import os
from contextlib import suppress
from multiprocessing.reduction import DupFd
from typing import Any

_ONE = (1).to_bytes(8, "little")
_N_WAKES = 64
"""Wakes read at once from a pipe; more are read the next time."""


class Wake:
    """Something to wait for: ``signal`` in one process ends ``wait`` in another.

    An ``eventfd`` where there is one, else a pipe. It goes to a child when that starts, as a
    part of what the child is given.

    Args:
        fds: Descriptors to read from and to write to; new ones by default.
    """

    def __init__(self, fds: tuple[int, int] | None = None) -> None:
        if fds is None:
            if hasattr(os, "eventfd"):
                fd = os.eventfd(0, os.EFD_CLOEXEC)
                fds = (fd, fd)
            else:
                fds = os.pipe()
        self.fd, self._write_fd = fds
        self._is_eventfd = self.fd == self._write_fd
        self._is_open = True

    def signal(self) -> None:
        """Wake whoever waits, or will."""
        os.write(self._write_fd, _ONE)

    def wait(self) -> int:
        """Wait for a signal; returns how many came since the last time."""
        words = os.read(self.fd, 8 * _N_WAKES)
        return int.from_bytes(words, "little") if self._is_eventfd else len(words) // 8

    def close(self) -> None:
        """Close the descriptors. May be repeated."""
        if self._is_open:
            self._is_open = False
            for fd in {self.fd, self._write_fd}:
                os.close(fd)
            self.fd = self._write_fd = -1  # the numbers may soon be those of other files

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            with suppress(OSError):
                self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._is_eventfd:
            return _received, (DupFd(self.fd),)
        return _received, (DupFd(self.fd), DupFd(self._write_fd))


def _received(*fds: Any) -> Wake:
    """The same wake, in a process that was started with it."""
    here = [fd.detach() for fd in fds]
    return Wake((here[0], here[-1]))
