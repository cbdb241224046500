"""A worker process that holds environments and carries out the caller's commands."""

from __future__ import annotations

import pickle
import select
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from time import monotonic_ns
from typing import Any

import cloudpickle
import numpy as np

from rlpool.data.infos import options_of
from rlpool.envs.vec_env import LaneError, Options
from rlpool.errors import EnvError, Where, WorkerError
from rlpool.manager.buffers import FAILED, NONE_ENDED, SOME_ENDED, Buffers
from rlpool.manager.messages import (
    Announce,
    Begin,
    Call,
    LaneFailed,
    MapArrays,
    Predecessor,
    Reply,
    Reset,
    Setup,
)
from rlpool.manager.startup import made_environments, report_of
from rlpool.memory.sharing import Shared
from rlpool.memory.storage import Array, Memory
from rlpool.observe.control import WorkerRecord
from rlpool.record.failures import env_error, text_of, worker_error
from rlpool.record.repeat import batch_of, take_over
from rlpool.record.tape import action_row
from rlpool.specs import Declaration
from rlpool.workers.payload import unpack
from rlpool.workers.recycling import Recycling
from rlpool.workers.speedups import install_fast_checks
from rlpool.workers.wake import Wake
from rlpool.workers.wire import Close, Failed, Message, Pipe, Ready, Retiring
from rlpool.workers.worker_process import Place, run, settle_in

_LONGEST_SLEEP_S = 3600.0
"""Of a worker that waits; nothing happens at the end of it."""

_LOST = (
    "the environment could not be brought back to where it was when its process ended or was "
    "replaced: {}"
)
_LOST_FIX = (
    "reset the lane; an environment can only be continued in another process if its seed, options "
    "and actions determine what it does"
)


def main(
    shared: Shared, wake: Wake, done: Wake, place: Place, connection: Connection, control_fd: int
) -> None:
    """Run a worker process with environments.

    Args:
        shared: What the set-up refers to.
        wake: Is signalled when a step is issued while this process sleeps.
        done: Is signalled when a command is carried out, for a caller that sleeps.
        place: Which worker it is.
        connection: The worker's end of its pipe.
        control_fd: Descriptor of the shared record.
    """
    control = settle_in(place, control_fd)
    run(EnvServer(place, Pipe(connection), control, wake, done), shared)


class EnvServer:
    """Owns a worker's environments and carries out the caller's commands.

    Args:
        place: Which worker it is.
        pipe: The line to the caller.
        control: Its part of the shared record.
        wake: What it waits for, beside its pipe.
        done: Is signalled when a command is carried out.
    """

    _has_begun = False  # all arrays are mapped, and the predecessor's place is taken
    _is_over = False
    _n_seen = 0  # number of the last step

    def __init__(
        self, place: Place, pipe: Pipe, control: WorkerRecord, wake: Wake, done: Wake
    ) -> None:
        self._place = place
        self._me = place.worker
        self._pipe = pipe
        self._control = control
        self._wake = wake
        self._done = done
        install_fast_checks()
        self._recycling = Recycling(place.policy)
        self._open_lanes: set[int] = set()
        self._coming = _ComingEpisodes()
        self._lost: dict[int, str] = {}  # lanes that could not be restored, and why
        self._changed: set[int] = set()  # lanes where an attribute was set in their episode
        self._given_up: dict[int, tuple[int, int]] = {}  # see Predecessor

    def start(self) -> bool:
        """Create the environments and report; False if that failed."""
        setup, _ = self._pipe.receive()
        if not isinstance(setup, Setup):
            return False
        self._setup = setup
        try:
            self._env = env = made_environments(setup, self._place, self._control)
            self._open_lanes = set(range(env.n_lanes))
            self._buffers = Buffers(slice(setup.first_lane, setup.first_lane + env.n_lanes))
            report = report_of(env, self._me)
        except WorkerError as error:
            self._pipe.send(Failed(error))
            return False
        self._pipe.send(Ready(report))
        return True

    def serve(self) -> None:
        """Carry out commands until told to close or all environments are closed."""
        while not self._has_begun:
            if not self._handle(*self._pipe.receive()):
                return
        wake, pipe, me, step = self._wake, self._pipe, self._me, self._buffers.step
        poller = select.poll()
        poller.register(pipe.fileno(), select.POLLIN)
        poller.register(wake.fd, select.POLLIN)
        wake.begin()
        while self._open_lanes and not self._is_over:
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
                self._step(number, self._asked_lanes())
            if is_new or events:
                wake.begin()

    def fail(self, error: Exception) -> None:
        """Tell the caller why this worker ends."""
        self._pipe.send(Failed(worker_error(error, Where(worker=self._me))))

    def close(self) -> None:
        """Close the environments, whatever they say to it."""
        for lane in self._open_lanes:
            try:
                self._env.close_lane(lane)
            except BaseException:
                continue  # nobody can act on it any more

    # Messages ---------------------------------------------------------------------------------

    def _handle(self, message: Message, memory: Memory | None) -> bool:
        """Carry out a message; False if it says to close."""
        if isinstance(message, Close) or self._retires(message):
            return False
        if isinstance(message, Reset):
            self._reset(message)
        elif isinstance(message, Call):
            self._answer(message)
        elif isinstance(message, Announce):
            self._coming = _ComingEpisodes(message)
        elif isinstance(message, MapArrays) and memory is not None:
            self._buffers.map(message.specs, memory)
            asleep = self._buffers.asleep
            self._wake.share(asleep[self._me : self._me + 1])
            self._done.share(asleep[-1:])
            if message.declaration is not None:
                self._env.declare(message.declaration)
                if self._has_begun:
                    self._use_buffers()
        elif isinstance(message, Begin):
            self._n_seen = message.n_seen
            if message.payload is not None and memory is not None:
                self._restore(unpack(message.payload, memory))
            self._has_begun = True
            self._use_buffers()
        return True

    def _retires(self, message: Message) -> bool:
        """Whether a successor should begin the episodes of a message; then this worker retires."""
        is_call = isinstance(message, Call) and message.command == "reset"
        n_new = len(message.lanes) if isinstance(message, Reset) else int(is_call)
        if not n_new or not self._recycling.is_due(n_new):
            return False
        reset = {message.lane} if is_call else set(message.lanes)
        if not self._changed <= reset:
            return False  # a successor could not repeat their episodes
        self._pipe.send(Retiring(str(self._recycling)))
        return True

    def _use_buffers(self) -> None:
        """Write the environments' results into the buffers, and note when observations follow."""
        env, buffers, me = self._env, self._buffers, self._me
        env.place(buffers.observation, buffers.reward, buffers.flags)
        columns: Any = env.columns
        if not buffers.observation or columns is None:
            return
        write, step, writing = columns.write, buffers.step, buffers.writing

        def noted_write(lanes: Sequence[int], observations: Sequence[Any]) -> None:
            writing[me] = step[me]  # a worker that dies from here on leaves mixed values
            write(lanes, observations)

        columns.write = noted_write

    def _restore(self, predecessor: Predecessor) -> None:
        """Take the predecessor's place; a step that it did not finish comes next."""
        buffers, me = self._buffers, self._me
        self._given_up.update(predecessor.given_up)
        for lane in predecessor.closed:
            self._close_lane(lane)
        number = buffers.step[me]
        is_torn = number != self._n_seen and buffers.writing[me] == number
        torn = self._asked_lanes() if is_torn else []
        for lane, attributes in predecessor.attributes.items():
            for name, value in attributes.items():
                self._env.attribute(lane, "set_wrapper_attr")(name, value)
        for lane, tape in predecessor.tapes.items():
            self._coming.note_begin(lane, tape.seed)
            if lane not in torn and lane not in predecessor.doubtful:
                tape.observation = {key: array[lane] for key, array in buffers.observation.items()}
            try:
                take_over(self._env, lane, tape, Where(), self._control.steps, may_end=True)
            except EnvError as error:
                self._lost[lane] = error.what

    def _advance(self) -> None:
        self._control.steps[0] += 1

    @contextmanager
    def _env_time(self) -> Iterator[None]:
        """Count the time of a block as the environments'."""
        self._control.env_ns[0] -= monotonic_ns()
        try:
            yield
        finally:
            self._control.end_calls()

    def _reset(self, message: Reset) -> None:
        able: list[int] = []  # positions of lanes whose reset is not known to fail
        for number, (lane, seed) in enumerate(zip(message.lanes, message.seeds, strict=True)):
            self._note_begin(lane, seed)
            if self._given_up.get(lane) == (seed, -1):
                self._env.begin_lanes([lane])
            else:
                self._given_up.pop(lane, None)
                able.append(number)
        outcome = NONE_ENDED
        try:
            with self._env_time():
                if able:
                    self._env.reset_lanes(
                        [message.lanes[n] for n in able],
                        [message.seeds[n] for n in able],
                        [message.options[n] for n in able],
                    )
        except LaneError as error:
            row = message.lanes.index(error.lane)
            self._report(message.number, error, message.options[row])
            outcome = FAILED
        self._conclude(message.number, outcome)

    def _note_begin(self, lane: int, seed: int) -> None:
        """Record that a lane is reset, whatever was wrong with it."""
        self._lost.pop(lane, None)
        self._changed.discard(lane)
        self._recycling.n_begun += 1
        self._buffers.seed[lane] = seed
        self._buffers.is_ahead[lane] = -1
        self._coming.note_begin(lane, seed)

    def _asked_lanes(self) -> list[int]:
        """Lanes that the caller wants to step."""
        lanes: list[int] = self._env._all_lanes
        if self._buffers.partial[self._me]:
            lanes = np.flatnonzero(self._buffers.asked).tolist()
        return lanes

    def _step(self, number: int, lanes: list[int]) -> None:
        """Step lanes with the actions in the buffers."""
        lost = self._lost and self._lost.keys() & set(lanes)
        if lost:
            lane = min(lost)
            where, what = Where(worker=self._me), _LOST.format(self._lost[lane])
            failure = EnvError(what, where=where, fix=_LOST_FIX)
            self._pipe.send(LaneFailed(number, lane, "step", failure, is_lost=True))
            self._conclude(number, FAILED)
            return
        outcome = NONE_ENDED
        record = self._control
        record.env_ns[0] -= monotonic_ns()  # not _env_time(), which takes longer
        try:
            if self._given_up:
                ended = self._step_and_give_up(lanes)
            else:
                ended = self._env.step_lanes(lanes, self._buffers.action)
            record.env_ns[0] += monotonic_ns()
            record.n_steps[0] += len(lanes)
        except LaneError as error:
            record.end_calls()
            self._report(number, error)
            outcome = FAILED
        else:
            if ended:
                outcome = SOME_ENDED
                for lane in ended:
                    self._begin_ahead(lane)
        self._conclude(number, outcome)

    def _step_and_give_up(self, lanes: list[int]) -> list[int]:
        """Step lanes but those that are given up, which are truncated instead."""
        given_up = [lane for lane in lanes if self._given_up.pop(lane, None) is not None]
        others, actions = [lane for lane in lanes if lane not in given_up], self._buffers.action
        ended = self._env.step_lanes(others, actions) if others else []
        self._env.truncate_lanes(given_up, actions)
        return sorted([*ended, *given_up])

    def _conclude(self, number: int, outcome: int) -> None:
        self._advance()
        if self._is_over:
            return  # it is not carried out: a successor will do it again
        self._control.done[0] += 1
        self._buffers.outcome[self._me] = outcome
        self._buffers.finished[self._me] = number
        self._done.signal()

    def _report(self, number: int, error: LaneError, options: Options = None) -> None:
        failure = env_error(error, Where(worker=self._me), options=options)
        self._pipe.send(LaneFailed(number, error.lane, error.call, failure))
        self._is_over = self._place.policy.restarts_on_env_errors

    def _begin_ahead(self, lane: int) -> None:
        """Reset a lane for its next announced episode, leaving its last values in place."""
        if self._recycling.is_due():
            return  # a successor will run it
        episode = self._coming.next(lane)
        if episode is None:
            return
        self._recycling.n_begun += 1
        number, seed, options = episode
        buffers, env = self._buffers, self._env
        buffers.seed[lane] = seed
        last = {key: np.array(array[lane]) for key, array in buffers.observation.items()}
        try:
            with self._env_time():
                env._reset_lanes([lane], [seed], [options])
        except LaneError:
            return  # the reset will be issued, fail again, and be reported
        finally:
            for key, array in buffers.observation.items():
                buffers.ahead[key][lane] = array[lane]
                array[lane] = last[key]
        buffers.is_ahead[lane] = number

    # Remotes ----------------------------------------------------------------------------------

    def _answer(self, call: Call) -> None:
        """Carry out a request to one environment."""
        if call.command == "close":
            self._close_lane(call.lane)
            return
        failure = None
        try:
            reply = cloudpickle.dumps(self._result(call))
        except LaneError as error:
            reply = pickle.dumps(("error", text_of(error.__cause__ or error)))
            options = call.data[1] if call.command in ("reset", "describe") else None
            failure = env_error(error, Where(worker=self._me), options=options)
            self._is_over = self._place.policy.restarts_on_env_errors
        except BaseException as error:
            reply = pickle.dumps(("error", text_of(error)))
        self._advance()
        self._control.done[0] += failure is None
        self._pipe.send(Reply(call.lane, call.command, reply, failure))

    def _close_lane(self, lane: int) -> None:
        self._open_lanes.discard(lane)
        try:
            self._env.close_lane(lane)
        except BaseException:
            return  # the request has no reply that could say so

    def _result(self, call: Call) -> tuple[str, Any]:
        lane, env = call.lane, self._env
        if lane in self._lost and call.command in ("get_attr", "set_attr", "call", "step"):
            raise EnvError(_LOST.format(self._lost[lane]), fix=_LOST_FIX)
        if call.command == "get_attr":
            return "attr", env.attribute(lane, call.data)
        if call.command == "set_attr":
            env.attribute(lane, "set_wrapper_attr")(call.data.name, call.data.value)
            self._changed.add(lane)
            return "done", None
        if call.command == "call":
            name, arguments, named = call.data
            value = env.attribute(lane, name)
            return "result", value(*arguments, **named) if callable(value) else value
        if call.command == "describe":
            return "declaration", self._shown_by_reset(lane, *call.data)
        env.keeps_results = True
        try:
            if call.command == "reset":
                return "obs", self._remote_reset(lane, *call.data)
            return "transition", self._remote_step(lane, call.data)
        finally:
            env.keeps_results, env.results = False, []

    def _with_action(self, lane: int, action: Any) -> Mapping[str, Array]:
        """The actions of all lanes, with a remote's in its lane."""
        env, batch = self._env, self._buffers.action
        row = action_row(env.action_structure, env.native_action_specs() or {}, action)
        values = {key: array[0, ...] for key, array in row.items()}  # arrays, of objects too
        if env.action_structure is None or not batch:
            return batch_of({lane: values}, env)
        for key, value in values.items():
            batch[key][lane] = value
        return batch

    def _shown_by_reset(self, lane: int, seed: int, options: Options) -> Declaration | None:
        """What observations and infos consist of, which a reset has to show."""
        self._env.forget()
        with self._env_time():
            self._env.reset_lanes([lane], [seed], [options])
        return self._env.declaration

    def _remote_reset(self, lane: int, seed: int, options: Options) -> Any:
        self._note_begin(lane, seed)
        with self._env_time():
            self._env.reset_lanes([lane], [seed], [options])
        for array in self._buffers.action.values():
            array[lane] = 0
        return self._env.results[0][0]

    def _remote_step(self, lane: int, action: Any) -> Any:
        """Step one environment, which keeps its results; returns what its remote receives."""
        env, actions = self._env, self._with_action(lane, action)
        with self._env_time():
            env.step_lanes([lane], actions)
        self._control.n_steps[0] += 1
        observation, reward, _, _, info = env.results[0]
        done = bool(env.current["done"][lane])
        if env.current["truncated"][lane] and not env.current["terminated"][lane]:
            info = {**info, "TimeLimit.truncated": True}
        return observation, reward, done, info


class _ComingEpisodes:
    """Announced episodes of a worker's lanes.

    A lane that begins one of them has the next one ahead; one that begins any other episode has
    none.

    Args:
        message: The announcement, ``None`` if there was none.
    """

    def __init__(self, message: Announce | None = None) -> None:
        self._message = message
        self._next: dict[int, int] = {}  # lane: index of its next episode

    def note_begin(self, lane: int, seed: int) -> None:
        """Record that a lane begins the episode with this seed."""
        self._next.pop(lane, None)
        if self._message is not None:
            found = np.flatnonzero(self._message.seeds[lane] == seed)
            if found.size:
                self._next[lane] = int(found[0]) + 1

    def next(self, lane: int) -> tuple[int, int, Options] | None:
        """Index, seed and options of a lane's next episode, each once; ``None`` if unknown."""
        index, message = self._next.get(lane), self._message
        if message is None or index is None or index >= len(message.seeds[lane]):
            return None
        self._next[lane] = index + 1
        options = options_of(message.env_info[lane], index)
        return index, int(message.seeds[lane][index]), options
