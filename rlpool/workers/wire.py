"""What travels between the caller and any worker process, and both ends of the pipe.

Messages are small records; data never travels, only the descriptors of memory that holds it. A
message with memory is followed by its descriptor on the same pipe, in the order of ``send``.

The worker's end waits; the caller's never does. A worker may be stopped, or too busy to read, and
the caller may not be reading what a worker writes. So what the pipe does not take is buffered and
written by a later call, and a partial message is kept until the rest arrives::

    CallerPipe.send() -> unsent messages -> flush() -> socket -> Pipe.receive()
    CallerPipe.receive() <- bytes received so far   <- socket <- Pipe.send()
"""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import select
import socket
import struct
import sys
import termios
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from rlpool.data.storage import Memory
from rlpool.errors import WorkerError

Message = Any


@dataclass(frozen=True)
class Close:
    """To a worker: close the environments and the agent, and end."""


@dataclass(frozen=True)
class Ready:
    """From a worker, once: it has what it was told to create.

    Attributes:
        report: What the caller wants to know about it.
    """

    report: Any


@dataclass(frozen=True)
class Failed:
    """From a worker: the user's code failed.

    Attributes:
        error: The error, as text and integers.
        command: Number of the command that cannot be carried out. ``None`` outside of commands:
            then the worker ends.
    """

    error: WorkerError
    command: int | None = None


@dataclass(frozen=True)
class Done:
    """From a worker: its part of a command is over, done or failed."""

    command: int


@dataclass(frozen=True)
class Retiring:
    """From a worker: it has run long enough and ends, to be replaced."""


@dataclass(frozen=True)
class Logged:
    """From a worker: it has logged something.

    Attributes:
        fields: The fields of the record.
    """

    fields: dict[str, Any]


@dataclass(frozen=True)
class Dropped:
    """From a worker: it has dropped log records.

    Attributes:
        n_records: How many since the last message of this kind.
    """

    n_records: int


class Inherited:
    """A descriptor that a worker gets when it starts; its number arrives there.

    Args:
        fd: The descriptor.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _number_of, (reduction.DupFd(self._fd),)


def _number_of(descriptor: Any) -> int:
    number: int = descriptor.detach()
    return number


_READ_BYTES = 2**16

_LOCK_S = 0.1
"""How long a log record waits for its turn: a signal handler may log in the middle of a send."""

_HEAD = struct.Struct("!i")
"""``Connection``, which is at the worker's end, puts the size before a message."""

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
        self._reading = threading.Lock()  # another thread, or a handler, may close the pipe

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """What to poll it for."""
        return select.POLLIN | select.POLLOUT if self._unsent else select.POLLIN

    @property
    def has_received(self) -> bool:
        """Whether anything was read that ``receive`` has not returned yet."""
        return bool(self._received)

    def send(self, message: Message, memory: Memory | None = None) -> None:
        """Send a message, and with it the descriptor of its memory, now or by later ``flush``.

        Raises:
            OSError: If the other end is gone, or this process may open no further descriptor;
                nothing of the message was sent then.
        """
        size = None if memory is None else memory.n_bytes
        fd = None if memory is None else os.dup(memory.fd)  # before anything is announced
        body = pickle.dumps((message, size), pickle.HIGHEST_PROTOCOL)
        self._unsent.append((memoryview(_HEAD.pack(len(body)) + body), None))
        if fd is not None:
            self._unsent.append((memoryview(b"m"), fd))
        self.flush()

    def flush(self) -> None:
        """Write what the pipe takes now.

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
                return
            if not self._unsent:
                return  # a signal's handler or another thread has closed it meanwhile
            if n_sent < len(words):
                self._unsent[0] = words[n_sent:], None
                continue
            self._unsent.popleft()
            if fd is not None:
                os.close(fd)

    def receive(self) -> Message | None:
        """The next message, ``None`` if it has not arrived as a whole.

        Raises:
            EOFError, OSError: If the other end is gone, and there is no further message.
        """
        with self._reading:
            return self._receive()

    def _receive(self) -> Message | None:
        while (body := self._next_body()) is None:
            try:
                words = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return None
            if not words:
                raise EOFError
            self._received += words
        return pickle.loads(body)

    def _next_body(self) -> bytearray | None:
        """Take a message off what was received, if there is one."""
        received = self._received
        if len(received) < _HEAD.size:
            return None
        end = _HEAD.size + _HEAD.unpack_from(received)[0]
        if len(received) < end:
            return None
        body = received[_HEAD.size : end]
        del received[:end]
        return body

    def finish(self, message: Message) -> None:
        """Send a last message, if the pipe takes it, and let the worker see that none follows."""
        with suppress(OSError):
            self.send(message)
            self._socket.shutdown(socket.SHUT_WR)

    def rest(self) -> list[Message]:
        """The messages that have arrived as a whole; none while another call reads them."""
        messages: list[Message] = []
        if self._reading.acquire(blocking=False):
            try:
                while (message := self._receive()) is not None:
                    messages.append(message)
            except (EOFError, OSError):
                pass
            finally:
                self._reading.release()
        return messages

    def close(self) -> None:
        """Close this end; what was not written is dropped. May be repeated."""
        while self._unsent:
            _, fd = self._unsent.popleft()
            if fd is not None:
                os.close(fd)
        self._socket.close()


class Pipe:
    """A worker's end of the pipe to the caller.

    Args:
        connection: A duplex connection over a Unix socket, at the other end of which is a
            ``CallerPipe``.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._poller = select.poll()
        self._poller.register(connection.fileno(), select.POLLIN)
        self._lock = threading.Lock()
        self._n_dropped = 0
        with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
            n_bytes = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        self._max_unread_bytes = n_bytes // 2  # the rest is for messages that wait

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Send a message, waiting until the caller has read enough of what was sent before.

        Raises:
            OSError: If the other end is gone.
        """
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._write(body)

    def offer(self, message: Message) -> None:
        """Send a message if the caller reads fast enough, else drop and count it. Never waits.

        The number of dropped messages goes before the next message.

        Raises:
            OSError: If the other end is gone.
        """
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        has_turn = self._lock.acquire(timeout=_LOCK_S)
        try:
            if has_turn and self._n_unread_bytes() + len(body) <= self._max_unread_bytes:
                self._write(body)
            else:
                self._n_dropped += 1
        finally:
            if has_turn:
                self._lock.release()

    def _n_unread_bytes(self) -> int:
        """What the kernel keeps for the caller, its own bookkeeping included."""
        words = fcntl.ioctl(self._connection.fileno(), termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(words, sys.byteorder)

    def _write(self, body: bytes) -> None:
        number, self._n_dropped = self._n_dropped, 0
        if number:
            self._connection.send_bytes(pickle.dumps(Dropped(number), pickle.HIGHEST_PROTOCOL))
        self._connection.send_bytes(body)

    def receive(self) -> tuple[Message, Memory | None]:
        """Wait for a message, and for its memory.

        The mapping is private, so that what this process writes stays its own, unless the
        message's class says ``shares_memory``.

        Raises:
            EOFError, OSError: If the other end is gone.
        """
        message, size = pickle.loads(self._connection.recv_bytes())
        if size is None:
            return message, None
        with socket.socket(fileno=os.dup(self._connection.fileno())) as duplicate:
            _, descriptors, _, _ = socket.recv_fds(duplicate, 1, 1)
        if not descriptors:
            raise OSError(errno.EMFILE, "no descriptor left for what a message brings")
        is_private = not getattr(message, "shares_memory", False)
        return message, Memory.attach(descriptors[0], size, private=is_private)

    def poll(self) -> bool:
        """Whether a message, or the end, can be read without waiting."""
        # Connection.poll() makes a new selector for every call, which costs 20 times as much.
        return not self._connection.closed and bool(self._poller.poll(0))
