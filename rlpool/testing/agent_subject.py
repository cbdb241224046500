"""The agent that is checked: how to get instances of it, and what to call them with."""

from __future__ import annotations

import contextlib
import copy
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

from rlpool.agents.agent import Agent
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.infos import Info, info_rows
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.vec_env import VecEnv
from rlpool.errors import SpecError
from rlpool.generators import seeded_generators
from rlpool.loop.history import History
from rlpool.loop.probe import empty_history
from rlpool.record.failures import described
from rlpool.seeding import root_from, worker_seed
from rlpool.slots.blocks import NOISE_KEY, StepSpecs
from rlpool.specs import TensorSpec, row_specs
from rlpool.testing.findings import Failed, refuse_arguments_of_instance
from rlpool.testing.observation_rows import ObservationRows

Rows = dict[str, torch.Tensor]


@dataclass
class Inputs:
    """The arguments of a call; ``state`` of ``None`` says that all rows start."""

    state: Rows | None
    observation: Rows
    agent_info: Rows | None
    history: TemporalDictTensor | None

    def copied(self) -> Inputs:
        """The same in other memory."""
        return Inputs(
            None if self.state is None else _clones(self.state),
            _clones(self.observation),
            None if self.agent_info is None else _clones(self.agent_info),
            None if self.history is None else self.history.clone(),
        )

    def with_row_of(self, other: Inputs, row: int) -> Inputs:
        """The same but for one row, which is taken from other inputs of the same kind."""
        mixed = self.copied()
        for mine, theirs in zip(mixed._parts(), other._parts(), strict=True):
            for key, tensor in mine.items():
                tensor[row] = theirs[key][row]
        return mixed

    def with_all_rows_like(self, row: int) -> Inputs:
        """The same but that every row is a copy of one of them."""
        alike = self.copied()
        for part in alike._parts():
            for tensor in part.values():
                tensor[:] = tensor[row].clone()
        return alike

    def _parts(self) -> list[Rows]:
        history = {} if self.history is None else dict(self.history.items())
        return [self.state or {}, self.observation, self.agent_info or {}, history]

    def n_rows(self) -> int:
        """Number of rows."""
        return len(next(iter(self.observation.values())))


@dataclass
class Result:
    """What a call returned, in memory of its own."""

    state: Rows
    output: Rows
    new_state: Rows

    def parts(self) -> dict[str, Rows]:
        """The three parts by name."""
        return {"state": self.state, "output": self.output, "new_state": self.new_state}


class AgentSubject:
    """An agent, or a function that makes one, and how to check it.

    Args:
        agent: The agent or the function.
        agent_args: Arguments of the function.
        rows: What to call it with.
        agent_info: ``[R, ...]``, rows are taken in turns; ``None`` for none.
        update_info: What ``update`` gets instead of the agent's ``state_dict()``.
        seed: Root of all seeds.
        batch_sizes: Numbers of rows to call it with.
        n_steps: How many steps of an episode to look at.

    Attributes:
        sent_to_workers: What has to be pickled.
    """

    def __init__(
        self,
        agent: Any,
        agent_args: Mapping[str, Any] | None,
        rows: ObservationRows,
        agent_info: Info = None,
        update_info: Any = None,
        seed: int = 0,
        batch_sizes: Sequence[int] = (1, 2, 5),
        n_steps: int = 4,
    ) -> None:
        self.is_instance = isinstance(agent, Agent)
        refuse_arguments_of_instance(self.is_instance, agent_args=agent_args)
        self.instance = agent if self.is_instance else None
        self.factory = None if self.is_instance else agent
        self.agent_args = dict(agent_args or {})
        self.rows = rows
        rows_of_info = info_rows("agent_info", agent_info, None)
        self.agent_info = None if rows_of_info.empty() else rows_of_info
        self.update_info = update_info
        self.batch_sizes = tuple(batch_sizes)
        self.n_steps = n_steps
        self.sent_to_workers: Any = (self.factory, self.agent_args)
        self._root = root_from(seed)

    @property
    def name(self) -> str:
        """What reports call it."""
        if self.instance is not None:
            return type(self.instance).__name__
        function = getattr(self.factory, "func", self.factory)
        name: str = getattr(function, "__qualname__", type(function).__name__)
        return name if inspect.isclass(function) else f"{name}()"

    @property
    def n_rows(self) -> int:
        """The largest batch."""
        return max(self.batch_sizes)

    def make(self, number: int = 0) -> Any:
        """Make an agent as worker ``number`` would, or copy the instance."""
        seed = worker_seed(self._root, number)
        with seeded_generators(seed):
            if self.instance is not None:
                return _copied(self.instance)
            return cast(Any, self.factory)(**self.agent_args)

    def agent(self, number: int = 0) -> Agent:
        """Make an agent.

        Raises:
            Failed: If there is none to be had.
        """
        try:
            made = self.make(number)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise Failed(f"no agent to check: {described(error)}") from error
        if not isinstance(made, Agent):
            raise Failed(f"no agent to check: {type(made).__name__} is none")
        with contextlib.suppress(Exception):  # a check of its own complains
            made.seed(worker_seed(self._root, number))
        return made

    def observation(self, agent: Agent, n: int, variant: int, step: int) -> Rows:
        """What the agent sees of ``n`` rows at a step, with noise if it wants that."""
        rows = self.rows.draw(n, variant, step)
        if agent.n_noise:
            generator = torch.Generator().manual_seed(1000 * variant + step)
            rows[NOISE_KEY] = torch.rand(n, agent.n_noise, generator=generator)
        return rows

    def info(self, n: int, variant: int) -> Rows | None:
        """The rows' ``agent_info``."""
        if self.agent_info is None:
            return None
        numbers = (torch.arange(n) + 3 * variant) % self.agent_info.n_elems()
        return {key: tensor[numbers] for key, tensor in self.agent_info.items()}

    def trace(self, agent: Agent, n: int, variant: int) -> list[Inputs]:
        """The arguments of the calls of ``n`` episodes that start together.

        Raises:
            Failed: If the agent fails.
        """
        info = self.info(n, variant)
        state: Rows | None = None
        if agent.makes_initial_states():
            state = initial_state(agent, info, n)
        history, no_state = self._history(agent, n, variant, state)
        trace = []
        for step in range(self.n_steps):
            observation = self.observation(agent, n, variant, step)
            seen = None
            if history is not None:
                current = {**no_state, **observation, **(state or {})}
                seen = history.view({key: tensor.numpy() for key, tensor in current.items()})
            inputs = Inputs(state, observation, info, seen).copied()
            trace.append(inputs)
            result = call(agent, inputs.copied())
            if history is not None:
                before = result.state if state is None else state
                written = {**no_state, **observation, **before, **result.output}
                arrays = {key: tensor.numpy() for key, tensor in written.items()}
                history.record(arrays, range(n))
            state = result.new_state
        return trace

    def _history(
        self, agent: Agent, n: int, variant: int, state: Rows | None
    ) -> tuple[History | None, Rows]:
        """An empty history for agents that want one, and zeros for their state."""
        if not agent.require_history():
            return None, {}
        observation = self.observation(agent, n, variant, 0)
        arrays = {key: tensor.numpy() for key, tensor in observation.items()}
        lanes = cast(
            VecEnv,
            types.SimpleNamespace(n_lanes=n, current=arrays, action_leaves=self.rows.action_leaves),
        )
        empty = empty_history(lanes, {})
        result = call(agent, Inputs(state, observation, self.info(n, variant), empty), copy=False)
        no_state = {key: torch.zeros_like(t) for key, t in result.new_state.items()}
        try:
            return History(step_specs(observation, result)), no_state
        except SpecError as error:
            raise Failed(str(error)) from error


def step_specs(observation: Rows, result: Result) -> StepSpecs:
    """What a step of such an agent consists of.

    Raises:
        SpecError: If keys collide.
    """

    def specs_of(rows: Rows) -> dict[str, TensorSpec]:
        return row_specs({key: tensor.numpy() for key, tensor in rows.items()})

    noise = observation.get(NOISE_KEY)
    return StepSpecs(
        n_lanes=len(next(iter(observation.values()))),
        auto_reset=False,
        observation=specs_of({k: t for k, t in observation.items() if k != NOISE_KEY}),
        output=specs_of(result.output),
        state=specs_of(result.new_state),
        n_noise=0 if noise is None else noise.shape[1],
    )


def call(agent: Agent, inputs: Inputs, copy: bool = True) -> Result:
    """Call an agent.

    Args:
        agent: The agent.
        inputs: The arguments, which the agent may change.
        copy: Whether to give it a copy of its history.

    Raises:
        Failed: If it raises or does not return three dicts of tensors.
    """
    history = inputs.history
    try:
        parts = agent(
            None if inputs.state is None else DictTensor(inputs.state),
            DictTensor(inputs.observation),
            None if inputs.agent_info is None else DictTensor(inputs.agent_info),
            history.clone() if copy and history is not None else history,
        )
        state, output, new_state = ({} if part is None else dict(part.items()) for part in parts)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise Failed(f"the call fails: {described(error)}") from error
    result = Result(*(_detached(part) for part in (state, output, new_state)))
    for name, part in result.parts().items():
        for key, tensor in part.items():
            if tensor.shape[:1] != (inputs.n_rows(),):
                raise Failed(f"{key!r} in its {name} has shape {list(tensor.shape)}")
    return result


def initial_state(agent: Agent, info: Rows | None, n: int) -> Rows:
    """What ``initial_state`` returns.

    Raises:
        Failed: If it fails.
    """
    try:
        state = agent.initial_state(None if info is None else DictTensor(info), n)
        return {} if state is None else _detached(dict(state.items()))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise Failed(f"initial_state fails: {described(error)}") from error


@contextmanager
def as_in_a_worker() -> Iterator[None]:
    """``torch.inference_mode``, one thread, global generators of its own."""
    n_threads = torch.get_num_threads()
    if n_threads != 1:
        torch.set_num_threads(1)
    try:
        with torch.inference_mode(), seeded_generators(0):
            yield
    finally:
        if n_threads != 1:
            torch.set_num_threads(n_threads)


def _clones(rows: Rows) -> Rows:
    return {key: tensor.clone() for key, tensor in rows.items()}


def _detached(rows: Mapping[str, Any]) -> Rows:
    """Copies, so that an agent may return the same buffers from its next call."""
    detached = {}
    for key, tensor in rows.items():
        if not isinstance(tensor, torch.Tensor):
            raise Failed(f"{key!r} is a {type(tensor).__name__}, no tensor")
        detached[key] = tensor.detach().cpu().clone()
    return detached


def _copied(agent: Agent) -> Agent:
    try:
        return copy.deepcopy(agent)
    except Exception:
        return agent
