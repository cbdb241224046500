"""The worker processes of a ``ParallelEnvManager``: what they are sent, and what they answer."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import get_ident
from time import monotonic
from typing import Any

from rlpool.data.specs import Declaration, TensorSpec
from rlpool.data.storage import Memory, carved_bytes
from rlpool.errors import SpecError, UsageError, Where, WorkerError
from rlpool.machine.limits import check_size, check_workers
from rlpool.machine.one_thread import OneThread
from rlpool.manager.buffers import bookkeeping_specs
from rlpool.manager.lane_states import LaneStates, lane_failure
from rlpool.manager.messages import (
    Begin,
    LaneFailed,
    MapArrays,
    Reply,
    Report,
    Reset,
    Setup,
)
from rlpool.manager.worker import main
from rlpool.record.failures import ENV_HINT
from rlpool.record.tape import Tape, actions_of
from rlpool.workers.failure_policy import FailurePolicy
from rlpool.workers.payload import pack
from rlpool.workers.process_owner import refuse_forked_copy
from rlpool.workers.process_start import memory_of
from rlpool.workers.sharing import Parcel, pickled
from rlpool.workers.wake import Wake
from rlpool.workers.wire import Message
from rlpool.workers.workers import Workers

_DESCRIPTORS_EACH = 4
"""A worker's pipe, its wake, and two that multiprocessing keeps to notice its end and ours."""

_WAITS_PER_LOOK = 100
"""After how many short waits a caller looks for the deaths of all workers."""


class EnvWorkers(LaneStates):
    """Worker processes with environments.

    Args:
        env_fns: Functions that make one environment each.
        envs_per_worker: Environments of a worker; the last one may have fewer.
        root: Root of all seeds.
        options: Keyword arguments of the workers' ``GymEnv``.
        timeout_s: Seconds without progress after which a worker counts as hanging, ``None`` for
            never.
        policy: When workers that fail are replaced.

    Attributes:
        root: Root of all seeds.
        reports: What the workers reported when they were ready.
        wakes: What each worker waits for, in addition to its pipe.
        closed: Whether all are closed.
        one_thread: Refuses calls of two threads at once.
        owner_pid: The process that started them.
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
        super().__init__(len(env_fns), envs_per_worker)
        advice = "use fewer workers, by more envs_per_worker or fewer environments"
        check_workers(self.n_workers, _DESCRIPTORS_EACH, advice, memory_of(policy.start_method))
        self.root = root
        self.reports: dict[int, Report] = {}
        self.closed = False
        self.one_thread = OneThread("check_open")
        self._policy = policy
        self.owner_pid = os.getpid()
        # What a successor has to be sent again:
        self._mapped: dict[str, tuple[MapArrays, Memory]] = {}
        self._resets: dict[int, Reset] = {}  # the last of each worker
        self._options = options
        self._functions = [_pickled(env_fns, lanes) for lanes in self.lanes_of]
        self._n_waits = 0
        self._done = Wake()
        self.wakes = [Wake() for _ in self.lanes_of]
        runs = [
            partial(main, functions.shared, wake, self._done)
            for functions, wake in zip(self._functions, self.wakes, strict=True)
        ]
        self.processes = Workers(runs, root, policy, timeout_s, self, ENV_HINT)
        try:
            self.processes.start(self._done.fd)
            if not policy.may_restart:
                self._forget_functions()
        except BaseException:
            self.processes.abort()
            self.close()
            raise

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

    def reset(self, worker: int, message: Reset) -> None:
        """Let a worker reset lanes."""
        self.processes.send(worker, message)
        self._resets[worker] = message
        self.issued[worker] = message.number
        self.commanded[worker] = [self.lanes_of[worker][lane] for lane in message.lanes]

    # Waiting ------------------------------------------------------------------------------------

    def wait_until(self, is_over: Callable[[], bool], until_s: float = math.inf) -> None:
        """Handle messages until a condition holds, or until a ``time.monotonic()``.

        Raises:
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
        """
        self.processes.look_from_now_on()
        left_s = math.inf
        while left_s > 0.0 and not is_over():
            left_s = until_s - monotonic()
            self.look(min(max(0.0, left_s), self.processes.patience_s))

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
        first_lane = self.lanes_of[worker].start
        return Setup(self._functions[worker].data, self._options, first_lane), None

    def brief(self, worker: int, report: Report) -> None:
        """Send a worker that has made its environments all outstanding work."""
        self.processes.restarts.note_ready(worker)
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
        predecessor = self._predecessor(worker)
        packed = pack(predecessor, Memory.shared)
        is_busy, step = self._is_busy(worker), self.buffers.step[worker]
        is_step = is_busy and step == self.issued[worker]
        send(worker, Begin(step - 1 if is_step else step, packed.payload), packed.memory)
        packed.memory.close_fd()
        if is_busy and not is_step:
            send(worker, self._resets[worker])
        for lane in filter(self.is_unanswered, own):
            send(worker, self.requests[lane].call)

    def blames(self, worker: int, failure: WorkerError) -> int | None:
        """See ``Client.blames``: where the call failed before, the lane is truncated instead."""
        lane = failure.where.lane
        if lane is None or (place := self._called(lane)) is None:
            return None
        n = self._count_failure(lane, place)
        if not self._policy.gives_up(failure, n):
            return None
        fails_before = self._given_up.get(lane) == place  # while its tape is repeated
        is_given_up = self._policy.restarts_on_env_errors and not self.reports_failures
        if is_given_up and not fails_before and not self.is_unanswered(lane):
            self._given_up[lane], self.failures[lane] = place, failure
        else:
            self._end_call(worker, lane, failure)
        return n - 1

    @property
    def n_suspected(self) -> int:
        """See ``Client``."""
        if self._policy.max_episode_restarts is None:
            return 0
        failing = [lane for lane, (place, _) in self._failed.items() if place == self._called(lane)]
        return sum(
            self._failed[n][1] for n in failing if self._given_up.get(n) != self._failed[n][0]
        )

    def _called(self, lane: int) -> tuple[Tape, int] | None:
        """The episode of a lane and the step that it takes, -1 for its reset; ``None`` if none."""
        tape, call = self.tapes.peek(lane), self._call_of(lane)
        if tape is None or not call:
            return None
        return tape, self.tapes.n_steps(lane) - 1 if call == "step" else -1

    def where(self, worker: int) -> Where:
        """What a worker is doing, as far as shared memory shows."""
        own = self.lanes_of[worker]
        lane = own.start + min(self.processes.control.lane_in_use(worker), len(own) - 1)
        if worker not in self.reports:
            return Where(worker, lane)
        return self._where(lane, self._call_of(lane)) if worker in self.busy() else Where(worker)

    def episode_in(self, worker: int) -> dict[str, Any]:
        """See ``Client``."""
        lane = self.where(worker).lane
        tape = self.tapes.tape(lane) if lane is not None and worker in self.busy() else None
        if tape is None or tape.why_lost:
            return {}
        return {"options": tape.options, "actions": actions_of(tape.actions)}

    def take(self, worker: int, message: Message) -> None:
        """Take a worker's message."""
        if not isinstance(message, LaneFailed | Reply):
            return
        lane = self.lanes_of[worker][message.lane]
        if isinstance(message, LaneFailed):
            self._take_failure(worker, lane, message)
        elif (request := self._request(lane, message.command)) is not None:
            request.reply, request.error = message.reply, message.error
            if message.command == "set_attr" and message.error is None:
                name, value = request.call.data
                self.attributes[lane][name] = value
                self.tapes.lose(lane, f"the attribute {name!r} was set in the middle of it")

    def _take_failure(self, worker: int, lane: int, message: LaneFailed) -> None:
        request = self._request(lane, message.request)
        if message.request and request is None:
            return
        where = self._where(lane, message.call)
        tape = None if message.is_lost else self.tapes.tape(lane)
        error = lane_failure(message.error, message.call, where, tape)
        if self._policy.restarts_on_env_errors and not message.is_lost:
            self.processes.expect_end(worker, error)  # its successor does it again
        elif request is None:
            self._failures[worker] = message.number, error
        else:
            self._refuse_request(lane, request, error)

    # Life and end -------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Refuse to go on after ``close``, after a death, in a forked copy or in two threads.

        Raises:
            UsageError: If closed, the workers are those of another process, or another thread is
                inside a call.
            WorkerDiedError, WorkerTimeoutError: If a worker died.
        """
        if self.closed or os.getpid() != self.owner_pid:
            self.refuse_closed()
        if get_ident() != self.one_thread.thread:
            self.one_thread.hand_over()
        self.processes.poll(0.0)  # and with it what workers have logged
        self.processes.refuse_if_dead()

    def refuse_closed(self) -> None:
        """Refuse to go on after ``close`` or in a forked copy, in whatever thread."""
        if self.closed:
            fix = "make new ones, or close these later"
            raise UsageError("the environments are closed", fix=fix)
        refuse_forked_copy(self.owner_pid)

    def close(self) -> None:
        """End the workers. May be repeated, as all that it calls."""
        self.closed = True
        if os.getpid() == self.owner_pid:  # else the workers are those of another process
            self.processes.fail(UsageError("the environments were closed meanwhile"))
            self.processes.close()
        self._forget_functions()
        for _, memory in self._mapped.values():
            memory.close_fd()
        for wake in (self._done, *self.wakes):
            wake.close()

    def _forget_functions(self) -> None:
        """Keep nothing of what workers are started with."""
        for functions in self._functions:
            functions.shared.close()


def _pickled(env_fns: Sequence[Callable[[], Any]], lanes: range) -> Parcel:
    fix = "create it inside the function, which runs in the worker"
    named = {f"env_fns[{lane}]": env_fns[lane] for lane in lanes}
    return pickled(named, list(named.values()), fix=fix)
