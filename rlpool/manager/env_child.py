"""What a worker process does that only holds environments."""

from __future__ import annotations

import gc
import pickle
import select
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np

from rlpool.envs.vec_env import LaneError, Options
from rlpool.errors import EnvError, Where, WorkerError
from rlpool.manager.arena import FAILED, NONE_ENDED, SOME_ENDED, Arena, carve_actions
from rlpool.manager.env_messages import (
    Announce,
    Call,
    EnvSetup,
    LaneFailed,
    MapActions,
    MapArena,
    MapObservations,
    Predecessor,
    Reply,
    Reset,
    Restore,
)
from rlpool.manager.env_startup import made_environments, report_of
from rlpool.manager.episodes_ahead import EpisodesAhead
from rlpool.manager.remote_requests import RemoteSeeds, remote_step
from rlpool.manager.restoring import LOST, LOST_FIX, Restorer, batch_like, with_action
from rlpool.memory.storage import Array, Memory
from rlpool.record.failures import env_error, text_of
from rlpool.specs import DEFAULT_OBSERVATION_KEY, leaves_of
from rlpool.workers.child import control_row, settle_in
from rlpool.workers.fast_seeding import FastSeeding
from rlpool.workers.messages import Close, Failed, Message, Pipe
from rlpool.workers.parcel import unpack


def main(setup: EnvSetup, connection: Connection, control_fd: Any) -> None:
    """Run a worker until it is told to close or its parent is gone.

    Args:
        setup: What to create.
        connection: The worker's end of its pipe.
        control_fd: Descriptor of the memory for progress, duplicated for this process.
    """
    settle_in(setup.worker, setup.root)
    numbers = control_row(control_fd.detach(), setup.worker, setup.n_workers)
    server = EnvServer(setup, Pipe(connection), numbers)
    try:
        if server.start():
            gc.freeze()  # see child.main
            server.serve()
    except (EOFError, OSError):
        pass  # the caller is gone or has closed its end
    finally:
        server.close()


class EnvServer:
    """Owns a worker's environments and carries out what the caller asks for.

    Args:
        setup: What to create.
        pipe: The line to the caller.
        numbers: Shared: steps done, lane in use.
    """

    def __init__(self, setup: EnvSetup, pipe: Pipe, numbers: memoryview) -> None:
        self._setup = setup
        self._pipe = pipe
        self._numbers = numbers
        self._me = setup.worker
        self._fast_seeding = FastSeeding()
        self._fast_seeding.install()
        self._open_lanes: set[int] = set()
        self._episodes = EpisodesAhead(setup.first_lane)
        self._actions: Mapping[str, Array] = {}
        self._remote_seeds = RemoteSeeds(setup.root, setup.first_lane)
        self._lost: dict[int, str] = {}  # lanes that could not be restored, and why
        self._n_begun = 0  # episodes

    def start(self) -> bool:
        """Create the environments and report; False if that failed."""
        try:
            self._env = env = made_environments(self._setup, self._numbers)
            self._open_lanes = set(range(env.n_lanes))
            ready = report_of(env, self._me)
        except WorkerError as error:
            self._pipe.send(Failed(error))
            return False
        self._pipe.send(ready)
        return True

    def serve(self) -> None:
        """Carry out orders and messages until told to close or all environments are closed."""
        while not self._is_prepared:
            if not self._handle(*self._pipe.receive()):
                return
        wake, pipe, me, order = self._setup.wake, self._pipe, self._me, self._arena.order
        poller = select.poll()
        # Messages come first: they were sent before the step that both may be there for.
        poller.register(pipe.connection.fileno(), select.POLLIN)
        poller.register(wake.fd, select.POLLIN)
        seen = self._n_seen
        while self._open_lanes:
            for fd, _ in poller.poll():
                if fd == wake.fd:
                    wake.wait()
                    if order[me] != seen:
                        seen = order[me]
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

    _is_prepared = False  # for orders: the arena is mapped, the predecessor's place taken
    _n_seen = 0

    # Messages ---------------------------------------------------------------------------------

    def _handle(self, message: Message, memory: Memory | None) -> bool:
        """Carry out a message; False if it says to close."""
        if isinstance(message, Close):
            return False
        if isinstance(message, Reset):
            self._reset(message)
        elif isinstance(message, Call):
            self._answer(message)
        elif isinstance(message, Announce):
            self._episodes = EpisodesAhead(self._setup.first_lane, message)
            self._fast_seeding.announce(message.seeds.tolist())
        elif isinstance(message, MapArena) and memory is not None:
            self._map(message, memory)
        elif isinstance(message, MapObservations) and memory is not None:
            self._map_observations(message, memory)
        elif isinstance(message, MapActions) and memory is not None:
            lanes = self._my_lanes()
            self._actions = carve_actions(message.specs, message.n_lanes, memory, lanes)
        elif isinstance(message, Restore) and memory is not None:
            self._restore(unpack(message.parcel, memory))
        return True

    def _my_lanes(self) -> slice:
        first = self._setup.first_lane
        return slice(first, first + self._env.n_lanes)

    def _map(self, message: MapArena, memory: Memory) -> None:
        self._arena = Arena(message.layout, memory, self._my_lanes())
        self._actions = self._arena.action
        self._n_seen = message.n_seen
        if not message.is_successor:
            self._move_in()

    def _move_in(self) -> None:
        """Let the environments' results be in the arena from now on."""
        env, arena = self._env, self._arena
        env.place(arena.observation, arena.reward, arena.flags)
        env.share_elapsed(arena.elapsed)
        self._elapsed_before = np.array(arena.elapsed)
        self._is_prepared = True
        self._note_writing()

    def _map_observations(self, message: MapObservations, memory: Memory) -> None:
        env, arena = self._env, self._arena
        env.declare_observations(message.structure)
        leaves = leaves_of(message.structure, DEFAULT_OBSERVATION_KEY)
        arena.map_observations(leaves, message.n_lanes, memory, self._my_lanes())
        if self._is_prepared:  # else the predecessor's place comes first
            env.place(arena.observation, arena.reward, arena.flags)
            self._note_writing()

    def _note_writing(self) -> None:
        """Let the arena tell from which step on it holds observations."""
        arena, me = self._arena, self._me
        columns: Any = self._env.columns
        if not arena.observation or columns is None:  # what they look like is told next
            return
        write, order, writing = columns.write, arena.order, arena.writing

        def noted_write(lanes: Sequence[int], observations: Sequence[Any]) -> None:
            writing[me] = order[me]  # who dies from here on leaves half of the old values
            write(lanes, observations)

        columns.write = noted_write

    def _restore(self, predecessor: Predecessor) -> None:
        """Take the predecessor's place, and do what it had not finished."""
        for lane in predecessor.closed:
            self._close_lane(lane)
        for lane, (seed, n_used) in predecessor.remote_seeds.items():
            self._remote_seeds.go_on(lane, seed, n_used)
        order, actions = predecessor.unfinished, predecessor.actions
        is_torn = bool(order) and self._arena.writing[self._me] == order
        restorer = Restorer(self._env, self._arena, self._advance)
        self._n_begun = predecessor.n_begun
        for lane, reached in predecessor.reached.items():
            self._episodes.note_begin(lane, reached.seed)
            is_unfinished = lane in actions
            why = restorer.restore(
                lane,
                reached,
                is_unfinished=is_unfinished,
                is_torn=is_torn and is_unfinished,
            )
            if why:
                self._lost[lane] = why
        lanes = sorted(actions)
        if order:
            restorer.copy_to_arena([lane for lane in lanes if lane not in self._lost])
        self._move_in()
        if order and not self._lost.keys().isdisjoint(lanes):
            self._refuse_lost(order, lanes)
        elif order:
            arrays = batch_like(actions[lanes[0]], self._env.n_lanes)
            for lane in lanes:
                for key, value in actions[lane].items():
                    arrays[key][lane] = value
            self._step(order, lanes, arrays)

    def _advance(self) -> None:
        self._numbers[0] += 1

    def _reset(self, message: Reset) -> None:
        arena = self._arena
        for lane in message.lanes:
            self._lost.pop(lane, None)
        self._n_begun += len(message.lanes)
        arena.seed[message.lanes] = message.seeds
        arena.elapsed[message.lanes] = 0
        arena.is_ahead[message.lanes] = -1
        for lane, seed in zip(message.lanes, message.seeds, strict=True):
            self._episodes.note_begin(lane, seed)
        outcome = NONE_ENDED
        try:
            self._env.reset_lanes(message.lanes, message.seeds, message.options)
        except LaneError as error:
            self._report(message.order, error)
            outcome = FAILED
        self._conclude(message.order, outcome)

    def _asked_lanes(self) -> list[int]:
        """Lanes that the caller wants to step."""
        lanes: list[int] = self._env._all_lanes
        if self._arena.partial[self._me]:
            lanes = np.flatnonzero(self._arena.asked).tolist()
        return lanes

    def _step(self, order: int, lanes: list[int], actions: Mapping[str, Array]) -> None:
        env, arena = self._env, self._arena
        if self._lost and not self._lost.keys().isdisjoint(lanes):
            self._refuse_lost(order, lanes)
            return
        outcome = NONE_ENDED
        np.copyto(self._elapsed_before, arena.elapsed)
        try:
            ended = env.step_lanes(lanes, actions)
        except LaneError as error:
            np.copyto(arena.elapsed, self._elapsed_before)  # where it failed
            self._report(order, error)
            outcome = FAILED
        else:
            if ended:
                outcome = SOME_ENDED
                for lane in ended:
                    self._begin_ahead(lane)
        self._conclude(order, outcome)

    def _conclude(self, order: int, outcome: int) -> None:
        self._advance()
        self._arena.outcome[self._me] = outcome
        self._arena.finished[self._me] = order
        self._setup.done.signal()

    def _report(self, order: int, error: LaneError) -> None:
        failure = env_error(error, Where(worker=self._me))
        self._pipe.send(LaneFailed(order, error.lane, error.call, failure))

    def _refuse_lost(self, order: int, lanes: list[int]) -> None:
        """Report a step of lanes one of which could not be restored; none of them steps."""
        lane = min(self._lost.keys() & set(lanes))
        failure = EnvError(
            LOST.format(self._lost[lane]), where=Where(worker=self._me), fix=LOST_FIX
        )
        self._pipe.send(LaneFailed(order, lane, "step", failure, is_lost=True))
        self._conclude(order, FAILED)

    def _begin_ahead(self, lane: int) -> None:
        """Reset a lane for the episode that is known to come, leaving its last values in place."""
        most = self._setup.max_episodes
        if most is not None and self._n_begun >= most:
            return  # a successor will run it
        episode = self._episodes.next(lane)
        if episode is None:
            return
        self._n_begun += 1
        number, seed, options = episode
        arena, env = self._arena, self._env
        arena.seed[lane] = seed
        last = {key: np.array(array[lane]) for key, array in arena.observation.items()}
        try:
            env._reset_lanes([lane], [seed], [options])
        except LaneError:
            return  # asked for again, it will fail again, and be reported
        finally:
            for key, array in arena.observation.items():
                arena.ahead[key][lane] = array[lane]
                array[lane] = last[key]
        arena.is_ahead[lane] = number

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
        except BaseException as error:
            pickled = pickle.dumps(("error", text_of(error)))
        self._advance()
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
            raise EnvError(LOST.format(self._lost[lane]), fix=LOST_FIX)
        if call.command == "get_attr":
            return "attr", env.attribute(lane, call.data)
        if call.command == "describe":
            return self._description(lane, *call.data)
        if call.command == "seed":
            self._remote_seeds.give(lane, call.data)
            return "done", None
        env.keeps_results = True
        try:
            if call.command == "reset":
                return "obs", self._remote_reset(lane, call.data)
            self._actions = with_action(env, lane, call.data, self._actions)
            return "transition", remote_step(env, lane, self._actions)
        finally:
            env.keeps_results, env.results = False, []

    def _description(self, lane: int, seed: int, options: Options) -> tuple[str, Any]:
        """What observations look like, which a reset has to show."""
        env = self._env
        env.forget()
        try:
            env.reset_lanes([lane], [seed], [options])
        except LaneError as error:
            return "failed", env_error(error, Where(worker=self._me))
        return "structure", env.columns.structure if env.columns is not None else None

    def _remote_reset(self, lane: int, data: tuple[int | None, Options]) -> Any:
        given, options = data
        self._lost.pop(lane, None)
        self._n_begun += 1
        seed = self._remote_seeds.next(lane) if given is None else given
        self._arena.seed[lane] = seed
        self._arena.is_ahead[lane] = -1
        self._episodes.note_begin(lane, seed)
        self._env.reset_lanes([lane], [seed], [options])
        for array in self._actions.values():
            array[lane] = 0
        return self._env.results[0][0]
