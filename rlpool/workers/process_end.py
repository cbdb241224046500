"""How worker processes end: they are asked to close, then terminated, then killed.

A worker also ends with its caller, whatever either is doing: a pair of sockets carries nothing, and
the kernel kills the worker's process group when either end is closed, even while an environment
holds the GIL. A thread does so where a process that the caller forked keeps the caller's end open.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from rlpool.machine.platform import kill_group, kill_when_closed, stat_fields
from rlpool.workers.wire import CallerPipe, Close

CLOSE_S = 1.5
"""How long workers may take to close their environments before they are terminated."""

TERMINATE_S = 0.5
"""How long they may then take to end before they are killed. So nothing is left three seconds after
Ctrl-C."""

_READ_EVERY_S = 0.01
"""How often to read pipes meanwhile."""

_REAP_S = 1.0
"""How long a process that is ending may take to be gone."""


def end_all(ends: Sequence[tuple[CallerPipe, SpawnProcess]], read: Callable[[], None]) -> None:
    """End workers and what their environments started.

    Args:
        ends: For each worker that has not been reaped, the caller's end of its pipe and its
            process.
        read: Reads all pipes, so that no worker waits until its messages are read.
    """
    try:
        for pipe, _ in ends:
            pipe.finish(Close())
        steps: tuple[tuple[Callable[[SpawnProcess], Any], float], ...] = (
            (SpawnProcess.is_alive, CLOSE_S),
            (SpawnProcess.terminate, TERMINATE_S),
            (SpawnProcess.kill, _REAP_S),
        )
        for end, patience_s in steps:
            late = [process for _, process in ends if process.is_alive()]
            for process in late:
                end(process)
            deadline_s = time.monotonic() + patience_s
            while late and time.monotonic() < deadline_s:
                wait([process.sentinel for process in late], _READ_EVERY_S)
                read()
                late = [process for process in late if process.is_alive()]
    except ValueError:
        pass  # closed: a signal's handler has done this meanwhile
    except BaseException:
        # Interrupted while waiting, by a second Ctrl-C: there may be no other chance to end them.
        for _, process in ends:
            process.kill()
            process.join(_REAP_S)
        raise
    finally:
        read()
        for pipe, process in ends:
            pipe.close()
            with suppress(ValueError):
                _end_group_of(process)
    for _, process in ends:
        with suppress(ValueError):  # the kernel is not done with it, although killed
            process.close()  # frees its descriptors


def reap(process: SpawnProcess) -> None:
    """Wait for a process whose pipe is at its end, and end what its environments started."""
    process.join(_REAP_S)
    if process.is_alive():
        process.kill()
        process.join(_REAP_S)
    _end_group_of(process)


def _end_group_of(process: SpawnProcess) -> None:
    # A number is not used again while a group of that number lives. If another process has it now,
    # nothing of the worker's group is left.
    if process.pid is None or stat_fields(process.pid):
        return
    with suppress(OSError):  # mostly there is nothing
        kill_group(process.pid)
    # The first process of a container inherits them, and nobody else would reap them.
    deadline_s = time.monotonic() + _REAP_S
    with suppress(ChildProcessError):
        while os.waitpid(-process.pid, os.WNOHANG)[0] or time.monotonic() < deadline_s:
            time.sleep(0.001)


def signal_name(exitcode: int | None) -> str | None:
    """Name of the signal that ended a process, if one did."""
    if exitcode is None or exitcode >= 0:
        return None
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return f"signal {-exitcode}"


_PARENT_CHECK_S = 1.0
"""How often a worker checks that its parent is still the same."""


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
    kill_when_closed(worker.life_line, -os.getpgrp())

    def watch() -> None:
        while not wait([parent.sentinel], timeout=_PARENT_CHECK_S):
            if os.getppid() != parent.pid:
                break
        kill_group(0)

    threading.Thread(target=watch, name="rlpool-parent-watch", daemon=True).start()
