"""What a worker does, wherever it runs: in a process of its own or in the caller's."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from rlpool.agents.agent import Agent, call_problem
from rlpool.batch.claims import ClaimLock
from rlpool.batch.plans import AnnounceSeeds, EpisodePlan, WindowPlan
from rlpool.envs.gym_env import how_to_make_one, is_environment
from rlpool.envs.vec_env import Options, VecEnv
from rlpool.errors import EnvError, RlpoolError, Where, WorkerError, WorkerStartupError
from rlpool.generators import seed_generators
from rlpool.loop.plan import Resumed
from rlpool.loop.rollout import Rollout
from rlpool.memory.storage import Array, Memory
from rlpool.record.failures import agent_error, described, text_of
from rlpool.seeding import LaneSeeds, probe_seed, worker_seed
from rlpool.signatures import called_with_seed
from rlpool.slots.blocks import Block
from rlpool.workers.messages import (
    Close,
    Credit,
    Execute,
    Failed,
    MapBlock,
    Message,
    Probe,
    Ready,
    RequestDone,
    Retiring,
    Setup,
    Update,
    Window,
)
from rlpool.workers.parcel import Parcel, unpack
from rlpool.workers.shipment import arrived
from rlpool.workers.wear import Wear

Infos = tuple[dict[str, Array], dict[str, Array]]
"""``(agent_info, env_info)`` as arrays by key."""


class Link(Protocol):
    """A worker's end of the line to the caller."""

    def send(self, message: Message) -> None:
        """Send a message."""

    def receive(self) -> tuple[Message, Memory | None]:
        """Wait for a message."""

    def poll(self) -> bool:
        """Whether a message is there."""


def _ignore(seeds: Sequence[int]) -> None:
    """Nobody wants to know the seeds beforehand."""


class Collector:
    """Owns a worker's environments and agent, and carries out the caller's messages.

    Args:
        setup: What to create.
        link: The line to the caller.
        lock: Guards what the workers share.
        lane_in_use: Shared element that tells which lane's environment is running.
        progress: Shared element that counts steps.
        announce_seeds: Is told beforehand which seeds environments will be reset with.
    """

    def __init__(
        self,
        setup: Setup,
        link: Link,
        lock: ClaimLock,
        lane_in_use: memoryview,
        progress: memoryview,
        announce_seeds: AnnounceSeeds = _ignore,
    ) -> None:
        self._setup = setup
        self._link = link
        self._lock = lock
        self._lane_in_use = lane_in_use
        self._progress = progress
        self._announce_seeds = announce_seeds
        self._inbox: deque[tuple[Message, Memory | None]] = deque()
        self._blocks: dict[int, Block] = {}
        self._env: VecEnv | None = None
        self._agent: Agent | None = None
        self._rollout: Rollout | None = None
        self._lane_seeds: LaneSeeds | None = None
        self._window_infos: Infos | None = None
        self._failed_update: WorkerError | None = None
        self._wear = Wear(setup.max_episodes, setup.max_rss_bytes)

    @property
    def env(self) -> VecEnv | None:
        """The environments, once they are created."""
        return self._env

    def start(self) -> bool:
        """Create environments and agent and report; False if that failed."""
        try:
            self._create()
        except WorkerError as error:
            self._link.send(Failed(error))
            return False
        self._link.send(self._probed(None))
        return True

    def serve(self) -> None:
        """Carry out messages until told to close."""
        while self.handle(*self.next_message()):
            pass

    def has_messages(self) -> bool:
        """Whether ``next_message`` would return at once."""
        return bool(self._inbox) or self._link.poll()

    def next_message(self) -> tuple[Message, Memory | None]:
        """The next message, waiting for it if need be."""
        return self._inbox.popleft() if self._inbox else self._link.receive()

    def handle(self, message: Message, memory: Memory | None) -> bool:
        """Carry out one message; False if this worker is to end now."""
        if isinstance(message, Close):
            return False
        if isinstance(message, Probe):
            self._link.send(self._probed(_infos(message.parcel, memory)[0]))
        elif isinstance(message, MapBlock):
            for number in message.unmap:
                self._blocks.pop(number, None)
            if memory is not None:
                self._blocks[message.block] = Block(message.block, message.layout, memory)
        elif isinstance(message, Update):
            self._update(message, memory)
        elif isinstance(message, Execute | Window):
            return self._run(message, memory)
        return True

    def close(self) -> None:
        """Close environments and agent, whatever they say to it."""
        for part in (self._env, self._agent):
            try:
                if part is not None:
                    part.close()
            except (Exception, SystemExit):
                # Nobody can act on it any more, and the caller is waiting for the end.
                continue

    def _create(self) -> None:
        setup = self._setup
        seed = worker_seed(setup.root, setup.worker)
        where = Where(worker=setup.worker)
        try:
            functions = setup.functions
            if not isinstance(functions, tuple):
                functions = pickle.loads(arrived(functions))
            create_env, env_args, create_agent, agent_args = functions
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise _startup_error("loading create_env and create_agent", error, where) from error
        # Not before they are loaded: a module may seed generators, too, when it is imported. Where
        # this is the caller's process, these are not the caller's generators: see LocalWorker.
        seed_generators(seed)
        try:
            env = called_with_seed(create_env, seed, env_args)
        except (KeyboardInterrupt, WorkerStartupError):
            raise
        except BaseException as error:
            raise _startup_error("create_env", error, where) from error
        if not isinstance(env, VecEnv):
            raise WorkerStartupError(
                f"create_env returned {type(env).__name__}, not a VecEnv",
                where=where,
                fix=_how_to_return(env),
            )
        self._env = env
        env.lane_in_use = self._lane_in_use
        try:
            agent = create_agent(**agent_args)
            if isinstance(agent, Agent):
                agent.seed(seed)
        except (KeyboardInterrupt, WorkerStartupError):
            raise
        except BaseException as error:
            raise _startup_error("create_agent", error, where) from error
        if not isinstance(agent, Agent):
            raise WorkerStartupError(
                f"create_agent returned {type(agent).__name__}, not an Agent",
                where=where,
                fix="let create_agent return an instance of a subclass of rlpool.Agent, such as "
                "class MyAgent(Agent, nn.Module)",
            )
        problem = call_problem(agent)
        if problem:
            what, _, fix = problem.partition("\n  fix:   ")
            raise WorkerStartupError(what, where=where, fix=fix)
        n_noise = agent.n_noise
        if isinstance(n_noise, bool) or not isinstance(n_noise, int) or n_noise < 0:
            raise WorkerStartupError(
                f"n_noise of the agent is {n_noise!r}, not a number of random numbers per step",
                where=where,
                fix="set n_noise to an int of at least 0",
            )
        self._agent = agent
        self._rollout = Rollout(agent, env, setup.worker, self._progress, seed)

    def _probed(self, infos: Infos | None) -> Ready:
        """Learn the keys, with the infos of the first lanes if there are any."""
        env, rollout = self._env, self._rollout
        if env is None or rollout is None:
            raise LookupError("probed before start")
        agent_info, env_info = infos or ({}, {})
        columns = {key: array.tolist() for key, array in env_info.items()}
        options: list[Options] = [None] * env.n_lanes
        if columns:
            options = [
                {key: column[lane % len(column)] for key, column in columns.items()}
                for lane in range(env.n_lanes)
            ]
        lanes = np.arange(env.n_lanes)
        rows = {key: array[lanes % len(array)] for key, array in agent_info.items()}
        try:
            specs = rollout.probe(probe_seed(self._setup.root), options, rows or None)
        except RlpoolError as error:
            return Ready(env.n_lanes, None, error)
        return Ready(env.n_lanes, specs)

    def _update(self, message: Update, memory: Memory | None) -> None:
        if memory is None or self._agent is None:
            return
        try:
            self._agent.update(unpack(message.parcel, memory))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and self._setup.in_process:
                raise  # Ctrl-C: the next get() does it again
            failure = agent_error(error, Where(worker=self._setup.worker), "agent.update")
            failure.__cause__ = error
            self._failed_update = failure
        else:
            self._failed_update = None

    def _run(self, message: Execute | Window, memory: Memory | None) -> bool:
        """Run a request's share; False if this worker has to end, finished or not."""
        request, send = message.request, self._link.send
        if self._failed_update is not None:
            # The request was to run with the policy that could not be taken over.
            send(Failed(self._failed_update, request))
            send(RequestDone(request))
            return True
        try:
            self._carry_out(message, memory)
        except WorkerError as error:
            send(Failed(error, request))
            if isinstance(error, EnvError) and self._setup.quits_on_env_error:
                return False  # its successor will finish what is left
        except BaseException as error:
            if self._setup.in_process:
                raise  # as it is: most likely it was raised by a handler of one of its signals
            what, text = f"the worker failed with {described(error)}", text_of(error)
            send(Failed(WorkerError(what, where=self._here, traceback_text=text), request))
        if self._wear.is_worn:
            if isinstance(message, Window):
                send(RequestDone(request))  # windows are never left half-way
            send(Retiring(str(self._wear)))
            return False
        send(RequestDone(request))
        return True

    @property
    def _here(self) -> Where:
        return Where(worker=self._setup.worker)

    def _carry_out(self, message: Execute | Window, memory: Memory | None) -> None:
        rollout, env = self._rollout, self._env
        if rollout is None or env is None:
            raise LookupError("asked to run before start")
        infos, resumed = _infos(message.parcel, memory)
        if isinstance(message, Execute):
            plan = self._episodes(message, infos)
            if self._setup.n_workers == 1:
                plan.announce_to(env)
            rollout.run(plan)
            return
        windows = self._window(message, infos)
        if resumed:
            rollout.resume(windows, resumed)
        rollout.run(windows)

    def _episodes(self, message: Execute, infos: Infos | None) -> EpisodePlan:
        return EpisodePlan(
            message,
            self._setup.worker,
            self._blocks[message.block],
            self._setup.root,
            infos,
            self._lock,
            self._link.send,
            self._receive_credit,
            self._announce_seeds,
            self._wear,
        )

    def _window(self, message: Window, infos: Infos | None) -> WindowPlan:
        setup, block = self._setup, self._blocks[message.block]
        if message.is_first or self._lane_seeds is None:
            if self._rollout is not None:
                self._rollout.abandon()
            self._lane_seeds = LaneSeeds(setup.root, message.n_resets, message.n_restarts)
            self._window_infos = infos
        seeds, infos = self._lane_seeds, self._window_infos
        return WindowPlan(message, setup.worker, block, seeds, infos, self._wear)

    def _receive_credit(self, request: int, blocking: bool) -> list[int] | None:
        """Slots that came back; other messages are kept for later."""
        slots: list[int] = []
        n_seen = 0
        while self._link.poll() or (blocking and not n_seen):
            message, memory = self._link.receive()
            n_seen += 1
            if isinstance(message, Credit):
                if message.request == request:
                    slots.extend(message.slots)
            else:
                self._inbox.append((message, memory))
        return slots if n_seen else None


def _infos(parcel: Parcel | None, memory: Memory | None) -> tuple[Infos | None, Sequence[Resumed]]:
    """Infos of a request, and lanes that another worker had begun."""
    if parcel is None or memory is None:
        return None, ()
    agent_info, env_info, resumed = unpack(parcel, memory)
    return (agent_info, env_info), resumed


def _how_to_return(made: Any) -> str:
    """What to do about something that is not the environments of a worker."""
    if made is None:
        return "end create_env with return GymEnv([...environments...], seed)"
    if is_environment(made):
        return "return GymEnv([env], seed), with one or several environments"
    if isinstance(made, list | tuple):
        return "put them into one: return GymEnv(environments, seed)"
    return how_to_make_one(made)


def _startup_error(what: str, error: BaseException, where: Where) -> WorkerStartupError:
    return WorkerStartupError(
        f"{what} raised {described(error)}",
        where=where,
        traceback_text=text_of(error),
    )


Deliver = Callable[[int, Any], None]
"""``(worker, message)``: how a message reaches the caller's bookkeeping."""
