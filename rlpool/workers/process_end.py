"""How worker processes end: they are asked to close, then terminated, then killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.context import SpawnProcess
from typing import Any

from rlpool.workers.wire import CallerPipe, Close

CLOSE_S = 1.5
"""How long workers may take to close their environments before they are terminated."""

TERMINATE_S = 0.5
"""How long they may then take to end before they are killed. So nothing is left three seconds after
Ctrl-C."""

_REAP_S = 1.0
"""How long a process that is ending may take to be gone."""


def end_all(ends: Sequence[tuple[CallerPipe, SpawnProcess]]) -> None:
    """End workers and what their environments started.

    Args:
        ends: For each worker that has not been reaped, the caller's end of its pipe and its
            process.
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
            for process in late:
                process.join(max(0.0, deadline_s - time.monotonic()))
    except ValueError:
        pass  # closed: a signal's handler has done this meanwhile
    except BaseException:
        # Interrupted while waiting, by a second Ctrl-C: there may be no other chance to end them.
        for _, process in ends:
            process.kill()
            process.join(_REAP_S)
        raise
    finally:
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
    if process.pid is None or os.path.exists(f"/proc/{process.pid}"):
        return
    with suppress(OSError):  # mostly there is nothing
        os.killpg(process.pid, signal.SIGKILL)
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
