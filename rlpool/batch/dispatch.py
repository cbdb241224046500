"""The caller's side of collecting: a queue of requests, their blocks and their results.

A request is queued until its slots fit into what is in flight, then it runs in every worker, until
each is done with it and its result goes to the user. If it fails or is given up, its block is used
again once every worker is done with it.
"""

from __future__ import annotations

import logging
from typing import Any

from rlpool.batch.request_workers import RequestWorkers
from rlpool.batch.requests import Policy, Request
from rlpool.errors import RlpoolError, SpecError, WorkerError
from rlpool.observe.control import MAX_REQUESTS
from rlpool.slots.block_pool import BlockPool

_LOG = logging.getLogger("rlpool")


class Dispatcher(RequestWorkers):
    """Sends requests to workers and collects their results, in order; see ``RequestWorkers``."""

    _probing: Request | None = None  # whose infos the workers are probed with

    def updated(self, info: Any) -> Policy:
        """The ``policy`` of agents that were updated with this."""
        return Policy(self.policy.version + 1, self._pack(info))

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

    def _note_probed(self) -> None:
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
            probing.error = self._crash_files.with_file(problem)
        self._advance()

    def _make_blocks(self) -> None:
        if self._agreement.specs is not None:
            layout = self._make_layout(self._agreement.specs)
            self._blocks = BlockPool(layout, self._make_memory)

    # Sending ---------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Send queued requests as far as slots allow."""
        if self.fatal is not None:
            return
        while self._queued and self._blocks is None and self._agreement.infos is None:
            self._probing = request = self._queued[0]
            try:
                self._agreement.probe(self._pack((*request.infos, {})))
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
                self._send(request, self._blocks.forget_surplus())

    def _prepare(self, request: Request, blocks: BlockPool) -> None:
        """Do all that may fail before anything is sent.

        Raises:
            RlpoolError: If it did; the request is not sent.
        """
        self._check_successors(request)
        request.check(blocks.layout)
        request.block = blocks.take()
        if any(request.infos):
            request.packed = self._pack((*request.infos, {}))
