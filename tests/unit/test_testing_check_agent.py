"""``check_agent`` names every check that an agent breaks, and passes those that are fine."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from rlpool import Agent, AgentSpecError, DictTensor, GymEnv, SpecError, sample_categorical
from rlpool.testing import CountingEnv, check_agent

from support.agents import (
    ConstantAgent,
    FunctionAgent,
    GruAgent,
    HistoryAgent,
    InfoEcho,
    NoisyAgent,
    zeros,
)
from support.envs import CountingEnv as PairEnv


class Net(nn.Module, Agent):
    """A recurrent policy that draws from its noise."""

    n_noise = 1

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(1, 4), nn.Linear(4, 2)

    def initial_state(self, agent_info: Any, n: int) -> DictTensor:
        return DictTensor({"hidden": torch.ones(n, 4)})

    def __call__(self, state, observation, agent_info=None, history=None):
        if state is None:
            state = self.initial_state(agent_info, observation.n_elems())
        hidden = self.cell(observation["frame"], state["hidden"])
        action, _ = sample_categorical(self.head(hidden), observation["noise"])
        return state, DictTensor({"action": action}), DictTensor({"hidden": hidden})


def create_env(seed: int, n_envs: int) -> GymEnv:
    return GymEnv([CountingEnv() for _ in range(n_envs)], seed)


AGENTS = [ConstantAgent(1), InfoEcho, HistoryAgent, NoisyAgent, GruAgent]


@pytest.mark.parametrize("agent", AGENTS)
def test_good_agents_pass_without_a_word(agent: Any) -> None:
    check_agent(agent, PairEnv, agent_info=DictTensor({"id": torch.arange(3)}))


def test_observations_come_from_functions_environments_and_names() -> None:
    check_agent(ConstantAgent, create_env, None, {"n_envs": 3})
    check_agent(ConstantAgent, CountingEnv(length=1))
    check_agent(ConstantAgent, "CartPole-v1")
    check_agent(ConstantAgent, CountingEnv, options={"length": 2})
    with pytest.raises(AgentSpecError, match="length"):
        check_agent(ConstantAgent, CountingEnv, options={"length": 0})


def test_nonsense_is_refused_by_name() -> None:
    refused = (
        ({"env": 7}, "function"),
        ({"agent": 7}, "function"),
        ({"agent_args": 7}, "agent_args"),
    )
    for changes, named in refused:
        with pytest.raises(SpecError, match=named):
            check_agent(**{"agent": ConstantAgent, "env": CountingEnv, **changes})


# Bad ones


def acting(function: Callable[..., Any]) -> Callable[[], Agent]:
    """An agent whose action is a function of the observation."""
    return returning(lambda state, o: (None, DictTensor({"action": function(o)}), None))


def returning(function: Callable[[Any, DictTensor], Any]) -> Callable[[], Agent]:
    return partial(FunctionAgent, lambda state, observation, *rest: function(state, observation))


def action_of(observation: DictTensor) -> DictTensor:
    return DictTensor({"action": zeros(observation)})


def raises(*arguments: Any) -> Any:
    raise KeyError("goal")


def in_place(state: Any, observation: DictTensor) -> Any:
    observation["frame"].add_(1)
    return None, action_of(observation), None


def state_in_place(state: Any, observation: DictTensor) -> Any:
    if state is None:
        state = DictTensor({"x": zeros(observation)})
    state["x"].add_(1)
    return state, action_of(observation), state


class Counts(ConstantAgent):
    """Remembers in itself how often it was called."""

    n_calls = 0

    def __call__(self, state, observation, agent_info=None, history=None):
        self.n_calls += 1
        return None, DictTensor({"action": zeros(observation) + self.n_calls % 2}), None


class Remembers(Net):
    """Begins an episode with what it remembers of the last one."""

    last = torch.zeros(1, 4)

    def initial_state(self, agent_info: Any, n: int) -> DictTensor:
        return DictTensor({"hidden": self.last[:1].expand(n, 4)})

    def __call__(self, *arguments: Any) -> Any:
        state, output, new_state = super().__call__(*arguments)
        self.last = new_state["hidden"].clone()
        return state, output, new_state


def mean(observation: DictTensor) -> torch.Tensor:
    return (observation["frame"][:, 0] > observation["frame"].mean()).long()


ERRORS: list[tuple[str, Any]] = [
    ("returns", raises),
    ("returns", acting(raises)),
    ("returns", returning(lambda state, observation: action_of(observation))),
    ("returns", acting(lambda o: zeros(o) if o["initial_state"].any() else zeros(o).int())),
    ("returns", acting(lambda o: zeros(o) if len(o["frame"]) > 1 else zeros(o).int())),
    ("returns", acting(lambda o: zeros(o).float())),
    ("returns", acting(lambda o: zeros(o) + 2)),
    ("rows_are_independent", acting(mean)),
    ("deterministic", Counts),
    ("forgets", Remembers),
    ("deterministic", acting(lambda o: torch.randint(2, (o.n_elems(),)))),
    ("inputs_unchanged", returning(in_place)),
    ("inputs_unchanged", returning(state_in_place)),
]


@pytest.mark.parametrize(("name", "agent"), ERRORS)
def test_what_is_wrong_is_an_error_of_its_check(name: str, agent: Any) -> None:
    with pytest.raises(AgentSpecError, match=f"\n{name}: "):
        check_agent(agent, CountingEnv)


def test_an_environment_that_cannot_be_made_is_named() -> None:
    with pytest.raises(AgentSpecError, match=r"returns: .*goal"):
        check_agent(ConstantAgent, raises)


def test_the_caller_and_an_instance_are_left_as_they_were() -> None:
    agent = Net()

    def state() -> str:
        return str([agent.state_dict(), random.getstate(), torch.get_rng_state().tolist()])

    before, n_threads = state(), torch.get_num_threads()
    with pytest.raises(AgentSpecError):
        check_agent(acting(lambda o: torch.randint(2, (o.n_elems(),))), CountingEnv)
    check_agent(agent, CountingEnv)
    assert not torch.is_inference_mode_enabled()
    assert (state(), torch.get_num_threads()) == (before, n_threads)
    assert all(parameter.requires_grad for parameter in agent.parameters())
