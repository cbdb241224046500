"""The workers of a batcher: the requests that they run, what they are sent, what they report.

A worker that is gone still owes its part of the requests that run. Its successor is told about
their blocks, the policy that each began with, and the requests, which say what is left to do.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

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
from rlpool.batch.requests import Request
from rlpool.batch.worker import main
from rlpool.errors import SpecError, UsageError, Where, WorkerError
from rlpool.memory.sharing import Shared
from rlpool.memory.storage import Memory
from rlpool.record.capsule_files import CrashDir, CrashFiles
from rlpool.record.failures import DEBUG_HINT, LOCAL_HINT
from rlpool.slots.block_pool import Block
from rlpool.workers.failure_policy import FailurePolicy
from rlpool.workers.group import Workers
from rlpool.workers.payload import Packed, pack
from rlpool.workers.stack_dumps import stack_sources
from rlpool.workers.stacks import described
from rlpool.workers.wire import Done, Failed, Message

_LARGE_BYTES = 2**14
"""Larger pickled functions travel in shared memory, once for all workers."""


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


class Owner(Protocol):
    """Whose requests the workers run."""

    def over(self, request: Request) -> None:
        """Every worker is done with a request."""

    def probed(self) -> None:
        """Every worker has answered a probe."""


class RequestWorkers:
    """Worker processes, or one worker in this process, that run requests.

    Args:
        n_workers: Number of worker processes, 0 for one worker in this process.
        root: Root of all seeds.
        functions: ``(create_env, env_args, create_agent, agent_args, agent_rows)``, a
            ``Parcel`` if there are worker processes.
        policy: What happens when workers fail.
        timeout_s: Seconds without progress after which a worker counts as hanging, ``None`` for
            never.
        crash_dir: Where the capsules of failures are written, ``None`` for nowhere.
        owner: Is told what happens.
        owner_name: What advice calls it.
        n_before: Workers on other machines, see ``Place``.

    Attributes:
        processes: The workers.
        control: What they do.
        agreement: What a step consists of.
        crash_files: Where capsules are written.
        running: Requests that were sent, and are not yet done in every worker.
    """

    def __init__(
        self,
        n_workers: int,
        root: int,
        functions: Any,
        *,
        policy: FailurePolicy,
        timeout_s: float | None,
        crash_dir: CrashDir,
        owner: Owner,
        owner_name: str,
        n_before: int = 0,
    ) -> None:
        self.crash_files = CrashFiles(crash_dir)
        self.running: list[Request] = []
        self._owner = owner
        self._policy = policy
        self._repeats_env_errors = policy.truncates or (
            n_workers > 0 and policy.restarts_on_env_errors
        )
        self._is_undisturbed = True  # see Request.is_reproducible
        self._failing: dict[int, int] = {}  # worker: the request in which its environment raised
        self._sent = {worker: _Sent() for worker in range(n_workers or 1)}
        self._functions: Memory | None = None
        self._shared = Shared()
        if n_workers:
            functions, self._shared = functions
            if len(functions) > _LARGE_BYTES:
                self._functions = Memory.shared(len(functions), "rlpool-setup")
                self._functions.root()[:] = memoryview(functions)
                functions = None
        debug_hint = f"{DEBUG_HINT}: {owner_name}(..., n_workers=0)" if n_workers else LOCAL_HINT
        self._setup = Setup(functions, debug_hint, in_process=not n_workers)
        self.processes: Workers | LocalWorker
        if n_workers:
            runs = [partial(main, self._shared)] * n_workers
            self.processes = Workers(runs, root, policy, timeout_s, self, debug_hint, n_before)
            stack_sources.add(self)
        else:
            self.processes = LocalWorker(root, self, policy)
        self.control = self.processes.control
        self.agreement = Agreement(self.processes)

    def start(self) -> None:
        """Start them and wait until they are ready.

        Raises:
            RlpoolError: If one does not get ready.
        """
        self.processes.start()
        if not self.processes.is_repeatable:
            self._forget_setup()

    def _forget_setup(self) -> None:
        """Keep nothing of what a worker is started with."""
        self._shared.close()
        if self._functions is not None:
            self._functions.close_fd()

    def cancel(self) -> None:
        """Let the workers stop all that they run."""
        for request in self.running:
            self._give_up(request)

    def stop(self, request: Request) -> None:
        """Let the workers stop a request that they run."""
        self._give_up(request)
        self._is_undisturbed = False

    def _give_up(self, request: Request) -> None:
        request.cancel()
        self.control.request_stops(request.number)

    def close(self) -> None:
        """End the workers, whatever they run."""
        # For a get() that a signal handler or another thread interrupts by closing.
        self.processes.fail(UsageError("the batcher was closed meanwhile"))
        self.cancel()
        self.processes.close()
        self._forget_setup()
        if self.agreement.infos is not None:
            self.agreement.infos.memory.close_fd()
        for request in self.running:
            request.close_payloads()
        self.running.clear()

    # Sending ---------------------------------------------------------------------------------

    def check_successors(self, request: Request) -> None:
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
        specs = self.agreement.specs
        if isinstance(self.processes, LocalWorker) and specs is not None:
            request.go_on_from(self.processes.tapes(), specs)

    def resume(self) -> None:
        """Treat all workers as successors of some that had begun the episodes of their lanes."""
        for sent in self._sent.values():
            sent.is_successor = True

    def send(self, request: Request, gone: list[int]) -> None:
        """Send a request to all workers that take part and are ready.

        Args:
            request: The request, which has its block.
            gone: Blocks that they may unmap.
        """
        request.remaining.update(request.takers(self.processes.n_workers))
        request.tells_failures = self._policy.restarts_on_env_errors
        self.running.append(request)
        self.control.request_begins(request.number, request.n_rows)
        for worker in self.processes.up:
            if worker in request.remaining:
                self._send_to(worker, request, gone)
            elif gone:
                self._map(worker, request.running_block, gone)
        # Neither a successor nor a worker that was left out will need what all of them have now.
        all_take_part = len(request.remaining) == self.processes.n_workers
        if all_take_part and not self.processes.is_repeatable:
            request.running_block.memory.close_fd()
            request.close_payloads()

    def _send_to(self, worker: int, request: Request, gone: list[int]) -> None:
        """Send a request to one worker, after the policy and the block if it lacks them."""
        block, sent, send = request.running_block, self._sent[worker], self.processes.send
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
                payload, memory = self.pack((*request.infos, tapes))
        send(worker, request.message(worker, payload), memory)

    def _map(self, worker: int, block: Block, gone: list[int]) -> None:
        """Let a worker forget blocks, and map this one if it takes part and lacks it."""
        known = self._sent[worker].blocks
        known.difference_update(gone)
        is_new = block.number not in known
        known.add(block.number)
        message = MapBlock(block.number, block.layout, gone)
        self.processes.send(worker, message, block.memory if is_new else None)

    def pack(self, value: Any) -> Packed:
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
            return self.processes.allocate(n_bytes)
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
        if self.agreement.take_first(worker, report):
            self._owner.probed()
        for request in self._owed_by(worker):
            self._send_to(worker, request, [])

    def take(self, worker: int, message: Message) -> None:
        """Take a worker's message."""
        if isinstance(message, Done):
            self.processes.note_success(worker)
            self._note_done(worker, message.command)
        elif isinstance(message, ChunksDone):
            self.processes.note_success(worker)
            request = self._find(message.number)
            if request is not None:
                # Answered in any case: the worker may be waiting, and has to see a cancellation.
                slots = [] if request.error else request.empty_slots(message.chunks)
                self.processes.send(worker, Credit(message.number, slots))
        elif isinstance(message, BeginsAgain):
            request = self._find(message.number)
            if request is not None:
                request.drop_chunks([message.episode])
        elif isinstance(message, Probed):
            if self.agreement.take(worker, message.report):
                self._owner.probed()
        elif isinstance(message, Failed) and message.command is not None:
            if self._repeats_env_errors and message.error.can_be_repeated:
                self._failing[worker] = message.command
                self.processes.expect_end(worker, self.crash_files.with_file(message.error))
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
            self.control.request_ends(request.number)
            request.packed = None  # no worker will read it again
            self._owner.over(request)

    def _note_failure(self, number: int, error: WorkerError) -> None:
        request = self._find(number)
        if request is not None and request.error is None:
            request.error = self.crash_files.with_file(error)
            self.stop(request)

    def lost(self, worker: int, failure: WorkerError | None) -> None:
        """Take back what a worker had begun, for its successor."""
        self._sent[worker] = _Sent(replaces=failure, is_successor=True)
        self.agreement.forget(worker)
        self._is_undisturbed = False
        for request in self._owed_by(worker):
            self._hand_over_tapes(request)
            if not request.error and not request.can_be_repeated():
                request.error = failure or _cannot_go_on(worker)
                self.stop(request)
            if request.running_block.layout.step.resets_together:
                self.control.forget_finished(request.number, worker)
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
        told = self.crash_files.with_file(failure)
        if self._policy.restarts_on_env_errors:
            request.give_up(where.episode or 0, told)
        else:
            self._note_failure(request.number, told)
        return n - 1

    def busy(self) -> Collection[int]:
        """Workers that have something to do.

        Requests that were given up count as well: a worker that hangs in one keeps its slots.
        """
        return {worker for request in self.running for worker in request.remaining}

    def where(self, worker: int) -> Where:
        """What a worker is doing, as far as shared memory tells."""
        last = self.processes.lane_in_use(worker)
        owed = self._owed_by(worker)
        places = [(request, lane) for request in owed for lane in request.lanes_in(worker)]
        if not places:
            return Where(worker)
        request, lane = min(places, key=lambda place: place[1] != last)  # the first if none is
        return request.where(worker, lane)

    def _find(self, number: int) -> Request | None:
        return next((request for request in self.running if request.number == number), None)

    def _owed_by(self, worker: int) -> list[Request]:
        return [request for request in self.running if worker in request.remaining]

    # Stacks ----------------------------------------------------------------------------------

    def stacks(self) -> str:
        """What the workers are doing, or this process without any; a signal handler may ask."""
        return described(self.processes.stacks(), self.where)


def _cannot_go_on(worker: int) -> WorkerError:
    """The error for episodes in the middle of which a worker was replaced for its age."""
    what = f"worker {worker} was replaced, and what its lanes have done so far is not known"
    fix = "call reset(); an agent that needs its history cannot go on in another worker"
    return WorkerError(what, where=Where(worker=worker), fix=fix)
