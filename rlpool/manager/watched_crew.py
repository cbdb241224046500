"""Workers with environments that are watched: deaths, hangs, and who takes their places."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.context import SpawnProcess

from rlpool.envs.vec_env import Options
from rlpool.errors import (
    EnvError,
    RlpoolError,
    SpecError,
    Where,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.manager.arena import Arena
from rlpool.manager.env_messages import EnvReady, LaneFailed, Reply
from rlpool.manager.episode_log import EpisodeLog
from rlpool.manager.lane_capsules import LaneCapsules
from rlpool.manager.remote_calls import RemoteCalls
from rlpool.manager.replacements import Replacements
from rlpool.manager.successors import Successors
from rlpool.record.crash_files import CrashDir
from rlpool.workers.failure_policy import FailurePolicy
from rlpool.workers.hang_watch import HangWatch
from rlpool.workers.messages import Failed, Message
from rlpool.workers.recycling import Recycling
from rlpool.workers.supervisor import Died, Supervisor, missing_guard_error

_UNKILLABLE_S = 10.0
"""A process that was killed and is still there after this will not end soon."""

ENV_HINT = "step it in this process to debug: GymEnv([env_fn()])"


class WatchedCrew:
    """Workers with environments, as far as their failures go.

    Args:
        lanes_of: For each worker its lanes.
        timeout_s: Seconds without progress after which a worker counts as hanging, ``None`` for
            never.
        policy: What becomes of workers that fail.
        crash_dir: Where the capsules of failures are written, ``None`` for nowhere.

    Attributes:
        policy: Likewise.
        log: What lanes were asked for, ``None`` if nobody will want to know.
        capsules: Makes the capsules of failures.
        calls: Requests of remotes.
        recycling: What healthy workers have done.
        arena: The shared memory, once it was made.
        lanes_of: For each worker its lanes.
        worker_of: For each lane its worker.
        closed: Whether it is over.
        closed_lanes: Lanes whose environments were closed one by one.
        options: Options of each lane's last reset.
        issued: For each worker the number of its last order.
        processes: The workers' processes, after the end the last ones.
        pids: Their ids.
    """

    def __init__(
        self,
        lanes_of: list[range],
        timeout_s: float | None,
        policy: FailurePolicy,
        crash_dir: CrashDir,
    ) -> None:
        self.lanes_of = lanes_of
        self.worker_of = [w for w, lanes in enumerate(lanes_of) for _ in lanes]
        self.n_workers, self.n_lanes = len(lanes_of), len(self.worker_of)
        self.policy = policy
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
        repeats = repeats or (policy.recycles and len(lanes_of[0]) > 1)
        keeps_log = repeats or crash_dir is not None
        self.log = EpisodeLog(self.n_lanes) if keeps_log else None
        self.capsules = LaneCapsules(self.n_lanes, self.log, crash_dir)
        self.calls = RemoteCalls(self.log)
        self.issued = [0] * self.n_workers
        self._ready: list[int] = []  # successors that are to be told what to do
        self._stuck: dict[int, tuple[WorkerTimeoutError, float]] = {}  # killed for that, when
        self._failed_starts: dict[int, WorkerError] = {}
        self._n_finished = [0] * self.n_workers  # orders, when its process began
        self.processes: list[SpawnProcess] = []
        self.pids: list[int | None] = []
        self.recycling = Recycling(policy, self.n_workers, lambda w: self.pids[w])

    def _watch_over(self, supervisor: Supervisor) -> None:
        """Take the processes over, which are not started yet."""
        self._supervisor = supervisor
        self._replacements = Replacements(supervisor, self.policy)
        self._down = self._replacements.down
        self._successors = Successors(supervisor, self.lanes_of, self.log, self.calls)

    def _take_processes(self) -> None:
        """Note which processes the workers are."""
        self.processes = self._supervisor.processes
        self.pids = [process.pid for process in self.processes]

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
        elif isinstance(message, Died):
            self._note_end(worker, message)

    def _note_end(self, worker: int, died: Died) -> None:
        """Judge the end of a process, once: by its last words if it left any, else by its death."""
        has_left = self._replacements.has_left(worker)
        stuck, _ = self._stuck.pop(worker, (None, 0.0))
        if self._fatal is not None or self.closed_lanes.issuperset(self.lanes_of[worker]):
            return
        failure = self._failures.get(worker)
        if failure is not None and self.is_repeatable(worker, failure):
            self.repeat_order(worker, failure)
        elif not has_left:
            self._note_death(worker, died, stuck)

    def is_repeatable(self, worker: int, failure: LaneFailed) -> bool:
        """Whether a successor may succeed where an environment failed in the last order."""
        is_last = failure.order == self.issued[worker]
        return is_last and self.policy.restarts_on_env_errors and not failure.is_lost

    def repeat_order(self, worker: int, failure: LaneFailed) -> None:
        """Let the worker's successor carry out the order in which an environment failed."""
        del self._failures[worker]
        order, arena = self.issued[worker], self.arena
        where = self.where(self.lanes_of[worker][failure.lane])
        if failure.call == "reset":
            where = where._replace(step=0)
        self.capsules.remember(worker, self.lanes_of[worker])
        error = self.capsules.of_order(placed(failure.error, where), failure.call, where)
        if worker not in self._down:
            self._note_failure(worker, error, n_orders=1)
        if self._fatal is not None:
            return
        self.issued[worker] += 1
        if arena.order[worker] == order:  # it was a step
            arena.order[worker] += 1
            if arena.writing[worker] == order:
                arena.writing[worker] += 1
        else:
            resets = self._successors.resets
            resets[worker] = replace(resets[worker], order=order + 1)

    def _note_death(self, worker: int, died: Died, stuck: WorkerTimeoutError | None) -> None:
        how = died.signal_name or f"exit code {died.exitcode}"
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
            self._replacements.look_at(self._supervisor.progress())
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
                traceback_text=self._supervisor.stacks_of(worker),
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

    def _take_reply(self, worker: int, message: Reply) -> None:
        lane = self.lanes_of[worker][message.lane]
        self.capsules.forget_noted(lane)
        if message.error is not None:
            error = placed(message.error, self.where(lane))
            error = self.capsules.of_remote(error, self.calls.waiting[lane])
            if self.policy.restarts_on_env_errors:
                if worker in self._down:
                    return  # it is being replaced for another failure, and its successor is asked
                self._note_failure(worker, error, n_orders=1)
                if self._fatal is None:
                    self._replacements.dismiss(worker)
                    return  # its successor will be asked again
            self.capsules.note(lane, error, "" if error.fix == message.error.fix else error.fix)
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
        else:
            self._replacements.note_up(worker)

    def _advance(self) -> None:
        """Go on with workers that are being replaced.

        Raises:
            WorkerDiedError, WorkerTimeoutError: If there is no going on.
        """
        if self._down and self._fatal is None:
            with InterruptsHeld():
                self._fatal = self._replacements.advance()
                self._take_processes()
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


def placed(error: EnvError, where: Where) -> EnvError:
    """An error of a worker, with all that is known about where it happened."""
    return type(error)(error.what, where=where, fix=error.fix, traceback_text=error.traceback_text)
