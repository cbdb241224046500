"""Rollouts of the agent that is checked, and records of its calls: inputs and results.

The environment of these rollouts shows observations that were collected beforehand, in random
order, so that rows differ even if the real environment is in the same state in every lane.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from rlpool.agents.agent import Agent, call_problem
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.infos import Info, info_rows
from rlpool.envs.gym_env import GymEnv
from rlpool.envs.vec_env import FLAGS
from rlpool.errors import RlpoolError, SpecError, WorkerError
from rlpool.record.failures import DEBUG_HINT, LOCAL_HINT
from rlpool.seeding import seeded_generators, worker_seed
from rlpool.specs import DEFAULT_OBSERVATION_KEY, TensorSpec, row_specs, structure_of_space
from rlpool.testing.episodes import EnvSubject, action_arrays, bits, run_lanes, stacked
from rlpool.testing.report import CannotCheck, Failed, Subject, refused, user_code

N_ROWS = 16
"""How many different observations there are of each kind."""

N_VARIANTS = 4
"""How many rollouts with different observations there are of each batch size."""

_SUBCLASS = "subclass rlpool.Agent"
_STEPS = 5  # of an episode; what the last one shows, which may be the end, is left out
_CALL_FIX = (
    "let it take any number of rows, state None where rows start, and the keys of the "
    "environment; agent_info is None unless given"
)

Rows = dict[str, torch.Tensor]
Arrays = dict[str, Any]
Inputs = tuple[Any, Any, Any, Any]
"""State, observation, agent_info and history of a call."""


class Observations(NamedTuple):
    """What an environment shows: key to array ``[R, ...]``.

    Attributes:
        starting: After a reset.
        later: After a step; may have a ``reward``.
        action_space: The action space, ``None`` if unknown.
        stand_in: A space of the actions' shape and dtype, where nothing else is known of them.
    """

    starting: Arrays
    later: Arrays
    action_space: Any
    stand_in: Any = None


class Result(NamedTuple):
    """What a call returned, in memory of its own."""

    state: Rows
    output: Rows
    new_state: Rows


class Call(NamedTuple):
    """A call and its result; the inputs are copies."""

    inputs: Inputs
    result: Result


class Shown(gymnasium.Env[Any, Any]):
    """Shows collected observations at random; the option ``length`` is that of the episode.

    Args:
        observations: What to show.
        actions: Where the actions that it gets are kept.
    """

    def __init__(self, observations: Observations, actions: list[Any]) -> None:
        self.observations, self.actions = observations, actions
        self.action_space = observations.action_space or observations.stand_in

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Show a starting observation."""
        super().reset(seed=seed)
        self.n_left = (options or {}).get("length", 1)
        return self._row(self.observations.starting), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Show a later observation."""
        self.n_left -= 1
        self.actions.append(action)
        row = self._row(self.observations.later)
        reward = row.pop("reward", self.np_random.uniform(-1.0, 1.0))
        return row, reward, self.n_left <= 0, False, {}

    def _row(self, arrays: Arrays) -> Arrays:
        number = self.np_random.integers(len(next(iter(arrays.values()))))
        return {key: np.array(array[number]) for key, array in arrays.items()}


class Recorder(Agent):
    """Passes calls on and records them; actions that do not fit are replaced by ones that do.

    Args:
        inner: The agent.
        action_space: What actions have to fit, ``None`` for any.

    Attributes:
        calls: All calls so far.
        misfit: How actions did not fit, empty if they did.
    """

    def __init__(self, inner: Agent, action_space: Any) -> None:
        self.inner = inner
        self.n_noise = inner.n_noise
        self.initial_state = inner.initial_state  # type: ignore[method-assign]
        self.makes_initial_states = inner.makes_initial_states  # type: ignore[method-assign]
        self.require_history = inner.require_history  # type: ignore[method-assign]
        self.calls: list[Call] = []
        self.misfit = ""
        self._fitting: Arrays = {}
        if action_space is not None:
            space = copy.deepcopy(action_space)
            space.seed(0)
            samples = [space.sample() for _ in range(N_ROWS)]
            self._fitting = action_arrays(action_space, samples)

    def __call__(self, *inputs: Any) -> Any:
        """Call the agent."""
        copies = copied(inputs)
        returned = self.inner(*inputs)
        try:
            result = read(returned)
            actions = {key: t for key, t in result.output.items() if re.match("action(/|$)", key)}
            given, wanted = specs_of(actions), row_specs(self._fitting)
        except (TypeError, ValueError, AttributeError):
            return returned  # which the rollout refuses with a reason
        self.calls.append(Call(copies, result))
        n = inputs[1].n_elems()
        is_readable = actions and all(t.shape[:1] == (n,) for t in actions.values())
        if is_readable and not wanted and "action" not in actions:  # parts of an unknown space
            return result.state, {**result.output, "action": torch.zeros(n)}, result.new_state
        if not is_readable or not wanted or _kinds(given) == _kinds(wanted):
            return returned
        self.misfit = f"the agent's actions are {told(given)}, the action space has {told(wanted)}"
        others = {key: t for key, t in result.output.items() if key not in actions}
        rows = np.arange(n) % N_ROWS
        fitting = {key: torch.from_numpy(array[rows]) for key, array in self._fitting.items()}
        return result.state, {**others, **fitting}, result.new_state


class Rollout(NamedTuple):
    """What happened in the rollouts of one batch size.

    Attributes:
        traces: For each variant the calls from step to step, all rows starting together.
        actions: What the environments were given, if it fitted the action space's kind.
        misfit: How actions did not fit, empty if they did.
    """

    traces: list[list[Call]]
    actions: list[Any]
    misfit: str


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
            raise Failed(f"{self.name} returned {type(made).__name__}, not an Agent", _SUBCLASS)
        if problem := call_problem(made):
            finding = refused(SpecError(problem))
            raise Failed(finding.what, finding.fix)
        with contextlib.suppress(Exception):  # a check of its own complains
            made.seed(worker_seed(self.root, number))
        return made

    @functools.cached_property
    def two(self) -> tuple[Any, Any]:
        """Two that were made."""
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
        return self.rollout(self.n_rows).traces[0]

    def _rollout(self, n: int) -> Rollout:
        """Run episodes in ``n`` lanes, at first together, then starting at different times.

        Raises:
            Failed: If the agent fails, or returns what does not fit.
        """
        from rlpool.batch.batcher import EpisodeBatcher  # which stands above this package

        shown = self.observations
        recorder = Recorder(self.agent(), shown.action_space or shown.stand_in)
        actions: list[Any] = []
        traces = []
        lengths = [2, *[self.n_steps] * n]
        try:
            with EpisodeBatcher(
                self.n_steps,
                len(lengths),
                create_agent=lambda: recorder,
                create_env=lambda seed: GymEnv(
                    [Shown(shown, actions) for _ in range(n)], seed, keep_float64=True
                ),
                n_threads=0,
                seeds=self.root,
            ) as batcher:
                for variant in range(N_VARIANTS if n == self.n_rows else 1):
                    recorder.calls.clear()
                    batcher.execute(n, self._info(n, variant), {"length": self.n_steps})
                    batcher.get()
                    traces.append(recorder.calls[: self.n_steps])
                    if not variant:
                        del actions[n * self.n_steps :]
                batcher.execute(len(lengths), self._info(len(lengths), 0), {"length": lengths})
                batcher.get()
        except RlpoolError as refusal:
            raise _failure_of(refusal, n) from refusal
        return Rollout(traces, actions, recorder.misfit)

    def _info(self, n: int, variant: int) -> Info:
        """The rows' ``agent_info``."""
        if self.agent_info.empty():
            return None
        rows = (torch.arange(n, device="cpu") + 3 * variant) % self.agent_info.n_elems()
        return self.agent_info.index(rows)


def _failure_of(refusal: RlpoolError, n: int) -> Failed:
    """Why the library refused a rollout of ``n`` lanes."""
    what, _, fix = str(refusal).partition("\n  fix:   ")
    if isinstance(refusal, WorkerError):
        what, fix = refusal.what.removeprefix("the agent: "), refusal.fix
    is_specific = fix and fix not in (DEBUG_HINT, LOCAL_HINT)
    return Failed(f"{what} (in a batch of {n})", fix if is_specific else _CALL_FIX)


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
    """What a call returned, copied: the agent may return the same buffers from its next call."""
    state, output, new_state = returned
    return Result(
        *(
            {key: tensor.detach().cpu().clone() for key, tensor in (part or {}).items()}
            for part in (state, output, new_state)
        )
    )


def tensors_of(inputs: Inputs) -> dict[tuple[int, str], torch.Tensor]:
    """The tensors of the arguments of a call, by number of the argument and key."""
    return {
        (number, key): tensor
        for number, part in enumerate(inputs)
        if part is not None
        for key, tensor in part.items()
    }


def specs_of(rows: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """Shape and dtype of a row under each key."""
    return row_specs({key: tensor.numpy() for key, tensor in rows.items()})


def told(specs: Mapping[str, TensorSpec]) -> str:
    """Shapes and dtypes in words."""
    return "{" + ", ".join(f"{key}: {spec}" for key, spec in sorted(specs.items())) + "}"


def difference(first: Result, second: Result, row: int | None = None) -> str:
    """What differs between two results, or one row of them; empty if nothing does."""
    for name, part, other in zip(Result._fields, first, second, strict=True):
        if specs_of(part) != specs_of(other):
            return f"{name}: {told(specs_of(part))} and {told(specs_of(other))}"
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
        SpecError: If there are none to be had.
    """
    is_of_spaces = isinstance(source, Mapping) and bool(source)
    if is_of_spaces and all(isinstance(value, spaces.Space) for value in source.values()):
        source = spaces.Dict(dict(source))
    if isinstance(source, spaces.Space):
        source.seed(seed)
        structure = structure_of_space(source, keep_float64=False, name="observation_space")
        samples = [source.sample() for _ in range(N_ROWS)]
        rows = stacked(structure, DEFAULT_OBSERVATION_KEY, samples)
        return Observations(rows, rows, action_space)
    if isinstance(source, DictTensor | Mapping):
        return _of_examples(source, action_space)
    return _collected(EnvSubject(source, env_args, options, None, seed))


def _of_examples(examples: Any, action_space: Any) -> Observations:
    """Examples without the keys that every rollout has."""
    if not all(isinstance(value, torch.Tensor) for value in examples.values()):
        kinds = sorted({type(value).__name__ for value in examples.values()})
        raise SpecError(
            f"observations are described by a dict of {kinds}",
            fix="give a dict of tensors [R, ...] (examples) or of spaces",
        )
    rows = {key: tensor.detach().cpu().numpy() for key, tensor in examples.items()}
    own = {key for key in rows if key in (*FLAGS, "noise") or key.startswith("last_action")}
    shown = {key: array for key, array in rows.items() if key not in own}
    starting = {key: array for key, array in shown.items() if key != "reward"}
    if not starting or not all(len(array) for array in shown.values()):
        raise SpecError("the examples have no rows", fix="give a few observations")
    last = rows.get("last_action")
    stand_in = (
        None if last is None else spaces.Box(-np.inf, np.inf, last.shape[1:], last.dtype.type)
    )
    return Observations(starting, shown, action_space, stand_in)


def _collected(subject: EnvSubject) -> Observations:
    """Step lane 0 with sampled actions."""
    starting: list[Arrays] = []
    later: list[Arrays] = []
    try:
        with subject.opened() as instance, seeded_generators(0):
            env = instance.vec or GymEnv([instance.made])
            for number in range(N_ROWS):
                actions = subject.actions(number % len(subject.seeds))
                seeds = {0: subject.seeds[0] ^ number}
                episode = run_lanes(env, seeds, subject.options, actions, _STEPS)[0]
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
    return Observations(_stacked(starting), _stacked(later or starting), instance.action_space)


def _stacked(rows: list[Arrays]) -> Arrays:
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def _kinds(specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """What of actions has to be that of the action space."""
    return {key: (spec.shape, spec.dtype.kind == "f") for key, spec in specs.items()}
