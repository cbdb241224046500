"""Signals are not lost, and descriptors are released."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from rlpool.workers.wake import Wake

pytestmark = pytest.mark.linux

LONG_S = 3600.0


@pytest.fixture
def asleep() -> memoryview:
    return np.ones(1, np.int64).data


@pytest.fixture
def wake(asleep: memoryview) -> Iterator[Wake]:
    wake = Wake()
    wake.share(asleep)
    yield wake
    wake.close()


class Clock:
    """Clock that advances only while another program uses the core, at every yield."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.taken_s = 0.0
        self.at_a_look: Callable[[], object] | None = None
        monkeypatch.setattr(time, "perf_counter", self.look)
        monkeypatch.setattr(os, "sched_yield", self.step)

    def look(self) -> float:
        if self.at_a_look is not None:
            self.at_a_look()
        return self.now_s

    def step(self) -> None:
        self.now_s += 1e-6 + self.taken_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def n_looks(wake: Wake) -> int:
    """Begin to wait and return the number of pauses before a sleep."""
    wake.begin()
    n = 1
    while not wake.pause(LONG_S):
        n += 1
    return n


def is_signalled(wake: Wake) -> bool:
    return bool(select.select([wake.fd], [], [], 0)[0])


def test_a_signal_ends_the_wait_until_the_wake_is_closed() -> None:
    before = set(os.listdir("/dev/fd"))
    wake = Wake()
    for n in (1, 3):
        assert not is_signalled(wake)
        for _ in range(n):
            wake.signal()
        assert is_signalled(wake)
        assert wake.wait() == n
    wake.close()
    taken = os.dup(0)  # reuses a closed descriptor number
    wake.close()
    os.close(taken)
    with pytest.raises(OSError, match="Bad file descriptor"):
        wake.signal()
    Wake()  # not kept
    assert set(os.listdir("/dev/fd")) == before


def test_only_a_sleeping_process_is_woken(wake: Wake) -> None:
    wake.begin()
    wake.signal()
    assert not is_signalled(wake)
    assert n_looks(wake) > 2
    wake.signal()
    assert is_signalled(wake)


def test_no_signal_is_lost_at_any_time(wake: Wake, clock: Clock) -> None:
    n = n_looks(wake)
    for when in (0, 1, n - 3, n - 2, n - 1):
        wake.begin()
        for _ in range(when):
            wake.pause(LONG_S)
        signals: list[None] = []
        # After the check before this pause, and in the middle of it.
        clock.at_a_look = lambda signals=signals: signals or signals.append(wake.signal())
        sleep_s = wake.pause(LONG_S)
        clock.at_a_look = None
        if not signals:
            wake.signal()
        assert not sleep_s or is_signalled(wake)
    assert sleep_s


def test_a_late_visible_write_costs_only_a_short_sleep(wake: Wake, asleep: memoryview) -> None:
    n_looks(wake)
    wake.begin()
    while not (first_s := wake.pause(LONG_S)):
        pass
    asleep[0] = 0  # as seen by the other process
    wake.signal()
    asleep[0] = 1
    assert not is_signalled(wake)
    assert first_s <= 0.01
    assert [wake.pause(LONG_S), wake.pause(0.2)] == [LONG_S, 0.2]


def test_polling_stops_while_another_program_uses_the_core(wake: Wake, clock: Clock) -> None:
    assert n_looks(wake) > 400
    clock.taken_s = 0.003
    assert n_looks(wake) == 3
    for _ in range(3):
        assert n_looks(wake) == 2  # one, and one after announcing its sleep
        clock.now_s += 0.04
    clock.now_s, clock.taken_s = clock.now_s + 0.05, 0.0
    assert n_looks(wake) > 400
