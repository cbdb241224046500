"""What a ``FaultyEnv`` does to its process."""

from __future__ import annotations

import faulthandler
import os
import signal

import psutil
import pytest
from process.watching import wait_until

from rlpool.testing import FaultyEnv
from rlpool.testing.faults import EXIT_CODE

pytestmark = pytest.mark.timeout(120)


def strike(kind: str) -> None:
    env = FaultyEnv(kind, at_step=1)
    env.reset()
    env.step(0)
    env.step(0)


def forked(kind: str) -> int:
    """A process in which it strikes."""
    pid = os.fork()
    if not pid:
        try:
            faulthandler.disable()
            strike(kind)
        finally:
            os._exit(99)
    return pid


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # for its os.fork()
def test_each_kind_does_to_its_process_what_it_says() -> None:
    ends = {"exit": EXIT_CODE, "sigkill": -signal.SIGKILL, "segfault": -signal.SIGSEGV}
    for kind, code in ends.items():
        assert os.waitstatus_to_exitcode(os.waitpid(forked(kind), 0)[1]) == code, kind
    processes = {kind: psutil.Process(forked(kind)) for kind in ("stop", "hang", "hang_gil")}
    try:
        wait_until(lambda: processes["stop"].status() == psutil.STATUS_STOPPED)
        wait_until(lambda: processes["hang"].status() == psutil.STATUS_SLEEPING)
        busy = processes["hang_gil"]
        wait_until(lambda: busy.cpu_times().user > 0.1)
        assert busy.status() == psutil.STATUS_RUNNING
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
