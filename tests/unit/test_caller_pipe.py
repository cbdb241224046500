"""The caller's end of a worker's pipe: nothing waits, nothing is lost, the order stays."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from rlpool.memory.storage import Memory
from rlpool.workers.caller_pipe import CallerPipe
from rlpool.workers.messages import Pipe

Ends = tuple[CallerPipe, Pipe]

LARGE = "x" * 2**20


@pytest.fixture
def ends() -> Iterator[Ends]:
    here, there = socket.socketpair()
    ends = CallerPipe(here), Pipe(Connection(there.detach()))
    yield ends
    ends[0].close()
    ends[1].connection.close()


def memory_of(number: int) -> Memory:
    memory = Memory.shared(8)
    memory.root()[0] = number
    return memory


def n_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def polled(here: CallerPipe) -> Any:
    """The next message, waited for."""
    while (message := here.receive()) is None:
        poller = select.poll()
        poller.register(here, here.events)
        assert poller.poll(10_000)
    return message


def test_large_messages_and_memory_arrive_in_their_order(ends: Ends) -> None:
    here, there = ends
    for number in range(5):
        memory = memory_of(number)
        here.send((number, LARGE), memory)
        here.send(number)
        memory.close_fd()
    assert here.events & select.POLLOUT, "no pipe holds all of that"
    arrived: list[Any] = []

    def work() -> None:
        while len(arrived) < 10:
            arrived.append(there.receive())

    worker = threading.Thread(target=work)
    worker.start()
    while not here.flush():
        poller = select.poll()
        poller.register(here, here.events)
        assert poller.poll(10_000)
    worker.join(10.0)
    for number in range(5):
        (message, memory), (other, nothing) = arrived[2 * number : 2 * number + 2]
        assert message == (number, LARGE)
        assert memory.root()[0] == number
        assert (other, nothing) == (number, None)


def test_a_message_is_received_when_the_last_of_it_is_there(ends: Ends) -> None:
    here, there = ends
    assert here.receive() is None
    worker = threading.Thread(target=lambda: [there.send(LARGE), there.send("next")])
    worker.start()
    assert polled(here) == LARGE
    assert polled(here) == "next"
    worker.join(10.0)
    assert here.receive() is None


def test_the_size_of_a_message_may_be_written_as_a_long(ends: Ends) -> None:
    here, there = ends
    fd = there.connection.fileno()
    words = b"\x80\x04K\x05N\x86\x94."  # the pickle of (5, None)
    for cut in (2, 4, 9, 12, 15):
        parts = struct.pack("!iQ", -1, len(words)) + words
        os.write(fd, parts[:cut])
        assert here.receive() is None
        os.write(fd, parts[cut:])
        assert here.receive() == 5


def test_what_was_sent_before_the_end_is_received(ends: Ends) -> None:
    here, there = ends
    there.send("last words")
    os.write(there.connection.fileno(), b"\0\0")  # half of a message
    there.connection.close()
    assert here.receive() == "last words"
    with pytest.raises(EOFError):
        here.receive()


def test_a_worker_that_has_read_nothing_comes_to_the_end(ends: Ends) -> None:
    here, there = ends
    here.send("first")
    here.send(LARGE)
    here.finish("close")
    assert there.receive()[0] == "first"
    with pytest.raises((EOFError, OSError)):
        there.receive()
    with pytest.raises(OSError, match="Broken pipe"):
        there.send("reply")


def test_the_last_message_is_read_before_the_end(ends: Ends) -> None:
    here, there = ends
    here.finish("close")
    assert there.receive()[0] == "close"
    with pytest.raises(EOFError):
        there.receive()


def test_descriptors_that_were_not_sent_are_closed(ends: Ends) -> None:
    here, _ = ends
    memory = memory_of(1)
    before = n_open()
    here.send(LARGE, memory)
    assert n_open() == before + 1
    here.close()
    assert n_open() == before - 1
    memory.close()


def test_nothing_is_announced_for_which_there_is_no_descriptor(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = ends

    def refuse(fd: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    memory = memory_of(3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            here.send("lost", memory)
    memory.close_fd()
    here.send("kept")
    assert there.receive() == ("kept", None)
