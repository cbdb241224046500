"""Descriptors of shared memory that travel to other processes in pickles.

A pickle names the sending process and its descriptor, and the receiver opens the file through
``/proc``. This needs no server, no thread and no further descriptor per pickle, and a pickle can be
received any number of times.

A page after the contents of the file holds a random name, by which a receiver recognises the file,
and one byte per pickle, which the receiver sets. A descriptor that is dropped while a pickle is on
its way is kept until that byte is set, so that what was put into a queue arrives even if the sender
drops it. At most ``MAX_KEPT`` descriptors are kept.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from itertools import count
from typing import NamedTuple

from rlpool.errors import UsageError

NAME_BYTES = 16
"""Length of the random name."""

N_TICKETS = 4096 - NAME_BYTES
"""Pickles that can be distinguished: their bytes share a page with the name."""

MAX_KEPT = 32
"""Dropped descriptors, and with them their memory, that are kept for pickles on their way."""


class Descriptor:
    """The descriptor of an anonymous file; closes it when it is dropped.

    Args:
        fd: The descriptor.
        page: Offset in the file of the page with the name.
        name: The name of a received file; a new file gets one.

    Attributes:
        fd: The descriptor; -1 once closed.
        name: Random name of the file, the same in every process.
    """

    fd = -1  # if the constructor is interrupted

    def __init__(self, fd: int, page: int, name: bytes = b"") -> None:
        self._sent: set[int] = set()
        self._page = page
        self.fd = fd
        self.name = name or os.urandom(NAME_BYTES)
        if not name:
            os.pwrite(fd, self.name, page)
        let_go_of_received()

    def ticket(self) -> Ticket:
        """What a pickle carries; the descriptor has to be open."""
        let_go_of_received()
        # Processes that send the same file begin with different numbers.
        number = (next(_numbers) + os.getpid() * 61) % N_TICKETS
        self._mark(number, b"\0")
        self._sent.add(number)
        return Ticket(os.getpid(), self.fd, self._page, self.name, number)

    def confirm(self, ticket: Ticket) -> None:
        """Note in the file that a ticket arrived."""
        self._mark(ticket.number, b"\1")

    def _mark(self, number: int, mark: bytes) -> None:
        os.pwrite(self.fd, mark, self._page + NAME_BYTES + number)

    def is_awaited(self) -> bool:
        """Whether a ticket is still on its way."""
        marks = os.pread(self.fd, N_TICKETS, self._page + NAME_BYTES)
        return any(not marks[number] for number in self._sent)

    def recall(self) -> None:
        """Keep nothing for tickets on their way."""
        self._sent.clear()

    def close(self) -> None:
        """Close the descriptor; tickets on their way become invalid."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if self.fd >= 0 and self._sent:
            _kept.append(self)  # lives on
            let_go_of_received()
        else:
            self.close()


class Ticket(NamedTuple):
    """Where another process finds a file.

    Attributes:
        pid: The sender.
        fd: Its descriptor.
        page: Offset in the file of the page with the name.
        name: Name of the file.
        number: Of the byte that says that the ticket arrived.
    """

    pid: int
    fd: int
    page: int
    name: bytes
    number: int

    def redeem(self) -> Descriptor:
        """Open the file in this process.

        Raises:
            UsageError: If the sender no longer has it.
        """
        path = f"/proc/{self.pid}/fd/{self.fd}"
        try:
            # Opening anything else, such as a pipe, could block or have side effects.
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise FileNotFoundError(f"{path} is another file")
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if os.pread(fd, NAME_BYTES, self.page) != self.name:
                os.close(fd)
                raise FileNotFoundError(f"{path} is another file")
        except OSError as error:
            raise UsageError(
                f"the memory that process {self.pid} sent is gone ({error})",
                fix="keep the array and its process alive until it is received",
            ) from error
        descriptor = Descriptor(fd, self.page, self.name)
        descriptor.confirm(self)
        return descriptor


def let_go_of_received() -> None:
    """Close kept descriptors whose tickets arrived, and the oldest beyond ``MAX_KEPT``."""
    for _ in range(len(_kept)):
        try:
            kept = _kept.popleft()  # no other thread can take it now, so no lock is needed
        except IndexError:
            return
        # Runs while objects are dropped: at exit, all descriptors may already be closed.
        with contextlib.suppress(OSError):
            if len(_kept) < MAX_KEPT and kept.is_awaited():
                _kept.append(kept)
            else:
                kept.close()


_numbers = count()

_kept: deque[Descriptor] = deque()
