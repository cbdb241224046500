"""The worker processes of a ``ParallelEnvManager``: what they are sent, and what they answer."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import SpawnProcess
from threading import get_ident
from typing import Any

from rlpool.errors import EnvError, EnvsClosedError, SpecError, UsageError, Where, WorkerError
from rlpool.machine.limits import check_size
from rlpool.machine.one_thread import OneThread
from rlpool.machine.worker_limits import check_workers
from rlpool.manager.buffers import FAILED, Buffers, bookkeeping_specs
from rlpool.manager.lane_failure import LaneFailure, lane_failure
from rlpool.manager.messages import (
    Announce,
    Begin,
    Call,
    LaneFailed,
    MapArrays,
    Predecessor,
    Reply,
    Report,
    Reset,
    SetAttribute,
    Setup,
)
from rlpool.manager.worker import main
from rlpool.memory.sharing import ByValue, Parcel, pickled
from rlpool.memory.storage import Memory, carved_bytes
from rlpool.record.capsule_files import CrashDir, CrashFiles
from rlpool.record.failures import ENV_HINT
from rlpool.record.tape import LaneTapes, Tape
from rlpool.specs import Declaration, TensorSpec
from rlpool.workers.failure_policy import FailurePolicy
from rlpool.workers.lifecycle import Workers
from rlpool.workers.payload import pack
from rlpool.workers.process_owner import refuse_forked_copy
from rlpool.workers.process_start import memory_of
from rlpool.workers.stack_dumps import stack_sources
from rlpool.workers.stacks import described
from rlpool.workers.wake import Wake
from rlpool.workers.wire import Message

_DESCRIPTORS_EACH = 4
"""A worker's pipe, its wake, and two that multiprocessing keeps to notice its end and ours."""

_WAITS_PER_LOOK = 100
"""How often a caller whose waits are all short looks whether a worker has died, beside those that
it waits for."""


@dataclass
class Request:
    """A request to one environment, until the user has received its reply.

    Attributes:
        call: The request.
        reply: The reply, pickled, once it is there.
        error: What was raised, if anything; a ``LaneFailure`` if the lane needs a reset.
    """

    call: Call
    reply: bytes | None = None
    error: EnvError | None = None


class EnvWorkers:
    """Worker processes with environments.

    Args:
        env_fns: Functions that make one environment each.
        envs_per_worker: Environments of a worker; the last one may have fewer.
        root: Root of all seeds.
        options: Keyword arguments of the workers' ``GymEnv``.
        timeout_s: Seconds without progress after which a worker counts as hanging, ``None`` for
            never.
        policy: When workers that fail are replaced.
        crash_dir: Where the capsules of failures are written, ``None`` for nowhere.

    Attributes:
        root: Root of all seeds.
        lanes_of: For each worker its lanes.
        worker_of: For each lane its worker.
        reports: What the workers reported when they were ready.
        tapes: The episode of each lane.
        buffers: The shared memory, empty until it is mapped.
        issued: For each worker the number of its last command.
        commanded: For each worker the lanes of its last command.
        requests: Requests to single lanes whose replies the user has not received.
        wakes: What each worker waits for, beside its pipe.
        attributes: For each lane the attributes that were set, for a successor.
        closed_lanes: Lanes that were closed one by one.
        announced: For each worker the episodes that will come.
        closed: Whether all are closed.
        failures: Lane to why its episode was given up.
        one_thread: Refuses calls of two threads at once.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        envs_per_worker: int,
        root: int,
        options: Mapping[str, Any],
        timeout_s: float | None,
        policy: FailurePolicy,
        crash_dir: CrashDir,
    ) -> None:
        self.root = root
        self.n_lanes = len(env_fns)
        starts = range(0, self.n_lanes, envs_per_worker)
        self.lanes_of = [range(s, min(s + envs_per_worker, self.n_lanes)) for s in starts]
        self.worker_of = [w for w, lanes in enumerate(self.lanes_of) for _ in lanes]
        self.n_workers = len(self.lanes_of)
        advice = "use fewer workers, by more envs_per_worker or fewer environments"
        check_workers(self.n_workers, _DESCRIPTORS_EACH, advice, memory_of(policy.start_method))
        self.tapes = LaneTapes(self.n_lanes)
        self.reports: dict[int, Report] = {}
        self.buffers = Buffers()
        self.issued = [0] * self.n_workers
        self.commanded: list[Sequence[int]] = [()] * self.n_workers
        self.requests: dict[int, Request] = {}
        self.closed = False
        self.attributes: list[dict[str, ByValue]] = [{} for _ in range(self.n_lanes)]
        self.closed_lanes: set[int] = set()
        self.failures: dict[int, WorkerError] = {}
        self._failed: dict[int, tuple[Tape, int, int]] = {}  # lane: episode, step, how often
        self._given_up: dict[int, tuple[Tape, int]] = {}  # lane: episode, step
        self.announced: dict[int, Announce] = {}
        self._last_pids: list[int | None] = []
        self._policy = policy
        self._crash_files = CrashFiles(crash_dir)
        self._owner_pid = os.getpid()
        self.one_thread = OneThread("check_open")
        self._failures: dict[int, tuple[int, WorkerError]] = {}  # with the number of the command
        # What a successor has to be sent again:
        self._mapped: dict[str, tuple[MapArrays, Memory]] = {}
        self._resets: dict[int, Reset] = {}  # the last of each worker
        parcels = [_pickled(env_fns, lanes) for lanes in self.lanes_of]
        self._shared = [parcel.shared for parcel in parcels]
        self._setups = [
            Setup(parcel.data, options, lanes.start)
            for parcel, lanes in zip(parcels, self.lanes_of, strict=True)
        ]
        self._n_waits = 0
        self._done = Wake()
        self.wakes = [Wake() for _ in self.lanes_of]
        runs = [
            partial(main, shared, wake, self._done)
            for shared, wake in zip(self._shared, self.wakes, strict=True)
        ]
        self.processes = Workers(runs, root, policy, timeout_s, self, ENV_HINT)
        stack_sources.add(self)
        try:
            self.processes.start(self._done.fd)
            if not policy.may_restart:
                self._forget_setups()
        except BaseException:
            self.processes.abort()
            self.close()
            raise

    @property
    def pids(self) -> list[int | None]:
        """The processes' ids; after ``close``, the last ones."""
        return self._last_pids or self.processes.pids

    def process(self, worker: int) -> SpawnProcess | None:
        """A worker's process, ``None`` after ``close``."""
        return None if self.closed else self.processes.processes[worker]

    # Commands -----------------------------------------------------------------------------------

    def begin(self, known: Mapping[str, TensorSpec], declaration: Declaration | None) -> None:
        """Map the bookkeeping and what else is known, and let the workers carry out commands."""
        specs = {**bookkeeping_specs(self.n_lanes, self.n_workers), **known}
        self.map("all", specs, declaration)
        self.buffers.is_ahead[:] = -1
        for cell, wake in enumerate((*self.wakes, self._done)):
            wake.share(self.buffers.asleep[cell : cell + 1])
        for worker in range(self.n_workers):
            self.processes.send(worker, Begin())

    def map(
        self, what: str, specs: Mapping[str, TensorSpec], declaration: Declaration | None = None
    ) -> None:
        """Make shared arrays and let all workers use them.

        Args:
            what: What they are, for arrays that replace others.
            specs: Their specs.
            declaration: What observations and infos consist of, if only a reset shows it.
        """
        sizes = carved_bytes(specs, 1)
        n_bytes = sum(sizes.values())
        check_size(
            sizes,
            lambda n_free: f"use fewer environments ({self.n_lanes * n_free // n_bytes} would fit)",
            "the observations",
        )
        memory = Memory.shared(n_bytes, "rlpool-buffers")
        self.buffers.map(specs, memory)
        self.tapes.bind(self.buffers.action)
        message = MapArrays(specs, declaration)
        for worker in range(self.n_workers):
            self.processes.send(worker, message, memory)
        if not self._policy.may_restart:
            memory.close_fd()
            return
        if what in self._mapped:
            self._mapped[what][1].close_fd()
        self._mapped[what] = message, memory

    def send(self, worker: int, message: Message) -> None:
        """Send a message to a worker; one that is being replaced is briefed with it later."""
        self.processes.send(worker, message)

    def reset(self, worker: int, message: Reset) -> None:
        """Let a worker reset lanes."""
        self.send(worker, message)
        self._resets[worker] = message
        self.issued[worker] = message.number
        self.commanded[worker] = [self.lanes_of[worker][lane] for lane in message.lanes]
        for lane in self.commanded[worker]:
            self.failures.pop(lane, None)

    def is_unanswered(self, lane: int) -> bool:
        """Whether a lane's request has no reply yet."""
        return lane in self.requests and self.requests[lane].reply is None

    # Waiting ------------------------------------------------------------------------------------

    def wait_until(self, is_over: Callable[[], bool]) -> None:
        """Handle messages until a condition holds.

        Raises:
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
        """
        self.processes.look_from_now_on()
        while not is_over():
            self.look(self.processes.patience_s)

    def look(self, timeout_s: float = 0.0) -> None:
        """Handle what has happened, or happens within ``timeout_s``.

        Raises:
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
        """
        if self.processes.poll(timeout_s):
            self._done.wait()
        self.processes.look_for_hang()
        self.processes.refuse_if_dead()

    def wait_finished(self, is_over: Callable[[], bool]) -> None:
        """Wait until workers have finished commands, on which a condition depends.

        Raises:
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
        """
        done, processes = self._done, self.processes
        self._n_waits += 1
        if self._n_waits % _WAITS_PER_LOOK == 0:
            self.look()
        if is_over():
            return
        processes.look_from_now_on()
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

    def setup(self, worker: int) -> tuple[Setup, None]:
        """What a worker has to create."""
        return self._setups[worker], None

    def brief(self, worker: int, report: Report) -> None:
        """Send a worker that has made its environments all outstanding work."""
        self.processes.note_ready(worker)
        first = self.reports.setdefault(worker, report)
        if (first.declaration, first.action) != (report.declaration, report.action):
            what = "and its environments have other spaces now"
            self.processes.fail(SpecError(f"worker {worker} was replaced, {what}"))
        if not self._mapped:
            return
        send, own = self.processes.send, self.lanes_of[worker]
        for message, memory in self._mapped.values():
            send(worker, message, memory)
        if worker in self.announced:
            send(worker, self.announced[worker])
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
        predecessor = Predecessor(tapes, closed, stepping, attributes, given_up)
        packed = pack(predecessor, Memory.shared)
        is_busy, step = self._is_busy(worker), self.buffers.step[worker]
        is_step = is_busy and step == self.issued[worker]
        send(worker, Begin(step - 1 if is_step else step, packed.payload), packed.memory)
        packed.memory.close_fd()
        if is_busy and not is_step:
            send(worker, self._resets[worker])
        for lane in filter(self.is_unanswered, own):
            send(worker, self.requests[lane].call)

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

    def lost(self, worker: int, failure: WorkerError | None) -> None:
        """Forget the episodes that a worker has begun ahead of time: its successor has not."""
        for lane in self.lanes_of[worker] if self._mapped else ():
            if self.buffers.is_ahead[lane] >= 0:
                self.buffers.is_ahead[lane] = -1
                self.tapes.forget(lane)

    def blames(self, worker: int, failure: WorkerError) -> int | None:
        """See ``Client.blames``: where the call failed before, the lane is truncated instead."""
        lane = failure.where.lane
        tape = None if lane is None else self.tapes.peek(lane)
        if lane is None or tape is None or not (call := self._call_of(lane)):
            return None
        step = self.tapes.n_steps(lane) - 1 if call == "step" else -1
        before = self._failed.get(lane)
        is_same = before is not None and before[0] is tape and before[1] == step
        n = before[2] + 1 if before is not None and is_same else 1
        self._failed[lane] = tape, step, n
        most = self._policy.max_episode_restarts
        if isinstance(failure, EnvError) and self._policy.truncates:
            most = 1
        if most is None or n < most:
            return None
        if self._policy.restarts_on_env_errors and not self.is_unanswered(lane):
            self._given_up[lane], self.failures[lane] = (tape, step), failure
        else:
            self._end_call(worker, lane, failure)
        return n - 1

    def _end_call(self, worker: int, lane: int, failure: WorkerError) -> None:
        """Let what a worker was doing have failed, instead of its successor doing it again."""
        if self.is_unanswered(lane):
            request = self.requests[lane]
            request.reply = pickle.dumps(("error", str(failure)))
            self.tapes.lose(lane, "there, an earlier request of its remote failed")
        if self._is_busy(worker):
            for commanded in self.commanded[worker]:
                self.tapes.forget(commanded)
            self._failures[worker] = self.issued[worker], failure
            self.buffers.outcome[worker] = FAILED
            self.buffers.finished[worker] = self.issued[worker]

    def busy(self) -> Collection[int]:
        """Workers that have something to do."""
        busy = {self.worker_of[lane] for lane in filter(self.is_unanswered, self.requests)}
        return busy.union(filter(self._is_busy, range(self.n_workers)))

    def where(self, worker: int) -> Where:
        """What a worker is doing, as far as shared memory shows."""
        own = self.lanes_of[worker]
        lane = own.start + min(self.processes.lane_in_use(worker), len(own) - 1)
        if worker not in self.reports:
            return Where(worker, lane)
        return self._where(lane, self._call_of(lane)) if worker in self.busy() else Where(worker)

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

    def take(self, worker: int, message: Message) -> None:
        """Take a worker's message."""
        if isinstance(message, LaneFailed):
            lane = self.lanes_of[worker][message.lane]
            error = self._error_of(lane, message.call, message.error, message.is_lost)
            if self._policy.restarts_on_env_errors and not message.is_lost:
                self.processes.expect_end(worker, error)
            else:
                self._failures[worker] = message.number, error
        elif isinstance(message, Reply):
            lane = self.lanes_of[worker][message.lane]
            request = self.requests.get(lane)
            if request is None or request.call.command != message.command:
                return  # it was given up
            if message.error is not None and not message.lane_failed:
                request.error = message.error
            elif message.error is not None:
                call = self._call_of(lane)
                error = self._error_of(lane, call, message.error)
                if self._policy.restarts_on_env_errors:
                    self.processes.expect_end(worker, error)  # its successor is asked again
                    return
                request.error = error
                self.tapes.lose(lane, "there, an earlier request of its remote failed")
            elif isinstance(request.call.data, SetAttribute):
                name = request.call.data.name
                self.attributes[lane][name] = request.call.data.value
                self.tapes.lose(lane, f"the attribute {name!r} was set in the middle of it")
            request.reply = message.reply

    def _error_of(
        self, lane: int, call: str, error: EnvError, is_lost: bool = False
    ) -> LaneFailure:
        """A worker's report about a lane, with all that is known about it."""
        where = self._where(lane, call)
        tape = None if is_lost else self.tapes.tape(lane)
        return lane_failure(error, call, where, tape, self.n_lanes, self._crash_files)

    # Life and end -------------------------------------------------------------------------------

    def stacks(self) -> str:
        """What the worker processes are doing; a signal handler may ask, too."""
        return described(self.processes.stacks(), self.where)

    def check_open(self) -> None:
        """Refuse to go on after ``close``, after a death, in a forked copy or in two threads.

        Raises:
            UsageError: If closed, the workers are those of another process, or another thread is
                inside a call.
            WorkerDiedError, WorkerTimeoutError: If a worker died.
        """
        self.refuse_closed()
        if get_ident() != self.one_thread.thread:
            self.one_thread.hand_over()
        self.processes.deliver_logs()
        self.processes.refuse_if_dead()

    def refuse_closed(self) -> None:
        """Refuse to go on after ``close`` or in a forked copy, in whatever thread."""
        if self.closed:
            fix = "make a new manager, or close it later"
            raise EnvsClosedError("the environments are closed", fix=fix)
        self.refuse_forked_copy()

    def refuse_forked_copy(self) -> None:
        """Refuse to use the workers in a process that did not start them."""
        refuse_forked_copy(self._owner_pid)

    def close(self) -> None:
        """End the workers. May be repeated, as all that it calls."""
        self._last_pids = self.pids
        self.closed = True
        if os.getpid() == self._owner_pid:  # else the workers are those of another process
            self.processes.fail(UsageError("the environments were closed meanwhile"))
            self.processes.close()
        self._forget_setups()
        for _, memory in self._mapped.values():
            memory.close_fd()
        for wake in (self._done, *self.wakes):
            wake.close()

    def _forget_setups(self) -> None:
        """Keep nothing of what workers are started with."""
        for shared in self._shared:
            shared.close()


def _pickled(env_fns: Sequence[Callable[[], Any]], lanes: range) -> Parcel:
    fix = "create it inside the function, which runs in the worker"
    named = {f"env_fns[{lane}]": env_fns[lane] for lane in lanes}
    return pickled(named, list(named.values()), fix=fix)
