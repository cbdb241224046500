"""The caller's side of collecting: requests, their blocks, and what the workers say about them.

A request goes through: queued (its slots do not fit into what is in flight yet), running (every
worker has it), complete (every worker is done with it) and then to the user; or it fails, is
cancelled, and its block is used again when every worker is done with it.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import (
    RlpoolError,
    SpecError,
    UsageError,
    Where,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
    compose,
)
from rlpool.interrupts import InterruptsHeld
from rlpool.requests import Packed, Request
from rlpool.slots import BlockPool, Layout, StepSpecs
from rlpool.storage import Memory
from rlpool.workers.hang_watch import HangWatch
from rlpool.workers.local import LocalWorker
from rlpool.workers.messages import (
    ChunksDone,
    Credit,
    Failed,
    MapBlock,
    Message,
    Probe,
    Ready,
    RequestDone,
    Setup,
    Update,
)
from rlpool.workers.parcel import pack
from rlpool.workers.supervisor import Died, Supervisor, missing_guard_error

_LOG = logging.getLogger("rlpool")

_MAX_RUNNING = 8
"""Requests that workers may have at once. Enough to keep them busy; few enough that all messages
about them fit into the pipes, so that no side ever waits for the other to read."""

LayoutMaker = Callable[[StepSpecs], Layout]


class WorkersDisagree(SpecError):
    """Workers whose steps consist of different things.

    Attributes:
        specs: What each worker reports.
    """

    def __init__(self, message: str, specs: list[StepSpecs]) -> None:
        super().__init__(message)
        self.specs = specs

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.specs)


class Coordinator:
    """Sends requests to workers and collects their results, in order.

    Args:
        setups: One per worker process; with ``in_process`` the only one.
        in_process: Run the one worker in this process.
        make_layout: Makes the blocks' layout once the workers know their keys, and refuses one
            that is larger than the machine.
        timeout_s: Seconds without progress after which a worker counts as hanging, ``None`` for
            never.

    Raises:
        WorkerStartupError, WorkerDiedError, WorkerTimeoutError: If a worker does not get ready.
        UsageError: If the caller's script lacks its ``__main__`` guard.
        WorkersDisagree: If workers disagree about their keys, shapes or dtypes.
        SpecError: If blocks are larger than the machine.
    """

    def __init__(
        self,
        setups: list[Setup],
        *,
        in_process: bool,
        make_layout: LayoutMaker,
        timeout_s: float | None,
    ) -> None:
        self._make_layout = make_layout
        self._timeout_s = timeout_s
        self._watch = HangWatch(timeout_s)
        self._queued: deque[Request] = deque()  # not sent yet
        self._sent: list[Request] = []  # sent, and not yet done in every worker
        self._pending: deque[Request] = deque()  # not yet handed to the user
        self._reports: dict[int, Ready] = {}
        self._failed_start: RlpoolError | None = None
        self._is_probing = False
        self._fatal: RlpoolError | None = None
        self._blocks: BlockPool | None = None
        self._unsent_update: Packed | None = None  # of a request that failed before it was sent
        self._owner_pid = os.getpid()
        self._n_requests = 0
        self.n_lanes = 0
        self.specs: StepSpecs | None = None
        self.is_closed = False
        if in_process:
            self._workers: LocalWorker | Supervisor = LocalWorker(setups[0], self._handle)
        else:
            self._workers = Supervisor(setups, self._handle)
        try:
            self._start()
        except BaseException:
            self._workers.abort()  # those that are slow to start are not waited for
            self.close()
            raise

    # What the batchers call ------------------------------------------------------------------

    @property
    def n_pending(self) -> int:
        """Requests whose results were not handed out yet."""
        return len(self._pending)

    def next_number(self) -> int:
        """A number for a new request."""
        self._n_requests += 1
        return self._n_requests

    def submit(self, request: Request) -> None:
        """Queue a request and send it if its slots are free.

        Raises:
            RlpoolError: If a worker died.
        """
        self._refuse_if_dead()
        with self._whole():
            if request.update is None:
                request.update, self._unsent_update = self._unsent_update, None
            self._pending.append(request)
            self._queued.append(request)
            self._advance()

    def wait(self, *, blocking: bool) -> Request | None:
        """The oldest request, finished; ``None`` if it is not complete and not waited for.

        It stays the oldest until ``hand_out``.

        Raises:
            RlpoolError: If it failed; it is dropped then.
        """
        if not self._pending:
            self._refuse_if_dead()
            raise UsageError(compose("nothing is pending", fix="call execute() before get()"))
        request = self._pending[0]
        if request.trajectories is None:
            self._poll(0.0)
            if not blocking and not self._is_settled(request):
                self._look_for_hang()
                return None
            self._wait_until(lambda: self._is_settled(request))
            with self._whole():
                self._settle(request)
        return request

    def _settle(self, request: Request) -> None:
        """Take the result of the oldest request and give its slots to the next."""
        if request.is_complete:
            request.trajectories = request.result()
            self._release(request)
            self._advance()
            return
        self._pending.popleft()
        error = request.error or self._fatal
        self._forget(request)
        self._advance()
        raise error or UsageError("the request was given up")

    def hand_out(self) -> TemporalDictTensor:
        """The result of the request that ``wait`` returned, which is dropped here."""
        # The last thing that a get() does: interrupted before it, a get() may be repeated.
        trajectories = self._pending.popleft().trajectories
        if trajectories is None:
            raise LookupError("handed out before it was finished")
        return trajectories

    def drop_pending(self) -> None:
        """Give up all requests that were not handed out; their episodes stop."""
        with self._whole():
            for request in list(self._pending):
                request.error = UsageError("the request was given up")
                self._forget(request)
            self._pending.clear()

    def finished_episodes(self) -> tuple[int, int]:
        """Episodes finished and requested, of the oldest request."""
        if not self._pending:
            return 0, 0
        request = self._pending[0]
        self._poll(0.0)
        if request.block is None:
            return 0, request.n_rows
        return int(request.block.arrays.control["n_finished"].sum()), request.n_rows

    def pack(self, value: Any) -> Packed:
        """Put an object where all workers can read it."""
        return pack(value, self._workers.allocate)

    def close(self) -> None:
        """Stop what runs and end the workers."""
        if self.is_closed:
            return
        self.is_closed = True
        if os.getpid() != self._owner_pid:
            return  # a forked copy: workers, pipes and blocks are those of the process it came from
        for request in self._sent:
            # Also for a get() that waits in another thread.
            request.error = request.error or UsageError("the batcher was closed meanwhile")
            request.running_block.arrays.control["cancelled"][0] = 1
        self._workers.close()
        self._sent.clear()
        self._queued.clear()
        self._pending.clear()

    # Starting --------------------------------------------------------------------------------

    def _start(self) -> None:
        self._workers.start()
        self._await_reports()
        if self._failed_start is not None:
            raise self._failed_start
        self._refuse_if_dead()
        self._agree()

    def _await_reports(self) -> None:
        n_workers = self._workers.n_workers
        self._wait_until(
            lambda: (
                len(self._reports) == n_workers
                or self._failed_start is not None
                or self._fatal is not None
            )
        )

    def _agree(self) -> None:
        """Take over the workers' specs, if they know them; they must be the same."""
        reports = [self._reports[worker] for worker in sorted(self._reports)]
        self.n_lanes = reports[0].n_lanes
        for worker, report in enumerate(reports):
            if report.n_lanes != self.n_lanes:
                raise SpecError(
                    compose(
                        f"worker 0 has {self.n_lanes} environments, "
                        f"worker {worker} has {report.n_lanes}",
                        fix="create the same number of environments in every worker",
                    )
                )
            if report.error is not None and not isinstance(report.error, WorkerError):
                raise report.error
            if report.specs is None:
                _LOG.debug("keys are unknown until the first execute: %s", report.error)
                return
        self.specs = _common_specs([report.specs for report in reports if report.specs])
        self._blocks = BlockPool(self._make_layout(self.specs), self._workers.allocate)

    # Sending ---------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Send queued requests as far as slots allow."""
        if self._fatal is not None:
            return
        if self._queued and self._blocks is None:
            self._probe(self._queued[0])
            return
        while self._queued and self._blocks is not None:
            request = self._queued[0]
            n_slots = self._blocks.layout.n_slots
            in_flight = [other for other in self._sent + list(self._pending) if other.n_slots]
            n_free = n_slots - sum({id(r): r.n_slots for r in in_flight}.values())
            wanted = request.slots_wanted(n_free, n_slots)
            if not wanted or len(self._sent) >= _MAX_RUNNING:
                return
            self._queued.popleft()
            request.n_slots = wanted
            try:
                self._send(request, self._blocks)
            except RlpoolError as error:
                request.n_slots = 0
                request.error = error

    def _send(self, request: Request, blocks: BlockPool) -> None:
        block, is_new = blocks.take()
        request.block = block
        control = block.arrays.control
        control["length"][:] = 0
        control["cursor"][:] = range(len(control["cursor"]))
        control["running"][:] = -1
        control["n_finished"][:] = 0
        control["cancelled"][:] = 0
        gone = blocks.forget_surplus()
        if is_new or gone:
            self._broadcast(
                MapBlock(block.number, block.layout, gone), block.memory if is_new else None
            )
            block.memory.close_fd()
        if request.update is not None:
            update, update_memory = request.update
            self._broadcast(Update(update), update_memory)
            update_memory.close_fd()
            request.update = None
        parcel, memory = None, None
        if any(request.infos):
            parcel, memory = self.pack(request.infos)
        request.remaining.update(range(self._workers.n_workers))
        self._sent.append(request)
        for worker in range(self._workers.n_workers):
            self._workers.send(worker, request.message(worker, parcel), memory)
        if memory is not None:
            memory.close_fd()

    def _probe(self, request: Request) -> None:
        """Let the workers find out their keys with the infos of the first request."""
        if self._is_probing:
            return
        self._is_probing = True
        self._reports.clear()
        parcel, memory = self.pack(request.infos)
        self._broadcast(Probe(parcel), memory)
        memory.close_fd()

    def _broadcast(self, message: Message, memory: Memory | None = None) -> None:
        for worker in range(self._workers.n_workers):
            self._workers.send(worker, message, memory)

    # Receiving -------------------------------------------------------------------------------

    def _handle(self, worker: int, message: Message) -> None:
        """Take a worker's message."""
        if isinstance(message, RequestDone):
            self._note_done(worker, message.request)
        elif isinstance(message, ChunksDone):
            request = self._find(message.request)
            if request is not None:
                slots = [] if request.error else request.empty_slots(message.chunks)
                self._workers.send(worker, Credit(message.request, slots))
        elif isinstance(message, Ready):
            self._reports[worker] = message
            if self._is_probing and len(self._reports) == self._workers.n_workers:
                self._end_probe()
        elif isinstance(message, Failed):
            self._note_failure(message)
        elif isinstance(message, Died):
            self._note_death(worker, message)

    def _note_done(self, worker: int, number: int) -> None:
        request = self._find(number)
        if request is None:
            return
        request.remaining.discard(worker)
        if not request.remaining:
            self._sent.remove(request)
            if request not in self._pending:
                self._release(request)

    def _note_failure(self, message: Failed) -> None:
        if message.request is None:
            self._failed_start = self._failed_start or message.error
            return
        request = self._find(message.request)
        if request is not None and request.error is None:
            request.error = message.error
            self._cancel(request)

    def _note_death(self, worker: int, died: Died) -> None:
        guard = missing_guard_error(died)
        how = died.signal_name or f"exit code {died.exitcode}"
        error = (
            self._fatal
            or guard
            or WorkerDiedError(
                f"worker {worker} died ({how})",
                exitcode=died.exitcode,
                signal_name=died.signal_name,
                where=self._where(worker),
                fix="run it in this process to debug: EpisodeBatcher(..., n_threads=0)",
            )
        )
        self._fatal = error

    def _where(self, worker: int) -> Where:
        """What a worker was doing, as far as shared memory tells."""
        for request in self._sent:
            lane = self._workers.lane_in_use(worker)
            running = request.running_block.arrays.control["running"][worker]
            if running[lane] < 0:
                busy = (running >= 0).nonzero()[0]
                if not len(busy):
                    continue
                lane = int(busy[0])
            row = int(running[lane])
            env_info = {key: array[row].tolist() for key, array in request.infos[1].items()}
            control, layout = request.running_block.arrays.control, request.running_block.layout
            step = int(control["row"][worker, lane]) % layout.n_timesteps
            step += int(control["steps_before"][worker, lane])
            return Where(worker, lane, row, step, request.seed_of(row), env_info or None)
        return Where(worker)

    def _end_probe(self) -> None:
        self._is_probing = False
        try:
            self._agree()
        except RlpoolError as error:
            self._fail_queued(error)
        if self._blocks is None:
            errors = [report.error for report in self._reports.values() if report.error]
            if errors:
                self._fail_queued(errors[0])
        self._advance()

    def _fail_queued(self, error: RlpoolError) -> None:
        """Fail the request that was to run next: its infos did not even give the keys."""
        if self._queued:
            request = self._queued.popleft()
            request.error = error
            self._keep_update(request)

    def _keep_update(self, request: Request) -> None:
        """Let the next request bring the update that a failed one did not."""
        if request.update is not None:
            later = next((other for other in self._queued if other.update is None), None)
            if later is not None and not any(other.update for other in self._queued):
                later.update = request.update
            elif later is None and not self._queued:
                self._unsent_update = request.update
            request.update = None

    # Waiting ---------------------------------------------------------------------------------

    def _is_settled(self, request: Request) -> bool:
        return request.is_complete or request.error is not None or self._fatal is not None

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """A section that is done as a whole or not at all: signals wait, anything else is fatal."""
        with InterruptsHeld():
            try:
                yield
            except RlpoolError:
                raise
            except BaseException:
                self._workers.abort()  # they may have got half a message
                raise

    def _poll(self, timeout_s: float | None) -> None:
        self._workers.poll(timeout_s)
        if self._queued:
            with self._whole():
                self._advance()

    def _wait_until(self, is_over: Callable[[], bool]) -> None:
        """Handle messages until a condition holds or a worker hangs."""
        while not is_over():
            self._poll(self._watch.patience_s)
            if not is_over():
                self._look_for_hang()

    def _look_for_hang(self) -> None:
        """Kill a worker that has something to do and makes no progress.

        Also one that hangs in a request that was given up: it keeps the slots of the next.
        """
        busy = {worker for request in self._sent for worker in request.remaining}
        if self._is_probing or self.n_lanes == 0:
            busy = set(range(self._workers.n_workers)) - self._reports.keys()
        worker = self._watch.hanging(self._workers.progress(), busy)
        if worker is not None and self._fatal is None:
            self._fatal = WorkerTimeoutError(
                f"worker {worker} made no progress for {self._timeout_s:g} s",
                where=self._where(worker),
                fix="look for an endless wait in the environment or the agent, or raise timeout",
            )
            self._workers.kill(worker)

    # Ending a request ------------------------------------------------------------------------

    def _find(self, number: int) -> Request | None:
        return next((request for request in self._sent if request.number == number), None)

    def _cancel(self, request: Request) -> None:
        """Stop a running request's episodes; waiting workers are woken to see it."""
        request.running_block.arrays.control["cancelled"][0] = 1
        self._broadcast(Credit(request.number, []))

    def _forget(self, request: Request) -> None:
        """Give up a request; its block is used again when no worker writes into it any more."""
        if request in self._queued:
            self._queued.remove(request)
            self._keep_update(request)
        if request in self._sent:
            self._cancel(request)
        else:
            self._release(request)

    def _release(self, request: Request) -> None:
        request.n_slots = 0
        if request.block is not None:
            request.block.release()
            request.block = None

    def _refuse_if_dead(self) -> None:
        if self._fatal is not None:
            raise self._fatal


def _common_specs(specs: list[StepSpecs]) -> StepSpecs:
    """What all workers report.

    Raises:
        WorkersDisagree: If they do not report the same.
    """
    for worker, other in enumerate(specs):
        if other != specs[0]:
            message = compose(
                f"workers 0 and {worker} disagree about their steps: {specs[0]} and {other}",
                fix="create_env and create_agent must not depend on the worker",
            )
            raise WorkersDisagree(message, specs)
    return specs[0]
