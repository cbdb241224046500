"""The caller's side of collecting: requests, their blocks, their workers, their results.

A request is queued until its slots fit next to those in flight. It then runs in every worker until
each has finished its part, and its result is returned to the user. If it fails or is cancelled, its
block is reused once every worker has finished with it.

A worker that is gone still owes its part of the running requests. Its successor is sent their
blocks, the policy of each, and the requests, which include the unfinished episodes.
"""

from __future__ import annotations

import logging
import pickle
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlpool.batch.local_worker import LocalWorker
from rlpool.batch.messages import (
    ChunksDone,
    Credit,
    MapBlock,
    Probe,
    Recipe,
    Report,
    Update,
)
from rlpool.batch.plans import REPORTED, check_together
from rlpool.batch.requests import EpisodeRequest, Policy, Request
from rlpool.batch.worker import main
from rlpool.data.infos import Infos
from rlpool.data.storage import Memory
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import RlpoolError, SpecError, UsageError, Where, WorkerError
from rlpool.machine.pickling import why_not
from rlpool.observe.control import MAX_REQUESTS, Word
from rlpool.observe.stats import StatsReader
from rlpool.slots.blocks import BlockPool, Layout, StepSpecs
from rlpool.workers.crew import Crew
from rlpool.workers.failure_policy import FailurePolicy
from rlpool.workers.payload import Packed, pack
from rlpool.workers.wire import Done, Failed, Message, Ready

_LOG = logging.getLogger("rlpool")

_LONG_STEPS = 100_000
"""Steps after which an episode is unlikely to end by itself."""

_KEEP_STATE = "wrappers keep state across episodes, which seeds do not reproduce: %s"

_IS_LONG = "an episode has more than %d steps (evaluate(max_steps=...) truncates it)"

LayoutMaker = Callable[[StepSpecs], Layout]


@dataclass
class _Sent:
    """Record of the messages sent to one worker process.

    Attributes:
        policy: Version of the last policy.
        blocks: Numbers of the blocks it has mapped.
        replaces: Error of the worker that it replaces, until it is sent its first request.
        failing: Number of the request in which its environment raised, 0 for none.
    """

    policy: int = 0
    blocks: set[int] = field(default_factory=set)
    replaces: WorkerError | None = None
    failing: int = 0


class Dispatcher:
    """Sends requests to workers and collects their results, in order.

    Args:
        recipe: Start-up data of the workers; not closed here.
        root: Root of all seeds.
        make_layout: Makes the layout of the blocks once the keys are known, and refuses one that
            is larger than the machine's memory.
        policy: What to do when workers fail.
        timeout_s: Seconds without progress after which a worker counts as hung, ``None`` for never.

    Attributes:
        crew: The workers.
        running: Requests that were sent and still run somewhere, by number.
        pending: Requests whose results the user has not received.
        n_lanes: Lanes of each worker.
        environment: Description of the environments.
        is_closed: Whether ``close`` was called.
        show: Called when episodes that run in this process have ended, unless it is ``None``.

    Raises:
        WorkerStartupError, WorkerDiedError, WorkerTimeoutError: If a worker does not become ready.
        UsageError: If the caller's script lacks its ``__main__`` guard.
        SpecError: If workers disagree about their keys, shapes or dtypes, or blocks are larger
            than the machine.
    """

    def __init__(
        self,
        recipe: Recipe,
        root: int,
        *,
        make_layout: LayoutMaker,
        policy: FailurePolicy,
        timeout_s: float | None,
    ) -> None:
        n_workers = recipe.n_workers
        self._runs_here = n_workers == 0
        self._make_layout = make_layout
        self._policy = policy
        self._repeats_env_errors = policy.truncates or (
            n_workers > 0 and policy.restarts_on_env_errors
        )
        self._sent = {worker: _Sent() for worker in range(n_workers or 1)}
        self._reports: dict[int, Report] = {}
        # The request whose infos probe the workers, and those infos.
        self._probe: tuple[Request, Packed] | None = None
        self._queued: deque[Request] = deque()  # not sent yet
        self.running: dict[int, Request] = {}
        self.pending: deque[Request] = deque()
        self._blocks: BlockPool | None = None
        self._n_requests = 0
        self.n_lanes = 0
        self.environment: Mapping[str, Any] = {}
        self.is_closed = self._has_warned = False
        self.show: Callable[[], None] | None = None
        self.crew: Crew | LocalWorker
        if n_workers:
            runs = [(partial(main, recipe.shared), recipe.setup, recipe.memory)] * n_workers
            self.crew = Crew(runs, root, policy, timeout_s, self)
        else:
            self.crew = LocalWorker(recipe.setup, root, self, policy, self._notice)
        self._control = self.crew.control
        self.read_stats = StatsReader(self._control).read
        try:
            self.crew.start()
        except BaseException:
            self.close(at_once=True)  # does not wait for workers that start slowly
            raise

    # Called by the batchers ---------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request and send it if its slots are free.

        Raises:
            RlpoolError: If a worker died.
        """
        self.crew.refuse_if_dead()
        self.check(request.infos, request.n_rows, request.given_seeds)
        self._n_requests += 1
        request.number = self._n_requests
        self.pending.append(request)
        self._queued.append(request)
        self._advance()

    @property
    def failure(self) -> RlpoolError | None:
        """The error that prevents the oldest request from completing, if any."""
        fatal = self.crew.fatal
        if not self.pending:  # closed meanwhile
            return fatal
        request = self.pending[0]
        return None if request.is_complete else request.error or fatal

    def is_done(self) -> bool:
        """Whether the oldest request is complete or has failed."""
        if not self.pending or self.crew.fatal is not None:
            return True
        request = self.pending[0]
        return request.error is not None or request.is_complete

    def hand_out(self) -> tuple[TemporalDictTensor, dict[int, WorkerError]]:
        """Remove the oldest request; returns its result, and failures of its episodes by row.

        Raises:
            RlpoolError: If it failed.
        """
        if (failure := self.failure) is None:
            request = self.pending.popleft()
            result = request.result()
            request.release()
            self._advance()
            return result, request.failures
        if self.pending:
            request = self.pending.popleft()
            request.error = failure
            request.policy = Policy()  # the request and its error refer to each other for a while
            self._forget(request)
            self._advance()
        raise failure

    def drop_pending(self) -> None:
        """Drop all requests; their episodes stop."""
        while self.pending:
            request = self.pending.popleft()
            request.error = UsageError("the request was dropped")
            self._forget(request)

    def finished(self) -> tuple[int, int]:
        """Return finished and requested rows of the oldest request, as far as known here."""
        if not self.pending:
            return 0, 0
        request = self.pending[0]
        n_finished = request.n_rows if request.is_complete else request.n_finished(self._control)
        return min(n_finished, request.n_rows), request.n_rows

    def _notice(self) -> None:
        if self.show is not None:
            self.show()

    def close(self, at_once: bool = False) -> None:
        """Stop all requests and end the workers. Can be repeated, like everything it calls.

        Args:
            at_once: Whether to kill the workers, whatever they are doing.
        """
        self.is_closed = True
        if at_once:
            self.crew.abort()
        # For a get() that a signal handler or another thread interrupts by closing.
        closed = UsageError("the batcher was closed meanwhile")
        self.crew.fail(closed)
        for request in self.running.values():  # a worker that stops early has not completed it
            request.error = request.error or closed
            self._stop(request)
        self.crew.close()
        for request in (*self.running.values(), *self._queued):
            request.packed = None  # an error that the caller keeps may refer to the request
        if self._probe is not None:
            self._probe[1].memory.close_fd()
        if self._blocks is not None:
            self._blocks.close()
        self.running.clear()
        self._queued.clear()
        self.pending.clear()

    # Agreeing on the contents of a step ----------------------------------------------------------

    def _probe_with(self, request: Request) -> bool:
        """Let workers discover their keys with the first rows of one request at a time."""
        if self._probe is None:
            self._probe = request, packed((*request.infos, {}), self._runs_here)
            self._reports.clear()
            for worker in self.crew.up:
                self._send_probe(worker, *self._probe)
        return False

    def _send_probe(self, worker: int, request: Request, infos: Packed) -> None:
        asked = request.asked if isinstance(request, EpisodeRequest) else None
        self.crew.send(worker, Probe(asked, infos.payload), infos.memory)

    def _note_report(self, worker: int, report: Report) -> None:
        """Record a report; if it contradicts the agreed one, its worker or all workers end."""
        self._reports[worker] = report
        if self._blocks is None:
            if len(self._reports) == self.crew.n_workers:
                self._agree()
        elif report.specs == self._blocks.layout.step:
            return
        elif isinstance(report.error, WorkerError):
            self.crew.kill(worker, report.error)
        else:
            self.crew.fail(
                SpecError(
                    f"worker {worker} was restarted, and its steps are different: "
                    f"{report.error or report.specs}, before: {self._blocks.layout.step}",
                    fix="create_env and create_agent must always give the same keys and shapes",
                )
            )

    def _agree(self) -> None:
        """Compare the workers' reports and make blocks, unless the keys depend on infos."""
        reports = [self._reports[worker] for worker in range(self.crew.n_workers)]
        self.n_lanes, keepers = reports[0].n_lanes, reports[0].state_keepers
        if keepers and not self.environment:  # once
            _LOG.warning(_KEEP_STATE, "; ".join(f"{name} ({fix})" for name, fix in keepers.items()))
        self.environment = reports[0].environment
        problem, specs = _disagreement(reports), reports[0].specs
        if problem is None and specs is not None:
            try:
                memory = Memory.local if self._runs_here else Memory.shared
                self._blocks = BlockPool(self._make_layout(specs), memory)
            except SpecError as error:
                problem = error
        if problem is not None:
            probe, self._probe = self._probe, None  # the next request may succeed
            if probe is None and not isinstance(problem, WorkerError):
                self.crew.fail(problem)
            elif probe is None:
                _LOG.debug("keys are unknown until the first execute: %s", problem)
            elif probe[0] in self._queued:  # unless it was dropped
                self._queued.remove(probe[0])
                probe[0].error = problem
        self._advance()

    # Sending ---------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Send queued requests as far as slots allow."""
        while self._queued and self.crew.fatal is None:
            request, blocks = self._queued[0], self._blocks
            try:
                is_sent = self._send(request, blocks) if blocks else self._probe_with(request)
                if not is_sent:
                    return
            except RlpoolError as error:
                request.error = error
            self._queued.popleft()

    def _send(self, request: Request, blocks: BlockPool) -> bool:
        """Send a request to all ready workers; False if it has to wait.

        Raises:
            RlpoolError: If it cannot run; nothing was sent then.
        """
        n_slots = blocks.layout.n_slots
        n_used = sum(each.n_slots for each in {*self.running.values(), *self.pending})
        wanted = request.slots_wanted(n_slots - n_used, n_slots)
        oldest = next(iter(self.running), request.number)
        if not wanted or request.number - oldest >= MAX_REQUESTS:
            return False
        request.begin(blocks.layout)
        if not request.can_be_repeated():
            for sent in self._sent.values():
                if sent.replaces is not None:
                    raise sent.replaces
        if self._probe is not None:  # until now the workers' abilities were unknown
            self.check(request.infos, request.n_rows, request.given_seeds)
        request.block = blocks.reserve()
        if any(request.infos):
            request.packed = packed((*request.infos, {}), self._runs_here)
        request.n_slots, gone = wanted, blocks.forget_surplus()
        request.remaining.update(range(self.crew.n_workers))
        request.reports_failures = self._policy.restarts_on_env_errors
        self.running[request.number] = request
        self._control.request_begins(request.number, request.n_rows)
        for worker in self.crew.up:
            self._send_to(worker, request, gone)
        return True

    def check(self, infos: Infos, n_rows: int, seeds: Sequence[int] | None = None) -> None:
        """Refuse a request that workers are known to be unable to run.

        Raises:
            SpecError: As for ``check_together``.
        """
        if self._blocks is not None:
            check_together(self._blocks.layout, infos[1], n_rows, seeds)

    def _send_to(self, worker: int, request: Request, gone: list[int]) -> None:
        """Send a request to one worker, preceded by the policy and the block if it lacks them."""
        block, sent, send = request.running_block, self._sent[worker], self.crew.send
        version, update = request.policy
        if update is not None and sent.policy != version:
            sent.policy = version
            send(worker, Update(update.payload), update.memory)
        if gone or block.number not in sent.blocks:
            is_new = block.number not in sent.blocks
            sent.blocks.difference_update(gone)
            sent.blocks.add(block.number)
            message = MapBlock(block.number, block.layout, gone)
            send(worker, message, block.memory if is_new else None)
        payload, memory = request.packed or (None, None)
        if sent.replaces is not None:
            sent.replaces = None
            if tapes := request.tapes_for(worker):
                payload, memory = packed((*request.infos, tapes), self._runs_here)
        send(worker, request.part(worker, payload), memory)

    # The workers' client ---------------------------------------------------------------------

    def _send_outstanding(self, worker: int, report: Report) -> None:
        """Send all outstanding work to a worker that has created its environments."""
        owed = self._owed_by(worker)
        if report.specs is None and self._probe is not None:
            self._send_probe(worker, *self._probe)
        else:
            self._note_report(worker, report)
        for request in owed:
            self._send_to(worker, request, [])

    def on_message(self, worker: int, message: Message) -> None:
        """Handle a message from a worker."""
        if isinstance(message, Ready):
            self._send_outstanding(worker, message.report)
        elif isinstance(message, Done):
            self._note_done(worker, message)
        elif isinstance(message, ChunksDone):
            request = self.running.get(message.number)
            if isinstance(request, EpisodeRequest):
                # Answered in any case: the worker may be waiting and has to notice a cancellation.
                slots = [] if request.error else request.empty_slots(message.chunks)
                n_before = request.running_block.layout.n_timesteps * message.chunks[-1][2]
                if n_before >= _LONG_STEPS and not self._has_warned:
                    self._has_warned = True
                    _LOG.warning(_IS_LONG, n_before)
                self.crew.send(worker, Credit(message.number, slots))
        elif isinstance(message, Report):
            self._note_report(worker, message)
        elif isinstance(message, Failed) and message.command is not None:
            if self._repeats_env_errors and message.error.can_be_repeated:
                self._sent[worker].failing = message.command
                self.crew.expect_end(worker, message.error)
            else:
                self._note_failure(message.command, message.error)

    def _note_done(self, worker: int, number: int) -> None:
        if (request := self.running.get(number)) is not None:
            request.remaining.discard(worker)
            self._conclude(request)

    def _conclude(self, request: Request) -> None:
        """End a request once every worker has finished its part."""
        if not request.working():
            request.remaining.clear()
            del self.running[request.number]
            self._control.request_ends(request.number)
            request.packed = None  # no worker will read it again
            if request.error is not None or request not in self.pending:
                request.release()
            self._advance()

    def _note_failure(self, number: int, error: WorkerError) -> None:
        request = self.running.get(number)
        if request is not None and request.error is None:
            request.error = error
            self._stop(request)

    def _stop(self, request: Request) -> None:
        """Cancel a running request."""
        request.running_block.arrays.control["cancelled"][0] = 1
        self._control.request_ends(request.number)

    def _forget(self, request: Request) -> None:
        """Drop a request; its block is reused once all workers have finished writing to it."""
        if request in self._queued:
            self._queued.remove(request)
        if request.number in self.running:
            self._stop(request)
        else:
            request.release()

    def lost(self, worker: int, failure: WorkerError | None, abandons: bool) -> bool:
        """Take back a worker's unfinished work for its successor, as ``Client.lost``."""
        is_abandoned = failure is not None and abandons and self._abandon_episode(worker, failure)
        if failure is None:
            message = f"worker {worker} was replaced, and the state of its lanes is not known"
            fix = "call reset(); an agent that needs its history cannot continue in another worker"
            failure = WorkerError(message, where=Where(worker=worker), fix=fix)
        self._sent[worker] = _Sent(replaces=failure)
        self._reports.pop(worker, None)
        for request in self._owed_by(worker):
            if not request.error and not request.can_be_repeated():
                request.error = failure
                self._stop(request)
            if request.running_block.layout.step.resets_together:
                self._control.forget_finished(request.number, worker)
            if not request.give_back(worker) or request.error:
                request.running_block.arrays.control["over"][worker] = REPORTED
                self._note_done(worker, request.number)
        return is_abandoned

    def _abandon_episode(self, worker: int, failure: WorkerError) -> bool:
        """Truncate or refuse the failed episode; False if it is unknown which one that is."""
        where, number = failure.where, self._sent[worker].failing
        owed = [
            request
            for request in self._owed_by(worker)
            if number == request.number or (not number and where.lane in request.lanes_in(worker))
        ]
        if not owed or owed[0].running_block.layout.step.resets_together:
            return False
        if self._policy.restarts_on_env_errors:
            owed[0].truncate(failure)
        else:
            self._note_failure(owed[0].number, failure)
        return True

    def busy(self) -> Collection[int]:
        """Return the workers that have work to do.

        Dropped requests count as well: a worker that hangs in one keeps its slots.
        """
        for request in list(self.running.values()):
            self._conclude(request)  # the last worker may have died before its report
        return {worker for request in self.running.values() for worker in request.working()}

    def running_in(self, worker: int) -> dict[str, Any]:
        """Describe the lane that a worker ran last, as ``Client.running_in``."""
        last, owed = self._control.lane_in_use(worker), self._owed_by(worker)
        places = [(lane, request) for request in owed for lane in request.lanes_in(worker)]
        if not places:
            return {"where": Where(worker)}
        lane, request = min(places, key=lambda place: place[0] != last)
        is_stepping = bool(lane == last and self._control.rows[worker, Word.ENV_NS] < 0)
        return request.running_in(worker, lane, is_stepping=is_stepping)

    def _owed_by(self, worker: int) -> list[Request]:
        return [request for request in self.running.values() if worker in request.working()]


def packed(value: Any, is_private: bool) -> Packed:
    """Put an object into memory that all workers can read.

    Args:
        value: The object.
        is_private: Whether all workers are in this process.

    Raises:
        SpecError: If it cannot be pickled, or there is no memory or descriptor for it.
    """
    try:
        return pack(value, Memory.local if is_private else Memory.shared)
    except RlpoolError:
        raise
    except (OSError, MemoryError) as error:
        message = f"cannot allocate memory to send infos or parameters: {error}"
        fix = "drop results that are no longer needed, or allow more descriptors (ulimit -n)"
        raise SpecError(message, fix=fix) from error
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        fix = "send only what the agents need, such as model.state_dict()"
        raise SpecError(why_not({"info": value}, error), fix=fix) from error


def _disagreement(reports: Sequence[Report]) -> RlpoolError | None:
    """Why workers cannot run the same requests; ``None`` if they can."""
    first = reports[0]
    for worker, report in enumerate(reports):
        if report.n_lanes != first.n_lanes:
            message = (
                f"worker 0 has {first.n_lanes} environments, worker {worker} has {report.n_lanes}"
            )
            return SpecError(message, fix="create the same number of environments in every worker")
    for worker, report in enumerate(reports):
        if report.error is not None:
            return report.error
        if report.specs != first.specs:
            specs = f"{first.specs} and {report.specs}"
            return SpecError(
                f"worker 0 and worker {worker} disagree about their steps: {specs}",
                fix="create_env and create_agent must not depend on the worker",
            )
    return None
