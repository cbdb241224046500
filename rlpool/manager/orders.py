"""Steps and resets of environments in workers: who is asked, who is waited for, who failed.

An order is a step or a reset of some of a worker's lanes. Each worker has one at a time; the
numbers of the order it was given last and of the one it finished last tell whether it is busy. A
step is asked for by writing into the arena and waking the worker; a reset travels through its
pipe. Either way the worker says that it is done by a number in the arena and a wake, so that what
was interrupted can be waited for again.

A signal's handler may raise anywhere. A step is therefore written down before it is asked for, and
asking again changes nothing: whoever comes next finds it, goes on where the interruption was, and
waits for it. What is rarer than a step is done while such handlers wait.
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
from rlpool.manager.arena import ALL_LANES, FAILED, SOME_LANES
from rlpool.manager.env_crew import EnvCrew
from rlpool.manager.env_messages import Announce, Reset
from rlpool.manager.watched_crew import ENV_HINT
from rlpool.memory.storage import Array
from rlpool.record.failures import DEBUG_HINT


@dataclass(slots=True)
class Step:
    """A step whose outcome the user was not told.

    Attributes:
        lanes: The lanes.
        workers: Their workers.
        numbers: The numbers of these workers' orders.
        row: Of the log.
        is_waited_for: Whether the call that asked for it waits for all of it.
        is_issued: Whether all workers were asked.
    """

    lanes: list[int]
    workers: list[int]
    numbers: list[int]
    row: int
    is_waited_for: bool
    is_issued: bool = False


class Orders:
    """Gives the workers orders and waits for them.

    Args:
        crew: The workers, their arena mapped.

    Attributes:
        open: The step that was asked for last, until the user has been told what became of it.
            Whoever tells them sets it to None; it is found here if that was interrupted.
    """

    def __init__(self, crew: EnvCrew) -> None:
        self._crew = crew
        self._arena = crew.arena
        self._log = crew.log
        self._issued, self._finished = crew.issued, crew.arena.finished
        self.open: Step | None = None
        self._last_lanes: list[int] | None = None  # of the last step
        self._last_workers: list[int] = []
        self._ordered: dict[int, Sequence[int]] = {}  # worker: lanes of its last order
        self._stale: set[int] = set()  # lanes that took part in an order that failed
        # What was asked for and not waited for yet:
        self._in_flight: dict[int, list[int]] = {}  # worker: lanes that are stepping
        self._ready: set[int] = set()  # lanes that have stepped
        self._failed: dict[int, list[int]] = {}  # worker that failed: lanes that were stepping

    def announce(self, seeds: Sequence[int], env_info: Mapping[str, Array]) -> None:
        """Tell every worker which episodes will come in its lanes."""
        crew = self._crew
        self.settle(range(crew.n_lanes))
        lanes = np.arange(len(seeds)) % crew.n_lanes
        words = np.asarray(seeds, np.int64)
        messages = []
        for own in crew.lanes_of:
            rows = np.flatnonzero((lanes >= own[0]) & (lanes <= own[-1]))
            infos = {key: array[rows] for key, array in env_info.items()}
            messages.append(Announce(crew.n_lanes, rows, words[rows], infos))
        with InterruptsHeld():
            self._arena.is_ahead[:] = -1
            for worker, message in enumerate(messages):
                crew.announce(worker, message)

    # All together -----------------------------------------------------------------------------

    def step(self, lanes: list[int]) -> bool:
        """Let lanes step with the actions in the arena, and wait for all of them.

        An ``open`` step, which is of the same lanes, is not made again.

        Returns:
            Whether any episode ended.

        Raises:
            LaneFailure: If an environment failed.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
        """
        step = self.open
        if step is None:
            if lanes != self._last_lanes or self._crew.has_called:
                self._last_lanes = None
                self._last_workers = self._divide(lanes)
                self._last_lanes = lanes[:]
            step = self._issue(self._last_lanes, self._last_workers, is_waited_for=True)
        return self._finish(step.workers)

    def reset(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> list[int]:
        """Reset lanes, whose workers have settled; returns the workers to be waited for."""
        crew = self._crew
        rows: dict[int, list[int]] = {}
        for row, lane in enumerate(lanes):
            crew.options[lane] = options[row]
            rows.setdefault(crew.worker_of[lane], []).append(row)
        for worker, mine in rows.items():
            first = crew.lanes_of[worker].start
            message = Reset(
                self._issued[worker] + 1,
                [lanes[row] - first for row in mine],
                [seeds[row] for row in mine],
                [options[row] for row in mine],
            )
            crew.order_reset(worker, message)
            self._ordered[worker] = [lanes[row] for row in mine]
        self._last_lanes = None
        self._stale.difference_update(lanes)
        self._note_in_log(lanes, seeds, options)
        return list(rows)

    def wait_for_resets(self, workers: Sequence[int]) -> None:
        """Wait for lanes that are being reset.

        Raises:
            LaneFailure: If an environment failed.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
        """
        self._finish(workers)

    def begin(self) -> None:
        """Go on with a step that was interrupted while it was asked for, or refuse to go on.

        What every call begins with: successors have to be told what was asked for.

        Raises:
            UsageError, WorkerDiedError, WorkerTimeoutError: See ``EnvCrew.check_open``.
        """
        crew, step = self._crew, self.open
        if step is not None and not step.is_issued and not crew.closed:
            crew.refuse_forked_copy()
            self._ask_for(step)
        crew.check_open()

    def close_step(self) -> None:
        """Wait for a step that was interrupted, and forget what became of it."""
        step = self.open
        if step is not None and step.is_waited_for:
            with suppress(EnvError):
                self._finish(step.workers)
        self.open = None

    def settle(self, lanes: Sequence[int]) -> None:
        """Wait for what was asked of the workers of lanes and given up, and forget it."""
        self.close_step()
        if self._in_flight or self._ready or self._failed:
            self._drop(lanes)
        self._settle({self._crew.worker_of[lane] for lane in lanes})

    def _settle(self, workers: Iterable[int]) -> None:
        busy = [worker for worker in workers if self._issued[worker] != self._finished[worker]]
        if busy:
            with suppress(EnvError):
                self._finish(busy)

    def _issue(self, lanes: list[int], workers: list[int], *, is_waited_for: bool) -> Step:
        """Ask for a step of lanes, which are those of ``_divide``."""
        issued = self._issued
        for worker in workers:
            if issued[worker] != self._finished[worker]:
                self._settle([worker])
        row = 0 if self._log is None else self._log.next_row()
        numbers = [issued[worker] + 1 for worker in workers]
        self.open = step = Step(lanes, workers, numbers, row, is_waited_for)
        self._ask_for(step)
        return step

    def _ask_for(self, step: Step) -> None:
        """Wake workers for a step. Done again, it changes nothing."""
        issued, order, wakes = self._issued, self._arena.order, self._crew.wakes
        if self._log is not None:
            self._log.note_step(step.lanes, step.row)
        for worker, number in zip(step.workers, step.numbers, strict=True):
            if not step.is_waited_for:
                self._in_flight[worker] = list(self._ordered[worker])
            issued[worker] = number
            order[worker] = number
            wakes[worker].signal()
        step.is_issued = True

    def _finish(self, workers: Sequence[int]) -> bool:
        """Wait until workers have carried out their orders; returns whether an episode ended."""
        crew, outcome = self._crew, self._arena.outcome
        while True:
            crew.wait_idle(workers)
            some_ended = False
            for worker in workers:
                if outcome[worker]:
                    some_ended = True
            if not some_ended:
                return False
            failed = [worker for worker in workers if outcome[worker] == FAILED]
            again = [worker for worker in failed if crew.try_again(worker)]
            if not again:
                break
        if failed:
            with InterruptsHeld():
                for worker in failed:
                    self._note_failure(worker)
            failure = self._failure(failed[0])
            self.open = None
            raise failure
        return True

    def note_reset(self, lanes: Sequence[int]) -> None:
        """Take note that lanes were reset in another way than by ``reset``."""
        self._stale.difference_update(lanes)

    def note_begun(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> None:
        """Take note that lanes go on with episodes that their workers have begun."""
        self.note_reset(lanes)
        self._note_in_log(lanes, seeds, options)
        for lane in lanes:
            self._crew.recycling.note_begun(self._crew.worker_of[lane], 1)

    def _note_in_log(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> None:
        if self._log is not None:
            for lane, seed, option in zip(lanes, seeds, options, strict=True):
                self._log.note_reset(lane, seed, option)

    def _note_failure(self, worker: int) -> None:
        """Nobody knows what the lanes of a failed order have done: they need a reset."""
        self._stale.update(self._ordered[worker])
        self._last_lanes = None
        if self._log is not None:
            self._crew.capsules.remember(worker, self._ordered[worker])
            for lane in self._ordered[worker]:
                self._log.forget(lane)

    def _divide(self, lanes: Sequence[int]) -> list[int]:
        """Find the workers of lanes, and mark the lanes of those that shall not step all."""
        crew, arena = self._crew, self._arena
        crew.refuse_bad_lanes(lanes)
        self.refuse_stepping(lanes)
        self._refuse_stale(lanes)
        crew.has_called = False
        asked = np.zeros(crew.n_lanes, bool)
        asked[list(lanes)] = True
        workers = []
        for worker, own in enumerate(crew.lanes_of):
            mine = asked[own.start : own.stop]
            if mine.any():
                self._settle([worker])
                arena.asked[own.start : own.stop] = mine
                arena.partial[worker] = ALL_LANES if mine.all() else SOME_LANES
                self._ordered[worker] = [lane for lane in lanes if lane in own]
                workers.append(worker)
        return workers

    def _failure(self, worker: int) -> LaneFailure:
        """What a worker reports about the order that failed."""
        crew = self._crew
        failure = crew.failure_of(worker)
        lane = crew.lanes_of[worker][failure.lane]
        where = crew.where(lane)
        if failure.call == "reset":
            where = where._replace(step=0)
        error = failure.error
        if not failure.is_lost:
            error = crew.capsules.of_order(error, failure.call, where)
        return lane_failure(error, lane, failure.call, where)

    # First come, first served -----------------------------------------------------------------

    def begin_some(self, lanes: Sequence[int]) -> None:
        """Let lanes step with the actions in the arena, while others may be stepping."""
        self._last_lanes = None
        self._issue(list(lanes), self._divide(lanes), is_waited_for=False)

    def look(self) -> None:
        """Take notice of deaths and hangs, for callers that never wait.

        Raises:
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
        """
        if self._in_flight:
            self._crew.look(self._in_flight)

    def take_ready(self, min_ready: int) -> list[int]:
        """Wait until so many lanes have stepped, or all that are stepping; returns all that have.

        Raises:
            LaneFailure: If an environment failed; lanes of other workers are told the next time.
        """
        n_stepping = sum(map(len, self._in_flight.values()))
        wanted = min(min_ready, len(self._ready) + n_stepping)
        self._collect()
        while len(self._ready) < wanted and not self._failed:
            self._crew.wait_for_any(self._in_flight)
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
        busy = {lane for worker in self._in_flight for lane in self._crew.lanes_of[worker]}
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
        for worker in list(self._in_flight):
            if self._finished[worker] == self._issued[worker]:
                has_failed = self._arena.outcome[worker] == FAILED
                if has_failed and self._crew.try_again(worker):
                    continue
                # Done again after an interruption, it changes nothing.
                lanes = self._in_flight[worker]
                if has_failed:
                    self._failed[worker] = lanes
                    with InterruptsHeld():
                        self._note_failure(worker)
                else:
                    self._ready.update(lanes)
                del self._in_flight[worker]

    def _drop(self, lanes: Sequence[int]) -> None:
        """Wait for the workers of lanes that are stepping, and forget what became of those."""
        workers = {self._crew.worker_of[lane] for lane in lanes}
        self._crew.wait_idle([worker for worker in workers if worker in self._in_flight])
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
    fix = ENV_HINT if error.fix == DEBUG_HINT else error.fix
    failure = kind(
        error.what,
        where=where,
        fix=fix,
        traceback_text=error.traceback_text,
        capsule=error.capsule,
    )
    failure.lane, failure.call = lane, call
    return failure
