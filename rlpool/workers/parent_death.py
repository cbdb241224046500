"""Ends a worker with its caller, and what it started with it, whatever any of them is doing.

The kernel kills the worker when the caller's end of a pipe is closed, even while an environment
keeps Python's lock. A thread does so where a process that the caller forked keeps that end open.
Likewise the kernel kills the worker's process group when the worker's end of a pipe is closed.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection, wait
from typing import Any

_PARENT_CHECK_S = 1.0
"""How often a worker checks that its parent is still the same."""


def kill_when_closed(fd: int, pid: int) -> None:
    """Let the kernel kill a process when the other end of a pipe is closed.

    Args:
        fd: One end of a pipe that carries no data from now on.
        pid: The process, whoever has the descriptor; a negative number means a process group.
    """
    fcntl.fcntl(fd, fcntl.F_SETOWN, pid)
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | fcntl.FASYNC)


def end_with_parent() -> None:
    """End this worker and its process group when its parent ends, and the group with the worker."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    worker: Any = multiprocessing.current_process()
    life_line = Connection(worker.life_line, readable=False)
    # Only this process holds it: what environments start must not keep it open.
    os.set_inheritable(life_line.fileno(), False)
    os.register_at_fork(after_in_child=life_line.close)
    kill_when_closed(parent.sentinel, -os.getpgrp())

    def watch() -> None:
        while not wait([parent.sentinel], timeout=_PARENT_CHECK_S):
            if os.getppid() != parent.pid:
                break
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="rlpool-parent-watch", daemon=True).start()
