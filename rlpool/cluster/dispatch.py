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
from dataclasses import dataclass, field
from typing import Any

from rlpool.batch.dispatch import LayoutMaker
from rlpool.batch.request_queue import RequestQueue
from rlpool.batch.requests import Policy, Request
from rlpool.cluster.fingerprint import PINS, differences, versions
from rlpool.cluster.homes import Homes
from rlpool.cluster.requests import Divided, DividedEpisodes, DividedWindow
from rlpool.cluster.shards import Look, NodeReport, NodeSetup, PolicyAt, Rows
from rlpool.cluster.transport import (
    Died,
    Event,
    Finished,
    Joined,
    Left,
    Looked,
    Lost,
    Refused,
    Transport,
)
from rlpool.errors import (
    EnvError,
    RlpoolError,
    SpecError,
    UsageError,
    Where,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from rlpool.memory.storage import Memory
from rlpool.observe.stats import RequestStats, Stats, stats_of
from rlpool.record.capsule_files import CrashDir, CrashFiles
from rlpool.slots.blocks import BlockPool, StepSpecs
from rlpool.workers.payload import pack

_LOG = logging.getLogger("rlpool")

_MOST_SHARDS = 2
"""Shards that a node has at once."""

_MOST_VERSIONS = 2
"""Versions of the policy that are published at once."""

_STORE_SHARE = 8
"""Which part of a node's store one shard may take: two are on the way, and the caller's machine
holds some of every node's."""

_MOST_LOST = 100
"""Results that may be lost in a row: enough for a machine that takes its store with it."""

_DEAF_S = 10.0
"""A node that is only busy answers sooner than that."""

_LOOK_EVERY_S = 0.5
_LOOK_EVERY_S_PER_NODE = 0.01
"""How often nodes are asked what they are doing: seldom enough to cost nothing."""

_START_S = 60.0
"""How long nodes may take to get ready, if ``timeout`` is less: they import much, at once."""

_MOST_ALIKE = 3
"""Failures at the same step, while a node finishes no shard, after which others try its shards."""

_MOST_FAILED_STARTS = 3
"""Failures in a row of a node before it is ready after which it is given up, as for workers."""


@dataclass(eq=False)
class _Flight:
    """A shard that was sent.

    Attributes:
        number: Its number.
        request: What it is a part of.
        rows: Which rows.
    """

    number: int
    request: Divided
    rows: range


@dataclass(eq=False)
class _NodeState:
    """A node that has joined.

    Attributes:
        report: What it said of itself.
        flights: Its shards, by number.
        look: What it was doing when it was last asked.
        failures: Of its workers, as far as it was asked.
        n_before: How many of them there were when it last finished a shard.
        given_up: Why its workers are not started again, ``None`` as long as they are.
        heard_s: When it last answered.
    """

    report: NodeReport
    flights: dict[int, _Flight] = field(default_factory=dict)
    look: Look = field(default_factory=lambda: Look({}, 0))
    failures: list[WorkerError] = field(default_factory=list)
    n_before: int = 0
    given_up: WorkerError | None = None
    heard_s: float = field(default_factory=time.monotonic)


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
        self._require_same_bits = require_same_bits
        self._fatal: RlpoolError | None = None
        self._running: list[Request] = []
        self._nodes: dict[int, _NodeState] = {}
        self._homes = Homes(transport.n_expected)
        self._first: NodeReport | None = None  # of the node that others are compared with
        self._specs: StepSpecs | None = None
        self._published: dict[int, Any] = {}  # version: reference
        self._n_shards = 0
        self._n_failures = 0  # of nodes' processes, and of workers of nodes that are gone
        self._history: list[WorkerError] = []  # these failures
        self._left: dict[int, WorkerError] = {}  # by node that is gone: why
        self._n_failed_starts: dict[int, int] = {}  # by node: in a row
        self._suspected: dict[
            tuple[Divided, int], int
        ] = {}  # request and first row: where it fails
        self._bytes_per_row = math.inf  # of results; before the first one, of a slot
        self._has_results = False
        self._looked_s = 0.0
        self._n_lost = 0  # results in a row
        self._is_undisturbed = True  # see Request.is_reproducible
        self._has_started = False
        self._alone_s: float | None = time.monotonic()  # since when there are too few nodes
        self._owner_pid = os.getpid()
        self.deliver_logs = transport.deliver_logs
        self.stacks = transport.stacks
        transport.start(setup)
        self.wait_until(lambda: len(self._nodes) >= transport.n_expected or bool(self._fatal))
        self._refuse_if_dead()
        self._has_started = True

    # The queue's hooks --------------------------------------------------------------------------

    @property
    def fatal(self) -> RlpoolError | None:
        """Why nothing works any more."""
        return self._fatal

    @property
    def running(self) -> list[Request]:
        """Requests that were begun and are not over."""
        return self._running

    @property
    def step(self) -> StepSpecs | None:
        """What a step consists of, ``None`` before that is known."""
        return self._specs

    def resume(self) -> None:
        """Let the next window bring all nodes to where the tapes of its lanes end."""
        for part in range(self._homes.n_parts):
            self._homes.move(part)

    def wait_until(self, is_over: Callable[[], bool], every_s: float = math.inf) -> None:
        """Handle events until a condition holds, and look for nodes that hang."""
        while not is_over():
            self._handle(min(self._look_every_s, every_s))

    def look(self) -> None:
        """Handle the events that have arrived, and look for nodes that hang."""
        self._handle(0.0)

    def _handle(self, timeout_s: float) -> None:
        self._transport.wait(timeout_s)
        with self._whole():
            while (event := self._transport.next_event()) is not None:
                self._take(event)
                del event  # and with it the arrays of a result
            self._look_around()
            self._advance()
        self.deliver_logs()

    def _stop(self, request: Request) -> None:
        """Let the nodes stop what they run of a request."""
        self._is_undisturbed = False
        self._running.remove(request)
        for number, node in self._nodes.items():
            numbers = [n for n, flight in node.flights.items() if flight.request is request]
            if numbers:
                self._transport.cancel(number, numbers)
                for n in numbers:
                    del node.flights[n]
        request.release()

    def n_finished(self, request: Request) -> int:
        """See ``RequestQueue.n_finished``."""
        n_finished = request.n_there if isinstance(request, Divided) else 0
        for node in self._nodes.values():
            for number, flight in node.flights.items():
                if flight.request is request:
                    n_finished += node.look.n_finished.get(number, 0)
        return n_finished

    def _abort(self) -> None:
        what = "the nodes were ended after an interruption"
        self._fail(WorkerDiedError(what, exitcode=None, fix="make a new one"))

    def _fail(self, error: RlpoolError) -> None:
        self._fatal = self._fatal or error

    # What the batchers call ---------------------------------------------------------------------

    def updated(self, info: Any) -> Policy:
        """The ``policy`` of agents that were updated with this."""
        return Policy(self.policy.version + 1, pack(info, Memory.local))

    def read_stats(self) -> Stats:
        """See ``RequestQueue``; nodes that do not answer are left out."""
        requests = [RequestStats(r.number, r.n_rows, self.n_finished(r)) for r in self._running]
        answers = self._transport.stats().items()
        nodes = {self._nodes[n].report.name: s for n, s in answers if n in self._nodes}
        workers = [worker for stats in nodes.values() for worker in stats.workers]
        return stats_of("", os.getpid(), requests, workers, nodes)

    def give_up(self) -> None:
        """Do nothing: nodes end with their caller."""

    def close(self) -> None:
        """Stop what runs and end the nodes. May be repeated, as all that it calls."""
        self.is_closed = True
        if os.getpid() != self._owner_pid:
            return  # a forked copy
        self._fail(UsageError("the batcher was closed meanwhile"))
        self._transport.close()
        if self._blocks is not None:
            self._blocks.close()
        self._running.clear()
        self._queued.clear()
        self.pending.clear()
        self._published.clear()

    # Events -------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        if isinstance(event, Joined):
            self._join(event.node, event.report)
        elif isinstance(event, Died):
            self._count_failure(event.node, event.error)
        elif isinstance(event, Refused):
            self._refuse(event.node, event.error)
        elif isinstance(event, Left):
            self._leave(event)
        elif isinstance(event, Looked) and event.node in self._nodes:
            self._look_at(event.node, self._nodes[event.node], event.look)
        elif isinstance(event, Lost | Finished) and event.node in self._nodes:
            node = self._nodes[event.node]
            node.heard_s = time.monotonic()
            flight = node.flights.pop(event.number, None)
            if flight is None:
                return  # it was cancelled
            if isinstance(event, Lost):
                self._n_lost += 1
                what = f"node {node.report.name}: a result is lost ({event.why})"
                _LOG.warning("%s", what)
                self._lose(flight, WorkerError(what))
                if self._n_lost > _MOST_LOST:
                    fix = "lower n_slots or n_timesteps, or give Ray a larger object store"
                    self._fail(WorkerDiedError(what, exitcode=None, fix=fix))
            elif event.outcome.rows is not None:
                self._judge(event.node, flight)
                self._put(node, flight, event.outcome.rows)
            else:
                self._take_error(event, node, flight)

    def _join(self, number: int, report: NodeReport) -> None:
        """Use a node from now on, unless it differs from the others."""
        self._first = self._first or report
        try:
            self._check_node(report, self._first)
            if report.step is not None:
                self._learn(report.name, report.step)
        except SpecError as error:
            self._refuse(number, error)
            return
        self._left.pop(number, None)
        self._n_failed_starts[number] = 0
        self.n_lanes = report.n_lanes
        self._n_slots = self._n_slots or self._homes.n_parts * self._part_size
        self._nodes[number] = _NodeState(report)
        self._homes.join(number)
        if self._has_started or len(self._nodes) == self._transport.n_expected:
            self._alone_s = None

    def _check_node(self, report: NodeReport, first: NodeReport) -> None:
        """Compare a node with the first one.

        Raises:
            SpecError: If it cannot be used.
        """
        if report.n_lanes != first.n_lanes:
            raise SpecError(
                f"node {report.name} has {report.n_lanes} environments per worker, node "
                f"{first.name} has {first.n_lanes}",
                fix="create the same number of environments in every worker",
            )
        own, theirs = versions(), report.fingerprint
        # Simulators need not be where the program learns.
        own = {name: own[name] for name in own if name in theirs or name == "rlpool"}
        for other, expected, found in (
            (f"nodes {first.name}", first.fingerprint, theirs),
            ("the calling process", own, {name: theirs[name] for name in own if name in theirs}),
        ):
            differing = "; ".join(differences(expected, found))
            if differing:
                what = f"{other} and {report.name} may compute different bits: {differing}"
                fix = f"install the same versions, and set {PINS} to what all processors can do"
                error = SpecError(what, fix=fix)
                if self._require_same_bits:
                    raise error
                _LOG.warning("%s", error)

    def _learn(self, name: str, step: StepSpecs) -> None:
        """Learn from a node what a step consists of, or see that all agree on it.

        Raises:
            SpecError: If they do not, or blocks are larger than this machine.
        """
        if self._specs is None:
            layout = self._make_layout(step)
            self._blocks = BlockPool(layout, _private)
            self._specs = step
            self._bytes_per_row = sum(layout.bytes_of_key().values()) / layout.n_slots
        elif step != self._specs:
            raise SpecError(
                f"node {name} has other steps than the nodes before: {step} and {self._specs}",
                fix="create_env and create_agent must not depend on the machine",
            )

    def _look_at(self, number: int, node: _NodeState, look: Look) -> None:
        """Note what a node is doing, and whether its workers fail too often."""
        node.look, node.heard_s = look, time.monotonic()
        node.failures.extend(look.failures)
        latest = node.failures[max(node.n_before, len(node.failures) - _MOST_ALIKE) :]
        is_alike = len(latest) == _MOST_ALIKE and len({f.where.step for f in latest}) == 1
        if latest and not ((is_alike or self._is_over) and self._suspect(number, latest[-1])):
            self._check_restarts(latest[-1].what, latest[-1])

    def _suspect(self, number: int, error: WorkerError) -> bool:
        """Let others run what fails on a node, to find out whether it is to blame.

        Returns:
            Whether that is possible: it is an episode that fails, there are others, and it did not
            fail there, too.
        """
        node = self._nodes[number]
        node.n_before = len(node.failures)
        shards = {(flight.request, flight.rows.start) for flight in node.flights.values()}
        known = shards & self._suspected.keys()
        innocent = {self._suspected[shard] for shard in known}
        for shard in [s for s, suspect in self._suspected.items() if suspect in innocent]:
            del self._suspected[shard]
        others = self._nodes.keys() - {number} - self._suspects
        if known or not shards or not others or error.where.episode is None:
            return False
        _LOG.warning("%s (%s): others try the same episodes", error.what, error.where)
        self._suspected.update(dict.fromkeys(shards, number))
        self._transport.cancel(number, list(node.flights))
        self._homes.leave(number, error)
        flights, node.flights = node.flights, {}
        for flight in flights.values():
            self._lose(flight, error)
        return True

    @property
    def _suspects(self) -> set[int]:
        """The nodes whose shards others try: they get none, and their failures do not count."""
        return set(self._suspected.values())

    def _judge(self, number: int, flight: _Flight) -> None:
        """Leave a node aside if all that failed there has succeeded elsewhere.

        It had several shards, and which of them holds the episode that fails is not known.
        """
        self._nodes[number].n_before = len(self._nodes[number].failures)
        suspect = self._suspected.pop((flight.request, flight.rows.start), number)
        is_guilty = suspect != number and suspect not in self._suspects
        node = self._nodes.pop(suspect, None) if is_guilty else None
        if node is not None:
            what = "node %s is left aside: episodes that fail there succeed on node %s"
            _LOG.warning(what, node.report.name, self._nodes[number].report.name)
            self._transport.dismiss(suspect)

    def _refuse(self, number: int, error: RlpoolError) -> None:
        """Start a node again that was ready before; at the beginning it is an error.

        Do without one that differs from the others, or joined later and was never ready.
        """
        if not self._has_started:
            self._fail(error)
        elif number not in self._n_failed_starts or not isinstance(error, WorkerError):
            self._do_without(number, error)
        elif not self._setup.policy.restarts_workers:
            self._fail(error)
        else:
            self._lose_all_of(number, error)
            if self._count_failure(number, error):
                _LOG.warning("%s (%s): the node is started again", error.what, error.where)
                self._transport.restart(number)

    def _do_without(self, number: int, error: RlpoolError) -> None:
        """Give up a node for good."""
        _LOG.warning("a node cannot be used: %s", str(error))
        self._transport.dismiss(number)
        self._lose_all_of(number, error)

    def _count_failure(self, number: int, error: WorkerError) -> bool:
        """Record that a node failed although its machine goes on; returns whether it may again."""
        self._n_failures += 1
        self._history += getattr(error, "history", ()) or [self._left.pop(number, error)]
        n_in_a_row = self._n_failed_starts[number] = self._n_failed_starts.get(number, 0) + 1
        self._check_restarts(self._history[-1].what, error)
        if self._fatal is None and n_in_a_row >= _MOST_FAILED_STARTS:
            why = f"and is given up: it failed {n_in_a_row} times before it was ready"
            final = self._final(f"{error.what}, {why}", error, error.fix)
            if self._nodes:
                self._do_without(number, final)
            else:
                self._fail(final)
            return False
        return self._fatal is None

    @property
    def _is_over(self) -> bool:
        """Whether there were more restarts than are allowed in all."""
        most = self._setup.policy.max_restarts
        counted = (self._nodes[number] for number in self._nodes.keys() - self._suspects)
        n_restarts = self._n_failures + sum(node.look.n_restarts for node in counted)
        return most is not None and n_restarts > most

    def _check_restarts(self, what: str, latest: WorkerError) -> None:
        """Give up after more restarts than are allowed in all."""
        if self._is_over:
            most = self._setup.policy.max_restarts
            what = f"{what} after {most} restarts in all, and is not started again"
            fix = "look at this error's .history, and raise max_restarts"
            self._fail(self._final(what, latest, fix))

    def _final(self, what: str, latest: WorkerError | None, fix: str) -> WorkerDiedError:
        """An error that has all failures so far as its history, and says where the latest was."""
        history = [*self._history, *self._left.values()]
        for node in self._nodes.values():
            history += getattr(node.given_up, "history", node.failures)
        return WorkerDiedError(
            what,
            exitcode=None,
            where=getattr(latest, "where", Where()),
            fix=fix,
            traceback_text=getattr(latest, "traceback_text", ""),
            history=tuple(history),
        )

    def _leave(self, event: Left) -> None:
        """Note that a node is gone."""
        n_lost = self._lose_all_of(event.node, event.error)
        self._left[event.node] = event.error
        if not self._setup.policy.restarts_workers:
            self._fail(event.error)
        else:
            _LOG.warning("%s; the %d rows that it had run again", event.error.what, n_lost)

    def _lose_all_of(self, number: int, error: RlpoolError) -> int:
        """Give the shards of a node to others; returns how many rows they have."""
        node = self._nodes.pop(number, None)
        if node is None:
            return 0
        self._is_undisturbed = False
        self._homes.leave(number, error)
        for flight in node.flights.values():
            self._lose(flight, error)
        self._n_failures += node.look.n_restarts
        self._history += node.failures
        if not self._nodes:
            self._alone_s = time.monotonic()
        return sum(len(flight.rows) for flight in node.flights.values())

    def _lose(self, flight: _Flight, error: RlpoolError) -> None:
        """Let the rows of a shard be run again, if they can be."""
        self._is_undisturbed = False
        if flight.request.can_be_repeated():
            flight.request.lose(flight.rows)
        else:
            self._note_error(flight.request, error, is_fatal=False)

    def _put(self, node: _NodeState, flight: _Flight, rows: Rows) -> None:
        """Copy a result into its request's block."""
        try:
            self._learn(node.report.name, rows.step)
        except SpecError as error:
            self._fail(error)
        request, blocks = flight.request, self._blocks
        if self._fatal is not None or blocks is None or request.error is not None:
            return
        try:
            if request.block is None:
                request.check(blocks.layout)
                request.block = blocks.take()
                blocks.forget_surplus()
            request.put(flight.rows, rows)
            request.failures.update(rows.failures)
            request.tells_failures = self._setup.policy.restarts_on_env_errors
            request.is_reproducible &= rows.is_reproducible and self._is_undisturbed
        except (RlpoolError, MemoryError) as error:
            told = error if isinstance(error, RlpoolError) else SpecError(f"no memory: {error}")
            self._note_error(request, told, is_fatal=False)
            return
        self._n_lost = 0
        n_bytes = sum(array.nbytes for array in rows.rows.values()) / len(flight.rows)
        self._bytes_per_row = max(self._bytes_per_row, n_bytes) if self._has_results else n_bytes
        self._has_results = True
        if request.is_complete:
            self._running.remove(request)
            request.drop_payloads()
            self._over(request)

    def _take_error(self, event: Finished, node: _NodeState, flight: _Flight) -> None:
        """A shard has failed on a node, or all of the node's workers are given up with it."""
        error, is_fatal = event.outcome.error, event.outcome.is_fatal
        if not isinstance(error, WorkerDiedError | WorkerTimeoutError | EnvError):
            if error is not None:
                self._note_error(flight.request, error, is_fatal)
            return
        if is_fatal:
            node.failures = []  # which are in its history
            n_restarts = len(getattr(error, "history", ())) - 1
            node.look = Look({}, max(node.look.n_restarts, n_restarts))
        restarts = self._setup.policy.restarts_on(error)
        node.flights[flight.number] = flight
        if restarts and self._suspect(event.node, error):
            node.given_up = error if is_fatal else None
        elif restarts and is_fatal:
            self._refuse(event.node, error)
        else:
            del node.flights[flight.number]
            self._note_error(flight.request, error, is_fatal)

    def _note_error(self, request: Request, error: RlpoolError, is_fatal: bool) -> None:
        error = self._crash_files.with_file(error)
        if is_fatal:
            self._fail(error)
        elif request.error is None:
            request.error = error
            self._stop(request)

    # Sending ------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Begin requests as far as slots allow, and keep every node busy."""
        if self._fatal is not None:
            return
        self._begin_queued()
        running = self._suspected.items()
        self._suspected = {shard: n for shard, n in running if shard[0] in self._running}
        usable = self._nodes.keys() - self._suspects or set(self._nodes)
        for number in usable:
            self._homes.join(number)  # unless it has
            if (given_up := self._nodes[number].given_up) is not None:
                self._refuse(number, given_up)
        n_in_flight = sum(len(f.rows) for n in self._nodes.values() for f in n.flights.values())
        for depth in range(_MOST_SHARDS):
            for number, node in self._nodes.items():
                if len(node.flights) <= depth and number in usable:
                    n_in_flight += self._send_next(number, node, n_in_flight)

    def _begin_queued(self) -> None:
        while self._queued:
            request = self._queued[0]
            wanted = request.slots_wanted(self._n_slots - self._n_slots_used(), self._n_slots)
            versions = {other.policy.version for other in self._running} | {request.policy.version}
            if not wanted or len(versions) > _MOST_VERSIONS:
                return
            self._queued.popleft()
            try:
                if isinstance(request, DividedWindow):
                    request.begin(self._homes, self._part_size)
                elif isinstance(request, DividedEpisodes) and (
                    self._specs is None or self._specs.resets_together
                ):
                    request.divide(self._transport.n_expected, self.n_lanes)
            except RlpoolError as error:
                request.error = error
            else:
                request.n_slots = wanted
                self._running.append(request)

    def _send_next(self, number: int, node: _NodeState, n_in_flight: int) -> int:
        """Send a node the next rows that nobody runs; returns how many."""
        for request in self._running:
            if not isinstance(request, Divided) or not request.n_left:
                continue
            size = self._shard_size(request)
            if n_in_flight and n_in_flight + size > max(self._n_slots, size):
                return 0
            rows = request.next_rows(number, size)
            if rows is not None:
                self._n_shards += 1
                flight = _Flight(self._n_shards, request, rows)
                shard = request.shard(rows, flight.number, self._policy_at(request.policy))
                node.flights[flight.number] = flight
                self._transport.send(number, shard)
                return len(rows)
        return 0

    @property
    def _part_size(self) -> int:
        """Lanes of a node."""
        return self.n_lanes * self._setup.n_workers

    def _shard_size(self, request: Divided) -> int:
        """How many episodes the next shard of a request has: whole rows of a worker's lanes."""
        n_shards = _MOST_SHARDS * max(1, len(self._nodes))
        most = self._n_slots / n_shards
        if self._transport.store_bytes is not None:
            most = min(most, self._transport.store_bytes / _STORE_SHARE / self._bytes_per_row)
        least = self._setup.least_rows(self.n_lanes)
        # A shard of one episode per lane leaves lanes idle while its longest episode goes on.
        several = min(most, 2 * least, request.n_rows / n_shards / 2, self._n_slots / n_shards / 2)
        size = max(several, min(most, request.n_left / n_shards))
        return max(least, int(size) // self.n_lanes * self.n_lanes)

    def _policy_at(self, policy: Policy) -> PolicyAt:
        """Where nodes find a policy, which is published when the first shard runs with it."""
        version, packed = policy
        if packed is None:
            return PolicyAt(version)
        if version not in self._published:
            used = {request.policy.version for request in self._running}
            self._published = {v: ref for v, ref in self._published.items() if v in used}
            published = packed.payload, packed.memory.root()
            self._published[version] = self._transport.publish(published)
        return PolicyAt(version, self._published[version])

    # Looking at nodes ---------------------------------------------------------------------------

    @property
    def _look_every_s(self) -> float:
        return max(_LOOK_EVERY_S, _LOOK_EVERY_S_PER_NODE * len(self._nodes))

    def _look_around(self) -> None:
        """Ask the nodes what they are doing, and end those that do not answer."""
        now_s, timeout_s = time.monotonic(), self._setup.timeout_s
        if now_s < self._looked_s + self._look_every_s:
            return
        # The caller may not have been here to listen.
        is_late = now_s > self._looked_s + 3 * self._look_every_s
        self._looked_s = now_s
        for number, node in list(self._nodes.items()):
            if is_late:
                node.heard_s = now_s
            if timeout_s is not None and now_s > node.heard_s + max(timeout_s, _DEAF_S):
                name, silent_s = node.report.name, now_s - node.heard_s
                _LOG.warning("node %s has not answered for %.0f s, and is ended", name, silent_s)
                node.heard_s = now_s
                self._transport.end(number)
            else:
                self._transport.look(number)
        if self._alone_s is not None and is_late:
            self._alone_s = now_s
        if self._alone_s is not None and timeout_s is not None:
            patience_s = timeout_s if self._has_started else max(timeout_s, _START_S)
            if now_s > self._alone_s + patience_s:
                self._give_up_waiting(patience_s)

    def _give_up_waiting(self, timeout_s: float) -> None:
        """There have been too few nodes for too long."""
        n_wanted, fix = 1, "start a node, and make a new batcher"
        if not self._has_started:
            n_wanted = self._transport.n_expected
            fix = "raise timeout if they take longer to start, or look at their logs (ray logs)"
        what = f"{len(self._nodes)} of {n_wanted} nodes are ready after {timeout_s:g} s"
        self._fail(self._final(what, None, fix))


def _private(n_bytes: int) -> Memory:
    """Memory whose untouched pages cost nothing; no other process maps it."""
    memory = Memory.shared(n_bytes)
    memory.close_fd()
    return memory
