"""The requests of a caller that are under way, in order, whoever runs them.

A request is queued until its slots fit into what is in flight, then it runs, until its result goes
to the user. If it fails or is given up, its block is used again once nobody writes into it.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rlpool.batch.progress import SHOW_EVERY_S, SoFar
from rlpool.batch.requests import Policy, Request
from rlpool.errors import ResultTimeoutError, RlpoolError, UsageError, WorkerError
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.observe.control import Control
from rlpool.observe.stats import Stats
from rlpool.record.tape import Tape
from rlpool.slots.blocks import BlockPool, StepSpecs


class RequestQueue(ABC):
    """A caller's requests, handed out in order.

    Attributes:
        running: Requests that were sent, and of which something still runs.
        pending: Requests whose outcome the user does not have yet. The outermost frame of a
            ``get`` takes the oldest one off, as its last act.
        policy: What new requests run with, whatever happens to those before.
        n_lanes: Lanes of each worker.
        is_closed: Whether ``close`` was called.
        failures: Why episodes were given up, of the result that was handed out last.
        deliver_logs: Hands what was logged elsewhere to the loggers of this process.
        read_stats: Returns it in numbers.
        control: The shared record of the workers, ``None`` if they are on other machines.
        runs_here: Whether requests run in this process, while the caller waits for them.
    """

    deliver_logs: Callable[[], None]
    read_stats: Callable[[], Stats]
    runs_here = False

    def __init__(self) -> None:
        self._queued: deque[Request] = deque()  # not sent yet
        self.running: list[Request] = []
        self.pending: deque[Request] = deque()
        self._blocks: BlockPool | None = None
        self._n_requests = 0
        self.control: Control | None = None
        self.policy = Policy()
        self.n_lanes = 0
        self.is_closed = False
        self.failures: tuple[WorkerError, ...] = ()

    # Who runs them ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def fatal(self) -> RlpoolError | None:
        """Why nothing works any more."""

    @abstractmethod
    def wait_until(
        self, is_over: Callable[[], bool], every_s: float = math.inf, until_s: float = math.inf
    ) -> None:
        """Handle what arrives until a condition holds, and look for what hangs.

        Args:
            is_over: The condition.
            every_s: How often to test it, whether or not anything arrives.
            until_s: When to give up, by ``time.monotonic``; what runs here is finished first.
        """

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that can be read when something has arrived."""

    @property
    def patience_s(self) -> float:
        """How long to wait for that descriptor at most before ``look`` is called."""
        return math.inf

    def has_outcome(self) -> bool:
        """Whether ``wait`` would return or raise at once, or run the request here."""
        if self.pending and not self.runs_here:
            self.look()
        if not self.pending:
            return self.fatal is not None
        request = self.pending[0]
        return self.runs_here or request.trajectories is not None or self._is_settled(request)

    @abstractmethod
    def look(self) -> None:
        """Handle what has arrived, and look for what hangs."""

    @abstractmethod
    def _advance(self) -> None:
        """Send queued requests as far as slots allow."""

    @abstractmethod
    def _stop(self, request: Request) -> None:
        """Let a request that runs come to an end."""

    @abstractmethod
    def n_finished(self, request: Request) -> int:
        """How many episodes of a request that runs are finished."""

    @property
    @abstractmethod
    def step(self) -> StepSpecs | None:
        """What a step consists of, ``None`` before that is known."""

    @property
    @abstractmethod
    def records(self) -> bool:
        """Whether the caller records windows; otherwise ``tapes`` knows what lanes have done."""

    @property
    def tapes(self) -> Callable[[], dict[int, Tape]]:
        """Makes what episodes, by lane, have done up to now that go on with the next window."""
        raise LookupError("the caller has recorded that")

    @abstractmethod
    def resume(self) -> None:
        """Let the next window bring the workers to where the tapes of its lanes end."""

    @abstractmethod
    def updated(self, info: Any) -> Policy:
        """The ``policy`` of agents that were updated with this."""

    @abstractmethod
    def give_up(self) -> None:
        """Let everything that runs stop; nobody is told."""

    @abstractmethod
    def close(self) -> None:
        """Stop what runs and end the workers."""

    @abstractmethod
    def _abort(self) -> None:
        """Put an end to everything: something was left half done."""

    # What the batchers call ---------------------------------------------------------------------

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
        self._refuse_if_dead()
        with self._whole():
            self.pending.append(request)
            self._queued.append(request)
            self._advance()

    def wait(
        self,
        *,
        blocking: bool,
        look: Callable[[], None] | None = None,
        timeout_s: float | None = None,
    ) -> Request | None:
        """The oldest request, finished; ``None`` if it is not and ``blocking`` is false.

        It stays the oldest one, even if it failed.

        Args:
            blocking: Whether to wait for it.
            look: Is called a few times a second meanwhile.
            timeout_s: How long to wait at most, ``None`` for no limit.

        Raises:
            ResultTimeoutError: If it takes longer.
            RlpoolError: If it failed.
        """
        if not self.pending:
            self._refuse_if_dead()
            raise UsageError("nothing is pending", fix="call execute() before get()")
        request = self.pending[0]
        if request.trajectories is None:
            blocking = blocking or self.runs_here  # nothing would run until the next call
            if look is None or not blocking:
                self.look()
            is_settled = self._is_settled(request)
            if not blocking and not is_settled:
                if look is not None:
                    look()
                return None
            if look is not None or not is_settled:
                self._wait_for(request, look, timeout_s)
            if not self._is_settled(request):
                what = f"the result is not there after {timeout_s:g} s"
                raise ResultTimeoutError(what, fix="call get() again: the request goes on")
            with self._whole():
                self._settle(request)
        self.failures = tuple(request.failures[row] for row in sorted(request.failures))
        return request

    def _wait_for(
        self, request: Request, look: Callable[[], None] | None, timeout_s: float | None
    ) -> None:
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        if look is None:
            self.wait_until(lambda: self._is_settled(request), until_s=until_s)
            return

        def is_over() -> bool:
            look()
            return self._is_settled(request)

        self.wait_until(is_over, SHOW_EVERY_S, until_s)

    def _is_settled(self, request: Request) -> bool:
        return request.is_complete or request.error is not None or self.fatal is not None

    def _settle(self, request: Request) -> None:
        """Take the result of the oldest request and give its slots to the next."""
        if request.is_complete:
            request.trajectories = request.result()
            request.release()
            self._advance()
            return
        request.error = request.error or self.fatal or UsageError("the request was given up")
        self._forget(request)
        self._advance()
        raise request.error

    def drop_pending(self, first: int = 0) -> None:
        """Give up all requests from that one on; their episodes stop."""
        with self._whole():
            for request in list(self.pending)[first:]:
                self._drop(request)

    def drop(self, request: Request) -> None:
        """Give up one of them; those behind it may have waited for its slots."""
        with self._whole():
            self._drop(request)
            self._advance()

    def _drop(self, request: Request) -> None:
        request.error = UsageError("the request was given up")
        self._forget(request)
        self.pending.remove(request)

    def finished_episodes(self) -> tuple[int, int]:
        """Episodes finished and requested, of the oldest request."""
        if self.pending and self.pending[0].trajectories is None:
            request = self.pending[0]
            self.look()
            error = request.error or self.fatal
            if error is not None and not request.is_complete:
                raise error
        n_finished, n_episodes, *_ = self.so_far()
        return n_finished, n_episodes

    def so_far(self) -> SoFar:
        """How far the oldest request is, as far as that has been heard of."""
        if not self.pending:
            return SoFar(0, 0, 0, False)
        request = self.pending[0]
        if request.trajectories is not None:
            n_steps = int(request.trajectories.lengths.sum())
            return SoFar(request.n_rows, request.n_rows, n_steps, True)
        n_finished = min(self.n_finished(request), request.n_rows)
        return SoFar(n_finished, request.n_rows, request.n_steps, False)

    # The bookkeeping ----------------------------------------------------------------------------

    def _n_slots_used(self) -> int:
        """Slots of requests that run or were not handed out."""
        return sum(request.n_slots for request in {*self.running, *self.pending})

    def _refuse_if_dead(self) -> None:
        if self.fatal is not None:
            raise self.fatal

    def _over(self, request: Request) -> None:
        """Use the slots of a request of which nothing runs any more, if nobody waits for it."""
        if request.error is not None or request not in self.pending:
            request.release()
        self._advance()

    def _forget(self, request: Request) -> None:
        """Give up a request; its block is used again when nobody writes into it any more."""
        if request in self._queued:
            self._queued.remove(request)
        if request in self.running:
            self._stop(request)
        else:
            request.release()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """A section that is done as a whole or not at all: signals wait, anything else is fatal."""
        with InterruptsHeld():
            try:
                yield
            except RlpoolError:
                raise
            except BaseException:
                self._abort()  # they may have got half a message
                raise
