"""The workers of an ordinary batcher, and a thread that gives them shards."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace

from rlpool.batch.batcher import EpisodeBatcher
from rlpool.batch.dispatch import Dispatcher
from rlpool.batch.requests import EpisodeRequest, Policy, WindowRequest
from rlpool.batch.window_batcher import Batcher
from rlpool.cluster.shards import (
    EpisodeShard,
    Look,
    NodeReport,
    NodeSetup,
    Outcome,
    PolicyAt,
    Published,
    Rows,
    Shard,
    WindowShard,
    without_padding,
)
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import RlpoolError, UsageError, WorkerDiedError, WorkerError, described
from rlpool.machine.fingerprint import fingerprint
from rlpool.machine.worker_limits import WORKER_DESCRIPTORS, check_workers
from rlpool.memory.sharing import Parcel, Shared
from rlpool.observe.stats import Stats
from rlpool.record.failures import text_of
from rlpool.record.tape import WindowTapes
from rlpool.slots.blocks import Layout, StepSpecs
from rlpool.workers.payload import Packed
from rlpool.workers.process_start import memory_of

_KEPT_POLICIES = 2
"""Versions that shards in flight may ask for."""


@dataclass(eq=False, kw_only=True)
class _Episodes(EpisodeRequest):
    """A shard of episodes.

    Attributes:
        rows: Its result, without padding.
    """

    rows: Rows | None = None

    def result(self) -> TemporalDictTensor:
        """See ``Request.result``; what is sent is put together while the block is at hand."""
        layout = self.running_block.layout
        self.rows = without_padding(layout, self.part(), self.is_reproducible, {})
        return super().result()


@dataclass(eq=False, kw_only=True)
class _Window(WindowRequest):
    """A shard of a window; the attributes are those of ``_Episodes``."""

    rows: Rows | None = None

    def result(self) -> TemporalDictTensor:
        """See ``_Episodes.result``."""
        block = self.running_block
        trajectories = super().result()
        steps_before = block.arrays.control["steps_before"].reshape(-1)
        lanes_left = {lane: int(steps_before[lane]) for lane in self.lanes_left}
        self.rows = without_padding(block.layout, self.part(), self.is_reproducible, lanes_left)
        return trajectories


class _Run:
    """A shard that was asked for, and where its outcome is awaited."""

    request: _Episodes | _Window

    def __init__(self, shard: Shard, published: Published | None) -> None:
        self.shard = shard
        self.published = published
        self.future: Future[Outcome] = Future()


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
        self._calls: deque[_Run | set[int] | None] = deque()  # to run, or to cancel: None for all
        self._lock = threading.Lock()
        self._ended: RlpoolError | None = None  # why nothing runs any more
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._runs: deque[_Run] = deque()  # given to the workers
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
        self._call(run)
        return run.future

    def cancel(self, numbers: Sequence[int] | None = None) -> None:
        """Stop shards, by default all; nobody waits for their results."""
        self._call(None if numbers is None else set(numbers))

    def look(self) -> Look:
        """What this node is doing, as far as shared memory shows."""
        n_finished = {}
        for run in list(self._runs):
            n_finished[run.shard.number] = self._dispatcher.n_finished(run.request)
        if not self.is_ready:
            return Look(n_finished, 0)
        failures = self._dispatcher.restarts.failures
        told, self._n_told = self._n_told, len(failures)
        return Look(n_finished, self._dispatcher.restarts.n_restarts, self._named(failures[told:]))

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

    def _call(self, call: _Run | set[int] | None) -> None:
        with self._lock:
            if self._ended is None:
                self._calls.append(call)
                os.eventfd_write(self._wake_fd, 1)
            elif isinstance(call, _Run):
                call.future.set_result(Outcome(None, self._ended, is_fatal=True))

    def _end(self, error: RlpoolError) -> None:
        """Run nothing any more."""
        with self._lock:
            if self._ended is None:
                self._ended = error
                os.eventfd_write(self._wake_fd, 1)

    # In the thread ------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._start()
        except BaseException as error:
            self._end(self._told(error))
            self._report.set_exception(self._told(error))
        try:
            while self._ended is None:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
                while self._calls:
                    self._carry_out(self._calls.popleft())
                self._settle()
                if not self._calls:
                    self._dispatcher.look(self._dispatcher.patience_s)
        except BaseException as error:
            self._end(self._told(error))
        finally:
            if self.is_ready:
                self._dispatcher.close()
            for run in [*self._runs, *(call for call in self._calls if isinstance(call, _Run))]:
                run.future.set_result(Outcome(None, self._ended, is_fatal=True))
            self._policies.clear()
            os.close(self._wake_fd)

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
            wake_fd=self._wake_fd,
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

    def _carry_out(self, call: _Run | set[int] | None) -> None:
        if isinstance(call, _Run):
            self._submit(call)
            return
        for run in [run for run in self._runs if call is None or run.shard.number in call]:
            self._runs.remove(run)
            self._dispatcher.drop(run.request)
            run.future.set_result(Outcome(None, UsageError("the shard was given up")))

    def _submit(self, run: _Run) -> None:
        """Give the workers a shard."""
        dispatcher, shard = self._dispatcher, run.shard
        try:
            policy = self._policy(shard.policy, run.published)
            if isinstance(shard, EpisodeShard):
                run.request = self._episodes(shard, policy)
            else:
                run.request = self._next_window(shard, policy)
            dispatcher.check(run.request)
            dispatcher.submit(run.request)
        except Exception as error:
            run.future.set_result(Outcome(None, self._told(error), dispatcher.fatal is not None))
        else:
            self._runs.append(run)

    def _episodes(self, shard: EpisodeShard, policy: Policy) -> _Episodes:
        return _Episodes(
            number=self._dispatcher.next_number(),
            n_rows=shard.n_rows,
            infos=shard.infos,
            policy=policy,
            first=shard.first,
            given_seeds=shard.given_seeds,
            root=shard.root,
        )

    def _next_window(self, shard: WindowShard, policy: Policy) -> _Window:
        if shard.number < self._last_window:
            raise UsageError("the shard came after the next one, and was given up")
        self._last_window = shard.number
        dispatcher = self._dispatcher
        if shard.is_first or shard.tapes is not None:
            keeps = dispatcher.repeats or shard.tapes is not None
            self._tapes = WindowTapes(dispatcher.n_lanes * self._setup.n_workers) if keeps else None
        if self._tapes is not None and shard.tapes is not None:
            self._tapes.tapes.update(shard.tapes)
            dispatcher.resume()
        return _Window(
            number=dispatcher.next_number(),
            n_rows=len(shard.lanes),
            lanes=shard.lanes,
            infos=shard.infos,
            policy=policy,
            n_lanes=dispatcher.n_lanes,
            n_resets=shard.n_resets,
            n_windows=shard.n_windows,
            is_first=shard.is_first,
            first_lane=shard.first_lane,
            root=shard.root,
            tapes=self._tapes,
        )

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

    def _settle(self) -> None:
        """Answer the shards that are finished."""
        dispatcher = self._dispatcher
        dispatcher.deliver_logs()
        while self._runs:
            run = self._runs[0]
            try:
                if dispatcher.wait(blocking=False) is None:
                    return
                outcome = Outcome(self._rows_of(run))
            except RlpoolError as error:
                told = self._told(error, run.shard)
                outcome = Outcome(None, told, dispatcher.fatal is not None)
            self._runs.popleft()
            if dispatcher.pending:  # unless it was closed
                dispatcher.pending.popleft()
            run.future.set_result(outcome)

    def _rows_of(self, run: _Run) -> Rows | None:
        """The rows of a shard, with the failures of episodes that were given up."""
        rows, failures = run.request.rows, {}
        for failure in run.request.failures.values():
            told = self._told(failure, run.shard)
            if isinstance(told, WorkerError):
                failures[told.where.episode or 0] = told
        return replace(rows, failures=failures) if rows is not None and failures else rows

    def _told(self, error: BaseException, shard: Shard | None = None) -> RlpoolError:
        """The error as the caller knows its places: with this node, and the request's episode."""
        if not isinstance(error, RlpoolError):
            what = f"the node failed with {described(error)}"
            error = WorkerError(what, traceback_text=text_of(error))
        if not isinstance(error, WorkerError):
            return error
        where = error.where._replace(node=self._name)
        if where.episode is not None and shard is not None:
            first = shard.start if isinstance(shard, EpisodeShard) else shard.first_lane
            where = where._replace(episode=where.episode + first)
        capsule = error.capsule and replace(error.capsule, where=where)
        if isinstance(error, WorkerDiedError):
            error = error.reworded(history=self._named(error.history))
        return error.reworded(where=where, capsule=capsule)

    def _named(self, failures: Sequence[WorkerError]) -> tuple[WorkerError, ...]:
        """The failures, with this node."""
        return tuple(f.reworded(where=f.where._replace(node=self._name)) for f in failures)
