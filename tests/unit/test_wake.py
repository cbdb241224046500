"""Signals are not lost, and descriptors are given back."""

from __future__ import annotations

import os
import select

import pytest

from rlpool.workers.wake import Wake


@pytest.fixture(params=["eventfd", "pipe"])
def wake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Wake:
    if request.param == "pipe":
        monkeypatch.delattr(os, "eventfd")
    wake = Wake()
    assert wake._is_eventfd == (request.param == "eventfd")
    return wake


def is_ready(wake: Wake) -> bool:
    return bool(select.select([wake.fd], [], [], 0)[0])


def test_a_signal_ends_the_wait_and_is_taken(wake: Wake) -> None:
    assert not is_ready(wake)
    for n in (1, 3):
        for _ in range(n):
            wake.signal()
        assert is_ready(wake)
        assert wake.wait() == n
        assert not is_ready(wake)


def test_descriptors_are_closed_once(wake: Wake) -> None:
    fds = {wake.fd, wake._write_fd}
    wake.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    before = os.dup(0)  # takes a number that was closed
    wake.close()
    os.close(before)
    with pytest.raises(OSError, match="Bad file descriptor"):
        wake.signal()


def test_a_forgotten_wake_closes_its_descriptors(wake: Wake) -> None:
    other = Wake()
    fd = other.fd
    del other
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
