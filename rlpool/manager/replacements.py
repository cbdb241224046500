"""Workers that are being replaced: who left, who is to start when, who is starting."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from rlpool.errors import WorkerDiedError, WorkerError
from rlpool.workers.failure_policy import FailurePolicy, Restarts
from rlpool.workers.messages import Close
from rlpool.workers.supervisor import LEAVE_S, Supervisor

_LOG = logging.getLogger("rlpool")


class Replacements:
    """Follows every worker from its end to its successor's start.

    A worker is *down* from its failure, or from being told to leave, until its successor is up;
    until then nothing is sent to it. Nothing happens but in ``advance``, which the caller's waits
    call.

    Args:
        supervisor: The processes.
        policy: What may be replaced, and how often.

    Attributes:
        policy: Likewise.
        down: Workers that cannot be sent anything.
        starting: Those of them whose successors were started.
    """

    def __init__(self, supervisor: Supervisor, policy: FailurePolicy) -> None:
        self.policy = policy
        self.down: set[int] = set()
        self.starting: set[int] = set()
        self._supervisor = supervisor
        self._restarts = Restarts(policy.max_restarts)
        self._leaving: dict[int, float] = {}  # worker: when it is killed at the latest
        self._to_start: set[int] = set()
        self._recycled: set[int] = set()

    def note_failure(self, worker: int, failure: WorkerError) -> WorkerDiedError | None:
        """Take note of a failure; returns what to raise if there will be no successor."""
        error = self._restarts.note(worker, failure)
        self._recycled.discard(worker)
        if error is None:
            self.down.add(worker)
            self.starting.discard(worker)
            n, most = self._restarts.n_restarts, self.policy.max_restarts
            budget = f"{n}" if most is None else f"{n} of {most}"
            where = f" ({failure.where})" if str(failure.where) else ""
            _LOG.warning("%s%s: restart %s", failure.what, where, budget)
        return error

    def look_at(self, steps: Sequence[int]) -> None:
        """Take note of how many steps workers have made until now."""
        up = (worker for worker in range(len(steps)) if worker not in self.down)
        self._restarts.look_at({worker: steps[worker] for worker in up})

    def note_success(self, worker: int) -> None:
        """Take note that a worker has done some work."""
        self._restarts.succeeded(worker)

    def dismiss(self, worker: int) -> None:
        """Tell a worker that lives to close its environments and leave."""
        self.down.add(worker)
        self._leaving[worker] = time.monotonic() + LEAVE_S
        self._supervisor.send(worker, Close())

    def recycle(self, worker: int, why: str) -> None:
        """Replace a healthy worker."""
        _LOG.info("worker %d %s: it is replaced", worker, why)
        self.dismiss(worker)
        self._to_start.add(worker)
        self._recycled.add(worker)

    def is_recycled(self, worker: int) -> bool:
        """Whether a worker that is down was healthy."""
        return worker in self._recycled

    def has_left(self, worker: int) -> bool:
        """Take note of a worker's end; returns whether it had been told to leave."""
        return self._leaving.pop(worker, None) is not None

    def advance(self) -> WorkerDiedError | None:
        """Start the successors whose time has come; returns what to raise if that is over."""
        now_s = time.monotonic()
        for worker, deadline_s in self._leaving.items():
            if now_s > deadline_s:
                self._supervisor.kill(worker)
        self._to_start.update(self._restarts.due())
        for worker in sorted(self._to_start - self._leaving.keys()):
            self._to_start.discard(worker)
            try:
                self._supervisor.replace(worker)
            except OSError as error:
                what = f"worker {worker} could not be started again: {error}"
                failure = WorkerDiedError(what, exitcode=None)
                if final := self.note_failure(worker, failure):
                    return final
            else:
                self.starting.add(worker)
        return None

    def note_up(self, worker: int) -> None:
        """Take note that a worker has its environments and can be sent something."""
        self._restarts.ready(worker)
        self._recycled.discard(worker)
        self.starting.discard(worker)
        self.down.discard(worker)

    def patience_s(self, longest_s: float) -> float:
        """How long to wait at most before ``advance`` is called again."""
        due_s = self._restarts.next_due_s()
        return longest_s if due_s is None else min(longest_s, due_s + 0.001)
