"""The file that all workers of a caller write their logs to.

It is an anonymous file, opened once for appending and inherited by all workers. A line is written
as a whole and after all others, and writing never waits for a reader. What was written is there
even if its writer is killed in the next instruction. The caller reads behind the workers and frees
the pages that it has read, so that the file takes no more memory than what is unread.

The first pages hold shared numbers, four of the file and one per worker, and a short text from the
caller to the workers.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress
from typing import Any

import numpy as np

from rlpool.memory.storage import PAGE_BYTES, Memory, anonymous_file
from rlpool.workers.process_start import Inherited

MAX_UNREAD_BYTES = 16 * 2**20
"""Further records are dropped, and counted, while so much is unread: tens of thousands of them."""

_READ_BYTES = 2**20
"""Read at once: some thousand records, which take milliseconds to handle."""

_FREE_BYTES = 2**18
"""Pages are freed when so many bytes were read."""

MAX_TEXT_BYTES = 64 * 2**10
"""Longest text from the caller. Pages of it that nobody writes to cost nothing."""

_READ_TO, _HAS_NEWS, _EDITION, _TEXT_BYTES = range(4)
"""Shared numbers of the file. A worker has one: how many records it has dropped."""


class LogFile:
    """A file that workers append lines to and the caller reads.

    Args:
        n_workers: Number of workers.
        fd: Descriptor of the file in a worker, by default a new file.
    """

    def __init__(self, n_workers: int, fd: int | None = None) -> None:
        is_new = fd is None
        self._fd: int | None = anonymous_file("rlpool-logs") if fd is None else fd
        n_bytes = 8 * (4 + n_workers)
        self._freed = -(-n_bytes // PAGE_BYTES) * PAGE_BYTES + MAX_TEXT_BYTES
        if is_new:
            os.ftruncate(self._fd, self._freed)
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_APPEND)
        root = Memory.attach(os.dup(self._fd), self._freed).root()
        numbers = root[:n_bytes].view(np.int64).data  # read faster than an array
        self._shared, self._dropped = numbers[:4], numbers[4:]
        self._text = root[-MAX_TEXT_BYTES:].data
        self._tail = b""
        if is_new:
            self._shared[_READ_TO] = self._freed

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (len(self._dropped), Inherited(self._open_fd()))

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
        if hasattr(self, "_fd"):
            self.close()

    def _open_fd(self) -> int:
        if self._fd is None:
            raise OSError("the file of the logs is closed")
        return self._fd

    # In a worker ------------------------------------------------------------------------------

    def append(self, worker: int, line: bytes) -> None:
        """Write a line, or count it as dropped if too much is unread. Never waits."""
        # It begins on a line of its own: the one before may have been cut off by a kill.
        text = b"\n%b\n" % line
        try:
            n_unread = self.size() - self._shared[_READ_TO]
            if n_unread + len(text) > MAX_UNREAD_BYTES or os.write(self._open_fd(), text) < len(
                text
            ):
                self.drop(worker)
        except OSError:
            self.drop(worker)
        self.expect_news()  # after the line is there, or counted

    def drop(self, worker: int) -> None:
        """Count a line that is not written."""
        self._dropped[worker] += 1

    @property
    def edition(self) -> int:
        """A number that changes whenever the caller's text does; odd while it is written."""
        return self._shared[_EDITION]

    def published(self) -> tuple[int, bytes] | None:
        """The caller's text and its edition; ``None`` while it is written."""
        edition = self.edition
        text = bytes(self._text[: self._shared[_TEXT_BYTES]])
        return None if edition % 2 or edition != self.edition else (edition, text)

    # In the caller ----------------------------------------------------------------------------

    def publish(self, text: bytes) -> None:
        """Give the workers another text, of at most ``MAX_TEXT_BYTES``."""
        edition = self.edition | 1
        self._shared[_EDITION] = edition
        self._text[: len(text)] = text
        self._shared[_TEXT_BYTES] = len(text)
        self._shared[_EDITION] = edition + 1

    def has_news(self) -> bool:
        """Whether something may have been written since the last ``read``."""
        return self._shared[_HAS_NEWS] != 0

    def expect_news(self) -> None:
        """Have ``has_news`` say so: a worker that was killed could not."""
        self._shared[_HAS_NEWS] = 1

    def size(self) -> int:
        """Where the next line will be."""
        return os.fstat(self._open_fd()).st_size

    def has_read(self, stop: int) -> bool:
        """Whether everything before a place was read."""
        return self._shared[_READ_TO] >= stop

    def read(self) -> list[bytes]:
        """The next lines that were not read yet, about a megabyte of them.

        A line that is still being written, or was cut off by a kill, comes with what follows.
        """
        start = self._shared[_READ_TO]
        self._shared[_HAS_NEWS] = 0  # before looking: what comes after is pointed out again
        size = self.size()
        data = os.pread(self._open_fd(), min(_READ_BYTES, size - start), start)
        *lines, self._tail = (self._tail + data).split(b"\n")
        stop = self._shared[_READ_TO] = start + len(data)
        if stop < size:
            self.expect_news()
        self._free(stop)
        return [line for line in lines if line]

    def drop_rest(self) -> bool:
        """Drop the beginning of a line whose end will never come; returns whether there was one."""
        rest, self._tail = self._tail, b""
        return bool(rest)

    def dropped(self) -> list[int]:
        """For each worker how many lines it has dropped."""
        return self._dropped.tolist()

    def _free(self, stop: int) -> None:
        """Free the pages before a place in the file."""
        length = (stop - self._freed) // PAGE_BYTES * PAGE_BYTES
        if length >= _FREE_BYTES and hasattr(mmap, "MADV_REMOVE"):
            with suppress(OSError), mmap.mmap(self._open_fd(), length, offset=self._freed) as pages:
                pages.madvise(mmap.MADV_REMOVE)
            self._freed += length


def _received(n_workers: int, fd: Any) -> LogFile:
    """The same file, in a process that was started with it."""
    return LogFile(n_workers, fd.detach())
