"""``check_agent``: checks that an agent meets rlpool's requirements.

The agent runs in an ``EpisodeBatcher``, which raises its own errors for invalid results, and is
then called again with the recorded arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from gymnasium.wrappers import TimeLimit

from rlpool.agents.agent import Agent, agent_step, as_agent, is_agent
from rlpool.agents.device_agent import DeviceAgent
from rlpool.batch.batcher import EpisodeBatcher
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.infos import Info, info_rows
from rlpool.envs.gym_env import GymEnv
from rlpool.errors import AgentSpecError
from rlpool.seeding import worker_seed
from rlpool.testing.check_env import Checks, EnvChecks, Problems, differing

_N_LANES = (1, 2, 5)
"""Numbers of lanes to run it in, unless a ``VecEnv`` determines it."""

_N_STEPS = 4
"""Number of steps of an episode."""

_INPUTS = ("state", "observation", "agent_info", "history")

Tensors = dict[str, torch.Tensor]
"""Arguments or results of a call: ``state/...``, ``observation/...``, ``output/...`` etc."""


class Recorder(DeviceAgent):
    """Records the calls of an agent.

    Attributes:
        calls: Copies of the arguments before and after each call, and of its results.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent, "cpu")
        self.calls = list[tuple[Any, Any, Tensors]]()

    def __call__(self, *inputs: Any) -> Any:
        """Call the agent."""
        given, returned = _copied(inputs), super().__call__(*inputs)
        with suppress(TypeError, ValueError, AttributeError):  # the batcher raises the error
            self.calls.append((given, _copied(inputs), _results(returned, inputs[0])))
        return returned


class AgentChecks(Checks):
    """Checks of an agent.

    Attributes:
        envs: Source of the observations.
        agent_info: ``[R, ...]``, rows are used in turn.
    """

    refusal = AgentSpecError
    envs: EnvChecks
    agent_info: DictTensor

    def make(self, number: int = 0) -> Any:
        """Make an agent, as worker ``number`` would."""
        made = super().make(number)
        agent = as_agent(made)
        agent.seed(worker_seed(self.root, number))
        return agent

    def calls(self, n_lanes: int, n_runs: int = 1) -> list[tuple[Any, Any, Tensors]]:
        """Record the calls of an agent by a batcher whose lanes end at any time.

        Args:
            n_lanes: Number of lanes.
            n_runs: Number of runs of the same episodes.
        """
        recorder, n_episodes, info = Recorder(self.make()), 2 * n_lanes, self.agent_info
        if not info.empty():
            info = info.index(torch.arange(n_episodes, device="cpu") % info.n_elems())
        vec, limits = self.envs.lanes(n_lanes=n_lanes), itertools.cycle(range(_N_STEPS, 1, -1))
        if isinstance(vec, GymEnv):
            vec.wrap(lambda env: TimeLimit(env, next(limits)))
        create: Any = {"create_agent": lambda: recorder, "create_env": lambda: vec}
        create |= {"n_workers": 0, "seeds": self.root}
        with EpisodeBatcher(_N_STEPS, n_episodes, **create) as batcher:
            recorder.calls.clear()  # the call by which the batcher discovers the keys
            for _ in range(n_runs):
                batcher.seek(0)
                batcher.execute(n_episodes, info, self.envs.options)
                batcher.get()
        return recorder.calls

    @cached_property
    def trace(self) -> list[tuple[Any, Any, Tensors]]:
        """The recorded calls with the most lanes."""
        return self.calls(max(_N_LANES))

    def returns(self) -> Problems:
        """Results have the same keys, shapes and dtypes in every call."""
        first, *others = (self.calls(n)[0][-1] for n in _N_LANES)
        for other in others:
            one, two = ({k: torch.zeros_like(t[:1]) for k, t in r.items()} for r in (first, other))
            fix = "return the same for any number of rows: squeeze(1), not squeeze()"
            yield from differing("rows of batches of different sizes", one, two, fix)

    def rows_are_independent(self) -> Problems:
        """A row's results depend on that row alone."""
        agent = self.make()
        for inputs, _, result in self.trace:
            for row in range(len(next(iter(result.values())))):
                alike = _copied(inputs)
                for tensor in _tensors(_INPUTS, alike).values():
                    tensor[:] = tensor[row].clone()
                one, other = (_call(agent, each, row) for each in (inputs, alike))
                fix = "use no statistics over the batch (call eval()), and no indices of rows"
                yield from differing(f"row {row} with others, and alone", one, other, fix)

    def deterministic(self) -> Problems:
        """The same arguments give the same bits, regardless of calls in between."""
        agent, first, last = self.make(), self.trace[0][0], self.trace[-1][0]
        fix = "draw from observation['noise'], call eval(), keep all but parameters in the state"
        for one, other in ((first, last), (last, first)):
            result, _, *again = [_call(agent, inputs) for inputs in (one, other, one, one)]
            for each in again:
                yield from differing("called twice, others in between", result, each, fix)

    def forgets(self) -> Problems:
        """No memory survives the end of an episode: repeated episodes give the same bits."""
        calls = self.calls(1, n_runs=2)
        half = len(calls) // 2
        fix = "keep memory only in the state, and reset it in initial_state"
        for (one, _, first), (other, _, again) in zip(calls[:half], calls[half:], strict=False):
            both = _tensors(_INPUTS, one) | first, _tensors(_INPUTS, other) | again
            found = [*differing("an episode, and the same one after others", *both, fix=fix)]
            if any("'observation/" in message for _, message, _ in found):
                return  # the environment or an earlier call is at fault
            yield from found

    def inputs_unchanged(self) -> Problems:
        """A call does not change its arguments."""
        fix = "write into copies: x = x + 1, not x += 1 or x.add_(1)"
        for inputs, after, _ in self.trace:
            one, other = (_tensors(_INPUTS, each) for each in (inputs, after))
            yield from differing("before the call and after it", one, other, fix)


def _copied(inputs: Sequence[Any]) -> Any:
    """Copy the arguments of a call."""
    return tuple(None if part is None else part.clone() for part in inputs)


def _tensors(names: Sequence[str], parts: Sequence[Any]) -> Tensors:
    """Return the tensors of arguments or results by name."""
    given = [(name, part) for name, part in zip(names, parts, strict=True) if part is not None]
    return {f"{name}/{key}": tensor for name, part in given for key, tensor in part.items()}


def _results(returned: Any, state: DictTensor | None) -> Tensors:
    """Copy the results of a call: the agent may reuse the memory."""
    tensors = _tensors(("state", "output", "new_state"), agent_step(returned, state))
    return {key: tensor.detach().cpu().clone() for key, tensor in tensors.items()}


def _call(agent: Agent, inputs: Sequence[Any], rows: Any = slice(None)) -> Tensors:
    """Call an agent with copies of arguments, as in a worker."""
    with torch.inference_mode():
        given = _copied(inputs)
        returned = _results(agent(*given), given[0])
    return {key: tensor[rows] for key, tensor in returned.items()}


def check_agent(
    agent: Any,
    env: Any,
    agent_args: Mapping[str, Any] | None = None,
    env_args: Mapping[str, Any] | None = None,
    *,
    agent_info: Info = None,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> None:
    """Check an agent against the interface of ``rlpool.Agent``, and report all problems at once.

    It reports the first problem of each kind:

    - an exception, or an invalid result: one without a row per lane, or with keys, shapes or
      dtypes that differ between calls;
    - an action outside a discrete action space;
    - a row whose results depend on other rows, bit for bit;
    - different bits from the same arguments, noise included, after other calls or with another
      state of the global random generators;
    - memory that survives the end of an episode;
    - in-place changes of state, observations, ``agent_info`` or history.

    The agent runs in this process under ``torch.inference_mode``, as in a worker. An instance is
    copied. The process's global random generators are restored.

    Args:
        agent: A ``create_agent`` function as for a batcher, or an agent.
        env: Source of the observations, as for ``check_env``.
        agent_args: Arguments of ``create_agent``.
        env_args: Arguments of ``create_env``.
        agent_info: As for ``execute``, with any number of rows, which are used in turn.
        options: ``options`` of every reset, like a row of ``env_info``.
        seed: Root of all seeds.

    Raises:
        AgentSpecError: Listing all errors.
        SpecError: For invalid arguments.

    Example:
        >>> check_agent(create_agent, CountingEnv)
    """
    checks = AgentChecks(agent, agent_args, seed, is_agent(agent))
    checks.envs = EnvChecks(env, env_args, seed, options, _N_STEPS)
    checks.envs.made = checks.made  # closed together
    checks.agent_info = info_rows("agent_info", agent_info, None)
    same = checks.rows_are_independent, checks.deterministic, checks.forgets
    checks.run(checks.returns, *same, checks.inputs_unchanged)
