"""What a step consists of: workers find that out, and all of them have to agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlpool.batch.local_worker import LocalWorker
from rlpool.batch.messages import Probe, Report
from rlpool.errors import RlpoolError, SpecError, WorkerError
from rlpool.slots.blocks import StepSpecs
from rlpool.workers.payload import Packed
from rlpool.workers.workers import Workers


class Agreement:
    """Compares what workers report.

    Workers report when they are ready. Where environments or agents need infos to run at all, they
    report again once they were probed with those of the first request.

    Args:
        workers: The workers.

    Attributes:
        specs: What a step consists of, ``None`` before that is known.
        infos: What the workers are probed with, ``None`` if they are not.
        environment: What the environments are.
    """

    def __init__(self, workers: Workers | LocalWorker) -> None:
        self.specs: StepSpecs | None = None
        self.infos: Packed | None = None
        self.environment: Mapping[str, Any] = {}
        self._workers = workers
        self._reports: dict[int, Report] = {}

    def probe(self, infos: Packed) -> None:
        """Let all workers find out their keys with infos."""
        self.infos = infos
        self._reports.clear()
        for worker in self._workers.up:
            self._workers.send(worker, Probe(infos.payload), infos.memory)

    def forget(self, worker: int) -> None:
        """Drop the report of a worker that is gone."""
        self._reports.pop(worker, None)

    def take_first(self, worker: int, report: Report) -> bool:
        """Take what a new worker reports, or probe it like the others; returns as ``take``."""
        if report.specs is None and self.infos is not None:
            self._workers.send(worker, Probe(self.infos.payload), self.infos.memory)
            return False
        return self.take(worker, report)

    def take(self, worker: int, report: Report) -> bool:
        """Take a report; one that differs from what was agreed on ends its worker, or all.

        Returns:
            Whether all workers have answered a probe, so that ``conclude`` is due.
        """
        self._reports[worker] = report
        if self.specs in (None, report.specs):
            is_probed = self.specs is None and self.infos is not None
            return is_probed and len(self._reports) == self._workers.n_workers
        if isinstance(report.error, WorkerError):
            self._workers.kill(worker, report.error)
        else:
            self._workers.fail(
                SpecError(
                    f"worker {worker} was started again, and its steps are different: "
                    f"{report.error or report.specs}, before: {self.specs}",
                    fix="create_env and create_agent must always make the same",
                )
            )
        return False

    @property
    def n_lanes(self) -> int:
        """Lanes of each worker, once all are ready."""
        return self._reports[0].n_lanes

    def conclude(self) -> RlpoolError | None:
        """Compare the reports of all workers; returns why there are no specs, if there are none."""
        reports = [self._reports[worker] for worker in range(self._workers.n_workers)]
        self.environment = reports[0].environment
        problem = _disagreement(reports)
        if problem is None:
            self.specs = reports[0].specs
        else:
            self.infos = None  # those of the next request may give the keys
        return problem


def _disagreement(reports: Sequence[Report]) -> RlpoolError | None:
    """Why workers cannot run the same requests, ``None`` if they can."""
    first = reports[0]
    for worker, report in enumerate(reports):
        if report.n_lanes != first.n_lanes:
            what = (
                f"worker 0 has {first.n_lanes} environments, worker {worker} has {report.n_lanes}"
            )
            return SpecError(what, fix="create the same number of environments in every worker")
    for worker, report in enumerate(reports):
        if report.error is not None:
            return report.error
        if report.specs != first.specs:
            specs = f"{first.specs} and {report.specs}"
            return SpecError(
                f"worker 0 and worker {worker} disagree about their steps: {specs}",
                fix="create_env and create_agent must not depend on the worker",
            )
    return None
