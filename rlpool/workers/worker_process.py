"""What every worker process begins with."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from rlpool.errors import Where, WorkerStartupError
from rlpool.machine.generators import seed_generators
from rlpool.machine.interrupts import ctrl_c, ignore_ctrl_c
from rlpool.observe.control import WorkerRecord, worker_record
from rlpool.record.failures import text_of, what_and_fix
from rlpool.seeding import worker_seed
from rlpool.workers.failure_policy import FailurePolicy
from rlpool.workers.logs import WorkerLogs
from rlpool.workers.parent_death import end_with_parent
from rlpool.workers.process_title import set_title
from rlpool.workers.stacks import answer_questions


class Place(NamedTuple):
    """Which worker a process is.

    Attributes:
        worker: Its number.
        n_workers: How many there are.
        root: Root of all seeds.
        policy: Says when it is replaced.
        n_before: Workers on other machines whose numbers come first.
    """

    worker: int
    n_workers: int
    root: int
    policy: FailurePolicy = FailurePolicy()
    n_before: int = 0

    @property
    def seed(self) -> int:
        """See ``worker_seed``."""
        return worker_seed(self.root, self.n_before + self.worker)


WorkerMain = Callable[[Place, Connection, int], None]
"""``(place, connection, control_fd)``: what a worker process runs."""


def run_connected(
    logs: WorkerLogs,
    run: WorkerMain,
    place: Place,
    connection: Connection,
    control_fd: Any,
) -> None:
    """The main function of every worker process: ``run``, with its logs and stacks connected."""
    answer_questions()
    logs.connect()
    try:
        run(place, connection, control_fd.detach())
    finally:
        # The user's threads may keep this process alive: the caller does not wait for them.
        connection.close()


def settle_in(place: Place, control_fd: int) -> WorkerRecord:
    """Make this process a worker: signals, the parent's end, threads, seeds.

    Args:
        place: Which worker it is.
        control_fd: Descriptor of the shared record of all workers; closed here.
    """
    set_title(f"rlpool-worker-{place.worker}")
    ignore_ctrl_c()
    if os.getpgrp() != os.getpid():
        # What environments start belongs to this worker's group, and is ended with it.
        os.setpgid(0, 0)
    end_with_parent()
    torch.set_num_threads(1)
    seed = place.seed
    seed_generators(seed)
    if _has_other_devices():
        torch.manual_seed(seed)  # also theirs, which costs a worker 1 MB and 2 ms
    record = worker_record(control_fd, place.n_workers, place.worker)
    record.steps[0] = 1  # from here on no progress means a hang
    return record


def called(where: Where, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a user's function that makes something, such as an environment.

    Args:
        where: Where the worker is.
        what: What the error message calls the function.
        function: The function.
        *arguments: Its arguments.

    Raises:
        WorkerStartupError: If it raises.
    """
    try:
        return function(*arguments)
    except ctrl_c():
        raise
    except WorkerStartupError:
        raise
    except BaseException as error:
        told, fix = what_and_fix(what, error)
        text = text_of(error)
        raise WorkerStartupError(told, where=where, fix=fix, traceback_text=text) from error


def _has_other_devices() -> bool:
    """Whether this torch was built for anything but the CPU; asking starts no device."""
    try:
        return torch.accelerator.current_accelerator() is not None
    except RuntimeError:  # what torch 2.6 raises for none
        return False
