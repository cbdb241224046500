"""The pipe between caller and worker: nothing blocks, nothing is lost, order is preserved."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Iterator

import pytest

from rlpool.data.storage import Memory
from rlpool.workers.wire import CallerPipe, Pipe, pipe_ends

pytestmark = [pytest.mark.linux, pytest.mark.promise("I4")]

Ends = tuple[CallerPipe, Pipe, socket.socket]

LARGE = "x" * 2**20


@pytest.fixture
def ends() -> Iterator[Ends]:
    here, there = pipe_ends()
    pipe = CallerPipe(here)
    yield pipe, Pipe(there), there
    pipe.close()
    there.close()


def memory_of(number: int) -> Memory:
    memory = Memory.shared(8)
    memory.root()[0] = number
    return memory


def test_messages_sent_before_the_end_are_received(ends: Ends) -> None:
    here, there, socket_there = ends
    here.send("first")
    assert there.receive() == ("first", None)
    for words in (LARGE, "last words"):
        there.send(words)
    here.send("never received")
    socket_there.close()
    assert [here.receive(), here.receive()] == [LARGE, "last words"]
    with pytest.raises(EOFError):
        here.receive()


@pytest.mark.promise("I5")
def test_unsendable_descriptors_are_closed_and_not_announced(
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
    message, received = there.receive()
    assert (message, received.root()[0]) == (LARGE, 1)
    assert len(os.listdir("/proc/self/fd")) == before
    while here.events == select.POLLIN:  # the pipe is full
        here.send("small")
    here.send("unsent", memory)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    here.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
