"""The lanes of a ``ParallelEnvManager``: their tasks, their episodes, and their workers.

A lane runs an episode, which is recorded on its tape, and has one task at a time: a step, a reset,
or a request of its remote. The caller writes the task into the buffers, waking the worker if it
sleeps, and the buffers show when it is done. Unfinished tasks of a worker are left for its
successor, which is sent the tapes, options and requests.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlpool.data.specs import TensorSpec
from rlpool.data.storage import Memory, NDArray, carved_bytes
from rlpool.envs.vec_env import Options
from rlpool.errors import EnvError, SpecError, UsageError, Where, WorkerError
from rlpool.machine.calls import CrashOnly
from rlpool.machine.limits import check_size, check_workers
from rlpool.manager.channel import (
    ANSWER,
    CALL_OF,
    IDLE,
    RESET,
    RESET_WITH_OPTIONS,
    STEP,
    TRUNCATE,
    Begin,
    Buffers,
    Call,
    LaneFailed,
    Reply,
    Report,
    Setup,
    buffer_specs,
    hand_over,
)
from rlpool.manager.worker import main
from rlpool.observe.stats import StatsReader
from rlpool.record.failures import of_lane
from rlpool.record.tape import LaneTapes, Tape, actions_of
from rlpool.workers.crew import Crew
from rlpool.workers.failure_policy import FailurePolicy
from rlpool.workers.process_owner import refuse_forked_copy
from rlpool.workers.sharing import ByValue, pickled
from rlpool.workers.wake import Wake
from rlpool.workers.wire import Message, Ready

_DESCRIPTORS_EACH = 4
"""A worker's pipe, its wake, and two with which multiprocessing detects its end and ours."""

_WAITS_PER_LOOK = 100
"""Number of short waits after which a caller checks for logs and deaths of all workers."""


@dataclass
class Truncation:
    """An episode that ends where it failed: its tape, the error, and whether its reset failed."""

    tape: Tape | None
    error: WorkerError
    in_reset: bool


class Lanes(CrashOnly):
    """Environments in worker processes, and the calls of a manager and its remotes.

    Args:
        env_fns: Functions that make one environment each.
        envs_per_worker: Environments of a worker; the last one may have fewer.
        root: Root of all seeds.
        options: Keyword arguments of the workers' ``GymEnv``.
        timeout_s: Seconds without progress after which a worker counts as hung, ``None`` for never.
        policy: Decides when failed workers are replaced.

    Attributes:
        n_lanes: Number of lanes.
        lanes_of: The lanes of each worker.
        worker_of: The worker of each lane.
        root: Root of all seeds.
        report: Report of the first worker that was ready.
        crew: The workers.
        stats_reader: Reads their activity.
        closed: Whether all are closed.
        owner_pid: The process that started the workers.
        tapes: The episode of each lane.
        buffers: The shared memory.
        stepping: Lanes whose step ``step_some`` began and has not returned yet.
        replies: Lane to the reply to its remote's request, until the user has received it; ``None``
            until it arrives.
        closed_lanes: Lanes that were closed one by one.
        truncations: Lane to its truncated episode, until the first step of the next one.
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
        n_lanes = self.n_lanes = len(env_fns)
        starts = range(0, n_lanes, envs_per_worker)
        self.lanes_of = [range(s, min(s + envs_per_worker, n_lanes)) for s in starts]
        self.worker_of = [w for w, lanes in enumerate(self.lanes_of) for _ in lanes]
        advice = "use fewer workers, by more envs_per_worker or fewer environments"
        check_workers(len(self.lanes_of), _DESCRIPTORS_EACH, advice)
        self.root = root
        self.report: Any = None
        self.closed = False
        self.owner_pid = os.getpid()
        self.reports_failures = False
        self._policy = policy
        self._timeout_s = timeout_s
        self._options = options
        self._mapped: tuple[Mapping[str, TensorSpec], Memory] | None = None
        self._idle = bytes(n_lanes)
        self._todo: Any = self._idle  # before there are buffers
        self._forget()
        self._functions = []
        for lanes in self.lanes_of:
            named = {f"env_fns[{lane}]": env_fns[lane] for lane in lanes}
            fix = "create it inside the function, which runs in the worker"
            self._functions.append(pickled(named, list(named.values()), fix=fix))
        self._n_waits = 0
        self._done = Wake()
        self._wakes = [Wake() for _ in self.lanes_of]
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _forget(self) -> None:
        self.tapes = LaneTapes(self.n_lanes)
        self.stepping: set[int] = set()
        self.replies: dict[int, Reply | None] = {}
        self._calls_sent: dict[int, Call] = {}  # the last one of each lane
        self.closed_lanes: set[int] = set()
        self.truncations: dict[int, Truncation] = {}
        self._errors: dict[int, WorkerError] = {}  # of steps and resets, not raised yet
        self._may_step: list[int] | None = None  # lanes that have stepped together before

    def _start(self) -> None:
        """Start all workers and wait until they are ready."""
        runs = []
        for functions, wake, lanes in zip(self._functions, self._wakes, self.lanes_of, strict=True):
            run = partial(main, functions.shared, wake, self._done)
            runs.append((run, Setup(functions.data, self._options, lanes.start), None))
        self.crew = Crew(runs, self.root, self._policy, self._timeout_s, self, self._done)
        self.stats_reader = StatsReader(self.crew.control)
        self._map()
        try:
            self.crew.control.name = "ParallelEnvManager"
            self.crew.start()
        except BaseException:
            self.crew.abort()
            raise

    def begin(
        self, observation: Mapping[str, TensorSpec], action: Mapping[str, TensorSpec]
    ) -> None:
        """Map buffers for one lane's observation and action specs, and let the workers use them."""
        specs = buffer_specs(observation, action, self.n_lanes, len(self.lanes_of))
        sizes = carved_bytes(specs, 1)
        check_size(sizes, lambda _: "use fewer environments", "the observations")
        memory = Memory.shared(sum(sizes.values()), "rlpool-buffers")
        self._mapped = specs, memory
        self._map()
        for worker in range(len(self.lanes_of)):
            self._send_outstanding(worker)

    def _map(self) -> None:
        if self._mapped is None:
            return
        self.buffers = Buffers(*self._mapped, self.crew.control.fd)
        self._todo, self._failed = self.buffers.todo.data, self.buffers.failed.data
        self.tapes.bind(self.buffers.action)
        for cell, wake in enumerate((*self._wakes, self._done)):
            wake.share(self.buffers.asleep[cell : cell + 1])

    def begin_again(self) -> None:
        """Start new workers, whatever state an interrupted call has left."""
        self.crew.abort()
        self.crew.close()
        self._forget()
        self.buffers.todo[:] = self.buffers.failed[:] = IDLE
        self._start()
        self.is_interrupted = False

    # Steps and resets ---------------------------------------------------------------------------

    def step(
        self, lanes: list[int], actions: Mapping[str, NDArray], last: Mapping[str, NDArray]
    ) -> None:
        """Begin a step of some lanes and return at once.

        Args:
            lanes: Ascending lane numbers.
            actions: Action key to array ``[n_lanes, ...]``.
            last: Where to keep the actions as well.

        Raises:
            SpecError, UsageError: If one of the lanes cannot step, or the actions do not fit.
        """
        if lanes != self._may_step:
            self.refuse_bad_lanes(lanes)
            self.refuse_stepping(lanes)
            self.refuse_unknown(lanes)
            self._may_step = lanes[:]
        hand_over(actions, lanes, self.buffers.action, last)
        self.tapes.record_step(lanes)
        self._post(lanes, self._steps_of(lanes) if self.truncations else STEP)

    def reset(self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]) -> None:
        """Begin episodes in some lanes and return at once."""
        sent = [option and ByValue("options", option) for option in options]
        self.refuse_bad_lanes(lanes)
        rows = list(lanes)
        try:
            self.buffers.seed[rows] = seeds
        except (OverflowError, TypeError, ValueError) as error:
            message = f"the seeds of {len(rows)} lanes are {seeds!r:.80}: {error}"
            raise SpecError(message, fix="pass one int below 2**63 for each lane") from error
        self.wait_idle(lanes)
        for lane, seed, option, data in zip(lanes, seeds, options, sent, strict=True):
            self.record_reset(lane, seed, option)
            if option:
                self._send(lane, "reset", data)
        self._post(rows, [RESET_WITH_OPTIONS if option else RESET for option in options])

    def record_reset(self, lane: int, seed: int, options: Options) -> None:
        """Record that a lane begins an episode."""
        self.tapes.record_reset(lane, seed, options)
        self.crew.restarts.forget(lane, seed)

    def _post(self, lanes: list[int], todo: Any) -> None:
        """Write the tasks of lanes into the buffers and wake their workers."""
        if len(lanes) == self.n_lanes:
            self.buffers.post(slice(None), todo)
            for wake in self._wakes:
                wake.signal()
        else:
            self.buffers.post(lanes, todo)
            for worker in {self.worker_of[lane] for lane in lanes}:
                self._wakes[worker].signal()

    def _steps_of(self, lanes: Sequence[int]) -> list[int]:
        """Return the tasks of lanes for a step; an episode whose reset was skipped is truncated."""
        for lane in self.truncations.keys() & lanes:
            if self.truncations[lane].tape is not self.tapes.peek(lane):
                del self.truncations[lane]
        skipped = [lane for lane, truncation in self.truncations.items() if truncation.in_reset]
        return [TRUNCATE if lane in skipped else STEP for lane in lanes]

    def finish(self, lanes: Sequence[int]) -> None:
        """Wait until lanes have finished their tasks.

        Raises:
            LaneFailure: If an environment failed.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hung.
        """
        self._wait_for_lanes(lanes)
        if self._errors:
            self._raise_failure(lanes)

    def let_go(self, lanes: Sequence[int]) -> None:
        """Leave stepping lanes to ``take_ready`` instead of waiting for them."""
        self._may_step = None
        self.stepping.update(lanes)

    def take_ready(self, min_ready: int) -> list[int]:
        """Wait until that many stepping lanes, or all, have stepped; returns all that have.

        Raises:
            LaneFailure: If an environment failed; lanes of other workers are returned by the next
                call.
        """
        if not min_ready and self.stepping:
            self._look()  # for callers that never wait
        wanted = min(min_ready, len(self.stepping))
        look, failed, lanes, stepping = self.buffers.look, self._failed, list[int](), self.stepping

        def are_enough() -> bool:
            lanes[:] = [lane for lane, todo in enumerate(look()) if lane in stepping and not todo]
            has_failed = any(failed[lane] or lane in self._errors for lane in lanes)
            return has_failed or len(lanes) >= wanted

        self._wait_for(are_enough)
        self._wait_for_lanes(lanes)
        self._raise_failure(lanes)
        self.stepping.difference_update(lanes)
        return sorted(lanes)

    def _wait_for_lanes(self, lanes: Sequence[int]) -> None:
        """Wait until lanes have finished their tasks and all failures have arrived."""
        look, failed, idle = self.buffers.look, self._failed, self._idle
        if len(lanes) == self.n_lanes:
            self._wait_for(lambda: look() == idle)
        else:
            self._wait_for(lambda: not any(map(look().__getitem__, lanes)))
        if failed.tobytes() != idle:
            self.wait_until(lambda: not any(failed[lane] for lane in lanes))

    def _raise_failure(self, lanes: Sequence[int]) -> None:
        """Raise the first failure among some lanes, once for all lanes that failed together."""
        if failed := self._errors.keys() & lanes:
            error = self._errors[min(failed)]
            self.wait_idle([lane for lane, other in self._errors.items() if other is error])
            raise error

    def wait_idle(self, lanes: Sequence[int]) -> None:
        """Wait until lanes have no task, and forget their failures."""
        self._wait_for_lanes(lanes)
        for lane in lanes:
            self._errors.pop(lane, None)
            self.stepping.discard(lane)

    # Lanes that cannot step -------------------------------------------------------------------

    def refuse_bad_lanes(self, lanes: Sequence[int]) -> None:
        """Refuse lanes that are not ascending numbers of open environments.

        Raises:
            SpecError, UsageError: If they are not.
        """
        given, n_lanes = list(lanes), self.n_lanes
        if not given or given != sorted(set(given)) or given[0] < 0 or given[-1] >= n_lanes:
            raise SpecError(f"lanes should be ascending numbers below {n_lanes}, got {given}")
        if closed := self.closed_lanes.intersection(lanes):
            raise UsageError(f"environment {min(closed)} was closed by its remote")
        if waiting := self.replies.keys() & given:
            raise UsageError(
                f"remote {min(waiting)} has a request without an answer",
                fix=f"call remotes[{min(waiting)}].recv() first",
            )

    def refuse_stepping(self, lanes: Sequence[int]) -> None:
        """Refuse lanes whose step ``step_some`` began and has not returned yet."""
        if stepping := self.stepping.intersection(lanes):
            fix = "wait until step_some() returns it, or reset it"
            raise UsageError(f"lane {min(stepping)} is stepping already", fix=fix)

    def refuse_unknown(self, lanes: Sequence[int]) -> None:
        """Refuse a step of lanes without an episode."""
        if unknown := [lane for lane in lanes if self.tapes.peek(lane) is None]:
            message = f"lane {unknown[0]} cannot step: it was not reset, or an environment of its "
            message += "worker failed in its last step or reset"
            raise UsageError(message, fix="reset it")

    # Requests of remotes ------------------------------------------------------------------------

    def request(self, lane: int, command: str, data: Any) -> None:
        """Send a request to an environment."""
        self._may_step = None
        self.replies[lane] = None
        self._send(lane, command, data)
        self._post([lane], ANSWER)

    def _send(self, lane: int, command: str, data: Any) -> None:
        worker = self.worker_of[lane]
        call = self._calls_sent[lane] = Call(lane - self.lanes_of[worker].start, command, data)
        self.crew.send(worker, call)

    def has_reply(self, lane: int) -> bool:
        """Whether there is a reply that the user has not received."""
        return self.replies.get(lane) is not None

    def reply(self, lane: int) -> Any:
        """Wait for the reply to a lane's request, and remove it."""
        self.wait_until(lambda: self.has_reply(lane))
        self.wait_idle([lane])  # it may still be reporting its reply
        return self.replies.pop(lane)

    def close_lane(self, lane: int) -> None:
        """Close an environment; its worker ends with the last one."""
        worker = self.worker_of[lane]
        self._may_step = None
        self.tapes.forget(lane)
        self.closed_lanes.add(lane)
        if self.closed_lanes.issuperset(self.lanes_of[worker]):
            self.crew.dismiss(worker)
        if len(self.closed_lanes) == self.n_lanes:
            self.close()

    # Waiting ------------------------------------------------------------------------------------

    def wait_until(self, is_over: Callable[[], bool], until_s: float = math.inf) -> None:
        """Handle messages until a condition holds, or until a ``time.monotonic()``.

        Raises:
            WorkerDiedError, WorkerTimeoutError: If a worker died or hung.
        """
        self._look()
        self.crew.wait_until(lambda: is_over() or self.crew.fatal is not None, until_s)
        self.crew.refuse_if_dead()

    def _look(self, longest_s: float = 0.0) -> None:
        self.crew.look(longest_s)
        self.crew.refuse_if_dead()

    def _wait_for(self, is_over: Callable[[], bool]) -> None:
        """Wait for a condition that depends on the buffers.

        Raises:
            WorkerDiedError, WorkerTimeoutError: If a worker died or hung.
        """
        self._n_waits += 1
        if self._n_waits % _WAITS_PER_LOOK == 0:
            self._look()
        if is_over():
            return
        done, crew = self._done, self.crew
        done.begin()
        while not is_over():
            sleep_s = done.pause(crew.patience_s)
            if sleep_s or not crew.all_up:
                self._look(sleep_s)

    # The crew's client --------------------------------------------------------------------------

    def on_message(self, worker: int, message: Message) -> None:
        """Handle a message from a worker."""
        if isinstance(message, Ready):
            self._agree(self.lanes_of[worker].start, message.report)
            self._send_outstanding(worker)
        elif isinstance(message, LaneFailed):
            self._take_failure(worker, message)
        elif isinstance(message, Reply):
            self.replies[self.lanes_of[worker][message.lane]] = message

    def _agree(self, lane: int, report: Report) -> None:
        """Keep the first report; those of other workers and successors must agree with it."""
        first = self.report = self.report or report
        mine, other = ((each.declaration.observation, each.action) for each in (report, first))
        if mine != other:
            found, others = pickle.loads(report.spaces), pickle.loads(first.spaces)
            message = f"the spaces of environment {lane} are {found}, those of others are {others}"
            fix = "put only environments with equal spaces into one manager"
            self.crew.fail(SpecError(message, fix=fix))

    def _send_outstanding(self, worker: int) -> None:
        """Send a worker that has made its environments all data that the buffers lack."""
        if self._mapped is None:
            return
        own, (specs, memory) = self.lanes_of[worker], self._mapped
        self.buffers.failed[own] = 0  # of unreported failures, whose tasks are repeated
        tapes = {lane - own.start: tape for lane in own if (tape := self._tape_of(lane))}
        self.buffers.writing[worker] = 0
        self.crew.send(worker, Begin(specs, tapes), memory)
        for lane in own:
            if self._todo[lane] in (RESET_WITH_OPTIONS, ANSWER):
                self.crew.send(worker, self._calls_sent[lane])

    def _tape_of(self, lane: int) -> Tape | None:
        """Return the tape for a successor to repeat, with the observation expected at its end."""
        tape, call, worker = self.tapes.tape(lane), self._call_of(lane), self.worker_of[lane]
        if tape is None or call == "reset":
            return None
        truncation = self.truncations.get(lane)
        is_here = truncation is not None and truncation.tape is tape
        if truncation and is_here and (truncation.in_reset or self._todo[lane] != TRUNCATE):
            return None  # it would fail again
        if call == "step":
            tape = tape.without_last()
            if self.buffers.writing[worker]:
                return tape  # its observation may be overwritten, wholly or in part
        observation = {key: array[lane].copy() for key, array in self.buffers.observation.items()}
        return replace(tape, observation=observation)

    def busy(self) -> Collection[int]:
        """Return the workers whose lanes have tasks."""
        return {w for n, w in enumerate(self.worker_of) if self._todo[n]}

    def _call_of(self, lane: int) -> str:
        """Return the name of a lane's task for errors; empty if it has none."""
        todo = self._todo[lane]
        return self._calls_sent[lane].command if todo == ANSWER else CALL_OF[todo]

    def running_in(self, worker: int) -> dict[str, Any]:
        """Describe a worker's current lane from shared memory, as ``Client.running_in``."""
        if self._mapped is not None and worker not in self.busy():
            return {"where": Where(worker)}
        own = self.lanes_of[worker]
        lane = own.start + min(self.crew.control.lane_in_use(worker), len(own) - 1)
        return {"where": self._where(lane, self._call_of(lane)), **self._episode_of(lane)}

    def _episode_of(self, lane: int) -> dict[str, Any]:
        """``options`` and ``actions`` of a lane's episode, if it can be repeated."""
        tape = self.tapes.tape(lane)
        if tape is None or tape.why_lost:
            return {}
        return {"options": tape.options, "actions": actions_of(tape.actions)}

    def _where(self, lane: int, call: str) -> Where:
        """Where a lane is; if ``call`` is a step, that step is unfinished or has failed."""
        tape, worker = self.tapes.peek(lane), self.worker_of[lane]
        if tape is None:
            return Where(worker, lane)
        step = self.tapes.n_steps(lane) - (call == "step")
        return Where(worker, lane, step=step, seed=tape.seed, env_info=tape.options or None)

    def _take_failure(self, worker: int, message: LaneFailed) -> None:
        own = self.lanes_of[worker]
        lane = own[message.lane]
        episode = {} if message.is_lost else self._episode_of(lane)
        where = self._where(lane, message.call)
        error = message.error.reworded(where=where, **episode)
        if self._policy.restarts_on_env_errors and not message.is_lost:
            self.crew.expect_end(worker, error)  # its successor repeats the task
        else:
            together = [own[number] for number in message.together]
            self._fail(together, of_lane(error, lane, message.call))

    def _fail(self, lanes: Sequence[int], error: WorkerError) -> None:
        """Make a failure the outcome of lanes' tasks; the lanes then need a reset."""
        self._may_step = None
        for lane in lanes:
            self.tapes.forget(lane)
            self._failed[lane] = 0
            if lane not in self.replies:
                self._errors[lane] = error
                continue
            text = str(error)  # how its worker failed; for an EnvError, the environment's traceback
            if isinstance(error, EnvError):
                text = f"{error.traceback_text}\n  fix:   {error.fix}"
            self.replies[lane] = Reply(lane, pickle.dumps(("error", text)), error)

    def lost(self, worker: int, failure: WorkerError | None, abandons: bool) -> bool:
        """Truncate the episode that failed, or fail its call, as ``Client.lost``."""
        lane = None if failure is None else failure.where.lane
        if not abandons or failure is None or lane is None or not self._todo[lane]:
            return False
        may_truncate = self._policy.restarts_on_env_errors and not self.reports_failures
        if may_truncate and self._todo[lane] in (STEP, RESET, RESET_WITH_OPTIONS):
            in_reset = self._todo[lane] != STEP
            self._todo[lane] = IDLE if in_reset else TRUNCATE
            self.truncations[lane] = Truncation(self.tapes.peek(lane), failure, in_reset)
            return True
        # A truncated episode that fails again did so while its tape was repeated.
        is_request = self._todo[lane] == ANSWER
        busy = [n for n in self.lanes_of[worker] if self._todo[n] not in (IDLE, ANSWER)]
        together = [lane] if is_request else busy
        self._fail(together, of_lane(failure, lane, self._call_of(lane)))
        for other in together:
            self._todo[other] = IDLE
        return True

    # Life and end -------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Refuse a call after ``close``, a death, or an interruption, or in a forked copy.

        Raises:
            UsageError: If closed or interrupted, or if the workers belong to another process.
            WorkerDiedError, WorkerTimeoutError: If a worker died.
        """
        if self.closed or os.getpid() != self.owner_pid:
            self.refuse_closed()
        if self.is_interrupted:
            raise UsageError(
                "the last call was interrupted: the state of the environments is lost",
                fix="call reset() of the manager, which begins with new workers, or close it",
            )
        self.crew.refuse_if_dead()

    def refuse_closed(self) -> None:
        """Refuse a call after ``close`` or in a forked copy, from any thread."""
        if self.closed:
            raise UsageError("the environments are closed", fix="make new ones, or close later")
        refuse_forked_copy(self.owner_pid)

    def _abandon(self) -> None:
        self.crew.abort()

    def close(self) -> None:
        """End the workers. Can be repeated, like everything it calls."""
        self.closed = True
        # Otherwise there are no workers yet, or they belong to another process.
        if "crew" in vars(self) and os.getpid() == self.owner_pid:
            self.crew.fail(UsageError("the environments were closed meanwhile"))
            if self.is_interrupted:
                self.crew.abort()
            self.crew.close()
        for functions in self._functions:
            functions.shared.close()
        if self._mapped is not None:
            self._mapped[1].close_fd()
        for wake in (self._done, *self._wakes):
            wake.close()
