"""The nodes as the caller knows them: what they run, which fail, and which are given up.

A node that fails is started again, within limits. One on which episodes fail is left aside if these
episodes succeed elsewhere. The caller is told which shards are lost, and when there is no hope.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Protocol

from rlpool.batch.requests import Request
from rlpool.cluster.assignment import Assignment
from rlpool.cluster.requests import Flight
from rlpool.cluster.same_bits import check_alike
from rlpool.cluster.shards import Look, NodeReport, NodeSetup, Outcome
from rlpool.cluster.transport import Joined, Left, Looked, Refused, Transport
from rlpool.errors import (
    EnvError,
    RlpoolError,
    SpecError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from rlpool.workers.failure_policy import final_error

_LOG = logging.getLogger("rlpool")

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
class NodeState:
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
    flights: dict[int, Flight] = field(default_factory=dict)
    look: Look = field(default_factory=lambda: Look({}, 0))
    failures: list[WorkerError] = field(default_factory=list)
    n_before: int = 0
    given_up: WorkerError | None = None
    heard_s: float = field(default_factory=time.monotonic)


class Owner(Protocol):
    """Whose shards the nodes run."""

    def learn(self, report: NodeReport) -> None:
        """Learn from a node that is ready what a step consists of, or see that it agrees.

        Raises:
            SpecError: If it does not.
        """

    def lose(self, flight: Flight, error: RlpoolError) -> None:
        """Nobody runs a shard any more."""

    def fail(self, error: RlpoolError) -> None:
        """Nothing works any more."""


class Nodes:
    """The nodes of a cluster.

    Args:
        transport: Connects this process with them.
        setup: What every node starts with.
        owner: Is told what happens.
        require_same_bits: Whether nodes that may compute other bits are refused.

    Attributes:
        states: Those that have joined, by number.
        assignment: Which of them has which lanes of windows.
        is_undisturbed: See ``Request.is_reproducible``.
        has_started: Whether all nodes that were expected have joined.
    """

    def __init__(
        self, transport: Transport, setup: NodeSetup, owner: Owner, require_same_bits: bool
    ) -> None:
        self.states: dict[int, NodeState] = {}
        self.assignment = Assignment(transport.n_expected)
        self.is_undisturbed = True
        self.has_started = False
        self._transport = transport
        self._setup = setup
        self._owner = owner
        self._require_same_bits = require_same_bits
        self._first: NodeReport | None = None  # of the node that others are compared with
        self._n_failures = 0  # of nodes' processes, and of workers of nodes that are gone
        self._history: list[WorkerError] = []  # these failures
        self._left: dict[int, WorkerError] = {}  # by node whose machine is gone: why
        self._n_failed_starts: dict[int, int] = {}  # by node: in a row
        # Node on which shards fail that others try, by their request and first row.
        self._suspected: dict[tuple[Request, int], int] = {}
        self._looked_s = 0.0
        self._alone_s: float | None = time.monotonic()  # since when there are too few nodes

    def take(self, event: Joined | Left | Refused | Looked) -> None:
        """Take what has happened to a node."""
        if isinstance(event, Joined):
            self._join(event.node, event.report)
        elif isinstance(event, Left):
            self._leave(event)
        elif isinstance(event, Refused):
            self._refuse(event.node, event.error)
        elif event.node in self.states:
            self._look_at(event.node, event.look)

    # Joining ------------------------------------------------------------------------------------

    def _join(self, number: int, report: NodeReport) -> None:
        """Use a node from now on, unless it differs from the others."""
        self._first = self._first or report
        try:
            check_alike(self._first, report, require_same_bits=self._require_same_bits)
            self._owner.learn(report)
        except SpecError as error:
            self._refuse(number, error)
            return
        self._left.pop(number, None)
        self._n_failed_starts[number] = 0
        self.states[number] = NodeState(report)
        self.assignment.join(number)
        self.has_started = self.has_started or len(self.states) == self._transport.n_expected
        if self.has_started:
            self._alone_s = None

    # Shards that fail ---------------------------------------------------------------------------

    def flight(self, number: int, shard: int) -> Flight | None:
        """The shard that a node has answered, ``None`` if it was cancelled."""
        node = self.states.get(number)
        if node is None:
            return None
        node.heard_s = time.monotonic()
        return node.flights.get(shard)

    def note_success(self, number: int, flight: Flight) -> None:
        """Leave a node aside if all that failed there has succeeded elsewhere.

        It had several shards, and which of them holds the episode that fails is not known.
        """
        node = self.states[number]
        node.n_before = len(node.failures)
        suspect = self._suspected.pop((flight.request, flight.rows.start), number)
        is_guilty = suspect != number and suspect not in self._suspects
        guilty = self.states.pop(suspect, None) if is_guilty else None
        if guilty is not None:
            what = "node %s is left aside: episodes that fail there succeed on node %s"
            _LOG.warning(what, guilty.report.name, node.report.name)
            self._transport.dismiss(suspect)

    def reruns(self, number: int, outcome: Outcome) -> bool:
        """Whether a node's shard runs again as it failed, or all its workers are given up with it.

        It runs on others, or on this node when it was started again.
        """
        node, error = self.states[number], outcome.error
        if not isinstance(error, WorkerDiedError | WorkerTimeoutError | EnvError):
            return False
        if outcome.is_fatal:
            node.failures = []  # which are in its history
            n_restarts = len(getattr(error, "history", ())) - 1
            node.look = Look({}, max(node.look.n_restarts, n_restarts))
        if not self._setup.policy.restarts_on(error):
            return False
        if self._suspect(number, error):
            node.given_up = error if outcome.is_fatal else None
        elif outcome.is_fatal:
            self._refuse(number, error)
        else:
            return False
        return True

    def _look_at(self, number: int, look: Look) -> None:
        """Note what a node is doing, and whether its workers fail too often."""
        node = self.states[number]
        node.look, node.heard_s = look, time.monotonic()
        node.failures.extend(look.failures)
        latest = node.failures[max(node.n_before, len(node.failures) - _MOST_ALIKE) :]
        is_alike = len(latest) == _MOST_ALIKE and len({f.where.step for f in latest}) == 1
        if latest and not ((is_alike or self._is_over) and self._suspect(number, latest[-1])):
            self._check_restarts(latest[-1].what, latest[-1])

    def _suspect(self, number: int, error: WorkerError) -> bool:
        """Let others run what fails on a node, to find out whether it is to blame.

        Returns:
            Whether an episode fails, there are others, and it did not fail there, too.
        """
        node = self.states[number]
        node.n_before = len(node.failures)
        shards = {(flight.request, flight.rows.start) for flight in node.flights.values()}
        known = shards & self._suspected.keys()
        innocent = {self._suspected[shard] for shard in known}
        for shard in [s for s, suspect in self._suspected.items() if suspect in innocent]:
            del self._suspected[shard]
        others = self.states.keys() - {number} - self._suspects
        if known or not shards or not others or error.where.episode is None:
            return False
        _LOG.warning("%s (%s): others try the same episodes", error.what, error.where)
        self._suspected.update(dict.fromkeys(shards, number))
        self._transport.cancel(number, list(node.flights))
        self.assignment.leave(number, error)
        flights, node.flights = node.flights, {}
        for flight in flights.values():
            self._owner.lose(flight, error)
        return True

    @property
    def _suspects(self) -> set[int]:
        """The nodes whose shards others try: they get none, and their failures do not count."""
        return set(self._suspected.values())

    def usable(self, running: list[Request]) -> list[int]:
        """The nodes that may be sent shards; those that were given up are started again.

        Args:
            running: All requests that run.
        """
        suspected = self._suspected.items()
        self._suspected = {shard: n for shard, n in suspected if shard[0] in running}
        usable = self.states.keys() - self._suspects or set(self.states)
        for number in usable:
            self.assignment.join(number)  # unless it has
            if (given_up := self.states[number].given_up) is not None:
                self._refuse(number, given_up)
        return [number for number in self.states if number in usable]

    # Nodes that fail ----------------------------------------------------------------------------

    def _refuse(self, number: int, error: RlpoolError) -> None:
        """Start a node again that was ready before; at the beginning it is an error.

        Do without one that differs from the others, or joined later and was never ready.
        """
        if not self.has_started:
            self._owner.fail(error)
        elif number not in self._n_failed_starts or not isinstance(error, WorkerError):
            self._do_without(number, error)
        elif not self._setup.policy.restarts_workers:
            self._owner.fail(error)
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

    def _leave(self, event: Left) -> None:
        """Note that a node is gone."""
        n_lost = self._lose_all_of(event.node, event.error)
        if not self._setup.policy.restarts_workers:
            self._owner.fail(event.error)
            return
        _LOG.warning("%s; the %d rows that it had run again", event.error.what, n_lost)
        if event.is_machine:
            self._left[event.node] = event.error
        else:
            self._count_failure(event.node, event.error)

    def _lose_all_of(self, number: int, error: RlpoolError) -> int:
        """Give the shards of a node to others; returns how many rows they have."""
        node = self.states.pop(number, None)
        if node is None:
            return 0
        self.is_undisturbed = False
        self.assignment.leave(number, error)
        for flight in node.flights.values():
            self._owner.lose(flight, error)
        self._n_failures += node.look.n_restarts
        self._history += node.failures
        if not self.states:
            self._alone_s = time.monotonic()
        return sum(len(flight.rows) for flight in node.flights.values())

    def _count_failure(self, number: int, error: WorkerError) -> bool:
        """Record that a node failed although its machine goes on; returns whether it may again."""
        self._n_failures += 1
        self._history += getattr(error, "history", ()) or [error]
        n_in_a_row = self._n_failed_starts[number] = self._n_failed_starts.get(number, 0) + 1
        if self._check_restarts(self._history[-1].what, error):
            return False
        if n_in_a_row < _MOST_FAILED_STARTS:
            return True
        why = f"and is given up: it failed {n_in_a_row} times before it was ready"
        final = self._final_error(f"{error.what}, {why}", error, error.fix)
        if self.states:
            self._do_without(number, final)
        else:
            self._owner.fail(final)
        return False

    @property
    def _is_over(self) -> bool:
        """Whether there were more restarts than are allowed in all."""
        most = self._setup.policy.max_restarts
        counted = (self.states[number] for number in self.states.keys() - self._suspects)
        n_restarts = self._n_failures + sum(node.look.n_restarts for node in counted)
        return most is not None and n_restarts > most

    def _check_restarts(self, what: str, latest: WorkerError) -> bool:
        """Give up after more restarts than are allowed in all; returns whether that was so."""
        if not self._is_over:
            return False
        most = self._setup.policy.max_restarts
        what = f"{what} after {most} restarts in all, and is not started again"
        fix = "look at this error's .history, and raise max_restarts"
        self._owner.fail(self._final_error(what, latest, fix))
        return True

    def _final_error(self, what: str, latest: WorkerError | None, fix: str) -> WorkerDiedError:
        """An error that has all failures so far as its history, and says where the latest was."""
        history = [*self._history, *self._left.values()]
        for node in self.states.values():
            history += getattr(node.given_up, "history", node.failures)
        return final_error(what, latest, history, fix)

    # Looking at nodes ---------------------------------------------------------------------------

    @property
    def look_every_s(self) -> float:
        """How often they are asked what they are doing."""
        return max(_LOOK_EVERY_S, _LOOK_EVERY_S_PER_NODE * len(self.states))

    def look_around(self) -> None:
        """Ask the nodes what they are doing, and end those that do not answer."""
        now_s, timeout_s = time.monotonic(), self._setup.timeout_s
        if now_s < self._looked_s + self.look_every_s:
            return
        # The caller may not have been here to listen.
        is_late = now_s > self._looked_s + 3 * self.look_every_s
        self._looked_s = now_s
        for number, node in list(self.states.items()):
            if is_late:
                node.heard_s = now_s
            if timeout_s is not None and now_s > node.heard_s + max(timeout_s, _DEAF_S):
                name, silent_s = node.report.name, now_s - node.heard_s
                _LOG.warning("node %s has not answered for %.0f s, and is ended", name, silent_s)
                node.heard_s = now_s
                self._transport.end(number)
            else:
                self._transport.look(number)
        if self._alone_s is None or timeout_s is None:
            return
        if is_late:
            self._alone_s = now_s
        patience_s, n_wanted, fix = timeout_s, 1, "start a node, and make a new batcher"
        if not self.has_started:
            patience_s, n_wanted = max(timeout_s, _START_S), self._transport.n_expected
            fix = "raise timeout if they take longer to start, or look at their logs (ray logs)"
        if now_s > self._alone_s + patience_s:
            what = f"{len(self.states)} of {n_wanted} nodes are ready after {patience_s:g} s"
            self._owner.fail(self._final_error(what, None, fix))
