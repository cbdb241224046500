"""A process that is tied ends with whoever holds the leash, one that let go does not."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import pytest

from rlpool.workers import leash
from rlpool.workers.failure_policy import START_METHODS
from rlpool.workers.leash import Leash, LeashEnd
from rlpool.workers.warm_start import process_class

pytestmark = pytest.mark.skipif(not leash.CAN_KILL, reason="needs a kernel that can do it")


def wait_for_word(end: LeashEnd, there: Connection, lets_go: bool) -> None:
    """What runs in a process that is tied from its first instruction on."""
    if lets_go:
        leash.let_go()
    there.send("there")
    with suppress(EOFError):
        there.recv()


@dataclass
class Tied:
    """Two processes that are tied to one leash, started in one of the two ways."""

    start_method: str
    cord: Leash = field(default_factory=Leash)
    processes: list[SpawnProcess] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)

    def start(self, lets_go: bool = False) -> None:
        here, there = multiprocessing.Pipe()
        end = self.cord.end()
        process = process_class(self.start_method)(target=wait_for_word, args=(end, there, lets_go))
        process.start()
        end.tie(process.pid)
        there.close()
        end.close()
        assert here.poll(60)
        assert here.recv() == "there"
        self.processes.append(process)
        self.pipes.append(here)


@pytest.fixture(params=START_METHODS)
def tied(request: pytest.FixtureRequest) -> Iterator[Tied]:
    tied = Tied(request.param)
    yield tied
    for process, pipe in zip(tied.processes, tied.pipes, strict=True):
        pipe.close()
        process.join()
        process.close()


def test_all_that_are_tied_end_when_it_is_closed(tied: Tied) -> None:
    tied.start()
    tied.start()
    assert [process.is_alive() for process in tied.processes] == [True, True]
    tied.cord.close()
    tied.cord.close()
    for process in tied.processes:
        process.join(30)
        assert process.exitcode == -signal.SIGKILL


def test_who_has_let_go_lives_on(tied: Tied) -> None:
    tied.start(lets_go=True)
    tied.start()
    tied.cord.close()
    tied.processes[1].join(30)
    assert tied.processes[1].exitcode == -signal.SIGKILL
    tied.pipes[0].close()
    tied.processes[0].join(30)
    assert tied.processes[0].exitcode == 0


def test_it_takes_one_descriptor_whatever_the_number_of_ends() -> None:
    before = set(os.listdir("/proc/self/fd"))
    cord = Leash()
    for _ in range(5):
        cord.end().close()
    assert len(set(os.listdir("/proc/self/fd")) - before) == 1
    del cord
    assert set(os.listdir("/proc/self/fd")) == before


def test_without_a_kernel_that_can_do_it_nothing_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leash, "CAN_KILL", False)
    before = set(os.listdir("/proc/self/fd"))
    cord = Leash()
    end = cord.end()
    end.tie(os.getpid())
    assert end.__reduce__() == (LeashEnd, (-1,))
    end.close()
    assert set(os.listdir("/proc/self/fd")) == before
    cord.close()
