"""Guarantees that an agent may rely on, and refusals when it violates the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete

from rlpool import (
    Agent,
    AgentError,
    AgentSpecError,
    DictTensor,
    EpisodeBatcher,
    SpecError,
    TemporalDictTensor,
    replay_agent,
)
from rlpool.loop.agent_driver import AgentDriver

from support.agents import (
    ConstantAgent,
    FunctionAgent,
    StepCounter,
    zeros,
)
from support.envs import (
    FIRST_STATE,
    assert_same_tensors,
    create_counting,
)
from support.scripted import ScriptedAgent

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def info_of(lengths: list[int] = LENGTHS) -> DictTensor:
    """Return ``env_info`` of episodes numbered from 1."""
    return DictTensor({"length": torch.tensor(lengths), "id": torch.arange(1, len(lengths) + 1)})


def make(agent: Agent | Callable[[], Agent], n_envs: int = 3) -> EpisodeBatcher:
    create: Any = (lambda: agent) if isinstance(agent, Agent) else agent
    env_args = {"n_envs": n_envs}
    return EpisodeBatcher(4, 20, create, {}, create_counting, env_args, n_workers=0, seed=0)


def collect(
    agent: Agent | Callable[[], Agent], lengths: list[int] = LENGTHS, n_envs: int = 3
) -> TemporalDictTensor:
    with make(agent, n_envs) as batcher:
        batcher.execute(len(lengths), env_info=info_of(lengths))
        trajectories = batcher.get()
    assert trajectories.lengths.tolist() == lengths
    return trajectories


def masked(trajectories: TemporalDictTensor, key: str) -> list[list[Any]]:
    """Return a key's values without padding."""
    lengths = trajectories.lengths.tolist()
    rows = trajectories[key].tolist()
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


# Calls


# Two lanes of two episodes take five steps, and the second lane starts one step later; one more
# call discovers the keys.
# Otherwise each of two starts alongside a running lane takes a separate call.
@pytest.mark.parametrize(("keeps", "n_calls"), [("initial", 6), ("state", 6 + 2)])
def test_a_lane_starts_its_next_episode_in_the_step_after_an_end(keeps: str, n_calls: int) -> None:
    agent, called = ScriptedAgent(Discrete(9), keeps=keeps), []
    counted = FunctionAgent(lambda *arguments: called.append(1) or agent(*arguments))
    counted.initial_state = agent.initial_state
    counted.makes_initial_states = agent.makes_initial_states
    collect(counted, n_envs=2, lengths=[1, 4, 4, 1])
    assert len(called) == n_calls


def test_lanes_started_one_after_another_begin_with_the_same_step() -> None:
    driver, shown = AgentDriver(StepCounter(), 2), {"frame": np.zeros((2, 2), np.float32)}
    for starts in ([[0, 1]], [[0], [1]]):
        for lanes in starts:
            driver.start(lanes, {})
        driver.act([0, 1], shown, {})
        assert driver.state["steps"].tolist() == [FIRST_STATE] * 2
        driver.commit()


def test_the_agent_runs_without_gradients_and_may_return_dicts() -> None:
    weight = torch.nn.Parameter(torch.ones(3))

    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        assert torch.is_inference_mode_enabled()
        assert not (observation["reward"] * weight).requires_grad
        state = {"s": zeros(observation)} if state is None else state
        return state, {"action": zeros(observation), "w": weight}, {"s": state["s"] + 1}

    trajectories = collect(FunctionAgent(agent), [3])
    assert not trajectories["w"].requires_grad
    assert not trajectories["w"].is_inference()
    assert masked(trajectories, "w") == [[1.0, 1.0, 1.0]]
    assert masked(trajectories, "_s") == [[1, 2, 3]]


# Memory that the agent and the library share


def test_states_and_outputs_may_share_memory_with_the_observation_and_old_state() -> None:
    """The state holds the last frame and two parts that swap places."""

    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        if state is None:
            values = {"b": 1, "a": 0, "past": -1}
            state = {k: torch.full_like(observation["reward"], v) for k, v in values.items()}
        output = {"action": observation["last_action"], "a_again": state["a"]}
        output["frame_again"] = observation["frame"]
        new = {"past": observation["frame"][:, 0], "a": state["b"], "b": state["a"]}
        return state, output, new

    trajectories = collect(FunctionAgent(agent))
    assert masked(trajectories, "past") == [[t - 1 for t in range(n)] for n in LENGTHS]
    assert masked(trajectories, "a") == [[t % 2 for t in range(n)] for n in LENGTHS]
    assert masked(trajectories, "b") == [[1 - t % 2 for t in range(n)] for n in LENGTHS]
    for key in ("a", "frame"):
        assert trajectories[f"{key}_again"].tolist() == trajectories[key].tolist()


def test_outputs_keep_values_dtypes_and_shapes_for_any_strides() -> None:
    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        output = {
            "action": torch.tensor(4, dtype=torch.int32).expand(3),
            "wide": observation["frame"].unsqueeze(1).expand(3, 5, 2).transpose(1, 2),
            "tall": torch.arange(6, dtype=torch.float16).reshape(2, 3).t(),
            "nothing": torch.ones(3, 0),
        }
        return DictTensor(), DictTensor(output), DictTensor()

    trajectories = collect(FunctionAgent(agent), [2, 2])
    assert {key: (t.dtype, tuple(t.shape[2:])) for key, t in trajectories.items()}.items() >= {
        ("action", (torch.int32, ())),
        ("wide", (torch.float32, (2, 5))),
        ("tall", (torch.float16, (2,))),
        ("nothing", (torch.float32, (0,))),
    }
    assert trajectories["wide"][..., 3].tolist() == trajectories["frame"].tolist()
    assert trajectories["tall"][1].tolist() == [[1, 4], [1, 4]]
    assert masked(trajectories, "action") == [[4, 4], [4, 4]]


# Refusals


class Misbehaving(Agent):
    """Agent in which ``break_`` changes the results of call ``at``, 0-based, or of every call."""

    def __init__(self, break_: Callable[[list[Any]], Any], at: int | None = None) -> None:
        self.break_, self.at = break_, at
        self.n_calls = 0

    def __call__(self, state: Any, observation: Any, agent_info: Any = None, h: Any = None) -> Any:
        if state is None:
            state = DictTensor({"s": torch.zeros(observation.n_elems(), 2)})
        output = {"action": zeros(observation), "value": observation["reward"].clone()}
        result = [dict(state.items()), output, {"s": state["s"] + 1}]
        self.n_calls += 1
        if self.at in (None, self.n_calls - 1):
            return self.break_(result)
        return tuple(DictTensor(part) for part in result)


def breaking(part: int, **changes: Any) -> Callable[[list[Any]], Any]:
    """Replace keys of one of the results; ``None`` removes a key."""

    def break_(result: list[Any]) -> Any:
        result[part].update(changes)
        result[part] = {key: value for key, value in result[part].items() if value is not None}
        return tuple(result)

    return break_


WRONG: list[Callable[[list[Any]], Any]] = [
    lambda result: tuple(result[:2]),
    lambda result: None,
    lambda result: (result[0], result[1]["action"], result[2]),
    lambda result: (result[0], None, result[2]),
    lambda result: (result[0], result[1], result[2]["s"]),
    breaking(1, action=None),
    breaking(1, action=torch.zeros(3, 2, dtype=torch.int64)),
    breaking(1, action=torch.zeros(3)),
    breaking(1, value=torch.zeros(1)),
    breaking(1, value=torch.tensor(1.0)),
    breaking(1, value=np.zeros(3)),
    breaking(1, value=torch.zeros(3, dtype=torch.float8_e5m2)),
    breaking(2, s=torch.zeros(2, 2)),
    breaking(2, s=None),
    breaking(2, other=torch.zeros(3)),
    breaking(2, s=torch.zeros(3, 2, dtype=torch.float64)),
]
WRONG_LATER = [
    breaking(1, value=None),
    breaking(1, extra=torch.zeros(3)),
    breaking(1, value=torch.zeros(3, 1)),
    breaking(1, action=torch.zeros(3, dtype=torch.int32)),
]


@pytest.mark.parametrize("break_", WRONG)
def test_a_first_call_that_breaks_the_contract_is_refused(break_: Any) -> None:
    with pytest.raises(AgentSpecError):
        collect(Misbehaving(break_), [2, 2, 2])


@pytest.mark.parametrize("break_", WRONG + WRONG_LATER)
def test_a_later_call_that_breaks_the_contract_ends_one_request(break_: Any) -> None:
    # Call 0 discovers the keys, calls 1 to 3 are the first three steps.
    with make(Misbehaving(break_, at=3)) as batcher:
        batcher.execute(3, env_info=info_of([5, 5, 5]))
        with pytest.raises(AgentSpecError) as caught:
            batcher.get()
        assert (caught.value.where.worker, caught.value.where.step) == (0, 2)
        assert caught.value.where.row in (0, 1, 2)
        batcher.execute(3)
        assert batcher.get().lengths.tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    ("output", "state", "key"),
    [
        *(("frame", "s", "frame"), ("value", "action", "action"), ("_s", "s", "_s")),
        *(("noise", "s", "noise"), ("last_action", "s", "last_action")),
    ],
)
def test_a_reserved_key_is_refused_at_construction(output: str, state: str, key: str) -> None:
    def agent(before: Any, observation: DictTensor, *others: Any) -> Any:
        nothing = zeros(observation)
        return {state: nothing}, {"action": nothing, output: nothing}, {state: nothing}

    with pytest.raises(SpecError, match=f"'{key}'"):
        make(FunctionAgent(agent, n_noise=1))


# update


class Versioned(ConstantAgent):
    """Agent whose action is set by ``update``."""

    def update(self, info: Any) -> None:
        self.action = info["value"]


def test_the_last_of_several_updates_applies_as_it_was_when_sent() -> None:
    tensor = torch.tensor(3)
    with make(Versioned) as batcher:
        batcher.update({"value": 1})
        batcher.update({"value": tensor})
        tensor.fill_(9)
        batcher.execute(2)
        assert (batcher.get()["action"] == 3).all()


@pytest.mark.promise("I2")
def test_a_policy_that_cannot_be_loaded_fails_the_requests_that_use_it() -> None:
    with make(Versioned) as batcher:
        results: list[Any] = []
        for info in ({"value": 5}, {}, {"value": 7}):
            batcher.update(info)
            for _ in range(2):
                batcher.execute(2)
        for number in range(6):
            if number in (2, 3):
                with pytest.raises(AgentError, match="value"):
                    batcher.get()
            else:
                results.append(batcher.get())
    used = [(int(one["action"][0, 0]), int(one.info["policy_version"][0])) for one in results]
    assert used == [(5, 1), (5, 1), (7, 3), (7, 3)]


def test_updating_an_agent_without_an_update_method_raises_in_get() -> None:
    with make(ConstantAgent) as batcher:
        batcher.update({})
        batcher.execute(2)
        with pytest.raises(AgentError, match=r"update\(info\)"):
            batcher.get()


# Half precisions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("half", "is_cast", "stored"),
    [
        (torch.bfloat16, True, torch.float32),
        (torch.bfloat16, False, torch.float32),
        (torch.float16, True, torch.float16),
    ],
)
def test_half_precision_is_stored_losslessly_and_autocast_states_in_float32(
    half: torch.dtype, is_cast: bool, stored: torch.dtype
) -> None:
    of_weight = torch.float32 if is_cast else half
    weight = torch.linspace(-1, 1, 16).reshape(4, 4).to(of_weight)

    def network(state: Any, observation: DictTensor, *_: Any) -> Any:
        """Run under autocast, where a state starts in float32, or with parameters of that dtype."""
        n = observation.n_elems()
        state = state or DictTensor({"s": torch.zeros(n, 4, dtype=of_weight)})
        before = state["s"].to(of_weight)
        with torch.autocast("cpu", dtype=half, enabled=is_cast):
            seen = observation["frame"][:, :1].to(of_weight) / 8
            after = torch.tanh((before + seen + 0.1) @ weight)
        output = {"action": zeros(observation), "logits": after}
        return state, DictTensor(output), DictTensor({"s": after})

    episodes = collect(FunctionAgent(network), LENGTHS)
    logits = episodes["logits"]
    assert (logits.dtype, episodes["s"].dtype) == (stored, torch.float32)
    assert torch.equal(logits, logits.to(half).to(stored))
    assert (logits.abs() > 0).any()
    assert torch.equal(episodes["_s"], logits.float())
    for state in ("recompute", "stored"):
        replayed = replay_agent(FunctionAgent(network), episodes, state=state)
        assert_same_tensors(replayed, episodes.get(list(replayed)))
