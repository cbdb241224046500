"""The plans that the lanes of a rollout run, each with its block."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from rlpool.envs.vec_env import VecEnv
from rlpool.loop.active_plan import ActivePlan
from rlpool.loop.agent_calls import AgentCalls
from rlpool.loop.plan import Plan, PlanQueue
from rlpool.observe.control import WorkerRecord
from rlpool.slots.blocks import Arrays
from rlpool.slots.writer import SlotWriter


class ActivePlans:
    """Plans that fit together, the queue that they come from, and what writes into their blocks.

    Args:
        env: The environments.
        calls: The agent's calls.
        record: Is told what lanes do.

    Attributes:
        active: The plans that run, the oldest first.
        postponed: A plan that follows when all of these are over.
        queue: Where plans come from, set by the rollout for as long as it runs.
    """

    queue: PlanQueue

    def __init__(self, env: VecEnv, calls: AgentCalls, record: WorkerRecord) -> None:
        self._env, self._calls, self._record = env, calls, record
        self.active: list[ActivePlan] = []
        self.postponed: Plan | None = None
        self._writers: WeakKeyDictionary[Arrays, SlotWriter] = WeakKeyDictionary()

    def end(self) -> None:
        """Forget the queue, which may refer to the rollout, and what is left of its plans."""
        self.active.clear()
        self.postponed = None
        del self.queue

    def forget_writers(self) -> None:
        """Write from other arrays from now on."""
        self._writers.clear()

    def bind(self, plan: Plan) -> ActivePlan:
        """Let lanes run a plan."""
        active = ActivePlan(plan, self._writer_of(plan), self._env.n_lanes, self._record)
        self.active.append(active)
        return active

    def _writer_of(self, plan: Plan) -> SlotWriter:
        """What writes into a plan's block; the next plan with the same block gets the same."""
        writer = self._writers.get(plan.arrays)
        if writer is None:
            sources = self._calls.current, self._calls.driver.state
            writer = self._writers[plan.arrays] = SlotWriter(plan.layout, plan.arrays, *sources)
        return writer

    def wait(self) -> bool:
        """Wait for slots, when no lane can step; False if there is nothing to wait for."""
        if not self.active:
            return False
        self._record.begin_wait()
        has_waited = any(active.plan.wait() for active in self.active)
        self._record.end_wait()
        return has_waited

    def drop(self, active: ActivePlan) -> None:
        """Drop a plan of which lanes run nothing any more."""
        self.active.remove(active)
        self.queue.done(active.plan)

    def drop_finished(self) -> None:
        """Drop plans of which nothing is left to do."""
        for active in list(self.active):
            if not active.n_lanes and active.plan.is_over():
                self.drop(active)
