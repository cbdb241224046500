"""A worker's part of a batcher, in its own process or in the caller's."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rlpool.agents.agent import Agent, as_agent
from rlpool.batch.messages import (
    Credit,
    Episodes,
    MapBlock,
    Probe,
    Report,
    Run,
    Setup,
    Update,
)
from rlpool.batch.plans import EpisodePlan, RequestPlan, Site, WindowPlan
from rlpool.data.infos import options_of
from rlpool.data.storage import Memory, NDArray
from rlpool.envs.description import described
from rlpool.envs.vec_env import VecEnv
from rlpool.envs.vector_gym_env import as_vec_env
from rlpool.errors import (
    NotRepeatedError,
    RlpoolError,
    SpecError,
    WorkerError,
    WorkerStartupError,
)
from rlpool.loop.plan import Plan
from rlpool.loop.rollout import Rollout
from rlpool.machine.arguments import called_with_seed
from rlpool.machine.own_state import seed_generators
from rlpool.machine.platform import NO_LOCK, FileLock
from rlpool.observe.control import WorkerRecord
from rlpool.record.failures import advise_to_debug, agent_error
from rlpool.record.repeat import take_over
from rlpool.record.tape import Tape
from rlpool.seeding import episode_seeds, probe_seed
from rlpool.slots.blocks import Block
from rlpool.workers.payload import Payload, unpack
from rlpool.workers.sharing import Shared
from rlpool.workers.wire import Close, Done, Message, Pipe, Retiring
from rlpool.workers.worker_process import Place, Server, called, load, run

_N_HEAD = 128
"""Number of steps in which state kept from other episodes almost always shows."""

_RESTORE = "let reset(seed=...) restore all state, which is impossible for a real robot"


def main(shared: Shared, place: Place, pipe: Pipe, control_fd: int) -> None:
    """Run a worker process of a batcher.

    Args:
        shared: Objects that the set-up shares with the caller.
        place: Which worker it is.
        pipe: The worker's end of its pipe.
        control_fd: Descriptor of the shared record.
    """
    # A second descriptor stays open for locking the file behind it.
    lock = FileLock(os.dup(control_fd)) if place.n_workers > 1 else NO_LOCK
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        with suppress(OSError):  # not permitted everywhere
            # A woken worker must not take the core of a caller that is waking the others.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    make_collector = partial(Collector, place, pipe, lock=lock)
    run(make_collector, shared, place, control_fd)


class Collector(Server):
    """Owns a worker's environments and agent, and carries out the caller's commands.

    It is also the queue of the rollout's plans: lanes that are idle in the current requests begin
    with the next request, unless another command comes first.

    Args:
        place: Which worker it is.
        link: The connection to the caller.
        control: The worker's part of the shared record.
        lock: Lock of claims, see ``Claims``.
        notice: Called when episodes have ended; ``None`` in a worker process.

    Attributes:
        env: The environments, once created.
        agent: The agent, once created.
    """

    def __init__(
        self,
        place: Place,
        link: Pipe,
        control: WorkerRecord,
        lock: AbstractContextManager[None] = NO_LOCK,
        notice: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(place, link, control)
        self._in_process = notice is not None  # where Ctrl-C may reach it
        self._inbox: deque[tuple[Message, Memory | None]] = deque()  # messages read so far
        self._blocks: dict[int, Block] = {}
        self.env: VecEnv
        self.agent: Agent
        self._rollout: Rollout
        self._failed_update: WorkerError | None = None
        self._next: tuple[Run, Memory | None] | None = None  # the next request
        self._plans: dict[int, RequestPlan] = {}  # running plans, by the number of their request
        self._site = Site(place, lock, self._recycling, link.send, self._read, notice)

    # Messages from the caller --------------------------------------------------------------------

    def peek(self) -> Message | None:
        """Return the next message without removing it; ``None`` if there is none yet."""
        if not self._inbox:
            self._read()
        return self._inbox[0][0] if self._inbox else None

    def receive(self) -> tuple[Message, Memory | None]:
        """Return the next message and its memory, waiting if necessary."""
        while not self._inbox:
            self._read(blocking=True)
        return self._inbox.popleft()

    def _read(self, blocking: bool = False) -> bool:
        """Read the messages that have arrived, and wait for one if ``blocking``.

        Emptied slots are given to their plans at once.

        Returns:
            Whether there were any.
        """
        n_read = 0
        while self._link.poll() or (blocking and not n_read):
            message, memory = self._link.receive()
            n_read += 1
            if not isinstance(message, Credit):
                self._inbox.append((message, memory))
            elif isinstance(plan := self._plans.get(message.number), EpisodePlan):
                plan.take_slots(message.slots)
        return n_read > 0

    # Commands ------------------------------------------------------------------------------------

    def create(self, setup: Setup, memory: Memory | None) -> Report:
        """Create environments and agent, and discover the contents of a step."""
        seed = self._place.seed
        functions: Any = setup.functions if memory is None else memory.root().tobytes()
        if self._in_process:
            seed_generators(seed)  # not the caller's, see LocalWorker
        else:
            advise_to_debug(setup.advice)
            functions = load(self._place, "create_env and create_agent", functions)
        create_env, env_args, create_agent, agent_args, *rest = functions
        agent_rows, watches_infos, max_steps = rest
        env = called(
            self._here,
            "create_env",
            lambda: as_vec_env(called_with_seed(create_env, seed, env_args), seed),
        )
        if not isinstance(env, VecEnv):
            message = f"create_env returned {type(env).__name__}, not a VecEnv"
            fix = "end create_env with return GymEnv([...environments...], seed)"
            raise WorkerStartupError(message, where=self._here, fix=fix)
        self._closers.append(env.close)
        if max_steps is not None:
            env.max_steps = min(max_steps, env.max_steps or max_steps)
        if watches_infos:
            env.watch_infos(self._control.seen_keys)

        made = called(self._here, "create_agent", lambda: create_agent(**agent_args))
        if hasattr(made, "close"):
            self._closers.append(made.close)
        try:
            agent = as_agent(made, "create_agent returned")
        except SpecError as error:
            raise WorkerStartupError(error.what, where=self._here, fix=error.fix) from None
        called(self._here, "agent.seed", agent.seed, seed)
        self.env, self.agent = env, agent
        env.lane_in_use = self._control.lane
        env.report_failures()
        self._rollout = Rollout(agent, env, self._place.worker, self._control, agent_rows)
        return self._probed({}, {}, None)

    def serve(self) -> None:
        """Carry out messages until one says to close."""
        goes_on = True
        while goes_on:
            self._control.begin_wait()
            message, memory = self.receive()
            self._control.end_wait()
            goes_on = self.handle(message, memory)

    def handle(self, message: Message, memory: Memory | None) -> bool:
        """Carry out one message; False if this worker has to end now."""
        if isinstance(message, Close):
            return False
        if isinstance(message, Probe):
            self._send(self._probed(*_infos(message.payload, memory)[:2], message.asked))
        elif isinstance(message, MapBlock):
            for number in message.unmap:
                self._blocks.pop(number, None)
            if memory is not None:
                self._blocks[message.block] = Block(message.block, message.layout, memory)
        elif isinstance(message, Update):
            self._update(message, memory)
        elif isinstance(message, Run):
            asked = message.asked
            if not isinstance(asked, Episodes) or asked.tape is None:
                return self._run(message, memory)
            self._repeat(message.number, asked.first, asked.tape)
        return True

    def _repeat(self, number: int, first: int, tape: Tape) -> None:
        """Repeat an episode in full, then its first steps, then its reset."""
        lane, where = first % self.env.n_lanes, self._here._replace(seed=tape.seed)
        head = {key: array[:_N_HEAD] for key, array in tape.columns.items()}
        steps, start = replace(tape, observation={}), replace(tape, chunks=[])
        try:
            for part in (steps, replace(steps, chunks=[head]), start):
                place = {lane: where}
                take_over(self.env, {lane: part}, place, self._control.steps, may_end=True)
        except WorkerError as error:
            found = described(self.env)
            full_name = f"the environment ({', '.join([*dict(found['wrappers']), found['class']])})"
            name, fix = next(iter(self.env.state_keepers.items()), (full_name, _RESTORE))
            if isinstance(error, NotRepeatedError):
                message = error.what.replace("the environment", name, 1)
            else:
                message = f"{name} did not repeat an episode: {error.what}"
            fix, text = f"{fix}; check_repeatable=False skips this check", error.traceback_text
            failure = NotRepeatedError(message, where=error.where, fix=fix, traceback_text=text)
            self.report_failure(failure, number)
        self._send(Done(number))

    def _probed(
        self, agent_info: Mapping[str, NDArray], env_info: Mapping[str, NDArray], asked: Any
    ) -> Report:
        """Discover the keys, with the first episodes of a request if there are any."""
        n_lanes = self.env.n_lanes
        rows, given = (
            {key: array[np.arange(n_lanes) % len(array)] for key, array in info.items()}
            for info in (agent_info, env_info)
        )
        options = [options_of(given, lane) for lane in range(n_lanes)]
        first, seeds = None, [probe_seed(self._place.root)]
        if asked is not None:
            first = asked.first
            n_seeds = min(n_lanes, asked.n_rows)
            seeds = asked.given_seeds or episode_seeds(asked.root, first, n_seeds)
        try:
            specs, problem = self._rollout.probe(seeds, options, rows or None, first=first), None
        except RlpoolError as error:
            specs, problem = None, error
        return Report(n_lanes, specs, problem, described(self.env), self.env.state_keepers)

    def _update(self, message: Update, memory: Memory | None) -> None:
        if memory is None:
            return
        self._failed_update = None
        try:
            self.agent.update(unpack(message.payload, memory))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and self._in_process:
                raise  # Ctrl-C: the next get() repeats it
            self._failed_update = agent_error(error, self._here, "agent.update")
            self._failed_update.__cause__ = error

    def _run(self, message: Run, memory: Memory | None) -> bool:
        """Run a request's share and those that follow; False if this worker has to end."""
        if self._failed_update is not None:
            # The policy that the request needs could not be loaded.
            self.failed(self._plan_of(message, memory), self._failed_update)
            return True
        self._next = message, memory
        try:
            try:
                self._rollout.run(self)
            except WorkerError as failure:
                for plan in list(self._plans.values()):
                    self.failed(plan, failure)
        except _WorkerEnds:
            return False
        finally:
            self._plans.clear()
        if self._recycling.is_due():
            self._send(Retiring())
            return False
        return True

    # The queue of plans --------------------------------------------------------------------------

    def has_next(self) -> bool:
        """Whether there may be a request that can run at the same time as the others."""
        message = None if self._in_process else self.peek()
        if isinstance(message, Run):
            return isinstance(message.asked, Episodes) and message.asked.tape is None
        return isinstance(message, MapBlock)

    def next_plan(self) -> Plan | None:
        """Return the plan of the next request, unless another command comes first."""
        while self._next is None and self.has_next() and not self._recycling.is_due():
            message, memory = self.receive()
            if isinstance(message, MapBlock):
                self.handle(message, memory)
            else:
                self._next = message, memory
        if self._next is None:
            return None
        (message, memory), self._next = self._next, None
        return self._plan_of(message, memory)

    def _plan_of(self, message: Run, memory: Memory | None) -> Plan:
        agent_info, env_info, tapes = _infos(message.payload, memory)
        infos, block, asked = (agent_info, env_info), self._blocks[message.block], message.asked
        plan: RequestPlan
        if isinstance(asked, Episodes):
            plan = EpisodePlan(message, asked, block, infos, self._site)
        else:
            if asked.is_first or tapes:
                self._rollout.abandon()
            plan = WindowPlan(message, asked, block, infos, tapes, self._site)
        self._plans[message.number] = plan
        return plan

    def done(self, plan: Plan) -> None:
        """Report that a request's share is done, unless a successor has to continue it."""
        if not plan.is_left_over():
            self._control.done[0] += 1
            self._conclude(plan.number)

    def failed(self, plan: Plan, error: WorkerError) -> None:
        """Report the failure of a request.

        Raises:
            _WorkerEnds: If a successor is to repeat it.
        """
        self.report_failure(error, plan.number)
        self._plans[plan.number].reports_end = True
        if error.can_be_repeated and self._place.policy.restarts_on_env_errors:
            raise _WorkerEnds
        self._conclude(plan.number)

    def _conclude(self, number: int) -> None:
        if self._plans.pop(number).ends():
            self._send(Done(number))


class _WorkerEnds(Exception):
    """A successor has to continue."""


def _infos(payload: Payload | None, memory: Memory | None) -> tuple[Any, Any, Any]:
    """Return both infos of a request, and by lane the tapes of another worker's episodes."""
    if payload is None or memory is None:
        return {}, {}, {}
    infos: tuple[Any, Any, Any] = unpack(payload, memory)
    return infos
