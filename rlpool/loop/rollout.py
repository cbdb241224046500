"""The step loop: the only place where an agent is called on environments.

One ``Rollout`` runs one agent on one ``VecEnv`` and writes to the slots of a block. A ``Plan``
decides which episode a lane starts next, which slot it writes to, and what happens to a complete
chunk. Each step of the batch does::

    noise, observations, agent states  ->  row t of every lane's slot
    agent(state, observation)          ->  outputs into row t, new state
    env.step                           ->  observations of t + 1
    ended lanes: final values into their slots, then the next episode
    full slots:  final values into them, then the next slot of the same episode
"""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import replace

import numpy as np
import torch

from rlpool.agents.agent import Agent
from rlpool.envs.vec_env import LaneError, Options, VecEnv
from rlpool.errors import Where, WorkerError
from rlpool.loop.agent_driver import AgentDriver, History, InfoRows
from rlpool.loop.crash_scene import CrashScene
from rlpool.loop.plan import Episode, Lane, Plan, ResumingPlan
from rlpool.loop.probe import probe
from rlpool.memory.storage import Array
from rlpool.record.failures import env_error
from rlpool.record.repeat import take_over
from rlpool.record.tape import Tape
from rlpool.seeding import NoiseStream
from rlpool.slots.blocks import NOISE_KEY, StepSpecs
from rlpool.slots.writer import SlotWriter
from rlpool.specs import FLAGS


class Rollout:
    """One agent on one batch of environments.

    Args:
        agent: The agent.
        env: The environments.
        worker: Number of the worker, for error messages.
        progress: One element that counts the steps; the caller watches it.
        worker_seed: The ``seed`` that ``env`` was created with, for crash capsules.
    """

    def __init__(
        self,
        agent: Agent,
        env: VecEnv,
        worker: int = 0,
        progress: MutableSequence[int] | memoryview | None = None,
        worker_seed: int | None = None,
    ) -> None:
        self._env = env
        self._scene = CrashScene(env, worker_seed)
        self._worker = worker
        self._progress = progress if progress is not None else [0]
        self._n_lanes = env.n_lanes
        self._driver = AgentDriver(agent, env.n_lanes)
        self._noise = NoiseStream(env.n_lanes, agent.n_noise) if agent.n_noise else None
        self._history: History | None = None
        self._infos = InfoRows(env.n_lanes)
        self._lanes: dict[int, Lane] = {}
        self._live: list[int] = []
        self._waiting: list[int] = []  # idle or parked
        self._stepping: set[int] = set()  # lanes whose step is not finished
        self._rows = np.zeros(env.n_lanes, np.int64)
        self._strides = np.zeros(env.n_lanes, np.int64)

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
        env, infos = self._env, self._infos
        infos.show(agent_info or {}, {lane: lane for lane in range(self._n_lanes)})
        noise = None if self._noise is None else self._noise.tensor
        steps = None
        try:
            steps = probe(env, self._driver, seed, options, infos.tensors, noise)
        except LaneError as error:
            lane = error.lane
            where = Where(self._worker, lane, lane, 0, seed, options[lane])
            both = infos.arrays, infos.arrays
            raise self._scene.error(error, where, both) from error.__cause__
        finally:
            if steps is None:
                env.forget()
        self._history = History(steps) if steps.wants_history else None
        return steps

    @torch.inference_mode()
    def run(self, plan: Plan) -> None:
        """Run a plan until it ends or is cancelled, under ``torch.inference_mode``.

        Lanes with unfinished episodes stay parked and continue with the next plan.

        Raises:
            EnvError, AgentError: If the user's code fails. All lanes are idle afterwards.
        """
        self._bind(plan)
        is_at_end = False
        try:
            is_at_end = self._run(plan)
        except LaneError as error:
            raise self._failure(error) from error.__cause__
        finally:
            if not is_at_end:
                self.abandon()
            del self._plan  # it may refer to this rollout

    def _run(self, plan: Plan) -> bool:
        """Run the plan; False if it was cancelled."""
        waits_for_all = self._env.min_ready is None or self._history is not None
        step = self._step if waits_for_all else self._step_some
        self._fill_lanes()
        while not plan.is_cancelled():
            if self._live:
                step()
                if self._waiting and plan.has_news():
                    self._fill_lanes()
            elif plan.wait():
                self._fill_lanes()
            else:
                return True
        return False

    @torch.inference_mode()
    def resume(self, plan: ResumingPlan, tapes: Mapping[int, Tape]) -> None:
        """Take over episodes of another worker; the next ``run`` continues them.

        Args:
            plan: Knows the episodes, with their seeds and options.
            tapes: Lane to the tape of its episode.

        Raises:
            EnvError: If an environment does not repeat what it did. All lanes are idle then.
        """
        try:
            for lane, tape in tapes.items():
                episode = plan.resumed(lane, tape.n_restarts)
                tape = replace(tape, seed=episode.seed, options=episode.options)
                where = Where(self._worker, lane, episode.number, 0, tape.seed, tape.options)
                take_over(self._env, lane, tape, where, self._progress)
                self._infos.show(plan.agent_info or {}, {lane: episode.number})
                if tape.n_steps:
                    for key, value in tape.state.items():
                        self._driver.state[key][lane] = value
                else:
                    self._driver.start([lane], self._infos.tensors)
                parked = self._kept_rows(lane)
                self._lanes[lane] = Lane(episode, episode.slot, 0, tape.n_steps, parked, tape)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Drop all unfinished episodes."""
        for lane, running in self._lanes.items():
            if running.parked is None:
                self._writer.abandon(running.slot, self._steps_in_slot(lane))
                self._running[lane] = -1
        self._lanes.clear()
        self._stepping.clear()

    def _bind(self, plan: Plan) -> None:
        """Prepare the views through which the steps of a plan read and write."""
        self._plan = plan
        env, driver, layout = self._env, self._driver, plan.layout
        self._current = dict(env.current)
        if self._noise is not None:
            self._current[NOISE_KEY] = self._noise.tensor.numpy()
        self._observation = {key: torch.from_numpy(a) for key, a in self._current.items()}
        # Steps do not rewrite all flags, so the agent gets copies that it may change.
        self._shown_flags = np.array(env.flags)
        for key, flags in zip(FLAGS, self._shown_flags, strict=True):
            self._observation[key] = torch.from_numpy(flags)
        self._writer = SlotWriter(layout, plan.arrays, self._current, driver.state)
        control = plan.arrays.control
        self._running, self._slots, self._steps_before = (
            control[name][self._worker].data for name in ("running", "slot", "steps_before")
        )
        self._n_finished = control["n_finished"].data
        # The row numbers are in shared memory: they tell how far a worker got that died.
        self._rows = control["row"][self._worker]
        self._scene.bind(plan.arrays.rows, self._current, driver.state, self._rows)
        self._n_timesteps = layout.n_timesteps
        self._restarts = layout.restarts
        # Idle lanes write to the spare slot after the last, to different rows if there are enough.
        spare = np.arange(self._n_lanes) % layout.n_timesteps
        self._spare_rows = layout.n_slots * layout.n_timesteps + spare
        self._waiting = list(range(self._n_lanes))
        self._take_stock()

    def _step(self) -> None:
        """Step all live lanes together."""
        rows = self._rows
        outputs = self._act(rows)
        ended = self._env.step_lanes(self._live, outputs)
        self._writer.write_after(rows)
        np.add(rows, self._strides, out=rows)
        self._conclude(ended)

    def _step_some(self) -> None:
        """Step the lanes that are ready, without waiting for slow ones.

        Every lane keeps its row of the batch, its noise and its state. Rows of lanes that are
        stepping go to the spare slot. So episodes have the same bits as with ``_step``, whichever
        lanes are ready at the same time.
        """
        env = self._env
        free = [lane for lane in self._live if lane not in self._stepping]
        outputs = self._act(self._rows_of(free), free) if free else {}
        ready = env.step_some(env.min_ready or 1, free, outputs)
        self._stepping.update(free)
        # A lane may still be stepping for a cancelled plan.
        ready = [lane for lane in ready if lane in self._stepping]
        self._stepping.difference_update(ready)
        self._writer.write_after(self._rows_of(ready))
        self._rows[ready] += 1
        done = env.current["done"]
        self._conclude([lane for lane in ready if done[lane]])

    def _act(self, rows: Array, lanes: Sequence[int] | None = None) -> dict[str, Array]:
        """Call the agent for lanes, all by default; write its inputs and outputs."""
        driver, writer = self._driver, self._writer
        if self._noise is not None:
            self._noise.draw(lanes)
        writer.write_before(rows)
        np.copyto(self._shown_flags, self._env.flags)
        starting = driver.starting
        history, before = None, {}
        if self._history is not None:
            history = self._history.view({**self._current, **driver.state})
            # Copied before the agent can change it.
            before = {key: np.array(array) for key, array in self._current.items()}
        outputs = driver.act(self._observation, self._infos.tensors, history)
        if driver.state:
            for lane in starting:
                writer.write_state(int(self._rows[lane]), lane)
        if self._history is not None:
            self._history.record({**before, **driver.state, **outputs}, self._live)
        writer.write_outputs(rows, outputs)
        driver.commit(lanes)
        return outputs

    def _rows_of(self, lanes: Sequence[int]) -> Array:
        """Row numbers of all lanes; those not in ``lanes`` get a row of the spare slot."""
        rows: Array = self._spare_rows.copy()
        rows[lanes] = self._rows[lanes]
        return rows

    def _conclude(self, ended: Sequence[int]) -> None:
        self._progress[0] += 1
        self._steps_until_full -= 1
        if ended or not self._steps_until_full:
            self._turn_over(ended)

    def _turn_over(self, ended: Sequence[int]) -> None:
        """Complete full slots and ended episodes, and give their lanes new work."""
        if ended and self._restarts:
            self._restart(ended)
        else:
            for lane in ended:
                self._leave_slot(lane, is_last=True)
        if not self._steps_until_full:
            for lane in self._live:
                if lane in self._lanes and self._steps_in_slot(lane) == self._n_timesteps:
                    self._leave_slot(lane, is_last=False)
        self._plan.flush()
        self._fill_lanes()

    def _leave_slot(self, lane: int, is_last: bool) -> None:
        """Complete a slot; the lane becomes idle, or parked if the episode continues.

        A parked lane's rows of the batch may be overwritten, so they are saved.
        """
        running, length = self._lanes[lane], self._steps_in_slot(lane)
        slot, chunk = running.slot, running.chunk
        if not is_last and running.start < length:
            self._scene.leave_slot(running, lane)
        self._writer.complete(slot, lane, length, running.steps_before == 0)
        self._waiting.append(lane)
        if is_last:
            del self._lanes[lane]  # last: if interrupted before, the slot is marked as dirty
            self._running[lane] = -1
            self._n_finished[self._worker] += 1
        else:
            running.steps_before += length
            running.chunk += 1
            running.parked = self._kept_rows(lane)
        self._plan.chunk_done(running.episode.number, slot, chunk, is_last)

    def _fill_lanes(self) -> None:
        """Give waiting lanes an episode or a slot, if there is any."""
        starting: dict[int, Episode] = {}
        waiting: list[int] = []
        for lane in sorted(self._waiting):
            running = self._lanes.get(lane)
            if running is None:
                episode = self._plan.next_episode(lane)
                slot = None if episode is None else episode.slot
            else:
                episode, slot = None, self._plan.next_slot(lane, running.episode.number)
            if episode is not None:
                starting[lane] = episode
                running = Lane(episode, episode.slot)
            if running is None or slot is None:
                waiting.append(lane)
            else:
                self._enter_slot(lane, running, slot)
        self._waiting = waiting
        if starting:
            self._begin_episodes(starting)
        # Usually the lanes that ended start again. Then nothing else changes, and
        # _steps_until_full remains a lower bound.
        if waiting != self._waiting_at_stock or not self._steps_until_full:
            self._take_stock()

    def _kept_rows(self, lane: int) -> list[tuple[Array, Array]]:
        arrays = [*self._env.current.values(), *self._driver.state.values()]
        return [(array, np.array(array[lane])) for array in arrays]

    def _restart(self, lanes: Sequence[int]) -> None:
        """Start the next episodes of lanes that stay in their slots."""
        episodes: dict[int, Episode] = {}
        for lane in lanes:
            running = self._lanes[lane]
            running.episode = episodes[lane] = self._plan.restarted(lane, running.episode)
            running.tape = None
            running.steps_before = -self._steps_in_slot(lane)
            self._steps_before[lane] = running.steps_before
        self._begin_episodes(episodes)

    def _begin_episodes(self, episodes: dict[int, Episode]) -> None:
        lanes = list(episodes)
        seeds = [episode.seed for episode in episodes.values()]
        options = [episode.options for episode in episodes.values()]
        self._env.reset_lanes(lanes, seeds, options)
        if self._plan.agent_info or self._infos.arrays:
            rows = {lane: episode.number for lane, episode in episodes.items()}
            self._infos.show(self._plan.agent_info or {}, rows)
        self._driver.start(lanes, self._infos.tensors)
        for lane, episode in episodes.items():
            if self._noise is not None and episode.noise is not None:
                self._noise.start(lane, episode.noise)
            if self._history is not None:
                self._history.restart(lane)

    def _enter_slot(self, lane: int, running: Lane, slot: int) -> None:
        """Let a lane begin an episode in a slot, or continue its parked one."""
        running.slot = slot
        if running.parked is not None:
            for array, row in running.parked:
                array[lane] = row
            running.parked = None
            if self._noise is not None and running.episode.noise is not None:
                self._noise.start(lane, running.episode.noise, running.steps_before)
        self._lanes[lane] = running
        self._slots[lane] = slot
        self._rows[lane] = slot * self._n_timesteps
        self._running[lane] = running.episode.number
        self._steps_before[lane] = running.steps_before

    def _take_stock(self) -> None:
        """Find the lanes that step, and the number of steps until the first slot is full."""
        self._waiting_at_stock = list(self._waiting)
        self._live = [lane for lane in range(self._n_lanes) if lane not in self._waiting]
        self._strides[:] = 0
        self._strides[self._live] = 1
        self._rows[self._waiting] = self._spare_rows[self._waiting]
        slots = [self._lanes[lane].slot for lane in self._live]
        steps = self._rows[self._live] - np.array(slots, np.int64) * self._n_timesteps
        self._steps_until_full = self._n_timesteps - int(steps.max(initial=0))

    def _steps_in_slot(self, lane: int) -> int:
        return int(self._rows[lane]) - self._lanes[lane].slot * self._n_timesteps

    def _failure(self, error: LaneError) -> WorkerError:
        """The error for a failure of the user's code."""
        # All lanes share a call of the agent: the first one is named.
        lane = error.lane
        if error.call == "agent":
            lane = next(lane for lane in self._live if lane not in self._stepping)
        running = self._lanes.get(lane)
        if running is None:
            return env_error(error, Where(self._worker, lane))
        episode, row = running.episode, self._steps_in_slot(lane)
        step = running.steps_before + row
        where = Where(self._worker, lane, episode.number, step, episode.seed, episode.options)
        infos = self._plan.agent_info or {}, self._infos.arrays
        return self._scene.error(error, where, infos, running, row)
