"""An agent on another device gives what it gives here, with one transfer each way."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from rlpool import DeviceAgent, DictTensor, EpisodeBatcher, SpecError
from rlpool.agents.agent import Agent
from rlpool.agents.device_agent import Transfer

from support.agents import GruAgent, HistoryAgent, InfoEcho, InitialStateCounter, StepCounter
from support.envs import create_counting

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
    assert DeviceAgent(InitialStateCounter(), "cpu").makes_initial_states()
    assert not DeviceAgent(StepCounter(), "cpu").makes_initial_states()


def pickled_copy(agent: Any) -> Any:
    return pickle.loads(pickle.dumps(agent))


def cloudpickled_copy(agent: Any) -> Any:
    return pickle.loads(cloudpickle.dumps(agent))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled_copy, cloudpickled_copy])
@pytest.mark.parametrize("make_agent", [GruAgent, InitialStateCounter])
@pytest.mark.parametrize("passes_on", [True, False])
def test_copies_act_like_the_original(
    copied: Callable[[Any], Any], make_agent: Any, passes_on: bool
) -> None:
    wrapped = DeviceAgent(make_agent(), "cpu") if passes_on else packing(make_agent())
    expected = collected(wrapped)  # with transfers there are buffers now
    other = copied(wrapped)
    assert type(other) is DeviceAgent
    assert other.agent is wrapped.agent or copied is not copy.copy
    got = collected(other)
    for key, tensor in expected.items():
        assert torch.equal(got[key], tensor), key


def test_a_copy_shares_no_parameters_with_the_original() -> None:
    wrapped = DeviceAgent(GruAgent(), "cpu")
    other = copy.deepcopy(wrapped)
    with torch.no_grad():
        wrapped.agent.head.weight.zero_()
    assert other.agent.head.weight.any()


class Scaled(DeviceAgent):
    """A subclass with arguments of its own, around an agent that it makes itself."""

    def __init__(self, make_agent: Callable[[], Agent], *, scale: int) -> None:
        super().__init__(make_agent(), "cpu")
        self.scale = scale

    def __call__(self, *arguments: Any) -> Any:
        state, output, new_state = super().__call__(*arguments)
        output["action"].mul_(self.scale)
        return state, output, new_state


@pytest.mark.parametrize("make_agent", [StepCounter, InitialStateCounter])
@pytest.mark.parametrize("n_threads", [0, 1])
def test_a_subclass_has_arguments_of_its_own(make_agent: Any, n_threads: int) -> None:
    expected = collected(make_agent())
    for agent in (Scaled(make_agent, scale=3), copy.deepcopy(Scaled(make_agent, scale=3))):
        assert type(agent) is Scaled
        assert agent.makes_initial_states() == (make_agent is InitialStateCounter)
        got = collected(agent, n_threads)
        assert torch.equal(got["action"], 3 * expected["action"])
        assert torch.equal(got["steps"], expected["steps"])


@pytest.mark.parametrize("make_agent", [StepCounter, InitialStateCounter, GruAgent])
def test_wrappers_can_be_nested(make_agent: Any) -> None:
    wrapped = DeviceAgent(packing(make_agent()), "cpu")
    assert wrapped.makes_initial_states() == (make_agent is InitialStateCounter)
    assert wrapped.n_noise == make_agent().n_noise
    got, expected = collected(wrapped), collected(make_agent())
    for key, tensor in expected.items():
        assert torch.equal(got[key], tensor), key


def test_a_subclass_may_make_the_initial_states() -> None:
    class Begins(DeviceAgent):
        def initial_state(self, agent_info: DictTensor | None, n: int) -> DictTensor:
            return DictTensor({"steps": torch.full((n,), 7)})

    assert set(collected(Begins(StepCounter(), "cpu"))["steps"][:, 0].tolist()) == {7}


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
