"""The main function of a worker process."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch

from rlpool.batch.claims import ClaimLock
from rlpool.batch.collector import Collector
from rlpool.generators import seed_generators
from rlpool.memory.storage import Memory
from rlpool.seeding import worker_seed
from rlpool.workers.fast_checks import install_fast_checks
from rlpool.workers.fast_seeding import FastSeeding
from rlpool.workers.leash import kill_when_closed, let_go
from rlpool.workers.messages import Message, Pipe, Setup
from rlpool.workers.process_title import set_title

CONTROL_COLUMNS = 2
"""Shared int64 numbers per worker: steps done (1 when it begins), lane in use."""

_PARENT_CHECK_S = 1.0
"""How often a worker looks whether its parent changed, in case the pipe's other end lives on in
some process that the parent forked."""


class PipeLink:
    """A worker's end of its pipe.

    Args:
        pipe: The pipe.
    """

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def send(self, message: Message) -> None:
        """Send a message."""
        self._pipe.send(message)

    def receive(self) -> tuple[Message, Memory | None]:
        """Wait for a message."""
        return self._pipe.receive()

    def poll(self) -> bool:
        """Whether a message is there."""
        return self._pipe.poll()


def main(setup: Setup, connection: Connection, control_fd: Any) -> None:
    """Run a worker until it is told to close or its parent is gone.

    Args:
        setup: What to create.
        connection: The worker's end of its pipe.
        control_fd: Descriptor of the memory for progress, duplicated for this process.
    """
    settle_in(setup.worker, setup.root)
    fd = control_fd.detach()
    # A second descriptor stays open for the lock, which lives on the file behind it.
    lock = ClaimLock(os.dup(fd) if setup.n_workers > 1 else None)
    mine = control_row(fd, setup.worker, setup.n_workers)
    link = PipeLink(Pipe(connection))
    fast_seeding = FastSeeding()
    fast_seeding.install()
    install_fast_checks()
    collector = Collector(setup, link, lock, mine[1:], mine[:1], fast_seeding.announce)
    try:
        if collector.start():
            # Modules, environments and agent stay: the garbage collector need not look at them
            # again and again.
            gc.freeze()
            collector.serve()
    except (EOFError, OSError):
        # The caller is gone or has closed its end: there is nobody left to tell.
        pass
    finally:
        collector.close()


def settle_in(worker: int, root: int) -> None:
    """Do what every worker process begins with: signals, the parent's end, threads, seeds."""
    set_title(f"rlpool-worker-{worker}")
    # Ctrl-C goes to the whole foreground group; the caller decides what becomes of its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getpgrp() != os.getpid():
        # What environments start belongs to this worker's group, and is ended with it.
        os.setpgid(0, 0)
    _end_with_parent()
    torch.set_num_threads(1)
    seed = worker_seed(root, worker)
    seed_generators(seed)
    if _has_other_devices():
        torch.manual_seed(seed)  # theirs, too: costs a worker 1 MB and 2 ms, if only to note it


def _has_other_devices() -> bool:
    """Whether this torch was built for anything but the CPU; asking starts no device."""
    accelerator: Any = getattr(torch, "accelerator", None)  # which there is since torch 2.6
    return accelerator is None or accelerator.current_accelerator() is not None


def control_row(fd: int, worker: int, n_workers: int) -> memoryview:
    """Map the memory for progress; returns a worker's row of it. Closes the descriptor."""
    n_bytes = n_workers * CONTROL_COLUMNS * np.dtype(np.int64).itemsize
    control = Memory.attach(fd, n_bytes).root().view(np.int64).reshape(-1, CONTROL_COLUMNS)
    mine = memoryview(control[worker])
    mine[0] = 1  # from here on no progress means a hang
    return mine


def _end_with_parent() -> None:
    """End this process and its group when its parent ends, even while an environment is running."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    kill_when_closed(parent.sentinel, -os.getpgrp())
    let_go()

    def watch() -> None:
        while not wait([parent.sentinel], timeout=_PARENT_CHECK_S):
            if os.getppid() != parent.pid:
                break
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="rlpool-parent-watch", daemon=True).start()
