"""What the lanes of a ``ParallelEnvManager`` do, and what it takes to continue in another process.

A lane runs an episode, which is on its tape, and does one thing at a time: a step or a reset, as
part of a numbered command to its worker, or a request of its remote.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from rlpool.envs.vec_env import LaneError
from rlpool.errors import EnvError, EnvSpecError, SpecError, Where, WorkerError
from rlpool.manager.buffers import FAILED, Buffers
from rlpool.manager.messages import Announce, Call, Predecessor
from rlpool.record.failures import ENV_HINT
from rlpool.record.tape import LaneTapes, Tape, actions_of
from rlpool.workers.sharing import ByValue


@dataclass
class Request:
    """A request to one environment, until the user has received its reply.

    Attributes:
        call: The request.
        reply: The reply, pickled, once it is there.
        error: What failed, if anything did.
    """

    call: Call
    reply: bytes | None = None
    error: WorkerError | None = None


class LaneStates:
    """The lanes of all workers, as the caller knows them.

    Args:
        n_lanes: How many there are.
        envs_per_worker: Lanes of a worker; the last one may have fewer.

    Attributes:
        n_lanes: As given.
        n_workers: Number of workers.
        lanes_of: For each worker its lanes.
        worker_of: For each lane its worker.
        tapes: The episode of each lane.
        buffers: The shared memory, empty until it is mapped.
        issued: For each worker the number of its last command.
        commanded: For each worker the lanes of its last command.
        requests: Requests to single lanes whose replies the user has not received.
        attributes: For each lane the attributes that were set, for a successor.
        closed_lanes: Lanes that were closed one by one.
        announced: For each worker the episodes that will come.
        failures: Lane to why its episode was given up.
        reports_failures: Whether none is given up here, see ``VecEnv.report_failures``.
    """

    def __init__(self, n_lanes: int, envs_per_worker: int) -> None:
        self.n_lanes = n_lanes
        starts = range(0, n_lanes, envs_per_worker)
        self.lanes_of = [range(s, min(s + envs_per_worker, n_lanes)) for s in starts]
        self.worker_of = [w for w, lanes in enumerate(self.lanes_of) for _ in lanes]
        self.n_workers = len(self.lanes_of)
        self.tapes = LaneTapes(n_lanes)
        self.buffers = Buffers()
        self.issued = [0] * self.n_workers
        self.commanded: list[Sequence[int]] = [()] * self.n_workers
        self.requests: dict[int, Request] = {}
        self.attributes: list[dict[str, ByValue]] = [{} for _ in range(n_lanes)]
        self.closed_lanes: set[int] = set()
        self.announced: dict[int, Announce] = {}
        self.failures: dict[int, WorkerError] = {}
        self.reports_failures = False
        self._failures: dict[int, tuple[int, WorkerError]] = {}  # with the number of the command
        self._failed: dict[int, tuple[tuple[Tape, int], int]] = {}  # and how often
        self._given_up: dict[int, tuple[Tape, int]] = {}  # lane: episode, step

    def is_unanswered(self, lane: int) -> bool:
        """Whether a lane's request has no reply yet."""
        return lane in self.requests and self.requests[lane].reply is None

    def _request(self, lane: int, command: str) -> Request | None:
        """A lane's request of this kind, ``None`` if it was given up."""
        request = self.requests.get(lane)
        return request if request is not None and request.call.command == command else None

    def _is_busy(self, worker: int) -> bool:
        """Whether a worker has not finished its last command."""
        issued = self.issued[worker]  # 0 before the buffers are mapped
        return bool(issued) and issued != self.buffers.finished[worker]

    def _call_of(self, lane: int) -> str:
        """What a lane is doing: ``"reset"``, ``"step"``, or neither."""
        if self.is_unanswered(lane):
            command = self.requests[lane].call.command
            return "reset" if command == "describe" else command
        worker = self.worker_of[lane]
        if not self._is_busy(worker) or lane not in self.commanded[worker]:
            return ""
        return "step" if self.buffers.step[worker] == self.issued[worker] else "reset"

    def _fails_next(self, lane: int) -> bool:
        """Whether what a lane does next, or again, is known to fail."""
        tape, step = self._given_up.get(lane, (None, 0))
        if tape is None or tape is not self.tapes.peek(lane):
            return False
        return self.tapes.n_steps(lane) - (self._call_of(lane) == "step") == max(step, 0)

    def busy(self) -> Collection[int]:
        """Workers that have something to do."""
        busy = {self.worker_of[lane] for lane in filter(self.is_unanswered, self.requests)}
        return busy.union(filter(self._is_busy, range(self.n_workers)))

    def lost(self, worker: int, failure: WorkerError | None) -> None:
        """Forget the episodes that a worker has begun ahead of time: its successor has not."""
        for lane in self.lanes_of[worker] if self.issued[worker] else ():
            if self.buffers.is_ahead[lane] >= 0:
                self.buffers.is_ahead[lane] = -1
                self.tapes.forget(lane)

    def forget_failures(self, lanes: Sequence[int]) -> None:
        """Forget why episodes of lanes were given up that are not in them any more."""
        for lane in self.failures.keys() & lanes:
            if self._given_up[lane][0] is not self.tapes.peek(lane):
                del self.failures[lane]

    def _count_failure(self, lane: int, place: tuple[Tape, int]) -> int:
        """How often in a row a lane has failed at the same step of the same episode."""
        before = self._failed.get(lane)
        n = before[1] + 1 if before is not None and before[0] == place else 1
        self._failed[lane] = place, n
        return n

    def _predecessor(self, worker: int) -> Predecessor:
        """Where a worker's lanes are, for the successor of its process."""
        own = self.lanes_of[worker]
        tapes = {}
        for lane in own:
            tape, call = self.tapes.tape(lane), self._call_of(lane)
            if tape is not None and call != "reset" and lane not in self.closed_lanes:
                tapes[lane - own.start] = tape.without_last()[0] if call == "step" else tape
        closed = [lane - own.start for lane in self.closed_lanes.intersection(own)]
        unanswered = filter(self.is_unanswered, own)
        stepping = [n - own.start for n in unanswered if self.requests[n].call.command == "step"]
        attributes = {lane - own.start: self.attributes[lane] for lane in own}
        given_up = {
            lane - own.start: (self._given_up[lane][0].seed, self._given_up[lane][1])
            for lane in own
            if self._fails_next(lane)
        }
        return Predecessor(tapes, closed, stepping, attributes, given_up)

    def _where(self, lane: int, call: str) -> Where:
        """Where a lane is; if ``call`` is a step, it is not finished or has failed."""
        tape, worker, seed = self.tapes.peek(lane), self.worker_of[lane], self.buffers.seed[lane]
        if tape is None:
            return Where(worker, lane, step=0, seed=int(seed))
        step = self.tapes.n_steps(lane) - (call == "step")
        if call == "reset":
            seed = tape.seed
        elif seed != tape.seed:  # that of an episode begun ahead of time
            step = 0
        return Where(worker, lane, step=step, seed=int(seed), env_info=tape.options or None)

    # What fails ---------------------------------------------------------------------------------

    def _end_call(self, worker: int, lane: int, failure: WorkerError) -> None:
        """Let what a worker was doing have failed, instead of its successor doing it again."""
        if self.is_unanswered(lane):
            self._refuse_request(lane, self.requests[lane], failure)
        if self._is_busy(worker):
            for commanded in self.commanded[worker]:
                self.tapes.forget(commanded)
            self._failures[worker] = self.issued[worker], failure
            self.buffers.outcome[worker] = FAILED
            self.buffers.finished[worker] = self.issued[worker]

    def _refuse_request(self, lane: int, request: Request, error: WorkerError) -> None:
        """Let a failure be the reply: the environment's traceback, or how its worker failed."""
        text = str(error)
        if isinstance(error, EnvError):
            text = f"{error.traceback_text}\n  fix:   {error.fix}"
        request.reply, request.error = pickle.dumps(("error", text)), error
        self.tapes.lose(lane, "there, an earlier request of its remote failed")


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


def lane_failure(error: EnvError, call: str, where: Where, tape: Tape | None) -> LaneFailure:
    """A worker's report about a lane as an exception, with the episode's options and actions.

    Args:
        error: What the worker reports.
        call: What failed.
        where: Where it did.
        tape: The lane's episode, the failing step included; ``None`` if it cannot be repeated.
    """
    changes: dict[str, Any] = {"where": where, "hint": ENV_HINT}
    if tape is not None and not tape.why_lost:
        changes |= {"options": tape.options, "actions": actions_of(tape.actions)}
    kind = LaneSpecFailure if isinstance(error, SpecError) else LaneFailure
    failure = kind(**{**error._constructor_arguments(), **changes})
    failure.lane, failure.call = where.lane or 0, call
    return failure
