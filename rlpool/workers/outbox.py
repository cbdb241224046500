"""The file into which all workers of a supervisor write their logs, and what they note about it.

Records go through an anonymous file that is opened once, for appending, and inherited by all
workers: a write of one line is whole and after all others, whoever else writes, and it never waits
for a reader. What was written is there even if its writer is killed in the next instruction. The
caller reads behind them, from where it had come to, and gives back the pages that it has read, so
that the file takes no more memory than what is unread, although it only ever grows.

The first pages are shared numbers, how far the caller has read, whether there is something new, and
a row per worker, and a short text from the caller to the workers.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress
from typing import Any

import numpy as np

from rlpool.memory.storage import PAGE_BYTES, Memory, anonymous_file
from rlpool.workers.inherited import Inherited

MAX_UNREAD_BYTES = 16 * 2**20
"""Further records are dropped, and counted, while so much is unread: tens of thousands of them."""

_READ_BYTES = 2**20
"""Read at once: some thousand records, which take milliseconds to handle."""

_RELEASE_BYTES = 2**18
"""Pages are given back when so many bytes were read."""

_COLUMNS = 4
_DROPPED, _STACKS_FD, _PID = range(3)

_FIRST_ROW = 1
"""Row 0 of the shared numbers is the file's: read to, has news, edition and length of the text."""

MAX_TEXT_BYTES = 64 * 2**10
"""Longest text from the caller. Pages of it that nobody writes to cost nothing."""


class Outbox:
    """A file that workers append lines to and the caller reads.

    Args:
        n_workers: Number of workers.
        fd: Descriptor of the file in a worker, by default a new file.
    """

    def __init__(self, n_workers: int, fd: int | None = None) -> None:
        self.n_workers = n_workers
        n_bytes = (_FIRST_ROW + n_workers) * _COLUMNS * np.dtype(np.int64).itemsize
        self._start = -(-n_bytes // PAGE_BYTES) * PAGE_BYTES + MAX_TEXT_BYTES
        self._is_new = fd is None
        self._fd: int | None = anonymous_file("rlpool-logs") if fd is None else fd
        if self._is_new:
            os.ftruncate(self._fd, self._start)
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_APPEND)
        root = Memory.attach(os.dup(self._fd), self._start).root()
        self._row = root[:n_bytes].view(np.int64).reshape(-1, _COLUMNS)
        self._text = root[self._start - MAX_TEXT_BYTES :].data
        self._shared = memoryview(self._row[0])  # read faster than an array
        self._tail = b""
        if self._is_new:
            self._shared[0] = self._released = self._start

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.n_workers, Inherited(self._open_fd()))

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._fd is None

    def close(self) -> None:
        """Close the descriptor. May be repeated."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", None) is not None:
            with suppress(OSError):
                self.close()

    # In a worker ------------------------------------------------------------------------------

    def append(self, worker: int, line: bytes) -> None:
        """Write a line, or count it as dropped if too much is unread. Never waits."""
        fd = self._open_fd()
        try:
            # Begun on a line of its own: the one before may have been cut off by a kill.
            text = b"\n%b\n" % line
            n_unread = os.fstat(fd).st_size - self._shared[0]
            if n_unread + len(text) > MAX_UNREAD_BYTES or os.write(fd, text) < len(text):
                self.drop(worker)
        except OSError:
            self.drop(worker)
        self._shared[1] = 1  # after the line is there, or counted

    def drop(self, worker: int) -> None:
        """Count a line that is not written."""
        self._row[_FIRST_ROW + worker, _DROPPED] += 1

    @property
    def edition(self) -> int:
        """A number that changes whenever the caller's text does; odd while it is written."""
        return self._shared[2]

    def text(self) -> bytes:
        """The caller's text, to be trusted if the edition was the same even number all the time."""
        return bytes(self._text[: self._shared[3]])

    def announce_stacks(self, worker: int, stacks_fd: int) -> None:
        """Tell that this process, worker so-and-so, writes its stacks to that descriptor."""
        self._row[_FIRST_ROW + worker, _STACKS_FD] = stacks_fd
        self._row[_FIRST_ROW + worker, _PID] = os.getpid()

    # In the caller ----------------------------------------------------------------------------

    def publish(self, text: bytes) -> None:
        """Give the workers another text, of at most ``MAX_TEXT_BYTES``."""
        odd = self._shared[2] | 1
        self._shared[2] = odd
        self._text[: len(text)] = text
        self._shared[3] = len(text)
        self._shared[2] = odd + 1

    def has_news(self) -> bool:
        """Whether something may have been written since the last ``read``."""
        return self._shared[1] != 0

    def size(self) -> int:
        """Where the next line will be."""
        return os.fstat(self._open_fd()).st_size

    def has_read(self, stop: int) -> bool:
        """Whether everything before a place was read."""
        return bool(self._shared[0] >= stop)

    def expect_news(self) -> None:
        """Have ``has_news`` say so: a worker that was killed could not."""
        self._shared[1] = 1

    def read(self) -> list[bytes]:
        """The next lines that were not read yet, about a megabyte of them.

        A line that is still being written, or was cut off by a kill, is given with what follows.
        """
        fd, start = self._open_fd(), self._shared[0]
        self._shared[1] = 0  # before looking: what comes after is told again
        size = self.size()
        data = os.pread(fd, min(_READ_BYTES, size - start), start)
        *lines, self._tail = (self._tail + data).split(b"\n")
        self._shared[0] = start + len(data)
        if start + len(data) < size:
            self._shared[1] = 1
        self._release(start + len(data))
        return [line for line in lines if line]

    def take_rest(self) -> bytes:
        """The beginning of a line whose end will never come, now that all workers have ended."""
        rest, self._tail = self._tail, b""
        return rest

    def dropped(self) -> list[int]:
        """For each worker how many lines it has dropped."""
        counts: list[int] = self._row[_FIRST_ROW:, _DROPPED].tolist()
        return counts

    def stacks_fd(self, worker: int, pid: int | None) -> int | None:
        """The descriptor in a worker's process for its stacks, ``None`` if it has none yet."""
        row = self._row[_FIRST_ROW + worker]
        return int(row[_STACKS_FD]) if row[_PID] == pid else None

    def _release(self, stop: int) -> None:
        """Give back the pages before a place in the file."""
        length = (stop - self._released) // PAGE_BYTES * PAGE_BYTES
        if length < _RELEASE_BYTES or not hasattr(mmap, "MADV_REMOVE"):
            return
        with suppress(OSError), mmap.mmap(self._open_fd(), length, offset=self._released) as pages:
            pages.madvise(mmap.MADV_REMOVE)
        self._released += length

    def _open_fd(self) -> int:
        if self._fd is None:
            raise OSError("the file of the logs is closed")
        return self._fd


def _received(n_workers: int, fd: Any) -> Outbox:
    """The same file, in a process that was started with it."""
    return Outbox(n_workers, fd.detach())
