"""An agent on another device gives what it gives here, with one transfer each way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlpool import DeviceAgent, DictTensor, EpisodeBatcher, SpecError
from rlpool.agent import Agent, overrides_initial_state
from rlpool.device_agent import Transfer

from support.agents import GruAgent, HistoryAgent, InfoEcho, InitialStateCounter, StepCounter
from support.envs import create_counting

N = 6

INFO = DictTensor({"id": torch.arange(N), "length": torch.arange(N) % 4 + 2})


def collected(agent: Agent) -> dict[str, torch.Tensor]:
    with EpisodeBatcher(
        5, N, lambda: agent, {}, create_counting, {}, n_threads=0, seeds=2
    ) as batcher:
        batcher.execute(N, agent_info=INFO, env_info=INFO)
        result = batcher.get()
    assert result is not None
    return {key: result[key].clone() for key in result}


def packing(agent: Agent) -> DeviceAgent:
    """A ``DeviceAgent`` that moves everything, though only from the CPU to the CPU."""
    wrapped = DeviceAgent(agent, "cpu")
    wrapped._passes_on = False
    return wrapped


@pytest.mark.parametrize(
    "make_agent", [GruAgent, StepCounter, InitialStateCounter, InfoEcho, HistoryAgent]
)
def test_episodes_are_the_same_through_the_transfers(make_agent: Any) -> None:
    expected = collected(make_agent())
    for wrapped in (packing(make_agent()), DeviceAgent(make_agent(), "cpu")):
        got = collected(wrapped)
        assert set(got) == set(expected)
        for key, tensor in expected.items():
            assert got[key].dtype == tensor.dtype, key
            assert torch.equal(got[key], tensor), key


def test_a_step_is_one_transfer_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = packing(GruAgent())
    collected(agent)  # allocates
    state = DictTensor({"hidden": torch.ones(2, 4)})
    seen = DictTensor({"frame": torch.ones(2, 2), "noise": torch.zeros(2, 1)})
    with torch.inference_mode():
        agent(state, seen)
        buffers = [*vars(agent._there).values(), *vars(agent._back).values()]
        n_moved: list[int] = []
        moved = Transfer.moved
        monkeypatch.setattr(Transfer, "moved", lambda *a: n_moved.append(len(a[1])) or moved(*a))
        kept, output, new_state = agent(state, seen)
    # hidden, frame, noise; action, log_probability, hidden
    assert n_moved == [3, 3]
    assert kept is state
    again = [*vars(agent._there).values(), *vars(agent._back).values()]
    assert all(mine is theirs for mine, theirs in zip(buffers, again, strict=True))
    assert output["action"].dtype == torch.int64
    assert new_state["hidden"].shape == (2, 4)


def test_values_of_every_dtype_and_shape_arrive() -> None:
    cpu = torch.device("cpu")
    generator = np.random.default_rng(1)
    tensors = {
        str(dtype): torch.from_numpy(generator.integers(0, 2, (3, *shape))).to(dtype)
        for dtype, shape in (
            (torch.bool, ()),
            (torch.uint8, (5, 1)),
            (torch.float64, (7,)),
            (torch.int64, ()),
            (torch.float16, (3, 0)),
            (torch.float32, (2, 2)),
        )
    }
    transfer = Transfer(cpu, cpu)
    for _ in range(2):
        arrived = transfer.moved(tensors)
        for key, tensor in tensors.items():
            assert arrived[key].dtype == tensor.dtype
            assert torch.equal(arrived[key], tensor)
            assert arrived[key].data_ptr() != tensor.data_ptr() or not tensor.numel()
        tensors = {key: 1 - tensor.to(torch.int8) for key, tensor in tensors.items()}


def test_gradients_flow_outside_of_inference_mode() -> None:
    agent = packing(GruAgent())
    seen = DictTensor({"frame": torch.ones(2, 2), "noise": torch.zeros(2, 1)})
    _, output, _ = agent(None, seen)
    assert output["log_probability"].requires_grad


def test_initial_states_are_asked_for_only_where_the_agent_makes_them() -> None:
    assert overrides_initial_state(DeviceAgent(InitialStateCounter(), "cpu"))
    assert not overrides_initial_state(DeviceAgent(StepCounter(), "cpu"))


def test_the_agent_gets_updates_seeds_and_its_end() -> None:
    calls: list[Any] = []

    class Listener(StepCounter):
        def update(self, info: Any) -> None:
            calls.append(info)

        def seed(self, seed: int) -> None:
            calls.append(seed)

        def close(self) -> None:
            calls.append("close")

    agent = DeviceAgent(Listener(), "cpu")
    agent.update(1)
    agent.seed(2)
    agent.close()
    assert calls == [1, 2, "close"]
    assert DeviceAgent(HistoryAgent(), "cpu").require_history()
    with pytest.raises(SpecError, match="should be an Agent"):
        DeviceAgent(torch.nn.Linear(1, 1), "cpu")  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_episodes_on_a_gpu_are_those_on_the_cpu() -> None:
    agent = GruAgent()
    agent.cell.cuda()
    agent.head.cuda()
    wrapped = DeviceAgent(agent, "cuda")
    got, expected = collected(wrapped), collected(GruAgent())
    assert wrapped._there._here.is_pinned()
    assert wrapped._back._there.is_pinned()
    for key, tensor in expected.items():
        assert torch.allclose(got[key].double(), tensor.double(), atol=1e-5), key
