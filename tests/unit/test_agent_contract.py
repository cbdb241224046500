"""What an agent may rely on, and what is refused when it breaks its side."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import (
    Agent,
    AgentError,
    AgentSpecError,
    DictTensor,
    EpisodeBatcher,
    SpecError,
    TemporalDictTensor,
    categorical_log_probability,
    replay_agent,
    sample_categorical,
)

from support.agents import (
    ConstantAgent,
    FunctionAgent,
    InitialStateCounter,
    Recorder,
    StepCounter,
    zeros,
)
from support.envs import (
    assert_same_tensors,
    create_counting,
)

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def info_of(lengths: list[int] = LENGTHS) -> DictTensor:
    """``env_info`` of episodes numbered from 1."""
    return DictTensor({"length": torch.tensor(lengths), "id": torch.arange(1, len(lengths) + 1)})


def make(
    agent: Agent | Callable[[], Agent],
    n_envs: int = 3,
    n_timesteps: int = 4,
    n_slots: int = 20,
    seeds: int = 0,
    create_env: Any = create_counting,
    **env_args: Any,
) -> EpisodeBatcher:
    return EpisodeBatcher(
        n_timesteps,
        n_slots,
        create_agent=(lambda: agent) if isinstance(agent, Agent) else agent,
        create_env=create_env,
        env_args={"n_envs": n_envs, **env_args},
        n_threads=0,
        seeds=seeds,
    )


def collect(
    agent: Agent | Callable[[], Agent],
    lengths: list[int] = LENGTHS,
    agent_info: DictTensor | None = None,
    **arguments: Any,
) -> TemporalDictTensor:
    with make(agent, **arguments) as batcher:
        batcher.execute(len(lengths), agent_info, info_of(lengths))
        trajectories = batcher.get()
    assert trajectories is not None
    assert trajectories.lengths.tolist() == lengths
    return trajectories


def masked(trajectories: TemporalDictTensor, key: str) -> list[list[Any]]:
    """A key's values without padding."""
    lengths = trajectories.lengths.tolist()
    rows = trajectories[key].tolist()
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


# Rows and starts


@pytest.mark.parametrize("info", [None, DictTensor({})])
def test_calls_have_one_row_per_lane_and_only_what_was_asked_for(info: Any) -> None:
    agent = Recorder(StepCounter())
    assert "noise" not in collect(agent, agent_info=info)
    assert len(agent.seeds) == 1
    started = set()
    for call in agent.calls:
        tensors = [*call.observation.values(), *(call.state or {}).values()]
        assert {tensor.shape[0] for tensor in tensors} == {3}
        assert (call.agent_info, call.history) == (None, None)
        assert "noise" not in call.observation
        if call.state is None:
            assert call.observation["initial_state"].all()
            for key in ("reward", "last_action"):
                assert not call.observation[key].any()
            assert not call.observation["frame"][:, 0].any()
            started |= set(call.observation["frame"][:, 1].tolist())
    assert started >= set(range(1, len(LENGTHS) + 1))


# Two lanes, six steps: (1, 2), (1, 3), (3, 4), (3, 4), (3, 4), (4); and one to learn the keys.
# Otherwise each of two starts beside a running lane takes a call of its own.
@pytest.mark.parametrize(("kind", "n_calls"), [(InitialStateCounter, 7), (StepCounter, 7 + 2)])
def test_an_agent_that_makes_its_initial_states_is_called_once_per_step(
    kind: Any, n_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []
    act = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda *a: called.append(a) or act(*a))
    collect(kind, n_envs=2, lengths=[1, 2, 3, 4])
    assert len(called) == n_calls


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


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("order", [("frame", "one", "two"), ("two", "one", "frame")])
def test_states_and_outputs_may_be_made_of_the_observation_and_of_the_old_state(
    n_envs: int, order: Any
) -> None:
    """A memory of two frames, under keys in any order, beside two parts that change places."""

    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        if state is None:
            nothing = torch.full_like(observation["reward"], -1)
            state = {f"past_{key}": nothing.clone() for key in order}
            state |= {"a": zeros(observation), "b": zeros(observation) + 1}
        frame = observation["frame"][:, 0]
        new = {"frame": frame, "one": state["past_frame"], "two": state["past_one"]}
        output = {"action": observation["last_action"], "a_again": state["a"]}
        output["frame_again"] = observation["frame"]
        new = {f"past_{key}": new[key] for key in order}
        return state, output, {**new, "a": state["b"], "b": state["a"]}

    trajectories = collect(FunctionAgent(agent), n_envs=n_envs)
    for age, key in enumerate(("frame", "one", "two"), 1):
        expected = [[max(-1, t - age) for t in range(n)] for n in LENGTHS]
        assert masked(trajectories, f"past_{key}") == expected
    assert masked(trajectories, "a") == [[t % 2 for t in range(n)] for n in LENGTHS]
    assert masked(trajectories, "b") == [[1 - t % 2 for t in range(n)] for n in LENGTHS]
    for key in ("a", "frame"):
        assert trajectories[f"{key}_again"].tolist() == trajectories[key].tolist()


def test_outputs_keep_their_values_dtypes_and_shapes_whatever_their_strides() -> None:
    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        output = {
            "action": torch.tensor(4, dtype=torch.int32).expand(3),
            "wide": observation["frame"].unsqueeze(1).expand(3, 5, 2).transpose(1, 2),
            "tall": torch.arange(6, dtype=torch.float16).reshape(2, 3).t(),
            "flag": torch.ones(3, dtype=torch.bool),
            "double": torch.ones(3, 2, 2, dtype=torch.float64),
            "byte": torch.ones(3, 3, dtype=torch.uint8),
            "nothing": torch.ones(3, 0),
        }
        return DictTensor(), DictTensor(output), DictTensor()

    trajectories = collect(FunctionAgent(agent), [2, 2])
    assert {key: (t.dtype, tuple(t.shape[2:])) for key, t in trajectories.items()}.items() >= {
        ("action", (torch.int32, ())),
        ("wide", (torch.float32, (2, 5))),
        ("tall", (torch.float16, (2,))),
        ("flag", (torch.bool, ())),
        ("double", (torch.float64, (2, 2))),
        ("byte", (torch.uint8, (3,))),
        ("nothing", (torch.float32, (0,))),
        ("last_action", (torch.int64, ())),
    }
    assert trajectories["wide"][..., 3].tolist() == trajectories["frame"].tolist()
    assert trajectories["tall"][1].tolist() == [[1, 4], [1, 4]]
    assert masked(trajectories, "action") == [[4, 4], [4, 4]]


# What is refused


class Misbehaving(Agent):
    """``break_`` changes the three results of call number ``at``, 0-based, or of every call."""

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
    """Replace keys of one of the results; None removes."""

    def break_(result: list[Any]) -> Any:
        result[part].update(changes)
        result[part] = {key: value for key, value in result[part].items() if value is not None}
        return tuple(result)

    return break_


ALWAYS_WRONG = {
    "two values": lambda result: tuple(result[:2]),
    "four values": lambda result: (*result, result[0]),
    "None": lambda result: None,
    "a tensor": lambda result: result[1]["action"],
    "output is a tensor": lambda result: (result[0], result[1]["action"], result[2]),
    "output is None": lambda result: (result[0], None, result[2]),
    "no action": breaking(1, action=None),
    "too few rows": breaking(1, action=torch.zeros(1, dtype=torch.int64)),
    "too many rows": breaking(1, value=torch.zeros(4)),
    "0-d output": breaking(1, value=torch.tensor(1.0)),
    "array": breaking(1, value=np.zeros(3)),
    "number": breaking(1, value=1.0),
    "float8": breaking(1, value=torch.zeros(3, dtype=torch.float8_e5m2)),
    "action of another shape": breaking(1, action=torch.zeros(3, 2, dtype=torch.int64)),
    "action of another kind": breaking(1, action=torch.zeros(3)),
    "state rows": breaking(2, s=torch.zeros(2, 2)),
    "state is a tensor": lambda result: (result[0], result[1], result[2]["s"]),
    "new state without a key": breaking(2, s=None),
    "new state with another key": breaking(2, other=torch.zeros(3)),
    "new state of another shape": breaking(2, s=torch.zeros(3, 3)),
    "new state of another dtype": breaking(2, s=torch.zeros(3, 2, dtype=torch.float64)),
}

LATER_WRONG = {
    **ALWAYS_WRONG,
    "missing output": breaking(1, value=None),
    "new output": breaking(1, extra=torch.zeros(3)),
    "output of another shape": breaking(1, value=torch.zeros(3, 1)),
    "output of another dtype": breaking(1, value=torch.zeros(3, dtype=torch.float64)),
    "action of another dtype": breaking(1, action=torch.zeros(3, dtype=torch.int32)),
}


@pytest.mark.parametrize("name", ALWAYS_WRONG)
def test_a_first_call_that_breaks_the_contract_is_refused(name: str) -> None:
    with pytest.raises(AgentSpecError):
        collect(Misbehaving(ALWAYS_WRONG[name]), [2, 2, 2])


@pytest.mark.parametrize("name", LATER_WRONG)
def test_a_later_call_that_breaks_the_contract_is_refused(name: str) -> None:
    # Call 0 learns the keys, calls 1 to 3 are the first three steps.
    with make(Misbehaving(LATER_WRONG[name], at=3)) as batcher:
        batcher.execute(3, env_info=info_of([5, 5, 5]))
        with pytest.raises(AgentSpecError) as caught:
            batcher.get()
        assert (caught.value.where.worker, caught.value.where.step) == (0, 2)
        assert caught.value.where.row in (0, 1, 2)
        what, where, fix = str(caught.value).splitlines()
        if name == "output of another shape":
            assert re.search(r"'value'.*float32\[1\].*float32\[\]", what)
        assert where.startswith("  where: worker 0, lane ")
        assert fix.startswith("  fix:   ")
        batcher.execute(3)
        assert batcher.get().lengths.tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    ("output", "state", "key"),
    [
        ("frame", "s", "frame"),
        ("reward", "s", "reward"),
        ("value", "frame", "frame"),
        ("value", "action", "action"),
        ("_frame", "s", "_frame"),
        ("_s", "s", "_s"),
        ("noise", "s", "noise"),
        ("last_action", "s", "last_action"),
    ],
)
def test_a_key_that_is_taken_is_refused_at_construction(output: str, state: str, key: str) -> None:
    def agent(before: Any, observation: DictTensor, *others: Any) -> Any:
        nothing = zeros(observation)
        return {state: nothing}, {"action": nothing, output: nothing}, {state: nothing}

    with pytest.raises(SpecError, match=f"(?s)'{key}'.*fix:"):
        make(FunctionAgent(agent, n_noise=1))


# update


class Versioned(Agent):
    """Outputs what ``update`` brought last."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, info: Any) -> None:
        self.value = info["value"]

    def __call__(self, state: Any, observation: Any, agent_info: Any = None, h: Any = None) -> Any:
        output = {"action": zeros(observation), "value": zeros(observation) + self.value}
        return DictTensor(), DictTensor(output), DictTensor()


def test_of_several_updates_the_last_one_counts_as_it_was_when_it_was_sent() -> None:
    tensor = torch.tensor(3)
    with make(Versioned) as batcher:
        batcher.update({"value": 1})
        batcher.update({"value": tensor})
        tensor.fill_(9)
        batcher.execute(2)
        assert (batcher.get()["value"] == 3).all()


@pytest.mark.promise("I2")
def test_a_policy_that_cannot_be_loaded_fails_the_requests_that_were_to_run_with_it() -> None:
    with make(Versioned) as batcher:
        results: list[Any] = []
        for info in ({"value": 5}, {}, {"value": 7}):
            batcher.update(info)
            for _ in range(2):
                batcher.execute(2)
        for number in range(6):
            if number in (2, 3):
                with pytest.raises(AgentError, match="KeyError: 'value'"):
                    batcher.get()
            else:
                results.append(batcher.get())
    told = [(int(one["value"][0, 0]), int(one.info["policy_version"][0])) for one in results]
    assert told == [(5, 1), (5, 1), (7, 3), (7, 3)]


def test_an_update_without_a_method_for_it_surfaces_in_get() -> None:
    with make(ConstantAgent) as batcher:
        batcher.update({})
        batcher.execute(2)
        with pytest.raises(AgentError, match=r"not implement update\(info\)\n.*\n  fix:   define"):
            batcher.get()


# Half precisions ----------------------------------------------------------------------------------


class HalfAgent(Agent):
    """A network in a half precision: under autocast, or with parameters of that dtype.

    Args:
        dtype: The half precision.
        how: "autocast" or "parameters".
        makes_state: Whether it makes its initial states itself.
    """

    n_noise = 1

    def __init__(self, dtype: torch.dtype, how: str, makes_state: bool = False) -> None:
        self.dtype, self.how, self._makes_state = dtype, how, makes_state
        generator = torch.Generator().manual_seed(0)
        own = torch.float32 if how == "autocast" else dtype
        self.weight = torch.randn(4, 4, generator=generator).to(own)

    def makes_initial_states(self) -> bool:
        return self._makes_state

    def initial_state(self, agent_info: DictTensor | None, n: int) -> DictTensor:
        # Under autocast a state begins in float32, as torch.zeros makes it.
        return DictTensor({"s": torch.zeros(n, 4, dtype=self.weight.dtype)})

    def __call__(self, state: Any, observation: Any, agent_info: Any = None, h: Any = None) -> Any:
        if state is None:
            state = self.initial_state(None, observation.n_elems())
        before = state["s"].to(self.weight.dtype)
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.how == "autocast"):
            seen = observation["frame"][:, :1].to(before.dtype) / 8
            after = torch.tanh((before + seen + 0.1) @ self.weight)
            action, log_probability = sample_categorical(after[:, :2], observation["noise"])
        output = {"action": action, "log_probability": log_probability, "logits": after}
        return state, DictTensor(output), DictTensor({"s": after})


@pytest.mark.parametrize("makes_state", [False, True])
@pytest.mark.parametrize("how", ["autocast", "parameters"])
def test_bfloat16_is_stored_as_float32_without_loss(how: str, makes_state: bool) -> None:
    episodes = collect(HalfAgent(torch.bfloat16, how, makes_state), LENGTHS)
    for key in ("s", "_s", "logits", "log_probability"):
        assert episodes[key].dtype == torch.float32
    logits = episodes["logits"]
    assert torch.equal(logits, logits.bfloat16().float())
    assert (logits.abs() > 0).any()
    assert torch.equal(episodes["_s"], logits)
    again = categorical_log_probability(logits[..., :2], episodes["action"])
    is_step = episodes.mask().bool()
    assert torch.equal(again[is_step], episodes["log_probability"][is_step])
    for state in ("recompute", "stored"):
        replayed = replay_agent(HalfAgent(torch.bfloat16, how, makes_state), episodes, state=state)
        assert_same_tensors(replayed, episodes.get(list(replayed)))


def test_a_state_that_autocast_narrows_to_float16_stays_float32() -> None:
    episodes = collect(HalfAgent(torch.float16, "autocast"), LENGTHS)
    dtypes = {key: episodes[key].dtype for key in ("s", "logits", "log_probability")}
    assert dtypes == {"s": torch.float32, "logits": torch.float16, "log_probability": torch.float32}
    replayed = replay_agent(HalfAgent(torch.float16, "autocast"), episodes)
    assert_same_tensors(replayed, episodes.get(list(replayed)))
