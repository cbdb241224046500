"""The anonymous file that all workers of a caller append their records to, and the caller reads."""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress
from typing import Any

import numpy as np

from rlpool.data.storage import PAGE_BYTES, Memory, anonymous_file
from rlpool.workers.wire import Inherited

MAX_UNREAD_BYTES = 16 * 2**20
"""While this much is unread, further records are dropped and counted: after tens of thousands."""

_FREE_BYTES = 2**18
"""Pages are freed when this many bytes were read."""

_TEXT_BYTES = 2**20
"""Longest text from the caller. Pages of it that nobody writes to cost nothing."""

_READ_TO, _EDITION, _LENGTH = range(3)
"""Shared numbers of the file. A worker has two: how many records it has dropped, and written."""


class LogFile:
    """An anonymous file that workers append lines to and the caller reads.

    A line is written as a whole and after all others, without waiting for a reader, and stays even
    if its writer is killed in the next instruction. The caller frees the pages that it has read.
    The first pages hold shared numbers, and a text from the caller to the workers: levels.

    Args:
        n_workers: Number of workers.
        fd: Descriptor of the file in a worker, by default a new file.

    Attributes:
        tail: The beginning of a line whose end has not been read.
    """

    def __init__(self, n_workers: int, fd: int | None = None) -> None:
        n_bytes = 8 * (3 + 2 * n_workers)
        self._freed = -(-n_bytes // PAGE_BYTES) * PAGE_BYTES + _TEXT_BYTES
        self._fd = anonymous_file("rlpool-logs", self._freed) if fd is None else fd
        if fd is None:
            os.ftruncate(self._fd, self._freed)
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_APPEND)
        root = Memory.attach(os.dup(self._fd), self._freed).root()
        numbers = root[:n_bytes].view(np.int64).data  # read faster than an array
        self._shared, self._counts = numbers[:3], numbers[3:]
        self._dropped, self._written = self._counts[:n_workers], self._counts[n_workers:]
        self._seen = bytes(self._counts)  # at the last ``read``
        self._text = root[-_TEXT_BYTES:].data
        self.tail = b""
        if fd is None:
            self._shared[_READ_TO] = self._freed

    def __reduce__(self) -> tuple[Any, ...]:
        return LogFile, (len(self._dropped), Inherited(self._fd))

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._fd < 0

    def close(self) -> None:
        """Close the descriptor. May be repeated."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()

    # In a worker ------------------------------------------------------------------------------

    def append(self, worker: int, line: bytes) -> None:
        """Write a line, or count it as dropped if too much is unread. Never waits."""
        # It begins on a new line: the one before may have been cut off by a kill.
        text = b"\n%b\n" % line
        n_written = 0
        with suppress(OSError):
            if self._size() - self._shared[_READ_TO] + len(text) <= MAX_UNREAD_BYTES:
                n_written = os.write(self._fd, text)
        if n_written == len(text):
            self._written[worker] += 1
        else:
            self.drop(worker)

    def drop(self, worker: int) -> None:
        """Count a line that is not written."""
        self._dropped[worker] += 1

    @property
    def edition(self) -> int:
        """How often the caller's text was changed."""
        return self._shared[_EDITION]

    def published(self) -> bytes:
        """The caller's text; may be half of another one before the edition changes."""
        return bytes(self._text[: self._shared[_LENGTH]])

    # In the caller ----------------------------------------------------------------------------

    def publish(self, text: bytes) -> None:
        """Give the workers another text; nothing happens if it is too long."""
        if len(text) <= _TEXT_BYTES:
            self._text[: len(text)] = text
            self._shared[_LENGTH] = len(text)
            self._shared[_EDITION] += 1

    def has_news(self) -> bool:
        """Whether something was written or dropped since the last ``read``.

        A line whose writer was killed before it counted the line comes with the next one, or at
        the end. Looking at the size of the file would cost a system call per step.
        """
        return bytes(self._counts) != self._seen

    def _size(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self) -> list[bytes]:
        """The lines that were not read yet.

        A line that is still being written, or was cut off by a kill, comes with what follows.
        """
        self._seen = bytes(self._counts)  # first: what comes meanwhile is news
        start = self._shared[_READ_TO]
        data = os.pread(self._fd, self._size() - start, start)
        *lines, self.tail = (self.tail + data).split(b"\n")
        self._shared[_READ_TO] = start + len(data)
        self._free(start + len(data))
        return [line for line in lines if line]

    def dropped(self) -> list[int]:
        """For each worker how many lines it has dropped."""
        return self._dropped.tolist()

    def _free(self, stop: int) -> None:
        """Free the pages before a place in the file."""
        length = (stop - self._freed) // PAGE_BYTES * PAGE_BYTES
        if length >= _FREE_BYTES:
            with suppress(OSError), mmap.mmap(self._fd, length, offset=self._freed) as pages:
                pages.madvise(mmap.MADV_REMOVE)
            self._freed += length
