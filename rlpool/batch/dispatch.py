"""The caller's side of collecting: requests, their blocks, and the workers' messages about them.

A request is queued until its slots fit into what is in flight, then it runs in every worker, until
each is done with it and its result goes to the user. If it fails or is given up, its block is used
again once every worker is done with it.

A worker that is gone still owes its part of the requests that run. Its successor is told about
their blocks, the policy that each began with, and the requests, which say what is left to do.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rlpool.batch.agreement import Agreement
from rlpool.batch.local_worker import LocalWorker
from rlpool.batch.messages import (
    BeginsAgain,
    ChunksDone,
    Credit,
    MapBlock,
    Probed,
    Report,
    Setup,
    Update,
)
from rlpool.batch.requests import Policy, Request
from rlpool.batch.worker import main
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import EnvError, RlpoolError, SpecError, UsageError, Where, WorkerError
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.memory.storage import Memory
from rlpool.record.capsule_files import CrashDir, CrashFiles
from rlpool.record.failures import DEBUG_HINT
from rlpool.slots.blocks import Block, BlockPool, Layout, StepSpecs
from rlpool.workers.failure_policy import FailurePolicy
from rlpool.workers.lifecycle import Workers
from rlpool.workers.payload import Packed, pack
from rlpool.workers.stack_dumps import note_source
from rlpool.workers.stacks import described
from rlpool.workers.wire import Done, Failed, Message

_LOG = logging.getLogger("rlpool")

_MAX_RUNNING = 8
"""Requests that workers may have at once: enough to keep them busy."""

_LARGE_BYTES = 2**14
"""Larger pickled functions travel in shared memory, once for all workers."""

LayoutMaker = Callable[[StepSpecs], Layout]


@dataclass
class _Sent:
    """What one worker process was sent.

    Attributes:
        policy: Version of the last policy.
        blocks: Numbers of the blocks that it has mapped.
        replaces: What ended the worker that it replaces.
        is_successor: Whether it replaces one and was sent no request yet.
    """

    policy: int = 0
    blocks: set[int] = field(default_factory=set)
    replaces: WorkerError | None = None
    is_successor: bool = False


class Dispatcher:
    """Sends requests to workers and collects their results, in order.

    Args:
        n_workers: Number of worker processes, 0 for one worker in this process.
        root: Root of all seeds.
        functions: ``(create_env, env_args, create_agent, agent_args)``, pickled if there are
            worker processes.
        make_layout: Makes the blocks' layout once the workers know their keys, and refuses one
            that is larger than the machine.
        policy: What happens when workers fail.
        timeout_s: Seconds without progress after which a worker counts as hanging, ``None`` for
            never.
        crash_dir: Where the capsules of failures are written, ``None`` for nowhere.

    Attributes:
        policy: What new requests run with. Each worker is sent it with the first request that
            needs it, whatever happened to those before.
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
        functions: Any,
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
        self._running: list[Request] = []  # sent, and not yet done in every worker
        self._pending: deque[Request] = deque()  # not yet handed to the user
        self._probing: Request | None = None  # whose infos the workers are probed with
        self._blocks: BlockPool | None = None
        self.n_lanes = 0
        self.policy = Policy()
        self._strays: set[int] = set()  # workers whose streams are not where they should be
        self._sent = {worker: _Sent() for worker in range(n_workers or 1)}
        self._owner_pid = os.getpid()
        self._n_requests = 0
        self.is_closed = False
        self._functions: Memory | None = None
        if n_workers and len(functions) > _LARGE_BYTES:
            self._functions = Memory.shared(len(functions), "rlpool-setup")
            self._functions.root()[:] = memoryview(functions)
            functions = None
        self._setup = Setup(functions, in_process=not n_workers)
        self._workers: Workers | LocalWorker
        if n_workers:
            self._workers = Workers([main] * n_workers, root, policy, timeout_s, self, DEBUG_HINT)
            note_source(self)
        else:
            self._workers = LocalWorker(root, self)
        self._agreement = Agreement(self._workers)
        self.deliver_logs = self._workers.deliver_logs
        try:
            self._workers.start()
            if self._functions is not None and not self.repeats:
                self._functions.close_fd()
            self._agree_at_start()
        except BaseException:
            self._workers.abort()  # those that are slow to start are not waited for
            self.close()
            raise

    # What the batchers call ------------------------------------------------------------------

    @property
    def repeats(self) -> bool:
        """Whether workers that have begun something may be replaced."""
        return self._workers.is_repeatable

    @property
    def n_pending(self) -> int:
        """Requests whose results were not handed out yet."""
        return len(self._pending)

    def next_number(self) -> int:
        """A number for a new request."""
        self._n_requests += 1
        return self._n_requests

    def check(self, request: Request) -> None:
        """Refuse what workers cannot run, as far as it is known what they can.

        Raises:
            SpecError: See ``Request.check``.
        """
        if self._blocks is not None:
            request.check(self._blocks.layout)

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
        """The oldest request, finished; ``None`` if it is not and ``blocking`` is false.

        It stays the oldest until ``hand_out``.

        Raises:
            RlpoolError: If it failed; it is dropped then.
        """
        if not self._pending:
            self._workers.refuse_if_dead()
            raise UsageError("nothing is pending", fix="call execute() before get()")
        request = self._pending[0]
        if request.trajectories is None:
            self._workers.poll(0.0)
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
            request.release()
            self._advance()
            return
        if request in self._pending:  # close() has dropped it already
            self._pending.remove(request)
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
        self._workers.poll(0.0)
        self._workers.look_for_hang()
        error = request.error or self._workers.fatal
        if error is not None and not request.is_complete:
            raise error
        if request.block is None:
            return 0, request.n_rows
        # An episode whose worker died just after its end is counted again when it is repeated.
        n_finished = int(request.block.arrays.control["n_finished"].sum())
        return min(n_finished, request.n_rows), request.n_rows

    def update(self, info: Any) -> None:
        """Let later requests run with agents that were updated with this."""
        self.policy = Policy(self.policy.version + 1, self._pack(info))

    def give_up(self) -> None:
        """Let the workers stop what they run; nobody is told."""
        if os.getpid() == self._owner_pid:
            for request in self._running:
                request.cancel()

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
            return  # a forked copy: workers, pipes and blocks belong to the original process
        # For a get() that a signal handler or another thread interrupts by closing.
        self._workers.fail(UsageError("the batcher was closed meanwhile"))
        for request in self._running:
            request.cancel()
        self._workers.close()
        packed = [self.policy.packed, self._agreement.infos]
        for request in (*self._running, *self._queued):
            packed += request.payloads
        for memory in (self._functions, *(each.memory for each in packed if each)):
            if memory is not None:
                memory.close_fd()
        if self._blocks is not None:
            self._blocks.close()
        self._running.clear()
        self._queued.clear()
        self._pending.clear()

    # Starting and agreeing -------------------------------------------------------------------

    def setup(self, worker: int) -> tuple[Setup, Memory | None]:
        """What a worker has to create."""
        return self._setup, self._functions

    def brief(self, worker: int, report: Report) -> None:
        """Tell a worker that has its environments what there is to do."""
        if self._agreement.take_first(worker, report):
            self._begin()
        for request in self._owed_by(worker):
            self._send_to(worker, request, [])

    def _agree_at_start(self) -> None:
        """Compare what the workers report, unless they need infos to find out their keys.

        Raises:
            RlpoolError: If they disagree, or blocks are larger than the machine.
        """
        self.n_lanes = self._agreement.n_lanes
        problem = self._agreement.conclude()
        if isinstance(problem, WorkerError):
            _LOG.debug("keys are unknown until the first execute: %s", problem)
        elif problem is not None:
            raise problem
        else:
            self._make_blocks()

    def _begin(self) -> None:
        """Go on, now that all workers have seen the infos of the first request."""
        problem = self._agreement.conclude()
        try:
            self._make_blocks()
        except SpecError as error:
            problem = error
            self._agreement.specs = self._agreement.infos = None  # the next request asks again
        probing = self._probing
        if problem is not None and probing in self._queued and probing is not None:
            self._queued.remove(probing)  # unless it was given up
            probing.error = self._crash_files.with_file(problem)
        self._advance()

    def _make_blocks(self) -> None:
        if self._agreement.specs is not None:
            layout = self._make_layout(self._agreement.specs)
            self._blocks = BlockPool(layout, self._workers.allocate)

    # Sending ---------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Send queued requests as far as slots allow."""
        if self._workers.fatal is not None:
            return
        while self._queued and self._blocks is None and self._agreement.infos is None:
            self._probing = request = self._queued[0]
            try:
                self._agreement.probe(self._pack((*request.infos, {})))
            except SpecError as error:
                self._queued.popleft().error = error
        while self._queued and self._blocks is not None:
            request = self._queued[0]
            n_slots = self._blocks.layout.n_slots
            n_used = sum(other.n_slots for other in {*self._running, *self._pending})
            wanted = request.slots_wanted(n_slots - n_used, n_slots)
            if not wanted or len(self._running) >= _MAX_RUNNING:
                return
            self._queued.popleft()
            try:
                self._prepare(request, self._blocks)
            except RlpoolError as error:
                request.error = error
            else:
                request.n_slots = wanted
                self._send(request, self._blocks.forget_surplus())

    def _prepare(self, request: Request, blocks: BlockPool) -> None:
        """Do all that may fail before anything is sent.

        Raises:
            RlpoolError: If it did; the request is not sent.
        """
        successors = {n: sent.replaces for n, sent in self._sent.items() if sent.is_successor}
        if successors and not request.can_be_repeated():
            failure = next(filter(None, successors.values()), None)
            raise failure or _cannot_go_on(min(successors))
        request.check(blocks.layout)
        request.block = blocks.take()
        if any(request.infos):
            request.packed = self._pack((*request.infos, {}))

    def _send(self, request: Request, gone: list[int]) -> None:
        """Send a request to all workers that take part and are ready."""
        request.remaining.update(request.takers(self._workers.n_workers))
        self._running.append(request)
        for worker in self._workers.up:
            if worker in request.remaining:
                self._send_to(worker, request, gone)
            elif gone:
                self._map(worker, request.running_block, gone)
        # Neither a successor nor a worker that was left out will need what all of them have now.
        if not self.repeats and len(request.remaining) == self._workers.n_workers:
            request.running_block.memory.close_fd()
            for packed in request.payloads:
                packed.memory.close_fd()

    def _send_to(self, worker: int, request: Request, gone: list[int]) -> None:
        """Send a request to one worker, after the policy and the block if it lacks them."""
        block, sent, send = request.running_block, self._sent[worker], self._workers.send
        request.strays.update({worker} & self._strays)
        version, update = request.policy
        if update is not None and sent.policy != version:
            sent.policy = version
            send(worker, Update(update.payload), update.memory)
        if gone or block.number not in sent.blocks:
            self._map(worker, block, gone)
        payload, memory = request.packed or (None, None)
        if sent.is_successor:
            sent.is_successor = False
            tapes = request.tapes_for(worker)
            if tapes:
                payload, memory = self._pack((*request.infos, tapes))
        send(worker, request.message(worker, payload), memory)

    def _map(self, worker: int, block: Block, gone: list[int]) -> None:
        """Let a worker forget blocks, and map this one if it takes part and lacks it."""
        known = self._sent[worker].blocks
        known.difference_update(gone)
        is_new = block.number not in known
        known.add(block.number)
        message = MapBlock(block.number, block.layout, gone)
        self._workers.send(worker, message, block.memory if is_new else None)

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
                fix="drop results that are no longer needed; if file descriptors are missing, "
                "raise their limit (ulimit -n)",
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
                # Answered in any case: the worker may be waiting, and has to see a cancellation.
                slots = [] if request.error else request.empty_slots(message.chunks)
                self._workers.send(worker, Credit(message.number, slots))
        elif isinstance(message, BeginsAgain):
            request = self._find(message.number)
            if request is not None:
                request.drop_chunks([message.episode])
        elif isinstance(message, Probed):
            if self._agreement.take(worker, message.report):
                self._begin()
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
            self._running.remove(request)
            request.drop_payloads()
            if request not in self._pending:
                request.release()
            self._advance()

    def _note_failure(self, number: int, error: WorkerError) -> None:
        request = self._find(number)
        if request is not None and request.error is None:
            request.error = self._crash_files.with_file(error)
            request.cancel()
            self._note_strays(request.remaining, "its episodes were cancelled")

    def _note_strays(self, workers: Iterable[int], why: str) -> None:
        """Note that unseeded environments are not where they would be in an undisturbed run."""
        if self._blocks is None or self._blocks.layout.step.seeding != "stream":
            return
        for worker in sorted(workers):
            if worker not in self._strays:
                _LOG.warning(
                    "worker %d: %s, and its environments cannot be seeded: its rows cannot be "
                    "reproduced from here on (info['reproducible'] is False)",
                    worker,
                    why,
                )
            self._strays.add(worker)
            for request in self._owed_by(worker):
                request.strays.add(worker)

    def lost(self, worker: int, failure: WorkerError | None) -> None:
        """Take back what a worker had begun, for its successor."""
        self._sent[worker] = _Sent(replaces=failure, is_successor=True)
        self._agreement.forget(worker)
        self._note_strays([worker], "it was replaced")
        for request in self._owed_by(worker):
            if not request.error and not request.can_be_repeated():
                request.error = failure or _cannot_go_on(worker)
                request.cancel()
            if not request.give_back(worker) or request.error:
                self._note_done(worker, request.number)

    def busy(self) -> Collection[int]:
        """Workers that have something to do.

        Requests that were given up count as well: a worker that hangs in one keeps its slots.
        """
        return {worker for request in self._running for worker in request.remaining}

    def where(self, worker: int) -> Where:
        """What a worker is doing, as far as shared memory tells."""
        place: tuple[Request, int] | None = None
        for request in self._owed_by(worker):
            lane = self._workers.lane_in_use(worker)
            lanes = (request.running_block.arrays.control["running"][worker] >= 0).nonzero()[0]
            if lane in lanes:
                place = request, lane
                break
            if len(lanes) and place is None:
                place = request, int(lanes[0])
        if place is None:
            return Where(worker)
        request, lane = place
        control, layout = request.running_block.arrays.control, request.running_block.layout
        row = int(control["running"][worker, lane])
        env_info = {key: array[row].tolist() for key, array in request.infos[1].items()}
        step = int(layout.steps_in_slot(control, worker)[lane])
        step += int(control["steps_before"][worker, lane])
        return Where(worker, lane, row, step, request.seed_of(row), env_info or None)

    # Ending a request ------------------------------------------------------------------------

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

    def _find(self, number: int) -> Request | None:
        return next((request for request in self._running if request.number == number), None)

    def _owed_by(self, worker: int) -> list[Request]:
        return [request for request in self._running if worker in request.remaining]

    def _forget(self, request: Request) -> None:
        """Give up a request; its block is used again when no worker writes into it any more."""
        if request in self._queued:
            self._queued.remove(request)
        if request in self._running:
            request.cancel()
            self._note_strays(request.remaining, "its episodes were cancelled")
        else:
            request.release()


def _cannot_go_on(worker: int) -> WorkerError:
    """The error for episodes in the middle of which a worker was replaced for its age."""
    what = f"worker {worker} was replaced, and what its lanes have done so far is not known"
    fix = "call reset(); an agent that needs its history cannot go on in another worker"
    return WorkerError(what, where=Where(worker=worker), fix=fix)
