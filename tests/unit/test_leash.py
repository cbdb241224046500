"""A process that is tied ends with whoever holds the leash, one that let go does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlpool.workers import leash
from rlpool.workers.leash import Leash, LeashEnd

WAITS = "import sys; print('there', flush=True); sys.stdin.read()"

pytestmark = pytest.mark.skipif(not leash.CAN_KILL, reason="needs a kernel that can do it")


def start(end: LeashEnd, source: str = WAITS) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[end._fd],
    )
    end.tie(process.pid)
    assert process.stdout is not None
    assert process.stdout.readline() == b"there\n"
    return process


def finish(process: subprocess.Popen[bytes]) -> int:
    process.communicate(timeout=30)
    return process.returncode


def test_all_that_are_tied_end_when_it_is_closed() -> None:
    cord = Leash()
    ends = [cord.end(), cord.end()]
    processes = [start(end) for end in ends]
    for end in ends:
        end.close()
    assert [process.poll() for process in processes] == [None, None]
    cord.close()
    cord.close()
    for process in processes:
        assert process.wait(30) == -signal.SIGKILL
        finish(process)


def test_who_has_let_go_lives_on() -> None:
    cord = Leash()
    end = cord.end()
    root = str(Path(leash.__file__).parents[2])
    source = f"""
import sys
sys.path.insert(0, {root!r})
from rlpool.workers import leash
leash._held.append({end._fd})
leash.let_go()
{WAITS}
"""
    process = start(end, source)
    end.close()
    cord.close()
    assert finish(process) == 0


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
