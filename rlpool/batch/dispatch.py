"""The caller's side of collecting: requests, their blocks, and what the workers say about them.

A request goes through: queued (its slots do not fit into what is in flight yet), running (every
worker has it), complete (every worker is done with it) and then to the user; or it fails, is
cancelled, and its block is used again when every worker is done with it.

A worker that is gone still owes its part of the requests that run. Its successor is briefed: it
gets the blocks, the policy that each request began with, and the requests, which say what is left.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rlpool.batch.claims import ClaimLock
from rlpool.batch.collect import main
from rlpool.batch.commands import ChunksDone, Credit, MapBlock, Probe, Probed, Report, Setup, Update
from rlpool.batch.local import LocalWorker
from rlpool.batch.requests import Policy, Request
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import EnvError, RlpoolError, SpecError, UsageError, Where, WorkerError
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.memory.storage import Array, Memory
from rlpool.record.crash_files import CrashDir, CrashFiles
from rlpool.record.failures import DEBUG_HINT
from rlpool.slots.blocks import BlockPool, Layout, StepSpecs
from rlpool.workers.failure_policy import FailurePolicy
from rlpool.workers.lifecycle import Workers
from rlpool.workers.payload import Packed, pack
from rlpool.workers.stack_dumps import note_source
from rlpool.workers.stacks import described
from rlpool.workers.wire import Done, Failed, Message

_LOG = logging.getLogger("rlpool")

_MAX_RUNNING = 8
"""Requests that workers may have at once. Enough to keep them busy; few enough that all messages
about them fit into the pipes, so that no side ever waits for the other to read."""

_LOCK_S = 1.0
"""Whoever has the lock of claims has it for microseconds; after so long its owner is stuck."""

_LOCK_LOOK_S = 0.001

_LARGE_BYTES = 2**14
"""A larger setup travels in shared memory, once for all workers."""

LayoutMaker = Callable[[StepSpecs], Layout]


class Dispatcher:
    """Sends requests to workers and collects their results, in order.

    Args:
        n_workers: Number of worker processes, 0 for one worker in this process.
        root: Root of all seeds.
        setup: What every worker has to create.
        make_layout: Makes the blocks' layout once the workers know their keys, and refuses one
            that is larger than the machine.
        policy: What becomes of workers that fail.
        timeout_s: Seconds without progress after which a worker counts as hanging, ``None`` for
            never.
        crash_dir: Where the capsules of failures are written, ``None`` for nowhere.

    Attributes:
        policy: What new requests are to run with. It is sent to each worker with the first
            request that needs it, whatever became of those before.
        specs: What a step consists of, ``None`` before the workers know.
        n_lanes: Lanes of each worker.

    Raises:
        WorkerStartupError, WorkerDiedError, WorkerTimeoutError: If a worker does not get ready.
        UsageError: If the caller's script lacks its ``__main__`` guard.
        SpecError: If workers disagree about their keys, shapes or dtypes, or blocks are larger
            than the machine.
    """

    def __init__(
        self,
        n_workers: int,
        root: int,
        setup: Setup,
        *,
        make_layout: LayoutMaker,
        policy: FailurePolicy,
        timeout_s: float | None,
        crash_dir: CrashDir = None,
    ) -> None:
        self._make_layout = make_layout
        self._crash_files = CrashFiles(crash_dir)
        self._repeats_env_errors = n_workers > 0 and policy.restarts_on_env_errors
        self._queued: deque[Request] = deque()  # not sent yet
        self._sent: list[Request] = []  # sent, and not yet done in every worker
        self._pending: deque[Request] = deque()  # not yet handed to the user
        self._blocks: BlockPool | None = None
        self._reports: dict[int, Report] = {}
        self._infos: Packed | None = None  # what the workers find out their keys with
        self.specs: StepSpecs | None = None
        self.n_lanes = 0
        self.policy = Policy()
        self._sent_versions: dict[int, int] = {}  # worker: that of the last policy it was sent
        self._successors: dict[int, WorkerError | None] = {}  # new ones, and what ended the last
        self._owner_pid = os.getpid()
        self._n_requests = 0
        self.is_closed = False
        self._setup, self._setup_memory = _for_travel(setup)
        self._workers: Workers | LocalWorker
        if n_workers:
            self._workers = Workers([main] * n_workers, root, policy, timeout_s, self, DEBUG_HINT)
            self._lock = ClaimLock(self._workers.control_fd)
            note_source(self)
        else:
            self._workers = LocalWorker(root, self)
            self._lock = ClaimLock()
        try:
            self._workers.start()
            if self._setup_memory is not None and not self.repeats:
                self._setup_memory.close_fd()
            self._agree()
        except BaseException:
            self._workers.abort()  # those that are slow to start are not waited for
            self.close()
            raise

    # What the batchers call ------------------------------------------------------------------

    @property
    def repeats(self) -> bool:
        """Whether workers may be replaced that have begun something."""
        return self._workers.is_repeatable

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
        self._workers.refuse_if_dead()
        with self._whole():
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
            self._workers.refuse_if_dead()
            raise UsageError("nothing is pending", fix="call execute() before get()")
        request = self._pending[0]
        if request.trajectories is None:
            self._poll()
            if not blocking and not self._is_settled(request):
                self._workers.look_for_hang()
                return None
            self._workers.wait_until(lambda: self._is_settled(request))
            with self._whole():
                self._settle(request)
        return request

    def _is_settled(self, request: Request) -> bool:
        return request.is_complete or request.error is not None or self._workers.fatal is not None

    def _settle(self, request: Request) -> None:
        """Take the result of the oldest request and give its slots to the next."""
        if request.is_complete:
            request.trajectories = request.result()
            self._release(request)
            self._advance()
            return
        self._pending.popleft()
        error = request.error or self._workers.fatal
        self._forget(request)
        self._advance()
        raise error or UsageError("the request was given up")

    def hand_out(self) -> TemporalDictTensor:
        """The result of the request that ``wait`` returned, which is dropped here."""
        # The last thing that a get() does: interrupted before it, a get() may be repeated.
        trajectories = self._pending[0].trajectories
        if trajectories is None:
            raise LookupError("handed out before it was finished")
        del self._pending[0]  # not popleft(): signals' handlers may run when a call is over
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
        self._poll()
        if request.block is None:
            return 0, request.n_rows
        # Of a death between an episode's end and the note of it, both runs are counted.
        n_finished = int(request.block.arrays.control["n_finished"].sum())
        return min(n_finished, request.n_rows), request.n_rows

    def update(self, info: Any) -> None:
        """Let requests that are made from now on run with agents that were updated with this."""
        self.policy = Policy(self.policy.version + 1, self._pack(info))

    def give_up(self) -> None:
        """Let the workers stop what they run, without a word to anybody who waits for it."""
        if os.getpid() == self._owner_pid:
            for request in self._sent:
                request.running_block.arrays.control["cancelled"][0] = 1

    def deliver_logs(self) -> None:
        """Hand what workers logged to this process's loggers."""
        if not self.is_closed:
            self._workers.deliver_logs()

    def stacks(self) -> str:
        """What the workers are doing; without worker processes, what this process is doing."""
        text = described(self._workers.stacks(), self.where)
        if isinstance(self._workers, LocalWorker):
            text += self._workers.stacks_of_environments()
        return text

    def worker_stacks(self) -> str:
        """What the worker processes are doing, for a signal handler: it may come at any time."""
        is_owner = os.getpid() == self._owner_pid
        return self.stacks() if is_owner and not self.is_closed else ""

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
        kept = [self.policy.packed, self._infos]
        for request in (*self._sent, *self._queued):
            kept += request.payloads
        for memory in (self._setup_memory, *(packed.memory for packed in kept if packed)):
            if memory is not None:
                memory.close_fd()
        if self._blocks is not None:
            self._blocks.close()
        self._sent.clear()
        self._queued.clear()
        self._pending.clear()

    # Starting and agreeing -------------------------------------------------------------------

    def setup(self, worker: int) -> tuple[Setup, Memory | None]:
        """What a worker has to create."""
        return self._setup, self._setup_memory

    def brief(self, worker: int, report: Report) -> None:
        """Tell a worker that has its environments what there is to do."""
        if report.specs is None and self._infos is not None:
            # It is like the others, which needed infos to find out their keys.
            self._workers.send(worker, Probe(self._infos.payload), self._infos.memory)
        else:
            self._note_report(worker, report)
        for request in [other for other in self._sent if worker in other.remaining]:
            self._send_to(worker, request, [])

    def _note_report(self, worker: int, report: Report) -> None:
        """Compare what a worker reports with what the others do."""
        self._reports[worker] = report
        if self.specs is None or report.specs == self.specs:
            self._workers.note_ready(worker)
        if self.specs is None:
            if self._infos is not None and len(self._reports) == self._workers.n_workers:
                self._begin()
        elif report.specs is None and isinstance(report.error, WorkerError):
            if isinstance(self._workers, Workers):
                self._workers.expect_end(worker, report.error)
                self._workers.kill(worker)
        elif report.specs != self.specs or report.n_lanes != self.n_lanes:
            self._workers.fail(
                SpecError(
                    f"worker {worker} was started again, and its steps are different: "
                    f"{report.error or report.specs}, before: {self.specs}",
                    fix="create_env and create_agent must always make the same",
                )
            )

    def _agree(self) -> RlpoolError | None:
        """Take over the workers' specs, if they know them; they must be the same.

        Returns:
            Why they do not know them.

        Raises:
            SpecError: If they are not the same.
        """
        reports = [self._reports[worker] for worker in sorted(self._reports)]
        first = reports[0]
        for worker, report in enumerate(reports):
            if report.n_lanes != first.n_lanes:
                raise SpecError(
                    f"worker 0 has {first.n_lanes} environments, "
                    f"worker {worker} has {report.n_lanes}",
                    fix="create the same number of environments in every worker",
                )
            if report.error is not None and not isinstance(report.error, WorkerError):
                raise report.error
        self.n_lanes = first.n_lanes
        for worker, report in enumerate(reports):
            if report.specs is None:
                _LOG.debug("keys are unknown until the first execute: %s", report.error)
                return report.error
            if report.specs != first.specs:
                raise SpecError(
                    f"workers 0 and {worker} disagree about their steps: {first.specs} and "
                    f"{report.specs}",
                    fix="create_env and create_agent must not depend on the worker",
                )
        if first.specs is not None:
            self.specs = first.specs
            self._blocks = BlockPool(self._make_layout(first.specs), self._workers.allocate)
        return None

    def _probe(self, request: Request) -> None:
        """Let all workers find out their keys with the infos of a request."""
        if self._infos is None:
            self._infos = self._pack((*request.infos, {}))
            self._reports.clear()
            for worker in self._workers.up:
                self._workers.send(worker, Probe(self._infos.payload), self._infos.memory)

    def _begin(self) -> None:
        """Go on, now that all workers have seen the first request's infos."""
        try:
            error = self._agree()
            if error is not None:
                raise error
        except RlpoolError as error:
            self._infos = None  # did not even give the keys; those of the next request may
            if self._queued:
                self._queued.popleft().error = self._crash_files.with_file(error)
        self._advance()

    # Sending ---------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Send queued requests as far as slots allow."""
        if self._workers.fatal is not None:
            return
        if self._queued and self._blocks is None:
            self._probe(self._queued[0])
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
                self._prepare(request, self._blocks)
            except RlpoolError as error:
                request.n_slots = 0
                request.error = error
            else:
                self._send(request, self._blocks.forget_surplus())

    def _prepare(self, request: Request, blocks: BlockPool) -> None:
        """Do all that may fail before anything is sent.

        Raises:
            RlpoolError: If it did; the request is not sent.
        """
        if self._successors and not request.can_be_repeated():
            failure = next(filter(None, self._successors.values()), None)
            raise failure or UsageError("a worker was replaced, and the lanes need a reset()")
        request.block = blocks.take()
        _clear(request.block.arrays.control)
        if any(request.infos):
            request.packed = self._pack(request.contents(0, is_successor=False))

    def _send(self, request: Request, gone: list[int]) -> None:
        """Send a request to all workers that are there."""
        request.remaining.update(range(self._workers.n_workers))
        self._sent.append(request)
        for worker in self._workers.up:
            self._send_to(worker, request, gone)
        if not self.repeats:  # no successor will need what all of them have now
            request.running_block.memory.close_fd()
            for packed in request.payloads:
                packed.memory.close_fd()

    def _send_to(self, worker: int, request: Request, gone: list[int]) -> None:
        """Send a request to one worker, after the policy and the block if it lacks them."""
        block, send = request.running_block, self._workers.send
        version, update = request.policy
        if update is not None and self._sent_versions.get(worker) != version:
            self._sent_versions[worker] = version
            send(worker, Update(update.payload), update.memory)
        if gone or worker not in block.mapped_by:
            is_new = worker not in block.mapped_by
            block.mapped_by.add(worker)
            message = MapBlock(block.number, block.layout, gone)
            send(worker, message, block.memory if is_new else None)
        payload, memory = request.packed or (None, None)
        if worker in self._successors:
            del self._successors[worker]
            contents = request.contents(worker, is_successor=True)
            if contents[-1]:
                payload, memory = self._pack(contents)
        send(worker, request.message(worker, payload), memory)

    def _pack(self, value: Any) -> Packed:
        """Put an object where all workers can read it.

        Raises:
            SpecError: If there is no memory or no descriptor for it.
        """
        return pack(value, self._allocate)

    def _allocate(self, n_bytes: int) -> Memory:
        try:
            return self._workers.allocate(n_bytes)
        except (OSError, RuntimeError, MemoryError) as error:
            raise SpecError(
                f"there is no memory to send {n_bytes} bytes: {error}",
                fix="drop results that are no longer needed; if descriptors are what is "
                "missing, raise their limit (ulimit -n)",
            ) from error

    # Receiving -------------------------------------------------------------------------------

    def take(self, worker: int, message: Message) -> None:
        """Take a worker's message."""
        if isinstance(message, Done):
            self._workers.note_success(worker)
            self._note_done(worker, message.command)
        elif isinstance(message, ChunksDone):
            self._workers.note_success(worker)
            request = self._find(message.number)
            if request is not None:
                slots = [] if request.error else request.empty_slots(worker, message.chunks)
                self._workers.send(worker, Credit(message.number, slots))
        elif isinstance(message, Probed):
            self._note_report(worker, message.report)
        elif isinstance(message, Failed) and message.command is not None:
            is_repeated = self._repeats_env_errors and isinstance(message.error, EnvError)
            if is_repeated and isinstance(self._workers, Workers):
                self._workers.expect_end(worker, self._crash_files.with_file(message.error))
            else:
                self._note_failure(message.command, message.error)

    def _note_done(self, worker: int, number: int) -> None:
        request = self._find(number)
        if request is None:
            return
        request.remaining.discard(worker)
        if not request.remaining:
            self._sent.remove(request)
            request.drop_payloads()
            if request not in self._pending:
                self._release(request)
            self._advance()

    def _note_failure(self, number: int, error: WorkerError) -> None:
        request = self._find(number)
        if request is not None and request.error is None:
            request.error = self._crash_files.with_file(error)
            self._cancel(request)

    def lost(self, worker: int, failure: WorkerError | None) -> None:
        """Take back what a worker had begun, for its successor."""
        self._successors[worker] = failure
        self._sent_versions.pop(worker, None)
        self._reports.pop(worker, None)
        if self._blocks is not None:
            self._blocks.forget_worker(worker)
        with self._claims_locked():
            for request in [other for other in self._sent if worker in other.remaining]:
                if not request.error and not request.can_be_repeated():
                    request.error = failure or UsageError("a worker was replaced in its midst")
                    self._cancel(request)
                if not request.give_back(worker) or request.is_cancelled:
                    self._note_done(worker, request.number)

    def busy(self) -> Collection[int]:
        """Workers that have something to do.

        Also with a request that was given up: who hangs in it keeps the slots of the next. Whoever
        waits for the lock of the claims hangs as well, but not by a fault of its own.
        """
        holder = self._holder()
        if holder is not None:
            return {holder}
        return {worker for request in self._sent for worker in request.remaining}

    def where(self, worker: int) -> Where:
        """What a worker is doing, as far as shared memory tells."""
        for request in self._sent:
            if worker not in request.remaining:
                continue
            lane = self._workers.lane_in_use(worker)
            control, layout = request.running_block.arrays.control, request.running_block.layout
            running = control["running"][worker]
            if running[lane] < 0:
                busy = (running >= 0).nonzero()[0]
                if not len(busy):
                    continue
                lane = int(busy[0])
            row = int(running[lane])
            env_info = {key: array[row].tolist() for key, array in request.infos[1].items()}
            step = int(layout.steps_in_slot(control, worker)[lane])
            step += int(control["steps_before"][worker, lane])
            return Where(worker, lane, row, step, request.seed_of(row), env_info or None)
        return Where(worker)

    # The lock of the claims --------------------------------------------------------------------

    @contextmanager
    def _claims_locked(self) -> Iterator[None]:
        """A section in which no worker claims anything; one that keeps the lock is ended."""
        waited_s = 0.0
        while not self._lock.try_acquire() and waited_s < 2 * _LOCK_S:
            holder = None if waited_s < _LOCK_S else self._holder()
            if holder is not None and isinstance(self._workers, Workers):
                self._workers.kill(holder)
            time.sleep(_LOCK_LOOK_S)
            waited_s += _LOCK_LOOK_S
        try:
            yield
        finally:
            self._lock.release()

    def _holder(self) -> int | None:
        """The worker that has the lock of the claims at this moment, if one has."""
        pid = self._lock.holder()
        pids = self._workers.pids if isinstance(self._workers, Workers) else []
        return pids.index(pid) if pid is not None and pid in pids else None

    # Waiting ---------------------------------------------------------------------------------

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

    def _poll(self) -> None:
        """Handle what has arrived."""
        self._workers.poll(0.0)

    # Ending a request ------------------------------------------------------------------------

    def _find(self, number: int) -> Request | None:
        return next((request for request in self._sent if request.number == number), None)

    def _cancel(self, request: Request) -> None:
        """Stop a running request's episodes; waiting workers are woken to see it."""
        request.running_block.arrays.control["cancelled"][0] = 1
        for worker in self._workers.up:
            self._workers.send(worker, Credit(request.number, []))

    def _forget(self, request: Request) -> None:
        """Give up a request; its block is used again when no worker writes into it any more."""
        if request in self._queued:
            self._queued.remove(request)
        if request in self._sent:
            self._cancel(request)
        else:
            self._release(request)

    def _release(self, request: Request) -> None:
        request.n_slots = 0
        if request.block is not None:
            request.block.release()
            request.block = None


def _for_travel(setup: Setup) -> tuple[Setup, Memory | None]:
    """A setup as it is sent: what is large goes into memory, once for all workers."""
    functions = setup.functions
    if not isinstance(functions, bytes) or len(functions) <= _LARGE_BYTES:
        return setup, None
    memory = Memory.shared(len(functions), "rlpool-setup")
    memory.root()[:] = memoryview(functions)
    return replace(setup, functions=None), memory


def _clear(control: Mapping[str, Array]) -> None:
    """Begin the bookkeeping of a request in a block that was used before."""
    for name in ("length", "whole", "claim", "n_finished", "cancelled"):
        control[name][:] = 0
    control["running"][:] = -1
