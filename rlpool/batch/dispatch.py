"""The caller's side of collecting: a queue of requests, their blocks, their workers, their results.

A request is queued until its slots fit into what is in flight, then it runs in every worker, until
each is done with it and its result goes to the user. If it fails or is given up, its block is used
again once every worker is done with it.

A worker that is gone still owes its part of the requests that run. Its successor is told about
their blocks, the policy that each began with, and the requests, which say what is left to do.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlpool.batch.agreement import Agreement
from rlpool.batch.local_worker import LocalWorker
from rlpool.batch.messages import (
    BeginsAgain,
    ChunksDone,
    Credit,
    MapBlock,
    Report,
    Setup,
    Update,
)
from rlpool.batch.request_queue import RequestQueue
from rlpool.batch.requests import Policy, Request
from rlpool.batch.worker import main
from rlpool.data.storage import Memory
from rlpool.errors import RlpoolError, SpecError, UsageError, Where, WorkerError
from rlpool.observe.control import MAX_REQUESTS, Word
from rlpool.observe.stats import StatsReader
from rlpool.record.failures import DEBUG_HINT, LOCAL_HINT
from rlpool.record.tape import Tape
from rlpool.slots.blocks import Block, BlockPool, Layout, StepSpecs
from rlpool.workers.failure_policy import FailurePolicy
from rlpool.workers.payload import Packed, pack
from rlpool.workers.sharing import Shared
from rlpool.workers.wire import Done, Failed, Message
from rlpool.workers.workers import Workers

_LOG = logging.getLogger("rlpool")

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


class Dispatcher(RequestQueue):
    """Sends requests to workers and collects their results, in order.

    Args:
        n_workers: Number of worker processes, 0 for one worker in this process.
        root: Root of all seeds.
        functions: ``(create_env, env_args, create_agent, agent_args, agent_rows)``, a
            ``Parcel`` if there are worker processes.
        make_layout: Makes the blocks' layout once the workers know their keys, and refuses one
            that is larger than the machine.
        policy: What happens when workers fail.
        timeout_s: Seconds without progress after which a worker counts as hanging, ``None`` for
            never.
        owner_name: What advice calls the class that does the same in the caller's process.
        n_before: Workers on other machines whose numbers come first.

    Attributes:
        repeats: Whether workers that have begun something may be replaced.
        restarts: How many were replaced because they failed, and why.

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
        owner_name: str,
        n_before: int = 0,
    ) -> None:
        super().__init__()
        self.runs_here = n_workers == 0
        self.repeats = n_workers > 0 and policy.may_restart
        self._make_layout = make_layout
        self._owner_pid = os.getpid()
        self._policy = policy
        self._repeats_env_errors = policy.truncates or (
            n_workers > 0 and policy.restarts_on_env_errors
        )
        self._is_undisturbed = True  # see Request.is_reproducible
        self._failing: dict[int, int] = {}  # worker: the request in which its environment raised
        self._sent = {worker: _Sent() for worker in range(n_workers or 1)}
        self._probing: Request | None = None  # whose infos the workers are probed with
        self._functions: Memory | None = None
        self._shared = Shared()
        if n_workers:
            functions, self._shared = functions
            if len(functions) > _LARGE_BYTES:
                self._functions = Memory.shared(len(functions), "rlpool-setup")
                self._functions.root()[:] = memoryview(functions)
                functions = None
        hint = f"{DEBUG_HINT}: {owner_name}(..., n_workers=0)" if n_workers else LOCAL_HINT
        self._setup = Setup(functions, hint, in_process=not n_workers)
        self._processes: Workers | LocalWorker
        if n_workers:
            runs = [partial(main, self._shared)] * n_workers
            self._processes = Workers(runs, root, policy, timeout_s, self, hint, n_before)
        else:
            self._processes = LocalWorker(root, self, policy)
        self._start()

    def _start(self) -> None:
        """Start the workers and wait until they are ready."""
        self.control = self._control = self._processes.control
        self.restarts = self._processes.restarts
        self.deliver_logs = self._processes.deliver_logs
        self.read_stats = StatsReader(self._control).read
        self._agreement = Agreement(self._processes)
        try:
            self._processes.start()
            if not self.repeats:
                self._forget_setup()
            self._agree_at_start()
        except BaseException:
            self._processes.abort()  # those that are slow to start are not waited for
            self.close()
            raise

    # The queue's hooks -----------------------------------------------------------------------

    @property
    def fatal(self) -> RlpoolError | None:
        """Why nothing works any more."""
        return self._processes.fatal

    def wait_until(
        self, is_over: Callable[[], bool], every_s: float = math.inf, until_s: float = math.inf
    ) -> None:
        """Handle messages until a condition holds, and look for workers that hang."""
        self._processes.wait_until(is_over, every_s, until_s)

    def fileno(self) -> int:
        """See ``RequestQueue.fileno``."""
        return self._processes.fileno()

    @property
    def patience_s(self) -> float:
        """See ``RequestQueue.patience_s``."""
        return self._processes.patience_s

    def look(self) -> None:
        """Handle the messages that have arrived, and look for workers that hang."""
        self._processes.poll(0.0)
        self._processes.look_for_hang()

    @property
    def step(self) -> StepSpecs | None:
        """What a step consists of, ``None`` before that is known."""
        return self._agreement.specs

    @property
    def records(self) -> bool:
        """See ``RequestQueue.records``."""
        return not self.runs_here

    @property
    def tapes(self) -> Callable[[], dict[int, Tape]]:
        """See ``RequestQueue.tapes``."""
        return self._processes.tapes if isinstance(self._processes, LocalWorker) else super().tapes

    def n_finished(self, request: Request) -> int:
        """See ``RequestQueue.n_finished``."""
        return request.n_rows if request.is_complete else request.n_finished(self._control)

    def give_up(self) -> None:
        """Let the workers stop what they run; nobody is told."""
        if os.getpid() == self._owner_pid:
            self._cancel()

    def _abort(self) -> None:
        self._processes.abort()

    def _forget_setup(self) -> None:
        """Keep nothing of what a worker is started with."""
        self._shared.close()
        if self._functions is not None:
            self._functions.close_fd()

    def _cancel(self) -> None:
        """Let the workers stop all that they run."""
        for request in self.running:
            self._give_up(request)

    def _stop(self, request: Request) -> None:
        self._give_up(request)
        self._is_undisturbed = False

    def _give_up(self, request: Request) -> None:
        request.cancel()
        self._control.request_stops(request.number)

    def close(self) -> None:
        """Stop what runs and end the workers. May be repeated, as all that it calls."""
        self.is_closed = True
        if os.getpid() != self._owner_pid:
            return  # a forked copy: workers, pipes and blocks belong to the original process
        # For a get() that a signal handler or another thread interrupts by closing.
        self._processes.fail(UsageError("the batcher was closed meanwhile"))
        self._cancel()
        self._processes.close()
        self._forget_setup()
        if self._agreement.infos is not None:
            self._agreement.infos.memory.close_fd()
        if self.policy.packed is not None:
            self.policy.packed.memory.close_fd()
        for request in (*self.running, *self._queued):
            request.close_payloads()
        if self._blocks is not None:
            self._blocks.close()
        self.running.clear()
        self._queued.clear()
        self.pending.clear()

    # Starting and agreeing -------------------------------------------------------------------

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

    def _note_probed(self) -> None:
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
            probing.error = problem
        self._advance()

    def _make_blocks(self) -> None:
        if self._agreement.specs is not None:
            layout = self._make_layout(self._agreement.specs)
            self._blocks = BlockPool(layout, self._make_memory)

    def _make_memory(self, n_bytes: int) -> Memory:
        return Memory.local(n_bytes) if self.runs_here else Memory.shared(n_bytes)

    # Sending ---------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Send queued requests as far as slots allow."""
        if self.fatal is not None:
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
            wanted = request.slots_wanted(n_slots - self._n_slots_used(), n_slots)
            if not wanted or len(self.running) >= MAX_REQUESTS:
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
        self._check_successors(request)
        request.check(blocks.layout)
        request.block = blocks.take()
        if any(request.infos):
            request.packed = self._pack((*request.infos, {}))

    def _check_successors(self, request: Request) -> None:
        """Refuse a request if it goes on with what a worker has done that was replaced.

        Raises:
            WorkerError: Why it was replaced.
        """
        replaces = {n: sent.replaces for n, sent in self._sent.items() if sent.is_successor}
        if replaces:
            self._hand_over_tapes(request)
        if replaces and not request.can_be_repeated():
            raise next(filter(None, replaces.values()), None) or _cannot_go_on(min(replaces))

    def _hand_over_tapes(self, request: Request) -> None:
        """Let a window go on from what a worker in this process has kept of its lanes."""
        specs = self._agreement.specs
        if self.runs_here and specs is not None:
            request.go_on_from(self.tapes(), specs)

    def resume(self) -> None:
        """Treat all workers as successors of some that had begun the episodes of their lanes."""
        for sent in self._sent.values():
            sent.is_successor = True

    def _send(self, request: Request, gone: list[int]) -> None:
        """Send a request to all workers that take part and are ready.

        Args:
            request: The request, which has its block.
            gone: Blocks that they may unmap.
        """
        request.remaining.update(request.takers(self._processes.n_workers))
        request.tells_failures = self._policy.restarts_on_env_errors
        self.running.append(request)
        self._control.request_begins(request.number, request.n_rows)
        for worker in self._processes.up:
            if worker in request.remaining:
                self._send_to(worker, request, gone)
            elif gone:
                self._map(worker, request.running_block, gone)
        # Neither a successor nor a worker that was left out will need what all of them have now.
        all_take_part = len(request.remaining) == self._processes.n_workers
        if all_take_part and not self.repeats:
            request.running_block.memory.close_fd()
            request.close_payloads()

    def _send_to(self, worker: int, request: Request, gone: list[int]) -> None:
        """Send a request to one worker, after the policy and the block if it lacks them."""
        block, sent, send = request.running_block, self._sent[worker], self._processes.send
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
        self._processes.send(worker, message, block.memory if is_new else None)

    def updated(self, info: Any) -> Policy:
        """The ``policy`` of agents that were updated with this."""
        return Policy(self.policy.version + 1, self._pack(info))

    def _pack(self, value: Any) -> Packed:
        """Put an object where all workers can read it.

        Raises:
            SpecError: If there is no memory or no descriptor for it.
        """
        return pack(value, self.allocate)

    def allocate(self, n_bytes: int) -> Memory:
        """Memory that all workers can map.

        Raises:
            SpecError: If there is none.
        """
        try:
            return self._make_memory(n_bytes)
        except (OSError, RuntimeError, MemoryError) as error:
            raise SpecError(
                f"there is no memory to send {n_bytes} bytes: {error}",
                fix="drop results that are no longer needed; if file descriptors are missing, "
                "raise their limit (ulimit -n)",
            ) from error

    # The workers' client ---------------------------------------------------------------------

    def setup(self, worker: int) -> tuple[Setup, Memory | None]:
        """What a worker has to create."""
        return self._setup, self._functions

    def brief(self, worker: int, report: Report) -> None:
        """Tell a worker that has its environments what there is to do."""
        if self._agreement.take_first(worker, report):
            self._note_probed()
        for request in self._owed_by(worker):
            self._send_to(worker, request, [])

    def take(self, worker: int, message: Message) -> None:
        """Take a worker's message."""
        if isinstance(message, Done):
            self.restarts.note_success(worker)
            self._note_done(worker, message.command)
        elif isinstance(message, ChunksDone):
            self.restarts.note_success(worker)
            request = self._find(message.number)
            if request is not None:
                # Answered in any case: the worker may be waiting, and has to see a cancellation.
                slots = [] if request.error else request.empty_slots(message.chunks)
                self._processes.send(worker, Credit(message.number, slots))
        elif isinstance(message, BeginsAgain):
            request = self._find(message.number)
            if request is not None:
                request.drop_chunks([message.episode])
        elif isinstance(message, Report):
            if self._agreement.take(worker, message):
                self._note_probed()
        elif isinstance(message, Failed) and message.command is not None:
            if self._repeats_env_errors and message.error.can_be_repeated:
                self._failing[worker] = message.command
                self._processes.expect_end(worker, message.error)
            else:
                self._note_failure(message.command, message.error)

    def _note_done(self, worker: int, number: int) -> None:
        request = self._find(number)
        if request is None:
            return
        request.remaining.discard(worker)
        if not request.remaining:
            request.is_reproducible = self._is_undisturbed
            self.running.remove(request)
            self._control.request_ends(request.number)
            request.packed = None  # no worker will read it again
            self._over(request)

    def _note_failure(self, number: int, error: WorkerError) -> None:
        request = self._find(number)
        if request is not None and request.error is None:
            request.error = error
            self._stop(request)

    def lost(self, worker: int, failure: WorkerError | None) -> None:
        """Take back what a worker had begun, for its successor."""
        self._sent[worker] = _Sent(replaces=failure, is_successor=True)
        self._agreement.forget(worker)
        self._is_undisturbed = False
        for request in self._owed_by(worker):
            self._hand_over_tapes(request)
            if not request.error and not request.can_be_repeated():
                request.error = failure or _cannot_go_on(worker)
                self._stop(request)
            if request.running_block.layout.step.resets_together:
                self._control.forget_finished(request.number, worker)
            if not request.give_back(worker) or request.error:
                self._note_done(worker, request.number)

    def blames(self, worker: int, failure: WorkerError) -> int | None:
        """Whether an episode will not be run again that has failed; see ``Client.blames``."""
        where, number = failure.where, self._failing.pop(worker, None)
        owed = [
            request
            for request in self._owed_by(worker)
            if number == request.number or (not number and where.lane in request.lanes_in(worker))
        ]
        if not owed or owed[0].running_block.layout.step.resets_together:
            return None
        request = owed[0]
        self._hand_over_tapes(request)
        n = request.note_failure(worker, where, failure)
        if not self._policy.gives_up(failure, n):
            return None
        if self._policy.restarts_on_env_errors:
            request.give_up(where.row or 0, failure)
        else:
            self._note_failure(request.number, failure)
        return n - 1

    @property
    def n_suspected(self) -> int:
        """See ``Client``."""
        if self._policy.max_episode_restarts is None:
            return 0
        return sum(request.n_suspected for request in self.running)

    def busy(self) -> Collection[int]:
        """Workers that have something to do.

        Requests that were given up count as well: a worker that hangs in one keeps its slots.
        """
        return {worker for request in self.running for worker in request.remaining}

    def where(self, worker: int) -> Where:
        """What a worker is doing, as far as shared memory tells."""
        place = self._place(worker)
        return Where(worker) if place is None else place[0].where(worker, place[1])

    def episode_in(self, worker: int) -> dict[str, Any]:
        """See ``Client``."""
        place = self._place(worker)
        if place is None:
            return {}
        is_in_use = place[1] == self._control.lane_in_use(worker)
        is_stepping = is_in_use and self._control.rows[worker, Word.ENV_NS] < 0
        return place[0].episode_in(worker, place[1], is_stepping=bool(is_stepping))

    def _place(self, worker: int) -> tuple[Request, int] | None:
        """The request and the lane that a worker ran last, ``None`` if it runs nothing."""
        last = self._control.lane_in_use(worker)
        owed = self._owed_by(worker)
        places = [(request, lane) for request in owed for lane in request.lanes_in(worker)]
        return min(places, key=lambda place: place[1] != last, default=None)

    def _find(self, number: int) -> Request | None:
        return next((request for request in self.running if request.number == number), None)

    def _owed_by(self, worker: int) -> list[Request]:
        return [request for request in self.running if worker in request.remaining]


def _cannot_go_on(worker: int) -> WorkerError:
    """The error for episodes in the middle of which a worker was replaced for its age."""
    what = f"worker {worker} was replaced, and what its lanes have done so far is not known"
    fix = "call reset(); an agent that needs its history cannot go on in another worker"
    return WorkerError(what, where=Where(worker=worker), fix=fix)
