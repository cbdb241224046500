"""The caller's side of a cluster: which node runs which episodes, and what happens to lost ones.

A request is divided into shards of consecutive episodes, none of which depends on who runs it. Each
node has at most two: one that it runs, and one that its lanes begin when they have nothing else to
do. Shards get smaller towards the end of a request, so that no node is waited for alone. What a
node had that is gone is given to others; what arrives twice is dropped.

Nothing happens in the background: results are copied, and further shards are sent, while the caller
is inside rlpool.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from typing import Any

from rlpool.batch.agreement import other_steps
from rlpool.batch.dispatch import LayoutMaker
from rlpool.batch.request_queue import RequestQueue
from rlpool.batch.requests import Policy, Request
from rlpool.cluster.nodes import Nodes
from rlpool.cluster.requests import Divided, Flight
from rlpool.cluster.shards import NodeReport, NodeSetup, PolicyAt, Rows
from rlpool.cluster.transport import Event, Finished, Transport
from rlpool.data.storage import Memory
from rlpool.errors import RlpoolError, SpecError, UsageError, WorkerDiedError, WorkerError
from rlpool.observe.stats import RequestStats, Stats, stats_of
from rlpool.record.capsule_files import CrashDir, CrashFiles
from rlpool.slots.blocks import BlockPool, StepSpecs
from rlpool.workers.payload import pack

_LOG = logging.getLogger("rlpool")

_MOST_SHARDS = 2
"""Shards that a node has at once."""

_MOST_VERSIONS = 2
"""Versions of the policy that are published at once."""

_EPISODES_PER_LANE = 4
"""The least in a shard, as long as every node gets two shards: each costs caller and node 5 to 6 ms
of processor time, and leaves lanes idle while its longest episode goes on."""

_STORE_SHARE = 8
"""Which part of a node's store one shard may take: two are on the way, and the caller's machine
holds some of every node's."""

_MOST_LOST = 100
"""Results that may be lost in a row: enough for a machine that takes its store with it."""


class ClusterDispatcher(RequestQueue):
    """Sends shards to nodes and collects their results.

    Args:
        transport: Connects this process with the nodes.
        setup: What every node starts with.
        n_slots: Slots in flight, of all nodes together; 0 for one per lane.
        make_layout: Makes the layout of the caller's blocks.
        crash_dir: Where the capsules of failures are written, ``None`` for nowhere.
        require_same_bits: Whether nodes that may compute other bits are refused.

    Raises:
        RlpoolError: If a node cannot be started.
    """

    records = True
    fatal: RlpoolError | None = None
    step: StepSpecs | None = None
    running: list[Any]  # whatever is divided, see ``Divided``

    def __init__(
        self,
        transport: Transport,
        setup: NodeSetup,
        *,
        n_slots: int,
        make_layout: LayoutMaker,
        crash_dir: CrashDir = None,
        require_same_bits: bool = False,
    ) -> None:
        super().__init__()
        self._transport = transport
        self._setup = setup
        self._n_slots = n_slots
        self._make_layout = make_layout
        self._crash_files = CrashFiles(crash_dir)
        self._nodes = Nodes(transport, setup, self, require_same_bits)
        self._published: dict[int, Any] = {}  # version: reference
        self._n_shards = 0
        self._bytes_per_row = math.inf  # of results; before the first one, of a slot
        self._has_results = False
        self._n_lost = 0  # results in a row
        self._owner_pid = os.getpid()
        self.deliver_logs = transport.deliver_logs
        self.stacks = transport.stacks
        transport.start(setup)
        self.wait_until(lambda: self._nodes.has_started or self.fatal is not None)
        self._refuse_if_dead()

    # The queue's hooks --------------------------------------------------------------------------

    def resume(self) -> None:
        """Let the next window bring all nodes to where the tapes of its lanes end."""
        assignment = self._nodes.assignment
        for part in range(assignment.n_parts):
            assignment.move(part)

    def wait_until(
        self, is_over: Callable[[], bool], every_s: float = math.inf, until_s: float = math.inf
    ) -> None:
        """Handle events until a condition holds, and look for nodes that hang."""
        while not is_over() and (left_s := until_s - time.monotonic()) > 0.0:
            self._handle(min(self._nodes.look_every_s, every_s, left_s))

    def fileno(self) -> int:
        """See ``RequestQueue.fileno``."""
        return self._transport.fileno()

    @property
    def patience_s(self) -> float:
        """See ``RequestQueue.patience_s``."""
        return self._nodes.look_every_s

    def look(self) -> None:
        """Handle the events that have arrived, and look for nodes that hang."""
        self._handle(0.0)

    def _handle(self, timeout_s: float) -> None:
        self._transport.wait(timeout_s)
        with self._whole():
            while (event := self._transport.next_event()) is not None:
                self._take(event)
                del event  # and with it the arrays of a result
            self._nodes.look_around()
            self._advance()
        self.deliver_logs()

    def _stop(self, request: Request) -> None:
        """Let the nodes stop what they run of a request."""
        self._nodes.is_undisturbed = False
        self.running.remove(request)
        for number, node in self._nodes.states.items():
            numbers = [n for n, flight in node.flights.items() if flight.request is request]
            if numbers:
                self._transport.cancel(number, numbers)
                for n in numbers:
                    del node.flights[n]
        request.release()

    def n_finished(self, request: Request) -> int:
        """See ``RequestQueue.n_finished``."""
        n_finished = request.n_there if isinstance(request, Divided) else 0
        for node in self._nodes.states.values():
            for number, flight in node.flights.items():
                if flight.request is request:
                    n_finished += node.look.n_finished.get(number, 0)
        return n_finished

    def _abort(self) -> None:
        what = "the nodes were ended after an interruption"
        self.fail(WorkerDiedError(what, exitcode=None, fix="make a new one"))

    # What the batchers call ---------------------------------------------------------------------

    def updated(self, info: Any) -> Policy:
        """The ``policy`` of agents that were updated with this."""
        return Policy(self.policy.version + 1, pack(info, Memory.local))

    def read_stats(self) -> Stats:
        """See ``RequestQueue``; nodes that do not answer are left out."""
        requests = [RequestStats(r.number, r.n_rows, self.n_finished(r)) for r in self.running]
        answers = self._transport.stats().items()
        states = self._nodes.states
        nodes = {states[n].report.name: s for n, s in answers if n in states}
        workers = [worker for stats in nodes.values() for worker in stats.workers]
        return stats_of("", os.getpid(), requests, workers, nodes)

    def give_up(self) -> None:
        """Do nothing: nodes end with their caller."""

    def close(self) -> None:
        """Stop what runs and end the nodes. May be repeated, as all that it calls."""
        self.is_closed = True
        if os.getpid() != self._owner_pid:
            return  # a forked copy
        self.fail(UsageError("the batcher was closed meanwhile"))
        self._transport.close()
        if self._blocks is not None:
            self._blocks.close()
        self.running.clear()
        self._queued.clear()
        self.pending.clear()
        self._published.clear()

    # What has happened --------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        if not isinstance(event, Finished):
            self._nodes.take(event)
            return
        number, outcome = event.node, event.outcome
        flight = self._nodes.flight(number, event.number)
        if flight is None or self._nodes.reruns(number, outcome):
            return  # or it was cancelled
        del self._nodes.states[number].flights[event.number]
        if outcome.rows is not None:
            self._nodes.note_success(number, flight)
            self._put(number, flight, outcome.rows)
        elif outcome.error is not None:
            if outcome.is_lost:
                self._note_lost(number, flight, outcome.error)
            else:
                self._note_error(flight.request, outcome.error, outcome.is_fatal)

    def _note_lost(self, node: int, flight: Flight, error: RlpoolError) -> None:
        """A node has run a shard, and what it returned is lost."""
        self._n_lost += 1
        what = f"node {self._name_of(node)}: {error.what}"
        _LOG.warning("%s", what)
        self.lose(flight, WorkerError(what))
        if self._n_lost > _MOST_LOST:
            fix = "lower n_slots or n_timesteps, or give Ray a larger object store"
            self.fail(WorkerDiedError(what, exitcode=None, fix=fix))

    def _name_of(self, node: int) -> str:
        return self._nodes.states[node].report.name

    def _put(self, node: int, flight: Flight, rows: Rows) -> None:
        """Copy a result into its request's block."""
        try:
            self._agree_on(rows.step, self._name_of(node))
        except SpecError as error:
            self.fail(error)
        request, blocks = flight.request, self._blocks
        if self.fatal is not None or blocks is None or request.error is not None:
            return
        try:
            if request.block is None:
                request.check(blocks.layout)
                request.block = blocks.take()
                blocks.forget_surplus()
            request.put(flight.rows, rows)
            request.n_there += len(flight.rows)
            request.failures.update(rows.failures)
            request.tells_failures = self._setup.policy.restarts_on_env_errors
            request.is_reproducible &= rows.is_reproducible and self._nodes.is_undisturbed
        except (RlpoolError, MemoryError) as error:
            told = error if isinstance(error, RlpoolError) else SpecError(f"no memory: {error}")
            self._note_error(request, told, is_fatal=False)
            return
        self._n_lost = 0
        n_bytes = sum(array.nbytes for array in rows.rows.values()) / len(flight.rows)
        self._bytes_per_row = max(self._bytes_per_row, n_bytes) if self._has_results else n_bytes
        self._has_results = True
        if request.is_complete:
            self.running.remove(request)
            self._over(request)

    def _note_error(self, request: Request, error: RlpoolError, is_fatal: bool) -> None:
        error = self._crash_files.with_file(error)
        if is_fatal:
            self.fail(error)
        elif request.error is None:
            request.error = error
            self._stop(request)

    # What the nodes tell ------------------------------------------------------------------------

    def learn(self, report: NodeReport) -> None:
        """See ``nodes.Owner``."""
        if report.step is not None:
            self._agree_on(report.step, report.name)
        self.n_lanes = report.n_lanes
        self._n_slots = self._n_slots or self._nodes.assignment.n_parts * self._part_size

    def _agree_on(self, step: StepSpecs, name: str) -> None:
        """Learn from a node what a step consists of, or see that all agree on it.

        Raises:
            SpecError: If they do not, or blocks are larger than this machine.
        """
        if self.step is None:
            layout = self._make_layout(step)
            self._blocks = BlockPool(layout, _private)
            self.step = step
            self._bytes_per_row = sum(layout.bytes_of_key().values()) / layout.n_slots
        elif step != self.step:
            raise other_steps("the nodes before", f"node {name}", self.step, step)

    def lose(self, flight: Flight, error: RlpoolError) -> None:
        """See ``nodes.Owner``; its rows run again, if they can be."""
        self._nodes.is_undisturbed = False
        if flight.request.can_be_repeated():
            flight.request.lose(flight.rows)
        else:
            self._note_error(flight.request, error, is_fatal=False)

    def fail(self, error: RlpoolError) -> None:
        """See ``nodes.Owner``."""
        self.fatal = self.fatal or error

    # Sending ------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Begin requests as far as slots allow, and keep every node busy."""
        if self.fatal is not None:
            return
        self._begin_queued()
        usable = self._nodes.usable(self.running)
        states = self._nodes.states
        n_in_flight = sum(len(f.rows) for node in states.values() for f in node.flights.values())
        for depth in range(_MOST_SHARDS):
            for number in usable:
                if len(states[number].flights) <= depth:
                    n_in_flight += self._send_next(number, n_in_flight)

    def _begin_queued(self) -> None:
        while self._queued:
            request: Any = self._queued[0]
            wanted = request.slots_wanted(self._n_slots - self._n_slots_used(), self._n_slots)
            versions = {other.policy.version for other in self.running} | {request.policy.version}
            if not wanted or len(versions) > _MOST_VERSIONS:
                return
            self._queued.popleft()
            try:
                request.begin(self._nodes.assignment, self._part_size, self.n_lanes, self.step)
            except RlpoolError as error:
                request.error = error
            else:
                request.n_slots = wanted
                self.running.append(request)

    def _send_next(self, number: int, n_in_flight: int) -> int:
        """Send a node the next rows that nobody runs; returns how many."""
        for request in self.running:
            if not request.n_left:
                continue
            size = self._shard_size(request)
            if n_in_flight and n_in_flight + size > max(self._n_slots, size):
                return 0
            rows = request.next_rows(number, size)
            if rows is not None:
                self._n_shards += 1
                policy = self._policy_at(request.policy)
                shard = request.shard(rows, self._n_shards, number, policy)
                self._nodes.states[number].flights[self._n_shards] = Flight(request, rows)
                self._transport.send(number, shard)
                return len(rows)
        return 0

    @property
    def _part_size(self) -> int:
        """Lanes of a node."""
        return self.n_lanes * self._setup.n_workers

    def _shard_size(self, request: Divided) -> int:
        """How many episodes the next shard of a request has: whole rows of a worker's lanes."""
        n_shards = _MOST_SHARDS * max(1, len(self._nodes.states))
        most = self._n_slots / n_shards
        if self._transport.store_bytes is not None:
            most = min(most, self._transport.store_bytes / _STORE_SHARE / self._bytes_per_row)
        least = self._setup.least_rows(self.n_lanes)
        worthwhile = min(_EPISODES_PER_LANE * least, request.n_rows / n_shards)
        size = min(most, max(worthwhile, request.n_left / n_shards))
        return max(least, int(size) // self.n_lanes * self.n_lanes)

    def _policy_at(self, policy: Policy) -> PolicyAt:
        """Where nodes find a policy, which is published when the first shard runs with it."""
        version, packed = policy
        if packed is None:
            return PolicyAt(version)
        if version not in self._published:
            used = {request.policy.version for request in self.running}
            self._published = {v: ref for v, ref in self._published.items() if v in used}
            published = packed.payload, packed.memory.root()
            self._published[version] = self._transport.publish(published)
        return PolicyAt(version, self._published[version])


def _private(n_bytes: int) -> Memory:
    """Memory whose untouched pages cost nothing; no other process maps it."""
    memory = Memory.shared(n_bytes)
    memory.close_fd()
    return memory
