"""The caller's side of collecting: requests, their blocks, and what the workers say about them.

A request goes through: queued (its slots do not fit into what is in flight yet), running (every
worker has it), complete (every worker is done with it) and then to the user; or it fails, is
cancelled, and its block is used again when every worker is done with it.

A worker that is gone still owes its part of the requests that run. Its successor gets all that it
needs to do it: the blocks, the policy that each request began with, and the requests, which say
what is left.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlpool.batch.requests import Packed, Policy, Request
from rlpool.batch.workforce import Workforce
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import (
    EnvError,
    RlpoolError,
    SpecError,
    UsageError,
    Where,
    WorkerError,
)
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.memory.storage import Array, Memory
from rlpool.record.crash_files import CrashDir, CrashFiles
from rlpool.slots.blocks import BlockPool, Layout, StepSpecs
from rlpool.workers.failure_policy import FailurePolicy
from rlpool.workers.messages import (
    ChunksDone,
    Credit,
    Failed,
    MapBlock,
    Message,
    RequestDone,
    Setup,
    Update,
)
from rlpool.workers.parcel import pack
from rlpool.workers.stack_dumps import note_source

_LOG = logging.getLogger("rlpool")

_MAX_RUNNING = 8
"""Requests that workers may have at once. Enough to keep them busy; few enough that all messages
about them fit into the pipes, so that no side ever waits for the other to read."""

LayoutMaker = Callable[[StepSpecs], Layout]


class Coordinator:
    """Sends requests to workers and collects their results, in order.

    Args:
        setups: One per worker process; with ``in_process`` the only one.
        in_process: Run the one worker in this process.
        make_layout: Makes the blocks' layout once the workers know their keys, and refuses one
            that is larger than the machine.
        policy: What becomes of workers that fail.
        timeout_s: Seconds without progress after which a worker counts as hanging, ``None`` for
            never.
        crash_dir: Where the capsules of failures are written, ``None`` for nowhere.

    Attributes:
        policy: What new requests are to run with. It is sent to each worker with the first
            request that needs it, whatever became of those before.

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
        policy: FailurePolicy,
        timeout_s: float | None,
        crash_dir: CrashDir = None,
    ) -> None:
        self._make_layout = make_layout
        self._crash_files = CrashFiles(crash_dir)
        self._repeats_env_errors = policy.restarts_on_env_errors and not in_process
        self._queued: deque[Request] = deque()  # not sent yet
        self._sent: list[Request] = []  # sent, and not yet done in every worker
        self._pending: deque[Request] = deque()  # not yet handed to the user
        self._blocks: BlockPool | None = None
        self.policy = Policy()
        self._sent_versions: dict[int, int] = {}  # worker: that of the last policy it was sent
        self._successors: dict[int, WorkerError | None] = {}  # new ones, and what ended the last
        self._owner_pid = os.getpid()
        self._n_requests = 0
        self.is_closed = False
        self._workers = Workforce(
            setups, in_process=in_process, policy=policy, timeout_s=timeout_s, client=self
        )
        if not in_process:
            note_source(self)
        try:
            self._workers.start()
            self._make_blocks()
        except BaseException:
            self._workers.abort()  # those that are slow to start are not waited for
            self.close()
            raise

    # What the batchers call ------------------------------------------------------------------

    @property
    def n_lanes(self) -> int:
        """Lanes of each worker."""
        return self._workers.n_lanes

    @property
    def specs(self) -> StepSpecs | None:
        """What a step consists of, ``None`` before the workers know."""
        return self._workers.specs

    @property
    def repeats(self) -> bool:
        """Whether workers may be replaced that have begun something."""
        return self._workers.repeats

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
            self._poll(0.0)
            if not blocking and not self._is_settled(request):
                self._workers.look_for_hang(self._busy())
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
        self._poll(0.0)
        if request.block is None:
            return 0, request.n_rows
        # Of a death between an episode's end and the note of it, both runs are counted.
        n_finished = int(request.block.arrays.control["n_finished"].sum())
        return min(n_finished, request.n_rows), request.n_rows

    def pack(self, value: Any) -> Packed:
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

    def update(self, info: Any) -> None:
        """Let requests that are made from now on run with agents that were updated with this."""
        self.policy = Policy(self.policy.version + 1, self.pack(info))

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
        """What the workers are doing, and with ``in_process`` this process."""
        return self._workers.stacks()

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
        for _, memory in self._kept_for_successors():
            memory.close_fd()
        if self._blocks is not None:
            self._blocks.close()
        self._sent.clear()
        self._queued.clear()
        self._pending.clear()

    def _kept_for_successors(self) -> list[Packed]:
        packed = [self.policy.packed, self._workers.infos]
        for request in (*self._sent, *self._queued):
            packed += request.parcels
        return [each for each in packed if each is not None]

    # Starting --------------------------------------------------------------------------------

    def _make_blocks(self) -> None:
        """Lay out the blocks, once the workers know what a step consists of."""
        if self.specs is not None:
            self._blocks = BlockPool(self._make_layout(self.specs), self._workers.allocate)

    # Sending ---------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Send queued requests as far as slots allow."""
        if self._workers.fatal is not None:
            return
        if self._queued and self._blocks is None:
            if not self._workers.is_probing:
                self._workers.probe(self.pack((*self._queued[0].infos, ())))
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
        if request.needs_parcel:
            request.packed = self.pack(request.contents(0, is_successor=False))

    def _send(self, request: Request, gone: list[int]) -> None:
        """Send a request to all workers that are there."""
        request.remaining.update(range(self._workers.n_workers))
        self._sent.append(request)
        for worker in self._workers.ready:
            self._send_to(worker, request, gone)
        if not self._workers.repeats:  # no successor will need what all of them have now
            request.running_block.memory.close_fd()
            for _, memory in request.parcels:
                memory.close_fd()

    def _send_to(self, worker: int, request: Request, gone: list[int]) -> None:
        """Send a request to one worker, after the policy and the block if it lacks them."""
        block, send = request.running_block, self._workers.send
        version, update = request.policy
        if update is not None and self._sent_versions.get(worker) != version:
            self._sent_versions[worker] = version
            send(worker, Update(update[0]), update[1])
        if gone or worker not in block.mapped_by:
            is_new = worker not in block.mapped_by
            block.mapped_by.add(worker)
            message = MapBlock(block.number, block.layout, gone)
            send(worker, message, block.memory if is_new else None)
        parcel, memory = request.packed or (None, None)
        if worker in self._successors:
            del self._successors[worker]
            contents = request.contents(worker, is_successor=True)
            if contents[-1]:
                parcel, memory = self.pack(contents)
        send(worker, request.message(worker, parcel), memory)

    # Receiving -------------------------------------------------------------------------------

    def take(self, worker: int, message: Message) -> None:
        """Take a worker's message."""
        if isinstance(message, RequestDone):
            self._workers.progressed(worker)
            self._note_done(worker, message.request)
        elif isinstance(message, ChunksDone):
            self._workers.progressed(worker)
            request = self._find(message.request)
            if request is not None:
                slots = [] if request.error else request.empty_slots(worker, message.chunks)
                self._workers.send(worker, Credit(message.request, slots))
        elif isinstance(message, Failed) and message.request is not None:
            if self._repeats_env_errors and isinstance(message.error, EnvError):
                self._workers.note_last_words(worker, self._crash_files.with_file(message.error))
            else:
                self._note_failure(message.request, message.error)

    def _note_done(self, worker: int, number: int) -> None:
        request = self._find(number)
        if request is None:
            return
        request.remaining.discard(worker)
        if not request.remaining:
            self._sent.remove(request)
            request.drop_parcels()
            if request not in self._pending:
                self._release(request)

    def _note_failure(self, number: int, error: WorkerError) -> None:
        request = self._find(number)
        if request is not None and request.error is None:
            request.error = self._crash_files.with_file(error)
            self._cancel(request)

    def lost(self, worker: int, failure: WorkerError | None) -> None:
        """Take back what a worker had begun, for its successor."""
        self._successors[worker] = failure
        self._sent_versions.pop(worker, None)
        if self._blocks is not None:
            self._blocks.forget_worker(worker)
        with self._workers.claims_locked() as lock:
            for request in [other for other in self._sent if worker in other.remaining]:
                if not request.error and not request.can_be_repeated():
                    request.error = failure or UsageError("a worker was replaced in its midst")
                    self._cancel(request)
                if not request.give_back(worker, lock) or request.is_cancelled:
                    self._note_done(worker, request.number)

    def returned(self, worker: int) -> None:
        """Give a successor what there is to do."""
        for request in [other for other in self._sent if worker in other.remaining]:
            self._send_to(worker, request, [])

    def n_finished(self, worker: int) -> int:
        """Episodes that a worker has finished in the requests that are running."""
        counts = [r.running_block.arrays.control["n_finished"][worker] for r in self._sent]
        return int(sum(counts))

    def where(self, worker: int) -> Where:
        """What a worker is doing, as far as shared memory tells."""
        for request in self._sent:
            if worker not in request.remaining:
                continue
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
            step = int(layout.steps_in_slot(control, worker)[lane])
            step += int(control["steps_before"][worker, lane])
            return Where(worker, lane, row, step, request.seed_of(row), env_info or None)
        return Where(worker)

    def reported(self) -> None:
        """Begin, now that the workers have seen the first request's infos."""
        try:
            error = self._workers.agree()
            self._make_blocks()
            if error is not None:
                raise error
        except RlpoolError as error:
            self._fail_queued(self._crash_files.with_file(error))
        self._advance()

    def _fail_queued(self, error: RlpoolError) -> None:
        """Fail the request that was to run next: its infos did not even give the keys."""
        if self._queued:
            self._queued.popleft().error = error

    # Waiting ---------------------------------------------------------------------------------

    def _is_settled(self, request: Request) -> bool:
        return request.is_complete or request.error is not None or self._workers.fatal is not None

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
            self._poll(self._workers.patience_s)
            if not is_over():
                self._workers.look_for_hang(self._busy())

    def _busy(self) -> set[int]:
        """Workers that have something to do.

        Also with a request that was given up: who hangs in it keeps the slots of the next.
        """
        return {worker for request in self._sent for worker in request.remaining}

    # Ending a request ------------------------------------------------------------------------

    def _find(self, number: int) -> Request | None:
        return next((request for request in self._sent if request.number == number), None)

    def _cancel(self, request: Request) -> None:
        """Stop a running request's episodes; waiting workers are woken to see it."""
        request.running_block.arrays.control["cancelled"][0] = 1
        for worker in self._workers.ready:
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


def _clear(control: Mapping[str, Array]) -> None:
    """Begin the bookkeeping of a request in a block that was used before."""
    for name in ("length", "whole", "claim", "pending", "n_finished", "cancelled"):
        control[name][:] = 0
    control["cursor"][:] = range(len(control["cursor"]))
    control["running"][:] = -1
