"""``check_agent``: whether an agent does what rlpool relies on.

It runs in an ``EpisodeBatcher``, which refuses in its own words what does not fit, and is called
again with what it got there. Beside ``creation`` and ``picklable`` the checks are

- ``returns``: ``(state, output, new_state)`` with one row per lane and an action of the action
  space's kind, and the same keys, shapes and dtypes in every call;
- ``action_fits``: actions are in the action space; outside the bounds of a ``Box`` is a warning;
- ``rows_are_independent``: the same row at the same place has the same results, bit by bit,
  whatever the other rows are;
- ``deterministic``: the same arguments, noise included, give the same bits, whatever was called in
  between and whatever the state of the global random generators;
- ``inputs_unchanged``: state, observations, ``agent_info`` and history are left as they are;
- ``update_takes_state_dict``: after ``update(state_dict())`` of another instance the agent acts
  like that one, also when the memory of the argument is gone;
- ``same_in_every_worker`` *: agents made in two workers are the same.

The last one, with an asterisk, only gives warnings.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from torch.utils import _pytree as pytree

from rlpool.agents.agent import Agent, call_problem
from rlpool.batch.batcher import EpisodeBatcher
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.infos import Info, info_rows
from rlpool.envs.gym_env import GymEnv
from rlpool.errors import AgentSpecError, SpecError
from rlpool.machine.arguments import whole_number
from rlpool.record.failures import described
from rlpool.seeding import worker_seed
from rlpool.testing.check_env import EnvChecks, outside
from rlpool.testing.checks import CannotCheck, Checks, Findings, Report, warning

_INPUTS = ("state", "observation", "agent_info", "history")

Tensors = dict[str, torch.Tensor]
"""What a call got or returned: ``state/...``, ``observation/...``, ``output/...`` and so on."""


class Samples(gymnasium.Env[Any, Any]):
    """Shows samples of an observation space, in episodes without an end."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space, self.action_space = copy.deepcopy(observation_space), action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Show a sample."""
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Show a sample."""
        return self.observation_space.sample(), 0.0, False, False, {}


class Recorder(Agent):
    """Passes calls on to an agent, and keeps copies of their arguments and results."""

    def __init__(self, inner: Agent) -> None:
        self.inner, self.calls = inner, list[tuple[Any, Tensors]]()
        for name in ("n_noise", "initial_state", "makes_initial_states", "require_history"):
            setattr(self, name, getattr(inner, name))

    def __call__(self, *inputs: Any) -> Any:
        """Call the agent."""
        given, returned = _copied(inputs), self.inner(*inputs)
        with suppress(TypeError, ValueError, AttributeError):  # the batcher refuses it
            self.calls.append((given, _results(returned)))
        return returned


class AgentChecks(Checks):
    """Checks of an agent.

    Attributes:
        envs: Where observations come from.
        action_space: The action space, ``None`` if it is not known.
        agent_info: ``[R, ...]``, rows are used in turns.
        update_info: What ``update`` is tried with, ``None`` for the agent's ``state_dict()``.
        sizes: Numbers of lanes to run it in.
        last_calls: Arguments and results of the last run, which may have failed.
    """

    envs: EnvChecks
    action_space: Any
    agent_info: DictTensor
    update_info: Any
    sizes: Sequence[int]
    last_calls: Sequence[tuple[Any, Tensors]] = ()

    def make(self, number: int = 0) -> Any:
        """Make an agent as worker ``number`` would."""
        made = super().make(number)
        if not isinstance(made, Agent):
            what = f"{self.name} returned {type(made).__name__}, not an Agent"
            raise SpecError(what, fix="subclass rlpool.Agent")
        if problem := call_problem(made):
            raise SpecError(problem[0], fix=problem[1])
        made.seed(worker_seed(self.root, number))
        return made

    def calls(self, n_lanes: int) -> list[tuple[Any, Tensors]]:
        """Arguments and results of an agent's calls, by a batcher whose lanes end at any time."""
        recorder, n_episodes, info = Recorder(self.make()), 2 * n_lanes, self.agent_info
        limits = itertools.cycle(range(self.envs.n_steps, 1, -1))
        if not info.empty():
            info = info.index(torch.arange(n_episodes, device="cpu") % info.n_elems())
        self.last_calls = recorder.calls
        with self.envs.lanes(n_lanes=n_lanes) as vec:
            if isinstance(vec, GymEnv):
                vec.wrap(lambda env: TimeLimit(env, next(limits)))
            create: Any = {"create_agent": lambda: recorder, "create_env": lambda: vec}
            sizes = self.envs.n_steps, n_episodes
            with EpisodeBatcher(*sizes, **create, n_threads=0, seeds=self.root) as batcher:
                recorder.calls.clear()  # of the call by which the batcher learns the keys
                batcher.execute(n_episodes, info, self.envs.options)
                batcher.get()
        return recorder.calls

    @cached_property
    def trace(self) -> list[tuple[Any, Tensors]]:
        """The calls with the most lanes."""
        return self.calls(max(self.sizes))

    def returns(self) -> Findings:
        """It returns three values, with the same keys, shapes and dtypes in every call."""
        first, *others = (self.calls(n)[0][1] for n in self.sizes)
        for other in others:
            one, two = ({k: torch.zeros_like(t[:1]) for k, t in r.items()} for r in (first, other))
            fix = "return the same for any number of rows: squeeze(1), not squeeze()"
            yield from self.differing("rows of batches of different sizes", one, two, fix)

    def action_fits(self) -> Findings:
        """Actions are in the action space."""
        if getattr(self.action_space, "dtype", None) is None:
            raise CannotCheck("the action space is not known, or nested: pass action_space")
        try:
            self.trace  # noqa: B018  (runs the agent)
        finally:  # the environment may have refused an action
            for _, result in self.last_calls:
                for action in result["output/action"].numpy().astype(self.action_space.dtype):
                    yield from outside(self.action_space, "an action", action)

    def rows_are_independent(self) -> Findings:
        """A row's results depend on that row alone."""
        agent = self.make()
        for inputs, result in self.trace:
            for row in range(len(next(iter(result.values())))):
                alike = _copied(inputs)
                for tensor in _tensors(_INPUTS, alike).values():
                    tensor[:] = tensor[row].clone()
                one, other = (_call(agent, each, row) for each in (inputs, alike))
                fix = "use no statistics over the batch (call eval()), and no indices of rows"
                yield from self.differing(
                    f"row {row} beside other rows, and alone", one, other, fix
                )

    def deterministic(self) -> Findings:
        """The same arguments give the same bits, whatever was called in between."""
        agent, first, last = self.make(), self.trace[0][0], self.trace[-1][0]
        fix = "draw from observation['noise'], call eval(), keep all but parameters in the state"
        for one, other in ((first, last), (last, first)):
            result, _, *again = [_call(agent, inputs) for inputs in (one, other, one, one)]
            for each in again:
                yield from self.differing("called twice, others in between", result, each, fix)

    def inputs_unchanged(self) -> Findings:
        """What it is called with stays as it was."""
        agent, fix = self.make(), "write into copies: x = x + 1, not x += 1 or x.add_(1)"
        for inputs, _ in self.trace:
            given = _copied(inputs)
            with torch.inference_mode():
                agent(*given)
            before, after = (_tensors(_INPUTS, each) for each in (inputs, given))
            yield from self.differing("before the call and after it", before, after, fix)

    def update_takes_state_dict(self) -> Findings:
        """``update`` takes what the learner's copy gives, and keeps none of its memory."""
        learner, agent, given = self.make(0), self.make(1), self.update_info
        if given is None:
            given = getattr(learner, "state_dict", dict)()
            if not given:
                raise CannotCheck("the agent has no state_dict(): pass update_info")
        # As it arrives in a worker: other memory, which is gone after the call.
        info = pytree.tree_map_only(torch.Tensor, torch.clone, given)
        agent.update(info)
        updated = [_call(agent, inputs) for inputs, _ in self.trace]
        pytree.tree_map_only(torch.Tensor, torch.zero_, info)
        fix = "let update() copy all that calls depend on, and state_dict() hold it"
        for (inputs, _), result in zip(self.trace, updated, strict=True):
            how = "before and after the memory that update got is gone"
            yield from self.differing(how, result, _call(agent, inputs), fix)
            if self.update_info is None:
                how = "after update(state_dict()), and of the agent that gave it"
                yield from self.differing(how, result, _call(learner, inputs), fix)

    def same_in_every_worker(self) -> Findings:
        """Each worker makes the same agent."""
        if self.is_instance:
            raise CannotCheck("an instance was given: pass the function that makes it")
        agents = self.make(0), self.make(1)
        fix = "call batcher.update(agent.state_dict()) first, or seed it in create_agent"
        for inputs, _ in self.trace:
            one, other = (_call(agent, inputs) for agent in agents)
            yield from self.differing("agents made in two workers", one, other, fix, warning)


def _copied(inputs: Sequence[Any]) -> Any:
    """The arguments of a call in other memory."""
    return tuple(None if part is None else part.clone() for part in inputs)


def _tensors(names: Sequence[str], parts: Sequence[Any]) -> Tensors:
    """The tensors of arguments or results by name."""
    given = [(name, part) for name, part in zip(names, parts, strict=True) if part is not None]
    return {f"{name}/{key}": tensor for name, part in given for key, tensor in part.items()}


def _results(returned: Any) -> Tensors:
    """What a call returned, copied: the agent may use the memory again."""
    tensors = _tensors(("state", "output", "new_state"), returned)
    return {key: tensor.detach().cpu().clone() for key, tensor in tensors.items()}


def _call(agent: Agent, inputs: Sequence[Any], rows: Any = slice(None)) -> Tensors:
    """What an agent returns for copies of arguments, as in a worker."""
    with torch.inference_mode():
        returned = _results(agent(*_copied(inputs)))
    return {key: tensor[rows] for key, tensor in returned.items()}


def check_agent(
    agent: Any,
    env: Any,
    agent_args: Mapping[str, Any] | None = None,
    env_args: Mapping[str, Any] | None = None,
    *,
    action_space: Any = None,
    agent_info: Info = None,
    options: Mapping[str, Any] | None = None,
    update_info: Any = None,
    seed: int = 0,
    batch_sizes: Sequence[int] = (1, 2, 5),
    n_steps: int = 4,
    skip: Collection[str] = (),
    strict: bool = True,
) -> Report:
    """Check an agent against the contract of ``rlpool.Agent``, and report all problems at once.

    It runs in this process, as in a worker: under ``torch.inference_mode``. An instance that is
    given is copied. The process's global random generators
    are left as they were. Findings carry the names of their checks, which
    ``help(rlpool.testing.AgentContract)`` lists.

    Args:
        agent: What ``create_agent`` of a batcher is, or an agent.
        env: Where observations come from: what ``check_env`` takes, or an observation space, of
            which samples are shown.
        agent_args: Arguments of ``create_agent``.
        env_args: Arguments of ``create_env``.
        action_space: The action space, where ``env`` is an observation space.
        agent_info: As for ``execute``, with any number of rows, which are used in turns.
        options: ``options`` of every reset, like a row of ``env_info``.
        update_info: What ``update`` is tried with, instead of the agent's ``state_dict()``.
        seed: Root of all seeds.
        batch_sizes: Numbers of lanes to run it in, unless ``env`` makes a ``VecEnv``.
        n_steps: How many steps of an episode to look at, at least 2.
        skip: Names of checks to leave out.
        strict: Whether to raise where there are errors. Warnings never raise; they are in the
            report, and go to the logger ``rlpool``.

    Returns:
        The report: ``findings``, each with ``check``, ``severity``, ``what`` and ``fix``; it is
        true if none is an error, and ``print(report)`` shows everything.

    Raises:
        AgentSpecError: If ``strict`` and there are errors, with all of them.
        SpecError: For arguments that make no sense, or an environment that cannot be made.

    Example:
        >>> check_agent(create_agent, CountingEnv).ok
        True
    """
    checks = AgentChecks(agent, agent_args, seed, isinstance(agent, Agent))
    if isinstance(env, spaces.Space):
        env = partial(Samples, env, action_space)
    checks.envs = EnvChecks(env, env_args, seed, options, 2, whole_number("n_steps", n_steps, 2))
    checks.agent_info, checks.update_info = info_rows("agent_info", agent_info, None), update_info
    checks.sizes = [whole_number("a number of batch_sizes", n, 1) for n in batch_sizes or (0,)]
    try:
        with checks.envs.lanes() as vec:
            checks.action_space = getattr(vec, "action_space", None)
    except Exception as reason:
        what = f"there is no environment for the agent: {described(reason)}"
        raise SpecError(what, fix="pass what check_env takes, or an observation space") from reason
    found = checks.run(skip)
    if strict and not found.ok:
        raise AgentSpecError(f"check_agent: {found}")
    return found


@AgentChecks.contract(check_agent)
class AgentContract:
    """Inherit it, implement ``make_agent`` and ``make_env``, and the whole contract is run.

    ::

        class TestMyAgent(AgentContract):  # for unittest: (AgentContract, unittest.TestCase)
            def make_agent(self):
                return MyAgent()

            def make_env(self):
                return MyEnv()

    There is one test per check of ``check_agent``, such as ``test_deterministic``; a failing one
    says what is wrong and what to do. A check that does not apply is skipped, and warnings are
    given as warnings. To leave out a check, write ``test_deterministic = None`` in the subclass.

    Attributes:
        seed: Root of all seeds.
        batch_sizes: Numbers of lanes to run it in, unless ``env`` makes a ``VecEnv``.
        n_steps: How many steps of an episode to look at, at least 2.
        agent_info: As for ``execute``, rows are used in turn.
        options: ``options`` of every reset.
        action_space: The action space, where ``make_env`` returns none.
        update_info: What ``update`` is tried with, instead of the agent's ``state_dict()``.

    Example:
        >>> class TestCoin(AgentContract):
        ...     def make_agent(self):
        ...         return create_agent()
        ...
        ...     def make_env(self):
        ...         return CountingEnv()
        >>> TestCoin().test_deterministic()
    """

    def make_agent(self) -> Any:
        """Make a new agent."""
        raise NotImplementedError("define make_agent(self) in the test class")

    def make_env(self) -> Any:
        """Make what gives observations: anything that ``check_agent`` takes."""
        raise NotImplementedError("define make_env(self) in the test class")

    def _checked(self, **settings: Any) -> Report:
        return check_agent(self.make_agent, self.make_env(), **settings)
