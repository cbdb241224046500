"""Environments that start processes of their own, as simulators do."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from rlpool import GymEnv, ParallelEnvManager

from support.envs import CountingEnv

WAYS = ("popen", "grandchild", "with_descriptors")


class ParentEnv(CountingEnv):
    """A ``CountingEnv`` that starts a process and never ends it, or does so in ``close``.

    Args:
        notes: Directory in which every process that is started leaves a file named by its id.
        way: How it is started, one of ``WAYS``.
        ends_it: Whether ``close`` ends it, which takes a moment and is noted.
    """

    def __init__(self, notes: str, way: str = "popen", ends_it: bool = False) -> None:
        super().__init__()
        self._notes, self._ends_it = Path(notes), ends_it
        if way == "with_descriptors":
            self._child = subprocess.Popen(["sleep", "1000"], close_fds=False)
            self._note(self._child.pid)
        elif way == "grandchild":
            # The shell ends at once: what it leaves in the background has no parent any more.
            command = ["sh", "-c", "sleep 1000 </dev/null >/dev/null 2>&1 & echo $!"]
            self._note(int(subprocess.run(command, capture_output=True, check=True).stdout))
        else:
            source = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); "
            source += "print('up', flush=True); time.sleep(1000)"
            self._child = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
            self._child.stdout.readline()
            self._note(self._child.pid)

    def _note(self, pid: int | None) -> None:
        (self._notes / str(pid)).touch()

    def close(self) -> None:
        if self._ends_it:
            self._child.terminate()
            code = self._child.wait()
            (self._notes / f"{self._child.pid}").write_text(str(code))


def create_env(seed: int, n_lanes: int = 1, **arguments: Any) -> GymEnv:
    return GymEnv([ParentEnv(**arguments) for _ in range(n_lanes)], seed)


def open_manager(start_method: str = "auto", **arguments: Any) -> ParallelEnvManager:
    env_fns = [partial(ParentEnv, **arguments)] * 2
    return ParallelEnvManager(env_fns, seed=1, start_method=start_method)
