"""The caller's side of workers that only hold environments: start, memory, messages, waiting."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlpool.errors import (
    SpecError,
    UsageError,
)
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.machine.limits import check_size
from rlpool.machine.pickling import pickled, why_not
from rlpool.machine.worker_limits import check_workers
from rlpool.manager.arena import Arena, ArenaLayout, carve_actions, observation_specs
from rlpool.manager.env_child import main
from rlpool.manager.env_messages import (
    Announce,
    Call,
    EnvSetup,
    LaneFailed,
    MapActions,
    MapArena,
    MapObservations,
    Reset,
)
from rlpool.manager.successors import MapMessage
from rlpool.manager.watched_crew import WatchedCrew
from rlpool.memory.storage import Array, Memory, carved_bytes
from rlpool.ownership import refuse_forked_copy
from rlpool.record.crash_files import CrashDir
from rlpool.specs import DEFAULT_OBSERVATION_KEY, Structure, TensorSpec, leaves_of
from rlpool.workers.failure_policy import FailurePolicy
from rlpool.workers.messages import Message
from rlpool.workers.shipment import Shipment
from rlpool.workers.stack_dumps import described, note_source
from rlpool.workers.supervisor import Supervisor
from rlpool.workers.wake import Wake
from rlpool.workers.warm_start import memory_of

_DESCRIPTORS_EACH = 4
"""A worker's pipe, its wake, and two that multiprocessing keeps to notice its end and ours."""


class EnvCrew(WatchedCrew):
    """Worker processes with environments.

    Args:
        env_fns: Functions that make one environment each.
        envs_per_worker: Environments of a worker; the last one may have fewer.
        root: Root of all seeds.
        options: Keyword arguments of the workers' ``GymEnv``.
        timeout_s: Seconds without progress after which a worker counts as hanging, ``None`` for
            never.
        policy: What becomes of workers that fail.
        crash_dir: Where the capsules of failures are written, ``None`` for nowhere.

    Attributes:
        reports: What the workers said when they were ready.
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
        policy: FailurePolicy,
        crash_dir: CrashDir,
    ) -> None:
        advice = "use fewer workers, by more envs_per_worker or fewer environments"
        starts = range(0, len(env_fns), envs_per_worker)
        lanes_of = [range(s, min(s + envs_per_worker, len(env_fns))) for s in starts]
        memory = memory_of(policy.start_method)
        check_workers(len(lanes_of), _DESCRIPTORS_EACH, advice, memory)
        super().__init__(lanes_of, timeout_s, policy, crash_dir)
        self.has_called = False
        self._owner_pid = os.getpid()
        shipments = [
            Shipment(_pickled({f"env_fns[{lane}]": env_fns[lane] for lane in lanes}))
            for lanes in lanes_of
        ]
        self._done = Wake()
        self.wakes = [Wake() for _ in lanes_of]
        setups = self._setups(shipments, options, root)
        self._watch_over(Supervisor(setups, self._deliver, main, policy.start_method))
        note_source(self)
        try:
            self._supervisor.start()
            self._take_processes()
            self.wait_until(lambda: len(self._reports) == self.n_workers, self._starting)
            self.recycling.refuse_small_limit()
        except BaseException:
            self._supervisor.abort()
            self.close()
            raise
        self.reports = [self._reports[worker] for worker in range(self.n_workers)]

    def _setups(
        self, shipments: list[Shipment], options: Mapping[str, Any], root: int
    ) -> list[EnvSetup]:
        return [
            EnvSetup(
                shipments[worker],
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
        memory = self._memory(layout.bytes_of_key(), "rlpool-arena")
        self.arena = Arena(layout, memory)
        self.arena.is_ahead[:] = -1
        if self.log is not None and layout.action:
            self.log.bind(self.arena.action)
        self._broadcast(MapArena(layout), memory)
        return self.arena

    def map_observations(self, structure: Structure) -> None:
        """Make room for observations that were not known when the arena was made."""
        leaves = leaves_of(structure, DEFAULT_OBSERVATION_KEY)
        sizes = carved_bytes(observation_specs(leaves), self.n_lanes)
        memory = self._memory(sizes, "rlpool-observations")
        self.arena.map_observations(leaves, self.n_lanes, memory)
        self._broadcast(MapObservations(structure, self.n_lanes), memory)

    def _memory(self, sizes: Mapping[str, int], name: str) -> Memory:
        """Memory for arrays of all lanes, of so many bytes by key."""
        n_bytes = sum(sizes.values())
        check_size(
            sizes,
            lambda n_free: f"use fewer environments ({self.n_lanes * n_free // n_bytes} would fit)",
            "the observations",
        )
        return Memory.shared(n_bytes, name)

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

    def worker_stacks(self) -> str:
        """What the worker processes are doing, also for a signal handler at any time."""
        if self.closed or os.getpid() != self._owner_pid:
            return ""
        return described(self._supervisor.stacks(), self._where)

    def check_open(self) -> None:
        """Refuse to go on after ``close``, after a death, or in a forked copy.

        Raises:
            UsageError: If closed, or the workers are those of another process.
            WorkerDiedError, WorkerTimeoutError: If a worker died.
        """
        if self.closed:
            raise UsageError(
                "the environments are closed", fix="make a new manager, or close it later"
            )
        self.refuse_forked_copy()
        self._supervisor.deliver_logs()
        self._advance()

    def refuse_forked_copy(self) -> None:
        """Refuse to use the workers in another process than that which started them."""
        refuse_forked_copy(self._owner_pid)

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
                f"remote {min(waiting)} has a request without an answer",
                fix=f"call remotes[{min(waiting)}].recv() first",
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
                why_not({"message": message}, error, kind=pickle.Pickler),
                fix="pass numbers, arrays, or objects of classes at module level",
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

    def ask(self, lane: int, command: str, data: Any) -> tuple[str, Any]:
        """Send a request to one environment, as its remote would, and wait for the reply."""
        worker = self.worker_of[lane]
        message = Call(lane - self.lanes_of[worker].start, command, data)
        calls = self.calls
        if calls.waiting.get(lane) != message:  # else it is asked again after an interruption
            with InterruptsHeld():
                self.send(worker, message)
                calls.waiting[lane] = message
        self.wait_until(lambda: lane in calls.replies, lambda: {worker})
        reply: tuple[str, Any] = pickle.loads(calls.replies[lane])
        del calls.waiting[lane], calls.replies[lane]
        return reply

    def _broadcast(self, message: MapMessage, memory: Memory) -> None:
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

    @property
    def patience_s(self) -> float:
        """How long to wait at most before looking for workers that hang."""
        return self._watch.patience_s

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
        self._wait_for_failure(worker)
        return self._failures[worker]

    def _wait_for_failure(self, worker: int) -> LaneFailed | None:
        """Wait for that report; ``None`` if the worker died and its successor does the order."""
        order, failures = self.issued[worker], self._failures

        def is_told() -> bool:
            has_failed = worker in failures and failures[worker].order == order
            return has_failed or self.issued[worker] != order

        self.wait_until(is_told, lambda: {worker})
        return failures.get(worker) if self.issued[worker] == order else None

    def try_again(self, worker: int) -> bool:
        """Replace a worker whose order failed, so that its successor carries it out again.

        Returns:
            False if that is not wanted, or of no use: then ``failure_of`` has the failure.

        Raises:
            WorkerDiedError: If there were too many failures.
        """
        if not self.policy.restarts_on_env_errors:
            return False
        failure = self._wait_for_failure(worker)
        if failure is not None:
            if not self.is_repeatable(worker, failure):
                return False
            with InterruptsHeld():
                is_down = worker in self._down
                self.repeat_order(worker, failure)
                if self._fatal is None and not is_down:
                    self._replacements.dismiss(worker)
        self._advance()
        return True


def _pickled(env_fns: Mapping[str, Callable[[], Any]]) -> bytes:
    fix = "create it inside the function, which runs in the worker"
    return pickled(env_fns, list(env_fns.values()), fix=fix)
