"""Wakes another process that waits, at the cost of one system call on each side."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from rlpool.workers.wire import Inherited

_ONE = (1).to_bytes(8, "little")


class Wake:
    """Something to wait for: ``signal`` in one process ends ``wait`` in another.

    A child gets it when it starts.

    Args:
        fd: Descriptor of an ``eventfd``; a new one by default.
    """

    fd = -1

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC) if fd is None else fd

    def signal(self) -> None:
        """Wake the process that waits, or the next that does."""
        os.write(self.fd, _ONE)

    def wait(self) -> int:
        """Wait for a signal; returns how many came since the last time."""
        return int.from_bytes(os.read(self.fd, 8), "little")

    def close(self) -> None:
        """Close the descriptor. May be repeated."""
        fd, self.fd = self.fd, -1  # the number may soon be that of another file
        with suppress(OSError):
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (Inherited(self.fd),)


def _received(fd: Any) -> Wake:
    """The same wake, in a process that was started with it."""
    return Wake(fd.detach())
