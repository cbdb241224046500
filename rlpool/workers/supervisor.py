"""Worker processes: start, watch, replace, end."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing import process
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize, is_exiting
from typing import Any, Protocol

import numpy as np

from rlpool.batch.claims import ClaimLock
from rlpool.batch.collector import Deliver
from rlpool.errors import UsageError, WorkerStartupError
from rlpool.machine.interrupts import InterruptsHeld, blocked_interrupts
from rlpool.machine.limits import process_activity
from rlpool.machine.main_guard import missing_guard, refuse_missing_guard
from rlpool.memory.storage import Array, Memory
from rlpool.workers.caller_pipe import CallerPipe
from rlpool.workers.child import CONTROL_COLUMNS, main
from rlpool.workers.inherited import Inherited
from rlpool.workers.leash import Leash
from rlpool.workers.logs import LogReader
from rlpool.workers.messages import Close, Message
from rlpool.workers.shipment import Shipment
from rlpool.workers.side_channel import SideChannel, run_connected
from rlpool.workers.stacks import Stacks
from rlpool.workers.warm_start import bury, process_class

_GUARD_EXIT_CODE = 76
"""Exit code by which a child says that it would have started children of its own on import."""

_CLOSE_S = 1.5
"""How long workers may take to close their environments before they are terminated."""

LEAVE_S = 3.0
"""How long one that is replaced may take to do so, or to end otherwise, before it is killed."""

_LOOKS_AT_LOCK = 4
"""The lock of claims is held for microseconds; who has it in so many looks does not go on."""

_TERMINATE_S = 0.5
"""How long they may then take to end before they are killed. With that nothing is left three
seconds after Ctrl-C."""

_REAP_S = 1.0
"""How long a process that is ending may take to be gone."""


class WorkerSetup(Protocol):
    """What a worker is given when it starts."""

    @property
    def worker(self) -> int:
        """The worker's number."""

    @property
    def functions(self) -> Any:
        """What makes its environments, a ``Shipment`` if it may be large."""


WorkerMain = Callable[[Any, Connection, Any], None]
"""``(setup, connection, control_fd)``: what a worker process runs."""


class Died:
    """A worker process ended.

    Attributes:
        exitcode: Its exit code, negative for a signal.
    """

    def __init__(self, exitcode: int | None) -> None:
        self.exitcode = exitcode

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that ended it, if one did."""
        if self.exitcode is None or self.exitcode >= 0:
            return None
        try:
            return signal.Signals(-self.exitcode).name
        except ValueError:
            return f"signal {-self.exitcode}"


class Supervisor:
    """Worker processes and the caller's ends of their pipes.

    Each worker costs the caller three descriptors: its pipe, and two that multiprocessing keeps
    to notice its end and to let it notice the caller's. One more is that of the control memory
    and one that of the file for their logs, which successors of dead workers get as well.

    Args:
        setups: What each worker creates.
        deliver: Takes the workers' messages, and ``Died`` when one ended.
        run: The main function of a worker process.
        start_method: How processes are started, one of ``START_METHODS``.

    Attributes:
        is_aborted: Whether ``abort`` was called.
        claim_lock: The lock that the workers share, on this side.
    """

    def __init__(
        self,
        setups: Sequence[WorkerSetup],
        deliver: Deliver,
        run: WorkerMain = main,
        start_method: str = "auto",
    ) -> None:
        self.n_workers = len(setups)
        self.is_aborted = False
        self._setups = setups
        self._deliver = deliver
        self._run = run
        self._start_method = start_method
        self._poller: select.poll | None = None
        self._leash: Leash | None = None  # while workers are starting
        self._tied: set[int] = set()  # those that may not have let go of it
        self._pipes: list[CallerPipe | None] = []
        self._processes: list[SpawnProcess] = []
        n_bytes = len(setups) * CONTROL_COLUMNS * np.dtype(np.int64).itemsize
        self._control = Memory.shared(n_bytes, "rlpool-control")
        self.claim_lock = ClaimLock(self._control.fd)
        self._numbers: Array = self._control.root().view(np.int64).reshape(len(setups), -1)
        self._side = SideChannel(len(setups))
        self.deliver_logs = self._side.logs.deliver
        # Runs once: on close(), when this object is collected, or before multiprocessing waits for
        # its children at exit; never in a process that was forked from this one.
        self._end = Finalize(
            self, _end_all, (self._pipes, self._processes, self._side.logs), exitpriority=10
        )

    def allocate(self, n_bytes: int) -> Memory:
        """Memory that the workers can map."""
        return Memory.shared(n_bytes)

    def start(self) -> None:
        """Start all processes; returns before they are ready.

        Raises:
            UsageError: If the script surely lacks its ``__main__`` guard.
            WorkerStartupError: If the system allows no further process or descriptor.
        """
        refuse_missing_guard()
        try:
            self._process_class = process_class(self._start_method)
            for setup in self._setups:
                with _spawning():
                    self._start_one(setup)
        except BaseException:
            self.close()
            raise

    def _start_one(self, setup: WorkerSetup) -> None:
        try:
            pipe, worker = self._spawned(setup)
        except OSError as error:
            what = f"{len(self._processes)} of {self.n_workers} workers could be started: {error}"
            fix = "python -m rlpool doctor tells which limit that may be"
            raise WorkerStartupError(what, fix=fix) from error
        self._pipes.append(pipe)
        self._processes.append(worker)

    def replace(self, worker: int) -> None:
        """Start the successor of a worker that died; returns before it is ready.

        Raises:
            OSError: If the system allows no further process or descriptor.
        """
        self._process_class = process_class(self._start_method)
        self._numbers[worker] = 0
        with _spawning():
            pipe, process = self._spawned(self._setups[worker])
            late, self._processes[worker] = self._processes[worker], process
            self._pipes[worker] = pipe
            self._poller = None  # it does not watch the new descriptors
        with suppress(ValueError):  # not ended although killed: the kernel is not done with it
            late.close()

    def _spawned(self, setup: WorkerSetup) -> tuple[CallerPipe, SpawnProcess]:
        self._leash = self._leash or Leash()
        with closing(self._leash.end()) as leash_end:
            here, end = socket.socketpair()
            # The child's end must not stay open here: its death shall be an end of file.
            with Connection(end.detach()) as there:
                try:
                    worker = self._process_class(
                        target=run_connected,
                        args=(
                            leash_end,
                            self._side.of_worker(setup.worker),
                            self._run,
                            setup,
                            there,
                            Inherited(self._control.fd),
                        ),
                        name=f"rlpool-worker-{setup.worker}",
                        daemon=False,  # environments may start processes of their own
                    )
                    worker.start()
                except BaseException:
                    here.close()
                    raise
            leash_end.tie(worker.pid)
        self._tied.add(setup.worker)
        return CallerPipe(here), worker

    @property
    def processes(self) -> list[SpawnProcess]:
        """The processes, until ``close``."""
        return list(self._processes)

    def send(self, worker: int, message: Message, memory: Memory | None = None) -> None:
        """Send a message without waiting for the worker, by what ``poll`` does if need be.

        To a worker that is gone it is lost, which ``poll`` will tell.
        """
        pipe = self._pipes[worker]
        if pipe is not None:
            with InterruptsHeld(), suppress(ConnectionError):
                pipe.send(message, memory)
            if pipe.events & select.POLLOUT:
                self._poller = None  # it does not watch for that

    def poll(self, timeout_s: float | None) -> None:
        """Deliver what has arrived, logs included, waiting for a message if there is none.

        Args:
            timeout_s: Longest wait in seconds, ``None`` for no limit.
        """
        self._poll_pipes(timeout_s)
        self.deliver_logs()

    def _poll_pipes(self, timeout_s: float | None) -> None:
        poller, number_of = self._new_poller()
        if not number_of:
            return
        events = dict(poller.poll(None if timeout_s is None else timeout_s * 1000))
        self._rest_at_exit()
        ready = {number_of[fd] for fd, event in events.items() if event != select.POLLOUT}
        # A process that a dead worker had forked may keep its descriptors open.
        ready |= {n for n in number_of.values() if not self._processes[n].is_alive()}
        if not ready and not events:
            return
        with InterruptsHeld():
            try:
                for fd, event in events.items():
                    if event & select.POLLOUT:
                        self._flush(number_of[fd])
                for number in sorted(ready):
                    self._deliver_from(number)
            except BaseException:
                self.abort()  # a message may be lost; their deaths will be told
                raise

    def _rest_at_exit(self) -> None:
        """Let a daemon thread wait for the end of Python, which has ended its workers.

        It would take their ends for deaths, and start others.
        """
        if is_exiting() and not self._end.still_active() and threading.current_thread().daemon:
            threading.Event().wait()

    def wait_for(self, fd: int, timeout_s: float) -> bool:
        """Wait until a descriptor can be read, delivering what workers send meanwhile.

        Args:
            fd: The descriptor, the same in every call.
            timeout_s: Longest wait in seconds.

        Returns:
            Whether it can be read now.
        """
        if self._poller is None:
            # Kept from call to call: this is called for every step.
            self._poller, _ = self._new_poller()
            self._poller.register(fd, select.POLLIN)
        ready = self._poller.poll(timeout_s * 1000)
        if len(ready) == 1 and ready[0][0] == fd:
            return True
        self.poll(0.0)
        return any(handle == fd for handle, _ in ready)

    def _new_poller(self) -> tuple[select.poll, dict[int, int]]:
        """What waits for any worker; and the worker of each descriptor."""
        poller, number_of = select.poll(), {}
        for number, (pipe, worker) in enumerate(zip(self._pipes, self._processes, strict=True)):
            if pipe is not None:
                poller.register(pipe, pipe.events)
                poller.register(worker.sentinel, select.POLLIN)
                number_of[pipe.fileno()] = number_of[worker.sentinel] = number
        return poller, number_of

    def _flush(self, number: int) -> None:
        """Go on with what a worker could not take before."""
        pipe = self._pipes[number]
        if pipe is not None:
            with suppress(OSError):  # it is gone, which is told in its turn
                pipe.flush()
            self._poller = None  # it watches whether there is something to be written

    def _deliver_from(self, number: int) -> None:
        """Deliver a worker's messages, its last words before its death."""
        pipe = self._pipes[number]
        while pipe is not None:
            try:
                # Asked in this order: what was sent before the death is in the pipe by then.
                is_alive = self._processes[number].is_alive()
                message = pipe.receive()
                if message is not None:
                    self._untie(number)
                    self._deliver(number, message)
                elif is_alive:
                    return
                else:
                    raise EOFError
            except (EOFError, OSError):
                self._bury(number)
                return
            pipe = self._pipes[number]

    def _untie(self, number: int) -> None:
        """Close the leash once no starting worker depends on it."""
        self._tied.discard(number)
        if not self._tied and self._leash is not None:
            self._leash.close()
            self._leash = None

    def _bury(self, number: int) -> None:
        pipe = self._pipes[number]
        self._pipes[number] = None
        self._poller = None  # it watches descriptors that are closed now
        self._side.logs.expect_last_words()
        if pipe is not None:
            pipe.close()
        worker = self._processes[number]
        self._untie(number)
        worker.join(_REAP_S)  # its pipe is at its end: it is ending or has ended
        if worker.is_alive():
            worker.kill()  # else nobody would ever look after it again
            worker.join(_REAP_S)
        _end_group_of(worker)
        self._deliver(number, Died(worker.exitcode))

    def progress(self) -> list[int]:
        """Steps that each worker has done; while it is starting, a negative number that changes.

        0 for a worker about which nothing is known: one that died, or starts where the system
        does not tell what a process does.
        """
        steps: list[int] = self._numbers[:, 0].tolist()
        for worker, pipe in enumerate(self._pipes):
            if not steps[worker] and pipe is not None:
                steps[worker] = -process_activity(self._processes[worker].pid)
        return steps

    def lane_in_use(self, worker: int) -> int:
        """The lane whose environment a worker ran last."""
        return int(self._numbers[worker, 1])

    def stacks(self) -> list[Stacks]:
        """What each worker is doing; a signal handler may ask, too."""
        return self._side.stacks(range(self.n_workers), self._processes)

    def stacks_of(self, worker: int) -> str:
        """What one worker is doing; empty if it cannot answer."""
        answers = self._side.stacks([worker], self._processes[worker : worker + 1])
        return "".join(answer.text for answer in answers)

    def holder_of_claims(self, otherwise: int) -> int:
        """The worker that keeps the lock of claims and is stuck with it, if there is one."""
        holders = set()
        for _ in range(_LOOKS_AT_LOCK):
            holders.add(self.claim_lock.holder())
            time.sleep(0.001)
        for number, worker in enumerate(self._processes):
            if self._pipes[number] is not None and {worker.pid} == holders:
                return number
        return otherwise

    def kill(self, worker: int) -> None:
        """End a worker at once; ``poll`` will tell of its death."""
        self._processes[worker].kill()

    def abort(self) -> None:
        """End all workers at once: ``close`` will not wait, ``poll`` will tell of their deaths."""
        self.is_aborted = True
        for worker in self._processes:
            worker.kill()

    def close(self) -> None:
        """Tell all workers to close, wait for them, end those that take too long."""
        self._end()
        bury()
        self._control.close_fd()
        for setup in self._setups:
            if isinstance(setup.functions, Shipment):
                setup.functions.close()


def refuse_during_import() -> None:
    """Refuse to start workers while a worker is importing the caller's main module.

    That module then lacks the guard around what starts workers; going on would start children of
    children without end.

    Raises:
        SystemExit: Which tells the parent, see ``is_missing_guard``.
    """
    if getattr(process.current_process(), "_inheriting", False):
        raise SystemExit(_GUARD_EXIT_CODE)


def missing_guard_error(died: Died) -> UsageError | None:
    """The error to raise if a worker ended because of a missing ``__main__`` guard."""
    if died.exitcode != _GUARD_EXIT_CODE:
        return None
    return missing_guard()


def _end_all(
    pipes: list[CallerPipe | None], processes: list[SpawnProcess], logs: LogReader
) -> None:
    """Close all workers; also run when a forgotten supervisor is collected or Python exits."""
    try:
        _ask_to_end(pipes, processes)
    except BaseException:
        # Interrupted while waiting, by a second Ctrl-C: there is no other chance to end them.
        for worker in processes:
            worker.kill()
            worker.join(_REAP_S)
        raise
    finally:
        for pipe, worker in zip(pipes, processes, strict=False):
            if pipe is not None:  # else it ended before, and its number may be another's by now
                pipe.close()
                _end_group_of(worker)
        for worker in processes:
            with suppress(ValueError):  # not ended although killed: the kernel is not done with it
                worker.close()  # frees its descriptors
        processes.clear()
        pipes.clear()
        logs.finish()  # last: it runs handlers of the user's


def _ask_to_end(pipes: list[CallerPipe | None], processes: list[SpawnProcess]) -> None:
    """Tell all workers to close, then terminate, then kill those that do not."""
    for pipe in pipes:
        if pipe is not None:
            pipe.finish(Close())
    deadline = time.monotonic() + _CLOSE_S
    for worker in processes:
        # A worker that ended frees its siblings' time.
        worker.join(max(0.0, deadline - time.monotonic()))
    for ending, patience_s in (
        (SpawnProcess.terminate, _TERMINATE_S),
        (SpawnProcess.kill, _REAP_S),
    ):
        late = [worker for worker in processes if worker.is_alive()]
        for worker in late:
            ending(worker)
        deadline = time.monotonic() + patience_s
        for worker in late:
            worker.join(max(0.0, deadline - time.monotonic()))


def _end_group_of(worker: SpawnProcess) -> None:
    """End what the environments of a worker that has ended have started and not ended."""
    # A number is not given again while a group of that number lives. Where it was given again since
    # the worker's end was noticed, nothing of the worker's is left, and the group is another's.
    if worker.pid is not None and not os.path.exists(f"/proc/{worker.pid}"):
        with suppress(OSError):  # mostly there is nothing
            os.killpg(worker.pid, signal.SIGKILL)


_one_at_a_time = threading.RLock()
"""Starting a process changes what belongs to all threads, and opens what no fork must inherit."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_one_at_a_time.acquire,
        after_in_parent=_one_at_a_time.release,
        after_in_child=_one_at_a_time.release,
    )


@contextmanager
def _spawning() -> Iterator[None]:
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
