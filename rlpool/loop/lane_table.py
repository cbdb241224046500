"""What each lane of a rollout does: idle, running an episode, parked, restarting."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns

from rlpool.envs.lanes import Options
from rlpool.envs.vec_env import VecEnv
from rlpool.errors import Where
from rlpool.loop.active_plan import ActivePlan, Lane
from rlpool.loop.active_plans import ActivePlans
from rlpool.loop.agent_calls import AgentCalls, rows_of
from rlpool.loop.agent_driver import rows_repeating
from rlpool.loop.crash_scene import CrashScene
from rlpool.loop.going_on import take_over
from rlpool.loop.plan import Chunk, Episode
from rlpool.memory.storage import Array
from rlpool.observe.control import WorkerRecord
from rlpool.specs import row_specs


class LaneTable:
    """The lanes of a rollout, and how they go from one episode and slot to the next.

    A lane is *idle* without an episode. One that runs an episode is *live*: it steps with the
    batch, in its slot. It is *parked* while its episode goes on and it lacks a slot for that.

    Args:
        env: The environments.
        calls: The agent's calls.
        plans: Where episodes and slots come from.
        scene: Is told of slots that episodes leave.
        record: Is told what the lanes do.
        worker: Number of the worker, for error messages.

    Attributes:
        running: Lane to what it runs, of those that are not idle.
        live: The lanes that step, ascending.
        live_rows: These rows, and in place of all others the first; ``None`` if no lane is live.
        waiting: The lanes that are idle or parked, ascending.
        unsaved: Lanes that are parked, with their rows still in the batch.
        stepping: Lanes whose step is not finished.
        restarting: Lanes of a window whose next episode has yet to begin.
        gives_up: Whether a step of any episode is known to fail.
        giving_up: The lanes whose next step is.
        steps_until_full: Lower bound of the steps until a slot is full; 0 if it is not known.
    """

    def __init__(
        self,
        env: VecEnv,
        calls: AgentCalls,
        plans: ActivePlans,
        scene: CrashScene,
        record: WorkerRecord,
        worker: int,
    ) -> None:
        self._env, self._calls, self.plans, self._scene = env, calls, plans, scene
        self._record, self._worker = record, worker
        self._n_lanes = env.n_lanes
        self.running: dict[int, Lane] = {}
        self.unsaved: set[int] = set()
        self.stepping: set[int] = set()
        self.restarting: list[int] = []
        self.gives_up = False
        self.giving_up: list[int] = []
        self.begin()

    def begin(self) -> None:
        """Let no lane be live: plans of another queue come next."""
        self.waiting = list(range(self._n_lanes))
        self._waiting_at_stock = list(self.waiting)
        self.live: list[int] = []
        self.live_rows: Array | None = None
        self.steps_until_full = 0

    # Plans ---------------------------------------------------------------------------------------

    def bind_next(self) -> ActivePlan | None:
        """Begin a further plan, if there is one that fits to those that run.

        A batch has one set of keys, so ``agent_info`` with others has to wait; and so has a plan
        that begins with a reset of all lanes.
        """
        plans = self.plans
        plan = plans.postponed or plans.queue.next_plan()
        plans.postponed = None
        if plan is None:
            return None
        infos, is_first = plan.agent_info or {}, not plans.active
        keys = self._calls.infos
        if not is_first and (plan.begins_anew or row_specs(infos) != row_specs(keys.arrays)):
            plans.postponed = plan
            return None
        if plan.begins_anew:
            self._env.begin_anew()
        active = plans.bind(plan)
        if is_first:
            keys.declare(infos)
            self._continue_with(active)
        self.gives_up = self.gives_up or plan.gives_up
        if plan.tapes:
            take_over(active, self.running, self._env, self._calls, Where(self._worker))
        return active

    def _continue_with(self, active: ActivePlan) -> None:
        """Let lanes that are parked go on with the next window, which may have other infos."""
        rows = {lane: running.episode.number for lane, running in self.running.items()}
        for running in self.running.values():
            running.active = active
            if running.episode.gives_up_at is not None:
                self.gives_up = True  # its reset has failed, behind the last step of a window
        if rows:
            self._calls.infos.show(active.plan.agent_info or {}, rows)
        # Their first step has the infos and the parameters of this window.
        if new := [lane for lane, running in self.running.items() if not running.steps_before]:
            episodes = [self.running[lane].episode for lane in new]
            self._calls.driver.start(new, self._calls.infos.tensors, episodes)
            for lane in new:
                if parked := self.running[lane].parked:
                    of_env = parked[: len(self._env.current)]
                    self.running[lane].parked = of_env + rows_of(self._calls.driver.state, lane)

    def have_news(self) -> bool:
        """Whether lanes that wait may get something."""
        plans, have_slots = self.plans, False
        for active in plans.active:
            have_slots |= active.plan.has_news()
        if have_slots or (plans.postponed is None and plans.queue.has_next()):
            return True
        return self._env.seeding != "episode" and bool(self._env.ready_lanes(self.waiting))

    def must_wait(self) -> bool:
        """Whether a step of all lanes would step one that lacks a slot."""
        anew = [active.plan.lacks_slots for active in self.plans.active if active.plan.begins_anew]
        return any(anew) or len(self.running) + len(self.waiting) > self._n_lanes

    def drop(self, cancelled: ActivePlan) -> None:
        """Drop a plan that nobody waits for; its lanes get other work."""
        for lane, running in list(self.running.items()):
            if running.active is cancelled:
                cancelled.abandon(lane, running)
                del self.running[lane]
                self.stepping.discard(lane)
                self.unsaved.discard(lane)
        self.restarting = [lane for lane in self.restarting if lane in self.running]
        self.waiting = [n for n in range(self._n_lanes) if not self._is_live(n)]
        self.plans.drop(cancelled)
        self.fill()

    def begin_again(self, failed: ActivePlan) -> None:
        """Leave all slots: a plan has failed, and episodes of others begin again."""
        for lane, running in self.running.items():
            slot = running.slot if running.parked is None else None
            running.active.abandon(lane, running)
            if running.active is not failed:
                running.active.plan.take_back(lane, running.episode, slot, running.chunk)
        self.clear()
        self.waiting = list(range(self._n_lanes))

    def abandon(self) -> None:
        """Drop all unfinished episodes."""
        for lane, running in self.running.items():
            if running.active in self.plans.active:  # otherwise its block is no longer ours
                running.active.abandon(lane, running)
        self.clear()

    def clear(self) -> None:
        """Let all lanes be idle."""
        self.running.clear()
        self.unsaved.clear()
        self.stepping.clear()
        self.restarting.clear()

    # Slots and episodes --------------------------------------------------------------------------

    def turn_over(self, ended: Sequence[int]) -> None:
        """Complete full slots and ended episodes, and give their lanes new work."""
        if ended and self.running[ended[0]].active.restarts:
            self._restart_when_ready(ended)
        elif ended:
            self._leave_slots(ended, is_last=True)
        if not self.steps_until_full:
            for active in self.plans.active:
                full = active.full_lanes(self.running)
                if full and active.restarts and self._env.seeding != "episode":
                    full = self._whole_window()
                if full:
                    self._leave_slots(full, is_last=False)
        for active in self.plans.active:
            active.plan.flush()
        self.fill()

    def _whole_window(self) -> list[int]:
        """All lanes: a window is over for those as well that have restarted, and did less."""
        live = [lane for lane in self.live if lane in self.running]
        for lane in live:
            # The step in which one restarts may be written already.
            running = self.running[lane]
            n_steps = running.active.steps_in_slot(lane, running)
            running.active.writer.abandon(running.slot, n_steps)
        return live

    def _leave_slots(self, lanes: Sequence[int], is_last: bool) -> None:
        """Complete slots; their lanes become idle, or parked if the episodes continue."""
        table, active_plans = self.running, self.plans.active
        for active in active_plans:
            mine = lanes
            if len(active_plans) > 1:
                mine = [n for n in lanes if (running := table.get(n)) and running.active is active]
                if not mine:
                    continue
            if not is_last:
                self._scene.leave_slots(mine, table)
            active.leave_slots(mine, table, is_last)
            self.waiting += mine
            chunks: list[Chunk] = []
            for lane in mine:
                running = table[lane]
                chunks.append((running.episode.number, running.slot, running.chunk, is_last))
                if is_last:
                    del table[lane]
                else:
                    running.chunk += 1
                    running.parked = []
                    self.unsaved.add(lane)
            active.plan.take_chunks(chunks)

    def fill(self) -> None:
        """Give waiting lanes an episode or a slot, if there is any."""
        starting: dict[int, Lane] = {}
        self._deal(starting)
        # Every lane is asked about every plan: only then it is known when a plan is over.
        while len(self.running) < self._n_lanes and self.bind_next() is not None:
            self._deal(starting)
        if starting:
            self._begin_episodes(starting)
        for active in self.plans.active:
            if not active.n_lanes:
                self.plans.drop_finished()
                break
        # Usually the lanes that ended start again. Then nothing else changes, and
        # steps_until_full remains a lower bound.
        if self.waiting != self._waiting_at_stock or not self.steps_until_full:
            self._take_stock()

    def _deal(self, starting: dict[int, Lane]) -> None:
        """Deal out what there is to waiting lanes; notes those that start an episode."""
        table, idle = self.running, self.waiting
        others: list[int] = []
        if len(table) + len(idle) > self._n_lanes:
            idle, others = self._enter_next_slots()
        if self._env.seeding != "episode":
            ready = set(self._env.ready_lanes(idle))
            others += [lane for lane in idle if lane not in ready]
            idle = [lane for lane in idle if lane in ready]
        for active in self.plans.active if idle else ():
            episodes = active.plan.next_episodes(idle)
            if episodes:
                for lane, episode in episodes.items():
                    starting[lane] = table[lane] = Lane(episode, active, episode.slot)
                active.enter_slots(list(episodes), table)
                if len(episodes) == len(idle):
                    idle = []
                    break  # usually: every lane that ended begins again
                idle = [lane for lane in idle if lane not in episodes]
        self.waiting = sorted(others + idle)

    def _enter_next_slots(self) -> tuple[list[int], list[int]]:
        """Let parked lanes go on in their next slots, if there are any.

        They come before the others: a slot that one of them lacks may hold up all others.

        Returns:
            The lanes that are idle, and those that stay parked.
        """
        table, noise = self.running, self._calls.noise
        idle = [lane for lane in self.waiting if lane not in table]
        parked = [lane for lane in self.waiting if lane in table]
        for active in self.plans.active:
            mine = [lane for lane in parked if table[lane].active is active]
            slots = active.plan.next_slots(mine) if mine else {}
            for lane, slot in slots.items():
                running = table[lane]
                for array, row in running.parked or ():
                    array[lane] = row
                running.slot, running.parked = slot, None
                if noise is not None and running.episode.noise is not None:
                    noise.start(lane, running.episode.noise, running.steps_before)
            if slots:
                self.unsaved.difference_update(slots)
                active.enter_slots(list(slots), table)
                parked = [lane for lane in parked if lane not in slots]
        return idle, parked

    def save_parked(self) -> None:
        """Save the rows of the batch of parked lanes, which a step of others may overwrite."""
        for lane in self.unsaved.intersection(self.running):
            self.running[lane].parked = self._calls.rows_of(lane)
        self.unsaved.clear()

    def _restart_when_ready(self, lanes: Sequence[int]) -> None:
        """Start the next episodes of lanes that stay in their slots, as soon as they can."""
        ready = self._env.ready_lanes(lanes)
        if len(ready) < len(lanes):
            self.restarting += [lane for lane in lanes if lane not in ready]
        if ready:
            self._restart(ready)

    def take_back_restarts(self) -> None:
        """Let lanes write over the step that they just made: it was none of an episode."""
        restarting, self.restarting = self.restarting, []
        for lane in restarting:
            self.running[lane].active.rows[lane] -= 1
        self._restart_when_ready(restarting)

    def _restart(self, lanes: Sequence[int]) -> None:
        """Start the next episodes of lanes that stay in their slots."""
        self.running[lanes[0]].active.restart_in_slots(lanes, self.running)
        self._begin_episodes({lane: self.running[lane] for lane in lanes})

    def _begin_episodes(self, starting: dict[int, Lane]) -> None:
        """Reset lanes and let the agent begin there."""
        lanes = sorted(starting)  # plans may have been asked in turns
        episodes: list[Episode] = []
        seeds: list[int] = []
        options: list[Options] = []
        for lane in lanes:
            episode = starting[lane].episode
            episodes.append(episode)
            seeds.append(episode.seed)
            options.append(episode.options)
        record = self._record
        record.env_ns[0] -= monotonic_ns()
        if self.gives_up:
            self.steps_until_full = 0  # take stock
            self._reset_those_that_can(episodes, lanes)
        else:
            self._env.reset_lanes(lanes, seeds, options)
        record.env_ns[0] += monotonic_ns()
        for active in self.plans.active if self._calls.infos.arrays else ():
            mine = {n: r.episode.number for n, r in starting.items() if r.active is active}
            if mine:
                self._calls.infos.show(active.plan.agent_info or {}, mine)
        calls = self._calls
        calls.driver.start(lanes, calls.infos.tensors, episodes)
        if calls.noise is not None:
            for lane, episode in zip(lanes, episodes, strict=True):
                if episode.noise is not None:
                    calls.noise.start(lane, episode.noise)
        if calls.history is not None:
            for lane in lanes:
                calls.history.restart(lane)

    def _reset_those_that_can(self, episodes: Sequence[Episode], lanes: Sequence[int]) -> None:
        """Reset lanes but those whose reset is known to fail."""
        pairs = list(zip(lanes, episodes, strict=True))
        self._env.begin_lanes([lane for lane, episode in pairs if episode.gives_up_at == -1])
        able = [(lane, episode) for lane, episode in pairs if episode.gives_up_at != -1]
        if able:
            seeds = [episode.seed for _, episode in able]
            options = [episode.options for _, episode in able]
            self._env.reset_lanes([lane for lane, _ in able], seeds, options)

    def _is_live(self, lane: int) -> bool:
        running = self.running.get(lane)
        return running is not None and running.parked is None

    def _take_stock(self) -> None:
        """Find the lanes that step, and the number of steps until the first slot is full."""
        self._waiting_at_stock = list(self.waiting)
        self.live = sorted(set(range(self._n_lanes)).difference(self.waiting))
        self.live_rows = rows_repeating(self.live, self._n_lanes) if self.live else None
        self.steps_until_full = min((b.steps_until_full for b in self.plans.active), default=0)
        if self.gives_up:
            self._find_given_up()

    def _find_given_up(self) -> None:
        """Find the lanes whose next step is known to fail, and when others get there."""
        self.giving_up = []
        for lane in self.live:
            running = self.running[lane]
            if running.episode.gives_up_at is not None:
                n_steps = running.steps_before + running.active.steps_in_slot(lane, running)
                n_left = max(running.episode.gives_up_at, 0) - n_steps
                if n_left <= 0:
                    self.giving_up.append(lane)
                else:
                    self.steps_until_full = min(self.steps_until_full, n_left)
