"""What every worker process runs: it creates what it is told to, then carries out messages."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rlpool.errors import Where, WorkerError
from rlpool.machine.interrupts import ctrl_c
from rlpool.memory.sharing import Shared
from rlpool.memory.storage import Memory
from rlpool.observe.control import WorkerRecord
from rlpool.record.failures import worker_error
from rlpool.workers.recycling import Recycling
from rlpool.workers.speedups import install_fast_checks
from rlpool.workers.wire import Close, Failed, Message, Ready, Retiring
from rlpool.workers.worker_process import Place, settle_in


class Server(ABC):
    """Carries out the caller's messages, in a worker process or in the caller's own.

    Args:
        place: Which worker it is.
        send: Sends a message to the caller.
        control: The worker's part of the shared record.
    """

    def __init__(
        self, place: Place, send: Callable[[Message], None], control: WorkerRecord
    ) -> None:
        self._place = place
        self._here = Where(worker=place.worker)
        self._send = send
        self._control = control
        self._recycling = Recycling(place.policy)
        self._closers: list[Callable[[], Any]] = []  # of what was created

    @abstractmethod
    def receive(self) -> tuple[Message, Memory | None]:
        """Wait for the next message."""

    @abstractmethod
    def create(self, setup: Any, memory: Memory | None) -> Any:
        """Create what the first message says; returns what the caller wants to know of it.

        Raises:
            WorkerError: If that fails.
        """

    @abstractmethod
    def serve(self) -> None:
        """Carry out messages until told to end."""

    def start(self) -> bool:
        """Create what the first message says and report; False if this worker is to end now."""
        setup, memory = self.receive()
        if isinstance(setup, Close):
            return False
        try:
            report = self.create(setup, memory)
        except WorkerError as error:
            self.report_failure(error)
            return False
        self._send(Ready(report))
        return True

    def fail(self, error: Exception) -> None:
        """Tell the caller that this worker ends by an error of its own."""
        self.report_failure(worker_error(error, self._here))

    def report_failure(self, error: WorkerError, command: int | None = None) -> None:
        """Report a failure, of a command or of the worker as a whole."""
        self._send(Failed(error, command))

    def retire(self) -> None:
        """Tell the caller that this worker has run long enough, and ends."""
        self._send(Retiring(str(self._recycling)))

    def close(self) -> None:
        """Close what was created, whatever it raises: nobody can act on it any more."""
        while self._closers:
            try:
                self._closers[0]()
            except ctrl_c():
                raise
            except BaseException:
                self._closers.pop(0)
            else:
                self._closers.pop(0)


def run(
    make_server: Callable[[WorkerRecord], Server], shared: Shared, place: Place, control_fd: int
) -> None:
    """Run a worker process until it is told to close or its parent is gone.

    Args:
        make_server: Makes what it runs, given the worker's part of the shared record.
        shared: What the pickles of its set-up refer to.
        place: Which worker it is.
        control_fd: Descriptor of the shared record; closed here.
    """
    server = make_server(settle_in(place, control_fd))
    install_fast_checks()
    try:
        with shared.being_read():
            is_ready = server.start()
        if is_ready:
            # Modules, environments and agent stay: the garbage collector can skip them.
            gc.freeze()
            server.serve()
    except (EOFError, ConnectionError):
        pass  # the caller is gone or has closed its end: there is nobody left to tell
    except Exception as error:  # such as no descriptor left, or no memory to map a block
        with suppress(OSError):
            server.fail(error)
    finally:
        server.close()
