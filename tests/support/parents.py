"""Environments that start their own processes, as simulators do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from rlpool import GymEnv

from support.envs import CountingEnv

N_STARTED = 3
"""Processes that each environment starts."""

CHILD = """
import signal, sys, time
signal.signal(15, lambda *_: sys.exit(7))
print("up", flush=True)
time.sleep(1000)
"""
GRANDCHILD = "sleep 1000 </dev/null >/dev/null 2>&1 & echo $!"
"""The shell ends at once: what it leaves in the background has no parent any more."""


class ParentEnv(CountingEnv):
    """A ``CountingEnv`` that starts processes and ends at most one of them, in ``close``.

    Args:
        notes: Directory in which every started process leaves a file named by its id.
        ends_it: Whether ``close`` ends one, which takes a moment and leaves a file.
    """

    def __init__(self, notes: str, ends_it: bool = False) -> None:
        super().__init__()
        self._notes, self._ends_it = Path(notes), ends_it
        self._note(subprocess.Popen(["sleep", "1000"], close_fds=False).pid)
        self._note(int(subprocess.check_output(["sh", "-c", GRANDCHILD])))
        self._child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE)
        self._child.stdout.readline()
        self._note(self._child.pid)

    def _note(self, pid: int) -> None:
        (self._notes / str(pid)).touch()

    def close(self) -> None:
        if self._ends_it:
            self._child.terminate()
            code = self._child.wait()
            (self._notes / f"{self._child.pid}").write_text(str(code))


def create_env(seed: int, **arguments: Any) -> GymEnv:
    return GymEnv([ParentEnv(**arguments)], seed)
