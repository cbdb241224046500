"""What a worker process does that only holds environments: it carries out the caller's commands."""

from __future__ import annotations

import pickle
import select
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np

from rlpool.envs.gym_env import GymEnv
from rlpool.envs.vec_env import LaneError, Options
from rlpool.errors import EnvError, Where, WorkerError
from rlpool.manager.buffers import FAILED, NONE_ENDED, SOME_ENDED, Buffers, carve_actions
from rlpool.manager.commands import (
    Announce,
    Call,
    LaneFailed,
    MapActions,
    MapBuffers,
    MapObservations,
    Predecessor,
    Reply,
    Reset,
    Restore,
    Setup,
)
from rlpool.manager.startup import made_environments, report_of
from rlpool.memory.storage import Array, Memory
from rlpool.record.failures import described, env_error, text_of
from rlpool.record.repeat import batch_of, repeat
from rlpool.record.tape import Tape, action_row
from rlpool.specs import DEFAULT_OBSERVATION_KEY, leaves_of
from rlpool.workers.child import Control, Place, run, settle_in
from rlpool.workers.payload import unpack
from rlpool.workers.recycling import Recycling
from rlpool.workers.speedups import FastSeeding
from rlpool.workers.wake import Wake
from rlpool.workers.wire import Close, Failed, Message, Pipe, Ready, Retiring

_LOST = (
    "the environment could not be brought back to where it was when its process ended or was "
    "replaced: {}"
)
_LOST_FIX = (
    "reset the lane; an environment can only be continued in another process if its seed, options "
    "and actions determine what it does"
)


def main(wake: Wake, done: Wake, place: Place, connection: Connection, control_fd: int) -> None:
    """Run a worker process with environments.

    Args:
        wake: What it waits for, beside its pipe: a step was asked for.
        done: What it signals when a command is carried out.
        place: Which worker it is.
        connection: The worker's end of its pipe.
        control_fd: Descriptor of the shared numbers.
    """
    control = settle_in(place, control_fd)
    run(EnvServer(place, Pipe(connection), control, wake, done))


class EnvServer:
    """Owns a worker's environments and carries out what the caller asks for.

    Args:
        place: Which worker it is.
        pipe: The line to the caller.
        control: Its shared numbers.
        wake: What it waits for, beside its pipe.
        done: What it signals when a command is carried out.
    """

    _is_prepared = False  # for commands: the buffers are mapped, the predecessor's place taken
    _is_over = False
    _n_seen = 0  # number of the last step

    def __init__(self, place: Place, pipe: Pipe, control: Control, wake: Wake, done: Wake) -> None:
        self._place = place
        self._me = place.worker
        self._pipe = pipe
        self._control = control
        self._wake = wake
        self._done = done
        self._fast_seeding = FastSeeding()
        self._fast_seeding.install()
        self._recycling = Recycling(place.policy)
        self._open_lanes: set[int] = set()
        self._coming = _ComingEpisodes(0)
        self._actions: Mapping[str, Array] = {}
        self._lost: dict[int, str] = {}  # lanes that could not be restored, and why

    def start(self) -> bool:
        """Create the environments and report; False if that failed."""
        setup, _ = self._pipe.receive()
        if not isinstance(setup, Setup):
            return False
        self._setup = setup
        try:
            self._env = env = made_environments(setup, self._place, self._control)
            self._open_lanes = set(range(env.n_lanes))
            report = report_of(env, self._me)
        except WorkerError as error:
            self._pipe.send(Failed(error))
            return False
        self._pipe.send(Ready(report))
        return True

    def serve(self) -> None:
        """Carry out commands until told to close or all environments are closed."""
        while not self._is_prepared:
            if not self._handle(*self._pipe.receive()):
                return
        wake, pipe, me, step = self._wake, self._pipe, self._me, self._buffers.step
        poller = select.poll()
        # Messages come first: they were sent before the step that both may be there for.
        poller.register(pipe.fileno(), select.POLLIN)
        poller.register(wake.fd, select.POLLIN)
        seen = self._n_seen
        while self._open_lanes and not self._is_over:
            for fd, _ in poller.poll():
                if fd == wake.fd:
                    wake.wait()
                    if step[me] != seen:
                        seen = step[me]
                        self._step(seen, self._asked_lanes(), self._actions)
                elif not self._handle(*pipe.receive()):
                    return

    def close(self) -> None:
        """Close the environments, whatever they say to it."""
        for lane in self._open_lanes:
            try:
                self._env.close_lane(lane)
            except (Exception, SystemExit):
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
            self._coming = _ComingEpisodes(self._setup.first_lane, message)
            self._fast_seeding.announce(message.seeds.tolist())
        elif isinstance(message, MapBuffers) and memory is not None:
            self._map(message, memory)
        elif isinstance(message, MapObservations) and memory is not None:
            self._map_observations(message, memory)
        elif isinstance(message, MapActions) and memory is not None:
            lanes = self._my_lanes()
            self._actions = carve_actions(message.specs, message.n_lanes, memory, lanes)
        elif isinstance(message, Restore) and memory is not None:
            self._restore(unpack(message.payload, memory))
        return True

    def _retires(self, message: Message) -> bool:
        """Whether to leave the episodes that a message asks for to a successor."""
        n_new = len(message.lanes) if isinstance(message, Reset) else 0
        if isinstance(message, Call) and message.command == "reset":
            n_new = 1
        if not n_new or not self._recycling.is_due(n_new):
            return False
        self._pipe.send(Retiring(str(self._recycling)))
        return True

    def _my_lanes(self) -> slice:
        first = self._setup.first_lane
        return slice(first, first + self._env.n_lanes)

    def _map(self, message: MapBuffers, memory: Memory) -> None:
        self._buffers = Buffers(message.layout, memory, self._my_lanes())
        self._actions = self._buffers.action
        self._n_seen = message.n_seen
        if not message.is_successor:
            self._move_in()

    def _move_in(self) -> None:
        """Let the environments' results be in the buffers from now on."""
        env, buffers = self._env, self._buffers
        env.place(buffers.observation, buffers.reward, buffers.flags)
        env.share_elapsed(buffers.elapsed)
        self._elapsed_before = np.array(buffers.elapsed)
        self._is_prepared = True
        self._note_writing()

    def _map_observations(self, message: MapObservations, memory: Memory) -> None:
        env, buffers = self._env, self._buffers
        env.declare_observations(message.structure)
        leaves = leaves_of(message.structure, DEFAULT_OBSERVATION_KEY)
        buffers.map_observations(leaves, message.n_lanes, memory, self._my_lanes())
        if self._is_prepared:  # else the predecessor's place comes first
            env.place(buffers.observation, buffers.reward, buffers.flags)
            self._note_writing()

    def _note_writing(self) -> None:
        """Let the buffers tell from which step on it holds observations."""
        buffers, me = self._buffers, self._me
        columns: Any = self._env.columns
        if not buffers.observation or columns is None:  # what they look like is told next
            return
        write, step, writing = columns.write, buffers.step, buffers.writing

        def noted_write(lanes: Sequence[int], observations: Sequence[Any]) -> None:
            writing[me] = step[me]  # who dies from here on leaves half of the old values
            write(lanes, observations)

        columns.write = noted_write

    def _restore(self, predecessor: Predecessor) -> None:
        """Take the predecessor's place, and do what it had not finished."""
        for lane in predecessor.closed:
            self._close_lane(lane)
        number, actions = predecessor.unfinished, predecessor.actions
        is_torn = bool(number) and self._buffers.writing[self._me] == number
        for lane, tape in predecessor.tapes.items():
            self._coming.note_begin(lane, tape.seed)
            is_unfinished = lane in actions
            why = self._why_lost(lane, tape, is_unfinished, is_torn and is_unfinished)
            if why:
                self._lost[lane] = why
        lanes = sorted(actions)
        if number:
            self._copy_to_buffers([lane for lane in lanes if lane not in self._lost])
        self._move_in()
        if number and not self._lost.keys().isdisjoint(lanes):
            self._refuse_lost(number, lanes)
        elif number:
            rows = {lane: {k: row[0, ...] for k, row in actions[lane].items()} for lane in lanes}
            batch = batch_of(rows[lanes[0]], lanes[0], self._env)
            for lane, row in rows.items():
                for key, value in row.items():
                    batch[key][lane] = value
            self._step(number, lanes, batch)

    def _why_lost(self, lane: int, tape: Tape, is_unfinished: bool, is_torn: bool) -> str:
        """Repeat a lane's episode.

        Args:
            lane: The lane.
            tape: The episode.
            is_unfinished: Whether the lane was in the middle of a further step.
            is_torn: Whether observations of that step had been written.

        Returns:
            Why it cannot go on from here, empty if it can.
        """
        if tape.why_lost:
            return tape.why_lost
        buffers = self._buffers
        if not is_torn:
            tape.observation = {key: array[lane] for key, array in buffers.observation.items()}
        found = None
        try:
            for reached in repeat(self._env, lane, tape):
                found = reached.divergence
                self._advance()
        except LaneError as error:
            return f"there, its {error.call} raised {described(error.__cause__ or error)}"
        if not is_unfinished and buffers.elapsed[lane] != tape.n_steps:
            return f"{tape.n_steps} steps are known, it had made {buffers.elapsed[lane]}"
        if found is not None:
            return (
                f"after reset(seed={tape.seed}) and the same {tape.n_steps} actions, {found.what}: "
                "it is not deterministic given its seed"
            )
        return ""

    def _copy_to_buffers(self, lanes: list[int]) -> None:
        """Put what some lanes have reached where the caller sees it."""
        env, buffers = self._env, self._buffers
        if env.columns is not None:
            for key, array in buffers.observation.items():
                array[lanes] = env.columns.arrays[key][lanes]
        buffers.reward[lanes] = env.current["reward"][lanes]
        buffers.flags[:, lanes] = env.flags[:, lanes]

    def _advance(self) -> None:
        self._control.steps[0] += 1

    def _reset(self, message: Reset) -> None:
        buffers = self._buffers
        for lane, seed in zip(message.lanes, message.seeds, strict=True):
            self._note_begin(lane, seed)
        buffers.elapsed[message.lanes] = 0
        outcome = NONE_ENDED
        try:
            self._env.reset_lanes(message.lanes, message.seeds, message.options)
        except LaneError as error:
            self._report(message.number, error)
            outcome = FAILED
        self._conclude(message.number, outcome)

    def _note_begin(self, lane: int, seed: int) -> None:
        """Take note that a lane is reset, which makes good whatever was wrong with it."""
        self._lost.pop(lane, None)
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

    def _step(self, number: int, lanes: list[int], actions: Mapping[str, Array]) -> None:
        env, buffers = self._env, self._buffers
        if self._lost and not self._lost.keys().isdisjoint(lanes):
            self._refuse_lost(number, lanes)
            return
        outcome = NONE_ENDED
        np.copyto(self._elapsed_before, buffers.elapsed)
        try:
            ended = env.step_lanes(lanes, actions)
        except LaneError as error:
            np.copyto(buffers.elapsed, self._elapsed_before)  # where it failed
            self._report(number, error)
            outcome = FAILED
        else:
            if ended:
                outcome = SOME_ENDED
                for lane in ended:
                    self._begin_ahead(lane)
        self._conclude(number, outcome)

    def _conclude(self, number: int, outcome: int) -> None:
        self._advance()
        if self._is_over:
            return  # it is not carried out: a successor will do it again
        self._control.done[0] += 1
        self._buffers.outcome[self._me] = outcome
        self._buffers.finished[self._me] = number
        self._done.signal()

    def _report(self, number: int, error: LaneError) -> None:
        failure = env_error(error, Where(worker=self._me))
        self._pipe.send(LaneFailed(number, error.lane, error.call, failure))
        self._is_over = self._place.policy.restarts_on_env_errors

    def _refuse_lost(self, number: int, lanes: list[int]) -> None:
        """Report a step of lanes one of which could not be restored; none of them steps."""
        lane = min(self._lost.keys() & set(lanes))
        failure = EnvError(
            _LOST.format(self._lost[lane]), where=Where(worker=self._me), fix=_LOST_FIX
        )
        self._pipe.send(LaneFailed(number, lane, "step", failure, is_lost=True))
        self._conclude(number, FAILED)

    def _begin_ahead(self, lane: int) -> None:
        """Reset a lane for the episode that is known to come, leaving its last values in place."""
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
            env._reset_lanes([lane], [seed], [options])
        except LaneError:
            return  # asked for again, it will fail again, and be reported
        finally:
            for key, array in buffers.observation.items():
                buffers.ahead[key][lane] = array[lane]
                array[lane] = last[key]
        buffers.is_ahead[lane] = number

    # Remotes ----------------------------------------------------------------------------------

    def _answer(self, call: Call) -> None:
        """Carry out a remote's request."""
        if call.command == "close":
            self._close_lane(call.lane)
            return
        is_done, failure = False, None
        try:
            reply = self._result(call)
            is_done = True
            pickled = cloudpickle.dumps(reply)
        except LaneError as error:
            pickled = pickle.dumps(("error", text_of(error.__cause__ or error)))
            failure = env_error(error, Where(worker=self._me))
            self._is_over = self._place.policy.restarts_on_env_errors
        except BaseException as error:
            pickled = pickle.dumps(("error", text_of(error)))
        self._advance()
        self._control.done[0] += is_done
        self._pipe.send(Reply(call.lane, pickled, is_done, failure))

    def _close_lane(self, lane: int) -> None:
        self._open_lanes.discard(lane)
        try:
            self._env.close_lane(lane)
        except (Exception, SystemExit):
            return  # there is no answer to it that could say so

    def _result(self, call: Call) -> tuple[str, Any]:
        lane, env = call.lane, self._env
        if lane in self._lost and call.command in ("get_attr", "step"):
            raise EnvError(_LOST.format(self._lost[lane]), fix=_LOST_FIX)
        if call.command == "get_attr":
            return "attr", env.attribute(lane, call.data)
        if call.command == "describe":
            return self._description(lane, *call.data)
        env.keeps_results = True
        try:
            if call.command == "reset":
                return "obs", self._remote_reset(lane, *call.data)
            self._take_action(lane, call.data)
            return "transition", _transition(env, lane, self._actions)
        finally:
            env.keeps_results, env.results = False, []

    def _take_action(self, lane: int, action: Any) -> None:
        """Put a remote's action where those of the caller are."""
        env, structure = self._env, self._env.action_structure
        row = action_row(structure, env.native_action_specs() or {}, action)
        values = {key: array[0, ...] for key, array in row.items()}  # arrays, of objects too
        if structure is None or not self._actions:
            self._actions = batch_of(values, lane, env)
        for key, value in values.items():
            self._actions[key][lane] = value

    def _description(self, lane: int, seed: int, options: Options) -> tuple[str, Any]:
        """What observations look like, which a reset has to show."""
        env = self._env
        env.forget()
        try:
            env.reset_lanes([lane], [seed], [options])
        except LaneError as error:
            return "failed", env_error(error, Where(worker=self._me))
        return "structure", env.columns.structure if env.columns is not None else None

    def _remote_reset(self, lane: int, seed: int, options: Options) -> Any:
        self._note_begin(lane, seed)
        self._env.reset_lanes([lane], [seed], [options])
        for array in self._actions.values():
            array[lane] = 0
        return self._env.results[0][0]


def _transition(env: GymEnv, lane: int, actions: Mapping[str, Array]) -> Any:
    """Step one environment, which keeps its results; returns what its remote receives."""
    env.step_lanes([lane], actions)
    observation, reward, _, _, info = env.results[0]
    done = bool(env.current["done"][lane])
    if env.current["truncated"][lane] and not env.current["terminated"][lane]:
        info = {**info, "TimeLimit.truncated": True}
    return observation, reward, done, info


class _ComingEpisodes:
    """Announced episodes of a worker's lanes.

    A lane that begins one of them has the next one of its row ahead; one that begins any other
    episode has none.

    Args:
        first_lane: Number of the worker's first lane.
        message: The announcement, ``None`` if there was none.
    """

    def __init__(self, first_lane: int, message: Announce | None = None) -> None:
        self._message = message
        self._rows: dict[int, Array] = {}  # lane: rows of the announcement
        self._next: dict[int, int] = {}  # lane: which of those comes next
        if message is not None:
            lanes = message.numbers % message.stride - first_lane
            self._rows = {int(lane): np.flatnonzero(lanes == lane) for lane in np.unique(lanes)}

    def note_begin(self, lane: int, seed: int) -> None:
        """Take note that a lane begins the episode with this seed."""
        self._next.pop(lane, None)
        if self._message is not None and lane in self._rows:
            found = np.flatnonzero(self._message.seeds[self._rows[lane]] == seed)
            if found.size:
                self._next[lane] = int(found[0]) + 1

    def next(self, lane: int) -> tuple[int, int, Options] | None:
        """Number, seed and options of a lane's next episode, each once; ``None`` if unknown."""
        place, message = self._next.get(lane), self._message
        if message is None or place is None or place >= len(self._rows[lane]):
            return None
        self._next[lane] = place + 1
        row = int(self._rows[lane][place])
        options = {key: column[row].tolist() for key, column in message.env_info.items()}
        return int(message.numbers[row]), int(message.seeds[row]), options or None
