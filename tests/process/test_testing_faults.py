"""What a ``FaultyEnv`` does to its process."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest
from process.watching import Script, wait_until

from rlpool.testing.faults import EXIT_CODE

pytestmark = pytest.mark.timeout(120)

# One interpreter for all kinds: each strikes in a fork of it.
FORKS = """
import json, os
import torch  # before the forks, which have it then
from rlpool.testing import FaultyEnv

def strike(kind):
    env = FaultyEnv(kind, at_step=1)
    env.reset()
    env.step(0)
    env.step(0)

pids = {}
for kind in ("exit", "sigkill", "segfault", "hang", "hang_gil", "stop"):
    pid = os.fork()
    if not pid:
        try:
            strike(kind)
        finally:
            os._exit(99)
    pids[kind] = pid
codes = {}
for kind in ("exit", "sigkill", "segfault"):
    codes[kind] = os.waitstatus_to_exitcode(os.waitpid(pids[kind], 0)[1])
    del pids[kind]
print(json.dumps([codes, pids]), flush=True)
for pid in pids.values():
    os.waitpid(pid, 0)
"""


def test_each_kind_does_to_its_process_what_it_says(tmp_path: Path) -> None:
    script = Script(tmp_path / "script", ["-c", FORKS])
    wait_until(lambda: script.stdout.endswith("\n") or script.returncode is not None)
    codes, alive = json.loads(script.stdout)
    assert codes == {
        "exit": EXIT_CODE,
        "sigkill": -signal.SIGKILL,
        "segfault": -signal.SIGSEGV,
    }
    processes = {kind: psutil.Process(pid) for kind, pid in alive.items()}
    try:
        wait_until(lambda: processes["stop"].status() == psutil.STATUS_STOPPED)
        wait_until(lambda: processes["hang"].status() == psutil.STATUS_SLEEPING)
        busy = processes["hang_gil"]
        wait_until(lambda: busy.cpu_times().user > 0.2)
        assert busy.status() == psutil.STATUS_RUNNING
    finally:
        for process in processes.values():
            process.kill()
    wait_until(lambda: script.returncode is not None)
