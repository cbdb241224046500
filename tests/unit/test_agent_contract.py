"""What an agent may rely on, and what is refused when it breaks its side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import (
    Agent,
    AgentError,
    AgentSpecError,
    Batcher,
    DictTensor,
    EpisodeBatcher,
    GymEnv,
    GymEnvInf,
    SpecError,
    TemporalDictTensor,
    UsageError,
)

from support.agents import (
    ConstantAgent,
    FunctionAgent,
    GruAgent,
    HistoryAgent,
    InfoEcho,
    InitialStateCounter,
    NoisyAgent,
    Recorder,
    StepCounter,
    zeros,
)
from support.envs import (
    CountingEnv,
    assert_same_tensors,
    counting_trajectories,
    create_counting,
    create_echo,
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


def test_every_call_has_one_row_per_lane() -> None:
    agent = Recorder(StepCounter())
    collect(agent, n_envs=4, lengths=[2, 7, 1, 1, 3, 2])
    sizes = {tensor.shape[0] for call in agent.calls for tensor in call.observation.values()}
    sizes |= {t.shape[0] for call in agent.calls for t in (call.state or {}).values()}
    assert sizes == {4}


def test_calls_without_a_state_have_starting_rows_only() -> None:
    agent = Recorder(StepCounter())
    collect(agent)
    starting = [call for call in agent.calls if call.state is None]
    assert len(starting) > 3
    for call in starting:
        assert call.observation["initial_state"].all()
        assert not call.observation["frame"][:, 0].any()
        assert not call.observation["reward"].any()
        assert not call.observation["last_action"].any()


def test_every_episode_starts_in_a_call_without_a_state() -> None:
    agent = Recorder(StepCounter())
    collect(agent)
    started = {
        int(number)
        for call in agent.calls
        if call.state is None
        for number in call.observation["frame"][:, 1]
    }
    assert started >= set(range(1, len(LENGTHS) + 1))


def test_state_rows_follow_their_episodes() -> None:
    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        if state is None:
            state = DictTensor(
                {"number": observation["frame"][:, 1].clone(), "count": zeros(observation)}
            )
        output = {"action": zeros(observation), "seen": state["number"] * 1000 + state["count"]}
        new = DictTensor({"number": state["number"].clone(), "count": state["count"] + 1})
        return state, DictTensor(output), new

    trajectories = collect(FunctionAgent(agent))
    expected = [[1000.0 * (i + 1) + t for t in range(n)] for i, n in enumerate(LENGTHS)]
    assert masked(trajectories, "seen") == expected


@pytest.mark.parametrize("kind", [StepCounter, InitialStateCounter])
@pytest.mark.parametrize("n_envs", [1, 2, 5, 13])
def test_both_styles_of_state_give_the_same_trajectories(
    kind: Callable[[], Agent], n_envs: int
) -> None:
    trajectories = collect(kind, n_envs=n_envs)
    ids = list(range(1, len(LENGTHS) + 1))
    assert_same_tensors(trajectories, counting_trajectories(LENGTHS, ids))


def test_an_initial_state_gets_the_agent_info_of_its_rows() -> None:
    class FromInfo(InitialStateCounter):
        def initial_state(self, agent_info: DictTensor | None, n: int) -> DictTensor:
            start = torch.zeros(n, dtype=torch.int64)
            if agent_info is not None:
                start = agent_info["start"] * 100
            return DictTensor({"steps": start})

    info = DictTensor({"start": torch.arange(10, 20)})
    trajectories = collect(FromInfo, agent_info=info)
    expected = [[100 * (10 + i) + t for t in range(n)] for i, n in enumerate(LENGTHS)]
    assert masked(trajectories, "steps") == expected


def test_an_agent_that_makes_its_initial_states_is_called_once_per_step() -> None:
    counts = []
    for kind in (StepCounter, InitialStateCounter):
        calls: list[int] = []

        class Counted(kind):  # type: ignore[misc, valid-type]
            def __call__(self, *arguments: Any) -> Any:
                calls.append(1)  # noqa: B023
                return super().__call__(*arguments)

        collect(Counted, n_envs=2, lengths=[1, 2, 3, 4])
        counts.append(len(calls))
    # Two lanes, six steps: (1, 2), (1, 3), (3, 4), (3, 4), (3, 4), (4); and one to learn the keys.
    assert counts[1] == 7
    assert counts[0] == 7 + 2  # a call of their own for each of two starts beside a running lane


def test_an_agent_without_state_gets_an_empty_one_or_none() -> None:
    agent = Recorder(ConstantAgent())
    collect(agent)
    assert all(not call.state for call in agent.calls)


def test_the_agent_runs_without_gradients() -> None:
    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        weight = torch.nn.Parameter(torch.ones(1))
        value = observation["reward"] * weight
        assert torch.is_inference_mode_enabled()
        assert not value.requires_grad
        return DictTensor({}), DictTensor({"action": zeros(observation), "v": value}), DictTensor()

    trajectories = collect(FunctionAgent(agent))
    assert not trajectories["v"].requires_grad
    assert not trajectories["v"].is_inference()


def test_outputs_that_require_gradients_are_stored_without() -> None:
    weight = torch.nn.Parameter(torch.ones(3))

    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        return DictTensor(), DictTensor({"action": zeros(observation), "w": weight}), DictTensor()

    assert masked(collect(FunctionAgent(agent)), "w")[0] == [1.0, 1.0, 1.0]


def test_the_agent_is_seeded_and_closed_once() -> None:
    agent = Recorder(ConstantAgent())
    batcher = make(agent, seeds=3)
    assert len(agent.seeds) == 1
    assert 0 <= agent.seeds[0] < 2**31
    batcher.close()
    batcher.close()
    assert agent.n_closed == 1
    other = Recorder(ConstantAgent())
    make(other, seeds=4).close()
    assert other.seeds != agent.seeds


def test_a_dict_may_be_returned_instead_of_a_dict_tensor() -> None:
    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        state = {"s": zeros(observation)} if state is None else state
        return state, {"action": zeros(observation) + 5}, {"s": state["s"] + 1}

    assert masked(collect(FunctionAgent(agent), [3]), "_s") == [[1, 2, 3]]


# agent_info


def test_rows_of_agent_info_follow_their_episodes() -> None:
    info = DictTensor({"id": torch.arange(100, 110)})
    trajectories = collect(InfoEcho, agent_info=info)
    expected = [[100 + i] * n for i, n in enumerate(LENGTHS)]
    assert masked(trajectories, "info_id") == expected
    assert masked(trajectories, "first_id") == expected
    assert trajectories.info["agent_info/id"].tolist() == list(range(100, 110))


@pytest.mark.parametrize("info", [None, DictTensor({})])
def test_without_agent_info_the_agent_gets_none(info: DictTensor | None) -> None:
    agent = Recorder(ConstantAgent())
    collect(agent, agent_info=info)
    assert agent.calls
    assert all(call.agent_info is None for call in agent.calls)


def test_agent_info_is_that_of_its_request() -> None:
    with make(InfoEcho) as batcher:
        for offset in (100, None, 200, 300):
            info = None if offset is None else DictTensor({"id": torch.arange(offset, offset + 5)})
            batcher.execute(5, agent_info=info)
            seen = masked(batcher.get(), "info_id")
            expected = [-1] * 5 if offset is None else list(range(offset, offset + 5))
            assert seen == [[number] * 3 for number in expected]


def test_agent_info_may_change_its_shape_between_requests() -> None:
    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        total = zeros(observation).float()
        if agent_info is not None:
            total = sum(t.float().flatten(1).sum(1) for t in agent_info.values())
        return DictTensor(), DictTensor({"action": zeros(observation), "sum": total}), DictTensor()

    infos = [{"a": torch.ones(2, 3)}, {"a": torch.ones(2, 4)}, {"b": torch.ones(2, 5).long()}]
    with make(FunctionAgent(agent), n_envs=1) as batcher:
        for info, expected in zip(infos, (3, 4, 5), strict=True):
            batcher.execute(2, agent_info=DictTensor(info))
            assert batcher.get()["sum"][:, 0].tolist() == [expected] * 2


def test_an_agent_that_cannot_do_without_agent_info_works_with_it() -> None:
    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        action = agent_info["id"] + observation["last_action"]
        return DictTensor(), DictTensor({"action": action}), DictTensor()

    info = DictTensor({"id": torch.arange(10, 20)})
    trajectories = collect(FunctionAgent(agent), agent_info=info)
    expected = [[(10 + i) * (t + 1) for t in range(n)] for i, n in enumerate(LENGTHS)]
    assert masked(trajectories, "action") == expected


# history


@pytest.mark.parametrize("n_timesteps", [1, 2, 4, 100])
def test_history_holds_all_previous_steps_across_slots(n_timesteps: int) -> None:
    lengths = [3, 70, 1, 130, 2, 65]
    trajectories = collect(HistoryAgent, lengths, n_timesteps=n_timesteps)
    sums = [[sum(range(t)) for t in range(n)] for n in lengths]
    assert masked(trajectories, "seen") == [list(range(n)) for n in lengths]
    assert masked(trajectories, "frames") == sums
    assert masked(trajectories, "actions") == [[s + t for t, s in enumerate(row)] for row in sums]


def test_history_is_never_none_and_empty_at_the_first_step() -> None:
    agent = Recorder(HistoryAgent())
    collect(agent)
    for call in agent.calls:
        assert isinstance(call.history, TemporalDictTensor)
        assert call.history.n_elems() == 3
        first = call.observation["initial_state"]
        assert not call.history.lengths[first].any()


def test_without_require_history_there_is_none() -> None:
    agent = Recorder(ConstantAgent())
    collect(agent)
    assert all(call.history is None for call in agent.calls)


@pytest.mark.parametrize("kind", [StepCounter, InitialStateCounter])
@pytest.mark.parametrize("n_envs", [1, 3])
def test_every_key_of_the_history_is_that_of_the_trajectory(n_envs: int, kind: Any) -> None:
    class Both(Recorder):
        def require_history(self) -> bool:
            return True

        def initial_state(self, agent_info: Any, n: int) -> Any:
            return self.inner.initial_state(agent_info, n)

    class NoneStyle(Both):
        initial_state = Agent.initial_state

    agent = (Both if kind is InitialStateCounter else NoneStyle)(kind())
    collect(agent, n_envs=n_envs, n_timesteps=2)
    whole = counting_trajectories(LENGTHS, range(1, len(LENGTHS) + 1))
    longest = dict.fromkeys(range(1, len(LENGTHS) + 1), 0)
    for call in agent.calls:
        assert call.history is not None
        for row, length in enumerate(call.history.lengths.tolist()):
            if not length:
                continue
            assert set(call.history.keys()) == set(whole)
            number = int(call.history["frame"][row, 0, 1])
            if length == LENGTHS[number - 1]:
                continue  # an idle lane's row, whose results are dropped
            longest[number] = max(longest[number], length)
            for key in whole:
                expected = whole[key][number - 1, :length].tolist()
                assert call.history[key][row, :length].tolist() == expected, key
    assert list(longest.values()) == [length - 1 for length in LENGTHS]


def test_history_is_zero_past_its_lengths() -> None:
    agent = Recorder(HistoryAgent())
    collect(agent)
    n_padded = 0
    for call in agent.calls:
        assert call.history is not None
        for key in ("frame", "action", "reward", "seen"):
            if key in call.history:
                padding = call.history.mask() == 0
                assert not call.history[key][padding].any(), key
                n_padded += int(padding.sum())
    assert n_padded


def test_history_has_the_agents_own_outputs_and_states() -> None:
    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        if state is None:
            state = DictTensor({"count": zeros(observation)})
        value = observation["frame"][:, 0] + 1
        output = {"action": zeros(observation), "value": value}
        output["values"] = history["value"].sum(1)
        output["counts"] = history["count"].sum(1)
        return state, DictTensor(output), DictTensor({"count": state["count"] + 1})

    wants = FunctionAgent(agent)
    wants.require_history = lambda: True  # type: ignore[method-assign]
    trajectories = collect(wants, [5, 2])
    assert masked(trajectories, "values") == [[0, 1, 3, 6, 10], [0, 1]]
    assert masked(trajectories, "counts") == [[0, 0, 1, 3, 6], [0, 0]]


def test_history_restarts_with_a_lane_that_restarts_on_its_own() -> None:
    with Batcher(
        7,
        create_agent=HistoryAgent,
        create_env=create_counting,
        env_args={"n_envs": 2, "length": 3, "restarts": True},
        n_threads=0,
        seeds=0,
    ) as batcher:
        batcher.reset()
        seen = []
        for _ in range(2):
            batcher.execute()
            seen.append(batcher.get()["seen"])
    assert torch.cat(seen, 1).tolist() == [[t % 3 for t in range(14)]] * 2


# Noise


def test_noise_is_uniform_and_stored_with_the_trajectory() -> None:
    trajectories = collect(NoisyAgent, [50] * 40)
    noise = trajectories["noise"]
    assert noise.dtype == torch.float32
    assert noise.shape == (40, 50, 2)
    assert noise.tolist() == trajectories["seen"].tolist()
    assert noise.min() >= 0
    assert noise.max() < 1
    assert torch.unique(noise.reshape(-1, 2), dim=0).shape == (2000, 2)
    assert abs(float(noise.mean()) - 0.5) < 0.03


def test_without_n_noise_there_is_no_noise() -> None:
    agent = Recorder(ConstantAgent())
    trajectories = collect(agent)
    assert "noise" not in trajectories
    assert all("noise" not in call.observation for call in agent.calls)


def test_noise_and_seeds_depend_on_seed_request_and_episode_alone() -> None:
    def run(n_envs: int, n_timesteps: int, n_slots: int, seeds: int = 5) -> list[Any]:
        arguments = {"n_envs": n_envs, "n_timesteps": n_timesteps, "n_slots": n_slots}
        with make(NoisyAgent, seeds=seeds, **arguments) as batcher:
            results = []
            for n_episodes in (7, 3):
                batcher.execute(n_episodes, env_info=info_of(LENGTHS[:n_episodes]))
                results.append(batcher.get())
        keys = ("noise", "action")
        return [([r[k].tolist() for k in keys], r.info["seed"].tolist()) for r in results]

    first = run(1, 100, 10)
    for shape in ((2, 3, 10), (7, 1, 10), (3, 2, 2), (20, 4, 1)):
        assert run(*shape) == first
    ((noise, _), seeds), ((later, _), later_seeds) = first
    ((other, _), other_seeds), _ = run(1, 100, 10, seeds=6)
    assert len(set(seeds + later_seeds + other_seeds)) == 7 + 3 + 7
    assert len({str(row) for row in noise + later + other}) == 7 + 3 + 7


def test_a_noisy_recurrent_agent_repeats_with_the_same_seed() -> None:
    first, second = collect(GruAgent, seeds=8), collect(GruAgent, seeds=8)
    for key in first:
        assert torch.equal(first[key], second[key]), key
    assert len(torch.unique(first["action"])) > 1
    assert not torch.equal(collect(GruAgent, seeds=9)["action"], first["action"])


def test_the_callers_generators_are_left_alone() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]  # noqa: NPY002
    collect(NoisyAgent)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index, union-attr]  # noqa: NPY002


# A recurrent policy, worked out row by row


def test_the_hidden_states_of_a_gru_are_those_of_its_frames() -> None:
    trajectories = collect(GruAgent, n_envs=3, n_timesteps=2)
    agent = GruAgent()
    with torch.no_grad():
        for row, length in enumerate(LENGTHS):
            hidden = torch.ones(1, agent.n_hidden)
            for t in range(length):
                assert torch.allclose(trajectories["hidden"][row, t], hidden[0], atol=1e-6)
                hidden = agent.cell(trajectories["frame"][row, t : t + 1], hidden)
                assert torch.allclose(trajectories["_hidden"][row, t], hidden[0], atol=1e-6)
                logits = agent.head(hidden)
                expected = torch.log_softmax(logits, -1)[0, trajectories["action"][row, t]]
                got = trajectories["log_probability"][row, t]
                assert torch.allclose(got, expected, atol=1e-6)


# Memory that the agent and the library share


def shuffled(observation: DictTensor) -> None:
    """Change every tensor of an observation in place."""
    for tensor in observation.values():
        if tensor.dtype == torch.bool:
            tensor.logical_not_()
        else:
            tensor.add_(50)


@pytest.mark.parametrize("restarts", [False, True])
def test_observations_that_the_agent_changes_in_place_do_not_spoil_windows(restarts: bool) -> None:
    def run(change: Callable[[DictTensor], None]) -> list[TemporalDictTensor]:
        def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
            action = observation["frame"][:, 0].long() + 1
            change(observation)
            return DictTensor(), DictTensor({"action": action}), DictTensor()

        with Batcher(
            4,
            create_agent=lambda: FunctionAgent(agent),
            create_env=create_counting,
            env_args={"n_envs": 2, "restarts": restarts},
            n_threads=0,
            seeds=0,
        ) as batcher:
            batcher.reset(env_info=info_of([3, 10]))
            windows = []
            for _ in range(3):
                batcher.execute()
                windows.append(batcher.get())
            return windows

    for expected, got in zip(run(lambda _: None), run(shuffled), strict=True):
        assert got.lengths.tolist() == expected.lengths.tolist()
        for key in expected:
            assert got[key].tolist() == expected[key].tolist(), key


@pytest.mark.parametrize("n_envs", [1, 3])
def test_observations_that_the_agent_changes_in_place_do_not_spoil_episodes(n_envs: int) -> None:
    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        if state is None:
            state = DictTensor({"steps": zeros(observation) + 10})
        before, steps = state.clone(), state["steps"]
        steps += 1
        shuffled(observation)
        return before, DictTensor({"action": steps - 10}), DictTensor({"steps": steps})

    trajectories = collect(FunctionAgent(agent), n_envs=n_envs)
    ids = list(range(1, len(LENGTHS) + 1))
    assert_same_tensors(trajectories, counting_trajectories(LENGTHS, ids))


def test_what_the_agent_changed_in_place_is_right_again_in_the_next_call() -> None:
    seen: list[dict[str, Any]] = []

    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        seen.append({key: tensor.tolist() for key, tensor in observation.items()})
        shuffled(observation)
        return DictTensor(), DictTensor({"action": zeros(observation) + 7}), DictTensor()

    collect(FunctionAgent(agent), [3, 2], n_envs=1)
    expected = [
        {"frame": [[t, number]], "reward": [100.0 * number + t if t else 0.0]}
        | {"initial_state": [not t], "last_action": [7 if t else 0]}
        | {flag: [False] for flag in ("terminated", "truncated", "done")}
        for number, length in ((1, 3), (2, 2))
        for t in range(length)
    ]
    assert seen[-5:] == expected


def test_history_is_not_spoilt_by_observations_changed_in_place() -> None:
    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        output = {"action": zeros(observation), "frames": history["frame"][..., 0].sum(1)}
        shuffled(observation)
        return DictTensor(), DictTensor(output), DictTensor()

    wants = FunctionAgent(agent)
    wants.require_history = lambda: True  # type: ignore[method-assign]
    assert masked(collect(wants, [5]), "frames") == [[0, 0, 1, 3, 6]]


def test_an_agent_may_change_its_state_in_place() -> None:
    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        if state is None:
            state = DictTensor({"steps": zeros(observation) + 10})
        before = state.clone()
        state["steps"].add_(1)
        return before, DictTensor({"action": state["steps"] - 10}), state

    trajectories = collect(FunctionAgent(agent))
    ids = list(range(1, len(LENGTHS) + 1))
    assert_same_tensors(trajectories, counting_trajectories(LENGTHS, ids))


@pytest.mark.parametrize("n_envs", [1, 2, 3])
def test_a_new_state_may_be_the_observation_itself(n_envs: int) -> None:
    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        if state is None:
            state = DictTensor({"seen": torch.full_like(observation["frame"], -1)})
        new = DictTensor({"seen": observation["frame"]})
        return state, DictTensor({"action": zeros(observation)}), new

    trajectories = collect(FunctionAgent(agent), n_envs=n_envs)
    for row, length in enumerate(LENGTHS):
        frames = trajectories["frame"][row, :length].tolist()
        assert trajectories["_seen"][row, :length].tolist() == frames
        assert trajectories["seen"][row, :length].tolist() == [[-1, -1], *frames[:-1]]


@pytest.mark.parametrize("n_envs", [1, 2, 3])
@pytest.mark.parametrize("order", [("one", "two"), ("two", "one")])
def test_a_new_state_may_be_another_part_of_the_old_one(n_envs: int, order: Any) -> None:
    """A memory of two steps: what is new becomes ``one``, what was ``one`` becomes ``two``."""

    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        if state is None:
            nothing = torch.full_like(observation["reward"], -1)
            state = DictTensor({key: nothing.clone() for key in order})
        new = {"one": observation["frame"][:, 0], "two": state["one"]}
        output = DictTensor({"action": zeros(observation)})
        return state, output, DictTensor({key: new[key] for key in order})

    trajectories = collect(FunctionAgent(agent), n_envs=n_envs)
    ages = [[t - 1 for t in range(n)] for n in LENGTHS]
    assert masked(trajectories, "one") == ages
    assert masked(trajectories, "two") == [[max(-1, age - 1) for age in row] for row in ages]


def test_parts_of_a_state_may_change_places() -> None:
    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        if state is None:
            state = DictTensor({"a": zeros(observation), "b": zeros(observation) + 1})
        output = DictTensor({"action": zeros(observation)})
        return state, output, DictTensor({"a": state["b"], "b": state["a"]})

    trajectories = collect(FunctionAgent(agent), [6, 3])
    assert masked(trajectories, "a") == [[0, 1, 0, 1, 0, 1], [0, 1, 0]]
    assert masked(trajectories, "b") == [[1, 0, 1, 0, 1, 0], [1, 0, 1]]


@pytest.mark.parametrize("n_envs", [1, 2, 3])
def test_outputs_may_be_the_observation_or_the_state_itself(n_envs: int) -> None:
    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        if state is None:
            state = DictTensor({"count": zeros(observation)})
        output = {
            "action": observation["last_action"],
            "same_frame": observation["frame"],
            "same_count": state["count"],
        }
        return state, DictTensor(output), DictTensor({"count": state["count"] + 1})

    trajectories = collect(FunctionAgent(agent), n_envs=n_envs)
    assert trajectories["same_frame"].tolist() == trajectories["frame"].tolist()
    assert trajectories["same_count"].tolist() == trajectories["count"].tolist()
    assert not trajectories["action"].any()


@pytest.mark.parametrize("n_envs", [1, 2, 3])
def test_outputs_and_states_may_be_buffers_of_the_agents_own(n_envs: int) -> None:
    class Buffers(Agent):
        def __init__(self) -> None:
            self.value = torch.zeros(n_envs)
            self.action = torch.zeros(n_envs, dtype=torch.int64)
            self.new = torch.zeros(n_envs, dtype=torch.int64)

        def __call__(self, state: Any, observation: Any, *others: Any) -> Any:
            if state is None:
                state = DictTensor({"steps": zeros(observation) + 10})
            self.new[:] = state["steps"] + 1
            self.action[:] = self.new - 10
            self.value[:] = observation["frame"].sum(1)
            output = DictTensor({"action": self.action, "value": self.value})
            return state, output, DictTensor({"steps": self.new})

    trajectories = collect(Buffers, n_envs=n_envs)
    ids = list(range(1, len(LENGTHS) + 1))
    expected = counting_trajectories(LENGTHS, ids)
    expected["value"] = expected["frame"].sum(2)
    assert_same_tensors(trajectories, expected)


def test_outputs_may_be_expanded_or_transposed() -> None:
    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        output = {
            "action": torch.tensor(4).expand(3),
            "wide": observation["frame"].unsqueeze(1).expand(3, 5, 2).transpose(1, 2),
            "tall": torch.arange(6).reshape(2, 3).t(),
        }
        return DictTensor(), DictTensor(output), DictTensor()

    trajectories = collect(FunctionAgent(agent), [2, 2])
    assert trajectories["wide"].shape == (2, 2, 2, 5)
    assert trajectories["wide"][..., 3].tolist() == trajectories["frame"].tolist()
    assert trajectories["tall"][1].tolist() == [[1, 4], [1, 4]]
    assert masked(trajectories, "action") == [[4, 4], [4, 4]]


def test_outputs_keep_their_dtypes_and_shapes() -> None:
    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        n = observation.n_elems()
        output = {
            "action": zeros(observation).to(torch.int32),
            "half": torch.ones(n, 2, 2, dtype=torch.float16),
            "flag": torch.ones(n, dtype=torch.bool),
            "double": torch.ones(n, dtype=torch.float64),
            "byte": torch.ones(n, 3, dtype=torch.uint8),
            "nothing": torch.ones(n, 0),
        }
        return DictTensor(), DictTensor(output), DictTensor()

    trajectories = collect(FunctionAgent(agent), [2, 3])
    shapes = {key: (t.dtype, tuple(t.shape)) for key, t in trajectories.items()}
    assert shapes["action"] == (torch.int32, (2, 3))
    assert shapes["half"] == (torch.float16, (2, 3, 2, 2))
    assert shapes["flag"] == (torch.bool, (2, 3))
    assert shapes["double"] == (torch.float64, (2, 3))
    assert shapes["byte"] == (torch.uint8, (2, 3, 3))
    assert shapes["nothing"] == (torch.float32, (2, 3, 0))
    assert shapes["last_action"] == (torch.int64, (2, 3))


# What is refused


class Misbehaving(Agent):
    """Breaks the contract in call number ``at``, 0-based: ``break_`` changes its three results."""

    def __init__(self, break_: Callable[[list[Any]], Any], at: int) -> None:
        self.break_, self.at = break_, at
        self.n_calls = 0

    def __call__(self, state: Any, observation: Any, agent_info: Any = None, h: Any = None) -> Any:
        if state is None:
            state = DictTensor({"s": torch.zeros(observation.n_elems(), 2)})
        output = {"action": zeros(observation), "value": observation["reward"].clone()}
        result = [dict(state.items()), output, {"s": state["s"] + 1}]
        self.n_calls += 1
        if self.n_calls - 1 == self.at:
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
    "bfloat16": breaking(1, value=torch.zeros(3, dtype=torch.bfloat16)),
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
    class Always(Misbehaving):
        def __call__(self, *arguments: Any, **keywords: Any) -> Any:
            self.at = self.n_calls
            return super().__call__(*arguments, **keywords)

    with pytest.raises(SpecError) as caught:
        collect(Always(ALWAYS_WRONG[name], 0), [2, 2, 2])
    assert isinstance(caught.value, AgentSpecError)


@pytest.mark.parametrize("name", LATER_WRONG)
def test_a_later_call_that_breaks_the_contract_is_refused(name: str) -> None:
    # Call 0 learns the keys, calls 1 to 3 are the first three steps.
    with make(Misbehaving(LATER_WRONG[name], at=3)) as batcher:
        batcher.execute(3, env_info=info_of([5, 5, 5]))
        with pytest.raises(AgentSpecError) as caught:
            batcher.get()
        assert (caught.value.where.worker, caught.value.where.step) == (0, 2)
        assert caught.value.where.episode in (0, 1, 2)
        assert "fix:" in str(caught.value)
        batcher.execute(3)
        assert batcher.get().lengths.tolist() == [3, 3, 3]


def test_an_error_of_the_agents_names_the_key_and_both_sides() -> None:
    with make(Misbehaving(LATER_WRONG["output of another shape"], at=3)) as batcher:
        batcher.execute(3, env_info=info_of([5, 5, 5]))
        with pytest.raises(AgentSpecError, match=r"'value'.*float32\[1\].*float32\[\]"):
            batcher.get()


def test_a_message_about_the_agent_has_three_lines() -> None:
    with make(Misbehaving(LATER_WRONG["output of another shape"], at=3)) as batcher:
        batcher.execute(3, env_info=info_of([5, 5, 5]))
        with pytest.raises(AgentSpecError) as caught:
            batcher.get()
    lines = str(caught.value).splitlines()
    assert len(lines) == 3, lines
    assert lines[1].startswith("  where: worker 0, lane ")
    assert lines[2].startswith("  fix:   ")


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
    def agent(before: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        before = DictTensor({state: zeros(observation)})
        return (
            before,
            DictTensor({"action": zeros(observation), output: zeros(observation)}),
            before,
        )

    with pytest.raises(SpecError, match=f"'{key}'") as caught:
        make(FunctionAgent(agent, n_noise=1))
    assert "fix:" in str(caught.value)


def test_an_exception_of_the_agent_is_an_agent_error_with_its_cause() -> None:
    class Failing(StepCounter):
        n_failures = 0

        def __call__(self, state: Any, observation: Any, *others: Any) -> Any:
            if (observation["frame"][:, 0] == 2).any() and not Failing.n_failures:
                Failing.n_failures += 1
                raise KeyError("goal")
            return super().__call__(state, observation, *others)

    with make(Failing) as batcher:
        batcher.execute(3, env_info=info_of([5, 5, 5]))
        with pytest.raises(AgentError, match="the agent raised KeyError: 'goal'") as caught:
            batcher.get()
        assert not isinstance(caught.value, AgentSpecError)
        assert caught.value.where.step == 2
        assert caught.value.where.env_info is not None
        assert isinstance(caught.value.__cause__, KeyError)
        assert 'raise KeyError("goal")' in caught.value.traceback_text
        batcher.execute(2, env_info=info_of([1, 2]))
        assert batcher.get().lengths.tolist() == [1, 2]


# update


class Versioned(Agent):
    """Outputs what ``update`` brought last."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, info: Any) -> None:
        if info == "bad":
            raise ValueError("bad parameters")
        self.value = info["value"]

    def __call__(self, state: Any, observation: Any, agent_info: Any = None, h: Any = None) -> Any:
        output = {"action": zeros(observation), "value": zeros(observation) + self.value}
        return DictTensor(), DictTensor(output), DictTensor()


def values(trajectories: Any) -> tuple[int, int]:
    """The one value and the one policy version of all its episodes."""
    (value,) = set(trajectories["value"].flatten().tolist())
    (version,) = set(trajectories.info["policy_version"].tolist())
    return value, version


def test_an_update_takes_effect_with_the_next_request() -> None:
    with make(Versioned) as batcher:
        batcher.execute(4)
        batcher.update({"value": 5})
        assert values(batcher.get()) == (0, 0)
        batcher.execute(4)
        batcher.update({"value": 6})
        batcher.execute(4)
        assert values(batcher.get()) == (5, 1)
        assert values(batcher.get()) == (6, 2)
        batcher.reexecute()
        assert values(batcher.get()) == (6, 2)


def test_an_update_is_copied_at_once() -> None:
    tensor = torch.tensor(3)
    with make(Versioned) as batcher:
        batcher.update({"value": tensor})
        tensor.fill_(9)
        batcher.execute(2)
        assert values(batcher.get()) == (3, 1)


def test_of_several_updates_the_last_one_counts() -> None:
    with make(Versioned) as batcher:
        for value in range(5):
            batcher.update({"value": value})
        batcher.execute(2)
        assert values(batcher.get())[0] == 4


def test_a_failing_update_surfaces_in_get_and_the_batcher_goes_on() -> None:
    with make(Versioned) as batcher:
        batcher.update({"value": 5})
        batcher.update("bad")
        batcher.execute(2)
        with pytest.raises(AgentError, match=r"agent\.update raised ValueError: bad parameters"):
            batcher.get()
        batcher.update({"value": 7})
        batcher.execute(2)
        assert values(batcher.get())[0] == 7


def test_an_agent_without_update_says_so() -> None:
    with make(ConstantAgent) as batcher:
        batcher.update({})
        batcher.execute(2)
        with pytest.raises(AgentError, match=r"does not implement update\(info\)"):
            batcher.get()


def test_an_update_that_cannot_be_pickled_is_refused_at_once() -> None:
    with make(Versioned) as batcher:
        with pytest.raises(SpecError, match="generator"):
            batcher.update({"value": (i for i in range(3))})
        batcher.execute(2)
        assert values(batcher.get()) == (0, 0)


# The base class


def test_the_base_class_has_sane_defaults() -> None:
    agent = Agent()
    assert agent.n_noise == 0
    assert agent.require_history() is False
    assert agent.initial_state(None, 3) is None
    agent.seed(1)
    agent.close()
    with pytest.raises(UsageError, match="update"):
        agent.update({})
    with pytest.raises(NotImplementedError):
        agent(None, DictTensor({}))


def test_agents_see_seeds_and_lanes_of_their_environments() -> None:
    agent = Recorder(ConstantAgent())
    trajectories = collect(agent, [2, 2, 2], create_env=create_echo)
    assert trajectories["seed"][:, 0].tolist() == trajectories.info["seed"].tolist()


def test_lanes_that_are_idle_do_not_disturb_the_agents_rows() -> None:
    with make(StepCounter, n_envs=6) as batcher:
        for lengths in ([4], [2, 9], [1, 1, 1], [3] * 6, [5]):
            batcher.execute(len(lengths), env_info=info_of(lengths))
            ids = list(range(1, len(lengths) + 1))
            assert_same_tensors(batcher.get(), counting_trajectories(lengths, ids))


@pytest.mark.parametrize("kind", [GymEnv, GymEnvInf])
def test_an_episode_batcher_takes_both_kinds_of_environments(kind: Any) -> None:
    def create(seed: int, n_envs: int) -> GymEnv:
        return kind([CountingEnv() for _ in range(n_envs)], seed)

    trajectories = collect(StepCounter, create_env=create)
    ids = list(range(1, len(LENGTHS) + 1))
    assert_same_tensors(trajectories, counting_trajectories(LENGTHS, ids))
