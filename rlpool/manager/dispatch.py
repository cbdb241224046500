"""The caller's side of workers that hold environments: what they are told, and what they say."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.context import SpawnProcess
from typing import Any

from rlpool.envs.vec_env import Options
from rlpool.errors import EnvError, SpecError, UsageError, Where, WorkerError
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.machine.limits import check_size
from rlpool.machine.pickling import pickled, why_not
from rlpool.machine.worker_limits import check_workers
from rlpool.manager.buffers import BufferLayout, Buffers, carve_actions, observation_specs
from rlpool.manager.commands import (
    Announce,
    Call,
    LaneFailed,
    MapActions,
    MapBuffers,
    MapObservations,
    Predecessor,
    Reply,
    Report,
    Reset,
    Restore,
    Setup,
)
from rlpool.manager.worker import main
from rlpool.memory.storage import Array, Memory, carved_bytes
from rlpool.record.crash_capsule import CrashCapsule
from rlpool.record.crash_files import CrashDir, CrashFiles
from rlpool.record.failures import attempted
from rlpool.record.tape import Actions, LaneTapes, Tape, action_row
from rlpool.seeding import LaneSeeds, root_from
from rlpool.specs import DEFAULT_OBSERVATION_KEY, Structure, TensorSpec, leaves_of
from rlpool.workers.failure_policy import FailurePolicy
from rlpool.workers.lifecycle import Workers
from rlpool.workers.payload import pack
from rlpool.workers.process_owner import refuse_forked_copy
from rlpool.workers.process_start import memory_of
from rlpool.workers.stack_dumps import note_source
from rlpool.workers.stacks import described
from rlpool.workers.wake import Wake
from rlpool.workers.wire import Message

ENV_HINT = "step it in this process to debug: GymEnv([env_fn()])"

_DESCRIPTORS_EACH = 4
"""A worker's pipe, its wake, and two that multiprocessing keeps to notice its end and ours."""

_UNREPEATABLE = "there, an earlier request of its remote failed"

MapMessage = MapBuffers | MapObservations | MapActions


class EnvWorkers:
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
        lanes_of: For each worker its lanes.
        worker_of: For each lane its worker.
        reports: What the workers said when they were ready.
        tapes: What lanes were asked for, ``None`` if nobody will want to know.
        buffers: The shared memory, once it was made.
        issued: For each worker the number of its last command.
        wakes: What each worker waits for, beside its pipe.
        waiting: Request of each remote whose reply the user has not received.
        replies: Those replies that are there, pickled.
        capsules: What is known of each remote's last error: a capsule, and what to do with it.
        has_called: Whether a remote sent a request since this was last set to False.
        closed: Whether it is over.
        closed_lanes: Lanes whose environments were closed one by one.
        options: Options of each lane's last reset.
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
        starts = range(0, len(env_fns), envs_per_worker)
        self.lanes_of = [range(s, min(s + envs_per_worker, len(env_fns))) for s in starts]
        self.worker_of = [w for w, lanes in enumerate(self.lanes_of) for _ in lanes]
        self.n_workers, self.n_lanes = len(self.lanes_of), len(env_fns)
        advice = "use fewer workers, by more envs_per_worker or fewer environments"
        memory = memory_of(policy.start_method)
        check_workers(self.n_workers, _DESCRIPTORS_EACH, advice, memory)
        is_repeated = policy.restarts_workers or policy.restarts_on_env_errors
        is_repeated |= policy.recycles and envs_per_worker > 1
        self.tapes = LaneTapes(self.n_lanes) if is_repeated or crash_dir is not None else None
        self.reports: dict[int, Report] = {}
        self.buffers: Buffers
        self.issued = [0] * self.n_workers
        self.waiting: dict[int, Call] = {}
        self.replies: dict[int, bytes] = {}
        self.capsules: dict[int, tuple[CrashCapsule | None, str]] = {}
        self.has_called = self.closed = False
        self.closed_lanes: set[int] = set()
        self.options: list[Options] = [None] * self.n_lanes
        self._last_pids: list[int | None] = []
        self._policy = policy
        self._crash_files = CrashFiles(crash_dir)
        self._owner_pid = os.getpid()
        self._failures: dict[int, tuple[LaneFailed, EnvError]] = {}
        self._memories: dict[type, tuple[MapMessage, Memory]] = {}
        self._resets: dict[int, Reset] = {}  # the last of each worker
        self._announced: dict[int, Announce] = {}
        # Backwards: forwards are the seeds of lanes that are reset together.
        stream = LaneSeeds(root, 0)
        self._seeds: list[Iterator[int]] = [
            map(partial(stream.seed, lane), itertools.count(-1, -1)) for lane in range(self.n_lanes)
        ]
        self._setups = [
            Setup(
                _pickled({f"env_fns[{lane}]": env_fns[lane] for lane in lanes}),
                options,
                lanes[0],
            )
            for lanes in self.lanes_of
        ]
        self._done = Wake()
        self.wakes = [Wake() for _ in self.lanes_of]
        runs = [partial(main, wake, self._done) for wake in self.wakes]
        self.processes = Workers(runs, root, policy, timeout_s, self, ENV_HINT)
        note_source(self)
        try:
            self.processes.start(self._done.fd)
        except BaseException:
            self.processes.abort()
            self.close()
            raise

    @property
    def pids(self) -> list[int | None]:
        """The processes' ids, after the end those of the last ones."""
        return self._last_pids or self.processes.pids

    def process(self, worker: int) -> SpawnProcess:
        """A worker's process.

        Raises:
            ValueError: After the end.
        """
        if self.closed:
            raise ValueError("the manager is closed")
        return self.processes.processes[worker]

    # Memory -------------------------------------------------------------------------------------

    def map(self, layout: BufferLayout) -> Buffers:
        """Make the buffers and let all workers use them."""
        memory = self._memory(layout.bytes_of_key(), "rlpool-buffers")
        self.buffers = Buffers(layout, memory)
        self.buffers.is_ahead[:] = -1
        if self.tapes is not None and layout.action:
            self.tapes.bind(self.buffers.action)
        self._broadcast(MapBuffers(layout), memory)
        return self.buffers

    def map_observations(self, structure: Structure) -> None:
        """Make room for observations that were not known when the buffers were made."""
        leaves = leaves_of(structure, DEFAULT_OBSERVATION_KEY)
        sizes = carved_bytes(observation_specs(leaves), self.n_lanes)
        memory = self._memory(sizes, "rlpool-observations")
        self.buffers.map_observations(leaves, self.n_lanes, memory)
        self._broadcast(MapObservations(structure, self.n_lanes), memory)

    def map_actions(self, specs: Mapping[str, TensorSpec]) -> dict[str, Array]:
        """Make room for actions of environments without an action space."""
        memory = self._memory(carved_bytes(specs, self.n_lanes), "rlpool-actions")
        arrays = carve_actions(specs, self.n_lanes, memory)
        if self.tapes is not None:
            self.tapes.bind(arrays)
        self._broadcast(MapActions(specs, self.n_lanes), memory)
        return arrays

    def _memory(self, sizes: Mapping[str, int], name: str) -> Memory:
        """Memory for arrays of all lanes, of so many bytes by key."""
        n_bytes = sum(sizes.values())
        check_size(
            sizes,
            lambda n_free: f"use fewer environments ({self.n_lanes * n_free // n_bytes} would fit)",
            "the observations",
        )
        return Memory.shared(n_bytes, name)

    def _broadcast(self, message: MapMessage, memory: Memory) -> None:
        for worker in range(self.n_workers):
            self.processes.send(worker, message, memory)
        if not self._policy.may_restart:
            memory.close_fd()
            return
        before = self._memories.get(type(message))
        if before is not None:
            before[1].close_fd()
        self._memories[type(message)] = message, memory

    # Commands -----------------------------------------------------------------------------------

    def send(self, worker: int, message: Message) -> None:
        """Send a message to a worker; one that is being replaced is briefed with it later.

        Raises:
            SpecError: If something of the user's in it cannot be pickled.
        """
        try:
            if not self.processes.is_up(worker):
                pickle.dumps(message)
            self.processes.send(worker, message)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise SpecError(
                why_not({"message": message}, error, kind=pickle.Pickler),
                fix="pass numbers, arrays, or objects of classes at module level",
            ) from error

    def reset(self, worker: int, message: Reset) -> None:
        """Let a worker reset lanes."""
        self.send(worker, message)
        self._resets[worker] = message
        self.issued[worker] = message.number

    def announce(self, worker: int, message: Announce) -> None:
        """Tell a worker which episodes will come."""
        self._announced[worker] = message
        self.send(worker, message)

    def call(self, lane: int, command: str, data: Any) -> None:
        """Send a request to one environment."""
        worker = self.worker_of[lane]
        message = Call(lane - self.lanes_of[worker].start, command, data)
        self.has_called = True
        if command == "seed":  # of the resets that follow, which this process gives
            self._seeds[lane] = _seeds_from(data)
            self.waiting[lane], self.replies[lane] = message, pickle.dumps(("done", None))
            return
        if command == "reset" and data[0] is None:
            message = replace(message, data=(next(self._seeds[lane]), data[1]))
        self.send(worker, message)
        if command != "close":
            self.waiting[lane] = message
            self._record(lane, message)
            return
        self.closed_lanes.add(lane)
        if self.closed_lanes.issuperset(self.lanes_of[worker]):
            self.processes.dismiss(worker)
        if len(self.closed_lanes) == self.n_lanes:
            self.close()

    def _record(self, lane: int, call: Call) -> None:
        """Put a remote's request on the tape of its lane."""
        if self.tapes is not None and call.command == "reset":
            self.tapes.record_reset(lane, *call.data)
        elif self.tapes is not None and call.command == "step":
            report = self.reports[0]
            with suppress(Exception):  # of an action that does not fit, the worker will say so
                row = action_row(report.action, report.native_action or {}, call.data)
                self.tapes.record_action(lane, row)

    def ask(self, lane: int, command: str, data: Any) -> tuple[str, Any]:
        """Send a request to one environment, as its remote would, and wait for the reply."""
        message = Call(lane - self.lanes_of[self.worker_of[lane]].start, command, data)
        if self.waiting.get(lane) != message:  # else it is asked again after an interruption
            with InterruptsHeld():
                self.call(lane, command, data)
        reply = self.reply(lane)
        del self.waiting[lane], self.replies[lane]
        return reply

    def reply(self, lane: int) -> tuple[str, Any]:
        """Wait for the reply to a remote's request; both stay until the caller drops them."""
        self.wait_until(lambda: lane in self.replies)
        reply: tuple[str, Any] = pickle.loads(self.replies[lane])
        return reply

    def is_unanswered(self, lane: int) -> bool:
        """Whether a remote's request has no reply yet."""
        return lane in self.waiting and lane not in self.replies

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
        waiting = self.waiting.keys() & set(lanes)
        if waiting:
            raise UsageError(
                f"remote {min(waiting)} has a request without an answer",
                fix=f"call remotes[{min(waiting)}].recv() first",
            )

    # Waiting ------------------------------------------------------------------------------------

    def wait_until(self, is_over: Callable[[], bool]) -> None:
        """Handle messages until a condition holds, or a worker that is busy hangs.

        Raises:
            WorkerDiedError, WorkerTimeoutError: If there is no going on.
        """
        self.processes.look_from_now_on()
        while not is_over():
            self.look(self.processes.patience_s)

    def look(self, timeout_s: float = 0.0) -> None:
        """Take notice of what happened, or will so soon.

        Raises:
            WorkerDiedError, WorkerTimeoutError: If there is no going on.
        """
        if self.processes.poll(timeout_s):
            self._done.wait()
        self.processes.look_for_hang()
        self.processes.refuse_if_dead()

    def wait_idle(self, workers: Sequence[int]) -> None:
        """Wait until workers have carried out their commands.

        Raises:
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
        """
        processes, finished, issued = self.processes, self.buffers.finished, self.issued
        is_first_look = True
        while True:
            for worker in workers:
                if finished[worker] != issued[worker]:
                    break
            else:
                return
            if processes.poll(processes.patience_s):
                self._done.wait()
            else:
                if is_first_look:
                    processes.look_from_now_on()
                is_first_look = False
                processes.look_for_hang()
            if processes.fatal is not None:
                raise processes.fatal

    def failure(self, worker: int) -> tuple[LaneFailed, EnvError]:
        """A worker's report about the command that it failed in, with all that is known of it."""
        number = self.issued[worker]
        self.wait_until(
            lambda: worker in self._failures and self._failures[worker][0].number == number
        )
        return self._failures[worker]

    # The workers' client ------------------------------------------------------------------------

    def setup(self, worker: int) -> tuple[Setup, None]:
        """What a worker has to create."""
        return self._setups[worker], None

    def brief(self, worker: int, report: Report) -> None:
        """Tell a worker that has its environments what there is to do."""
        self.processes.note_ready(worker)
        first = self.reports.setdefault(worker, report)
        if (first.observation, first.action) != (report.observation, report.action):
            what = "and the spaces of its environments are others now"
            self.processes.fail(SpecError(f"worker {worker} was replaced, {what}"))
        if not hasattr(self, "buffers"):
            return
        buffers, send = self.buffers, self.processes.send
        for message, memory in self._memories.values():
            if isinstance(message, MapBuffers):
                message = replace(message, n_seen=buffers.step[worker], is_successor=True)
            send(worker, message, memory)
        if worker in self._announced:
            send(worker, self._announced[worker])
        number, reset = self.issued[worker], None
        is_busy = number != buffers.finished[worker]
        if is_busy and buffers.step[worker] != number:
            reset = self._resets[worker]
        predecessor = self._predecessor(worker, 0 if reset or not is_busy else number, reset)
        packed = pack(predecessor, Memory.shared)
        send(worker, Restore(packed.payload), packed.memory)
        packed.memory.close_fd()
        if reset is not None:
            send(worker, reset)
        for lane in filter(self.is_unanswered, self.lanes_of[worker]):
            send(worker, self.waiting[lane])

    def _predecessor(self, worker: int, step: int, reset: Reset | None) -> Predecessor:
        """What a successor has to know; with the step, if any, that it has to finish."""
        own, buffers = self.lanes_of[worker], self.buffers
        tapes: dict[int, Tape] = {}
        actions: dict[int, Actions] = {}
        for number, lane in enumerate(own):
            asked = self.waiting[lane].command if self.is_unanswered(lane) else ""
            will_be_reset = asked == "reset" or (reset is not None and number in reset.lanes)
            if lane in self.closed_lanes or will_be_reset:
                continue
            is_asked = bool(step) and (not buffers.partial[worker] or bool(buffers.asked[lane]))
            tape = None if self.tapes is None else self.tapes.tape(lane)
            if tape is not None and asked == "step":
                tape, _ = tape.without_last()
            if is_asked:
                tape = tape or Tape(lost="it had not been reset")
                tape, actions[number] = tape.without_last()
            if tape is not None:
                tapes[number] = tape
        return Predecessor(
            tapes,
            step,
            actions,
            [lane - own.start for lane in own if lane in self.closed_lanes],
        )

    def lost(self, worker: int, failure: WorkerError | None) -> None:
        """Forget the episodes that a worker has begun on its own: its successor has not."""
        for lane in self.lanes_of[worker] if hasattr(self, "buffers") else ():
            if self.buffers.is_ahead[lane] >= 0:
                self.buffers.is_ahead[lane] = -1
                if self.tapes is not None:
                    self.tapes.forget(lane)

    def busy(self) -> Collection[int]:
        """Workers that have something to do."""
        finished = self.buffers.finished if hasattr(self, "buffers") else self.issued
        busy = {w for w in range(self.n_workers) if finished[w] != self.issued[w]}
        busy.update(self.worker_of[lane] for lane in filter(self.is_unanswered, self.waiting))
        return busy

    def where(self, worker: int) -> Where:
        """What a worker is doing, as far as shared memory tells."""
        own = self.lanes_of[worker]
        lane = own.start + min(self.processes.lane_in_use(worker), len(own) - 1)
        if worker not in self.reports:
            return Where(worker, lane)
        return self.where_lane(lane) if worker in self.busy() else Where(worker)

    def where_lane(self, lane: int, *, is_reset: bool = False) -> Where:
        """Where a lane is."""
        return Where(
            worker=self.worker_of[lane],
            lane=lane,
            step=0 if is_reset else int(self.buffers.elapsed[lane]),
            seed=int(self.buffers.seed[lane]),
            env_info=self.options[lane] or None,
        )

    def take(self, worker: int, message: Message) -> None:
        """Take a worker's message."""
        if isinstance(message, LaneFailed):
            lane = self.lanes_of[worker][message.lane]
            where = self.where_lane(lane, is_reset=message.call == "reset")
            error = self._complete(message.error, message.call, where, is_lost=message.is_lost)
            if self._policy.restarts_on_env_errors and not message.is_lost:
                self.processes.expect_end(worker, error)
            else:
                self._failures[worker] = message, error
        elif isinstance(message, Reply):
            self._take_reply(worker, message)

    def failed_reset(self, error: EnvError, where: Where) -> EnvError:
        """What a worker says of a reset that failed, with all that is known about it."""
        if self.tapes is not None:
            self.tapes.record_reset(where.lane or 0, where.seed or 0, where.env_info)
        return self._complete(error, "reset", where)

    def _take_reply(self, worker: int, message: Reply) -> None:
        lane = self.lanes_of[worker][message.lane]
        command = self.waiting[lane].command
        self.capsules.pop(lane, None)
        if message.error is not None:
            where = self.where_lane(lane, is_reset=command == "reset")
            error = self._complete(message.error, command, where)
            if self._policy.restarts_on_env_errors:
                self.processes.expect_end(worker, error)  # its successor will be asked again
                return
            hint = "" if error.fix == message.error.fix else error.fix
            self.capsules[lane] = error.capsule, hint
            if self.tapes is not None:
                self.tapes.lose(lane, _UNREPEATABLE)
        self.replies[lane] = message.reply

    def _complete(
        self, error: EnvError, call: str, where: Where, *, is_lost: bool = False
    ) -> EnvError:
        """An error of a worker, with all that is known about the lane where it happened."""
        tape = None if self.tapes is None or is_lost else self.tapes.tape(where.lane or 0)
        capsule = None
        if tape is not None and not tape.why_lost:
            tape, failing = tape.without_last() if call == "step" else (tape, {})
            where = where._replace(step=tape.n_steps)
            capsule = self._capsule(tape, call, where, failing)
        complete = type(error)(
            error.what,
            where=where,
            fix=error.fix,
            traceback_text=error.traceback_text,
            capsule=capsule and capsule.told(error.what, error.traceback_text),
        )
        return self._crash_files.with_file(complete)

    @attempted
    def _capsule(self, tape: Tape, call: str, where: Where, failing: Actions) -> CrashCapsule:
        return CrashCapsule.of_tape(
            tape, call, where, failing, n_lanes=self.n_lanes, env_type="ParallelEnvManager"
        )

    # Life and end -------------------------------------------------------------------------------

    def worker_stacks(self) -> str:
        """What the worker processes are doing, also for a signal handler at any time."""
        if self.closed or os.getpid() != self._owner_pid:
            return ""
        return described(self.processes.stacks(), self.where)

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
        self.processes.deliver_logs()
        self.processes.refuse_if_dead()

    def refuse_forked_copy(self) -> None:
        """Refuse to use the workers in another process than that which started them."""
        refuse_forked_copy(self._owner_pid)

    def close(self) -> None:
        """End the workers. May be repeated."""
        if self.closed:
            return
        self._last_pids = self.processes.pids
        self.closed = True
        if os.getpid() == self._owner_pid:  # else the workers are those of another process
            self.processes.close()
        for _, memory in self._memories.values():
            memory.close_fd()
        for wake in (self._done, *self.wakes):
            wake.close()


def _pickled(env_fns: Mapping[str, Callable[[], Any]]) -> bytes:
    fix = "create it inside the function, which runs in the worker"
    return pickled(env_fns, list(env_fns.values()), fix=fix)


def _seeds_from(seed: int) -> Iterator[int]:
    """A seed, then others that follow from it."""
    stream = LaneSeeds(root_from(seed), 0)
    others = (stream.seed(0, number) for number in itertools.count())
    return itertools.chain([seed], (other for other in others if other != seed))
