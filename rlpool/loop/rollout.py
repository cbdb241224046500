"""The step loop: the only place where an agent is called on environments.

One ``Rollout`` drives one agent over one ``VecEnv`` and writes into the slots of a block. What to
run is decided by a ``Plan``: which episode a lane starts next, which slot it writes to, what
happens to a finished chunk. Per step and batch it does::

    noise, observations, agent states  ->  row t of every lane's slot
    agent(state, observation)          ->  outputs into row t, new state
    env.step                           ->  observations of t + 1
    ended lanes: final values into their slots, next episode
    full lanes:  final values into their slots, next slot of the same episode

Python work per lane is done only when an episode or a slot ends.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rlpool.agents.agent import Agent
from rlpool.envs.vec_env import FLAGS, LaneError, Options, VecEnv
from rlpool.errors import Where, WorkerError
from rlpool.loop.agent_driver import AgentDriver
from rlpool.loop.crash_scene import CrashScene
from rlpool.loop.history import History
from rlpool.loop.info_rows import InfoRows
from rlpool.loop.plan import Episode, Plan, ResumingPlan
from rlpool.loop.probe import probe
from rlpool.loop.takeover import take_over
from rlpool.memory.storage import Array
from rlpool.record.failures import agent_error, env_error
from rlpool.record.tape import Tape
from rlpool.seeding import NoiseStream
from rlpool.slots.blocks import NOISE_KEY, StepSpecs
from rlpool.slots.writer import SlotWriter


@dataclass(slots=True)
class _Lane:
    """What a lane runs.

    Attributes:
        episode: Its episode.
        slot: The slot it writes to.
        chunk: Number of the chunk within the episode.
        steps_before: Steps of the episode before row 0 of the slot; negative if the episode
            started later in the slot.
        parked: Its rows of the batch while it has no slot; ``None`` while it steps.
        tape: What the episode did in slots that it has left, ``None`` if it was in none.
    """

    episode: Episode
    slot: int
    chunk: int = 0
    steps_before: int = 0
    parked: list[tuple[Array, Array]] | None = None
    tape: Tape | None = None

    @property
    def start(self) -> int:
        """The first row of the slot that belongs to the episode."""
        return max(0, -self.steps_before)


class Rollout:
    """One agent on one batch of environments.

    Args:
        agent: The agent.
        env: The environments.
        worker: Number of the worker, for error messages.
        progress: One element that counts the steps, for whoever watches over this process.
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
        self._wants_history = agent.require_history()
        self._history: History | None = None
        self._infos = InfoRows(env.n_lanes)
        self._lanes: dict[int, _Lane] = {}
        self._live: list[int] = []
        self._waiting: list[int] = []  # idle or parked
        self._stepping: set[int] = set()  # those that were let step and are not ready yet
        self._rows = np.zeros(env.n_lanes, np.int64)
        self._strides = np.zeros(env.n_lanes, np.int64)

    @torch.inference_mode()
    def probe(
        self, seed: int, options: Sequence[Options], agent_info: dict[str, Array] | None
    ) -> StepSpecs:
        """Learn what a step consists of, see ``rlpool.loop.probe``.

        Args:
            seed: Seed of every lane's reset.
            options: Options of each lane's reset.
            agent_info: ``[n_lanes, ...]`` or ``None``.
        """
        self._infos.show(agent_info, {lane: lane for lane in range(self._n_lanes)})
        noise = None if self._noise is None else self._noise.tensor
        info = self._infos.tensors
        return probe(self._env, self._driver, self._scene, self._worker, seed, options, info, noise)

    @torch.inference_mode()
    def run(self, plan: Plan) -> None:
        """Run a plan to its end, or until it is cancelled, under ``torch.inference_mode``.

        Lanes whose episodes are unfinished at the end stay parked and go on with the next plan.

        Raises:
            EnvError, AgentError: If the user's code fails. All lanes are idle afterwards.
        """
        self._bind(plan)
        waits_for_all = self._env.min_ready is None or self._history is not None
        step = self._step if waits_for_all else self._step_some
        try:
            self._fill_lanes()
            while not plan.is_cancelled():
                if self._live:
                    step()
                    if self._waiting and plan.has_news():
                        self._fill_lanes()
                elif plan.wait():
                    self._fill_lanes()
                else:
                    return
        except BaseException:
            self.abandon()
            raise
        finally:
            del self._plan  # which may refer to whoever owns this rollout
        self.abandon()

    @torch.inference_mode()
    def resume(self, plan: ResumingPlan, tapes: Mapping[int, Tape]) -> None:
        """Take over episodes that another worker had begun, to go on with the next ``run``.

        Args:
            plan: Says what episodes they are.
            tapes: Lane to what its episode did, in windows; its seed and options are the plan's.

        Raises:
            EnvError: If an environment does not repeat what it did. All lanes are idle then.
        """
        try:
            for lane, tape in tapes.items():
                episode = plan.resumed(lane, tape.n_restarts)
                tape = replace(tape, seed=episode.seed, options=episode.options)
                at = Where(self._worker, lane, episode.number, 0, episode.seed, episode.options)
                take_over(self._env, tape, at, self._progress, self._scene, plan.agent_info or {})
                self._infos.show(plan.agent_info, {lane: episode.number})
                if tape.n_steps:
                    for key, value in tape.state.items():
                        self._driver.state[key][lane] = value
                else:
                    self._driver.start([lane], self._infos.tensors)
                parked = self._kept_rows(lane)
                self._lanes[lane] = _Lane(episode, episode.slot, 0, tape.n_steps, parked, tape)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Forget all episodes, finished or not."""
        for lane, running in self._lanes.items():
            if running.parked is None:
                self._writer.abandon(running.slot, self._steps_in_slot(lane))
                self._running[lane] = -1
        self._lanes.clear()
        self._stepping.clear()

    # The loop -------------------------------------------------------------------------------

    def _bind(self, plan: Plan) -> None:
        """Prepare the views that a plan's steps read and write through."""
        self._plan = plan
        env, driver, layout = self._env, self._driver, plan.layout
        self._current = dict(env.current)
        if self._noise is not None:
            self._current[NOISE_KEY] = self._noise.tensor.numpy()
        self._observation = {key: torch.from_numpy(a) for key, a in self._current.items()}
        # What a step does not rewrite is shown as a copy, in case the agent changes it.
        self._shown_flags = np.array(env.flags)
        for key, flags in zip(FLAGS, self._shown_flags, strict=True):
            self._observation[key] = torch.from_numpy(flags)
        self._writer = SlotWriter(layout, plan.arrays, self._current, driver.state)
        self._running = plan.arrays.control["running"][self._worker].data
        # The rows' numbers themselves are shared: they tell how far a worker got that died.
        self._slots = plan.arrays.control["slot"][self._worker].data
        self._rows = plan.arrays.control["row"][self._worker]
        self._scene.bind(plan.arrays.rows, self._current, driver.state, self._rows)
        self._steps_before = plan.arrays.control["steps_before"][self._worker].data
        self._n_finished = plan.arrays.control["n_finished"].data
        self._n_timesteps = layout.n_timesteps
        self._restarts = layout.restarts
        # Idle lanes write into the slot behind the last, each into a row of its own if it can.
        spare = np.arange(self._n_lanes) % layout.n_timesteps
        self._spare_rows = layout.n_slots * layout.n_timesteps + spare
        if self._wants_history and self._history is None:
            self._history = History(layout.step)
        self._waiting = list(range(self._n_lanes))
        self._take_stock()

    def _step(self) -> None:
        """Step all live lanes together."""
        rows = self._rows
        outputs = self._act(rows)
        try:
            ended = self._env.step_lanes(self._live, outputs)
        except LaneError as error:
            raise self._failure(error, error.lane, error.call) from error.__cause__
        self._writer.write_after(rows)
        np.add(rows, self._strides, out=rows)
        self._conclude(ended)

    def _step_some(self) -> None:
        """Step lanes that are ready, without waiting for those that are slow.

        Every lane keeps its row of the batch, its noise and its state, and the rows of lanes that
        are stepping go to the spare slot: an episode has the same bits as with ``_step``,
        whichever lanes were ready at the same time.
        """
        env = self._env
        free = [lane for lane in self._live if lane not in self._stepping]
        outputs = self._act(self._rows_of(free), free) if free else {}
        try:
            ready = env.step_some(env.min_ready or 1, free, outputs)
        except LaneError as error:
            raise self._failure(error, error.lane, error.call) from error.__cause__
        self._stepping.update(free)
        # A lane may still be stepping for a plan that was given up.
        ready = [lane for lane in ready if lane in self._stepping]
        self._stepping.difference_update(ready)
        self._writer.write_after(self._rows_of(ready))
        self._rows[ready] += 1
        done = env.current["done"]
        self._conclude([lane for lane in ready if done[lane]])

    def _act(self, rows: Array, lanes: Sequence[int] | None = None) -> dict[str, Array]:
        """Call the agent for lanes, all by default, and write what it was called with and gave."""
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
        try:
            outputs = driver.act(self._observation, self._infos.tensors, history)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise self._failure(error, self._live[0], "agent") from error
        if driver.state:
            for lane in starting:
                writer.write_state(int(self._rows[lane]), lane)
        if self._history is not None:
            self._history.record({**before, **driver.state, **outputs}, self._live)
        writer.write_outputs(rows, outputs)
        driver.commit(lanes)
        return outputs

    def _rows_of(self, lanes: Sequence[int]) -> Array:
        """The row of each lane: its own for some lanes, one of the spare slot for the others."""
        rows: Array = self._spare_rows.copy()
        rows[lanes] = self._rows[lanes]
        return rows

    def _conclude(self, ended: Sequence[int]) -> None:
        self._progress[0] += 1
        self._steps_until_full -= 1
        if ended or not self._steps_until_full:
            self._turn_over(ended)

    # When an episode or a slot ends ---------------------------------------------------------

    def _turn_over(self, ended: Sequence[int]) -> None:
        """Complete the slots that are done, and give their lanes something new."""
        if ended and self._restarts:
            self._restart(ended)
        elif ended:
            for lane in ended:
                self._finish(lane)
        if not self._steps_until_full:
            for lane in self._live:
                if lane in self._lanes and self._steps_in_slot(lane) == self._n_timesteps:
                    self._park(lane)
        self._plan.flush()
        self._fill_lanes()

    def _finish(self, lane: int) -> None:
        """Complete the last slot of an episode; the lane is idle then."""
        running = self._lanes[lane]
        length, is_first = self._steps_in_slot(lane), running.steps_before == 0
        self._writer.complete(running.slot, lane, length, is_first)
        del self._lanes[lane]  # only now, so that what stops this before marks the slot as dirty
        self._waiting.append(lane)
        self._running[lane] = -1
        self._n_finished[self._worker] += 1
        self._plan.chunk_done(running.episode.number, running.slot, running.chunk, True)

    def _park(self, lane: int) -> None:
        """Complete a full slot, and put the lane aside until it gets another.

        Meanwhile its rows of the batch may be overwritten, so they are kept.
        """
        running = self._lanes[lane]
        if running.start < self._n_timesteps:
            running.tape = running.tape or Tape(running.episode.seed, running.episode.options)
            self._scene.leave_slot(running.tape, lane, running.slot, running.start)
        self._waiting.append(lane)
        self._writer.complete(running.slot, lane, self._n_timesteps, running.steps_before == 0)
        self._plan.chunk_done(running.episode.number, running.slot, running.chunk, False)
        running.steps_before += self._n_timesteps
        running.chunk += 1
        running.parked = self._kept_rows(lane)

    def _kept_rows(self, lane: int) -> list[tuple[Array, Array]]:
        arrays = [*self._env.current.values(), *self._driver.state.values()]
        return [(array, np.array(array[lane])) for array in arrays]

    def _fill_lanes(self) -> None:
        """Give every lane that does not step something to do, if there is anything."""
        starting: dict[int, Episode] = {}
        waiting: list[int] = []
        for lane in sorted(self._waiting):
            running = self._lanes.get(lane)
            if running is not None:
                if not self._resume(lane, running):
                    waiting.append(lane)
                continue
            episode = self._plan.next_episode(lane)
            if episode is None:
                waiting.append(lane)
            else:
                starting[lane] = episode
                self._enter_slot(lane, _Lane(episode, episode.slot))
        self._waiting = waiting
        if starting:
            self._begin_episodes(starting)
        # Mostly the lanes that ended are those that start: then nothing else changes, and
        # _steps_until_full stays a lower bound.
        if waiting != self._waiting_at_stock or not self._steps_until_full:
            self._take_stock()

    def _resume(self, lane: int, running: _Lane) -> bool:
        """Let a parked lane go on in another slot, if there is one."""
        slot = self._plan.next_slot(lane, running.episode.number)
        if slot is None:
            return False
        for array, row in running.parked or ():
            array[lane] = row
        running.parked = None
        running.slot = slot
        self._enter_slot(lane, running)
        if self._noise is not None and running.episode.noise is not None:
            self._noise.start(lane, running.episode.noise, running.steps_before)
        return True

    def _restart(self, lanes: Sequence[int]) -> None:
        """Start the next episodes of lanes that go on in the same slot."""
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
        try:
            self._env.reset_lanes(lanes, seeds, options)
        except LaneError as error:
            raise self._failure(error, error.lane, error.call) from error.__cause__
        if self._plan.agent_info is not None or self._infos.arrays:
            rows = {lane: episode.number for lane, episode in episodes.items()}
            self._infos.show(self._plan.agent_info, rows)
        try:
            self._driver.start(lanes, self._infos.tensors)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise self._failure(error, lanes[0], "initial_state") from error
        for lane, episode in episodes.items():
            if self._noise is not None and episode.noise is not None:
                self._noise.start(lane, episode.noise)
            if self._history is not None:
                self._history.restart(lane)

    def _enter_slot(self, lane: int, running: _Lane) -> None:
        self._lanes[lane] = running
        self._slots[lane] = running.slot
        self._rows[lane] = running.slot * self._n_timesteps
        self._running[lane] = running.episode.number
        self._steps_before[lane] = running.steps_before

    def _take_stock(self) -> None:
        """Find the lanes that step, and for how long none of them fills its slot."""
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

    def _failure(self, error: BaseException, lane: int, call: str) -> WorkerError:
        """The error for what the user's code raised in a lane, the first of those called for."""
        where, capsule = Where(self._worker, lane), None
        running = self._lanes.get(lane)
        if running is not None:
            episode, row = running.episode, self._steps_in_slot(lane)
            number, step = episode.number, running.steps_before + row
            where = Where(self._worker, lane, number, step, episode.seed, episode.options)
            at, infos = (running.slot, running.start, row), self._plan.agent_info or {}
            tape = running.tape or Tape(episode.seed, episode.options)
            capsule = self._scene.running(call, where, tape, at, infos, self._infos.arrays)
        if isinstance(error, LaneError):
            return env_error(error, where, capsule)
        who = "the agent" if call == "agent" else "agent.initial_state"
        return agent_error(error, where, who, capsule)
