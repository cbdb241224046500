"""Open files that travel to other processes: what a pickle of shared memory carries.

A process that is being started inherits the descriptor. Everywhere else, in a pipe or a queue, a
pickle names the sender and its descriptor, and whoever unpickles opens the file by way of
``/proc``: no thread, no server and no further descriptor per pickle in the sender, and one pickle
may be opened any number of times. Where there is no ``/proc``, ``multiprocessing`` hands the
descriptor over.

A file that was sent has a page behind its contents. It holds a random name, by which a receiver
knows that it opened the right file, and one byte per ticket that the receiver sets. A descriptor
that is dropped while a ticket is on its way is kept until that byte is set, so that what was put
into a queue arrives although the sender went on. At most ``MAX_KEPT`` are kept.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from dataclasses import dataclass
from itertools import count
from multiprocessing import context, reduction
from typing import Any

from rlpool.errors import UsageError

NAME_BYTES = 16
"""Length of the random name: no two files ever get the same."""

N_TICKETS = 4096 - NAME_BYTES
"""Tickets that can be told apart: they share a page with the name."""

MAX_KEPT = 32
"""Dropped descriptors that are kept for tickets on their way; a descriptor keeps its memory."""


class Descriptor:
    """Owner of the descriptor of an anonymous file; closes it when it is dropped.

    Attributes:
        fd: The descriptor; ``None`` once closed.
        name: Random name of the file; empty until ``make_name`` was called.

    Args:
        fd: The descriptor.
        page: Where in the file the page with the name and the tickets starts.
    """

    def __init__(self, fd: int, page: int) -> None:
        self.fd: int | None = fd
        self._page = page
        self.name = b""
        self._sent: set[int] = set()
        self._owner = os.getpid()
        let_go_of_received()

    def make_name(self) -> bytes:
        """Random name of the file, the same in every process; made by the first one that asks."""
        if not self.name and self.fd is not None:
            name = os.pread(self.fd, NAME_BYTES, self._page)
            if len(name) < NAME_BYTES:
                name = os.urandom(NAME_BYTES)
                os.pwrite(self.fd, name, self._page)
            self.name = name
        return self.name

    def ticket(self) -> Ticket:
        """What a pickle carries, for one pickle."""
        if self.fd is None:
            raise UsageError("the descriptor of this memory was closed")
        let_go_of_received()
        if self._owner != os.getpid():  # a forked copy answers for its own tickets
            self._owner = os.getpid()
            self._sent = set()
        name = self.make_name()
        passed = None
        number = -1
        if context.get_spawning_popen() is not None or not _has_proc():
            passed = reduction.DupFd(self.fd)
        else:
            # Different numbers in processes that send the same file.
            number = (next(_numbers) + os.getpid() * 61) % N_TICKETS
            os.pwrite(self.fd, b"\0", self._page + NAME_BYTES + number)
            self._sent.add(number)
        return Ticket(os.getpid(), self.fd, self._page, name, number, passed)

    def confirm(self, ticket: Ticket) -> None:
        """Note in the file that a ticket arrived."""
        if ticket.number >= 0 and self.fd is not None:
            os.pwrite(self.fd, b"\1", self._page + NAME_BYTES + ticket.number)

    def recall(self) -> None:
        """Forget tickets on their way: what is dropped is not kept for them."""
        self._sent = set()

    def close(self) -> None:
        """Close the descriptor; tickets on their way become worthless."""
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        if self.fd is None:
            return
        if self._sent and self._owner == os.getpid():
            _kept.append((os.getpid(), self.fd, self._page + NAME_BYTES, self._sent))
            self.fd = None
            let_go_of_received()
        else:
            self.close()


@dataclass(frozen=True)
class Ticket:
    """Where another process finds a file.

    Attributes:
        pid: The sender.
        fd: Its descriptor.
        page: Where the page with the name and the tickets starts.
        name: Name of the file.
        number: Which byte says that the ticket arrived, -1 for none.
        passed: How a process that is being started gets the descriptor; ``None`` otherwise.
    """

    pid: int
    fd: int
    page: int
    name: bytes
    number: int
    passed: Any

    def redeem(self) -> Descriptor:
        """Open the file in this process.

        Raises:
            UsageError: If the sender does not have it any more.
        """
        fd = self._inherited()
        if fd is None:
            try:
                fd = self._open()
            except OSError as error:
                raise self._is_gone(str(error)) from error
            if not self._is_the_file(fd):
                os.close(fd)
                raise self._is_gone("its descriptor has another meaning now")
        descriptor = Descriptor(fd, self.page)
        descriptor.confirm(self)
        return descriptor

    def discard(self, known: Descriptor) -> None:
        """Take note of a file that this process has open already."""
        known.confirm(self)
        fd = self._inherited()
        if fd is not None and fd != known.fd:
            os.close(fd)

    def _inherited(self) -> int | None:
        """The descriptor that this process was started with, ``None`` if there is none (left).

        Several tickets may name one inherited descriptor, and the first one to be redeemed owns it:
        by now the number may be closed or mean something else.
        """
        if self.passed is None:
            return None
        with contextlib.suppress(OSError, EOFError):
            fd: int = self.passed.detach()
            if self._is_the_file(fd):
                os.set_inheritable(fd, False)
                return fd
        return None

    def _open(self) -> int:
        path = f"/proc/{self.pid}/fd/{self.fd}"
        # Opening anything else, a pipe for one, could block or have effects.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise FileNotFoundError(f"{path} is another file")
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def _is_the_file(self, fd: int) -> bool:
        try:
            return os.pread(fd, NAME_BYTES, self.page) == self.name
        except OSError:
            return False

    def _is_gone(self, reason: str) -> UsageError:
        return UsageError(
            f"the memory that process {self.pid} sent is gone ({reason})",
            fix="keep the array and its process alive until it was received, and close it only "
            "afterwards",
        )


def let_go_of_received() -> None:
    """Close kept descriptors whose tickets arrived, and the oldest beyond ``MAX_KEPT``."""
    for _ in range(len(_kept)):
        try:
            kept = _kept.popleft()  # nobody else has it from here on: no lock is needed
        except IndexError:
            return
        pid, fd, tickets, sent = kept
        # Called while objects are dropped: somebody may have closed all descriptors before.
        with contextlib.suppress(OSError):
            if pid == os.getpid() and len(_kept) < MAX_KEPT and _is_awaited(fd, tickets, sent):
                _kept.append(kept)
            else:
                os.close(fd)


def _is_awaited(fd: int, tickets: int, sent: set[int]) -> bool:
    arrived = os.pread(fd, N_TICKETS, tickets)
    return any(number < len(arrived) and not arrived[number] for number in sent)


def _has_proc() -> bool:
    return os.path.exists(f"/proc/{os.getpid()}/fd")


_numbers = count()

_kept: deque[tuple[int, int, int, set[int]]] = deque()
