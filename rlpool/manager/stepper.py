"""Steps and resets of environments in workers: who is asked, who is waited for, who failed.

Each worker has one command at a time, a step or a reset of some of its lanes. It is busy while the
number of its last command differs from the number of the last one it has finished. A step is
issued by writing into the buffers, and waking the worker if it sleeps; a reset travels through its
pipe. Either way the worker reports the end with a number in the buffers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np

from rlpool.envs.vec_env import Options
from rlpool.errors import EnvError, SpecError, UsageError, WorkerError
from rlpool.manager.channel import ALL_LANES, FAILED, SOME_LANES, Reset
from rlpool.manager.env_workers import EnvWorkers
from rlpool.workers.sharing import ByValue


class Stepper:
    """Gives the workers commands and waits for them.

    Args:
        workers: The workers, their buffers mapped.
    """

    def __init__(self, workers: EnvWorkers) -> None:
        self._workers = workers
        self._buffers = workers.buffers
        self._issued, self._finished = workers.issued, workers.buffers.finished
        self._last_lanes: list[int] | None = None  # of the last step
        self._last_workers: list[int] = []
        self._forget_steps()

    def _forget_steps(self) -> None:
        # Of ``step_some``: worker to its stepping lanes, lanes that have made their step, failures.
        self._stepping: dict[int, list[int]] = {}
        self._ready: list[int] = []
        self._failures: list[WorkerError] = []

    def begin_again(self) -> None:
        """Begin with new workers, whatever an interrupted call has left."""
        self._workers.begin_again()
        self.divide_anew()
        self._forget_steps()

    # Commands ---------------------------------------------------------------------------------

    def workers_of(self, lanes: list[int]) -> list[int]:
        """The workers of some lanes, told in the buffers which of their lanes step next.

        A worker makes one step at a time: if others of its lanes are stepping, they are waited for.

        Raises:
            SpecError, UsageError: If one of the lanes cannot step.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
        """
        if lanes != self._last_lanes:
            self._last_lanes = None
            self._last_workers = self._divide(lanes)
            self._last_lanes = lanes[:]
        return self._last_workers

    def issue(self, lanes: list[int], workers: list[int]) -> None:
        """Let the lanes of ``workers_of`` step with the actions in the buffers."""
        issued, step, wakes = self._issued, self._buffers.step, self._workers.wakes
        self._workers.tapes.record_step(lanes)
        for worker in workers:
            issued[worker] += 1
            step[worker] = issued[worker]
            wakes[worker].signal()

    def let_go(self, workers: list[int]) -> None:
        """Leave steps that were issued to ``take_ready``, instead of waiting for them."""
        self.divide_anew()
        for worker in workers:
            self._stepping[worker] = list(self._workers.commanded[worker])

    def reset(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> list[int]:
        """Let lanes begin episodes, and return the workers to wait for."""
        workers = self._workers
        rows: dict[int, list[int]] = {}
        sent: list[Any] = [option and ByValue("options", option) for option in options]
        for row, lane in enumerate(lanes):
            rows.setdefault(workers.worker_of[lane], []).append(row)
        self.divide_anew()
        for worker, mine in rows.items():
            first = workers.lanes_of[worker].start
            episodes = [(lanes[row] - first, seeds[row], sent[row]) for row in mine]
            message = Reset(self._issued[worker] + 1, episodes)
            workers.processes.send(worker, message)
            workers.resets[worker], self._issued[worker] = message, message.number
            workers.commanded[worker] = [lanes[row] for row in mine]
        for lane, seed, option in zip(lanes, seeds, options, strict=True):
            workers.tapes.record_reset(lane, seed, option)
        return list(rows)

    def settle(self, lanes: Collection[int]) -> None:
        """Wait for steps of lanes that the user has given up, and forget their outcome."""
        self._workers.processes.poll(0.0)  # what workers have logged is there, too
        self._let_finish({self._workers.worker_of[lane] for lane in lanes})
        self._ready = [lane for lane in self._ready if lane not in lanes]
        self._failures = [error for error in self._failures if error.where.lane not in lanes]

    def _let_finish(self, workers: Collection[int]) -> None:
        """Wait for what workers are doing: ``step_some`` tells how it ended."""
        busy = [w for w in workers if self._issued[w] != self._finished[w]]
        if busy:
            with suppress(EnvError):
                self.finish(busy)
        self._collect()  # before the next command of a worker makes it forget the last one

    def finish(self, workers: Sequence[int]) -> bool:
        """Wait until workers have carried out their commands; returns whether an episode ended.

        Raises:
            LaneFailure: If an environment failed.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
        """
        outcome = self._buffers.outcome
        self._workers.wait_idle(workers)
        some_ended, failed = False, []
        for worker in workers:
            if outcome[worker] == FAILED:
                failed.append(worker)
            elif outcome[worker]:
                some_ended = True
        if failed:
            failures = [self._workers.failure(worker) for worker in failed]
            for worker in failed:
                self._note_failure(worker)
            raise failures[0]
        return some_ended

    def divide_anew(self) -> None:
        """Let the next step look again at which workers have its lanes, and whether they may."""
        self._last_lanes = None

    def _note_failure(self, worker: int) -> None:
        """What the lanes of a failed command have done is unknown: they need a reset."""
        self.divide_anew()
        for lane in self._workers.commanded[worker]:
            self._workers.tapes.forget(lane)

    def _divide(self, lanes: Sequence[int]) -> list[int]:
        workers, buffers = self._workers, self._buffers
        self.refuse_bad_lanes(lanes)
        self.refuse_stepping(lanes)
        found = sorted({workers.worker_of[lane] for lane in lanes})
        self._let_finish(found)
        self._refuse_unknown(lanes)
        asked = np.zeros(workers.n_lanes, bool)
        asked[list(lanes)] = True
        for worker in found:
            own = workers.lanes_of[worker]
            mine = asked[own.start : own.stop]
            buffers.asked[own.start : own.stop] = mine
            buffers.partial[worker] = ALL_LANES if mine.all() else SOME_LANES
            workers.commanded[worker] = [lane for lane in own if asked[lane]]
        return found

    # Lanes that cannot step -------------------------------------------------------------------

    def refuse_bad_lanes(self, lanes: Sequence[int]) -> None:
        """Refuse lanes that are not ascending numbers of open environments.

        Raises:
            SpecError, UsageError: If they are not.
        """
        given, n_lanes = list(lanes), self._workers.n_lanes
        if not given or given != sorted(set(given)) or given[0] < 0 or given[-1] >= n_lanes:
            raise SpecError(f"lanes should be ascending numbers below {n_lanes}, got {given}")
        closed = self._workers.closed_lanes.intersection(lanes)
        if closed:
            raise UsageError(f"environment {min(closed)} was closed by its remote")
        waiting = self._workers.requests.keys() & set(lanes)
        if waiting:
            raise UsageError(
                f"remote {min(waiting)} has a request without an answer",
                fix=f"call remotes[{min(waiting)}].recv() first",
            )

    def _refuse_unknown(self, lanes: Sequence[int]) -> None:
        for lane in lanes:
            if self._workers.tapes.peek(lane) is None:
                raise UsageError(
                    f"lane {lane} cannot go on: it was not reset, or an environment of its worker "
                    "failed in its last step or reset",
                    fix="reset it",
                )

    def refuse_stepping(self, lanes: Sequence[int]) -> None:
        """Refuse lanes that ``step_some`` let step and has yet to return."""
        stepping = {*self._ready, *chain.from_iterable(self._stepping.values())}
        for lane in lanes:
            if lane in stepping:
                raise UsageError(
                    f"lane {lane} is stepping already",
                    fix="wait until step_some() returns it, or reset it",
                )

    # First come, first served -----------------------------------------------------------------

    def take_ready(self, min_ready: int) -> list[int]:
        """Wait until that many lanes have stepped, or all; returns those that have, ascending.

        Raises:
            LaneFailure: If an environment failed; lanes of other workers are returned by the next
                call.
        """
        if not min_ready and self._stepping:
            self._workers.look()  # for callers that never wait
        n_stepping = len(self._ready) + sum(map(len, self._stepping.values()))
        wanted = min(min_ready, n_stepping)

        def are_enough() -> bool:
            self._collect()
            return bool(self._failures) or len(self._ready) >= wanted

        self._workers.wait_finished(are_enough)
        if self._failures:
            raise self._failures.pop(0)
        ready, self._ready = sorted(self._ready), []
        return ready

    def _collect(self) -> None:
        """Note which lanes have made their step, and whose step failed."""
        finished, issued = self._finished, self._issued
        for worker in [each for each in self._stepping if finished[each] == issued[each]]:
            lanes = self._stepping.pop(worker)
            if self._buffers.outcome[worker] == FAILED:
                self._failures.append(self._workers.failure(worker))
                self._note_failure(worker)
            else:
                self._ready += lanes
