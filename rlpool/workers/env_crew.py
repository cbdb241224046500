"""The caller's side of workers that only hold environments: start, memory, messages, failures."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.context import SpawnProcess
from typing import Any

from rlpool.envs.vec_env import Options
from rlpool.errors import (
    RlpoolError,
    SpecError,
    UsageError,
    Where,
    WorkerDiedError,
    WorkerTimeoutError,
    compose,
)
from rlpool.limits import check_size
from rlpool.pickling import pickled, why_not
from rlpool.specs import TensorSpec
from rlpool.stack_dumps import described, note_source
from rlpool.storage import Array, Memory, carved_bytes
from rlpool.worker_limits import check_workers
from rlpool.workers.arena import Arena, ArenaLayout, carve_actions
from rlpool.workers.env_child import main
from rlpool.workers.env_messages import (
    Call,
    EnvReady,
    EnvSetup,
    LaneFailed,
    MapActions,
    MapArena,
    Reply,
)
from rlpool.workers.hang_watch import HangWatch
from rlpool.workers.messages import Failed, Message
from rlpool.workers.shipment import Shipment
from rlpool.workers.supervisor import Died, Supervisor, missing_guard_error
from rlpool.workers.wake import Wake

_DESCRIPTORS_EACH = 4
"""A worker's pipe, its wake, and two that multiprocessing keeps to notice its end and ours."""

_LARGE_BYTES = 2**15
"""A request that does not surely fit into a pipe is not sent while its worker may be answering."""

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

    Attributes:
        reports: What the workers said when they were ready.
        arena: The shared memory, once ``map`` was called.
        lanes_of: For each worker its lanes.
        worker_of: For each lane its worker.
        closed_lanes: Lanes whose environments were closed one by one.
        options: Options of each lane's last reset.
        issued: For each worker the number of its last order.
        wakes: What each worker waits for, beside its pipe.
        has_called: Whether a remote sent a request since this was last set to False.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        envs_per_worker: int,
        root: int,
        options: Mapping[str, Any],
        timeout_s: float | None,
    ) -> None:
        self.n_lanes = len(env_fns)
        starts = range(0, self.n_lanes, envs_per_worker)
        self.lanes_of = [range(s, min(s + envs_per_worker, self.n_lanes)) for s in starts]
        self.worker_of = [w for w, lanes in enumerate(self.lanes_of) for _ in lanes]
        self.n_workers = len(self.lanes_of)
        advice = "use fewer workers, by more envs_per_worker or fewer environments"
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
        self._replies: dict[int, bytes] = {}
        self._unanswered: set[int] = set()  # lanes whose remotes wait for a reply
        self.issued = [0] * self.n_workers
        self.has_called = False
        self._owner_pid = os.getpid()
        pickles = [
            _pickled({f"env_fns[{lane}]": env_fns[lane] for lane in lanes})
            for lanes in self.lanes_of
        ]
        self._done = Wake()
        self.wakes = [Wake() for _ in range(self.n_workers)]
        setups = [
            EnvSetup(
                Shipment(pickles[worker]),
                options,
                worker,
                self.n_workers,
                lanes[0],
                root,
                self.wakes[worker],
                self._done,
            )
            for worker, lanes in enumerate(self.lanes_of)
        ]
        self._supervisor = Supervisor(setups, self._deliver, main)
        note_source(self)
        try:
            self._supervisor.start()
            self._wait_until(lambda: len(self._reports) == self.n_workers, self._starting)
        except BaseException:
            self._supervisor.abort()
            self.close()
            raise
        self.reports = [self._reports[worker] for worker in range(self.n_workers)]

    @property
    def processes(self) -> list[SpawnProcess]:
        """The workers' processes."""
        return self._supervisor.processes

    def map(self, layout: ArenaLayout) -> Arena:
        """Make the arena and let all workers use it."""
        sizes = layout.bytes_of_key()
        n_bytes = sum(sizes.values())
        check_size(
            sizes,
            lambda n_free: f"use fewer environments ({self.n_lanes * n_free // n_bytes} would fit)",
            "the observations",
        )
        memory = Memory.shared(n_bytes, "rlpool-arena")
        self._broadcast(MapArena(layout), memory)
        self.arena = Arena(layout, memory)
        self.arena.is_ahead[:] = -1
        return self.arena

    def map_actions(self, specs: Mapping[str, TensorSpec]) -> dict[str, Array]:
        """Make room for actions of environments without an action space."""
        n_bytes = sum(carved_bytes(specs, self.n_lanes).values())
        memory = Memory.shared(n_bytes, "rlpool-actions")
        self._broadcast(MapActions(specs, self.n_lanes), memory)
        return carve_actions(specs, self.n_lanes, memory)

    def worker_stacks(self) -> str:
        """What the worker processes are doing, also for a signal handler at any time."""
        if self.closed or os.getpid() != self._owner_pid:
            return ""
        return described(self._supervisor.stacks(), self._where)

    def close(self) -> None:
        """End the workers. May be repeated."""
        if self.closed:
            return
        self.closed = True
        if os.getpid() == self._owner_pid:  # else the workers are those of another process
            self._supervisor.close()
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
        self._supervisor.deliver_logs()
        if self._fatal is not None:
            raise self._fatal

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
        waiting = self._unanswered.intersection(lanes)
        if waiting:
            raise UsageError(
                compose(
                    f"remote {min(waiting)} has a request without an answer",
                    fix=f"call remotes[{min(waiting)}].recv() first",
                )
            )

    # Remotes ----------------------------------------------------------------------------------

    def call(self, lane: int, command: str, data: Any) -> None:
        """Send a remote's request; its reply is to be fetched before the next."""
        worker = self.worker_of[lane]
        own = self.lanes_of[worker]
        message = Call(lane - own.start, command, data)
        if not _is_small(message):
            # The worker may be writing replies that nobody reads: both would wait without end.
            others = self._unanswered.intersection(own)
            self._wait_until(lambda: others <= self._replies.keys(), lambda: {worker})
        self.has_called = True
        if command == "close":
            self.closed_lanes.add(lane)
        self.send(worker, message)
        if command != "close":
            self._unanswered.add(lane)
        if len(self.closed_lanes) == self.n_lanes:
            self.close()

    def reply(self, lane: int) -> Any:
        """Wait for the answer to a remote's request."""
        self.check_open()
        if lane not in self._unanswered:
            raise UsageError(
                compose("there is nothing to receive", fix=f"call remotes[{lane}].send(...) first")
            )
        self._wait_until(lambda: lane in self._replies, lambda: {self.worker_of[lane]})
        self._unanswered.discard(lane)
        return pickle.loads(self._replies.pop(lane))

    def has_reply(self, lane: int, timeout_s: float) -> bool:
        """Whether an answer is there, waiting for it for so long at most."""
        self.check_open()
        if lane in self._unanswered and lane not in self._replies:
            self._poll(timeout_s)
        return lane in self._replies

    # Workers ----------------------------------------------------------------------------------

    def send(self, worker: int, message: Message) -> None:
        """Send a message to a worker.

        Raises:
            SpecError: If something of the user's in it cannot be pickled.
        """
        try:
            self._supervisor.send(worker, message)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise SpecError(
                compose(
                    why_not({"message": message}, error, kind=pickle.Pickler),
                    fix="pass numbers, arrays, or objects of classes at module level",
                )
            ) from error

    def _broadcast(self, message: Message, memory: Memory) -> None:
        for worker in range(self.n_workers):
            self._supervisor.send(worker, message, memory)
        memory.close_fd()

    def _poll(self, timeout_s: float) -> None:
        if self._supervisor.wait_for(self._done.fd, timeout_s):
            self._done.wait()
        if self._fatal is not None:
            raise self._fatal

    def _wait_until(self, is_over: Callable[[], bool], busy: Callable[[], set[int]]) -> None:
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
        patience_s, is_first_look = self._watch.patience_s, True
        while True:
            for worker in workers:
                if finished[worker] != issued[worker]:
                    break
            else:
                return
            if self._supervisor.wait_for(done.fd, patience_s):
                done.wait()
            else:
                busy = {w for w in workers if finished[w] != issued[w]}
                # Time before the first look is not known to have been without progress.
                self._look_for_hang(set() if is_first_look else busy)
                is_first_look = False
            if self._fatal is not None:
                raise self._fatal

    def wait_for_any(self, workers: Iterable[int]) -> None:
        """Wait until something happens; workers are busy."""
        self._poll(self._watch.patience_s)
        # In every round: a worker that hangs does not keep the others from waking us.
        finished, issued = self.arena.finished, self.issued
        self._look_for_hang({w for w in workers if finished[w] != issued[w]})

    def failure_of(self, worker: int) -> LaneFailed:
        """A worker's report about the order that it failed in."""
        self._wait_until(lambda: self._has_failed(worker), lambda: {worker})
        return self._failures.pop(worker)

    def _has_failed(self, worker: int) -> bool:
        return worker in self._failures and self._failures[worker].order == self.issued[worker]

    def _starting(self) -> set[int]:
        return set(range(self.n_workers)) - self._reports.keys()

    def _deliver(self, worker: int, message: Message) -> None:
        """Take a worker's message."""
        if isinstance(message, Reply):
            self._replies[self.lanes_of[worker][message.lane]] = message.reply
        elif isinstance(message, LaneFailed):
            self._failures[worker] = message
        elif isinstance(message, EnvReady):
            self._reports[worker] = message
        elif isinstance(message, Failed):
            self._fatal = self._fatal or message.error
        elif isinstance(message, Died) and not self.closed_lanes.issuperset(self.lanes_of[worker]):
            how = message.signal_name or f"exit code {message.exitcode}"
            self._fatal = (
                self._fatal
                or missing_guard_error(message)
                or WorkerDiedError(
                    f"worker {worker} died ({how})",
                    exitcode=message.exitcode,
                    signal_name=message.signal_name,
                    where=self._where(worker),
                    fix=ENV_HINT,
                )
            )

    def _look_for_hang(self, busy: set[int]) -> None:
        """Kill a worker that has something to do and makes no progress."""
        # A lane after another is progress, too: a worker may have many slow ones.
        progress = [
            steps and steps * (self.n_lanes + 1) + self._supervisor.lane_in_use(worker)
            for worker, steps in enumerate(self._supervisor.progress())
        ]
        worker = self._watch.hanging(progress, busy)
        if worker is not None and self._fatal is None:
            self._fatal = WorkerTimeoutError(
                f"worker {worker} made no progress for {self._timeout_s:g} s",
                where=self._where(worker),
                fix="look for an endless wait in the environment, or raise timeout",
            )
            self._supervisor.kill(worker)

    def _where(self, worker: int) -> Where:
        """What a worker is doing, as far as shared memory tells."""
        own = self.lanes_of[worker]
        lane = own.start + min(self._supervisor.lane_in_use(worker), len(own) - 1)
        if worker not in self._reports:
            return Where(worker, lane)
        is_busy = self.issued[worker] and self.issued[worker] != self.arena.finished[worker]
        if is_busy or self._unanswered.intersection(own):
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


def _pickled(env_fns: Mapping[str, Callable[[], Any]]) -> bytes:
    fix = "create it inside the function, which runs in the worker"
    return pickled(env_fns, list(env_fns.values()), fix=fix)


def _is_small(message: Call) -> bool:
    """Whether a request surely fits into an empty pipe."""
    try:
        return len(pickle.dumps(message)) < _LARGE_BYTES
    except Exception:
        return True  # which ``_send`` will refuse
