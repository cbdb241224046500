"""Messages between the caller and any worker process, and both ends of the pipe.

Messages are small records; data is not sent, only the descriptors of memory that holds it. The pipe
is a pair of sockets that preserve message boundaries, so each message is sent and received in one
piece, with its descriptors. A long message is written to a file in memory, whose descriptor is
sent.

The worker's end waits; the caller's never does. A worker may be stopped or too busy to read, and
the caller may not be reading a worker's messages. So messages that do not fit into the pipe are
kept and written by a later call::

    CallerPipe.send() -> unsent messages -> flush() -> socket -> Pipe.receive()
    CallerPipe.receive() <--------------------------- socket <- Pipe.send()
"""

from __future__ import annotations

import array
import errno
import os
import pickle
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

from rlpool.data.storage import Memory
from rlpool.errors import WorkerError
from rlpool.machine.platform import anonymous_file, n_unread_bytes

Message = Any


@dataclass(frozen=True)
class Close:
    """To a worker: close the environments and the agent, and end."""


@dataclass(frozen=True)
class Ready:
    """From a worker, once: it has created everything in its first message.

    Attributes:
        report: Its report to the caller.
    """

    report: Any


@dataclass(frozen=True)
class Failed:
    """From a worker: the user's code failed.

    Attributes:
        error: The error, as text and integers.
        command: Number of the command that failed, or ``None`` outside of commands: then the worker
            ends.
    """

    error: WorkerError
    command: int | None = None


Done = int
"""From a worker: its part of the command with this number is over, done or failed."""


@dataclass(frozen=True)
class Retiring:
    """From a worker: it has reached its limit of episodes and ends, to be replaced."""


@dataclass(frozen=True)
class Logged:
    """From a worker: a log record.

    Attributes:
        fields: The fields of the record.
    """

    fields: dict[str, Any]


@dataclass(frozen=True)
class Dropped:
    """From a worker: the number of log records it has dropped.

    Attributes:
        n_records: Records dropped since the last message of this kind.
    """

    n_records: int


class Inherited:
    """A descriptor that a worker receives when it starts, where it unpickles to its number.

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


_MAX_BYTES = 2**15
"""Capacity that the buffer of a socket always has. A longer message is written to a file."""

_MAX_FDS = 2
"""One for a message's memory, one for the file of a long message."""

_LOCK_S = 0.1
"""How long a log record waits for the lock: a signal handler may log in the middle of a send."""

Packet = tuple[bytes, list[int]]
"""A message in transit, and the descriptors that go with it, to be closed."""


def pipe_ends() -> tuple[socket.socket, socket.socket]:
    """Make the sockets of a new pipe."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _packed(message: Message, memory: Memory | None = None) -> Packet:
    fds = [] if memory is None else [os.dup(memory.fd)]
    size = None if memory is None else memory.n_bytes
    words = pickle.dumps((message, size), pickle.HIGHEST_PROTOCOL)
    if len(words) > _MAX_BYTES:
        fds.append(anonymous_file("rlpool-message"))
        os.pwrite(fds[-1], words, 0)
        words = pickle.dumps(None)
    return words, fds


def _write(end: socket.socket, packet: Packet) -> None:
    words, fds = packet
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
    end.sendmsg([words], [rights] if fds else [], socket.MSG_NOSIGNAL)
    _close(fds)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _read(end: socket.socket) -> tuple[Message, int | None, list[int]]:
    """Receive a message, the size of its memory if any, and the descriptor of the memory."""
    try:
        words, fds, flags, _ = socket.recv_fds(end, _MAX_BYTES, _MAX_FDS)
    except ConnectionResetError:  # precedes the other end's last messages
        words, fds, flags, _ = socket.recv_fds(end, _MAX_BYTES, _MAX_FDS)
    if flags & socket.MSG_CTRUNC:
        _close(fds)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if not words:
        raise EOFError
    content = pickle.loads(words)
    if content is None:
        with open(fds.pop(), "rb") as file:
            content = pickle.load(file)
    return *content, fds


class CallerPipe:
    """Sends messages to a worker and receives its messages without ever waiting for it.

    Args:
        end: One end of the pipe, owned from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._unsent: deque[Packet] = deque()

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """The events to poll it for."""
        return select.POLLIN | select.POLLOUT if self._unsent else select.POLLIN

    def send(self, message: Message, memory: Memory | None = None) -> None:
        """Send a message with the descriptor of its memory, now or in a later ``flush``.

        Raises:
            OSError: If the other end is gone, or this process cannot open another descriptor; then
                no part of the message was sent.
        """
        self._unsent.append(_packed(message, memory))
        self.flush()

    def flush(self) -> None:
        """Write as many messages as fit into the pipe now.

        Raises:
            OSError: If the other end is gone.
        """
        while self._unsent:
            packet = self._unsent.popleft()  # a handler or another thread may close this pipe
            try:
                _write(self._socket, packet)
            except BlockingIOError:
                self._unsent.appendleft(packet)
                return
            except BaseException:
                _close(packet[1])
                raise

    def receive(self) -> Message | None:
        """Return the next message, ``None`` if none has arrived.

        Raises:
            EOFError, OSError: If the other end is gone and there are no further messages.
        """
        try:
            message, _, _ = _read(self._socket)
        except BlockingIOError:
            return None
        return message

    def finish(self, message: Message) -> None:
        """Send a last message, if it fits into the pipe, and signal the end of messages."""
        with suppress(OSError):
            self.send(message)
            self._socket.shutdown(socket.SHUT_WR)

    def rest(self) -> list[Message]:
        """Return the messages that have arrived."""
        messages: list[Message] = []
        with suppress(EOFError, OSError):
            while (message := self.receive()) is not None:
                messages.append(message)
        return messages

    def close(self) -> None:
        """Close this end and drop unsent messages. Can be repeated."""
        while self._unsent:
            _close(self._unsent.popleft()[1])
        self._socket.close()


class Pipe:
    """A worker's end of the pipe to the caller.

    Args:
        end: The socket.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._poller = select.poll()
        self._poller.register(end, select.POLLIN)
        self._lock = threading.Lock()
        self._n_dropped = 0
        # The other half is for messages that wait.
        self._max_unread_bytes = end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message, waiting until the caller has read enough of the earlier ones.

        Raises:
            OSError: If the other end is gone.
        """
        packet = _packed(message)
        with self._lock:
            self._write(packet)

    def offer(self, message: Message) -> None:
        """Send a message if the caller reads fast enough, otherwise drop and count it. Never waits.

        The number of dropped messages is sent before the next message.

        Raises:
            OSError: If the other end is gone.
        """
        words, files = packet = _packed(message)
        has_turn = self._lock.acquire(timeout=_LOCK_S)
        try:
            has_room = n_unread_bytes(self._socket.fileno()) + len(words) <= self._max_unread_bytes
            if has_turn and has_room and not files:
                self._write(packet)
            else:
                self._n_dropped += 1
                _close(files)
        finally:
            if has_turn:
                self._lock.release()

    def _write(self, packet: Packet) -> None:
        number, self._n_dropped = self._n_dropped, 0
        if number:
            _write(self._socket, _packed(Dropped(number)))
        _write(self._socket, packet)

    def receive(self) -> tuple[Message, Memory | None]:
        """Wait for a message and its memory.

        The mapping is private, so writes of this process stay private, unless ``shares_memory`` is
        set on the message's class.

        Raises:
            EOFError, OSError: If the other end is gone.
        """
        message, size, fds = _read(self._socket)
        if size is None:
            return message, None
        is_private = not getattr(message, "shares_memory", False)
        return message, Memory.attach(fds[0], size, private=is_private)

    def poll(self) -> bool:
        """Whether a message, or the end, can be read without waiting."""
        return self._socket.fileno() >= 0 and bool(self._poller.poll(0))
