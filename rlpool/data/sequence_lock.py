"""Changes of shared memory that readers see completely or not at all: a sequence lock.

A version number in the memory is odd while a process changes it. A reader copies without locking,
and again if the version has changed meanwhile. After some attempts it takes the file lock that
writers hold. The kernel releases this lock when its owner dies.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

_N_OPTIMISTIC = 8  # attempts before a reader takes the lock; both sides take microseconds

_T = TypeVar("_T")


class SequenceLock:
    """Lets one process at a time change shared memory, while others read it.

    Args:
        cell: An int64 of the memory, for the version.
        fd: Descriptor of the memory, which has to stay open; ``None`` for memory that no other
            process sees, which is not locked.
    """

    def __init__(self, cell: memoryview, fd: int | None) -> None:
        self._cell = cell
        self._fd = fd

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change the memory in this context; waits while another process does."""
        if self._fd is None:
            yield
            return
        with _locked(self._fd):
            self._cell[0] |= 1  # odd already if a process died during a change
            try:
                yield
            finally:
                self._cell[0] += 1

    def read(self, look: Callable[[], _T]) -> _T:
        """Call ``look`` until the memory does not change meanwhile; returns its result."""
        if self._fd is None:
            return look()
        for _ in range(_N_OPTIMISTIC):
            version = self._cell[0]
            if version % 2:
                continue
            try:
                result = look()
            except Exception:
                if self._cell[0] == version:
                    raise
            else:
                if self._cell[0] == version:
                    return result
        with _locked(self._fd):
            return look()


@contextmanager
def _locked(fd: int) -> Iterator[None]:
    fcntl.lockf(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)
