"""Rollouts of the agent that is checked, and records of its calls: inputs and results.

Their environment shows observations that were collected earlier, in random order, so that rows
differ even if the real environment is in the same state in every lane.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from rlpool.agents.agent import Agent, call_problem
from rlpool.batch.batcher import EpisodeBatcher
from rlpool.data.array_view import as_numpy
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.infos import Info, info_rows
from rlpool.envs.columns import Columns
from rlpool.envs.gym_env import GymEnv
from rlpool.errors import RlpoolError, SpecError
from rlpool.machine.arguments import whole_number
from rlpool.seeding import seeded_generators, worker_seed
from rlpool.specs import (
    DEFAULT_OBSERVATION_KEY,
    FLAGS,
    TensorSpec,
    row_specs,
    structure_of_space,
)
from rlpool.testing.episodes import EnvSubject, Lane, bits
from rlpool.testing.report import CannotCheck, Failed, Subject, user_code

_N_EPISODES, _N_STEPS = 16, 5  # that are collected; what the last step shows is left out
_CALL_FIX = (
    "let it take any number of rows, state None where rows start, and the keys of the "
    "environment; agent_info is None unless given"
)

Rows = dict[str, torch.Tensor]
Inputs = tuple[Any, Any, Any, Any]
"""State, observation, agent_info and history of a call."""


class Observations(NamedTuple):
    """What an environment shows, as dicts of arrays.

    Attributes:
        starting: After a reset.
        later: After a step; may hold a ``reward``.
        action_space: The action space, ``None`` if unknown.
    """

    starting: list[Any]
    later: list[Any]
    action_space: Any = None


class Shown(gymnasium.Env[Any, Any]):
    """Shows collected observations at random; the option ``length`` is that of the episode.

    Args:
        observations: What to show.
        action_space: Its action space.
        actions: The list to which it adds the actions that it gets.
    """

    def __init__(self, observations: Observations, action_space: Any, actions: list[Any]) -> None:
        self.observations, self.action_space, self.actions = observations, action_space, actions

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Show a starting observation."""
        super().reset(seed=seed)
        self.n_left = (options or {}).get("length", 1)
        return self._any_of(self.observations.starting), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Show a later observation."""
        self.n_left -= 1
        self.actions.append(action)
        observation, reward = self._any_of(self.observations.later), self.np_random.uniform(-1, 1)
        return observation, observation.pop("reward", reward), self.n_left <= 0, False, {}

    def _any_of(self, observations: list[Any]) -> Any:
        return copy.deepcopy(observations[self.np_random.integers(len(observations))])


class Result(NamedTuple):
    """What a call returned, in memory of its own."""

    state: Rows
    output: Rows
    new_state: Rows


Call = tuple[Inputs, Result]
"""A call's inputs, copied, and its result."""


class Recorder(Agent):
    """Passes calls on to an agent and records them in ``calls``."""

    def __init__(self, inner: Agent) -> None:
        self.inner = inner
        self.calls: list[Call] = []
        for name in ("n_noise", "initial_state", "makes_initial_states", "require_history"):
            setattr(self, name, getattr(inner, name))

    def __call__(self, *inputs: Any) -> Any:
        """Call the agent."""
        copies = copied(inputs)
        returned = self.inner(*inputs)
        # What cannot be read is refused by the rollout, with a reason.
        with contextlib.suppress(TypeError, ValueError, AttributeError):
            self.calls.append((copies, read(returned)))
        return returned


class Rollout(NamedTuple):
    """What happened in the rollouts of one batch size.

    Attributes:
        trace: The calls from step to step, all rows starting together.
        actions: What the environments were given.
        misfit: The failure of the rollouts in which the environments declared their action space,
            if they succeed without one.
    """

    trace: list[Call]
    actions: list[Any]
    misfit: Failed | None


class AgentSubject(Subject):
    """An agent, or a function that makes one, and what to call it with.

    Args:
        agent: The agent or the function.
        agent_args: Arguments of the function.
        observations: What it is shown.
        agent_info: ``[R, ...]``, rows are taken in turn; ``None`` for none.
        update_info: What ``update`` gets instead of the agent's ``state_dict()``.
        seed: Root of all seeds.
        batch_sizes: Numbers of rows to call it with.
        n_steps: How many steps of an episode to look at.
    """

    kind = "agent"

    def __init__(
        self,
        agent: Any,
        agent_args: Mapping[str, Any] | None,
        observations: Observations,
        agent_info: Info = None,
        update_info: Any = None,
        seed: int = 0,
        batch_sizes: Sequence[int] = (1, 2, 5),
        n_steps: int = 4,
    ) -> None:
        whole_number("n_steps", n_steps, 2)
        whole_number("the smallest of batch_sizes", min(batch_sizes, default=0), 1)
        super().__init__(agent, agent_args, seed, isinstance(agent, Agent))
        self.observations, self.update_info = observations, update_info
        self.agent_info = info_rows("agent_info", agent_info, None)
        self.batch_sizes, self.n_steps = tuple(batch_sizes), n_steps
        self.n_rows = max(batch_sizes)
        self.rollout = functools.cache(self._rollout)

    def agent(self, number: int = 0) -> Agent:
        """Make an agent as worker ``number`` would; raises ``Failed`` if there is none."""
        made = self.make(number)
        if not isinstance(made, Agent):
            what = f"{self.name} returned {type(made).__name__}, not an Agent"
            raise Failed(what, "subclass rlpool.Agent")
        if problem := call_problem(made):
            raise Failed(*problem)
        with contextlib.suppress(Exception):  # a check of its own complains
            made.seed(worker_seed(self.root, number))
        return made

    @functools.cached_property
    def two(self) -> tuple[Any, Any]:
        """Two new agents."""
        return self.agent(0), self.agent(1)

    @contextlib.contextmanager
    def conditions(self) -> Iterator[None]:
        """As in a worker: ``torch.inference_mode``, one thread, global generators of its own."""
        n_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.inference_mode(), seeded_generators(0):
                yield
        finally:
            torch.set_num_threads(n_threads)

    @property
    def trace(self) -> list[Call]:
        """The calls of the largest batch, from step to step."""
        return self.rollout(self.n_rows).trace

    def _rollout(self, n: int) -> Rollout:
        """Run episodes in ``n`` lanes.

        Actions that do not fit the action space hide no other mistakes: without the space they are
        whatever the agent returns.

        Raises:
            Failed: If the agent fails, or returns what does not fit.
        """
        try:
            return self._rollout_over(n, self.observations.action_space)
        except Failed as failure:
            with contextlib.suppress(Failed):
                return self._rollout_over(n, None)._replace(misfit=failure)
            raise

    def _rollout_over(self, n: int, action_space: Any) -> Rollout:
        """Run episodes that start together, then episodes that start at different times."""
        recorder = Recorder(self.agent())
        actions: list[Any] = []
        lengths = [2, *[self.n_steps] * n]

        def create_env(seed: int) -> GymEnv:
            envs = [Shown(self.observations, action_space, actions) for _ in range(n)]
            return GymEnv(envs, seed, keep_float64=True)  # observations are as they are stored

        try:
            with EpisodeBatcher(
                self.n_steps,
                len(lengths),
                create_agent=lambda: recorder,
                create_env=create_env,
                n_threads=0,
                seeds=self.root,
            ) as batcher:
                recorder.calls.clear()  # of the call by which the batcher learns the keys
                for together in (lengths[1:], lengths):
                    info = None
                    if not self.agent_info.empty():
                        rows = torch.arange(len(together), device="cpu")
                        info = self.agent_info.index(rows % self.agent_info.n_elems())
                    batcher.execute(len(together), info, {"length": together})
                    batcher.get()
        except RlpoolError as refusal:
            raise _failure_of(refusal, n) from refusal
        return Rollout(recorder.calls[: self.n_steps], actions, None)


def _failure_of(refusal: RlpoolError, n: int) -> Failed:
    """Why the library refused a rollout of ``n`` lanes."""
    what = refusal.what.removeprefix("the agent: ")
    return Failed(f"{what} (in a batch of {n})", refusal.own_fix or _CALL_FIX)


def call(agent: Agent, inputs: Inputs) -> Result:
    """Call an agent with copies of inputs; raises ``Failed`` if it fails."""
    with user_code("the call"):
        return read(agent(*copied(inputs)))


def copied(inputs: Sequence[Any]) -> Inputs:
    """The arguments of a call in other memory."""
    state, observation, agent_info, history = (
        None if part is None else part.clone() for part in inputs
    )
    return state, observation, agent_info, history


def read(returned: Any) -> Result:
    """What a call returned, copied: the agent may return the same buffers from its next call.

    Values are as they are stored, those of bfloat16 as float32.
    """
    state, output, new_state = (
        {key: torch.from_numpy(as_numpy(tensor).copy()) for key, tensor in (part or {}).items()}
        for part in returned
    )
    return Result(state, output, new_state)


def tensors_of(inputs: Inputs) -> dict[tuple[int, str], torch.Tensor]:
    """The tensors of the arguments of a call, by number of the argument and key."""
    given = ((number, part) for number, part in enumerate(inputs) if part is not None)
    return {(number, key): tensor for number, part in given for key, tensor in part.items()}


def specs_of(rows: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """Shape and dtype of a row under each key."""
    return row_specs({key: tensor.numpy() for key, tensor in rows.items()})


def described(rows: Rows) -> str:
    """Shapes and dtypes of a row in words."""
    return "{" + ", ".join(f"{key}: {spec}" for key, spec in sorted(specs_of(rows).items())) + "}"


def difference(first: Result, second: Result, row: int | None = None) -> str:
    """What differs between two results, or one row of them; empty if nothing does."""
    for name, part, other in zip(Result._fields, first, second, strict=True):
        if specs_of(part) != specs_of(other):
            return f"{name}: {described(part)} and {described(other)}"
        for key, tensor in part.items():
            one, two = (tensor, other[key]) if row is None else (tensor[row], other[key][row])
            if bits(one) != bits(two):
                largest = (one.double() - two.double()).abs().max() if one.numel() else 0
                return f"{key!r} of {name} differs, by up to {float(largest):.3g}"
    return ""


def observations_of(
    source: Any,
    env_args: Mapping[str, Any] | None,
    options: Mapping[str, Any] | None,
    action_space: Any,
    seed: int,
) -> Observations:
    """Get observations from whatever describes them.

    Args:
        source: An environment or what makes one, as for ``check_env``; an observation space, or a
            dict of them; or a ``DictTensor`` (or dict) of examples.
        env_args: Arguments of what makes one.
        options: ``options`` of resets.
        action_space: The action space where ``source`` has none.
        seed: Root of all seeds.

    Raises:
        SpecError: If no observations can be had.
    """
    is_of_spaces = isinstance(source, Mapping) and bool(source)
    if is_of_spaces and all(isinstance(value, spaces.Space) for value in source.values()):
        source = spaces.Dict(dict(source))
    if isinstance(source, spaces.Space):
        return _of_examples(_samples(source, seed), action_space)
    if isinstance(source, DictTensor | Mapping):
        if not all(isinstance(value, torch.Tensor) for value in source.values()):
            kinds = sorted({type(value).__name__ for value in source.values()})
            raise SpecError(
                f"observations are described by a dict of {kinds}",
                fix="give a dict of tensors [R, ...] (examples) or of spaces",
            )
        arrays = {key: tensor.detach().cpu().numpy() for key, tensor in source.items()}
        return _of_examples(arrays, action_space)
    return _collected(EnvSubject(source, env_args, options, None, seed))


def _samples(space: spaces.Space[Any], seed: int) -> dict[str, Any]:
    """Samples of an observation space, as environments' observations are stored."""
    space = copy.deepcopy(space)
    space.seed(seed)
    structure = structure_of_space(space, keep_float64=False, name="the observation space")
    columns = Columns(structure, DEFAULT_OBSERVATION_KEY, _N_EPISODES)
    columns.write(range(_N_EPISODES), [space.sample() for _ in range(_N_EPISODES)])
    return columns.arrays


def _of_examples(arrays: Mapping[str, Any], action_space: Any) -> Observations:
    """Examples without the keys that every rollout has."""
    last = arrays.get("last_action")
    if last is not None and action_space is None:
        action_space = spaces.Box(-np.inf, np.inf, last.shape[1:], last.dtype.type)
    own = {key for key in arrays if key in (*FLAGS, "noise") or key.startswith("last_action")}
    n_rows = min((len(array) for key, array in arrays.items() if key not in own), default=0)
    later = [{key: arrays[key][row] for key in arrays.keys() - own} for row in range(n_rows)]
    starting = [{key: row[key] for key in row if key != "reward"} for row in later]
    if not any(starting):
        raise SpecError("the examples have no rows", fix="give a few observations")
    return Observations(starting, later, action_space)


def _collected(subject: EnvSubject) -> Observations:
    """Step lane 0 with the subject's actions."""
    starting: list[Any] = []
    later: list[Any] = []
    try:
        with subject.opened() as instance, seeded_generators(0):
            lane = Lane(instance.vec or GymEnv([instance.made]))
            for number in range(_N_EPISODES):
                seeds, actions = [subject.seeds[0] ^ number], number % len(subject.seeds)
                episode = subject.run_together([lane], seeds, actions, _N_STEPS)[0]
                first, *others = episode.unless_failed().steps
                starting.append(first.observation)
                later += [{**step.observation, "reward": step.reward} for step in others[:-1]]
    except CannotCheck as failure:
        raise SpecError(
            f"no observations to call the agent with: {failure}",
            fix="check_env(create_env) says what is wrong; or give an observation space, or a "
            "DictTensor of example observations, instead of the environment",
        ) from failure.__cause__
    # Where every episode ends with its first step, only starting rows are ever shown.
    return Observations(starting, later or starting, getattr(instance.made, "action_space", None))
