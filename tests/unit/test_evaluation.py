"""Evaluating an agent: the same results for any number of workers, and an agent that stays."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import RecordEpisodeStatistics
from torch import nn

from rlpool import (
    Agent,
    Batcher,
    DictTensor,
    EnvSpecError,
    EpisodeBatcher,
    GymEnv,
    NotRepeatedError,
    ParallelEnvManager,
    SpecError,
    VectorGymEnv,
    evaluate,
    sample_categorical,
    verify,
)

from support.agents import StepCounter
from support.envs import CountingEnv, create_counting
from support.keeping import KEEPING, Seeded, create_keeping, frozen
from support.vector_envs import ArrayEnv


class Policy(nn.Module, Agent):
    """Greedy with ``agent_info["is_greedy"]``; its layers tell training from evaluation."""

    n_noise = 1

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.was_training: list[bool] = []

    def __call__(self, state: Any, observation: Any, agent_info: Any = None, history: Any = None):
        self.was_training.append(self.training)
        logits = self.layers(observation["frame"])
        action, _ = sample_categorical(logits, observation["noise"])
        if agent_info is not None:
            action = torch.where(agent_info["is_greedy"], logits.argmax(-1), action)
        return DictTensor(), DictTensor({"action": action}), DictTensor()


def create_cartpole(seed: int, n_envs: int = 2) -> GymEnv:
    return GymEnv([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)


def test_results_are_the_same_for_any_number_of_workers() -> None:
    policy = Policy()
    info = {"is_greedy": torch.arange(21) % 2 == 0}
    results = [
        evaluate(policy, create_cartpole, 21, n_workers=n, seeds=3, agent_info=info)
        for n in (0, 1, 3)
    ]
    first = results[0]
    assert first.returns.shape == (21,)
    assert torch.equal(first.returns.long(), first.lengths)
    assert len(set(first.seeds.tolist())) == 21
    assert first.successes is None
    for other in results[1:]:
        for name in ("returns", "lengths", "seeds"):
            assert torch.equal(getattr(first, name), getattr(other, name))
    again = evaluate(policy, create_cartpole, 21, seeds=4, agent_info=info)
    assert not torch.equal(again.seeds, first.seeds)


@pytest.mark.parametrize("seed", [0, 3])
def test_no_episode_is_one_that_a_batcher_with_the_same_seed_has_run(seed: int) -> None:
    evaluation = evaluate(Policy(), create_cartpole, 40, seeds=seed)
    arguments: Any = {"create_env": create_cartpole, "n_workers": 0, "seeds": seed}
    with EpisodeBatcher(500, 80, Policy, **arguments) as batcher:
        batcher.execute(80)
        training = batcher.get()
    assert training is not None
    assert not set(training.info["seed"].tolist()) & set(evaluation.seeds.tolist())


def test_the_agent_and_the_generators_of_the_caller_stay_as_they_were() -> None:
    policy = Policy().train()
    before = {key: value.clone() for key, value in policy.state_dict().items()}
    torch.manual_seed(0)
    random.seed(0)
    drawn = torch.rand(3), random.random()
    torch.manual_seed(0)
    random.seed(0)
    evaluate(policy, create_cartpole, 5)
    assert (policy.training, policy.layers.training) == (True, True)
    assert policy.was_training == []
    assert torch.equal(torch.rand(3), drawn[0])
    assert random.random() == drawn[1]
    assert all(torch.equal(value, before[key]) for key, value in policy.state_dict().items())
    assert all(value.grad is None and value.requires_grad for value in policy.parameters())


class Holder(Agent):
    """Holds modules, some of them in other agents and lists; succeeds in evaluation mode only."""

    n_noise = 1

    def __init__(self) -> None:
        self.inner, self.parts = Policy(), [nn.Dropout()]

    def __call__(self, state: Any, observation: Any, agent_info: Any = None, history: Any = None):
        modules = self.inner, self.inner.layers[1], self.parts[0]
        assert not any(module.training for module in modules)
        return self.inner(state, observation, agent_info, history)


@pytest.mark.parametrize("n_threads", [0, 1])
def test_modules_are_in_evaluation_mode_wherever_an_agent_holds_them(n_threads: int) -> None:
    holder = Holder()
    assert evaluate(holder, create_cartpole, 3, n_workers=n_threads).returns.min() > 0
    assert holder.inner.layers[1].training
    assert holder.parts[0].training


class SucceedingEnv(CountingEnv):
    """Observes whether it succeeds: in its second step, or from the second step on."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.observation_space = gymnasium.spaces.Dict(
            {key: gymnasium.spaces.MultiBinary(()) for key in [key]}
        )
        self.key = key

    def observation(self) -> Any:
        return {self.key: np.array(self.t == 2, np.int8)}


@pytest.mark.parametrize(
    ("key", "expected"), [("success", [False, True, True]), ("is_success", [False, True, False])]
)
def test_successes_are_what_the_environment_says(key: str, expected: list[bool]) -> None:
    def create_env(seed: int) -> GymEnv:
        return GymEnv([SucceedingEnv(key)], seed)

    result = evaluate(StepCounter(), create_env, 3, env_info={"length": [1, 2, 3]})
    assert result.successes is not None
    assert result.successes.tolist() == expected
    assert result.lengths.tolist() == [1, 2, 3]


class TellingEnv(CountingEnv):
    """Its infos tell whether it is in its second step, as an array."""

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {"success": np.array([self.t == 2])}


@pytest.mark.parametrize(
    ("key", "expected"), [("success", [False, True, True]), ("is_success", [False, True, False])]
)
def test_successes_may_be_arrays_of_one_element(key: str, expected: list[bool]) -> None:
    class Named(TellingEnv):
        def step(self, action: Any) -> Any:
            *results, info = super().step(action)
            return *results, {key: info["success"]}

    def create_env(seed: int) -> GymEnv:
        return GymEnv([Named()], seed, info_keys={key: (bool, 1)})

    result = evaluate(StepCounter(), create_env, 3, env_info={"length": [1, 2, 3]})
    assert result.successes is not None
    assert result.successes.tolist() == expected


@pytest.mark.parametrize("policy", [{}, {"n_workers": 1}, {"on_env_error": "truncate"}])
def test_a_key_that_is_in_no_info_is_an_error(policy: Any) -> None:
    def create_env(seed: int) -> GymEnv:
        return GymEnv([TellingEnv()], seed, info_keys=["succes"])

    with pytest.raises(EnvSpecError, match="no 'succes' in any info"):
        evaluate(StepCounter(), create_env, 3, **policy)


class SometimesTelling(CountingEnv):
    """Says ``success`` at the end of episodes of three steps only."""

    def step(self, action: Any) -> Any:
        *result, info = super().step(action)
        return *result, {"success": True} if result[2] and result[0][0] == 3 else info


def test_over_a_manager_no_key_is_missed() -> None:
    def create_env(seed: int) -> ParallelEnvManager:
        return ParallelEnvManager([SometimesTelling], seed=seed, info_keys=["success", "other"])

    found = evaluate(StepCounter(), create_env, 1, env_info={"length": [2]})
    assert found.successes is not None
    assert found.successes.tolist() == [False]


def test_a_key_that_few_infos_have_depends_on_no_number_of_lanes_or_cut(tmp_path: Path) -> None:
    def create_env(seed: int, n: int) -> GymEnv:
        return GymEnv([SometimesTelling() for _ in range(n)], seed, info_keys=["success"])

    def run(n: int, **kwargs: Any) -> list[bool]:
        kwargs |= {"env_args": {"n": n}, "env_info": {"length": [2, 3, 2, 2, 2, 2]}}
        successes: Any = evaluate(StepCounter(), create_env, 6, **kwargs).successes
        return successes.tolist()

    expected = [False, True, False, False, False, False]
    record = tmp_path / "record.jsonl"
    assert run(1) == run(3) == run(2, n_workers=2) == run(1, record=record) == expected
    lines = record.read_bytes().splitlines(keepends=True)
    for n_kept in (1, 3):
        record.write_bytes(b"".join(lines[:n_kept]))
        assert run(1, record=record) == expected


def test_infos_reach_their_episodes_whatever_the_size_of_a_request() -> None:
    n = 3 * 2 * 4 + 1
    lengths = torch.arange(n) % 7 + 1
    result = evaluate(StepCounter(), create_counting, n, env_info={"length": lengths})
    assert torch.equal(result.lengths, lengths)
    assert result.returns.tolist() == [k * (k + 1) / 2 for k in lengths.tolist()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agent": StepCounter}, r"(?s)agent is the class StepCounter.*StepCounter\(...\)"),
        ({"agent": len}, "(?s)agent is builtin_function_or_method, not an Agent.*fix"),
        ({"n_episodes": 0}, "n_episodes should be an int of at least 1"),
        ({"seeds": -1}, "seeds should be an int of at least 0"),
        ({"env_info": {"length": [1]}}, "'length' in env_info has 1 rows, 2 were expected"),
        ({"create_env": None}, "create_env is None"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes: Any, message: str) -> None:
    arguments = {"agent": StepCounter(), "create_env": create_counting, "n_episodes": 2, **changes}
    with pytest.raises(SpecError, match=message):
        evaluate(**arguments)


def test_an_agent_that_cannot_be_copied_is_refused() -> None:
    agent = Policy()
    agent.cache = agent.layers[0].weight * 2  # part of a graph
    with pytest.raises(SpecError, match=r"(?s)the agent cannot be copied.*__deepcopy__"):
        evaluate(agent, create_cartpole, 2)


class Rates(CountingEnv):
    """Its infos have numbers from 0 to 1, and a last one that is large."""

    def step(self, action: Any) -> Any:
        success = {1: 0.3, 2: -1.0, 3: 0.4, 4: 0.6}[self.t + 1]
        return *super().step(action)[:4], {"success": success, "is_success": success}


@pytest.mark.parametrize("key", ["success", "is_success"])
def test_numbers_are_successes_above_a_half(key: str) -> None:
    def create_env(seed: int) -> GymEnv:
        return GymEnv([Rates()], seed, info_keys=[key])

    found = evaluate(StepCounter(), create_env, 4, env_info={"length": [1, 2, 3, 4]}).successes
    assert found is not None
    assert found.tolist() == [False, False, False, True]


# What is carried from one episode to the next


class Asking(Seeded):
    """Fails without options."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        start = super().reset(seed=seed)
        self.length = int(options["length"])
        return start


@pytest.mark.parametrize(("n_envs", "n_workers", "over_manager"), [(1, 0, 0), (2, 2, 0), (3, 0, 1)])
def test_environments_that_repeat_episodes_are_evaluated_as_without_a_check(
    n_envs: int, n_workers: int, over_manager: int, tmp_path: Path
) -> None:
    def create_env(seed: int) -> Any:
        if over_manager:
            return ParallelEnvManager([Asking] * n_envs, seed=seed)
        return GymEnv([Asking() for _ in range(n_envs)], seed)

    arguments: Any = StepCounter(), create_env, 20
    info = {"length": torch.arange(20) % 7 + 1}
    record = {"record": tmp_path / "run.jsonl"}
    one = evaluate(*arguments, env_info=info, n_workers=n_workers, **record)
    other = evaluate(*arguments, env_info=info, check_repeatable=False, agent_rows=None)
    assert one.entries == other.entries


@pytest.mark.parametrize(("n_envs", "n_workers", "over_manager"), [(1, 0, 0), (2, 2, 0), (2, 0, 1)])
@pytest.mark.parametrize("name", KEEPING)
def test_what_carries_state_over_is_named(
    name: str, n_envs: int, n_workers: int, over_manager: int, tmp_path: Path
) -> None:
    arguments = {"name": name, "n_envs": n_envs, "over_manager": over_manager}
    how: Any = {"env_args": arguments, "n_workers": n_workers, "record": tmp_path / "run.jsonl"}
    with pytest.raises(NotRepeatedError, match=f"^{name.partition(',')[0]} .*did not repeat"):
        evaluate(StepCounter(), create_keeping, 60, **how)
    if "later" not in name:
        assert len(how["record"].read_text().splitlines()) == 1, "nothing that may be wrong"
    found = evaluate(StepCounter(), create_keeping, 60, check_repeatable=False, **how)
    assert len(found.entries) == 60


def test_lanes_that_one_reset_begins_are_left_out() -> None:
    def create_env(seed: int) -> VectorGymEnv:
        return VectorGymEnv(ArrayEnv(2, AutoresetMode.NEXT_STEP), seed, seeding="request")

    assert evaluate(StepCounter(), create_env, 6, max_steps=3).lengths.max() == 3


def test_infos_need_not_be_repeated() -> None:
    def create_env(seed: int) -> GymEnv:
        envs = [RecordEpisodeStatistics(Seeded())]
        return GymEnv(envs, seed, info_keys={"episode/t": np.float64})

    assert evaluate(StepCounter(), create_env, 5, infos=["episode/t"]).entries


@pytest.mark.parametrize("kind", [EpisodeBatcher, Batcher])
@pytest.mark.parametrize(
    ("make", "names"),
    [
        (KEEPING["NormalizeReward"], ["NormalizeReward", "NormalizeObservation"]),
        (KEEPING["EpisodicLifeEnv"], ["EpisodicLifeEnv"]),
        (frozen, []),
        (Seeded, []),
    ],
)
def test_batchers_warn_of_wrappers_that_keep_state(
    kind: Any, make: Any, names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def create_env(seed: int) -> GymEnv:
        return GymEnv([make()], seed)

    caplog.set_level("WARNING", "rlpool")
    kind(8, 2, StepCounter, {}, create_env, n_workers=0).close()
    assert [name for name in names if name in caplog.text] == names
    assert len(caplog.records) == bool(names)


# Episodes that never end


@pytest.mark.parametrize("over_manager", [False, True])
@pytest.mark.parametrize("max_steps", [1, 4, 200])
def test_episodes_are_truncated_after_the_most_steps(max_steps: int, over_manager: bool) -> None:
    def create_env(seed: int) -> Any:
        makers = [partial(CountingEnv, length) for length in (3, 10**9, 4)]
        if over_manager:
            return ParallelEnvManager(makers, seed=seed, min_ready=2)
        return GymEnv([maker() for maker in makers], seed)

    found = evaluate(StepCounter(), create_env, 6, max_steps=max_steps)
    lengths = [min(n, max_steps) for n in (3, 10**9, 4)] * 2
    assert found.lengths.tolist() == lengths
    assert [e["terminated"] for e in found.entries] == [
        n < 10**9 and n <= max_steps for n in (3, 10**9, 4)
    ] * 2
    assert found.protocol["max_steps"] == max_steps
    assert not verify(found, StepCounter(), create_env).differences


def test_an_episode_that_may_never_end_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlpool.batch.dispatch._LONG_STEPS", 1_000)  # 100,000 take long
    for max_steps, n_warnings in ((1_000, 0), (1_200, 1)):
        evaluate(StepCounter(), create_counting, 12, env_info={"length": 5000}, max_steps=max_steps)
        assert sum("max_steps" in record.msg for record in caplog.records) == n_warnings


@pytest.mark.parametrize("seeds", [range(10**12), range(2**31), range(10**30)])
def test_seeds_without_end_are_refused_by_their_number(seeds: range) -> None:
    with pytest.raises(SpecError, match="episode_seeds has"):
        evaluate(StepCounter(), create_counting, episode_seeds=seeds)
    with EpisodeBatcher(8, 4, StepCounter, {}, create_counting, n_workers=0) as batcher:
        for n_episodes in (2, 10**9):
            with pytest.raises(SpecError, match="episode_seeds has"):
                batcher.execute(n_episodes, episode_seeds=seeds)
