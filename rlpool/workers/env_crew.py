"""The caller's side of workers that only hold environments: start, memory, messages, failures."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from typing import Any

import cloudpickle

from rlpool.envs.vec_env import Options
from rlpool.errors import (
    EnvError,
    RlpoolError,
    SpecError,
    UsageError,
    Where,
    WorkerDiedError,
    WorkerError,
    WorkerStartupError,
    WorkerTimeoutError,
    compose,
)
from rlpool.interrupts import InterruptsHeld
from rlpool.limits import check_size
from rlpool.restarts import FailurePolicy
from rlpool.specs import TensorSpec
from rlpool.storage import Array, Memory, carved_bytes
from rlpool.worker_limits import check_workers
from rlpool.workers.arena import Arena, ArenaLayout, carve_actions
from rlpool.workers.env_child import main
from rlpool.workers.env_messages import (
    Announce,
    EnvReady,
    EnvSetup,
    LaneFailed,
    MapActions,
    MapArena,
    Reply,
    Reset,
)
from rlpool.workers.episode_log import EpisodeLog
from rlpool.workers.hang_watch import HangWatch
from rlpool.workers.messages import Failed, Message
from rlpool.workers.recycling import Recycling
from rlpool.workers.remote_calls import RemoteCalls
from rlpool.workers.replacements import Replacements
from rlpool.workers.successors import Successors
from rlpool.workers.supervisor import Died, Supervisor, missing_guard_error
from rlpool.workers.wake import Wake

_DESCRIPTORS_EACH = 4
"""A worker's pipe, its wake, and two that multiprocessing keeps to notice its end and ours."""

_UNKILLABLE_S = 10.0
"""A process that was killed and is still there after this will not end soon."""

ENV_HINT = "step it in this process to debug: GymEnv([env_fn()])"


class EnvCrew:
    """Worker processes with environments.

    Args:
        env_fns: Functions that make one environment each.
        envs_per_worker: Environments of a worker; the last one may have fewer.
        root: Root of all seeds.
        options: Keyword arguments of the workers' ``GymEnv``.
        timeout_s: Seconds without progress after which a worker counts as hanging, ``None`` for
            never.
        policy: What becomes of workers that fail.

    Attributes:
        policy: Likewise.
        log: What lanes were asked for, ``None`` if nobody will want to know.
        calls: Requests of remotes.
        recycling: What healthy workers have done.
        reports: What the workers said when they were ready.
        arena: The shared memory, once ``map`` was called.
        lanes_of: For each worker its lanes.
        worker_of: For each lane its worker.
        closed_lanes: Lanes whose environments were closed one by one.
        options: Options of each lane's last reset.
        issued: For each worker the number of its last order.
        wakes: What each worker waits for, beside its pipe.
        has_called: Whether a remote sent a request since this was last set to False.
        processes: The workers' processes, after ``close`` the last ones.
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
        self.policy = policy
        self.n_lanes = len(env_fns)
        starts = range(0, self.n_lanes, envs_per_worker)
        self.lanes_of = [range(s, min(s + envs_per_worker, self.n_lanes)) for s in starts]
        self.worker_of = [w for w, lanes in enumerate(self.lanes_of) for _ in lanes]
        self.n_workers = len(self.lanes_of)
        advice = "use fewer workers (more envs_per_worker, or fewer environments)"
        check_workers(self.n_workers, _DESCRIPTORS_EACH, advice)
        self.arena: Arena
        self.closed = False
        self.closed_lanes: set[int] = set()
        self.options: list[Options] = [None] * self.n_lanes  # of each lane's last reset
        self._timeout_s = timeout_s
        self._watch = HangWatch(timeout_s)
        self._fatal: RlpoolError | None = None
        self._reports: dict[int, EnvReady] = {}
        self._failures: dict[int, LaneFailed] = {}
        repeats = policy.restarts_workers or policy.restarts_on_env_errors
        keeps_log = repeats or (policy.recycles and envs_per_worker > 1)
        self.log = EpisodeLog(self.n_lanes) if keeps_log else None
        self.calls = RemoteCalls(self.log)
        self.issued = [0] * self.n_workers
        self.has_called = False
        self._owner_pid = os.getpid()
        self._done = Wake()
        self.wakes = [Wake() for _ in range(self.n_workers)]
        self._supervisor = Supervisor(self._setups(env_fns, options, root), self._deliver, main)
        self._replacements = Replacements(self._supervisor, policy)
        self._down = self._replacements.down
        self._ready: list[int] = []  # successors that are to be told what to do
        self._stuck: dict[int, tuple[WorkerTimeoutError, float]] = {}  # killed for that, when
        self._failed_starts: dict[int, WorkerError] = {}
        self._n_finished = [0] * self.n_workers  # orders, when its process began
        self._successors = Successors(self._supervisor, self.lanes_of, self.log, self.calls)
        self.processes: list[SpawnProcess] = []
        self.recycling = Recycling(policy, self.n_workers, lambda w: self.processes[w].pid)
        try:
            self._supervisor.start()
            self.processes = self._supervisor.processes
            self.wait_until(lambda: len(self._reports) == self.n_workers, self._starting)
            self.recycling.refuse_small_limit()
        except BaseException:
            self._supervisor.abort()
            self.close()
            raise
        self.reports = [self._reports[worker] for worker in range(self.n_workers)]

    def _setups(
        self, env_fns: Sequence[Callable[[], Any]], options: Mapping[str, Any], root: int
    ) -> list[EnvSetup]:
        return [
            EnvSetup(
                _pickled([env_fns[lane] for lane in lanes], lanes),
                options,
                worker,
                self.n_workers,
                lanes[0],
                root,
                self.wakes[worker],
                self._done,
                self.policy.max_episodes_per_worker,
            )
            for worker, lanes in enumerate(self.lanes_of)
        ]

    def map(self, layout: ArenaLayout) -> Arena:
        """Make the arena and let all workers use it."""
        check_size(layout.bytes_of_key(), "use fewer environments", "the observations")
        memory = Memory.shared(sum(layout.bytes_of_key().values()), "rlpool-arena")
        self.arena = Arena(layout, memory)
        self.arena.is_ahead[:] = -1
        if self.log is not None and layout.action:
            self.log.bind(self.arena.action)
        self._broadcast(MapArena(layout), memory)
        return self.arena

    def map_actions(self, specs: Mapping[str, TensorSpec]) -> dict[str, Array]:
        """Make room for actions of environments without an action space."""
        n_bytes = sum(carved_bytes(specs, self.n_lanes).values())
        memory = Memory.shared(n_bytes, "rlpool-actions")
        arrays = carve_actions(specs, self.n_lanes, memory)
        if self.log is not None:
            self.log.bind(arrays)
        self._broadcast(MapActions(specs, self.n_lanes), memory)
        return arrays

    def close(self) -> None:
        """End the workers. May be repeated."""
        if self.closed:
            return
        self.closed = True
        if os.getpid() == self._owner_pid:  # else the workers are those of another process
            self._supervisor.close()
        self._successors.close()
        self._done.close()
        for wake in self.wakes:
            wake.close()

    def check_open(self) -> None:
        """Refuse to go on after ``close``, or after a death.

        Raises:
            UsageError: If closed.
            WorkerDiedError, WorkerTimeoutError: If a worker died.
        """
        if self.closed:
            raise UsageError(
                compose("the environments are closed", fix="make a new manager, or close it later")
            )
        self._advance()

    def refuse_bad_lanes(self, lanes: Sequence[int]) -> None:
        """Refuse lanes that are not ascending numbers of open environments.

        Raises:
            SpecError, UsageError: If they are not.
        """
        if not lanes or list(lanes) != sorted(set(lanes)) or lanes[0] < 0:
            raise SpecError(f"lanes should be ascending numbers, got {list(lanes)}")
        if lanes[-1] >= self.n_lanes:
            raise SpecError(f"there are {self.n_lanes} lanes, numbered from 0: no {lanes[-1]}")
        closed = self.closed_lanes.intersection(lanes)
        if closed:
            raise UsageError(f"environment {min(closed)} was closed by its remote")
        waiting = self.calls.waiting.keys() & set(lanes)
        if waiting:
            raise UsageError(
                compose(
                    f"remote {min(waiting)} has a request without an answer",
                    fix=f"call remotes[{min(waiting)}].recv() first",
                )
            )

    # Workers ----------------------------------------------------------------------------------

    def send(self, worker: int, message: Message) -> None:
        """Send a message to a worker.

        Raises:
            SpecError: If something of the user's in it cannot be pickled.
        """
        try:
            if worker in self._down:
                pickle.dumps(message)  # its successor will be told
            else:
                self._supervisor.send(worker, message)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise SpecError(
                compose(
                    f"options, tasks or actions that cannot be pickled: {error}",
                    fix="pass numbers, arrays, or objects of classes at module level",
                )
            ) from error

    def order_reset(self, worker: int, message: Reset) -> None:
        """Send a worker the order to reset lanes."""
        self.send(worker, message)
        self._successors.resets[worker] = message
        self.issued[worker] = message.order
        self.recycling.note_begun(worker, len(message.lanes))

    def announce(self, worker: int, message: Announce) -> None:
        """Tell a worker which episodes will come."""
        self._successors.announced[worker] = message
        self.send(worker, message)

    def _broadcast(self, message: MapArena | MapActions, memory: Memory) -> None:
        for worker in range(self.n_workers):
            if worker not in self._down:
                self._supervisor.send(worker, message, memory)
        if self.log is None and not self.policy.recycles:
            memory.close_fd()
        else:
            self._successors.keep(message, memory)

    def _poll(self, timeout_s: float) -> None:
        patience_s = self._replacements.patience_s(timeout_s) if self._down else timeout_s
        if self._supervisor.wait_for(self._done.fd, patience_s):
            self._done.wait()
        self._advance()

    def look(self, busy: Iterable[int], timeout_s: float = 0.0) -> None:
        """Take notice of what happened, or will so soon; some workers are busy."""
        self._poll(timeout_s)
        self._look_for_hang(set(busy))

    def wait_until(self, is_over: Callable[[], bool], busy: Callable[[], set[int]]) -> None:
        """Handle messages until a condition holds, or a worker that is busy hangs."""
        self._look_for_hang(set())
        while not is_over():
            self._poll(self._watch.patience_s)
            if not is_over():
                self._look_for_hang(busy())

    def wait_idle(self, workers: Sequence[int]) -> None:
        """Wait until workers have carried out their orders.

        Raises:
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
        """
        finished, issued, done = self.arena.finished, self.issued, self._done
        down = self._down
        patience_s, is_first_look = self._watch.patience_s, True
        while True:
            for worker in workers:
                if finished[worker] != issued[worker]:
                    break
            else:
                return
            if down:
                patience_s = self._replacements.patience_s(self._watch.patience_s)
            if self._supervisor.wait_for(done.fd, patience_s):
                done.wait()
            else:
                busy = {w for w in workers if finished[w] != issued[w]}
                # Time before the first look is not known to have been without progress.
                self._look_for_hang(set() if is_first_look else busy)
                is_first_look = False
            if down or self._fatal is not None:
                self._advance()

    def wait_for_any(self, workers: Iterable[int]) -> None:
        """Wait until something happens; workers are busy."""
        self._poll(self._watch.patience_s)
        # In every round: a worker that hangs does not keep the others from waking us.
        finished, issued = self.arena.finished, self.issued
        self._look_for_hang({w for w in workers if finished[w] != issued[w]})

    def failure_of(self, worker: int) -> LaneFailed:
        """A worker's report about the order that it failed in."""
        self.wait_until(lambda: self._has_failed(worker), lambda: {worker})
        return self._failures.pop(worker)

    def _has_failed(self, worker: int) -> bool:
        return worker in self._failures and self._failures[worker].order == self.issued[worker]

    def _starting(self) -> set[int]:
        return set(range(self.n_workers)) - self._reports.keys()

    def _deliver(self, worker: int, message: Message) -> None:
        """Take a worker's message."""
        if isinstance(message, Reply):
            self._take_reply(worker, message)
        elif isinstance(message, LaneFailed):
            self._failures[worker] = message
        elif isinstance(message, EnvReady):
            self._take_report(worker, message)
        elif isinstance(message, Failed):
            if worker in self._reports and self.policy.restarts_workers:
                self._failed_starts[worker] = message.error
            else:
                self._fatal = self._fatal or message.error
        elif isinstance(message, Died) and not self._replacements.has_left(worker):
            self._note_death(worker, message)

    def _note_death(self, worker: int, died: Died) -> None:
        if self._fatal is not None or self.closed_lanes.issuperset(self.lanes_of[worker]):
            return
        how = died.signal_name or f"exit code {died.exitcode}"
        stuck, _ = self._stuck.pop(worker, (None, 0.0))
        failed = self._failed_starts.pop(worker, None)
        guard = missing_guard_error(died)
        if guard is not None:
            self._fatal = guard
            return
        error = WorkerDiedError(
            f"worker {worker} died ({how})",
            exitcode=died.exitcode,
            signal_name=died.signal_name,
            where=self._where(worker),
            fix=ENV_HINT,
        )
        self._note_failure(worker, stuck or failed or error)

    def _note_failure(self, worker: int, error: WorkerError, n_orders: int = 0) -> None:
        """Take note that a worker is dead or of no use; it failed in the last so many orders."""
        if not self.policy.restarts_workers and not n_orders:
            self._fatal = error
            return
        if hasattr(self, "arena"):
            n_done = self.arena.finished[worker] - self._n_finished[worker]
            if n_done > n_orders:
                self._replacements.note_success(worker)
            self._successors.forget_ahead(worker, self.arena)
        self._fatal = self._replacements.note_failure(worker, error)

    def _look_for_hang(self, busy: set[int]) -> None:
        """Kill a worker that has something to do and makes no progress."""
        # A lane after another is progress, too: a worker may have many slow ones.
        progress = [
            steps and steps * (self.n_lanes + 1) + self._supervisor.lane_in_use(worker)
            for worker, steps in enumerate(self._supervisor.progress())
        ]
        if self._down:
            busy = (busy - self._down) | self._replacements.starting
        worker = self._watch.hanging(progress, busy - self._stuck.keys())
        if worker is not None and self._fatal is None:
            error = WorkerTimeoutError(
                f"worker {worker} made no progress for {self._timeout_s:g} s",
                where=self._where(worker),
                fix="look for an endless wait in the environment, or raise timeout",
            )
            self._supervisor.kill(worker)
            if self.policy.restarts_workers and worker in self._reports:
                self._stuck[worker] = error, time.monotonic()
            else:
                self._fatal = error
        for error, killed_s in self._stuck.values():
            if time.monotonic() > killed_s + _UNKILLABLE_S:
                self._fatal = self._fatal or error

    # Successors -------------------------------------------------------------------------------

    def recycle(self, lanes: Sequence[int]) -> None:
        """Replace the workers that have run long enough of lanes that will be reset now."""
        if not self.recycling.is_on:
            return
        n_new: dict[int, int] = {}
        for lane in lanes:
            worker = self.worker_of[lane]
            n_new[worker] = n_new.get(worker, 0) + 1
        for worker, n in n_new.items():
            why = "" if worker in self._down else self.recycling.reason(worker, n)
            if why:
                self._successors.forget_ahead(worker, self.arena)
                self._replacements.recycle(worker, why)

    def try_again(self, worker: int) -> bool:
        """Replace a worker whose order failed, so that its successor carries it out again.

        Returns:
            False if that is not wanted, or of no use: then ``failure_of`` has the failure.

        Raises:
            WorkerDiedError: If there were too many failures.
        """
        if not self.policy.restarts_on_env_errors:
            return False
        failure = self.failure_of(worker)
        if failure.is_lost:
            self._failures[worker] = failure
            return False
        arena, order = self.arena, self.issued[worker]
        where = self.where(self.lanes_of[worker][failure.lane])
        self._note_failure(worker, _placed(failure.error, where), n_orders=1)
        if self._fatal is None:
            self._replacements.dismiss(worker)
            self.issued[worker] += 1
            if arena.order[worker] == order:  # it was a step
                arena.order[worker] += 1
                if arena.writing[worker] == order:
                    arena.writing[worker] += 1
            else:
                resets = self._successors.resets
                resets[worker] = replace(resets[worker], order=order + 1)
        self._advance()
        return True

    def _take_reply(self, worker: int, message: Reply) -> None:
        lane = self.lanes_of[worker][message.lane]
        if message.error is not None and self.policy.restarts_on_env_errors:
            self._note_failure(worker, _placed(message.error, self.where(lane)), n_orders=1)
            if self._fatal is None:
                self._replacements.dismiss(worker)
                return  # its successor will be asked again
        self.calls.take(lane, message, self.arena.seed)
        if message.is_done:
            self._replacements.note_success(worker)

    def _take_report(self, worker: int, report: EnvReady) -> None:
        first = self._reports.setdefault(worker, report)
        if (first.observation, first.action) != (report.observation, report.action):
            self._fatal = self._fatal or SpecError(
                f"worker {worker} was replaced, and the spaces of its environments are others now"
            )
        if worker in self._down:
            self._ready.append(worker)

    def _advance(self) -> None:
        """Go on with workers that are being replaced.

        Raises:
            WorkerDiedError, WorkerTimeoutError: If there is no going on.
        """
        if self._down and self._fatal is None:
            with InterruptsHeld():
                self._fatal = self._replacements.advance()
                self.processes = self._supervisor.processes
                while self._ready:
                    self._bring_up(self._ready.pop())
        if self._fatal is not None:
            raise self._fatal

    def _bring_up(self, worker: int) -> None:
        """Tell a successor, which has its environments, all that its predecessor knew."""
        replacements, successors = self._replacements, self._successors
        counts = not replacements.is_recycled(worker)
        replacements.note_up(worker)
        if hasattr(self, "arena"):
            self._n_finished[worker] = self.arena.finished[worker]
            n_begun = successors.bring_up(
                worker, self.arena, self.issued[worker], self.closed_lanes, counts=counts
            )
            self.recycling.note_replaced(worker, n_begun)

    def _where(self, worker: int) -> Where:
        """What a worker is doing, as far as shared memory tells."""
        own = self.lanes_of[worker]
        lane = own.start + min(self._supervisor.lane_in_use(worker), len(own) - 1)
        if worker not in self._reports:
            return Where(worker, lane)
        is_busy = self.issued[worker] and self.issued[worker] != self.arena.finished[worker]
        if is_busy or not self.calls.waiting.keys().isdisjoint(own):
            return self.where(lane)
        return Where(worker)

    def where(self, lane: int) -> Where:
        """Where a lane is."""
        options = self.options[lane]
        return Where(
            worker=self.worker_of[lane],
            lane=lane,
            step=int(self.arena.elapsed[lane]),
            seed=int(self.arena.seed[lane]),
            env_info=options or None,
        )


def _placed(error: EnvError, where: Where) -> EnvError:
    """An error of a worker, with all that is known about where it happened."""
    return type(error)(error.what, where=where, fix=error.fix, traceback_text=error.traceback_text)


def _pickled(functions: list[Callable[[], Any]], lanes: range) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(functions)
    except Exception as error:
        raise WorkerStartupError(
            f"env_fns[{lanes[0]}] to env_fns[{lanes[-1]}] cannot be pickled: {error}",
            fix="create what cannot be pickled inside the function",
        ) from error
    return pickled
