"""Starts a worker process, which changes nothing of the caller's."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from rlpool.machine.interrupts import InterruptsHeld, blocked_interrupts
from rlpool.workers.child import Place, WorkerMain, run_connected
from rlpool.workers.logs import WorkerLogs
from rlpool.workers.process_start import Inherited
from rlpool.workers.stacks import WorkerStacks
from rlpool.workers.wire import CallerPipe


def launch(
    kind: type[SpawnProcess], run: WorkerMain, place: Place, logs: WorkerLogs, control_fd: int
) -> tuple[CallerPipe, SpawnProcess]:
    """Start a worker process; within ``starting_processes``.

    Args:
        kind: How processes are started.
        run: The main function of the process.
        place: Which worker it is.
        logs: Its end of the log file.
        control_fd: Descriptor of the shared numbers.

    Raises:
        OSError: If the system allows no further process or descriptor.
    """
    here, end = socket.socketpair()
    # The child's end must not stay open here: its death shall be an end of file.
    with Connection(end.detach()) as there:
        try:
            worker = kind(
                target=run_connected,
                args=(logs, WorkerStacks(), run, place, there, Inherited(control_fd)),
                name=f"rlpool-worker-{place.worker}",
                daemon=False,  # environments may start processes of their own
            )
            worker.start()
        except BaseException:
            here.close()
            raise
    return CallerPipe(here), worker


_one_at_a_time = threading.RLock()
"""Starting a process changes what belongs to all threads, and opens what no fork must inherit."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_one_at_a_time.acquire,
        after_in_parent=_one_at_a_time.release,
        after_in_child=_one_at_a_time.release,
    )


@contextmanager
def starting_processes() -> Iterator[None]:
    """What surrounds the start of a process: signal handlers, other threads and forks wait."""
    with (
        InterruptsHeld(),
        _one_at_a_time,
        blocked_interrupts(),
        _start_method_kept(),
        _missing_main_hidden(),
    ):
        yield


@contextmanager
def _start_method_kept() -> Iterator[None]:
    """Leave the caller's choice of a start method open if it was: spawning fixes the default."""
    before: Any = multiprocessing.get_start_method(allow_none=True)  # None, whatever its type
    try:
        yield
    finally:
        if before is None:
            multiprocessing.set_start_method(None, force=True)


@contextmanager
def _missing_main_hidden() -> Iterator[None]:
    """Keep children from importing a main module that is no file, such as ``<stdin>``."""
    main_module = sys.modules["__main__"]
    path = getattr(main_module, "__file__", None)
    if path is None or os.path.exists(path):
        yield
        return
    del main_module.__file__
    try:
        yield
    finally:
        main_module.__file__ = path
