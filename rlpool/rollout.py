"""The step loop: the only place where an agent is called on environments.

One ``Rollout`` drives one agent over one ``VecEnv`` and writes into the slots of a block. What to
run is decided by a ``Plan``: which episode a lane starts next, which slot it writes to, what
happens to a finished chunk. Per step and batch it does::

    noise, observations, agent states  ->  row t of every lane's slot
    agent(state, observation)          ->  outputs into row t, new state
    env.step                           ->  observations of t + 1
    ended lanes: final values into their slots, next episode
    full lanes:  final values into their slots, next slot of the same episode

Nothing in it costs Python work per lane and key, except when an episode or a slot ends.
"""

from __future__ import annotations

import traceback
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from rlpool.agent import Agent
from rlpool.agent_driver import AgentDriver
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.vec_env import LaneError, Options, VecEnv
from rlpool.errors import (
    AgentError,
    AgentSpecError,
    EnvError,
    EnvSpecError,
    SpecError,
    Where,
    WorkerError,
    compose,
)
from rlpool.history import History
from rlpool.seeding import NoiseKey, NoiseStream
from rlpool.slots import NOISE_KEY, Arrays, Layout, StepSpecs, flat, successor_key
from rlpool.specs import TensorSpec, row_specs
from rlpool.storage import Array, batch_array

_DEBUG_HINT = "run it in this process to debug: EpisodeBatcher(..., n_threads=0)"


@dataclass(slots=True)
class Episode:
    """An episode to run.

    Attributes:
        number: Row of the request.
        seed: Seed of its reset.
        options: Its row of ``env_info``.
        noise_key: Where its noise starts.
        slot: Slot of its first chunk.
        n_restarts: How often its lane restarted on its own before it.
    """

    number: int
    seed: int
    options: Options
    noise_key: NoiseKey
    slot: int
    n_restarts: int = 0


class Plan(Protocol):
    """What a rollout runs and where it writes."""

    worker: int
    arrays: Arrays
    layout: Layout
    agent_info: dict[str, Array] | None

    def next_episode(self, lane: int) -> Episode | None:
        """The next episode of a lane that is idle, ``None`` if there is none (for now)."""

    def restarted(self, lane: int, episode: Episode) -> Episode:
        """The episode after one that ended inside a window, in the same slot."""

    def next_slot(self, lane: int, episode: int) -> int | None:
        """A slot for the next chunk of a lane's episode, ``None`` if there is none (for now)."""

    def chunk_done(self, episode: int, slot: int, chunk: int, is_last: bool) -> None:
        """A slot is complete: the episode ended, or it goes on in another slot."""

    def flush(self) -> None:
        """Let others know of the chunks done in this step."""

    def wait(self) -> bool:
        """With nothing left to step: wait for slots; False if there is nothing to wait for."""

    def has_news(self) -> bool:
        """Whether slots may have become available since a lane got none."""

    def is_cancelled(self) -> bool:
        """Whether the request was given up."""


@dataclass(slots=True)
class _Lane:
    """What a lane runs.

    Attributes:
        episode: Its episode.
        slot: The slot it writes to.
        chunk: Number of the chunk within the episode.
        steps_before: Steps of the episode before row 0 of the slot; negative if the episode
            started later in the slot.
    """

    episode: Episode
    slot: int
    chunk: int = 0
    steps_before: int = 0


class Rollout:
    """One agent on one batch of environments.

    Args:
        agent: The agent.
        env: The environments.
        worker: Number of the worker, for error messages.
        progress: One element that counts the steps, for whoever watches over this process.
    """

    def __init__(
        self,
        agent: Agent,
        env: VecEnv,
        worker: int = 0,
        progress: MutableSequence[int] | memoryview | None = None,
    ) -> None:
        self._env = env
        self._worker = worker
        self._progress = progress if progress is not None else [0]
        self._n_lanes = env.n_lanes
        self._driver = AgentDriver(agent, env.n_lanes)
        self._noise = NoiseStream(env.n_lanes, agent.n_noise) if agent.n_noise else None
        self._wants_history = agent.require_history()
        self._history: History | None = None
        self._observation: dict[str, torch.Tensor] = {}
        self._agent_info: dict[str, Array] = {}
        self._agent_info_tensors: DictTensor | None = None
        self._lanes: list[_Lane | None] = [None] * env.n_lanes
        self._parked: dict[int, list[tuple[Array, Any]]] = {}
        self._live: list[int] = []
        self._rows = np.zeros(env.n_lanes, np.int64)
        self._strides = np.zeros(env.n_lanes, np.int64)
        self._steps_until_full = 0
        self._lacks_slots = False
        self.specs: StepSpecs | None = None

    # Finding out what a step consists of ----------------------------------------------------

    def probe(
        self, seed: int, options: Sequence[Options], agent_info: dict[str, Array] | None
    ) -> StepSpecs:
        """Reset all lanes and call the agent once to learn all keys; nothing is kept.

        Args:
            seed: Seed of every lane's reset.
            options: Options of each lane's reset.
            agent_info: ``[n_lanes, ...]`` or ``None``.

        Raises:
            EnvError, AgentError: If the user's code fails.
            SpecError: If keys collide or actions do not fit the action space.
        """
        env = self._env
        if env.action_leaves is not None:
            env.declare_actions({key: leaf.spec for key, leaf in env.action_leaves.items()})
        try:
            env.reset_lanes(range(self._n_lanes), [seed] * self._n_lanes, options)
        except LaneError as error:
            where = Where(None, error.lane, error.lane, 0, seed, options[error.lane])
            raise self._env_error(error, where) from error.__cause__
        self._set_agent_info(agent_info, [(lane, lane) for lane in range(self._n_lanes)])
        history = self._empty_history() if self._wants_history else None
        self._observe()
        try:
            self._driver.start(range(self._n_lanes), self._agent_info_tensors)
            self._driver.act(self._observation, self._agent_info_tensors, history)
        except Exception as error:
            where = Where(None, None, 0, 0, seed, options[0])
            raise self._agent_error(error, where) from error
        self.specs = self._make_specs()
        return self.specs

    def _make_specs(self) -> StepSpecs:
        outputs = self._driver.output_specs or {}
        actions = {k: s for k, s in outputs.items() if k == "action" or k.startswith("action/")}
        leaves = self._env.action_leaves
        if leaves is None:
            self._env.declare_actions(actions)
        else:
            for key in sorted(leaves.keys() | actions.keys()):
                _refuse_misfit(key, actions.get(key), leaves[key].spec if key in leaves else None)
        self._observe()
        return StepSpecs(
            n_lanes=self._n_lanes,
            auto_reset=self._env.auto_reset,
            observation=row_specs(self._env.current),
            output=outputs,
            state=row_specs(self._driver.state),
            n_noise=0 if self._noise is None else self._noise.tensor.shape[1],
        )

    def _empty_history(self) -> TemporalDictTensor:
        """A history without steps, before the agent's outputs are known."""
        leaves = self._env.action_leaves or {}
        specs = row_specs(self._env.current)
        specs.update({successor_key(key): spec for key, spec in specs.items()})
        specs.update({key: leaf.spec for key, leaf in leaves.items()})
        rows = {
            key: torch.zeros(self._n_lanes, 0, *spec.shape, dtype=spec.torch_dtype)
            for key, spec in specs.items()
        }
        return TemporalDictTensor(rows, torch.zeros(self._n_lanes, dtype=torch.int64))

    def _observe(self) -> None:
        """Make the tensors that the agent sees: views on the environments' arrays."""
        self._observation = {k: torch.from_numpy(a) for k, a in self._env.current.items()}
        if self._noise is not None:
            self._observation[NOISE_KEY] = self._noise.tensor

    # The loop -------------------------------------------------------------------------------

    def run(self, plan: Plan) -> None:
        """Run a plan to its end, or until it is cancelled.

        Lanes whose episodes are unfinished at the end stay parked and go on with the next plan.

        Raises:
            EnvError, AgentError: If the user's code fails. All lanes are idle afterwards.
        """
        self._bind(plan)
        try:
            self._fill_lanes(plan)
            while True:
                if plan.is_cancelled():
                    self.abandon()
                    return
                if self._live:
                    self._step(plan)
                    if self._lacks_slots and plan.has_news():
                        self._fill_lanes(plan)
                elif plan.wait():
                    self._fill_lanes(plan)
                else:
                    return
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Forget all episodes; their slots are marked as written to."""
        for lane, running in enumerate(self._lanes):
            if running is not None and lane not in self._parked:
                self._mark_dirty(running.slot, self._steps_in_slot(lane))
                self._control["running"][self._worker, lane] = -1
        self._lanes = [None] * self._n_lanes
        self._parked.clear()
        self._set_live()

    def _bind(self, plan: Plan) -> None:
        """Prepare the views that a step writes through."""
        layout, arrays = plan.layout, plan.arrays
        self._plan, self._layout, self._control = plan, layout, arrays.control
        self._block_rows = arrays.rows
        self._n_steps = layout.n_timesteps
        sources = {**self._env.current, **self._driver.state}
        if self._noise is not None:
            sources[NOISE_KEY] = self._noise.tensor.numpy()
        targets = {key: flat(array, 2) for key, array in arrays.rows.items()}
        pairs = {key: (targets[key], flat(array, 1)) for key, array in sources.items()
                 if key in targets}
        self._before = [pair for key, pair in pairs.items() if key not in self._driver.state]
        self._states = [pairs[key] for key in self._driver.state]
        self._outputs = {
            key: (targets[key], arrays.rows[key].reshape(-1, *arrays.rows[key].shape[2:]))
            for key in layout.step.output
        }
        self._after = [
            (targets[successor_key(key)], flat(array, 1))
            for key, array in sources.items()
            if successor_key(key) in targets
        ]
        self._finals = [(array, sources[key]) for key, array in arrays.finals.items()]
        # Idle lanes write into the slot behind the last, each into a row of its own if it can.
        spare = (layout.n_slots * self._n_steps) + np.arange(self._n_lanes) % self._n_steps
        self._spare_rows = spare
        self._rows = spare.copy()
        if self._wants_history and self._history is None:
            self._history = History(layout)
        self._set_live()

    def _step(self, plan: Plan) -> None:
        rows, env, driver = self._rows, self._env, self._driver
        if self._noise is not None:
            self._noise.draw()
        for target, source in self._before:
            target[rows] = source
        for target, source in self._states:
            target[rows] = source
        outputs = self._act()
        for key, (target, matrix) in self._outputs.items():
            output = outputs[key]
            if output.ndim == 1:
                target[rows] = output
            else:
                matrix[rows] = output
        if self._history is not None:
            self._record_history(outputs)
        driver.commit()
        try:
            ended = env.step_lanes(self._live, outputs)
        except LaneError as error:
            raise self._env_error(error, self._where(error.lane)) from error.__cause__
        for target, source in self._after:
            target[rows] = source
        np.add(rows, self._strides, out=rows)
        self._steps_until_full -= 1
        self._progress[0] += 1
        if ended or not self._steps_until_full:
            self._turn_over(plan, ended)

    def _act(self) -> dict[str, Array]:
        driver = self._driver
        starting = driver.starting
        try:
            history = None if self._history is None else self._history.view(
                {**self._env.current, **driver.state}
            )
            outputs = driver.act(self._observation, self._agent_info_tensors, history)
        except Exception as error:
            raise self._agent_error(error, self._where(self._live[0])) from error
        for lane in starting:
            # Their state became known only now.
            for target, source in self._states:
                target[self._rows[lane]] = source[lane]
        return outputs

    def _record_history(self, outputs: dict[str, Array]) -> None:
        values = {**self._env.current, **self._driver.state, **outputs}
        if self._noise is not None:
            values[NOISE_KEY] = self._noise.tensor.numpy()
        if self._history is not None:
            self._history.record(values, self._live)

    # When an episode or a slot ends ---------------------------------------------------------

    def _turn_over(self, plan: Plan, ended: Sequence[int]) -> None:
        restart = []
        for lane in ended:
            if self._layout.restarts:
                restart.append(lane)
            else:
                self._finish(plan, lane, is_last=True)
        if restart:
            self._restart(plan, restart)
        for lane in self._live:
            running = self._lanes[lane]
            if running is not None and self._steps_in_slot(lane) == self._n_steps:
                self._finish(plan, lane, is_last=False)
        plan.flush()
        self._fill_lanes(plan)

    def _finish(self, plan: Plan, lane: int, *, is_last: bool) -> None:
        """Complete the slot that a lane wrote to."""
        running = self._running(lane)
        slot, length = running.slot, self._steps_in_slot(lane)
        for target, source in self._finals:
            target[slot] = source[lane]
        self._clear_behind(slot, length)
        control = self._control
        control["length"][slot] = length
        control["starts"][slot] = running.steps_before == 0
        if is_last:
            control["running"][self._worker, lane] = -1
            control["n_finished"][self._worker] += 1
            self._lanes[lane] = None
        else:
            self._park(lane, running)
        plan.chunk_done(running.episode.number, slot, running.chunk, is_last)

    def _park(self, lane: int, running: _Lane) -> None:
        """Put a lane aside between two slots: its rows in the batch may be overwritten."""
        running.steps_before += self._n_steps
        running.chunk += 1
        arrays = [*self._env.current.values(), *self._driver.state.values()]
        self._parked[lane] = [(array, np.array(array[lane])) for array in arrays]

    def _fill_lanes(self, plan: Plan) -> None:
        """Give every lane without a slot something to do, if there is anything."""
        self._lacks_slots = False
        for lane in sorted(self._parked):
            self._resume(plan, lane)
        episodes = {}
        for lane, running in enumerate(self._lanes):
            if running is None:
                episode = plan.next_episode(lane)
                if episode is not None:
                    episodes[lane] = episode
                else:
                    self._lacks_slots = True
        if episodes:
            self._start(plan, episodes)
        self._set_live()

    def _resume(self, plan: Plan, lane: int) -> None:
        running = self._running(lane)
        slot = plan.next_slot(lane, running.episode.number)
        if slot is None:
            self._lacks_slots = True
            return
        for array, row in self._parked.pop(lane):
            array[lane] = row
        running.slot = slot
        self._enter_slot(lane, running)
        if self._noise is not None:
            self._noise.start(lane, running.episode.noise_key, running.steps_before)

    def _start(self, plan: Plan, episodes: dict[int, Episode]) -> None:
        for lane, episode in episodes.items():
            self._lanes[lane] = _Lane(episode, episode.slot)
            self._enter_slot(lane, self._running(lane))
        self._begin_episodes(plan, episodes)

    def _restart(self, plan: Plan, lanes: Sequence[int]) -> None:
        """Start the next episodes of lanes that go on in the same slot."""
        episodes = {}
        for lane in lanes:
            running = self._running(lane)
            running.episode = episodes[lane] = plan.restarted(lane, running.episode)
            running.steps_before = -self._steps_in_slot(lane)
        self._begin_episodes(plan, episodes)

    def _begin_episodes(self, plan: Plan, episodes: dict[int, Episode]) -> None:
        lanes = list(episodes)
        seeds = [episode.seed for episode in episodes.values()]
        options = [episode.options for episode in episodes.values()]
        try:
            self._env.reset_lanes(lanes, seeds, options)
        except LaneError as error:
            raise self._env_error(error, self._where(error.lane)) from error.__cause__
        self._set_agent_info(plan.agent_info, [(k, e.number) for k, e in episodes.items()])
        try:
            self._driver.start(lanes, self._agent_info_tensors)
        except Exception as error:
            raise self._agent_error(error, self._where(lanes[0])) from error
        for lane, episode in episodes.items():
            if self._noise is not None:
                self._noise.start(lane, episode.noise_key)
            if self._history is not None:
                self._history.restart(lane)

    def _enter_slot(self, lane: int, running: _Lane) -> None:
        self._rows[lane] = running.slot * self._n_steps
        self._control["running"][self._worker, lane] = running.episode.number

    def _set_live(self) -> None:
        """Take stock of the lanes that step."""
        self._live = [
            lane
            for lane, running in enumerate(self._lanes)
            if running is not None and lane not in self._parked
        ]
        self._strides[:] = 0
        self._strides[self._live] = 1
        idle = self._strides == 0
        self._rows[idle] = self._spare_rows[idle]
        self._steps_until_full = min(
            (self._n_steps - self._steps_in_slot(lane) for lane in self._live), default=0
        )

    def _set_agent_info(
        self, agent_info: dict[str, Array] | None, rows: Sequence[tuple[int, int]]
    ) -> None:
        """Give lanes their rows of ``agent_info``: pairs of lane and row."""
        if agent_info is None:
            self._agent_info, self._agent_info_tensors = {}, None
            return
        if row_specs(agent_info) != row_specs(self._agent_info):
            # Idle lanes keep a row that is valid, whatever its values mean to the agent.
            first = rows[0][1]
            self._agent_info = {
                key: batch_array(spec, self._n_lanes) for key, spec in row_specs(agent_info).items()
            }
            for key, array in self._agent_info.items():
                array[:] = agent_info[key][first]
            self._agent_info_tensors = DictTensor(
                {key: torch.from_numpy(array) for key, array in self._agent_info.items()}
            )
        for lane, row in rows:
            for key, array in self._agent_info.items():
                array[lane] = agent_info[key][row]

    def _clear_behind(self, slot: int, length: int) -> None:
        """Zero the rows that an earlier use of the slot wrote behind this one's last."""
        dirty = int(self._control["dirty"][slot])
        if dirty > length:
            for array in self._block_rows.values():
                array[slot, length:dirty] = 0
        self._control["dirty"][slot] = length

    def _mark_dirty(self, slot: int, length: int) -> None:
        dirty = self._control["dirty"]
        dirty[slot] = max(int(dirty[slot]), min(length + 1, self._n_steps))

    def _steps_in_slot(self, lane: int) -> int:
        return int(self._rows[lane]) - self._running(lane).slot * self._n_steps

    def _running(self, lane: int) -> _Lane:
        running = self._lanes[lane]
        if running is None:
            raise LookupError(f"lane {lane} is idle")
        return running

    # Errors ---------------------------------------------------------------------------------

    def _where(self, lane: int) -> Where:
        running = self._lanes[lane]
        if running is None:
            return Where(self._worker, lane)
        episode = running.episode
        step = running.steps_before + self._steps_in_slot(lane)
        return Where(self._worker, lane, episode.number, step, episode.seed, episode.options)

    def _env_error(self, error: LaneError, where: Where) -> EnvError:
        cause = error.__cause__ or error
        kind = EnvSpecError if isinstance(cause, SpecError) else EnvError
        return kind(
            _what(f"env.{error.call}", cause),
            where=where._replace(worker=self._worker),
            fix=_DEBUG_HINT,
            traceback_text=_text_of(cause),
        )

    def _agent_error(self, error: Exception, where: Where) -> AgentError:
        kind = AgentSpecError if isinstance(error, SpecError) else AgentError
        return kind(
            _what("the agent", error),
            where=where._replace(worker=self._worker),
            fix=_DEBUG_HINT,
            traceback_text=_text_of(error),
        )


def _what(who: str, error: BaseException) -> str:
    if isinstance(error, SpecError):
        return f"{who}: {error}"
    return f"{who} raised {type(error).__name__}: {error}"


def _text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _refuse_misfit(key: str, given: TensorSpec | None, wanted: TensorSpec | None) -> None:
    """Refuse actions that do not fit the action space."""
    if given is None or wanted is None:
        raise SpecError(
            f"action {key!r}: the agent gives {given or 'nothing'}, "
            f"the action space has {wanted or 'no such key'}"
        )
    floats = given.dtype.kind == "f", wanted.dtype.kind == "f"
    if given.shape != wanted.shape or floats[0] != floats[1]:
        raise SpecError(
            compose(
                f"action {key!r}: the agent gives {given} per row, the action space wants {wanted}",
                fix="return actions of the action space's shape and kind",
            )
        )
