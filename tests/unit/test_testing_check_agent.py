"""``check_agent`` names every check that an agent fails, and accepts good agents."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gymnasium.spaces import Discrete

from rlpool import Agent, AgentSpecError, DictTensor, GymEnv
from rlpool.testing import CountingEnv, check_agent

from support.agents import (
    ConstantAgent,
    FunctionAgent,
    GruAgent,
    InfoEcho,
    zeros,
)
from support.envs import CountingEnv as PairEnv
from support.scripted import ScriptedAgent


def create_env(seed: int, n_envs: int) -> GymEnv:
    return GymEnv([CountingEnv() for _ in range(n_envs)], seed)


SCRIPTED = partial(ScriptedAgent, Discrete(9), n_noise=2)
AGENTS = [ConstantAgent(1), InfoEcho, GruAgent, partial(SCRIPTED, keeps="initial", history=True)]


@pytest.mark.parametrize("agent", AGENTS)
def test_good_agents_pass_silently(agent: Any) -> None:
    check_agent(agent, PairEnv, agent_info=DictTensor({"id": torch.arange(3)}))


def test_observations_come_from_functions_environments_and_names() -> None:
    check_agent(ConstantAgent, create_env, None, {"n_envs": 3})
    check_agent(ConstantAgent, CountingEnv(length=1))
    check_agent(ConstantAgent, "CartPole-v1")
    check_agent(ConstantAgent, CountingEnv, options={"length": 2})
    with pytest.raises(AgentSpecError, match="length"):
        check_agent(ConstantAgent, CountingEnv, options={"length": 0})


# Bad ones


def acting(function: Callable[..., Any]) -> Callable[[], Agent]:
    """Return an agent whose action is a function of the observation."""
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
    """Agent that counts its calls in an attribute."""

    n_calls = 0

    def __call__(self, state, observation, agent_info=None, history=None):
        self.n_calls += 1
        return None, DictTensor({"action": zeros(observation) + self.n_calls % 2}), None


class Remembers(GruAgent):
    """Agent that starts an episode with memory of the previous one."""

    def __init__(self) -> None:
        super().__init__(1, 2)
        self.last = torch.ones(1, 4)

    def __call__(self, state, observation, agent_info=None, history=None):
        state = state or DictTensor({"hidden": self.last.expand(observation.n_elems(), 4)})
        result = super().__call__(state, observation)
        self.last = result[2]["hidden"][:1].clone()
        return result


def mean(observation: DictTensor) -> torch.Tensor:
    return (observation["frame"][:, 0] > observation["frame"].mean()).long()


ERRORS: list[tuple[str, Any]] = [
    ("returns", acting(raises)),
    ("returns", returning(lambda state, observation: zeros(observation))),
    ("returns", acting(lambda o: zeros(o) if o["initial_state"].any() else zeros(o).int())),
    ("returns", acting(lambda o: zeros(o) if len(o["frame"]) > 1 else zeros(o).int())),
    ("returns", acting(lambda o: zeros(o).float())),
    ("rows_are_independent", acting(mean)),
    ("deterministic", Counts),
    ("forgets", Remembers),
    ("deterministic", acting(lambda o: torch.randint(2, (o.n_elems(),)))),
    ("inputs_unchanged", returning(in_place)),
    ("inputs_unchanged", returning(state_in_place)),
]


@pytest.mark.parametrize(("name", "agent"), ERRORS)
def test_each_defect_is_an_error_of_its_check(name: str, agent: Any) -> None:
    with pytest.raises(AgentSpecError, match=f"\n{name}: "):
        check_agent(agent, CountingEnv)


def test_the_caller_and_an_instance_are_unchanged() -> None:
    agent = GruAgent(1, 2)

    def state() -> str:
        return str([agent.cell.state_dict(), random.getstate(), torch.get_rng_state().tolist()])

    before, n_threads = state(), torch.get_num_threads()
    with pytest.raises(AgentSpecError):
        check_agent(acting(lambda o: torch.randint(2, (o.n_elems(),))), CountingEnv)
    check_agent(agent, CountingEnv)
    assert not torch.is_inference_mode_enabled()
    assert (state(), torch.get_num_threads()) == (before, n_threads)
    assert all(parameter.requires_grad for parameter in agent.cell.parameters())
