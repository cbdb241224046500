"""The pipe between caller and worker: nothing waits, nothing is lost, the order stays."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from rlpool.data.storage import Memory
from rlpool.workers.wire import CallerPipe, Pipe

pytestmark = pytest.mark.promise("I4")

Ends = tuple[CallerPipe, Pipe, Connection]

LARGE = "x" * 2**20


@pytest.fixture
def ends() -> Iterator[Ends]:
    here, there = socket.socketpair()
    connection = Connection(there.detach())
    pipe = CallerPipe(here)
    yield pipe, Pipe(connection), connection
    pipe.close()
    connection.close()


def memory_of(number: int) -> Memory:
    memory = Memory.shared(8)
    memory.root()[0] = number
    return memory


def test_what_was_sent_before_the_end_is_received(ends: Ends) -> None:
    here, there, connection = ends
    here.send("first")
    assert there.receive() == ("first", None)
    there.send("last words")
    os.write(connection.fileno(), b"\0\0")  # half of a message
    connection.close()
    assert here.receive() == "last words"
    with pytest.raises(EOFError):
        here.receive()


@pytest.mark.promise("I5")
def test_descriptors_that_cannot_be_sent_are_closed_and_announce_nothing(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    here, there, _ = ends
    memory = memory_of(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            here.send("lost", memory)
    here.send("kept")
    assert there.receive() == ("kept", None)
    before = len(os.listdir("/proc/self/fd"))
    here.send(LARGE, memory)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    here.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
