"""The part that all worker processes share: set up, create environments, handle messages."""

from __future__ import annotations

import faulthandler
import functools
import gc
import io
import os
import pickle
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Discrete, MultiDiscrete

from rlpool.data.storage import Memory
from rlpool.errors import Where, WorkerError, WorkerStartupError, described
from rlpool.machine.interrupts import ctrl_c, ignore_ctrl_c
from rlpool.machine.own_state import Settings, seed_generators, use_settings
from rlpool.machine.platform import (
    STACKS_SIGNAL,
    anonymous_file,
    anonymous_files,
    append_only,
    set_title,
)
from rlpool.observe.control import WorkerRecord, worker_record
from rlpool.record.failures import message_and_fix, text_of
from rlpool.seeding import worker_seed
from rlpool.workers.failure_policy import FailurePolicy, Recycling
from rlpool.workers.logs import Levels, PipeHandler, connect
from rlpool.workers.process_end import end_with_parent
from rlpool.workers.sharing import Shared, begin_main_module
from rlpool.workers.template import is_forked
from rlpool.workers.wire import Close, Failed, Message, Pipe, Ready

_STACKS_FILE = "rlpool-stacks"
"""Name of the file among a worker's descriptors."""

_STACKS_S = 1.0
"""Time limit for a worker to write its stacks."""

_STACKS_PAUSE_S = 0.02
"""The stacks are complete once nothing more was written for this long."""


class Place(NamedTuple):
    """A worker's identity and settings.

    Attributes:
        worker: Its number.
        n_workers: Number of workers.
        root: Root of all seeds.
        settings: The caller's torch settings.
        policy: Decides when it is replaced.
    """

    worker: int
    n_workers: int
    root: int
    settings: Settings
    policy: FailurePolicy = FailurePolicy()

    @property
    def seed(self) -> int:
        """Its seed, from ``worker_seed``."""
        return worker_seed(self.root, self.worker)


WorkerMain = Callable[[Place, Pipe, int], None]
"""``(place, pipe, control_fd)``: main function of a worker process."""


def run_connected(
    levels: Levels,
    run: WorkerMain,
    place: Place,
    end: socket.socket,
    control_fd: int,
) -> None:
    """Run a worker process, with its logs connected."""
    _write_stacks_on_signal()
    pipe = Pipe(end)
    connect(PipeHandler(place.worker, pipe), levels)
    try:
        run(place, pipe, control_fd)
    finally:
        if not is_forked():  # unfreezing would copy the memory of the template
            gc.unfreeze()
        _write_open_files()
        # The user's threads may keep this process alive; the caller does not wait for them.
        end.close()


def _write_open_files() -> None:
    """Flush files that environments and agents leave open.

    Most files were closed with their owners. Interpreters that are not finalized would lose the
    buffers of the others, and the garbage collector may close a file before its buffer is written.
    """
    for thing in gc.get_objects():  # except frozen ones, see ``load``
        if issubclass(type(thing), io.IOBase):
            with suppress(Exception):  # closed, or its disk is full
                thing.flush()
    gc.collect()


def _write_stacks_on_signal() -> None:
    """Let ``stacks_of`` inspect this process, even if C code never releases the GIL."""
    fd = anonymous_file(_STACKS_FILE)
    append_only(fd)
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True, chain=False)


def stacks_of(process: SpawnProcess | None) -> str:
    """Return the stacks of a worker's threads; empty if it does not write them in a second."""
    if process is None or not process.is_alive():
        return ""
    try:
        file = next(anonymous_files(process.pid, _STACKS_FILE))
        os.kill(process.pid or 0, STACKS_SIGNAL)
        size, until_s = 0, time.monotonic() + _STACKS_S
        while time.monotonic() < until_s:
            time.sleep(_STACKS_PAUSE_S)
            before, size = size, file.stat().st_size
            if size and size == before:
                break
        return file.read_text(errors="replace")
    except (OSError, StopIteration):  # still starting, or gone
        return ""


def become_worker(place: Place, control_fd: int) -> WorkerRecord:
    """Make this process a worker: signals, the parent's end, threads, seeds.

    Args:
        place: Which worker it is.
        control_fd: Descriptor of the shared record of all workers; closed here.
    """
    set_title(f"rlpool-worker-{place.worker}")
    ignore_ctrl_c()
    if os.getpgrp() != os.getpid():
        # Processes started by environments belong to this worker's group and end with it.
        os.setpgid(0, 0)
    end_with_parent()
    torch.set_num_threads(1)
    seed = place.seed
    seed_generators(seed)
    with suppress(RuntimeError):  # from CPU-only builds of torch 2.6
        if torch.accelerator.current_accelerator() is not None:  # does not start a device
            torch.manual_seed(seed)  # seeds devices too, at 1 MB and 2 ms per worker
    record = worker_record(control_fd, place.n_workers, place.worker)
    record.steps[0] = 1  # from now on, lack of progress means a hang
    return record


def called(where: Where, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a user's function that makes something, such as an environment.

    Args:
        where: Where the worker is.
        name: Name of the function in the error message.
        function: The function.
        *arguments: Its arguments.

    Raises:
        WorkerStartupError: If it raises.
    """
    try:
        return function(*arguments)
    except BaseException as error:
        if isinstance(error, (*ctrl_c(), WorkerStartupError)):
            raise
        message, fix = message_and_fix(name, error)
        text = text_of(error)
        raise WorkerStartupError(message, where=where, fix=fix, traceback_text=text) from error


def load(place: Place, name: str, functions: bytes) -> Any:
    """Load the user's functions in a worker process.

    Args:
        place: Which worker it is.
        name: Name of the functions in the error message.
        functions: Their pickle.

    Raises:
        WorkerStartupError: If that fails.
    """
    loaded = called(Where(worker=place.worker), f"loading {name}", pickle.loads, functions)
    # After loading, because imported modules may have changed settings or seeded generators.
    use_settings(place.settings)
    seed_generators(place.seed)
    # The garbage collector can skip modules; those of the template are frozen already. It has to
    # see environments, and files that they leave open, when the worker ends.
    if not is_forked():
        gc.freeze()
    return loaded


class Server(ABC):
    """Carries out the caller's messages, in a worker process or in the caller's own.

    Args:
        place: Which worker it is.
        link: The connection to the caller.
        control: The worker's part of the shared record.
    """

    def __init__(self, place: Place, link: Pipe, control: WorkerRecord) -> None:
        self._place = place
        self._here = Where(worker=place.worker)
        self._link = link
        self._send = link.send
        self._control = control
        self._recycling = Recycling(place.policy)
        self._closers: list[Callable[[], Any]] = []  # of created environments and agents

    def receive(self) -> tuple[Message, Memory | None]:
        """Wait for the next message."""
        return self._link.receive()

    @abstractmethod
    def create(self, setup: Any, memory: Memory | None) -> Any:
        """Create what the first message describes; returns a report for the caller.

        Raises:
            WorkerError: If that fails.
        """

    @abstractmethod
    def serve(self) -> None:
        """Carry out messages until one says to end."""

    def start(self) -> bool:
        """Handle the first message and report; False if this worker has to end now."""
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

    def report_failure(self, error: WorkerError, command: int | None = None) -> None:
        """Report a failure, of a command or of the worker as a whole."""
        self._send(Failed(error, command))

    def close(self) -> None:
        """Close environments and agent, ignoring errors: the caller is no longer interested."""
        while self._closers:
            try:
                self._closers[0]()
            except ctrl_c():
                raise
            except BaseException:
                pass
            self._closers.pop(0)


def run(
    make_server: Callable[[WorkerRecord], Server], shared: Shared, place: Place, control_fd: int
) -> None:
    """Run a worker process until it receives ``Close`` or its parent is gone.

    Args:
        make_server: Makes the server, given the worker's part of the shared record.
        shared: The objects that the pickles of its set-up refer to.
        place: Which worker it is.
        control_fd: Descriptor of the shared record; closed here.
    """
    server = make_server(become_worker(place, control_fd))
    install_fast_checks()
    begin_main_module()
    try:
        with shared.being_read():
            is_ready = server.start()
        if is_ready:
            server.serve()
    except (EOFError, ConnectionError):
        pass  # the caller is gone or has closed its end: there is nothing left to report to
    except Exception as error:  # no descriptor left, or no memory to map a block, for example
        with suppress(OSError):
            message, text = f"the worker failed with {described(error)}", text_of(error)
            where = Where(worker=place.worker)
            server.report_failure(WorkerError(message, where=where, traceback_text=text))
    finally:
        server.close()
        vars(server).clear()  # frees environments and agent, even if they refer back to the server


_INT64 = np.dtype(np.int64)


def install_fast_checks() -> None:
    """Make Gymnasium's checks of int64 actions cheaper, with the same results.

    Many environments call ``Discrete.contains`` in every step. For an int64 action it spends a
    quarter of a CartPole step on checking that an integer is an integer. Vector environments call
    ``MultiDiscrete.contains``. Both are replaced in worker processes only.
    """
    one: Any = Discrete.contains
    many: Any = MultiDiscrete.contains

    @functools.wraps(one)
    def contains(self: Any, x: Any) -> bool:
        if type(x) is np.int64 and self.dtype is _INT64:
            start = self.start
            return bool(start <= x < start + self.n)
        return bool(one(self, x))

    @functools.wraps(many)
    def contains_all(self: Any, x: Any) -> bool:
        if (
            type(x) is np.ndarray
            and x.dtype is _INT64
            and self.dtype is _INT64
            and x.shape == self.nvec.shape
        ):
            # Numbers below the start wrap around to values above all others.
            places = (x - self.start).view(np.uint64)
            n_valid = np.count_nonzero(places < self.nvec.view(np.uint64))
            return bool(n_valid == x.size)
        return bool(many(self, x))

    Discrete.contains = contains  # type: ignore[method-assign]
    MultiDiscrete.contains = contains_all  # type: ignore[method-assign]
