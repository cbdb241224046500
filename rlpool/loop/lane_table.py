"""States of a rollout's lanes: idle, running an episode, parked, restarting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from time import monotonic_ns
from weakref import WeakKeyDictionary

from rlpool.data.specs import row_specs
from rlpool.envs.vec_env import VecEnv
from rlpool.errors import NotRepeatedError, Where
from rlpool.loop.agent_calls import AgentCalls
from rlpool.loop.plan import Lane, Plan, PlanQueue, SlotWriter, State, by_number
from rlpool.observe.control import WorkerRecord
from rlpool.record.repeat import take_over
from rlpool.record.tape import MOST_BYTES, REWARD, Tape, slot_steps
from rlpool.slots.blocks import Arrays

_UNTIL_FULL = attrgetter("steps_until_full")
_RESET_WITH = attrgetter("number", "seed", "options")


class LaneTable:
    """The lanes of a rollout, and their transitions between episodes and slots.

    States of a lane::

        idle --begin--> live --leave the slot at the end of the episode--> idle
                         |  ^
            leave the full slot, enter the next one
                         v  |
                        parked

    Plans that fit together run at the same time, each with a block of its own.

    Args:
        env: The environments.
        calls: The agent's calls.
        record: The record of the lanes' activity.
        worker: Number of the worker, for error messages.

    Attributes:
        plans: The running plans, oldest first.
        lanes: All lanes.
        idle: The idle lanes, ascending.
        parked: The parked lanes, ascending.
        live: Numbers of the lanes that step, ascending.
        has_failing: Whether a step of any episode is known to fail.
        failing: Numbers of the lanes whose next step is known to fail.
        steps_until_full: Lower bound of the steps until a slot is full; 0 if unknown.
    """

    def __init__(
        self, env: VecEnv, calls: AgentCalls, record: WorkerRecord, worker: int | None
    ) -> None:
        self._env, self._calls, self._record, self._worker = env, calls, record, worker
        self._n_lanes = env.n_lanes
        self.plans: list[Plan] = []
        self._postponed: Plan | None = None  # follows when all running plans are over
        self._writers: WeakKeyDictionary[Arrays, SlotWriter] = WeakKeyDictionary()
        self.lanes = [Lane(number) for number in range(env.n_lanes)]
        self.has_failing = False
        self.failing: list[int] = []

    def begin(self, queue: PlanQueue) -> None:
        """Begin to take plans from a queue; no lane is live before the first plan."""
        self._queue = queue
        if self._calls.bind():
            self._writers.clear()  # other arrays from now on
        self._note_waiting()
        self._at_stock = self.idle, self.parked
        self.live: list[int] = []
        self.steps_until_full = 0
        self._could_begin = True  # whether an idle lane would take an episode of another plan

    def end(self) -> None:
        """Forget the queue, which may refer to the rollout, and the rest of its plans."""
        self.plans.clear()
        self._postponed = None
        self.has_failing = False
        self.__dict__.pop("_queue", None)  # an interrupt may have come before there was one

    def _note_waiting(self) -> None:
        """Find the idle and the parked lanes."""
        self.idle = [lane for lane in self.lanes if lane.state is State.IDLE]
        self.parked = [lane for lane in self.lanes if lane.state is State.PARKED]

    @property
    def running(self) -> list[Lane]:
        """The lanes that are not idle."""
        return [lane for lane in self.lanes if lane.state is not State.IDLE]

    # Plans ---------------------------------------------------------------------------------------

    def bind_next(self) -> Plan | None:
        """Begin another plan, if there is one that fits the running ones.

        A batch has one set of keys, so ``agent_info`` with different keys has to wait, as does a
        plan that begins with a reset of all lanes.
        """
        plan = self._postponed or self._queue.next_plan()
        self._postponed = None
        if plan is None:
            return None
        infos, is_first = plan.agent_info, not self.plans
        if not is_first and (
            plan.resets_all_lanes or row_specs(infos) != row_specs(self._calls.infos)
        ):
            self._postponed = plan
            return None
        if plan.resets_all_lanes:
            self._env.reset_all_next()
        plan.bind(self._writer_of(plan), self._n_lanes, self._record)
        self.plans.append(plan)
        if is_first:
            self._calls.declare_infos(infos)
            self._continue_with(plan)
        self.has_failing = self.has_failing or plan.has_failing
        if plan.tapes:
            self._take_over(plan)
        return plan

    def _writer_of(self, plan: Plan) -> SlotWriter:
        """Return the writer of a plan's block; plans with the same block share it."""
        writer = self._writers.get(plan.arrays)
        if writer is None:
            sources = self._calls.current, self._calls.driver.state
            writer = self._writers[plan.arrays] = SlotWriter(plan.layout, plan.arrays, *sources)
        return writer

    def _take_over(self, plan: Plan) -> None:
        """Restore a plan's episodes that another worker began; their lanes are then parked.

        Raises:
            EnvError: If an environment does not repeat its episode.
        """
        env = self._env
        able: dict[int, Tape] = {}
        wheres: dict[int, Where] = {}
        for number, known in plan.tapes.items():
            lane = self.lanes[number]
            plan.resume(lane, known.n_restarts)
            lane.state, lane.options, lane.steps_before = State.PARKED, known.options, known.n_steps
            lane.tape = replace(known, seed=lane.seed)
            here = Where(self._worker, number, lane.row, None, 0, lane.seed, lane.options)
            if _can_begin(lane, lane.tape, here):
                able[number], wheres[number] = lane.tape, here
            else:
                env.begin_lanes([number])
        take_over(env, able, wheres, self._record.steps)
        lanes = [self.lanes[number] for number in plan.tapes]
        self._calls.begin(list(plan.tapes), lanes)
        for number, known in plan.tapes.items():
            if known.n_steps:
                self._calls.driver.resume(number, known.state)
        self._note_waiting()

    def _continue_with(self, plan: Plan) -> None:
        """Continue parked lanes in the next window, which may have other infos."""
        for lane in self.parked:
            lane.plan = plan
            if lane.fails_at is not None:
                self.has_failing = True  # its reset failed after the last step of a window
        self._calls.show_infos(self.parked)
        # Their first step has the infos and the parameters of this window.
        if new := [lane for lane in self.parked if not lane.steps_before]:
            self._calls.begin([lane.number for lane in new], new)

    def have_news(self) -> bool:
        """Whether waiting lanes may get an episode or a slot."""
        have_slots = False
        for plan in self.plans:
            have_slots |= plan.has_news()
        is_asking = self._could_begin and self._postponed is None
        return have_slots or (is_asking and self._queue.has_next())

    def wait(self) -> bool:
        """Wait for slots, when no lane can step; False if there is nothing to wait for."""
        if not self.plans:
            return False
        self._record.begin_wait()
        # Ask all plans: one that has slots by now may lack lanes, which another one holds up.
        have_waited = [plan.wait() for plan in self.plans]
        self._record.end_wait()
        return any(have_waited)

    def must_wait(self) -> bool:
        """Whether a step of all lanes would step one that lacks a slot."""
        lack = any(plan.lacks_slots and plan.resets_all_lanes for plan in self.plans)
        return lack or bool(self.parked)

    def drop(self, cancelled: Plan) -> None:
        """Drop a cancelled plan; its lanes get other work."""
        for lane in self.running:
            if lane.plan is cancelled:
                cancelled.abandon(lane)
        self._note_waiting()
        self._end_plan(cancelled)
        self.fill()

    def _end_plan(self, plan: Plan) -> None:
        """Drop a plan that no lane runs any more."""
        self.plans.remove(plan)
        self._queue.done(plan)

    def begin_again(self, failed: Plan) -> None:
        """Leave all slots: a plan has failed, and episodes of others begin again."""
        self.plans.remove(failed)
        for lane in self.running:
            slot = None if lane.state is State.PARKED else lane.slot
            lane.plan.abandon(lane)
            if lane.plan is not failed:
                lane.plan.take_back(lane, slot)
        self._clear()

    def abandon(self) -> None:
        """Drop all unfinished episodes."""
        for lane in self.running:
            if lane.plan in self.plans:  # otherwise its block is no longer ours
                lane.plan.abandon(lane)
        self._clear()

    def _clear(self) -> None:
        """Make all lanes idle."""
        for lane in self.lanes:
            lane.state = State.IDLE
        self._note_waiting()

    # Unfinished steps ----------------------------------------------------------------------------

    @property
    def free(self) -> list[int]:
        """The live lanes that can step, because they have finished their last step."""
        return [lane for lane in self.live if self.lanes[lane].state is State.LIVE]

    def finish_steps(self, begun: Sequence[int], ready: Sequence[int]) -> list[int]:
        """Record the lanes that began a step, and those that finished theirs.

        Returns:
            The lanes that finished, except those still stepping for a cancelled plan.
        """
        for lane in begun:
            self.lanes[lane].state = State.STEPPING
        mine = {lane.number for lane in self.lanes if lane.state is State.STEPPING}
        finished = [lane for lane in ready if lane in mine]
        for lane in finished:
            self.lanes[lane].state = State.LIVE
        for lane in mine.difference(finished):
            self._record.first_step[lane] += 1  # this step is still to be made
        return finished

    # Slots and episodes --------------------------------------------------------------------------

    def turn_over(self, ended: Sequence[int]) -> None:
        """Complete full slots and ended episodes, and give their lanes new work."""
        if ended:
            lanes = list(map(self.lanes.__getitem__, ended))
            if lanes[0].plan.restarts:
                self._restart(lanes)
            else:
                for lane in lanes:
                    lane.plan.leave(lane, is_last=True)
                self.idle = self.idle + lanes
        if not self.steps_until_full:
            for plan in self.plans:
                if full := self._full_lanes(plan):
                    self._record_slots(full)
                    for lane in full:
                        plan.leave(lane, is_last=False)
                    self.parked = self.parked + full
        for plan in self.plans:
            plan.flush()
        self.fill()

    def _full_lanes(self, plan: Plan) -> list[Lane]:
        """Return the lanes of a plan that leave their slots now, in the middle of episodes."""
        return plan.full_lanes(self.lanes)

    def _record_slots(self, lanes: Sequence[Lane]) -> None:
        """Record full slots on the tapes of one plan's lanes, before they leave them."""
        if self._env.seeding != "episode":
            return  # such episodes cannot be repeated
        plan = lanes[0].plan
        last_rewards = self._env.current[REWARD][[lane.number for lane in lanes]]
        slots = [lane.slot for lane in lanes]
        steps = slot_steps(plan.layout, plan.arrays, slots, last_rewards)
        for row, lane in enumerate(lanes):
            if lane.start < plan.layout.n_timesteps:
                chunk = {key: array[row, lane.start :] for key, array in steps.items()}
                lane.tape_so_far.add(chunk, MOST_BYTES // self._n_lanes)

    def fill(self) -> None:
        """Give waiting lanes an episode or a slot, if there is any."""
        starting: list[Lane] = []
        # Every lane is asked about every plan, since only then it is known when a plan is over.
        while (could_begin := self._deal(starting)) and self.bind_next() is not None:
            pass
        self._could_begin = could_begin
        if starting:
            starting.sort(key=by_number)  # plans may have been asked alternately
            self._begin_episodes(starting)
        for plan in list(self.plans):
            if not plan.n_writing and plan.is_over():
                self._end_plan(plan)
        # Usually the lanes that ended start again. Then nothing else changes, and
        # steps_until_full remains a lower bound.
        if (self.idle, self.parked) != self._at_stock or not self.steps_until_full:
            self._take_stock()

    def _deal(self, starting: list[Lane]) -> bool:
        """Distribute episodes and slots to waiting lanes; adds new episodes' lanes to ``starting``.

        Lanes that have waited before come first, and parked lanes before all others: a slot that
        one of them lacks may hold up all lanes.

        Returns:
            Whether some lane could begin another episode.
        """
        if self.parked:
            self._enter_next_slots()
        waiting = self.idle
        for plan in self.plans:
            if not waiting or plan.is_dealt:
                continue
            others: list[Lane] = []
            for lane in waiting:
                (starting if plan.next_episode(lane) else others).append(lane)
            waiting = others
        self.idle = sorted(waiting, key=by_number)
        return bool(waiting)

    def _enter_next_slots(self) -> None:
        """Continue parked lanes in their next slots, if there are any."""
        noise = self._calls.noise
        for lane in self.parked:
            if lane.plan.next_slot(lane):
                if noise is not None and lane.noise is not None:
                    noise.start(lane.number, lane.noise, lane.steps_before)
                lane.plan.enter(lane)
        parked = [lane for lane in self.parked if lane.state is State.PARKED]
        self.parked = sorted(parked, key=by_number)

    def _restart(self, lanes: Sequence[Lane]) -> None:
        """Start the next episodes of lanes that stay in their slots."""
        lanes[0].plan.restart_in_slots(lanes)
        self._begin_episodes(lanes)

    def _begin_episodes(self, lanes: Sequence[Lane]) -> None:
        """Reset lanes, ascending, and begin the agent's episodes there."""
        calls, record = self._calls, self._record
        numbers, able = list(map(by_number, lanes)), lanes
        record.env_ns[0] -= monotonic_ns()
        if self.has_failing:
            self.steps_until_full = 0  # take stock
            able = [lane for lane in lanes if lane.fails_at != -1]
            self._env.begin_lanes([lane.number for lane in lanes if lane.fails_at == -1])
        if able:
            self._env.reset_lanes(*map(list, zip(*map(_RESET_WITH, able), strict=True)))
        record.env_ns[0] += monotonic_ns()
        calls.begin(numbers, lanes)

    def _take_stock(self) -> None:
        """Find the lanes that step, and the number of steps until the first slot is full."""
        self._at_stock = self.idle, self.parked
        waiting = {*self.idle, *self.parked}
        self.live = [lane.number for lane in self.lanes if lane not in waiting]
        self.steps_until_full = min(map(_UNTIL_FULL, self.plans), default=0)
        if self.has_failing:
            self._find_failing()

    def _find_failing(self) -> None:
        """Find the lanes whose next step is known to fail, and the steps until others get there."""
        self.failing = []
        for number in self.live:
            lane = self.lanes[number]
            if lane.fails_at is not None:
                n_left = max(lane.fails_at, 0) - lane.steps
                if n_left <= 0:
                    self.failing.append(number)
                else:
                    self.steps_until_full = min(self.steps_until_full, n_left)


class SelfRestartingLanes(LaneTable):
    """A ``LaneTable`` of a vector environment whose lanes restart by themselves, in any step.

    An idle lane begins an episode once it has restarted. In a window, a lane whose episode has
    ended stays in its slot. The steps until it has restarted do not belong to an episode, and are
    overwritten.
    """

    _restarting: Sequence[Lane] = ()  # lanes of a window whose next episode has not begun yet

    def have_news(self) -> bool:
        """As ``LaneTable.have_news``; also when an idle lane has restarted."""
        is_dealt = all(plan.is_dealt for plan in self.plans)
        return super().have_news() or (not is_dealt and bool(self._ready(self.idle)))

    def _ready(self, lanes: Sequence[Lane]) -> list[Lane]:
        """Return those of the lanes that are at the start of an episode, ascending."""
        ready = self._env.ready_lanes(sorted(map(by_number, lanes)))
        return list(map(self.lanes.__getitem__, ready))

    def drop(self, cancelled: Plan) -> None:
        """As ``LaneTable.drop``; also forgets restarting lanes."""
        self._restarting = [lane for lane in self._restarting if lane.plan is not cancelled]
        super().drop(cancelled)

    def _clear(self) -> None:
        super()._clear()
        self._restarting = ()

    def turn_over(self, ended: Sequence[int]) -> None:
        """As ``LaneTable.turn_over``; first handles restarting lanes."""
        restarting, self._restarting = self._restarting, ()
        for lane in restarting:
            lane.plan.rows[lane.number] -= 1  # its step did not belong to an episode
        if restarting:
            self._restart(restarting)
        super().turn_over(ended)

    def _restart(self, lanes: Sequence[Lane]) -> None:
        ready = self._ready(lanes)
        if len(ready) < len(lanes):
            others = [lane for lane in lanes if lane not in ready]
            self._restarting = [*self._restarting, *others]
            self.steps_until_full = 0  # take stock
        if ready:
            super()._restart(ready)

    def _full_lanes(self, plan: Plan) -> list[Lane]:
        """Return all lanes: a window also ends for lanes that restarted and made fewer steps."""
        full = super()._full_lanes(plan)
        if not full or not plan.restarts:
            return full
        live = [lane for lane in self.running if lane.number in self.live]
        for lane in live:
            # The step in which a lane restarts may have been written already.
            plan.writer.abandon(lane.slot, plan.steps_in_slot(lane))
        return live

    def _deal(self, starting: list[Lane]) -> bool:
        ready = self._ready(self.idle)
        others = set(self.idle).difference(ready)
        self.idle = ready
        could_begin = super()._deal(starting) or not self.plans
        self.idle = sorted(others.union(self.idle), key=by_number)
        return could_begin

    def _take_stock(self) -> None:
        super()._take_stock()
        if self._restarting:
            self.steps_until_full = 1  # check after every step which lanes have restarted


def _can_begin(lane: Lane, tape: Tape, where: Where) -> bool:
    """Whether a lane can be reset to repeat its tape: not if its reset is known to fail.

    Raises:
        NotRepeatedError: If the tape has steps, and one of them or the reset is known to fail.
    """
    fails_at = lane.fails_at
    if fails_at is None or fails_at >= tape.n_steps:
        return True
    if tape.n_steps:
        call = f"step {fails_at}" if fails_at >= 0 else "its reset or its first step"
        raise NotRepeatedError(
            f"the environment did not repeat an episode: {call} fails now, but succeeded before",
            where=where._replace(step=max(fails_at, 0)),
            fix="the log has the failure: the same seed and actions must have the same effect in "
            "another process",
        )
    return False
