"""A worker process that holds environments and carries out the caller's commands."""

from __future__ import annotations

import os
import pickle
import select
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic_ns
from typing import Any

import cloudpickle
import numpy as np

from rlpool.data.storage import Memory
from rlpool.envs.description import described
from rlpool.envs.gym_env import GymEnv
from rlpool.envs.single_envs import all_tasks, check_is_env
from rlpool.envs.vec_env import LaneError
from rlpool.errors import EnvError, SpecError, Where, WorkerStartupError
from rlpool.errors import described as described_error
from rlpool.manager.channel import (
    ANSWER,
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
)
from rlpool.observe.control import WorkerRecord
from rlpool.record.failures import advise_to_debug, env_error, text_of
from rlpool.record.repeat import take_over
from rlpool.record.tape import Tape
from rlpool.seeding import root_from
from rlpool.workers.sharing import Shared
from rlpool.workers.wake import Wake
from rlpool.workers.wire import Pipe, Retiring
from rlpool.workers.worker_process import Place, Server, called, load, run

_ALL = slice(None)

_LONGEST_SLEEP_S = 3600.0
"""Longest sleep of a waiting worker; nothing happens at the end of it."""

_NOT_RESTORED = (
    "the environment could not be restored to its state before its process ended or was "
    "replaced: {}"
)
_NOT_RESTORED_FIX = (
    "reset the lane; an environment can be continued in another process only if its seed, options "
    "and actions determine its behaviour"
)


def main(shared: Shared, wake: Wake, done: Wake, place: Place, pipe: Pipe, control_fd: int) -> None:
    """Run a worker process with environments.

    Args:
        shared: Objects that the set-up shares with the caller.
        wake: Signalled when lanes have tasks while this process sleeps.
        done: Signalled when lanes have finished, for a caller that sleeps.
        place: Which worker it is.
        pipe: The worker's end of its pipe.
        control_fd: Descriptor of the shared record.
    """
    # A second descriptor stays open for locking the file behind it.
    lock_fd = os.dup(control_fd)
    make_server = partial(EnvServer, place, pipe, wake=wake, done=done, lock_fd=lock_fd)
    run(make_server, shared, place, control_fd)


# Its environments --------------------------------------------------------------------------------


def made_environments(setup: Setup, place: Place, control: WorkerRecord) -> GymEnv:
    """Make a worker's environments.

    Args:
        setup: The functions that make them.
        place: Which worker makes them.
        control: Its part of the shared record.

    Raises:
        WorkerStartupError: If that fails, or an environment does not declare its spaces.
    """
    advise_to_debug("step it in this process to debug: GymEnv([env_fn()])")
    where = Where(worker=place.worker)
    functions = load(place, "env_fns", setup.functions)
    envs = []
    for number, create in enumerate(functions):
        lane = setup.first_lane + number
        control.lane[0] = number
        envs.append(called(where._replace(lane=lane), f"env_fns[{lane}]", create))
    try:
        for lane, env in enumerate(envs, setup.first_lane):
            fix = "let it return one Gymnasium environment"
            check_is_env(f"env_fns[{lane}] returned", env, fix)
            for name in ("observation_space", "action_space"):
                if getattr(env, name, None) is None:
                    raise SpecError(
                        f"env_fns[{lane}] returned an environment without {name}",
                        fix=f"give it an attribute {name}: a ParallelEnvManager has to know "
                        "its environments' spaces before they run",
                    )
        batch = GymEnv(envs, root_from(place.seed), **setup.options)
    except SpecError as error:
        raise WorkerStartupError(
            error.what, where=where, fix=error.fix, traceback_text=text_of(error)
        ) from error
    batch.lane_in_use = control.lane
    return batch


def tasks_of(env: GymEnv) -> tuple[int | None, int | None, list[Any] | None]:
    """Return environments' ``(n_tasks, horizon_bamdp, all_tasks)``, ``None`` if missing."""

    def attribute(name: str) -> Any:
        try:
            return env.attribute(0, name)
        except Exception:
            return None  # environments without tasks

    counts = [attribute(name) for name in ("n_tasks", "horizon_bamdp")]
    n_tasks, horizon = (int(n) if isinstance(n, int | np.integer) else None for n in counts)
    return n_tasks, horizon, all_tasks(attribute)


# Its tasks ---------------------------------------------------------------------------------------


class EnvServer(Server):
    """Owns a worker's environments and carries out the tasks of their lanes.

    Lanes are numbered within the worker.

    Args:
        place: Which worker it is.
        pipe: The connection to the caller.
        control: Its part of the shared record.
        wake: Signalled by the caller; it waits for this and its pipe.
        done: Signalled when lanes have finished their tasks.
        lock_fd: As for ``Buffers``.
    """

    def __init__(
        self,
        place: Place,
        pipe: Pipe,
        control: WorkerRecord,
        wake: Wake,
        done: Wake,
        lock_fd: int,
    ) -> None:
        super().__init__(place, pipe, control)
        self._lock_fd = lock_fd
        self._wake = wake
        self._done = done
        self._calls: dict[int, Call] = {}  # by lane, until they are carried out
        self._not_restored: dict[int, EnvError] = {}  # lanes that cannot continue, and their errors

    def create(self, setup: Setup, memory: Memory | None) -> Report:
        """Create the environments."""
        self._env = env = made_environments(setup, self._place, self._control)
        self._all = list(range(env.n_lanes))
        self._lanes = slice(setup.first_lane, setup.first_lane + env.n_lanes)
        self._closers.append(env.close)
        spaces = env.observation_space, env.action_space
        pickled = called(self._here, "pickling the spaces", cloudpickle.dumps, spaces)
        declaration: Any = env.declaration
        action: Any = env.action_structure
        knows = env.native_actions, pickled, tasks_of(env), env.state_keepers
        return Report(declaration, action, *knows, described(env))

    def serve(self) -> None:
        """Carry out tasks until the caller closes."""
        message, memory = self.receive()
        if not isinstance(message, Begin) or memory is None:
            return
        buffers = self._begin(message, memory)
        wake, pipe, look, idle = self._wake, self._link, buffers.look, bytes(len(self._all))
        poller = select.poll()
        poller.register(pipe.fileno(), select.POLLIN)
        poller.register(wake.fd, select.POLLIN)
        wake.begin()
        while True:
            asked = look()
            if asked != idle:
                if not self._carry_out(buffers, asked):
                    return
                wake.begin()
            elif sleep_s := wake.pause(_LONGEST_SLEEP_S):
                for fd, _ in poller.poll(sleep_s * 1000):
                    if fd == wake.fd:
                        wake.wait()
                    elif not self._read():
                        return
                    wake.begin()

    def _begin(self, message: Begin, memory: Memory) -> Buffers:
        """Restore the lanes of an earlier process, then write results into the buffers."""
        env, me = self._env, self._place.worker
        for lane, tape in message.tapes.items():
            self._restore(lane, tape)
        buffers = Buffers(message.specs, memory, self._lock_fd, self._lanes)
        self._wake.share(buffers.asleep[me : me + 1])
        self._done.share(buffers.asleep[-1:])
        env.place(buffers.observation, buffers.reward, buffers.flags)
        columns: Any = env.columns
        write, writing = columns.write, buffers.writing

        def noted_write(lanes: Sequence[int], observations: Sequence[Any]) -> None:
            writing[me] = 1  # if the worker dies from here on, values are mixed
            write(lanes, observations)

        columns.write = noted_write
        return buffers

    def _restore(self, lane: int, tape: Tape) -> None:
        """Restore a lane; a step that was not finished comes next."""
        try:
            place = {lane: Where()}
            take_over(self._env, {lane: tape}, place, self._control.steps, may_end=True)
        except EnvError as error:
            message = _NOT_RESTORED.format(error.what)
            self._not_restored[lane] = EnvError(message, where=self._here, fix=_NOT_RESTORED_FIX)

    # Steps and resets -------------------------------------------------------------------------

    def _carry_out(self, buffers: Buffers, asked: bytes) -> bool:
        """Carry out the tasks of lanes; False if a successor has to continue."""
        env, actions, do = self._env, buffers.action, partial(self._do, buffers)
        if asked.count(STEP) == len(asked):
            return do("step", self._all, env.step_lanes, actions)
        stepping, truncated, resetting, answering = (
            [lane for lane, todo in enumerate(asked) if todo in kinds]
            for kinds in ((STEP,), (TRUNCATE,), (RESET, RESET_WITH_OPTIONS), (ANSWER,))
        )
        seeds = buffers.seed[resetting].tolist()
        options = [self._call_of(n).data if asked[n] != RESET else None for n in resetting]
        return (
            do("step", stepping, env.step_lanes, actions)
            and do("step", truncated, env.truncate_lanes, actions)
            and do("reset", resetting, env.reset_lanes, seeds, options)
            and all(self._answer(buffers, self._call_of(lane)) for lane in answering)
        )

    def _do(
        self,
        buffers: Buffers,
        name: str,
        lanes: list[int],
        call: Callable[..., Any],
        *arguments: Any,
        result: Callable[[], Any] | None = None,
    ) -> bool:
        """Carry out a task of lanes, if there are any, and reply with a result if one is given.

        Returns:
            False if a successor has to do it.
        """
        if not lanes:
            return True
        record, failure = self._control, None
        if name == "reset":
            if self._recycling.is_due(len(lanes)):
                self._send(Retiring())
                return False
            self._recycling.n_begun += len(lanes)
            for lane in lanes:
                self._not_restored.pop(lane, None)
        if self._not_restored and (lost := self._not_restored.keys() & lanes):
            error = self._not_restored[min(lost)]
            failure = LaneFailed(min(lost), lanes, name, error, is_lost=True)
        else:
            record.env_ns[0] -= monotonic_ns()
            try:
                call(lanes, *arguments)
                record.n_steps[0] += len(lanes) if name == "step" else 0
                record.done[0] += 1
            except LaneError as raised:
                error = env_error(raised, self._here)
                failure = LaneFailed(raised.lane, lanes, raised.call, error)
            record.env_ns[0] += monotonic_ns()
            record.steps[0] += 1
        rows = _ALL if lanes is self._all else lanes
        if failure is not None:
            if self._place.policy.restarts_on_env_errors and not failure.is_lost:
                self._send(failure)
                return False
            buffers.failed[rows] = 1
            self._send(failure)
        elif result is not None:
            self._reply(lanes[0], result)
        buffers.post(rows, IDLE)
        buffers.writing[self._place.worker] = 0
        self._done.signal()
        return True

    def _call_of(self, lane: int) -> Call:
        """Return the task that was sent to a lane; it may arrive after the buffers announce it."""
        while lane not in self._calls:
            if not self._read():
                raise EOFError  # it has to close
        return self._calls.pop(lane)

    def _read(self) -> bool:
        """Keep a message for its lane; False if this worker has to end now."""
        message, _ = self.receive()
        if isinstance(message, Call):
            self._calls[message.lane] = message
        return isinstance(message, Call)

    # Requests of remotes ----------------------------------------------------------------------

    def _answer(self, buffers: Buffers, call: Call) -> bool:
        """Carry out a request; False if a successor has to do it."""
        env, lane, data = self._env, call.lane, call.data
        do = partial(self._do, buffers, call.command, [lane])
        if call.command == "get_attr":  # only refuses a lane that was not restored
            return do(lambda _: None, result=lambda: ("attr", env.attribute(lane, data)))
        if call.command == "step":
            return do(env.step_lanes, buffers.action, result=partial(self._transition, lane))
        seed, options = data
        return do(env.reset_lanes, [seed], [options], result=lambda: ("obs", env.results[0][0]))

    def _reply(self, lane: int, result: Callable[[], Any]) -> None:
        """Send the reply of a remote."""
        try:
            reply = Reply(lane, cloudpickle.dumps(result()))
        except BaseException as error:
            text = text_of(error)
            failed = EnvError(described_error(error), where=self._here, traceback_text=text)
            reply = Reply(lane, pickle.dumps(("error", text)), failed)
        self._send(reply)

    def _transition(self, lane: int) -> tuple[str, Any]:
        observation, reward, _, _, info = self._env.results[0]
        terminated, truncated, done = (bool(flags[lane]) for flags in self._env.flags[:3])
        if truncated and not terminated:
            info = {**info, "TimeLimit.truncated": True}
        return "transition", (observation, reward, done, info)
