"""Steps and resets of environments in workers: who is asked, who is waited for, who failed.

Each worker has one command at a time, a step or a reset of some of its lanes. The numbers of the
command that it was given last and of the one it finished last tell whether it is busy. A step is
asked for by writing into the buffers and waking the worker; a reset travels through its pipe.
Either way the worker says that it is done by a number in the buffers and a wake, so that a wait
that was interrupted can be taken up again.

Commands are given while handlers of signals wait, so that they are given whole and on the lanes'
tapes, or not at all. The step that was given last is kept until the user has been told what became
of it: whoever was interrupted meanwhile may ask for it again, and gets the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlpool.envs.vec_env import LaneError, Options
from rlpool.errors import EnvError, EnvSpecError, SpecError, UsageError, Where
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.manager.buffers import ALL_LANES, FAILED, SOME_LANES
from rlpool.manager.commands import Announce, Reset
from rlpool.manager.dispatch import ENV_HINT, EnvWorkers
from rlpool.memory.storage import Array
from rlpool.record.failures import DEBUG_HINT


@dataclass(slots=True)
class Step:
    """A step whose outcome the user was not told.

    Attributes:
        lanes: The lanes.
        workers: Their workers.
        is_waited_for: Whether the call that asked for it waits for all of it.
    """

    lanes: list[int]
    workers: list[int]
    is_waited_for: bool


class Stepper:
    """Gives the workers commands and waits for them.

    Args:
        workers: The workers, their buffers mapped.

    Attributes:
        open: The step that was asked for last, until the user has been told what became of it.
            Whoever tells them sets it to None; it is found here if that was interrupted.
    """

    def __init__(self, workers: EnvWorkers) -> None:
        self._workers = workers
        self._buffers = workers.buffers
        self._issued, self._finished = workers.issued, workers.buffers.finished
        self.open: Step | None = None
        self._last_lanes: list[int] | None = None  # of the last step
        self._last_workers: list[int] = []
        self._commanded: dict[int, Sequence[int]] = {}  # worker: lanes of its last command
        self._stale: set[int] = set()  # lanes that took part in a command that failed
        # What was asked for and not waited for yet:
        self._in_flight: dict[int, list[int]] = {}  # worker: lanes that are stepping
        self._ready: set[int] = set()  # lanes that have stepped
        self._failed: dict[int, list[int]] = {}  # worker that failed: lanes that were stepping

    def announce(self, seeds: Sequence[int], env_info: Mapping[str, Array]) -> None:
        """Tell every worker which episodes will come in its lanes."""
        workers = self._workers
        self.settle(range(workers.n_lanes))
        lanes = np.arange(len(seeds)) % workers.n_lanes
        words = np.asarray(seeds, np.int64)
        with InterruptsHeld():
            self._buffers.is_ahead[:] = -1
            for worker, own in enumerate(workers.lanes_of):
                rows = np.flatnonzero((lanes >= own[0]) & (lanes <= own[-1]))
                infos = {key: array[rows] for key, array in env_info.items()}
                workers.announce(worker, Announce(workers.n_lanes, rows, words[rows], infos))

    # All together -----------------------------------------------------------------------------

    def step(self, lanes: list[int]) -> bool:
        """Let lanes step with the actions in the buffers, and wait for all of them.

        An ``open`` step, which is of the same lanes, is not made again.

        Returns:
            Whether any episode ended.

        Raises:
            LaneFailure: If an environment failed.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
        """
        step = self.open
        if step is None:
            if lanes != self._last_lanes or self._workers.has_called:
                self._last_lanes = None
                self._last_workers = self._divide(lanes)
                self._last_lanes = lanes[:]
            step = self._issue(self._last_lanes, self._last_workers, is_waited_for=True)
        return self.finish(step.workers)

    def reset(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> list[int]:
        """Reset lanes, whose workers have settled; returns the workers to be waited for."""
        workers = self._workers
        rows: dict[int, list[int]] = {}
        for row, lane in enumerate(lanes):
            workers.options[lane] = options[row]
            rows.setdefault(workers.worker_of[lane], []).append(row)
        for worker, mine in rows.items():
            first = workers.lanes_of[worker].start
            message = Reset(
                self._issued[worker] + 1,
                [lanes[row] - first for row in mine],
                [seeds[row] for row in mine],
                [options[row] for row in mine],
            )
            workers.reset(worker, message)
            self._commanded[worker] = [lanes[row] for row in mine]
        self._last_lanes = None
        self.note_begun(lanes, seeds, options)
        return list(rows)

    def close_step(self) -> None:
        """Wait for a step that was interrupted, and forget what became of it."""
        step = self.open
        if step is not None and step.is_waited_for:
            with suppress(EnvError):
                self.finish(step.workers)
        self.open = None

    def settle(self, lanes: Sequence[int]) -> None:
        """Wait for what was asked of the workers of lanes and given up, and forget it."""
        self.close_step()
        if self._in_flight or self._ready or self._failed:
            self._drop(lanes)
        self._settle({self._workers.worker_of[lane] for lane in lanes})

    def _settle(self, workers: Iterable[int]) -> None:
        busy = [worker for worker in workers if self._issued[worker] != self._finished[worker]]
        if busy:
            with suppress(EnvError):
                self.finish(busy)

    def _issue(self, lanes: list[int], workers: list[int], *, is_waited_for: bool) -> Step:
        """Ask for a step of lanes, which are those of ``_divide``."""
        issued, step, wakes = self._issued, self._buffers.step, self._workers.wakes
        self._settle(workers)
        with InterruptsHeld():
            if self._workers.tapes is not None:
                self._workers.tapes.record_step(lanes)
            for worker in workers:
                if not is_waited_for:
                    self._in_flight[worker] = list(self._commanded[worker])
                issued[worker] += 1
                step[worker] = issued[worker]
                wakes[worker].signal()
            self.open = Step(lanes, workers, is_waited_for)
        return self.open

    def finish(self, workers: Sequence[int]) -> bool:
        """Wait until workers have carried out their commands; returns whether an episode ended.

        Raises:
            LaneFailure: If an environment failed.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
        """
        outcome = self._buffers.outcome
        self._workers.wait_idle(workers)
        some_ended = False
        for worker in workers:
            if outcome[worker]:
                some_ended = True
        if not some_ended:
            return False
        failed = [worker for worker in workers if outcome[worker] == FAILED]
        if failed:
            failures = [self._failure(worker) for worker in failed]  # which read the lanes' tapes
            with InterruptsHeld():
                for worker in failed:
                    self._note_failure(worker)
            failure = failures[0]
            self.open = None
            raise failure
        return True

    def note_begun(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> None:
        """Take note that lanes begin episodes, or go on with those that their workers began."""
        self.note_reset(lanes)
        if self._workers.tapes is not None:
            for lane, seed, option in zip(lanes, seeds, options, strict=True):
                self._workers.tapes.record_reset(lane, seed, option)

    def note_reset(self, lanes: Sequence[int]) -> None:
        """Take note that lanes are reset, which makes good whatever was wrong with them."""
        self._stale.difference_update(lanes)

    def _note_failure(self, worker: int) -> None:
        """Nobody knows what the lanes of a failed command have done: they need a reset."""
        self._stale.update(self._commanded[worker])
        self._last_lanes = None
        if self._workers.tapes is not None:
            for lane in self._commanded[worker]:
                self._workers.tapes.forget(lane)

    def _divide(self, lanes: Sequence[int]) -> list[int]:
        """Find the workers of lanes, and mark the lanes of those that shall not step all."""
        workers, buffers = self._workers, self._buffers
        workers.refuse_bad_lanes(lanes)
        self.refuse_stepping(lanes)
        self._refuse_stale(lanes)
        workers.has_called = False
        asked = np.zeros(workers.n_lanes, bool)
        asked[list(lanes)] = True
        found = []
        for worker, own in enumerate(workers.lanes_of):
            mine = asked[own.start : own.stop]
            if mine.any():
                self._settle([worker])
                buffers.asked[own.start : own.stop] = mine
                buffers.partial[worker] = ALL_LANES if mine.all() else SOME_LANES
                self._commanded[worker] = [lane for lane in lanes if lane in own]
                found.append(worker)
        return found

    def _failure(self, worker: int) -> LaneFailure:
        """What a worker reports about the command that failed."""
        failed, error = self._workers.failure(worker)
        lane = self._workers.lanes_of[worker][failed.lane]
        return lane_failure(error, lane, failed.call, error.where)

    # First come, first served -----------------------------------------------------------------

    def begin_some(self, lanes: Sequence[int]) -> None:
        """Let lanes step with the actions in the buffers, while others may be stepping."""
        self._last_lanes = None
        self._issue(list(lanes), self._divide(lanes), is_waited_for=False)

    def look(self) -> None:
        """Take notice of deaths and hangs, for callers that never wait.

        Raises:
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
        """
        if self._in_flight:
            self._workers.look()

    def take_ready(self, min_ready: int) -> list[int]:
        """Wait until so many lanes have stepped, or all that are stepping; returns all that have.

        Raises:
            LaneFailure: If an environment failed; lanes of other workers are told the next time.
        """
        n_stepping = sum(map(len, self._in_flight.values()))
        wanted = min(min_ready, len(self._ready) + n_stepping)
        self._collect()
        self._workers.processes.look_from_now_on()
        while len(self._ready) < wanted and not self._failed:
            self._workers.look(self._workers.processes.patience_s)
            self._collect()
        if self._failed:
            worker = next(iter(self._failed))
            failure = self._failure(worker)
            del self._failed[worker]
            raise failure
        ready, none = sorted(self._ready), set[int]()
        # Nothing is called from here on, so that no handler runs before the caller has them.
        self._ready, self.open = none, None
        return ready

    def refuse_stepping(self, lanes: Sequence[int]) -> None:
        """Refuse to use lanes that are stepping, or whose step was not taken notice of."""
        if not self._in_flight and not self._ready:
            return
        busy = {lane for worker in self._in_flight for lane in self._workers.lanes_of[worker]}
        busy = busy.union(self._ready).intersection(lanes)
        if busy:
            raise UsageError(
                f"lane {min(busy)} is stepping already, or another lane of its worker is",
                fix="wait until step_some() returns it, or reset it",
            )

    def _refuse_stale(self, lanes: Sequence[int]) -> None:
        stale = self._stale.intersection(lanes)
        if stale:
            raise UsageError(
                f"lane {min(stale)} cannot go on: an environment of its worker failed in its "
                "last step or reset",
                fix="reset it",
            )

    def _collect(self) -> None:
        """Note which of the workers that are stepping are done."""
        for worker, lanes in list(self._in_flight.items()):
            if self._finished[worker] != self._issued[worker]:
                continue
            has_failed = self._buffers.outcome[worker] == FAILED
            if has_failed:
                self._workers.failure(worker)  # which reads the lanes' tapes
            with InterruptsHeld():
                if has_failed:
                    self._failed[worker] = lanes
                    self._note_failure(worker)
                else:
                    self._ready.update(lanes)
                del self._in_flight[worker]

    def _drop(self, lanes: Sequence[int]) -> None:
        """Wait for the workers of lanes that are stepping, and forget what became of those."""
        workers = {self._workers.worker_of[lane] for lane in lanes}
        self._workers.wait_idle([worker for worker in workers if worker in self._in_flight])
        self._collect()
        self._ready.difference_update(lanes)
        for worker in workers.intersection(self._failed):
            self._failed[worker] = [lane for lane in self._failed[worker] if lane not in lanes]
            if not self._failed[worker]:
                del self._failed[worker]


class LaneFailure(EnvError, LaneError):
    """An ``EnvError`` of a lane, as callers of the lane contract expect it.

    Attributes:
        lane: The lane.
        call: ``"reset"`` or ``"step"``.
    """

    lane: int
    call: str

    def __reduce__(self) -> Any:
        kind = EnvSpecError if isinstance(self, EnvSpecError) else EnvError
        return kind(**self._constructor_arguments()).__reduce__()


class LaneSpecFailure(LaneFailure, EnvSpecError):
    """An ``EnvSpecError`` of a lane."""


def lane_failure(error: EnvError, lane: int, call: str, where: Where) -> LaneFailure:
    """A worker's report about a lane as an exception."""
    kind = LaneSpecFailure if isinstance(error, SpecError) else LaneFailure
    failure = kind(
        error.what,
        where=where,
        fix=ENV_HINT if error.fix == DEBUG_HINT else error.fix,
        traceback_text=error.traceback_text,
        capsule=error.capsule,
    )
    failure.lane, failure.call = lane, call
    return failure
