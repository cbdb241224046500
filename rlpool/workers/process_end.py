"""The end of worker processes: they are asked to close, then terminated, then killed.

A worker also ends with its caller, whatever either is doing: the kernel kills the worker's process
group when either end of an otherwise unused pair of sockets is closed, even while an environment
holds the GIL. If a process forked by the caller keeps the caller's end open, a thread does it.
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
"""Time for workers to close their environments before they are terminated."""

TERMINATE_S = 0.5
"""Time for them to end before they are killed. Together, nothing is left three seconds after
Ctrl-C."""

_READ_EVERY_S = 0.01
"""How often to read pipes in the meantime."""

_REAP_S = 1.0
"""Time for an ending process to be gone."""


def end_all(ends: Sequence[tuple[CallerPipe, SpawnProcess]], read: Callable[[], None]) -> None:
    """End workers and the processes that their environments started.

    Args:
        ends: For each worker that was not reaped, the caller's end of its pipe and its process.
        read: Reads all pipes, so that no worker waits for its messages to be read.
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
        pass  # already closed, by a signal handler
    except BaseException:
        # Interrupted by a second Ctrl-C while waiting: there may be no other chance to end them.
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
        with suppress(ValueError):  # killed, but not gone yet
            process.close()  # frees its descriptors


def reap(process: SpawnProcess) -> None:
    """Wait for a process whose pipe is at its end; end the processes its environments started."""
    process.join(_REAP_S)
    if process.is_alive():
        process.kill()
        process.join(_REAP_S)
    _end_group_of(process)


def _end_group_of(process: SpawnProcess) -> None:
    # A process number is not reused while a process group of that number exists. If another process
    # has it now, the worker's group is gone.
    if process.pid is None or stat_fields(process.pid):
        return
    with suppress(OSError):  # usually the group is empty
        kill_group(process.pid)
    # The first process of a container inherits these children, and must reap them itself.
    deadline_s = time.monotonic() + _REAP_S
    with suppress(ChildProcessError):
        while os.waitpid(-process.pid, os.WNOHANG)[0] or time.monotonic() < deadline_s:
            time.sleep(0.001)


def signal_name(exitcode: int | None) -> str | None:
    """Return the name of the signal that ended a process; ``None`` if it ended otherwise."""
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
    # Held by this process alone: processes that environments start must not keep it open.
    os.set_inheritable(life_line.fileno(), False)
    os.register_at_fork(after_in_child=life_line.close)
    kill_when_closed(worker.life_line, -os.getpgrp())

    def watch() -> None:
        while not wait([parent.sentinel], timeout=_PARENT_CHECK_S):
            if os.getppid() != parent.pid:
                break
        kill_group(0)

    threading.Thread(target=watch, name="rlpool-parent-watch", daemon=True).start()
