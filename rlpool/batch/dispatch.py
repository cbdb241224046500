"""The caller's side of collecting: a queue of requests, their blocks and their results.

A request is queued until its slots fit into what is in flight, then it runs in every worker, until
each is done with it and its result goes to the user. If it fails or is given up, its block is used
again once every worker is done with it.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from typing import Any

from rlpool.batch.local_worker import LocalWorker
from rlpool.batch.request_queue import RequestQueue
from rlpool.batch.request_workers import RequestWorkers
from rlpool.batch.requests import Policy, Request
from rlpool.errors import RlpoolError, SpecError, WorkerError
from rlpool.memory.storage import Memory
from rlpool.observe.control import MAX_REQUESTS
from rlpool.observe.stats import StatsReader
from rlpool.record.capsule_files import CrashDir
from rlpool.record.tape import Tape
from rlpool.slots.block_pool import BlockPool
from rlpool.slots.blocks import Layout, StepSpecs
from rlpool.workers.failure_policy import FailurePolicy

_LOG = logging.getLogger("rlpool")

LayoutMaker = Callable[[StepSpecs], Layout]


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
        crash_dir: Where the capsules of failures are written, ``None`` for nowhere.
        n_before: Workers on other machines whose numbers come first.

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
        crash_dir: CrashDir = None,
        n_before: int = 0,
    ) -> None:
        super().__init__()
        self._make_layout = make_layout
        self.runs_here = n_workers == 0
        self._probing: Request | None = None  # whose infos the workers are probed with
        self._owner_pid = os.getpid()
        self._workers = RequestWorkers(
            n_workers,
            root,
            functions,
            policy=policy,
            timeout_s=timeout_s,
            crash_dir=crash_dir,
            owner=self,
            owner_name=owner_name,
            n_before=n_before,
        )
        self._processes = self._workers.processes
        self._agreement = self._workers.agreement
        self.control = self._workers.control
        self.deliver_logs = self._processes.deliver_logs
        self.stacks = self._workers.stacks
        self.read_stats = StatsReader(self.control).read
        try:
            self._workers.start()
            self._agree_at_start()
        except BaseException:
            self._processes.abort()  # those that are slow to start are not waited for
            self.close()
            raise

    @property
    def fatal(self) -> RlpoolError | None:
        """Why nothing works any more."""
        return self._processes.fatal

    @property
    def running(self) -> list[Request]:
        """Requests that were sent, and are not yet done in every worker."""
        return self._workers.running

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

    def allocate(self, n_bytes: int) -> Memory:
        """Memory that the workers can map.

        Raises:
            SpecError: If there is none.
        """
        return self._workers.allocate(n_bytes)

    def resume(self) -> None:
        """Let the next window bring the workers to where the tapes of its lanes end."""
        self._workers.resume()

    @property
    def step(self) -> StepSpecs | None:
        """What a step consists of, ``None`` before that is known."""
        return self._agreement.specs

    @property
    def n_restarts(self) -> int:
        """How many workers were replaced because they failed."""
        return self._processes.n_restarts

    @property
    def worker_failures(self) -> tuple[WorkerError, ...]:
        """Why workers were replaced, the latest last."""
        return self._processes.failures

    @property
    def repeats(self) -> bool:
        """Whether workers that have begun something may be replaced."""
        return self._processes.is_repeatable

    @property
    def records(self) -> bool:
        """See ``RequestQueue.records``."""
        return not isinstance(self._processes, LocalWorker)

    @property
    def tapes(self) -> Callable[[], dict[int, Tape]]:
        """See ``RequestQueue.tapes``."""
        if isinstance(self._processes, LocalWorker):
            return self._processes.tapes
        return super().tapes

    def updated(self, info: Any) -> Policy:
        """The ``policy`` of agents that were updated with this."""
        return Policy(self.policy.version + 1, self._workers.pack(info))

    def give_up(self) -> None:
        """Let the workers stop what they run; nobody is told."""
        if os.getpid() == self._owner_pid:
            self._workers.cancel()

    def close(self) -> None:
        """Stop what runs and end the workers. May be repeated, as all that it calls."""
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
        if self.fatal is not None:
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
        """Every worker is done with a request."""
        self._over(request)

    def _stop(self, request: Request) -> None:
        self._workers.stop(request)

    def n_finished(self, request: Request) -> int:
        """See ``RequestQueue.n_finished``."""
        if request.is_complete:
            return request.n_rows
        return request.n_finished(self._workers.control)

    def _abort(self) -> None:
        self._processes.abort()
