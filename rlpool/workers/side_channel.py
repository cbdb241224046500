"""What a supervisor knows of its workers beside their messages: their logs and their stacks."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from rlpool.workers.inherited import Inherited
from rlpool.workers.logs import LogReader, send_logs
from rlpool.workers.outbox import Outbox
from rlpool.workers.stacks import (
    Stacks,
    ask,
    printing_signals,
    register_signals,
    register_stacks,
)


class SideChannel:
    """The caller's end of logs and stacks, for all workers of a supervisor, one descriptor.

    Args:
        n_workers: Number of workers.
    """

    def __init__(self, n_workers: int) -> None:
        self._outbox = Outbox(n_workers)
        self.logs = LogReader(self._outbox)

    def of_worker(self, worker: int) -> WorkerSide:
        """What a worker is given when it starts."""
        signals = {number: Inherited(fd) for number, fd in printing_signals.items()}
        return WorkerSide(self._outbox, worker, signals)

    def stacks(self, workers: Sequence[int], processes: Sequence[SpawnProcess]) -> list[Stacks]:
        """What workers are doing, each in its process."""
        return [] if self._outbox.closed else ask(workers, processes, self._outbox)


class WorkerSide:
    """A worker's end; pickled, it is that of the process that was started with it.

    Args:
        outbox: Where to write.
        worker: Number of the worker.
        signals: Signals on which it is to print its stacks, and descriptors to which.
    """

    def __init__(self, outbox: Outbox, worker: int, signals: dict[int, Any]) -> None:
        self._outbox = outbox
        self._worker = worker
        self._signals = signals

    def connect(self) -> None:
        """Let this process tell its logs and stacks."""
        register_signals({number: fd.detach() for number, fd in self._signals.items()})
        self._outbox.announce_stacks(self._worker, register_stacks())
        send_logs(self._outbox, self._worker)


def run_connected(
    side: WorkerSide, run: Any, place: Any, connection: Connection, control_fd: Any
) -> None:
    """The main function of every worker process: ``run``, with its logs and stacks connected.

    Nothing of the user's was made yet when this is called.
    """
    side.connect()
    try:
        run(place, connection, control_fd.detach())
    finally:
        # Threads of the user's may keep this process: the caller shall not wait for them.
        connection.close()
