"""Wakes another process that waits, at the cost of one system call on each side."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from rlpool.workers.wire import Inherited

_ONE = (1).to_bytes(8, "little")
_N_WAKES = 64
"""Wakes read at once from a pipe; more are read the next time."""


class Wake:
    """Something to wait for: ``signal`` in one process ends ``wait`` in another.

    An ``eventfd`` where there is one, else a pipe. A child gets it when it starts.

    Args:
        fds: Descriptors to read from and to write to; new ones by default.
    """

    def __init__(self, *fds: int) -> None:
        if not fds:
            fds = (os.eventfd(0, os.EFD_CLOEXEC),) if hasattr(os, "eventfd") else os.pipe()
        self._fds = fds
        self.fd = fds[0]

    def signal(self) -> None:
        """Wake the process that waits, or the next that does."""
        os.write(self._fds[-1], _ONE)

    def wait(self) -> int:
        """Wait for a signal; returns how many came since the last time."""
        words = os.read(self.fd, 8 * _N_WAKES)
        return len(words) // 8 if len(self._fds) > 1 else int.from_bytes(words, "little")

    def close(self) -> None:
        """Close the descriptors. May be repeated."""
        fds, self._fds = self._fds, (-1,)  # the numbers may soon be those of other files
        self.fd = -1
        for fd in fds:
            with suppress(OSError):
                os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "_fds"):
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, tuple(map(Inherited, self._fds))


def _received(*fds: Any) -> Wake:
    """The same wake, in a process that was started with it."""
    return Wake(*(fd.detach() for fd in fds))
