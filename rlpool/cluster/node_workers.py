"""The workers of an ordinary batcher, and a thread that gives them shards."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from rlpool.batch.batcher import EpisodeBatcher
from rlpool.batch.dispatch import Dispatcher
from rlpool.batch.requests import EpisodeRequest, Policy, WindowRequest
from rlpool.batch.window_batcher import Batcher
from rlpool.cluster.shards import (
    Look,
    NodeReport,
    NodeSetup,
    Outcome,
    PolicyAt,
    Published,
    Shard,
    rows_of,
)
from rlpool.cluster.transport import Arrivals
from rlpool.errors import RlpoolError, UsageError, WorkerDiedError, WorkerError, described
from rlpool.machine.fingerprint import fingerprint
from rlpool.machine.limits import WORKER_DESCRIPTORS, check_workers
from rlpool.observe.stats import Stats
from rlpool.record.failures import text_of
from rlpool.record.tape import WindowTapes
from rlpool.slots.blocks import Layout, StepSpecs
from rlpool.workers.payload import Packed
from rlpool.workers.process_start import memory_of
from rlpool.workers.sharing import Parcel, Shared

_KEPT_POLICIES = 2
"""Versions that shards in flight may ask for."""


class _Run:
    """A shard that was asked for, and where its outcome is awaited.

    Attributes:
        request: What the workers run, ``None`` before they were given it.
        is_cancelled: Whether nobody waits for its outcome.
    """

    def __init__(self, shard: Shard, published: Published | None) -> None:
        self.shard, self.published = shard, published
        self.future: Future[Outcome] = Future()
        self.request: EpisodeRequest | WindowRequest | None = None
        self.is_cancelled = False


class NodeWorkers:
    """Runs shards with workers of its own, at once and in order.

    A thread owns the workers; every method may be called from any thread.

    Args:
        setup: What to start.
        name: What errors call the node.
        number: How many others have the numbers before, from which the seeds of workers derive.
    """

    def __init__(self, setup: NodeSetup, name: str, number: int) -> None:
        self._setup = setup
        self._name = name
        self._n_before = number * setup.n_workers
        self._runs: deque[_Run] = deque()  # all that were not answered
        self._lock = threading.Lock()
        self._ended: RlpoolError | None = None  # why nothing runs any more
        self._arrivals = Arrivals()
        self._policies: dict[int, Policy] = {0: Policy()}
        self._tapes: WindowTapes | None = None
        self._last_window = 0  # number of its shard
        self._n_told = 0  # failures of workers that the caller knows
        self._dispatcher: Dispatcher
        self._report: Future[NodeReport] = Future()
        self._thread = threading.Thread(target=self._serve, name="rlpool-node", daemon=True)
        self._thread.start()

    # From any thread ----------------------------------------------------------------------------

    def report(self) -> NodeReport:
        """Wait until the workers are ready.

        Raises:
            RlpoolError: If they do not get ready.
        """
        return self._report.result()

    def run(self, shard: Shard, read: Callable[[], Published]) -> Future[Outcome]:
        """Run a shard after those that were asked for before.

        Args:
            shard: The shard.
            read: Reads its policy's object, called if this node does not have it.
        """
        published = None
        if shard.policy.reference is not None and shard.policy.version not in self._policies:
            published = read()
        run = _Run(shard, published)
        with self._lock:
            if self._ended is not None:
                run.future.set_result(Outcome(None, self._ended, is_fatal=True))
            else:
                self._runs.append(run)
        self._arrivals.tell()
        return run.future

    def cancel(self, numbers: Sequence[int] | None = None) -> None:
        """Stop shards, by default all; nobody waits for their results."""
        for run in list(self._runs):
            run.is_cancelled |= numbers is None or run.shard.request.number in numbers
        self._arrivals.tell()

    def look(self) -> Look:
        """What this node is doing, as far as shared memory shows."""
        n_finished = {}
        for run in list(self._runs):
            if run.request is not None:
                number = run.shard.request.number
                n_finished[number] = self._dispatcher.n_finished(run.request)
        if not self.is_ready:
            return Look(n_finished, 0)
        failures = self._dispatcher.restarts.failures
        told, self._n_told = self._n_told, len(failures)
        new = list(map(self._named, failures[told:]))
        return Look(n_finished, self._dispatcher.restarts.n_restarts, new)

    def stacks(self) -> str:
        """What the workers are doing."""
        self.report()
        return self._dispatcher.stacks()

    def stats(self) -> Stats:
        """What the workers are doing, in numbers."""
        return self._dispatcher.read_stats()

    def end(self) -> None:
        """Let the workers end, whatever they are doing."""
        if self.is_ready:
            self._dispatcher.give_up()
        self._end(UsageError("the node was closed"))

    def join(self) -> None:
        """Wait until the workers have ended."""
        self._thread.join()

    @property
    def is_ready(self) -> bool:
        """Whether the workers have started."""
        return self._report.done() and self._report.exception() is None

    def _end(self, error: RlpoolError) -> None:
        """Run nothing any more."""
        with self._lock:
            self._ended = self._ended or error
        self._arrivals.tell()

    # In the thread ------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._start()
            while self._ended is None:
                self._advance()
                fds = self._arrivals.fileno(), self._dispatcher.fileno()
                wait(fds, self._dispatcher.patience_s)
                self._arrivals.clear()
                self._dispatcher.look()
        except BaseException as error:
            self._end(self._told(error))
            if not self._report.done():
                self._report.set_exception(self._told(error))
        finally:
            if self.is_ready:
                self._dispatcher.close()
            while self._runs:
                self._runs.popleft().future.set_result(Outcome(None, self._ended, is_fatal=True))
            self._policies.clear()
            self._arrivals.close()

    def _start(self) -> None:
        setup = self._setup
        memory = memory_of(setup.policy.start_method)
        check_workers(setup.n_workers, WORKER_DESCRIPTORS, "lower n_workers", memory)
        self._dispatcher = Dispatcher(
            setup.n_workers,
            setup.root,
            Parcel(setup.functions, Shared()),
            make_layout=self._layout,
            # An episode that fails may succeed on another node.
            policy=replace(setup.policy, max_episode_restarts=None),
            timeout_s=setup.timeout_s,
            owner_name="EpisodeBatcher" if setup.n_slots else "Batcher",
            n_before=self._n_before,
        )
        dispatcher = self._dispatcher
        report = NodeReport(self._name, dispatcher.n_lanes, dispatcher.step, fingerprint())
        self._report.set_result(report)

    def _layout(self, specs: StepSpecs) -> Layout:
        setup = self._setup
        if setup.n_slots is None:
            return Batcher.layout(setup.n_timesteps, None, setup.n_workers, specs)
        n_slots = max(setup.n_slots, setup.least_rows(specs.n_lanes))
        return EpisodeBatcher.layout(setup.n_timesteps, n_slots, setup.n_workers, specs)

    def _advance(self) -> None:
        """Give the workers what is new, and answer what has come to an end."""
        dispatcher = self._dispatcher
        for run in list(self._runs):
            try:
                if run.is_cancelled:
                    if run.request is not None:
                        dispatcher.drop(run.request)
                    raise UsageError("the shard was given up")
                if run.request is None:
                    self._submit(run)
            except Exception as error:
                self._runs.remove(run)
                is_fatal = dispatcher.fatal is not None
                run.future.set_result(Outcome(None, self._told(error), is_fatal))
        dispatcher.deliver_logs()
        while dispatcher.pending and dispatcher.has_outcome():
            outcome = self._outcome_of(self._runs[0])
            dispatcher.pending.popleft()
            self._runs.popleft().future.set_result(outcome)

    def _submit(self, run: _Run) -> None:
        """Give the workers a shard."""
        dispatcher, request = self._dispatcher, run.shard.request
        told: dict[str, Any] = {"policy": self._policy(run.shard.policy, run.published)}
        if isinstance(request, WindowRequest):
            if request.number < self._last_window:
                raise UsageError("the shard came after the next one, and was given up")
            self._last_window = request.number
            if request.tapes is not None:
                self._tapes = request.tapes
                dispatcher.resume()
            elif request.is_first:
                n_lanes = dispatcher.n_lanes * self._setup.n_workers
                self._tapes = WindowTapes(n_lanes) if dispatcher.repeats else None
            told["tapes"] = self._tapes
        request = replace(request, number=dispatcher.next_number(), **told)
        dispatcher.check(request)
        dispatcher.submit(request)
        run.request = request

    def _policy(self, at: PolicyAt, published: Published | None) -> Policy:
        """The policy of a shard, as this node's workers read it."""
        if at.version not in self._policies:
            if published is None:
                raise LookupError(f"version {at.version} of the policy was not sent")
            payload, data = published
            memory = self._dispatcher.allocate(data.nbytes)
            memory.root()[:] = data
            self._policies[at.version] = Policy(at.version, Packed(payload, memory))
            for version in sorted(self._policies)[:-_KEPT_POLICIES]:
                del self._policies[version]
        return self._policies[at.version]

    def _outcome_of(self, run: _Run) -> Outcome:
        """What became of the oldest shard; its rows are taken while its block is at hand."""
        first, request, rows = run.shard.first, run.request, None
        try:
            if request is not None and request.is_complete:
                given_up = (self._named(each, first) for each in request.failures.values())
                rows = rows_of(request, {each.where.episode or 0: each for each in given_up})
            self._dispatcher.wait(blocking=False)
        except RlpoolError as error:
            return Outcome(None, self._told(error, first), self._dispatcher.fatal is not None)
        return Outcome(rows)

    def _told(self, error: BaseException, first: int = 0) -> RlpoolError:
        """Any error as the caller knows its place."""
        if not isinstance(error, RlpoolError):
            what = f"the node failed with {described(error)}"
            error = WorkerError(what, traceback_text=text_of(error))
        return self._named(error, first) if isinstance(error, WorkerError) else error

    def _named(self, error: WorkerError, first: int = 0) -> WorkerError:
        """An error with this node, and the request's episode."""
        where = error.where._replace(node=self._name)
        if where.episode is not None:
            where = where._replace(episode=where.episode + first)
        if isinstance(error, WorkerDiedError):
            error = error.reworded(history=tuple(map(self._named, error.history)))
        capsule = error.capsule and replace(error.capsule, where=where)
        return error.reworded(where=where, capsule=capsule)
