"""What a caller waits for: messages of its workers, their ends, and whoever wakes it."""

from __future__ import annotations

import select
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.context import SpawnProcess

from rlpool.workers.wire import CallerPipe

Events = Sequence[tuple[int, int]]
"""Descriptors, and what can be done with them."""


class Poller:
    """Waits for workers; it costs one descriptor, and no longer for many workers than for few."""

    def __init__(self) -> None:
        self._epoll: select.epoll | None = select.epoll()
        self._worker_of: dict[int, int] = {}  # descriptor: worker
        self._wake_fd = -1

    def wake_on(self, fd: int) -> None:
        """Let a descriptor that can be read end every wait, -1 for none."""
        self._wake_fd = fd
        if fd >= 0 and self._epoll is not None:
            self._epoll.register(fd, select.POLLIN)

    def watch(self, worker: int, pipe: CallerPipe, process: SpawnProcess) -> None:
        """Wait for a worker's messages and its end."""
        for fd in (pipe.fileno(), process.sentinel):
            self._worker_of[fd] = worker
            if self._epoll is not None:
                self._epoll.register(fd, select.POLLIN)

    def watch_writing(self, pipe: CallerPipe) -> None:
        """Wait until something can be written to a pipe that is watched, if something has to be."""
        if self._epoll is not None:
            self._epoll.modify(pipe, pipe.events)

    def unwatch(self, pipe: CallerPipe, process: SpawnProcess) -> None:
        """Forget a worker's descriptors before they are closed.

        Those that a forked copy of this process has, too, would be watched for ever.
        """
        for fd in (pipe.fileno(), process.sentinel):
            self._worker_of.pop(fd, None)
            if self._epoll is not None:
                with suppress(OSError):  # it could not be registered
                    self._epoll.unregister(fd)

    def fileno(self) -> int:
        """The descriptor of what is waited for, open until ``close``; -1 after it."""
        return -1 if self._epoll is None else self._epoll.fileno()

    def wait(self, timeout_s: float) -> Events:
        """Wait until something can be read, or written where that is watched.

        Args:
            timeout_s: Longest wait.

        Returns:
            What can be; nothing after ``timeout_s`` and after ``close``.
        """
        epoll = self._epoll  # open as long as it is used here, even if a handler calls close()
        return () if epoll is None else epoll.poll(timeout_s)

    def is_woken_by(self, events: Events) -> bool:
        """Whether the descriptor of ``wake_on`` can be read."""
        return any(fd == self._wake_fd for fd, _ in events)

    def workers_of(self, events: Events) -> set[int]:
        """The workers whose descriptors these are."""
        return {self._worker_of[fd] for fd, _ in events if fd in self._worker_of}

    def close(self) -> None:
        """Watch nothing any more; a wait of another thread goes on."""
        self._epoll = None
