"""A worker process that holds environments and carries out the caller's commands."""

from __future__ import annotations

import pickle
import select
from collections.abc import Sequence
from functools import partial
from time import monotonic_ns
from typing import Any

import cloudpickle
import numpy as np

from rlpool.data.specs import Declaration, structure_of_space
from rlpool.data.storage import Memory
from rlpool.envs.description import described
from rlpool.envs.gym_env import GymEnv
from rlpool.envs.single_envs import all_tasks, check_is_env
from rlpool.envs.vec_env import LaneError
from rlpool.errors import EnvError, SpecError, Where, WorkerStartupError
from rlpool.errors import described as described_error
from rlpool.manager.channel import (
    FAILED,
    NONE_ENDED,
    SOME_ENDED,
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
)
from rlpool.observe.control import WorkerRecord
from rlpool.record.failures import advise_to_debug, env_error, text_of
from rlpool.record.repeat import take_over
from rlpool.seeding import root_from
from rlpool.workers.payload import unpack
from rlpool.workers.sharing import Shared
from rlpool.workers.wake import Wake
from rlpool.workers.wire import Close, Message, Pipe, Retiring
from rlpool.workers.worker_process import Place, Server, called, load, run

_LONGEST_SLEEP_S = 3600.0
"""Of a worker that waits; nothing happens at the end of it."""

_NOT_RESTORED = (
    "the environment could not be brought back to where it was when its process ended or was "
    "replaced: {}"
)
_NOT_RESTORED_FIX = (
    "reset the lane; an environment can only be continued in another process if its seed, options "
    "and actions determine what it does"
)


def main(shared: Shared, wake: Wake, done: Wake, place: Place, pipe: Pipe, control_fd: int) -> None:
    """Run a worker process with environments.

    Args:
        shared: What the set-up refers to.
        wake: Is signalled when a step is issued while this process sleeps.
        done: Is signalled when a command is carried out, for a caller that sleeps.
        place: Which worker it is.
        pipe: The worker's end of its pipe.
        control_fd: Descriptor of the shared record.
    """
    make_server = partial(EnvServer, place, pipe, wake=wake, done=done)
    run(make_server, shared, place, control_fd)


# What it holds -----------------------------------------------------------------------------------


def made_environments(setup: Setup, place: Place, control: WorkerRecord) -> GymEnv:
    """Make a worker's environments.

    Args:
        setup: What to make.
        place: Which worker makes them.
        control: Its part of the shared record.

    Raises:
        WorkerStartupError: If that failed, or they declare no spaces.
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
        batch = GymEnv(envs, root_from(place.seed), **setup.options)
        _declare(batch, setup)
    except SpecError as error:
        raise WorkerStartupError(
            error.what, where=where, fix=error.fix, traceback_text=text_of(error)
        ) from error
    batch.lane_in_use = control.lane
    return batch


def _declare(env: GymEnv, setup: Setup) -> None:
    """Let observations and infos be what the environments declare, before the first reset."""
    for name in ("observation_space", "action_space"):
        if getattr(env, name) is None:
            raise SpecError(
                f"env_fns[{setup.first_lane}] returned an environment without {name}",
                fix=f"give it an attribute {name}: a ParallelEnvManager has to know what its "
                "environments take and return before they run",
            )
    if env.declaration is None:
        space = env.observation_space
        structure = structure_of_space(space, name="observation_space")
        env.declare(Declaration(structure, env._info_specs))


def tasks_of(env: GymEnv) -> tuple[int | None, int | None, list[Any] | None]:
    """``(n_tasks, horizon_bamdp, all_tasks)`` of environments, ``None`` for what they lack."""

    def attribute(name: str) -> Any:
        try:
            return env.attribute(0, name)
        except Exception:
            return None  # environments without tasks

    counts = [attribute(name) for name in ("n_tasks", "horizon_bamdp")]
    n_tasks, horizon = (int(n) if isinstance(n, int | np.integer) else None for n in counts)
    return n_tasks, horizon, all_tasks(attribute)


# What it does ------------------------------------------------------------------------------------


class EnvServer(Server):
    """Owns a worker's environments and carries out the caller's commands.

    Lanes count within the worker.

    Args:
        place: Which worker it is.
        pipe: The line to the caller.
        control: Its part of the shared record.
        wake: What it waits for, in addition to its pipe.
        done: Is signalled when a command is carried out.
    """

    def __init__(
        self, place: Place, pipe: Pipe, control: WorkerRecord, wake: Wake, done: Wake
    ) -> None:
        super().__init__(place, pipe, control)
        self._me = place.worker
        self._wake = wake
        self._done = done
        self._has_begun = False  # all arrays are mapped, and the predecessor's place is taken
        self._is_over = False
        self._n_seen = 0  # number of the last step
        self._not_restored: dict[int, EnvError] = {}  # lanes that cannot go on, and why
        self._given_up: dict[int, tuple[int, int]] = {}  # see Predecessor

    def create(self, setup: Setup, memory: Memory | None) -> Report:
        """Create the environments."""
        self._env = env = made_environments(setup, self._place, self._control)
        self._all = list(range(env.n_lanes))
        self._lanes = slice(setup.first_lane, setup.first_lane + env.n_lanes)
        self._closers.append(env.close)
        spaces = env.observation_space, env.action_space
        pickled = called(self._here, "pickling the spaces", cloudpickle.dumps, spaces)
        # _declare() has seen to it that these are there.
        declaration: Any = env.declaration
        action: Any = env.action_structure
        knows = env.native_actions, pickled, tasks_of(env), env.state_keepers
        return Report(declaration, action, *knows, described(env))

    def serve(self) -> None:
        """Carry out commands until told to close."""
        while not self._has_begun:
            if not self._handle(*self.receive()):
                return
        wake, pipe, me, step = self._wake, self._link, self._me, self._buffers.step
        poller = select.poll()
        poller.register(pipe.fileno(), select.POLLIN)
        poller.register(wake.fd, select.POLLIN)
        wake.begin()
        while not self._is_over:
            number = step[me]
            is_new = number != self._n_seen
            events = poller.poll(0 if is_new else wake.pause(_LONGEST_SLEEP_S) * 1000)
            for fd, _ in events:
                if fd == wake.fd:
                    wake.wait()
                elif not self._handle(*pipe.receive()):
                    return
            # After the messages: they were sent before the step that both may be there for.
            if is_new and not self._is_over:
                self._n_seen = number
                self._step(number)
            if is_new or events:
                wake.begin()

    # Messages ---------------------------------------------------------------------------------

    def _handle(self, message: Message, memory: Memory | None) -> bool:
        """Carry out a message; False if it says to close."""
        if isinstance(message, Close) or self._retires(message):
            return False
        if isinstance(message, Reset):
            self._reset(message)
        elif isinstance(message, Call):
            self._answer(message)
        elif isinstance(message, MapArrays) and memory is not None:
            self._buffers = Buffers(message.specs, memory, self._lanes)
            self._wake.share(self._buffers.asleep[self._me : self._me + 1])
            self._done.share(self._buffers.asleep[-1:])
        elif isinstance(message, Begin) and memory is not None:
            self._n_seen = message.n_seen
            self._restore(unpack(message.payload, memory))
            self._has_begun = True
            self._use_buffers()
        return True

    def _retires(self, message: Message) -> bool:
        """Whether a successor should begin the episodes of a message; then this worker retires."""
        if isinstance(message, Reset):
            n_resets = len(message.episodes)
        else:
            n_resets = int(isinstance(message, Call) and message.command == "reset")
        if not n_resets or not self._recycling.is_due(n_resets):
            return False
        self._send(Retiring())
        return True

    def _use_buffers(self) -> None:
        """Write the environments' results into the buffers, and note when observations follow."""
        env, buffers, me = self._env, self._buffers, self._me
        env.place(buffers.observation, buffers.reward, buffers.flags)
        columns: Any = env.columns
        write, step, writing = columns.write, buffers.step, buffers.writing

        def noted_write(lanes: Sequence[int], observations: Sequence[Any]) -> None:
            writing[me] = step[me]  # a worker that dies from here on leaves mixed values
            write(lanes, observations)

        columns.write = noted_write

    def _restore(self, predecessor: Predecessor) -> None:
        """Take the place of another worker; a step that it did not finish comes next."""
        buffers, me = self._buffers, self._me
        self._given_up.update(predecessor.given_up)
        number = buffers.step[me]
        not_compared = {*predecessor.not_compared}
        if number != self._n_seen and buffers.writing[me] == number:
            not_compared.update(self._asked())  # their observations may be partly written
        for lane, tape in predecessor.tapes.items():
            if not tape.n_steps and self._given_up.get(lane) == (tape.seed, -1):
                self._env.begin_lanes([lane])  # its reset fails again
                continue
            if lane not in not_compared:
                tape.observation = {key: array[lane] for key, array in buffers.observation.items()}
            try:
                place = {lane: Where()}
                take_over(self._env, {lane: tape}, place, self._control.steps, may_end=True)
            except EnvError as error:
                what = _NOT_RESTORED.format(error.what)
                self._not_restored[lane] = EnvError(what, where=self._here, fix=_NOT_RESTORED_FIX)

    # Resets and steps -------------------------------------------------------------------------

    def _reset(self, message: Reset) -> None:
        """Reset lanes, but those whose reset is known to fail: they are truncated in their step."""
        able = []
        for lane, seed, options in message.episodes:
            self._note_begin(lane)
            if self._given_up.get(lane) == (seed, -1):
                self._env.begin_lanes([lane])
            else:
                self._given_up.pop(lane, None)
                able.append((lane, seed, options))
        outcome = NONE_ENDED
        try:
            if able:
                self._control.env_ns[0] -= monotonic_ns()
                self._env.reset_lanes(*map(list, zip(*able, strict=True)))
                self._control.end_calls()
        except LaneError as error:
            self._report(message.number, error)
            outcome = FAILED
        self._conclude(message.number, outcome)

    def _note_begin(self, lane: int) -> None:
        """Record that a lane is reset, whatever was wrong with it."""
        self._not_restored.pop(lane, None)
        self._recycling.n_begun += 1

    def _asked(self) -> list[int]:
        """Lanes that the caller wants to step."""
        if self._buffers.partial[self._me]:
            lanes: list[int] = np.flatnonzero(self._buffers.asked).tolist()
            return lanes
        return self._all

    def _step(self, number: int) -> None:
        """Step lanes with the actions in the buffers."""
        record, outcome, lanes = self._control, NONE_ENDED, self._asked()
        if self._not_restored and (lost := self._not_restored.keys() & set(lanes)):
            lane = min(lost)
            self._send(LaneFailed(number, lane, "step", self._not_restored[lane], is_lost=True))
            self._conclude(number, FAILED)
            return
        record.env_ns[0] -= monotonic_ns()
        try:
            if self._given_up:
                ended = self._step_or_truncate(lanes)
            else:
                ended = self._env.step_lanes(lanes, self._buffers.action)
            record.env_ns[0] += monotonic_ns()
            record.n_steps[0] += len(lanes)
        except LaneError as error:
            self._report(number, error)
            outcome = FAILED
        else:
            if ended:
                outcome = SOME_ENDED
        self._conclude(number, outcome)

    def _step_or_truncate(self, lanes: list[int]) -> list[int]:
        """Step lanes, and truncate those that are given up; returns whose episode ended."""
        env, actions = self._env, self._buffers.action
        given_up = [lane for lane in lanes if self._given_up.pop(lane, None) is not None]
        others = [lane for lane in lanes if lane not in given_up]
        ended = env.step_lanes(others, actions) if others else []
        env.truncate_lanes(given_up, actions)
        return sorted([*ended, *given_up])

    def _conclude(self, number: int, outcome: int) -> None:
        self._control.steps[0] += 1
        if self._is_over:
            return  # it is not carried out: a successor will do it again
        self._control.done[0] += 1
        self._buffers.outcome[self._me] = outcome
        self._buffers.finished[self._me] = number
        self._done.signal()

    def _report(self, number: int, error: LaneError) -> None:
        self._control.end_calls()
        failure = env_error(error, self._here)
        self._send(LaneFailed(number, error.lane, error.call, failure))
        self._is_over = self._place.policy.restarts_on_env_errors

    # Requests of remotes ----------------------------------------------------------------------

    def _answer(self, call: Call) -> None:
        """Carry out a request to one environment."""
        try:
            reply = Reply(call.lane, cloudpickle.dumps(self._result_of(call)))
        except LaneError as error:
            self._report(0, error)
            return
        except BaseException as error:
            text = text_of(error)
            failure = EnvError(described_error(error), where=self._here, traceback_text=text)
            reply = Reply(call.lane, pickle.dumps(("error", text)), failure)
        finally:
            self._control.steps[0] += 1
        self._control.done[0] += 1
        self._send(reply)

    def _result_of(self, call: Call) -> tuple[str, Any]:
        """What a remote receives.

        Raises:
            LaneError: If the environment fails in a reset or a step.
        """
        lane, env = call.lane, self._env
        if call.command != "reset" and lane in self._not_restored:
            raise self._not_restored[lane]
        if call.command == "get_attr":
            return "attr", env.attribute(lane, call.data)
        try:
            self._control.env_ns[0] -= monotonic_ns()
            if call.command == "reset":
                seed, options = call.data
                self._note_begin(lane)
                env.reset_lanes([lane], [seed], [options])
                return "obs", env.results[0][0]
            env.step_lanes([lane], self._buffers.action)
            self._control.n_steps[0] += 1
            observation, reward, _, _, info = env.results[0]
        finally:
            self._control.end_calls()
        if env.current["truncated"][lane] and not env.current["terminated"][lane]:
            info = {**info, "TimeLimit.truncated": True}
        return "transition", (observation, reward, bool(env.current["done"][lane]), info)
