"""The step loop: the only place where an agent is called on environments.

A ``Rollout`` runs one agent on one ``VecEnv``. A ``Plan`` decides which episode a lane starts
next, which slot of its block the lane writes to, and what happens to a complete chunk. Lanes that a
plan leaves idle begin with the next one, so several plans may run at once. Each step does::

    noise, observations                ->  row t of every lane's slot
    agent(state, observation)          ->  state and outputs into row t, new state
    env.step                           ->  observations of t + 1
    ended lanes: final values into their slots, then the next episode
    full slots:  final values into them, then the next slot of the same episode
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic_ns
from typing import Any

import numpy as np
import torch

from rlpool.agents.agent import Agent
from rlpool.data.storage import NDArray
from rlpool.envs.vec_env import LaneError, Options, VecEnv
from rlpool.errors import Where, WorkerDiedError, WorkerError, WorkerTimeoutError
from rlpool.loop.agent_calls import AgentCalls
from rlpool.loop.agent_driver import AgentFailure
from rlpool.loop.lane_table import LaneTable, SelfRestartingLanes
from rlpool.loop.plan import Lane, Plan, PlanQueue
from rlpool.observe.control import WorkerRecord
from rlpool.record.failures import THE_AGENT, agent_error, env_error
from rlpool.record.tape import actions_of, slot_actions
from rlpool.slots.blocks import StepSpecs


class Rollout:
    """Runs one agent on one batch of environments.

    Args:
        agent: The agent.
        env: The environments.
        worker: Number of the worker, for error messages; ``None`` in the caller's process.
        record: The rollout's record of its activity, read by the caller. By default a new one.
        agent_rows: Number of rows per agent call; by default one per lane.
    """

    def __init__(
        self,
        agent: Agent,
        env: VecEnv,
        worker: int | None = None,
        record: WorkerRecord | None = None,
        agent_rows: int | None = None,
    ) -> None:
        self._env = env
        self._worker = worker
        self._record = record if record is not None else WorkerRecord.private()
        self._record.begin_lanes(env.n_lanes)
        self._calls = AgentCalls(agent, env, self._record, agent_rows)
        self._max_steps = 0 if env.steps_all_lanes else env.max_steps or 0
        kind = LaneTable if env.seeding == "episode" else SelfRestartingLanes
        self._lanes = kind(env, self._calls, self._record, worker)

    @torch.inference_mode()
    def probe(
        self,
        seeds: Sequence[int],
        options: Sequence[Options],
        agent_info: dict[str, NDArray] | None,
        resets: bool = True,
        first: int | None = None,
    ) -> StepSpecs:
        """Determine the keys of a step, as ``AgentCalls.probe``.

        A failed probe has no lasting effect; another one, with other infos, may follow.

        Raises:
            EnvError, AgentError: If the user's code fails, or the actions do not fit the action
                space.
        """
        env, calls = self._env, self._calls
        calls.declare_infos(agent_info or {})
        for key, array in calls.infos.items():
            array[:] = (agent_info or {})[key]
        steps = None
        try:
            each = [seeds[lane % len(seeds)] for lane in range(env.n_lanes)]
            steps = calls.probe(each, options, resets)
        except LaneError as error:
            lane, row = error.lane, error.lane % len(seeds) if first is not None else error.lane
            episode = None if first is None else first + row
            where = Where(self._worker, lane, row, episode, 0, each[lane], options[lane])
            nothing = None if first is None else np.zeros(0)  # no action was taken
            failure = _user_error(error, where, options=options[lane], actions=nothing)
            raise failure from error.__cause__
        finally:
            if steps is None:
                env.forget()
        return steps

    def run(self, queue: PlanQueue) -> None:
        """Run plans until the queue is empty, under ``torch.inference_mode``.

        Lanes with unfinished episodes of a window stay parked and continue in the next one.
        If the user's code fails, the plan of the lane that failed is dropped. Episodes of other
        plans begin again, since their lanes may have made half a step.

        Raises:
            EnvError: If an environment does not repeat its tape.
            BaseException: Any error of ``queue.failed``. In either case all lanes are idle then.
        """
        lanes, is_at_end = self._lanes, False
        try:
            with torch.inference_mode():
                lanes.begin(queue)
                while not is_at_end:
                    try:
                        self._go_on()
                        is_at_end = True
                    except LaneError as error:
                        self._record.end_calls()
                        failed, failure = self._ended_by(error)
                        failure.__cause__ = error.__cause__
                        lanes.begin_again(failed)
                        queue.failed(failed, failure)
        finally:
            if not is_at_end:
                self._record.end_calls()
                lanes.abandon()
            lanes.end()

    def _go_on(self) -> None:
        """Step until no plan is left."""
        lanes, env = self._lanes, self._env
        self._waits_for_all = env.min_ready is None or self._calls.history is not None
        if not lanes.plans:
            lanes.bind_next()
        lanes.fill()
        while True:
            for plan in lanes.plans:
                if plan.cancelled[0]:
                    lanes.drop(plan)
                    break
            all_step = not lanes.idle and not lanes.parked
            if lanes.live and (all_step or not env.steps_all_lanes or not lanes.must_wait()):
                self._step()
                if (lanes.idle or lanes.parked) and lanes.have_news():
                    lanes.fill()
            elif lanes.wait() or lanes.bind_next() is not None:
                lanes.fill()
            elif lanes.plans and env.advance():
                self._record.steps[0] += 1
                lanes.fill()
            elif lanes.plans:
                raise RuntimeError("no lane runs any of the plans, and they are not over")
            else:
                return

    def abandon(self) -> None:
        """Drop all unfinished episodes."""
        self._lanes.abandon()

    # Steps ---------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Step all live lanes together, or only the free ones without waiting for slow ones.

        In either case every lane keeps its row of the batch, its noise and its state, and rows of
        lanes that do not step go to the spare slot. So episodes have the same bits, no matter which
        lanes are ready at the same time.
        """
        lanes, record, plans = self._lanes, self._record, self._lanes.plans
        live = free = stepped = lanes.live
        if self._waits_for_all:
            outputs = self._calls.act(plans, live, are_all=not lanes.failing)
        else:
            free = lanes.free
            outputs = self._calls.act(plans, free, are_all=False) if free else {}
        record.env_ns[0] -= monotonic_ns()
        if self._waits_for_all and not lanes.failing:
            ended = self._env.step_lanes(live, outputs)
        else:
            stepped, ended = self._step_some(free, outputs)
        record.env_ns[0] += monotonic_ns()
        record.n_steps[0] += len(stepped)
        if self._max_steps:
            running = [number for number in stepped if number not in ended]
            over = [n for n in running if lanes.lanes[n].steps + 1 >= self._max_steps]
            self._env.current["truncated"][over] = self._env.current["done"][over] = True
            ended = sorted([*ended, *over])
        for plan in plans:
            all_step = stepped is live
            rows = plan.rows if all_step else plan.rows_of(stepped)
            for target, source in plan.writer.after:
                target[rows] = source
            if all_step:
                np.add(plan.rows, plan.strides, out=plan.rows)
            else:
                plan.rows[stepped] += plan.strides[stepped]
        record.steps[0] += 1
        lanes.steps_until_full -= 1
        if ended or not lanes.steps_until_full:
            lanes.turn_over(ended)

    def _step_some(
        self, free: Sequence[int], outputs: Mapping[str, NDArray]
    ) -> tuple[list[int], list[int]]:
        """Step free lanes, but truncate those whose step is known to fail.

        Returns:
            The lanes that have finished a step, and those whose episodes ended with it.
        """
        env, lanes = self._env, self._lanes
        failing, lanes.failing = lanes.failing, []
        others = [lane for lane in free if lane not in failing]
        if self._waits_for_all:
            stepped = lanes.live
            ended = env.step_lanes(others, outputs) if others else []
        else:
            ready = env.step_some(env.min_ready or 1, others, outputs)
            stepped = sorted([*lanes.finish_steps(others, ready), *failing])
            ended = [lane for lane in stepped if env.current["done"][lane]]
        if failing:
            env.truncate_lanes(failing, outputs)
        return stepped, sorted({*ended, *failing})

    # Failures ------------------------------------------------------------------------------------

    def _ended_by(self, error: LaneError) -> tuple[Plan, WorkerError]:
        """Return the plan that a failure of the user's code ends, and the error to report.

        The agent is called for all lanes at once, so its error names all of the plan's rows in the
        call. If several plans took part, the oldest one ends and the others begin again.
        """
        plans = self._lanes.plans
        numbers = error.lanes if isinstance(error, AgentFailure) else [error.lane]
        lanes = [lane for lane in self._lanes.running if lane.number in numbers]
        if not lanes:
            return plans[0], _user_error(error, Where(self._worker, error.lane))
        plan = next(each for each in plans if each in [lane.plan for lane in lanes])
        first, *others = [lane for lane in lanes if lane.plan is plan]
        failure = self._failure(error, first)
        if others:
            rows = ", ".join(str(lane.row) for lane in [first, *others])
            failure = failure.reworded(what=f"{failure.what} (in one call for the rows {rows})")
        return plan, failure

    def _failure(self, error: LaneError, lane: Lane) -> WorkerError:
        """Make the error for a failure of the user's code in a lane's episode."""
        env, plan = self._env, lane.plan
        used = env.seed_used(lane.number)
        seed = lane.seed if used is None else used
        episode = lane.episode if plan.numbers_episodes else None
        place = lane.number, lane.row, episode, lane.steps, seed, lane.options
        where = Where(self._worker, *place)
        if env.seeding != "episode":
            return _user_error(error, where)
        tape = lane.tape_so_far
        stop = plan.steps_in_slot(lane) + (error.call == "step")
        here = slot_actions(plan.layout, plan.arrays, lane.slot, lane.start, stop)
        actions = None if tape.why_lost else actions_of(tape.actions, here)
        return _user_error(error, where, options=lane.options, actions=actions)


def _user_error(error: LaneError, where: Where, **episode: Any) -> WorkerError:
    """Make the error for a failure of the environment or the agent, as ``env_error``."""
    if isinstance(error, WorkerDiedError | WorkerTimeoutError):  # a worker of a manager
        return error.reworded(where=where._replace(worker=error.where.worker), **episode)
    if not isinstance(error, AgentFailure):
        return env_error(error, where, **episode)
    who = THE_AGENT if error.call == "agent" else "agent.initial_state"
    return agent_error(error.__cause__ or error, where, who, **episode)
