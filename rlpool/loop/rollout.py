"""The step loop: the only place where an agent is called on environments.

One ``Rollout`` runs one agent on one ``VecEnv``. A ``Plan`` decides which episode a lane starts
next, which slot of its block the lane writes to, and what happens to a complete chunk. Lanes that a
plan leaves idle begin with the next one, so that several may be under way. Each step does::

    noise, observations, agent states  ->  row t of every lane's slot
    agent(state, observation)          ->  outputs into row t, new state
    env.step                           ->  observations of t + 1
    ended lanes: final values into their slots, then the next episode
    full slots:  final values into them, then the next slot of the same episode
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic_ns
from weakref import WeakKeyDictionary

import numpy as np
import torch

from rlpool.agents.agent import Agent
from rlpool.envs.vec_env import LaneError, Options, VecEnv
from rlpool.errors import Where, WorkerError
from rlpool.loop.agent_calls import AgentCalls, rows_of
from rlpool.loop.agent_driver import AgentFailure, rows_repeating
from rlpool.loop.blame import failing_lane
from rlpool.loop.bound_plan import BoundPlan, Lane
from rlpool.loop.crash_scene import CrashScene
from rlpool.loop.going_on import marked, take_over
from rlpool.loop.plan import Chunk, Episode, Plan, PlanQueue
from rlpool.memory.storage import Array
from rlpool.observe.control import WorkerRecord
from rlpool.record.failures import env_error
from rlpool.record.tape import Tape
from rlpool.slots.blocks import Arrays, StepSpecs
from rlpool.slots.writer import SlotWriter
from rlpool.specs import row_specs


class Rollout:
    """One agent on one batch of environments.

    Args:
        agent: The agent.
        env: The environments.
        worker: Number of the worker, for error messages.
        record: Is told what the rollout does; the caller watches it. By default a new one.
        worker_seed: The ``seed`` that ``env`` was created with, for crash capsules.
        agent_rows: How many rows the agent is called with, one per lane by default.
    """

    def __init__(
        self,
        agent: Agent,
        env: VecEnv,
        worker: int = 0,
        record: WorkerRecord | None = None,
        worker_seed: int | None = None,
        agent_rows: int | None = None,
    ) -> None:
        self._env = env
        self._scene = CrashScene(env, worker_seed)
        self._worker = worker
        self._record = record if record is not None else WorkerRecord.private()
        self._record.begin_lanes(env.n_lanes)
        self._n_lanes = env.n_lanes
        self._calls = AgentCalls(agent, env, self._record, agent_rows)
        self._writers: WeakKeyDictionary[Arrays, SlotWriter] = WeakKeyDictionary()
        self._bound: list[BoundPlan] = []  # the oldest first
        self._held: Plan | None = None  # follows when all of these are over
        self._lanes: dict[int, Lane] = {}
        self._live: list[int] = []
        self._live_rows: Array | None = None  # these rows, and in place of all others the first
        self._waiting: list[int] = []  # idle or parked
        self._unsaved: set[int] = set()  # parked, with their rows still in the batch
        self._stepping: set[int] = set()  # lanes whose step is not finished
        self._restarting: list[int] = []  # lanes of a window whose next episode has yet to begin
        self._gives_up = False  # whether a step of any episode is known to fail
        self._giving_up: list[int] = []  # lanes whose next step is

    @torch.inference_mode()
    def probe(
        self, seed: int, options: Sequence[Options], agent_info: dict[str, Array] | None
    ) -> StepSpecs:
        """Determine the keys of a step, see ``rlpool.loop.probe``.

        A failed probe leaves no trace; another one, with other infos, may follow.

        Raises:
            EnvError, AgentError: If the user's code fails, or the actions do not fit the action
                space.
        """
        env, infos = self._env, self._calls.infos
        infos.declare(agent_info or {})
        infos.show(agent_info or {}, {lane: lane for lane in range(self._n_lanes)})
        steps = None
        try:
            steps = self._calls.probe(seed, options)
        except LaneError as error:
            lane = error.lane
            where = Where(self._worker, lane, lane, 0, seed, options[lane])
            both = infos.arrays, infos.arrays
            raise self._scene.error(error, where, both) from error.__cause__
        finally:
            if steps is None:
                env.forget()
        return steps

    def run(self, queue: PlanQueue) -> None:
        """Run plans until the queue has no further one, under ``torch.inference_mode``.

        Lanes with unfinished episodes of a window stay parked and continue with the next one.
        If the user's code fails, the plan of the lane that failed is dropped. Episodes of other
        plans begin again, since their lanes may have made half a step.

        Raises:
            EnvError: If an environment does not repeat what is on its tape.
            BaseException: What ``queue.failed`` raises. Either way all lanes are idle then.
        """
        self._queue = queue
        is_at_end = False
        try:
            with torch.inference_mode():
                self._bind_batch()
                while not is_at_end:
                    try:
                        self._go_on()
                        is_at_end = True
                    except LaneError as error:
                        self._record.end_calls()
                        self._drop_failed(error)
        finally:
            if not is_at_end:
                self._record.end_calls()
                self.abandon()
            self._bound.clear()
            self._gives_up = False
            self._held = None
            del self._queue  # it may refer to this rollout

    def _go_on(self) -> None:
        """Step until there is no further plan."""
        waits_for_all = self._env.min_ready is None or self._calls.history is not None
        step = self._step if waits_for_all else self._step_some
        steps_all_lanes = self._env.steps_all_lanes
        if not self._bound:
            self._bind_next()
        self._fill_lanes()
        while True:
            for bound in self._bound:
                if bound.plan.cancelled[0]:
                    self._drop_cancelled(bound)
                    break
            if self._live and not (steps_all_lanes and self._waiting and self._must_wait()):
                step()
                if self._waiting and self._has_news():
                    self._fill_lanes()
            elif self._wait() or self._bind_next() is not None:
                self._fill_lanes()
            elif self._bound and self._advance():
                self._record.steps[0] += 1
                self._fill_lanes()
            elif self._bound:
                raise RuntimeError("no lane runs any of the plans, and they are not over")
            else:
                return

    def _advance(self) -> bool:
        """See ``VecEnv.advance``."""
        self._save_parked()
        return self._env.advance()

    def _wait(self) -> bool:
        """Wait for slots, when no lane can step; False if there is nothing to wait for."""
        if not self._bound:
            return False
        self._record.begin_wait()
        has_waited = any(bound.plan.wait() for bound in self._bound)
        self._record.end_wait()
        return has_waited

    def mark(self) -> Callable[[], dict[int, Tape]]:
        """Between windows: keep what lanes have done that go on with the next one.

        Returns:
            Makes the tapes of these lanes, whatever the rollout has done since.
        """
        return marked(self._lanes, self._env, self._calls.driver.state)

    def abandon(self) -> None:
        """Drop all unfinished episodes."""
        for lane, running in self._lanes.items():
            if running.bound in self._bound:  # otherwise its block is no longer ours
                running.bound.abandon(lane, running)
        self._clear_lanes()

    def _clear_lanes(self) -> None:
        self._lanes.clear()
        self._unsaved.clear()
        self._stepping.clear()
        self._restarting.clear()

    # Plans ---------------------------------------------------------------------------------------

    def _bind_batch(self) -> None:
        """Prepare the views of the batch, which all plans share."""
        self._waiting = list(range(self._n_lanes))
        self._waiting_at_stock = list(self._waiting)
        self._live, self._live_rows, self._steps_until_full = [], None, 0
        if self._calls.bind():
            self._writers.clear()
            self._scene.bind(self._bound, self._calls.current, self._calls.driver.state)

    def _writer_of(self, plan: Plan) -> SlotWriter:
        """What writes into a plan's block; the next plan with the same block gets the same."""
        writer = self._writers.get(plan.arrays)
        if writer is None:
            writer = SlotWriter(
                plan.layout, plan.arrays, self._calls.current, self._calls.driver.state
            )
            self._writers[plan.arrays] = writer
        return writer

    def _has_news(self) -> bool:
        """Whether lanes that wait may get something."""
        has_slots = False
        for bound in self._bound:
            has_slots |= bound.plan.has_news()
        if has_slots or (self._held is None and self._queue.has_next()):
            return True
        return self._env.seeding != "episode" and bool(self._env.ready_lanes(self._waiting))

    def _bind_next(self) -> BoundPlan | None:
        """Begin a further plan, if there is one that fits to those that run.

        A batch has one set of keys, so ``agent_info`` with others has to wait; and so has a plan
        that begins with a reset of all lanes.
        """
        plan = self._held or self._queue.next_plan()
        self._held = None
        if plan is None:
            return None
        if self._bound and (plan.begins_anew or self._has_other_keys(plan)):
            self._held = plan
            return None
        if plan.begins_anew:
            self._env.begin_anew()
        bound = BoundPlan(plan, self._writer_of(plan), self._n_lanes, self._record)
        if not self._bound:
            self._calls.infos.declare(plan.agent_info or {})
            self._continue_with(bound)
        self._bound.append(bound)
        self._gives_up = self._gives_up or plan.gives_up
        if plan.tapes:
            take_over(bound, self._lanes, self._env, self._calls, Where(self._worker))
        return bound

    def _has_other_keys(self, plan: Plan) -> bool:
        return row_specs(plan.agent_info or {}) != row_specs(self._calls.infos.arrays)

    def _continue_with(self, bound: BoundPlan) -> None:
        """Let lanes that are parked go on with the next window, which may have other infos."""
        rows = {lane: running.episode.number for lane, running in self._lanes.items()}
        for running in self._lanes.values():
            running.bound = bound
            if running.episode.gives_up_at is not None:
                self._gives_up = True  # its reset has failed, behind the last step of a window
        if rows:
            self._calls.infos.show(bound.plan.agent_info or {}, rows)
        # Their first step has the infos and the parameters of this window.
        if new := [lane for lane, running in self._lanes.items() if not running.steps_before]:
            episodes = [self._lanes[lane].episode for lane in new]
            self._calls.driver.start(new, self._calls.infos.tensors, episodes)
            for lane in new:
                if parked := self._lanes[lane].parked:
                    of_env = parked[: len(self._env.current)]
                    self._lanes[lane].parked = of_env + rows_of(self._calls.driver.state, lane)

    def _drop_finished(self) -> None:
        """Drop plans of which nothing is left to do."""
        for bound in list(self._bound):
            if not bound.n_lanes and bound.plan.is_over():
                self._bound.remove(bound)
                self._queue.done(bound.plan)

    def _drop_cancelled(self, cancelled: BoundPlan) -> None:
        """Drop a plan that nobody waits for; its lanes get other work."""
        self._bound.remove(cancelled)
        for lane, running in list(self._lanes.items()):
            if running.bound is cancelled:
                cancelled.abandon(lane, running)
                del self._lanes[lane]
                self._stepping.discard(lane)
                self._unsaved.discard(lane)
        self._restarting = [lane for lane in self._restarting if lane in self._lanes]
        self._waiting = [n for n in range(self._n_lanes) if not self._is_live(n)]
        self._queue.done(cancelled.plan)
        self._fill_lanes()

    def _drop_failed(self, error: LaneError) -> None:
        """Drop the plan of a lane that failed; episodes of other plans begin again."""
        lane, is_known = error.lane, True
        if isinstance(error, AgentFailure):
            lane, is_known = self._blamed(error)
        failure = self._failure(error, lane, is_known)
        failure.__cause__ = error.__cause__
        running = self._lanes.get(lane)
        failed = self._bound[0] if running is None else running.bound
        self._bound.remove(failed)
        for lane, running in self._lanes.items():
            slot = running.slot if running.parked is None else None
            running.bound.abandon(lane, running)
            if running.bound is not failed:
                running.bound.plan.take_back(lane, running.episode, slot, running.chunk)
        self._clear_lanes()
        self._waiting = list(range(self._n_lanes))
        self._queue.failed(failed.plan, failure)

    # Steps ---------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Step all live lanes together."""
        record, live, bounds = self._record, self._live, self._bound
        if self._unsaved:
            self._save_parked()
        outputs = self._calls.act(bounds, live, self._live_rows)
        record.env_ns[0] -= monotonic_ns()
        if self._giving_up:
            ended = self._step_and_give_up(outputs)
        else:
            ended = self._env.step_lanes(live, outputs)
        record.env_ns[0] += monotonic_ns()
        record.n_steps[0] += len(live)
        for bound in bounds:
            for target, source in bound.writer.after:
                target[bound.rows] = source
            np.add(bound.rows, bound.strides, out=bound.rows)
        if self._restarting:
            self._take_back_restarts()
        record.steps[0] += 1
        self._steps_until_full -= 1
        if ended or not self._steps_until_full:
            self._turn_over(ended)

    def _step_and_give_up(self, outputs: Mapping[str, Array]) -> list[int]:
        """Step lanes but those whose step is known to fail, which are truncated instead."""
        giving_up, self._giving_up = self._giving_up, []
        lanes = [lane for lane in self._live if lane not in giving_up]
        ended = self._env.step_lanes(lanes, outputs) if lanes else []
        self._env.truncate_lanes(giving_up, outputs)
        return sorted([*ended, *giving_up])

    def _step_some(self) -> None:
        """Step the lanes that are ready, without waiting for slow ones.

        Every lane keeps its row of the batch, its noise and its state. Rows of lanes that are
        stepping go to the spare slot. So episodes have the same bits as with ``_step``, whichever
        lanes are ready at the same time.
        """
        env = self._env
        free = [lane for lane in self._live if lane not in self._stepping]
        if self._unsaved:
            self._save_parked()
        outputs = self._calls.act(self._bound, free) if free else {}
        record = self._record
        record.env_ns[0] -= monotonic_ns()
        ready = env.step_some(env.min_ready or 1, free, outputs)
        record.env_ns[0] += monotonic_ns()
        self._stepping.update(free)
        # A lane may still be stepping for a cancelled plan.
        ready = [lane for lane in ready if lane in self._stepping]
        self._stepping.difference_update(ready)
        record.first_steps[list(self._stepping)] += 1  # these have not made this step yet
        record.n_steps[0] += len(ready)
        for bound in self._bound:
            rows = bound.rows_of(ready)
            for target, source in bound.writer.after:
                target[rows] = source
            bound.rows[ready] += bound.strides[ready]
        record.steps[0] += 1
        self._steps_until_full -= 1
        ended = [lane for lane in ready if env.current["done"][lane]]
        if ended or not self._steps_until_full:
            self._turn_over(ended)

    # Slots and episodes --------------------------------------------------------------------------

    def _turn_over(self, ended: Sequence[int]) -> None:
        """Complete full slots and ended episodes, and give their lanes new work."""
        if ended and self._lanes[ended[0]].bound.restarts:
            self._restart_when_ready(ended)
        elif ended:
            self._leave_slots(ended, is_last=True)
        if not self._steps_until_full:
            for bound in self._bound:
                full = bound.full_lanes(self._lanes)
                if full and bound.restarts and self._env.seeding != "episode":
                    full = self._whole_window()
                if full:
                    self._leave_slots(full, is_last=False)
        for bound in self._bound:
            bound.plan.flush()
        self._fill_lanes()

    def _whole_window(self) -> list[int]:
        """All lanes: a window is over for those as well that have restarted, and did less."""
        live = [lane for lane in self._live if lane in self._lanes]
        for lane in live:
            # The step in which one restarts may be written already.
            running = self._lanes[lane]
            n_steps = running.bound.steps_in_slot(lane, running)
            running.bound.writer.abandon(running.slot, n_steps)
        return live

    def _leave_slots(self, lanes: Sequence[int], is_last: bool) -> None:
        """Complete slots; their lanes become idle, or parked if the episodes continue."""
        table, bounds = self._lanes, self._bound
        for bound in bounds:
            mine = lanes
            if len(bounds) > 1:
                mine = [n for n in lanes if (running := table.get(n)) and running.bound is bound]
                if not mine:
                    continue
            if not is_last:
                self._scene.leave_slots(mine, table)
            bound.leave_slots(mine, table, is_last)
            self._waiting += mine
            chunks: list[Chunk] = []
            for lane in mine:
                running = table[lane]
                chunks.append((running.episode.number, running.slot, running.chunk, is_last))
                if is_last:
                    del table[lane]
                else:
                    running.chunk += 1
                    running.parked = []
                    self._unsaved.add(lane)
            bound.plan.take_chunks(chunks)

    def _fill_lanes(self) -> None:
        """Give waiting lanes an episode or a slot, if there is any."""
        starting: dict[int, Lane] = {}
        self._deal(starting)
        # Every lane is asked about every plan: only then it is known when a plan is over.
        while len(self._lanes) < self._n_lanes and self._bind_next() is not None:
            self._deal(starting)
        if starting:
            self._begin_episodes(starting)
        for bound in self._bound:
            if not bound.n_lanes:
                self._drop_finished()
                break
        # Usually the lanes that ended start again. Then nothing else changes, and
        # _steps_until_full remains a lower bound.
        if self._waiting != self._waiting_at_stock or not self._steps_until_full:
            self._take_stock()

    def _deal(self, starting: dict[int, Lane]) -> None:
        """Deal out what there is to waiting lanes; notes those that start an episode."""
        table, idle = self._lanes, self._waiting
        others: list[int] = []
        if len(table) + len(idle) > self._n_lanes:
            idle, others = self._enter_next_slots()
        if self._env.seeding != "episode":
            ready = set(self._env.ready_lanes(idle))
            others += [lane for lane in idle if lane not in ready]
            idle = [lane for lane in idle if lane in ready]
        for bound in self._bound if idle else ():
            episodes = bound.plan.next_episodes(idle)
            if episodes:
                for lane, episode in episodes.items():
                    starting[lane] = table[lane] = Lane(episode, bound, episode.slot)
                bound.enter_slots(list(episodes), table)
                if len(episodes) == len(idle):
                    idle = []
                    break  # usually: every lane that ended begins again
                idle = [lane for lane in idle if lane not in episodes]
        self._waiting = sorted(others + idle)

    def _enter_next_slots(self) -> tuple[list[int], list[int]]:
        """Let parked lanes go on in their next slots, if there are any.

        They come before the others: a slot that one of them lacks may hold up all others.

        Returns:
            The lanes that are idle, and those that stay parked.
        """
        table, noise = self._lanes, self._calls.noise
        idle = [lane for lane in self._waiting if lane not in table]
        parked = [lane for lane in self._waiting if lane in table]
        for bound in self._bound:
            mine = [lane for lane in parked if table[lane].bound is bound]
            slots = bound.plan.next_slots(mine) if mine else {}
            for lane, slot in slots.items():
                running = table[lane]
                for array, row in running.parked or ():
                    array[lane] = row
                running.slot, running.parked = slot, None
                if noise is not None and running.episode.noise is not None:
                    noise.start(lane, running.episode.noise, running.steps_before)
            if slots:
                self._unsaved.difference_update(slots)
                bound.enter_slots(list(slots), table)
                parked = [lane for lane in parked if lane not in slots]
        return idle, parked

    def _must_wait(self) -> bool:
        """Whether a step of all lanes would step one that lacks a slot."""
        lacks_slots = [bound.plan.lacks_slots for bound in self._bound if bound.plan.begins_anew]
        return any(lacks_slots) or len(self._lanes) + len(self._waiting) > self._n_lanes

    def _save_parked(self) -> None:
        """Save the rows of the batch of parked lanes, which a step of others may overwrite."""
        for lane in self._unsaved.intersection(self._lanes):
            self._lanes[lane].parked = self._calls.rows_of(lane)
        self._unsaved.clear()

    def _restart_when_ready(self, lanes: Sequence[int]) -> None:
        """Start the next episodes of lanes that stay in their slots, as soon as they can."""
        ready = self._env.ready_lanes(lanes)
        if len(ready) < len(lanes):
            self._restarting += [lane for lane in lanes if lane not in ready]
        if ready:
            self._restart(ready)

    def _take_back_restarts(self) -> None:
        """Let lanes write over the step that they just made: it was none of an episode."""
        restarting, self._restarting = self._restarting, []
        for lane in restarting:
            self._lanes[lane].bound.rows[lane] -= 1
        self._restart_when_ready(restarting)

    def _restart(self, lanes: Sequence[int]) -> None:
        """Start the next episodes of lanes that stay in their slots."""
        self._lanes[lanes[0]].bound.restart_in_slots(lanes, self._lanes)
        self._begin_episodes({lane: self._lanes[lane] for lane in lanes})

    def _begin_episodes(self, starting: dict[int, Lane]) -> None:
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
        if self._gives_up:
            self._steps_until_full = 0  # take stock
            self._reset_those_that_can(episodes, lanes)
        else:
            self._env.reset_lanes(lanes, seeds, options)
        record.env_ns[0] += monotonic_ns()
        for bound in self._bound if self._calls.infos.arrays else ():
            mine = {n: r.episode.number for n, r in starting.items() if r.bound is bound}
            if mine:
                self._calls.infos.show(bound.plan.agent_info or {}, mine)
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
        running = self._lanes.get(lane)
        return running is not None and running.parked is None

    def _take_stock(self) -> None:
        """Find the lanes that step, and the number of steps until the first slot is full."""
        self._waiting_at_stock = list(self._waiting)
        self._live = sorted(set(range(self._n_lanes)).difference(self._waiting))
        self._live_rows = rows_repeating(self._live, self._n_lanes) if self._live else None
        self._steps_until_full = min((b.steps_until_full for b in self._bound), default=0)
        if self._gives_up:
            self._find_given_up()

    def _find_given_up(self) -> None:
        """Find the lanes whose next step is known to fail, and when others get there."""
        self._giving_up = []
        for lane in self._live:
            running = self._lanes[lane]
            if running.episode.gives_up_at is not None:
                n_steps = running.steps_before + running.bound.steps_in_slot(lane, running)
                n_left = max(running.episode.gives_up_at, 0) - n_steps
                if n_left <= 0:
                    self._giving_up.append(lane)
                else:
                    self._steps_until_full = min(self._steps_until_full, n_left)

    # Failures ------------------------------------------------------------------------------------

    def _blamed(self, error: AgentFailure) -> tuple[int, bool]:
        """The lane whose row made the agent fail, and whether it fails for that row alone.

        The agent is called again, with fewer lanes.
        """
        running = {lane: self._lanes[lane] for lane in error.lanes if lane in self._lanes}
        groups = [[n for n, r in running.items() if r.bound is bound] for bound in self._bound]
        groups = [group for group in groups if group]
        if not groups:
            return error.lane, True
        if error.call == "agent":
            before = self._scene.before_the_call(self._calls.current)
            self._calls.restore(before, list(running))
        return failing_lane(groups, partial(self._calls.fails_for, error.call))

    def _failure(self, error: LaneError, lane: int, is_known: bool) -> WorkerError:
        """The error for a failure of the user's code; a lane that is not known is only a guess."""
        running = self._lanes.get(lane)
        if running is None:
            return env_error(error, Where(self._worker, lane))
        episode, row = running.episode, running.bound.steps_in_slot(lane, running)
        step = running.steps_before + row
        where = Where(self._worker, lane, episode.number, step, episode.seed, episode.options)
        infos = running.bound.plan.agent_info or {}, self._calls.infos.arrays
        failure = self._scene.error(error, where, infos, running, row)
        if is_known:
            return failure
        return failure.reworded(what=f"{failure.what} ({_NOT_KNOWN})")


_NOT_KNOWN = (
    "in a call for several episodes: which of them caused it is not known, since the agent fails "
    "for none of them alone"
)
