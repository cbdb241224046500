"""The worker processes of a ``ParallelEnvManager``, and what the caller knows of their lanes.

A lane runs an episode, which is on its tape, and does one thing at a time: a step or a reset, as
part of a numbered command to its worker, or a request of its remote.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from rlpool.data.specs import TensorSpec
from rlpool.data.storage import Memory, carved_bytes
from rlpool.envs.vec_env import LaneError, Options
from rlpool.errors import EnvError, EnvSpecError, SpecError, UsageError, Where, WorkerError
from rlpool.machine.calls import CrashOnly
from rlpool.machine.limits import check_size, check_workers
from rlpool.manager.channel import (
    FAILED,
    Begin,
    Buffers,
    Call,
    LaneFailed,
    MapArrays,
    Predecessor,
    Reply,
    Report,
    Reset,
    Setup,
    buffer_specs,
)
from rlpool.manager.worker import main
from rlpool.observe.stats import StatsReader
from rlpool.record.failures import lane_death
from rlpool.record.tape import LaneTapes, Tape, actions_of
from rlpool.workers.crew import Crew
from rlpool.workers.failure_policy import FailurePolicy
from rlpool.workers.payload import pack
from rlpool.workers.process_owner import refuse_forked_copy
from rlpool.workers.sharing import Parcel, pickled
from rlpool.workers.wake import Wake
from rlpool.workers.wire import Message, Ready

_DESCRIPTORS_EACH = 4
"""A worker's pipe, its wake, and two that multiprocessing keeps to notice its end and ours."""

_WAITS_PER_LOOK = 100
"""After how many short waits a caller looks for the deaths of all workers."""


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


@dataclass
class LaneTrouble:
    """An episode that ends at the step at which it failed.

    Attributes:
        tape: The episode.
        step: The step, -1 for the reset.
        error: The last failure.
    """

    tape: Tape
    step: int
    error: WorkerError


class EnvWorkers(CrashOnly):
    """Worker processes with environments.

    Calls of a manager and of its remotes count as calls of their workers.

    Args:
        env_fns: Functions that make one environment each.
        envs_per_worker: Environments of a worker; the last one may have fewer.
        root: Root of all seeds.
        options: Keyword arguments of the workers' ``GymEnv``.
        timeout_s: Seconds without progress after which a worker counts as hanging, ``None`` for
            never.
        policy: When workers that fail are replaced.

    Attributes:
        n_lanes: How many there are.
        n_workers: Number of workers.
        lanes_of: For each worker its lanes.
        worker_of: For each lane its worker.
        root: Root of all seeds.
        reports: What the workers reported when they were ready.
        processes: The processes.
        stats_reader: Reads what they are doing.
        wakes: What each worker waits for, in addition to its pipe.
        closed: Whether all are closed.
        owner_pid: The process that started them.
        tapes: The episode of each lane.
        buffers: The shared memory.
        issued: For each worker the number of its last command.
        commanded: For each worker the lanes of its last command.
        resets: For each worker its last reset.
        requests: Requests to single lanes whose replies the user has not received.
        closed_lanes: Lanes that were closed one by one.
        troubles: Lane to what failed in it.
        reports_failures: Whether no episode is truncated here, see ``VecEnv.report_failures``.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        envs_per_worker: int,
        root: int,
        options: Mapping[str, Any],
        timeout_s: float | None,
        policy: FailurePolicy,
    ) -> None:
        self.n_lanes = len(env_fns)
        starts = range(0, self.n_lanes, envs_per_worker)
        self.lanes_of = [range(s, min(s + envs_per_worker, self.n_lanes)) for s in starts]
        self.worker_of = [w for w, lanes in enumerate(self.lanes_of) for _ in lanes]
        self.n_workers = len(self.lanes_of)
        advice = "use fewer workers, by more envs_per_worker or fewer environments"
        check_workers(self.n_workers, _DESCRIPTORS_EACH, advice)
        self.root = root
        self.reports: dict[int, Report] = {}
        self.closed = False
        self.owner_pid = os.getpid()
        self.issued = [0] * self.n_workers
        self.reports_failures = False
        self._forget_lanes()
        self._policy = policy
        self._timeout_s = timeout_s
        self._options = options
        self._mapped: tuple[MapArrays, Memory] | None = None
        self._functions = [_pickled(env_fns, lanes) for lanes in self.lanes_of]
        self._n_waits = 0
        self._done = Wake()
        self.wakes = [Wake() for _ in self.lanes_of]
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _forget_lanes(self) -> None:
        self.tapes = LaneTapes(self.n_lanes)
        self.commanded: list[Sequence[int]] = [()] * self.n_workers
        self.requests: dict[int, Request] = {}
        self.closed_lanes: set[int] = set()
        self.troubles: dict[int, LaneTrouble] = {}
        self._failures: dict[int, tuple[int, WorkerError]] = {}  # with the number of the command
        self.resets: dict[int, Reset] = {}  # the last of each worker

    def _start(self) -> None:
        """Start all workers and wait until they are ready."""
        runs = [
            (
                partial(main, functions.shared, wake, self._done),
                Setup(functions.data, self._options, lanes.start),
                None,
            )
            for functions, wake, lanes in zip(
                self._functions, self.wakes, self.lanes_of, strict=True
            )
        ]
        self.processes = Crew(runs, self.root, self._policy, self._timeout_s, self, self._done)
        self.stats_reader = StatsReader(self.processes.control)
        try:
            self.processes.control.name = "ParallelEnvManager"
            self.processes.start()
        except BaseException:
            self.processes.abort()
            raise

    def begin_again(self) -> None:
        """Begin with new workers, whatever an interrupted call has left."""
        self.processes.abort()
        self.processes.close()
        self._forget_lanes()
        self.tapes.bind(self.buffers.action)
        for worker, number in enumerate(self.issued):
            self.buffers.finished[worker] = number
        self._start()
        self.forget_interrupt()

    # Commands -----------------------------------------------------------------------------------

    def begin(
        self, observation: Mapping[str, TensorSpec], action: Mapping[str, TensorSpec]
    ) -> None:
        """Map buffers for what one lane shows and takes, and let the workers carry out commands."""
        specs = buffer_specs(observation, action, self.n_lanes, self.n_workers)
        sizes = carved_bytes(specs, 1)
        check_size(sizes, lambda _: "use fewer environments", "the observations")
        memory = Memory.shared(sum(sizes.values()), "rlpool-buffers")
        self.buffers = Buffers(specs, memory)
        self.tapes.bind(self.buffers.action)
        for cell, wake in enumerate((*self.wakes, self._done)):
            wake.share(self.buffers.asleep[cell : cell + 1])
        self._mapped = MapArrays(specs), memory
        for worker in range(self.n_workers):
            self.brief(worker, self.reports[worker])

    # What lanes are doing -----------------------------------------------------------------------

    def is_unanswered(self, lane: int) -> bool:
        """Whether a lane's request has no reply yet."""
        return lane in self.requests and self.requests[lane].reply is None

    def _is_busy(self, worker: int) -> bool:
        """Whether a worker has not finished its last command."""
        issued = self.issued[worker]  # 0 before the buffers are mapped
        return bool(issued) and issued != self.buffers.finished[worker]

    def busy(self) -> Collection[int]:
        """Workers that have something to do."""
        busy = {self.worker_of[lane] for lane in filter(self.is_unanswered, self.requests)}
        return busy.union(filter(self._is_busy, range(self.n_workers)))

    def _call_of(self, lane: int) -> str:
        """What a lane is doing: ``"reset"``, ``"step"``, or neither."""
        if self.is_unanswered(lane):
            return self.requests[lane].call.command
        worker = self.worker_of[lane]
        if not self._is_busy(worker) or lane not in self.commanded[worker]:
            return ""
        return "step" if self.buffers.step[worker] == self.issued[worker] else "reset"

    def running_in(self, worker: int) -> dict[str, Any]:
        """See ``Client``: as far as shared memory shows."""
        if worker in self.reports and worker not in self.busy():
            return {"where": Where(worker)}
        own = self.lanes_of[worker]
        lane = own.start + min(self.processes.control.lane_in_use(worker), len(own) - 1)
        where, tape = self._where(lane, self._call_of(lane)), self.tapes.tape(lane)
        if tape is None or tape.why_lost:
            return {"where": where}
        return {"where": where, "options": tape.options, "actions": actions_of(tape.actions)}

    def _where(self, lane: int, call: str) -> Where:
        """Where a lane is; if ``call`` is a step, it is not finished or has failed."""
        tape, worker = self.tapes.peek(lane), self.worker_of[lane]
        if tape is None:
            return Where(worker, lane)
        step = self.tapes.n_steps(lane) - (call == "step")
        return Where(worker, lane, step=step, seed=tape.seed, env_info=tape.options or None)

    # Waiting ------------------------------------------------------------------------------------

    def wait_until(self, is_over: Callable[[], bool], until_s: float = math.inf) -> None:
        """Handle messages until a condition holds, or until a ``time.monotonic()``.

        Raises:
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
        """
        left_s = math.inf
        while left_s > 0.0 and not is_over():
            left_s = until_s - monotonic()
            self.look(min(max(0.0, left_s), self.processes.patience_s))

    def look(self, timeout_s: float = 0.0) -> None:
        """Handle what has happened, or happens within ``timeout_s``.

        Raises:
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
        """
        self.processes.look(timeout_s)
        self.processes.refuse_if_dead()

    def wait_finished(self, is_over: Callable[[], bool]) -> None:
        """Wait until workers have finished commands, on which a condition depends.

        Args:
            is_over: The condition.

        Raises:
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
        """
        done, processes = self._done, self.processes
        self._n_waits += 1
        if self._n_waits % _WAITS_PER_LOOK == 0:
            self.look()
        if is_over():
            return
        done.begin()
        while not is_over():
            sleep_s = done.pause(processes.patience_s)
            if sleep_s or not processes.all_up:
                self.look(sleep_s)

    def wait_idle(self, workers: Sequence[int]) -> None:
        """Wait until workers have carried out their commands.

        Raises:
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
        """
        finished, issued = self.buffers.finished, self.issued

        def are_idle() -> bool:
            for worker in workers:  # noqa: SIM110  (all() takes twice as long)
                if finished[worker] != issued[worker]:
                    return False
            return True

        self.wait_finished(are_idle)

    def failure(self, worker: int) -> WorkerError:
        """The error of a worker's last command, which failed."""
        number = self.issued[worker]
        self.wait_until(lambda: worker in self._failures and self._failures[worker][0] == number)
        return self._failures[worker][1]

    # The workers' client ------------------------------------------------------------------------

    def brief(self, worker: int, report: Report) -> None:
        """Send a worker that has made its environments all outstanding work."""
        first = self.reports.setdefault(worker, report)
        if (first.declaration, first.action) != (report.declaration, report.action):
            what = "and its environments have other spaces now"
            self.processes.fail(SpecError(f"worker {worker} was replaced, {what}"))
        if self._mapped is None:
            return
        send, own = self.processes.send, self.lanes_of[worker]
        send(worker, *self._mapped)
        packed = pack(self._predecessor(worker), Memory.shared)
        is_busy, step = self._is_busy(worker), self.buffers.step[worker]
        is_step = is_busy and step == self.issued[worker]
        send(worker, Begin(step - 1 if is_step else step, packed.payload), packed.memory)
        packed.memory.close_fd()
        if is_busy and not is_step:
            send(worker, self.resets[worker])
        for lane in filter(self.is_unanswered, own):
            send(worker, self.requests[lane].call)

    def _predecessor(self, worker: int) -> Predecessor:
        """Where a worker's lanes are, for the successor of its process."""
        own = self.lanes_of[worker]
        tapes = {}
        for lane in own:
            tape, call = self.tapes.tape(lane), self._call_of(lane)
            if tape is not None and call != "reset":
                tapes[lane - own.start] = tape.without_last() if call == "step" else tape
        unanswered = filter(self.is_unanswered, own)
        stepping = [n - own.start for n in unanswered if self.requests[n].call.command == "step"]
        given_up = {
            lane - own.start: (self.troubles[lane].tape.seed, self.troubles[lane].step)
            for lane in own
            if self._fails_next(lane)
        }
        return Predecessor(tapes, stepping, given_up)

    def _fails_next(self, lane: int) -> bool:
        """Whether what a lane does next, or again, is where its episode is truncated."""
        trouble = self.troubles.get(lane)
        if trouble is None or trouble.tape is not self.tapes.peek(lane):
            return False
        n_steps = self.tapes.n_steps(lane) - (self._call_of(lane) == "step")
        return n_steps == max(trouble.step, 0)

    def record_reset(self, lane: int, seed: int, options: Options) -> None:
        """Record that a lane begins an episode."""
        self.tapes.record_reset(lane, seed, options)
        self.processes.restarts.forget(lane, seed)

    def forget_troubles(self, lanes: Sequence[int]) -> None:
        """Forget what failed in episodes of lanes that are in others now."""
        for lane in self.troubles.keys() & lanes:
            if self.troubles[lane].tape is not self.tapes.peek(lane):
                del self.troubles[lane]

    def take(self, worker: int, message: Message) -> None:
        """Take a worker's message."""
        if isinstance(message, Ready):
            self.brief(worker, message.report)
        elif isinstance(message, LaneFailed):
            self._take_failure(worker, self.lanes_of[worker][message.lane], message)
        elif isinstance(message, Reply):
            request = self.requests[self.lanes_of[worker][message.lane]]
            request.reply, request.error = message.reply, message.error

    # What fails ---------------------------------------------------------------------------------

    def _take_failure(self, worker: int, lane: int, message: LaneFailed) -> None:
        where = self._where(lane, message.call)
        tape = None if message.is_lost else self.tapes.tape(lane)
        error = lane_failure(message.error, message.call, where, tape)
        if self._policy.restarts_on_env_errors and not message.is_lost:
            self.processes.expect_end(worker, error)  # its successor does it again
        elif message.number:
            self._failures[worker] = message.number, error
        else:
            self._refuse_request(lane, error)

    def lost(self, worker: int, failure: WorkerError | None, gives_up: bool) -> bool:
        """See ``Client.lost``: the lane that failed is truncated, or its call has failed."""
        lane = None if failure is None else failure.where.lane
        call = "" if lane is None else self._call_of(lane)
        tape = self.tapes.peek(lane) if lane is not None and call else None
        if failure is None or lane is None or tape is None or not gives_up:
            return False
        step = self.tapes.n_steps(lane) - 1 if call == "step" else -1
        trouble = self.troubles.get(lane)
        is_known = trouble is not None and trouble.tape is tape and trouble.step == step
        may_truncate = self._policy.restarts_on_env_errors and not self.reports_failures
        # An episode that is to be truncated and fails again did so while its tape was repeated.
        if may_truncate and not is_known and not self.is_unanswered(lane):
            self.troubles[lane] = LaneTrouble(tape, step, failure)
        else:
            self._end_call(worker, lane, failure)
        return True

    def _end_call(self, worker: int, lane: int, failure: WorkerError) -> None:
        """Let what a worker was doing have failed, instead of its successor doing it again."""
        failure = lane_death(failure, lane, self._call_of(lane))
        if self.is_unanswered(lane):
            self._refuse_request(lane, failure)
        if self._is_busy(worker):
            for commanded in self.commanded[worker]:
                self.tapes.forget(commanded)
            self._failures[worker] = self.issued[worker], failure
            self.buffers.outcome[worker] = FAILED
            self.buffers.finished[worker] = self.issued[worker]

    def _refuse_request(self, lane: int, error: WorkerError) -> None:
        """Let a failure be the reply: the environment's traceback, or how its worker failed."""
        text = str(error)
        if isinstance(error, EnvError):
            text = f"{error.traceback_text}\n  fix:   {error.fix}"
        request = self.requests[lane]
        request.reply, request.error = pickle.dumps(("error", text)), error
        self.tapes.lose(lane)

    # Life and end -------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Refuse to go on after ``close``, a death, an interruption, or in a forked copy.

        Raises:
            UsageError: If closed, a call was interrupted, or the workers are those of another
                process.
            WorkerDiedError, WorkerTimeoutError: If a worker died.
        """
        if self.closed or os.getpid() != self.owner_pid:
            self.refuse_closed()
        if self._was_interrupted:
            raise UsageError(
                "the last call was interrupted: what the environments did then is lost",
                fix="call reset() of the manager, which begins with new workers, or close it",
            )
        self.processes.refuse_if_dead()

    def refuse_closed(self) -> None:
        """Refuse to go on after ``close`` or in a forked copy, in whatever thread."""
        if self.closed:
            fix = "make new ones, or close these later"
            raise UsageError("the environments are closed", fix=fix)
        refuse_forked_copy(self.owner_pid)

    def _abandon(self) -> None:
        self.processes.abort()

    def close(self) -> None:
        """End the workers. May be repeated, as all that it calls."""
        self.closed = True
        # Else there are none yet, or they are those of another process.
        if "processes" in vars(self) and os.getpid() == self.owner_pid:
            self.processes.fail(UsageError("the environments were closed meanwhile"))
            if self.is_interrupted:
                self.processes.abort()
            self.processes.close()
        for functions in self._functions:
            functions.shared.close()
        if self._mapped is not None:
            self._mapped[1].close_fd()
        for wake in (self._done, *self.wakes):
            wake.close()


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
    changes: dict[str, Any] = {"where": where}
    if tape is not None and not tape.why_lost:
        changes |= {"options": tape.options, "actions": actions_of(tape.actions)}
    kind = LaneSpecFailure if isinstance(error, SpecError) else LaneFailure
    failure = kind(**{**error._constructor_arguments(), **changes})
    failure.lane, failure.call = where.lane or 0, call
    return failure


def _pickled(env_fns: Sequence[Callable[[], Any]], lanes: range) -> Parcel:
    fix = "create it inside the function, which runs in the worker"
    named = {f"env_fns[{lane}]": env_fns[lane] for lane in lanes}
    return pickled(named, list(named.values()), fix=fix)
