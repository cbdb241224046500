"""Changes of shared memory that others see as a whole or not at all.

Whoever changes something counts it: the version is odd meanwhile. A reader looks without asking,
and looks again if the version has changed. If that goes on, it takes the lock that is held during
changes. The lock is the kernel's: it is free again when its owner dies.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

_N_OPTIMISTIC = 8  # reads before the lock is taken; a read takes microseconds, a change too

_T = TypeVar("_T")


class Version:
    """Lets one process at a time change some memory, and others read it between the changes.

    Args:
        cell: One int64 of the memory, for the version.
        fd: Descriptor of the memory, which has to stay open; ``None`` if no other process sees the
            memory and nothing has to be done.
    """

    def __init__(self, cell: memoryview, fd: int | None) -> None:
        self._cell = cell
        self._fd = fd

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change the memory within this; waits while another process does."""
        if self._fd is None:
            yield
            return
        with _locked(self._fd):
            self._cell[0] |= 1  # odd already if somebody died during a change
            try:
                yield
            finally:
                self._cell[0] += 1

    def read(self, look: Callable[[], _T]) -> _T:
        """The result of ``look``, during which the memory did not change; may call it again."""
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
