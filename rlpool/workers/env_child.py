"""What a worker process does that only holds environments."""

from __future__ import annotations

import gc
import itertools
import pickle
import select
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np
import torch

from rlpool.envs.columns import converted
from rlpool.envs.gym_env import GymEnv, all_tasks
from rlpool.envs.vec_env import LaneError, Options, VecEnv
from rlpool.errors import RlpoolError, SpecError, Where, WorkerError, WorkerStartupError
from rlpool.failures import described, env_error, text_of
from rlpool.seeding import LaneSeeds, probe_seed, root_from, worker_seed
from rlpool.specs import flattener
from rlpool.storage import Array, Memory
from rlpool.workers.arena import FAILED, NONE_ENDED, SOME_ENDED, Arena, carve_actions
from rlpool.workers.child import control_row, settle_in
from rlpool.workers.env_messages import (
    Announce,
    Call,
    EnvReady,
    EnvSetup,
    LaneFailed,
    MapActions,
    MapArena,
    Reply,
    Reset,
)
from rlpool.workers.episodes_ahead import EpisodesAhead
from rlpool.workers.fast_seeding import FastSeeding
from rlpool.workers.messages import Close, Failed, Message, Pipe
from rlpool.workers.shipment import arrived

_REMOTE_SEEDS = 2**31
"""Number of the "reset" from which the seeds of remotes derive: one that nobody reaches."""


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
        self._remote_seeds: dict[int, Iterator[int]] = {}

    def start(self) -> bool:
        """Create the environments and report; False if that failed."""
        try:
            self._env = self._created()
            ready = self._ready()
        except WorkerError as error:
            self._pipe.send(Failed(error))
            return False
        self._pipe.send(ready)
        return True

    def serve(self) -> None:
        """Carry out orders and messages until told to close or all environments are closed."""
        message, memory = self._pipe.receive()
        while self._handle(message, memory) and not self._has_arena:
            message, memory = self._pipe.receive()
        wake, pipe, me, order = self._setup.wake, self._pipe, self._me, self._arena.order
        poller = select.poll()
        poller.register(wake.fd, select.POLLIN)
        poller.register(pipe.connection.fileno(), select.POLLIN)
        seen = 0
        while self._open_lanes:
            for fd, _ in poller.poll():
                if fd == wake.fd:
                    wake.wait()
                    if order[me] != seen:
                        seen = order[me]
                        self._step(seen)
                elif not self._handle(*pipe.receive()):
                    return

    def close(self) -> None:
        """Close the environments, whatever they say to it."""
        for lane in self._open_lanes:
            try:
                self._env.close_lane(lane)
            except (Exception, SystemExit):
                continue  # nobody can act on it any more

    # Starting ---------------------------------------------------------------------------------

    _has_arena = False

    def _created(self) -> GymEnv:
        setup = self._setup
        seed = worker_seed(setup.root, setup.worker)
        torch.manual_seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002  (for environments that use it)
        where = Where(worker=setup.worker)
        try:
            functions = pickle.loads(arrived(setup.functions))
        except BaseException as error:
            raise _startup_error("loading env_fns", error, where) from error
        envs = []
        for number, create in enumerate(functions):
            lane = setup.first_lane + number
            self._numbers[1] = number
            try:
                envs.append(create())
            except BaseException as error:
                what = f"env_fns[{lane}]"
                raise _startup_error(what, error, where._replace(lane=lane)) from error
            if isinstance(envs[-1], VecEnv) or not hasattr(envs[-1], "step"):
                raise WorkerStartupError(
                    f"env_fns[{lane}] returned {type(envs[-1]).__name__}, not an environment",
                    where=where._replace(lane=lane),
                    fix="let it return one Gymnasium environment",
                )
        try:
            env = GymEnv(envs, root_from(seed), **setup.options)
        except SpecError as error:
            raise _startup_error("GymEnv", error, where) from error
        self._open_lanes = set(range(env.n_lanes))
        env.lane_in_use = self._numbers[1:]
        if env.columns is None:
            self._learn_observation(env)
        return env

    def _learn_observation(self, env: GymEnv) -> None:
        """Reset environments without an observation space once, to see what they return."""
        n = env.n_lanes
        try:
            env.reset_lanes(range(n), [probe_seed(self._setup.root)] * n, [None] * n)
        except LaneError as error:
            where = Where(self._me, self._setup.first_lane + error.lane, step=0)
            failure = env_error(error, where)
            raise WorkerStartupError(
                failure.what,
                where=where,
                fix="declare an observation_space if reset() needs options or a task",
                traceback_text=failure.traceback_text,
            ) from error

    def _ready(self) -> EnvReady:
        env = self._env
        if env.columns is None:
            raise WorkerStartupError("the environments returned nothing from reset()")
        try:
            spaces = cloudpickle.dumps((env.observation_space, env.action_space))
        except Exception as error:
            where = Where(worker=self._me)
            raise _startup_error("pickling the spaces", error, where) from error
        return EnvReady(
            env.n_lanes,
            env.columns.structure,
            env.action_structure,
            env.native_action_specs(),
            spaces,
            self._number("n_tasks"),
            self._number("horizon_bamdp"),
            all_tasks(self._attribute),
        )

    def _attribute(self, name: str) -> Any:
        try:
            return self._env.attribute(0, name)
        except Exception:
            return None  # environments without tasks

    def _number(self, name: str) -> int | None:
        value = self._attribute(name)
        return int(value) if isinstance(value, int | np.integer) else None

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
        elif isinstance(message, MapActions) and memory is not None:
            lanes = self._my_lanes()
            self._actions = carve_actions(message.specs, message.n_lanes, memory, lanes)
        return True

    def _my_lanes(self) -> slice:
        first = self._setup.first_lane
        return slice(first, first + self._env.n_lanes)

    def _map(self, message: MapArena, memory: Memory) -> None:
        self._arena = arena = Arena(message.layout, memory, self._my_lanes())
        self._env.place(arena.observation, arena.reward, arena.flags)
        self._env.share_elapsed(arena.elapsed)
        self._actions = arena.action
        self._elapsed_before = np.array(arena.elapsed)
        self._has_arena = True

    def _reset(self, message: Reset) -> None:
        arena = self._arena
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

    def _step(self, order: int) -> None:
        env, arena = self._env, self._arena
        lanes: Any = env._all_lanes
        if arena.partial[self._me]:
            lanes = np.flatnonzero(arena.asked).tolist()
        outcome = NONE_ENDED
        np.copyto(self._elapsed_before, arena.elapsed)
        try:
            ended = env.step_lanes(lanes, self._actions)
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
        self._numbers[0] += 1
        self._arena.outcome[self._me] = outcome
        self._arena.finished[self._me] = order
        self._setup.done.signal()

    def _report(self, order: int, error: LaneError) -> None:
        failure = env_error(error, Where(worker=self._me))
        self._pipe.send(LaneFailed(order, error.lane, error.call, failure))

    def _begin_ahead(self, lane: int) -> None:
        """Reset a lane for the episode that is known to come, leaving its last values in place."""
        episode = self._episodes.next(lane)
        if episode is None:
            return
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
        try:
            reply = self._result(call)
            pickled = cloudpickle.dumps(reply)
        except LaneError as error:
            pickled = pickle.dumps(("error", text_of(error.__cause__ or error)))
        except BaseException as error:
            pickled = pickle.dumps(("error", text_of(error)))
        self._numbers[0] += 1
        self._pipe.send(Reply(call.lane, pickled))

    def _close_lane(self, lane: int) -> None:
        self._open_lanes.discard(lane)
        try:
            self._env.close_lane(lane)
        except (Exception, SystemExit):
            return  # there is no answer to it that could say so

    def _result(self, call: Call) -> tuple[str, Any]:
        lane, env = call.lane, self._env
        if call.command == "get_attr":
            return "attr", env.attribute(lane, call.data)
        if call.command == "seed":
            self._remote_seeds[lane] = _given_seeds(call.data)
            return "done", None
        env.keeps_results = True
        try:
            if call.command == "reset":
                return "obs", self._remote_reset(lane, call.data)
            return "transition", self._remote_step(lane, call.data)
        finally:
            env.keeps_results, env.results = False, []

    def _remote_reset(self, lane: int, data: tuple[int | None, Options]) -> Any:
        given, options = data
        seed = next(self._seeds_of(lane)) if given is None else given
        self._arena.seed[lane] = seed
        self._arena.is_ahead[lane] = -1
        self._episodes.note_begin(lane, seed)
        self._env.reset_lanes([lane], [seed], [options])
        for array in self._actions.values():
            array[lane] = 0
        return self._env.results[0][0]

    def _remote_step(self, lane: int, action: Any) -> Any:
        env = self._env
        self._put_action(lane, action)
        env.step_lanes([lane], self._actions)
        observation, reward, _, _, info = env.results[0]
        done = bool(env.current["done"][lane])
        if env.current["truncated"][lane] and not env.current["terminated"][lane]:
            info = {**info, "TimeLimit.truncated": True}
        return observation, reward, done, info

    def _put_action(self, lane: int, action: Any) -> None:
        """Write an action, nested as the environment takes it, where steps read it."""
        env = self._env
        if env.action_structure is None:
            value = np.asarray(action)
            batch = np.zeros((env.n_lanes, *value.shape), value.dtype)
            batch[lane] = value
            self._actions = {"action": batch}
            return
        values = flattener(env.action_structure, "action")(action)
        specs = env.native_action_specs() or {}
        for (key, spec), value in zip(specs.items(), values, strict=True):
            self._actions[key][lane] = converted(value, spec, key)

    def _seeds_of(self, lane: int) -> Iterator[int]:
        """Seeds of a remote's resets that bring none."""
        if lane not in self._remote_seeds:
            stream = LaneSeeds(self._setup.root, _REMOTE_SEEDS)
            number = self._setup.first_lane + lane
            self._remote_seeds[lane] = (stream.seed(number, k) for k in itertools.count())
        return self._remote_seeds[lane]


def _given_seeds(seed: int) -> Iterator[int]:
    """Seeds after a remote's ``seed``: this one, then others that follow from it."""
    stream = LaneSeeds(root_from(seed), 0)
    return itertools.chain([seed], (stream.seed(0, k) for k in itertools.count()))


def _startup_error(what: str, error: BaseException, where: Where) -> WorkerStartupError:
    if isinstance(error, RlpoolError):
        what, _, fix = str(error).partition("\n  fix:   ")
        return WorkerStartupError(what, where=where, fix=fix, traceback_text=text_of(error))
    return WorkerStartupError(
        f"{what} raised {described(error)}", where=where, traceback_text=text_of(error)
    )
