"""Ends a worker with its caller, whatever either of them is doing.

The kernel kills the worker when the caller's end of a pipe is closed, even while an environment
keeps Python's lock. A thread does so where a process that the caller forked keeps that end open.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait

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
    """End this worker and its process group when its parent ends."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    kill_when_closed(parent.sentinel, -os.getpgrp())

    def watch() -> None:
        while not wait([parent.sentinel], timeout=_PARENT_CHECK_S):
            if os.getppid() != parent.pid:
                break
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="rlpool-parent-watch", daemon=True).start()
