"""Processes that this one has started, and those that live as long as it does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil

_NAMES = ("multiprocessing.resource_tracker", "rlpool-template", "rlpool.workers.template")


def stays(process: psutil.Process) -> bool:
    """Whether a child is the tracker or fork server of ``multiprocessing``, or the template."""
    own_fork_server: Any = forkserver._forkserver
    if process.pid == own_fork_server._forkserver_pid:  # its forks have the same command line
        return True
    try:
        if process.name().startswith("rlpool-worker"):  # an emulator shows the old command line
            return False
        return any(name in part for part in process.cmdline() for name in _NAMES)
    except psutil.Error:
        return False


def started() -> set[psutil.Process]:
    """Return the descendants of this process.

    psutil would scan every process of the machine, which takes milliseconds, twice per test.
    """
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():  # a kernel option
        return set(psutil.Process().children(recursive=True))
    found = set()
    for pid in _started_by(os.getpid()):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.add(psutil.Process(pid))
    return found


def _started_by(pid: int) -> Iterator[int]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                yield child
                yield from _started_by(child)
