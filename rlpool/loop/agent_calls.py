"""Inputs and outputs of the agent for a batch of lanes."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from time import monotonic_ns

import numpy as np
import torch

from rlpool.agents.agent import Agent
from rlpool.agents.noise import NoiseStream
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.specs import FLAGS, TensorSpec, action_fix, is_action, row_specs
from rlpool.data.storage import NDArray, batch_array
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.vec_env import Options, VecEnv
from rlpool.errors import SpecError
from rlpool.loop.agent_driver import AgentDriver, AgentFailure
from rlpool.loop.plan import Lane, Plan
from rlpool.observe.control import WorkerRecord
from rlpool.slots.blocks import NOISE_KEY, Layout, StepSpecs, successor_key
from rlpool.slots.trajectories import Slice, trajectories_of


class History:
    """The steps of each lane's episode so far, across slots, in memory that grows.

    Args:
        step: The keys of a step.

    Attributes:
        lengths: Number of steps of each lane.
    """

    _FIRST_CAPACITY = 64  # steps

    def __init__(self, step: StepSpecs) -> None:
        # Without restarts, because the history begins with the episode.
        self._layout = Layout(step, n_slots=1, n_timesteps=1, n_workers=1)
        n_lanes = step.n_lanes
        self.lengths = np.zeros(n_lanes, np.int64)
        self._rows = {
            key: np.zeros((n_lanes, self._FIRST_CAPACITY, *spec.shape), spec.dtype)
            for key, spec in self._layout.rows.items()
        }

    def restart(self, lane: int) -> None:
        """Clear a lane's steps at the start of an episode."""
        for array in self._rows.values():
            array[lane, : self.lengths[lane]] = 0
        self.lengths[lane] = 0

    def so_far(
        self, current: Mapping[str, NDArray], lane_of_row: NDArray, lanes: Sequence[int]
    ) -> TemporalDictTensor:
        """Copy the steps so far, ``[n_rows, longest, ...]``.

        Args:
            current: Key to array ``[n_lanes, ...]``, the values after the last step.
            lane_of_row: The lane of each row.
            lanes: The lanes that determine the longest history.
        """
        lengths = self.lengths[lane_of_row]
        longest = int(self.lengths[list(lanes)].max())
        rows = {key: array[lane_of_row, :longest] for key, array in self._rows.items()}
        finals = {key: current[key][lane_of_row] for key in self._layout.finals}
        part = Slice(rows, finals, lengths, np.ones_like(lengths))
        return trajectories_of(self._layout, lengths, lambda: part)

    def record(self, values: Mapping[str, NDArray], lanes: Sequence[int]) -> None:
        """Add one step.

        Args:
            values: Key to array ``[n_lanes, ...]``, for all keys of a row.
            lanes: The lanes that take this step.
        """
        rows = np.asarray(lanes)
        steps = self.lengths[rows]
        for key, array in self._rows.items():
            if steps.max() >= array.shape[1]:
                array = self._rows[key] = np.concatenate([array, np.zeros_like(array)], 1)
            array[rows, steps] = values[key][rows]
        self.lengths[rows] += 1


class AgentCalls:
    """Calls an agent for the lanes that step, and records its inputs and outputs.

    Args:
        agent: The agent.
        env: The environments.
        record: Receives the time taken by the agent.
        agent_rows: Number of rows per agent call; by default one per lane.

    Attributes:
        record: As given.
        driver: Calls the agent.
        infos: The batch's ``agent_info``: key to array ``[n_lanes, ...]``.
        noise: The batch's noise, ``None`` if the agent needs none.
        history: The agent's history, ``None`` if it does not need one.
        current: Key to array ``[n_lanes, ...]``: the agent's inputs, rewritten in place.
    """

    def __init__(
        self, agent: Agent, env: VecEnv, record: WorkerRecord, agent_rows: int | None
    ) -> None:
        self._env, self.record, self._n_lanes = env, record, env.n_lanes
        self.driver = AgentDriver(agent, env.n_lanes, agent_rows)
        self.noise = NoiseStream(env.n_lanes, agent.n_noise) if agent.n_noise else None
        self.history: History | None = None
        self.infos: dict[str, NDArray] = {}
        self.current: dict[str, NDArray] = {}
        self._sources: list[NDArray] = []  # inputs of the agent, all rewritten in place

    def probe(self, seeds: Sequence[int], options: Sequence[Options], resets: bool) -> StepSpecs:
        """Reset all lanes and call the agent, to learn keys, shapes and dtypes of a step.

        The agent gets ``infos`` unchanged, and has the new states after the call.

        Args:
            seeds: Seed of each lane's reset.
            options: Options of each lane's reset.
            resets: Whether to reset all lanes. Otherwise one lane is reset, and only if the
                observation keys are unknown, and the agent gets the current values.

        Raises:
            LaneError: If the user's code fails, or the actions do not fit the action space.
            SpecError: If keys collide.
        """
        env, driver = self._env, self.driver
        if resets:
            env.reset_all_next()
            env.reset_lanes(range(env.n_lanes), seeds, options)
        else:
            if env.columns is None:
                env.reset_lanes([0], seeds[:1], options[:1])
            env.begin_lanes(range(env.n_lanes))
        leaves = env.action_leaves  # some are only known after a reset
        if leaves is not None:
            env.declare_actions({key: leaf.spec for key, leaf in leaves.items()})
        wants_history = bool(driver.agent.require_history())
        self._call_first(wants_history)
        outputs = driver.output_specs or {}
        self._match_actions(outputs)
        steps = StepSpecs(
            n_lanes=env.n_lanes,
            auto_reset=env.auto_reset,
            observation=row_specs(env.current),
            output=outputs,
            state=row_specs(driver.state),
            n_noise=0 if self.noise is None else self.noise.tensor.shape[1],
            wants_history=wants_history,
            seeding=env.seeding,
        )
        self.history = History(steps) if wants_history else None
        return steps

    def _call_first(self, wants_history: bool) -> None:
        """Call the agent to learn its outputs and states."""
        driver, lanes = self.driver, range(self._n_lanes)
        observation, known = dict(self._env.current), dict(self._env.current)
        if self.noise is not None:
            observation[NOISE_KEY] = self.noise.tensor.numpy()

        def no_history(rows: NDArray, _: Sequence[int]) -> TemporalDictTensor:
            return _no_history({key: array[rows] for key, array in known.items()})

        for _ in range(1 + wants_history):  # the second history includes the agent's keys
            driver.forget()
            driver.start(lanes, self.infos)
            history = no_history if wants_history else None
            known |= driver.act(lanes, observation, self.infos, history) | driver.state
        driver.commit()  # idle lanes need a valid state

    def _match_actions(self, outputs: Mapping[str, TensorSpec]) -> None:
        """Check that environments and agent agree on the actions; dtypes may be converted."""
        env = self._env
        actions = {key: spec for key, spec in outputs.items() if is_action(key)}
        if env.action_leaves is None:
            env.declare_actions(actions)
            return
        wanted = {key: leaf.spec for key, leaf in env.action_leaves.items()}
        for key in sorted(wanted.keys() | actions.keys()):
            mine, theirs = actions.get(key), wanted.get(key)
            kinds = {spec and (spec.shape, spec.dtype.kind == "f") for spec in (mine, theirs)}
            if len(kinds) > 1:
                problem = SpecError(
                    f"action {key!r}: the agent gives {mine or 'nothing'} per row, "
                    f"the action space wants {theirs or 'no such key'}",
                    fix=action_fix(mine, theirs),
                )
                raise AgentFailure([0], "agent") from problem
        self.driver.converted_actions = {
            key: spec.dtype for key, spec in wanted.items() if spec.dtype != actions[key].dtype
        }

    def bind(self) -> bool:
        """Prepare the views of the batch, shared by all plans; False if they are unchanged."""
        env, driver = self._env, self.driver
        sources = [*env.current.values(), *driver.state.values()]
        if len(sources) == len(self._sources) and all(map(operator.is_, sources, self._sources)):
            return False
        self._sources = sources
        self.current = dict(env.current)
        if self.noise is not None:
            self.current[NOISE_KEY] = self.noise.tensor.numpy()
        self._observation = {key: torch.from_numpy(a) for key, a in self.current.items()}
        # Steps do not rewrite all flags, so the agent gets copies that it may change.
        self._flags_copy = np.array(env.flags)
        for key, flags in zip(FLAGS, self._flags_copy, strict=True):
            self._observation[key] = torch.from_numpy(flags)
        # The history records the inputs after the agent could have changed them.
        self._copies_all = env.shares_current or self.history is not None
        return True

    def declare_infos(self, agent_info: Mapping[str, NDArray]) -> None:
        """Set the keys of ``agent_info`` for the requests from now on.

        Args:
            agent_info: ``[n, ...]`` by episode; may be empty.
        """
        specs = row_specs(agent_info)
        if specs != row_specs(self.infos):
            self.infos = {key: batch_array(spec, self._n_lanes) for key, spec in specs.items()}

    def show_infos(self, lanes: Iterable[Lane]) -> None:
        """Copy the infos of lanes' episodes, which have the declared keys, into the batch."""
        for key, array in self.infos.items():
            for lane in lanes:
                array[lane.number] = lane.plan.agent_info[key][lane.row]

    def begin(self, numbers: Sequence[int], lanes: Sequence[Lane]) -> None:
        """Begin episodes with the next call."""
        if self.infos:
            self.show_infos(lanes)
        self.driver.start(numbers, self.infos, lanes)
        noise, history = self.noise, self.history
        for lane in lanes if noise or history else ():
            if noise is not None and lane.noise is not None:
                noise.start(lane.number, lane.noise)
            if history is not None:
                history.restart(lane.number)

    def act(
        self,
        plans: Sequence[Plan],
        lanes: Sequence[int],
        are_all: bool,
    ) -> dict[str, NDArray]:
        """Call the agent for the lanes that take this step; write its inputs and outputs.

        Args:
            plans: The running plans.
            lanes: The lanes.
            are_all: Whether these are all running lanes, and all of them step.

        Returns:
            The outputs ``[n_lanes, ...]``.

        Raises:
            AgentFailure: If the agent fails.
        """
        driver, record = self.driver, self.record
        if self.noise is not None:
            self.noise.draw(None if are_all else lanes)
        for plan in plans:
            rows = plan.rows if are_all else plan.rows_of(lanes)
            for target, source in plan.writer.before:
                target[rows] = source
        # Lanes that do not step repeat their last inputs, which the agent may have changed.
        full_batch = self._observation if are_all and not self._copies_all else None
        if full_batch:
            np.copyto(self._flags_copy, self._env.flags)
        history, n_steps = None, None
        if self.history is not None:
            n_steps = self.history.lengths.tolist()
            history = partial(self.history.so_far, {**self.current, **driver.state})
        record.agent_ns[0] -= monotonic_ns()
        outputs = driver.act(lanes, self.current, self.infos, history, n_steps, full_batch)
        record.agent_ns[0] += monotonic_ns()
        if self.history is not None:
            self.history.record({**self.current, **driver.state, **outputs}, lanes)
        for plan in plans:
            rows = plan.rows if are_all else plan.rows_of(lanes)
            for target, source in plan.writer.states:
                target[rows] = source
            for key, target, buffer, flat_buffer in plan.writer.outputs:
                if buffer is None:
                    target[rows] = outputs[key]
                else:
                    np.copyto(buffer, outputs[key])
                    target[rows] = flat_buffer
        if driver.state:
            # Parked lanes keep their states.
            driver.commit(None if len(lanes) == self._n_lanes else lanes)
        return outputs


def _no_history(current: Mapping[str, NDArray]) -> TemporalDictTensor:
    """Return a history without steps."""
    known = {key: torch.from_numpy(array)[:, None][:, :0] for key, array in current.items()}
    known |= {successor_key(key): tensor for key, tensor in known.items()}
    n_lanes = len(current["reward"])
    lengths = torch.zeros(n_lanes, dtype=torch.int64, device="cpu")
    # The agent's own keys are not known yet.
    tensors = defaultdict(lambda: torch.zeros(n_lanes, 0, device="cpu"), known)
    return TemporalDictTensor._wrap(tensors, lengths, DictTensor())
