"""The caller's end of the pipe to a worker: neither writing nor reading waits for the worker.

A worker may be stopped, or too busy to read, at any time, and the other way round nobody may be
reading what it writes. So what the pipe does not take is kept here and written whenever the caller
looks, and what has arrived of a message is kept until the rest is there::

    send() -> unsent messages -> flush() -> socket -> worker's Pipe.receive()
    receive() <- bytes received so far   <- socket <- worker's Pipe.send()

Messages and descriptors share the socket, in the order of their ``send``.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
from collections import deque
from contextlib import suppress

from rlpool.memory.storage import Memory
from rlpool.workers.messages import Message

_READ_BYTES = 2**16

_LONGEST_INT = 2**31 - 1
"""``Connection``, which is at the worker's end, puts the size before a message: as an int, or for
more than this as -1 and a long."""

_PATIENCE_MS = 2.0
"""A worker that reads takes a full pipe's bytes out in much less; one that does not is not waited
for again until it does."""

_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class CallerPipe:
    """Sends messages to a worker and receives its messages, without ever waiting for it.

    Args:
        end: One end of a pair of Unix sockets, owned from here on.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._unsent: deque[tuple[memoryview, int | None]] = deque()  # with a descriptor of ours
        self._received = bytearray()

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """What to poll it for."""
        return select.POLLIN | select.POLLOUT if self._unsent else select.POLLIN

    def send(self, message: Message, memory: Memory | None = None) -> None:
        """Send a message, and with it the descriptor of its memory, now or by later ``flush``.

        Raises:
            OSError: If the other end is gone, or this process may open no further descriptor;
                nothing of the message was sent then.
        """
        size = None if memory is None else memory.n_bytes
        fd = None if memory is None else os.dup(memory.fd)  # before anything is announced
        body = pickle.dumps((message, size), pickle.HIGHEST_PROTOCOL)
        is_long = len(body) > _LONGEST_INT
        head = struct.pack("!iQ", -1, len(body)) if is_long else struct.pack("!i", len(body))
        is_stuck = bool(self._unsent)
        self._unsent.append((memoryview(head + body), None))
        if fd is not None:
            self._unsent.append((memoryview(b"m"), fd))
        while not self.flush() and not is_stuck:
            poller = select.poll()
            poller.register(self._socket, select.POLLOUT)
            is_stuck = not poller.poll(_PATIENCE_MS)

    def flush(self) -> bool:
        """Write what the pipe takes now; returns whether that was all.

        Raises:
            OSError: If the other end is gone.
        """
        while self._unsent:
            words, fd = self._unsent[0]
            try:
                if fd is None:
                    n_sent = self._socket.send(words, _NO_SIGNAL)
                else:
                    n_sent = socket.send_fds(self._socket, [words], [fd], _NO_SIGNAL)
            except BlockingIOError:
                return False
            if n_sent < len(words):
                self._unsent[0] = words[n_sent:], None
                continue
            self._unsent.popleft()
            if fd is not None:
                os.close(fd)
        return True

    def receive(self) -> Message | None:
        """The next message, ``None`` if it has not arrived as a whole.

        Raises:
            EOFError, OSError: If the other end is gone, and there is no further message.
        """
        while (body := self._next_body()) is None:
            try:
                words = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return None
            if not words:
                raise EOFError
            self._received += words
        return pickle.loads(body)[0]

    def _next_body(self) -> bytearray | None:
        """Take a message off what was received, if there is one."""
        received = self._received
        start = 4
        if len(received) < start:
            return None
        (size,) = struct.unpack_from("!i", received)
        if size < 0:
            start = 12
            if len(received) < start:
                return None
            (size,) = struct.unpack_from("!Q", received, 4)
        if len(received) < start + size:
            return None
        body = received[start : start + size]
        del received[: start + size]
        return body

    def finish(self, message: Message) -> None:
        """Send a last message, if the pipe takes it, and let the worker see that none follows.

        Whether it reads, now or later, or writes: it comes to an end of file or a broken pipe.
        """
        with suppress(OSError):
            self.send(message)
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end; what was not written is dropped. May be repeated."""
        while self._unsent:
            _, fd = self._unsent.popleft()
            if fd is not None:
                os.close(fd)
        self._socket.close()
