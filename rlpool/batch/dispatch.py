"""The caller's side of collecting: a queue of requests, their blocks and their results.

A request is queued until its slots fit into what is in flight, then it runs in every worker, until
each is done with it and its result goes to the user. If it fails or is given up, its block is used
again once every worker is done with it.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rlpool.batch.request_workers import RequestWorkers
from rlpool.batch.requests import Policy, Request
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import RlpoolError, SpecError, UsageError, WorkerError
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.record.capsule_files import CrashDir
from rlpool.slots.blocks import BlockPool, Layout, StepSpecs
from rlpool.workers.failure_policy import FailurePolicy

_LOG = logging.getLogger("rlpool")

_MAX_RUNNING = 8
"""Requests that workers may have at once: enough to keep them busy."""

LayoutMaker = Callable[[StepSpecs], Layout]


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
        self._queued: deque[Request] = deque()  # not sent yet
        self._pending: deque[Request] = deque()  # not yet handed to the user
        self._probing: Request | None = None  # whose infos the workers are probed with
        self._blocks: BlockPool | None = None
        self.n_lanes = 0
        self.policy = Policy()
        self._owner_pid = os.getpid()
        self._n_requests = 0
        self.is_closed = False
        self._workers = RequestWorkers(
            n_workers,
            root,
            functions,
            policy=policy,
            timeout_s=timeout_s,
            crash_dir=crash_dir,
            owner=self,
        )
        self._processes = self._workers.processes
        self._agreement = self._workers.agreement
        self.deliver_logs = self._processes.deliver_logs
        self.stacks = self._workers.stacks
        try:
            self._workers.start()
            self._agree_at_start()
        except BaseException:
            self._processes.abort()  # those that are slow to start are not waited for
            self.close()
            raise

    # What the batchers call ------------------------------------------------------------------

    @property
    def repeats(self) -> bool:
        """Whether workers that have begun something may be replaced."""
        return self._processes.is_repeatable

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
        self._processes.refuse_if_dead()
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
            self._processes.refuse_if_dead()
            raise UsageError("nothing is pending", fix="call execute() before get()")
        request = self._pending[0]
        if request.trajectories is None:
            self._processes.poll(0.0)
            if not blocking and not self._is_settled(request):
                self._processes.look_for_hang()
                return None
            self._processes.wait_until(lambda: self._is_settled(request))
            with self._whole():
                self._settle(request)
        return request

    def _is_settled(self, request: Request) -> bool:
        return request.is_complete or request.error is not None or self._processes.fatal is not None

    def _settle(self, request: Request) -> None:
        """Take the result of the oldest request and give its slots to the next."""
        if request.is_complete:
            request.trajectories = request.result()
            request.release()
            self._advance()
            return
        if request in self._pending:  # close() has dropped it already
            self._pending.remove(request)
        error = request.error or self._processes.fatal
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
        self._processes.poll(0.0)
        self._processes.look_for_hang()
        error = request.error or self._processes.fatal
        if error is not None and not request.is_complete:
            raise error
        if request.block is None:
            return 0, request.n_rows
        # An episode whose worker died just after its end is counted again when it is repeated.
        n_finished = int(request.block.arrays.control["n_finished"].sum())
        return min(n_finished, request.n_rows), request.n_rows

    def update(self, info: Any) -> None:
        """Let later requests run with agents that were updated with this."""
        self.policy = Policy(self.policy.version + 1, self._workers.pack(info))

    def give_up(self) -> None:
        """Let the workers stop what they run; nobody is told."""
        if os.getpid() == self._owner_pid:
            self._workers.cancel()

    def close(self) -> None:
        """Stop what runs and end the workers."""
        if self.is_closed:
            return
        self.is_closed = True
        if os.getpid() != self._owner_pid:
            return  # a forked copy: workers, pipes and blocks belong to the original process
        self._workers.close()
        if self.policy.packed is not None:
            self.policy.packed.memory.close_fd()
        for request in self._queued:
            request.close_payloads()
        if self._blocks is not None:
            self._blocks.close()
        self._queued.clear()
        self._pending.clear()

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

    def probed(self) -> None:
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
            probing.error = self._workers.crash_files.with_file(problem)
        self._advance()

    def _make_blocks(self) -> None:
        if self._agreement.specs is not None:
            layout = self._make_layout(self._agreement.specs)
            self._blocks = BlockPool(layout, self._processes.allocate)

    # Sending ---------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Send queued requests as far as slots allow."""
        if self._processes.fatal is not None:
            return
        while self._queued and self._blocks is None and self._agreement.infos is None:
            self._probing = request = self._queued[0]
            try:
                self._agreement.probe(self._workers.pack((*request.infos, {})))
            except SpecError as error:
                self._queued.popleft().error = error
        while self._queued and self._blocks is not None:
            request = self._queued[0]
            n_slots = self._blocks.layout.n_slots
            n_used = sum(other.n_slots for other in {*self._workers.running, *self._pending})
            wanted = request.slots_wanted(n_slots - n_used, n_slots)
            if not wanted or len(self._workers.running) >= _MAX_RUNNING:
                return
            self._queued.popleft()
            try:
                self._prepare(request, self._blocks)
            except RlpoolError as error:
                request.error = error
            else:
                request.n_slots = wanted
                self._workers.send(request, self._blocks.forget_surplus())

    def _prepare(self, request: Request, blocks: BlockPool) -> None:
        """Do all that may fail before anything is sent.

        Raises:
            RlpoolError: If it did; the request is not sent.
        """
        self._workers.check_successors(request)
        request.check(blocks.layout)
        request.block = blocks.take()
        if any(request.infos):
            request.packed = self._workers.pack((*request.infos, {}))

    # Ending a request ------------------------------------------------------------------------

    def over(self, request: Request) -> None:
        """Use the slots of a request that no worker runs any more, if nobody waits for it."""
        if request not in self._pending:
            request.release()
        self._advance()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """A section that is done as a whole or not at all: signals wait, anything else is fatal."""
        with InterruptsHeld():
            try:
                yield
            except RlpoolError:
                raise
            except BaseException:
                self._processes.abort()  # they may have got half a message
                raise

    def _forget(self, request: Request) -> None:
        """Give up a request; its block is used again when no worker writes into it any more."""
        if request in self._queued:
            self._queued.remove(request)
        if request in self._workers.running:
            self._workers.stop(request)
        else:
            request.release()
