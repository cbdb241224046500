"""What each lane of a rollout does: idle, running an episode, parked, restarting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from time import monotonic_ns
from weakref import WeakKeyDictionary

from rlpool.data.specs import row_specs
from rlpool.data.storage import NDArray
from rlpool.envs.vec_env import Options, VecEnv
from rlpool.errors import NotRepeatedError, Where
from rlpool.loop.active_plan import ActivePlan, Lane, State, by_number
from rlpool.loop.agent_calls import AgentCalls
from rlpool.loop.agent_driver import rows_repeating
from rlpool.loop.plan import Chunk, Episode, Plan, PlanQueue
from rlpool.observe.control import WorkerRecord
from rlpool.record.repeat import take_over
from rlpool.record.tape import MOST_BYTES, REWARD, Tape, slot_steps
from rlpool.slots.blocks import Arrays
from rlpool.slots.writer import SlotWriter

_UNTIL_FULL = attrgetter("steps_until_full")


class LaneTable:
    """The lanes of a rollout, and how they go from one episode and slot to the next.

    Lanes do::

        idle --begin--> live --leave the slot at the end of the episode--> idle
                         |  ^
            leave the full slot, enter the next one
                         v  |
                        parked

    Plans that fit together run at the same time, each with a block of its own.

    Args:
        env: The environments.
        calls: The agent's calls.
        record: Where it is noted what the lanes do.
        worker: Number of the worker, for error messages.

    Attributes:
        plans: The plans that run, the oldest first.
        running: Lane to what it runs, of those that are not idle.
        idle: The lanes that are, ascending.
        parked: What those run that are parked, likewise.
        live: The lanes that step, ascending.
        live_rows: These rows, and in place of all others the first; ``None`` if no lane is live.
        gives_up: Whether a step of any episode is known to fail.
        giving_up: The lanes whose next step is.
        steps_until_full: Lower bound of the steps until a slot is full; 0 if it is not known.
    """

    def __init__(self, env: VecEnv, calls: AgentCalls, record: WorkerRecord, worker: int) -> None:
        self._env, self._calls, self._record, self._worker = env, calls, record, worker
        self._n_lanes = env.n_lanes
        self.plans: list[ActivePlan] = []
        self._postponed: Plan | None = None  # follows when all of these are over
        self._writers: WeakKeyDictionary[Arrays, SlotWriter] = WeakKeyDictionary()
        self.running: dict[int, Lane] = {}
        self.gives_up = False
        self.giving_up: list[int] = []

    def begin(self, queue: PlanQueue) -> None:
        """Take plans from a queue; no lane is live until there is one."""
        self._queue = queue
        if self._calls.bind():
            self._writers.clear()  # other arrays from now on
        self._note_waiting()
        self._at_stock = self.idle, self.parked
        self.live: list[int] = []
        self.live_rows: NDArray | None = None
        self.steps_until_full = 0

    def end(self) -> None:
        """Forget the queue, which may refer to the rollout, and what is left of its plans."""
        self.plans.clear()
        self._postponed = None
        self.gives_up = False
        self.__dict__.pop("_queue", None)  # an interrupt may have come before there was one

    def _note_waiting(self) -> None:
        """Find the lanes that are idle, and those that are parked."""
        self.idle = [lane for lane in range(self._n_lanes) if lane not in self.running]
        parked = [lane for lane in self.running.values() if lane.state is State.PARKED]
        self.parked = sorted(parked, key=by_number)

    # Plans ---------------------------------------------------------------------------------------

    def bind_next(self) -> ActivePlan | None:
        """Begin a further plan, if there is one that fits to those that run.

        A batch has one set of keys, so ``agent_info`` with others has to wait; and so has a plan
        that begins with a reset of all lanes.
        """
        plan = self._postponed or self._queue.next_plan()
        self._postponed = None
        if plan is None:
            return None
        infos, is_first = plan.agent_info or {}, not self.plans
        keys = self._calls.infos
        if not is_first and (plan.resets_all_lanes or row_specs(infos) != row_specs(keys.arrays)):
            self._postponed = plan
            return None
        if plan.resets_all_lanes:
            self._env.reset_all_next()
        active = ActivePlan(plan, self._writer_of(plan), self._n_lanes, self._record)
        self.plans.append(active)
        if is_first:
            keys.declare(infos)
            self._continue_with(active)
        self.gives_up = self.gives_up or plan.gives_up
        if plan.tapes:
            self._take_over(active)
        return active

    def _writer_of(self, plan: Plan) -> SlotWriter:
        """What writes into a plan's block; the next plan with the same block gets the same."""
        writer = self._writers.get(plan.arrays)
        if writer is None:
            sources = self._calls.current, self._calls.driver.state
            writer = self._writers[plan.arrays] = SlotWriter(plan.layout, plan.arrays, *sources)
        return writer

    def _take_over(self, active: ActivePlan) -> None:
        """Bring lanes to where another worker was with a plan's episodes; they are parked.

        Raises:
            EnvError: If an environment does not repeat what it did.
        """
        plan, env = active.plan, self._env
        able: dict[int, Tape] = {}
        wheres: dict[int, Where] = {}
        for number, known in plan.tapes.items():
            episode = replace(plan.resumed(number, known.n_restarts), options=known.options)
            tape, n_steps = replace(known, seed=episode.seed), known.n_steps
            lane = Lane(number, episode, active, episode.slot, steps_before=n_steps, tape=tape)
            self.running[number] = lane
            seed = tape.seed, tape.options
            here = Where(self._worker, number, episode.number, None, 0, *seed)
            if _can_begin(episode, tape, here):
                able[number], wheres[number] = tape, here
            else:
                env.begin_lanes([number])
        take_over(env, able, wheres, self._record.steps)
        lanes = [self.running[number] for number in plan.tapes]
        self._show_infos(lanes)
        self._calls.begin([lane.number for lane in lanes], [lane.episode for lane in lanes])
        for number, known in plan.tapes.items():
            if known.n_steps:
                self._calls.driver.resume(number, known.state)
        self._note_waiting()

    def _continue_with(self, active: ActivePlan) -> None:
        """Let lanes that are parked go on with the next window, which may have other infos."""
        for lane in self.parked:
            lane.active = active
            if lane.episode.gives_up_at is not None:
                self.gives_up = True  # its reset has failed, behind the last step of a window
        self._show_infos(self.parked)
        # Their first step has the infos and the parameters of this window.
        if new := [lane for lane in self.parked if not lane.steps_before]:
            self._calls.begin([lane.number for lane in new], [lane.episode for lane in new])

    def _show_infos(self, lanes: Sequence[Lane]) -> None:
        """Show the agent the ``agent_info`` of the episodes of lanes."""
        for active in self.plans:
            rows: dict[int, int] = {}
            for lane in lanes:
                if lane.active is active:
                    rows[lane.number] = lane.episode.number
            if rows:
                self._calls.infos.show(active.plan.agent_info or {}, rows)

    def have_news(self) -> bool:
        """Whether lanes that wait may get something."""
        have_slots = False
        for active in self.plans:
            have_slots |= active.plan.has_news()
        return have_slots or (self._postponed is None and self._queue.has_next())

    def wait(self) -> bool:
        """Wait for slots, when no lane can step; False if there is nothing to wait for."""
        if not self.plans:
            return False
        self._record.begin_wait()
        has_waited = any(active.plan.wait() for active in self.plans)
        self._record.end_wait()
        return has_waited

    def must_wait(self) -> bool:
        """Whether a step of all lanes would step one that lacks a slot."""
        together = [plan.plan for plan in self.plans if plan.plan.resets_all_lanes]
        return any(plan.lacks_slots for plan in together) or bool(self.parked)

    def drop(self, cancelled: ActivePlan) -> None:
        """Drop a cancelled plan; its lanes get other work."""
        for lane in list(self.running.values()):
            if lane.active is cancelled:
                cancelled.abandon(lane)
                del self.running[lane.number]
        self._note_waiting()
        self._end_plan(cancelled)
        self.fill()

    def _end_plan(self, active: ActivePlan) -> None:
        """Drop a plan of which lanes run nothing any more."""
        self.plans.remove(active)
        self._queue.done(active.plan)

    def begin_again(self, failed: ActivePlan) -> None:
        """Leave all slots: a plan has failed, and episodes of others begin again."""
        self.plans.remove(failed)
        for lane in self.running.values():
            slot = None if lane.state is State.PARKED else lane.slot
            lane.active.abandon(lane)
            if lane.active is not failed:
                lane.active.plan.take_back(lane.number, lane.episode, slot, lane.chunk)
        self._clear()

    def abandon(self) -> None:
        """Drop all unfinished episodes."""
        for lane in self.running.values():
            if lane.active in self.plans:  # otherwise its block is no longer ours
                lane.active.abandon(lane)
        self._clear()

    def _clear(self) -> None:
        """Let all lanes be idle."""
        self.running.clear()
        self._note_waiting()

    # Steps that are not finished -----------------------------------------------------------------

    @property
    def free(self) -> list[int]:
        """The live lanes that can take a step: those whose last one is finished."""
        return [lane for lane in self.live if self.running[lane].state is State.LIVE]

    def finish_steps(self, begun: Sequence[int], ready: Sequence[int]) -> list[int]:
        """Take note of steps that were begun, and of the lanes that have finished theirs.

        Returns:
            The latter. A lane may still be stepping for a cancelled plan: it is not among them.
        """
        for lane in begun:
            self.running[lane].state = State.STEPPING
        mine = {n for n, lane in self.running.items() if lane.state is State.STEPPING}
        finished = [lane for lane in ready if lane in mine]
        for lane in finished:
            self.running[lane].state = State.LIVE
        self._record.first_steps[list(mine.difference(finished))] += 1  # has yet to be made
        return finished

    # Slots and episodes --------------------------------------------------------------------------

    def turn_over(self, ended: Sequence[int]) -> None:
        """Complete full slots and ended episodes, and give their lanes new work."""
        if ended:
            lanes: list[Lane] = []
            for number in ended:
                lanes.append(self.running[number])  # noqa: PERF401  (one call less per step)
            if lanes[0].active.restarts:
                self._restart(lanes)
            else:
                self._leave_slots(lanes, is_last=True)
        if not self.steps_until_full:
            for active in self.plans:
                if full := self._full_lanes(active):
                    self._leave_slots(full, is_last=False)
        for active in self.plans:
            active.plan.flush()
        self.fill()

    def _full_lanes(self, active: ActivePlan) -> list[Lane]:
        """The lanes of a plan that leave their slots now, in the middle of episodes."""
        return active.full_lanes(self.running.values())

    def _leave_slots(self, lanes: Sequence[Lane], is_last: bool) -> None:
        """Complete slots; their lanes become idle, or parked if the episodes continue."""
        active_plans = self.plans
        for active in active_plans:
            mine = lanes
            if len(active_plans) > 1:
                mine = [lane for lane in lanes if lane.active is active]
                if not mine:
                    continue
            chunks: list[Chunk] = []
            for lane in mine:
                chunk = lane.episode.number, lane.slot, lane.chunk, is_last
                chunks.append(chunk)
            if not is_last:
                self._record_slots(mine)
            active.leave_slots(mine, is_last)
            if is_last:
                numbers: list[int] = []
                for lane in mine:
                    numbers.append(lane.number)
                    del self.running[lane.number]
                self.idle = self.idle + numbers
            else:
                self.parked = [*self.parked, *mine]
            active.plan.take_chunks(chunks)

    def _record_slots(self, lanes: Sequence[Lane]) -> None:
        """Put full slots on the tapes of lanes of one plan, before they leave them."""
        if self._env.seeding != "episode":
            return  # such episodes cannot be repeated
        plan = lanes[0].active.plan
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
        self._deal(starting)
        # Every lane is asked about every plan: only then it is known when a plan is over.
        while self.idle and self.bind_next() is not None:
            self._deal(starting)
        if starting:
            starting.sort(key=by_number)  # plans may have been asked in turns
            self._begin_episodes(starting)
        for active in list(self.plans):
            if not active.n_lanes and active.plan.is_over():
                self._end_plan(active)
        # Usually the lanes that ended start again. Then nothing else changes, and
        # steps_until_full remains a lower bound.
        if (self.idle, self.parked) != self._at_stock or not self.steps_until_full:
            self._take_stock()

    def _deal(self, starting: list[Lane]) -> None:
        """Deal out what there is to waiting lanes; notes those that start an episode.

        Lanes that have waited before come first, and parked lanes before all others: a slot that
        one of them lacks may hold up everybody.
        """
        if self.parked:
            self._enter_next_slots()
        for active in self.plans if self.idle else ():
            episodes = active.plan.next_episodes(self.idle)
            if not episodes:
                continue
            begun: list[Lane] = []
            for number, episode in episodes.items():
                self.running[number] = lane = Lane(number, episode, active, episode.slot)
                begun.append(lane)
            active.enter_slots(begun)
            starting += begun
            if len(begun) == len(self.idle):
                self.idle = []
                break  # usually: every lane that ended begins again
            self.idle = [lane for lane in self.idle if lane not in episodes]
        self.idle = sorted(self.idle)

    def _enter_next_slots(self) -> None:
        """Let parked lanes go on in their next slots, if there are any."""
        noise = self._calls.noise
        for active in self.plans:
            mine = {lane.number: lane for lane in self.parked if lane.active is active}
            slots = active.plan.next_slots(list(mine)) if mine else {}
            for number, slot in slots.items():
                lane = mine[number]
                lane.slot = slot
                if noise is not None and lane.episode.noise is not None:
                    noise.start(number, lane.episode.noise, lane.steps_before)
            if slots:
                active.enter_slots([mine[number] for number in slots])
                self.parked = [lane for lane in self.parked if lane.number not in slots]
        self.parked = sorted(self.parked, key=by_number)

    def _restart(self, lanes: Sequence[Lane]) -> None:
        """Start the next episodes of lanes that stay in their slots."""
        lanes[0].active.restart_in_slots(lanes)
        self._begin_episodes(lanes)

    def _begin_episodes(self, lanes: Sequence[Lane]) -> None:
        """Reset lanes, ascending, and let the agent begin there."""
        calls, record = self._calls, self._record
        numbers: list[int] = []
        episodes: list[Episode] = []
        able: list[int] = []  # whose reset is not known to fail
        seeds: list[int] = []
        options: list[Options] = []
        for lane in lanes:
            episode = lane.episode
            numbers.append(lane.number)
            episodes.append(episode)
            if episode.gives_up_at != -1:
                able.append(lane.number)
                seeds.append(episode.seed)
                options.append(episode.options)
        record.env_ns[0] -= monotonic_ns()
        if self.gives_up:
            self.steps_until_full = 0  # take stock
            self._env.begin_lanes([lane for lane in numbers if lane not in able])
        if able:
            self._env.reset_lanes(able, seeds, options)
        record.env_ns[0] += monotonic_ns()
        if calls.infos.arrays:
            self._show_infos(lanes)
        calls.begin(numbers, episodes)

    def _take_stock(self) -> None:
        """Find the lanes that step, and the number of steps until the first slot is full."""
        self._at_stock = self.idle, self.parked
        live = set(range(self._n_lanes)).difference(self.idle)
        for lane in self.parked:
            live.discard(lane.number)
        self.live = sorted(live)
        self.live_rows = rows_repeating(self.live, self._n_lanes) if self.live else None
        self.steps_until_full = min(map(_UNTIL_FULL, self.plans), default=0)
        if self.gives_up:
            self._find_given_up()

    def _find_given_up(self) -> None:
        """Find the lanes whose next step is known to fail, and when others get there."""
        self.giving_up = []
        for number in self.live:
            lane = self.running[number]
            if lane.episode.gives_up_at is not None:
                n_left = max(lane.episode.gives_up_at, 0) - lane.steps
                if n_left <= 0:
                    self.giving_up.append(number)
                else:
                    self.steps_until_full = min(self.steps_until_full, n_left)


class SelfRestartingLanes(LaneTable):
    """A ``LaneTable`` of a vector environment whose lanes restart when they like, in any step.

    An idle lane begins an episode once it has restarted. In a window, a lane whose episode has
    ended stays in its slot; the steps until it has restarted belong to no episode, and the lane
    writes over them.
    """

    _restarting: Sequence[Lane] = ()  # lanes of a window whose next episode has yet to begin

    def have_news(self) -> bool:
        """See ``LaneTable.have_news``."""
        return super().have_news() or bool(self._env.ready_lanes(self.idle))

    def drop(self, cancelled: ActivePlan) -> None:
        """See ``LaneTable.drop``."""
        self._restarting = [lane for lane in self._restarting if lane.active is not cancelled]
        super().drop(cancelled)

    def _clear(self) -> None:
        super()._clear()
        self._restarting = ()

    def turn_over(self, ended: Sequence[int]) -> None:
        """See ``LaneTable.turn_over``."""
        restarting, self._restarting = self._restarting, ()
        for lane in restarting:
            lane.active.rows[lane.number] -= 1  # its step was none of an episode
        if restarting:
            self._restart(restarting)
        super().turn_over(ended)

    def _restart(self, lanes: Sequence[Lane]) -> None:
        ready = self._env.ready_lanes([lane.number for lane in lanes])
        if len(ready) < len(lanes):
            others = [lane for lane in lanes if lane.number not in ready]
            self._restarting = [*self._restarting, *others]
            self.steps_until_full = 0  # take stock
        if ready:
            super()._restart([lane for lane in lanes if lane.number in ready])

    def _full_lanes(self, active: ActivePlan) -> list[Lane]:
        """All lanes: a window is over for those as well that have restarted, and did less."""
        full = super()._full_lanes(active)
        if not full or not active.restarts:
            return full
        live = [self.running[lane] for lane in self.live if lane in self.running]
        for lane in live:
            # The step in which one restarts may be written already.
            active.writer.abandon(lane.slot, active.steps_in_slot(lane))
        return live

    def _deal(self, starting: list[Lane]) -> None:
        ready = self._env.ready_lanes(self.idle)
        others = set(self.idle).difference(ready)
        self.idle = list(ready)
        super()._deal(starting)
        self.idle = sorted(others.union(self.idle))

    def _take_stock(self) -> None:
        super()._take_stock()
        if self._restarting:
            self.steps_until_full = 1  # after every step it is seen who has restarted


def _can_begin(episode: Episode, tape: Tape, where: Where) -> bool:
    """Whether a lane can be reset to repeat its tape: not if it was given up in its reset.

    Raises:
        NotRepeatedError: If it was given up in what it has done before.
    """
    fails_at = episode.gives_up_at
    if fails_at is None or fails_at >= tape.n_steps:
        return True
    if tape.n_steps:
        call = f"step {fails_at}" if fails_at >= 0 else "its reset or its first step"
        raise NotRepeatedError(
            f"the environment did not repeat an episode: {call} fails now, but succeeded before",
            where=where._replace(step=max(fails_at, 0)),
            fix="the log has the failure: the same seed and actions have to lead to the same in "
            "another process",
        )
    return False
