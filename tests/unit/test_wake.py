"""Signals are not lost, and descriptors are given back."""

from __future__ import annotations

import os
import select

import pytest

from rlpool.workers.wake import Wake


def test_a_signal_ends_the_wait_until_the_wake_is_closed() -> None:
    before = set(os.listdir("/dev/fd"))
    wake = Wake()
    for n in (1, 3):
        assert not select.select([wake.fd], [], [], 0)[0]
        for _ in range(n):
            wake.signal()
        assert select.select([wake.fd], [], [], 0)[0]
        assert wake.wait() == n
    wake.close()
    assert set(os.listdir("/dev/fd")) == before
    taken = os.dup(0)  # takes a number that was closed
    wake.close()
    os.close(taken)
    with pytest.raises(OSError, match="Bad file descriptor"):
        wake.signal()
    Wake()  # nobody keeps it
    assert set(os.listdir("/dev/fd")) == before
