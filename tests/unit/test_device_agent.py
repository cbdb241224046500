"""An agent on another device gives the same results as on the CPU."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock, call

import cloudpickle
import pytest
import torch
from gymnasium.spaces import Discrete

from rlpool import Agent, DeviceAgent, DictTensor, EpisodeBatcher, SpecError

from support.agents import GruAgent, StepCounter
from support.envs import assert_same_tensors, create_counting
from support.scripted import ScriptedAgent

N = 6
INFO = DictTensor({"id": torch.arange(N), "length": torch.arange(N) % 4 + 2})


def collected(agent: Agent, n_threads: int = 0) -> dict[str, torch.Tensor]:
    with EpisodeBatcher(
        5, N, lambda: agent, {}, create_counting, {}, n_threads=n_threads, seeds=2
    ) as batcher:
        batcher.execute(N, agent_info=INFO, env_info=INFO)
        result = batcher.get()
    assert result is not None
    return {key: result[key].clone() for key in result}


def moving(agent: Agent) -> DeviceAgent:
    """Return a ``DeviceAgent`` that moves everything, though only from CPU to CPU."""
    wrapped = DeviceAgent(agent, "cpu")
    wrapped._passes_on = False
    return wrapped


@pytest.mark.parametrize("keeps", ["nothing", "state", "initial"])
@pytest.mark.parametrize("history", [False, True])
def test_episodes_are_the_same_through_the_transfers(keeps: str, history: bool) -> None:
    make_agent = partial(ScriptedAgent, Discrete(9), None, 2, keeps, history)
    expected = collected(make_agent())
    nested = DeviceAgent(moving(make_agent()), "cpu")
    assert nested.makes_initial_states() == (keeps == "initial")
    for wrapped in (DeviceAgent(make_agent(), "cpu"), nested):
        assert_same_tensors(collected(wrapped), expected)


def test_gradients_flow_outside_of_inference_mode() -> None:
    seen = DictTensor({"frame": torch.ones(2, 2), "noise": torch.zeros(2, 1)})
    _, output, _ = moving(GruAgent())(None, seen)
    assert output["log_probability"].requires_grad


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda agent: pickle.loads(cloudpickle.dumps(agent))]
)
def test_copies_behave_like_the_original(copied: Callable[[Any], Any]) -> None:
    wrapped = moving(GruAgent())
    expected = collected(wrapped)
    other = copied(wrapped)
    assert (other.agent is wrapped.agent) == (copied is copy.copy)
    assert_same_tensors(collected(other), expected)


def test_the_agent_gets_updates_seeds_and_close() -> None:
    inner = Mock(spec=StepCounter(), n_noise=0)
    agent = DeviceAgent(inner, "cpu")
    agent.update(1), agent.seed(2), agent.close()
    assert inner.method_calls == [call.update(1), call.seed(2), call.close()]


def test_invalid_agents_and_missing_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for agent, device, named in (
        (torch.nn.Linear(1, 1), "cpu", "Linear.forward takes"),
        (StepCounter(), "gpu", "'gpu'"),
        (StepCounter(), "cuda", "'cuda'"),
    ):
        with pytest.raises(SpecError, match=named):
            DeviceAgent(agent, device)  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_episodes_on_a_gpu_match_the_cpu() -> None:
    agent = GruAgent()
    agent.cell.cuda()
    agent.head.cuda()
    wrapped = DeviceAgent(agent, "cuda")
    got, expected = collected(wrapped), collected(GruAgent())
    for key, tensor in expected.items():
        assert torch.allclose(got[key].double(), tensor.double(), atol=1e-5), key
