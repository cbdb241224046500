"""Environments of the old gym, and other signatures of ``reset``."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils import seeding
from gymnasium.wrappers import TimeLimit

from rlpool import DictTensor, EnvSpecError, EpisodeBatcher, GymEnv, GymEnvInf

from support.agents import StepCounter
from support.envs import (
    CountingEnv,
    InfoEnv,
    LegacyCountingEnv,
    LegacyInfoEnv,
    LegacyWrapper,
    SpacedLegacyEnv,
    assert_same_tensors,
    counting_trajectories,
)


def action(*values: Any) -> DictTensor:
    return DictTensor({"action": torch.tensor(values)})


def collect(make_env: Any, n_episodes: int, infos: Any = None, **arguments: Any) -> Any:
    """Collect episodes of a ``StepCounter`` in this process."""
    with EpisodeBatcher(
        2,
        4,
        create_agent=StepCounter,
        create_env=lambda seed: GymEnv([make_env() for _ in range(2)], seed, **arguments),
        n_threads=0,
        seeds=0,
    ) as batcher:
        batcher.execute(n_episodes, **(infos or {}))
        return batcher.get()


def wrapped(*arguments: Any, **named: Any) -> LegacyWrapper:
    return LegacyWrapper(LegacyCountingEnv(*arguments, **named))


@pytest.mark.parametrize("kind", [LegacyCountingEnv, SpacedLegacyEnv, wrapped])
def test_trajectories_match_those_of_modern_environments(kind: Any) -> None:
    trajectories = collect(lambda: kind(5, 2), 3)
    assert_same_tensors(trajectories, counting_trajectories([5, 5, 5], [2, 2, 2]))
    trajectories = collect(lambda: kind(9), 2, max_episode_steps=4)
    assert_same_tensors(trajectories, counting_trajectories([4, 4], [0, 0], ["truncated"] * 2))
    trajectories = collect(lambda: kind(3, is_limited=True), 2)  # as its info says
    assert_same_tensors(trajectories, counting_trajectories([3, 3], [0, 0], ["truncated"] * 2))


def test_legacy_gym_spaces_are_recognised_by_class_name() -> None:
    Box = type("Box", (), {"shape": (3,), "dtype": np.dtype(np.float64)})  # noqa: N806
    Discrete = type("Discrete", (), {"n": 4})  # noqa: N806
    inner: Any = LegacyCountingEnv()
    inner.observation_space = type("Dict", (), {"spaces": {"x": Box(), "y": Discrete()}})()
    inner.reset = lambda: {"x": np.zeros(3), "y": 3}
    observation, _ = GymEnv([inner], seed=0).reset()
    assert (observation["x"].dtype, observation["y"].tolist()) == (torch.float32, [3])


# Arguments of reset


class DefaultInfoEnv(LegacyCountingEnv):
    """Environment that requires ``env_info``, with a default."""

    def reset(self, env_info: Any = {"id": 8}) -> Any:  # type: ignore[override]  # noqa: B006
        self.number = env_info["id"]
        return super().reset()


class DefaultOptionsEnv(CountingEnv):
    """Environment that requires ``options``, with a default."""

    def reset(self, *, seed: Any = None, options: Any = {"id": 8}) -> Any:  # type: ignore[override]  # noqa: B006
        return super().reset(seed=seed, options={"id": options["id"]})


@pytest.mark.parametrize("kind", [DefaultInfoEnv, DefaultOptionsEnv])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_an_environments_own_default_applies_without_env_info(kind: Any, is_wrapped: bool) -> None:
    made = kind(length=1)
    if is_wrapped and isinstance(made, gymnasium.Env):
        made = TimeLimit(made, 5)
    env = GymEnvInf([made], seed=0)
    for info, number in ((None, 8), (DictTensor({}), 8), ({"id": [5]}, 5), (None, 8)):
        assert env.reset(info)[0]["frame"].tolist() == [[0, number]]
        _, (after, _) = env.step(action(0))  # which resets it
        assert after["frame"].tolist() == [[0, number]]


def test_env_info_is_passed_to_every_reset_that_accepts_it() -> None:
    info = DictTensor({"length": torch.tensor([3, 1, 5]), "id": torch.tensor([7, 8, 9])})
    trajectories = collect(LegacyInfoEnv, 3, {"env_info": info})
    assert_same_tensors(trajectories, counting_trajectories([3, 1, 5], [7, 8, 9]))
    for make in (LegacyInfoEnv, InfoEnv, lambda length: TimeLimit(InfoEnv(length), 10)):
        made: Any = make(length=1)
        inner = getattr(made, "env", made)
        env = GymEnvInf([made], seed=0)
        env.reset({"id": [5]})
        env.step(action(0))
        assert inner.infos == [{"id": 5}] * 2


class SeededEnv(CountingEnv):
    """Environment whose ``reset`` takes only a seed."""

    def reset(self, *, seed: Any = None) -> Any:  # type: ignore[override]
        return super().reset(seed=seed)


def test_options_that_reset_does_not_accept_are_refused_with_its_signature() -> None:
    for make, named in ((wrapped, "LegacyCountingEnv"), (SeededEnv, "SeededEnv")):
        env = GymEnv([make()], seed=0)
        env.reset()
        with pytest.raises(EnvSpecError, match=rf"{named}.*'level'"):
            env.reset({"level": [3]})


class TaskWrapper(gymnasium.Wrapper):  # type: ignore[type-arg]
    """Wrapper that takes a task although the wrapped environment does not."""

    def reset(self, *, task: Any = 8, **arguments: Any) -> Any:
        self.given = task, arguments
        return self.env.reset(**arguments)


def test_a_task_in_the_options_reaches_a_reset_that_accepts_one() -> None:
    wrapper = TaskWrapper(CountingEnv())
    env = GymEnv([TimeLimit(wrapper, 5)])
    env.reset_lanes([0], [3], [{"task": 4, "length": 9}])
    assert wrapper.given == (4, {"seed": 3, "options": {"length": 9}})
    env.reset_lanes([0], [3], [None])
    assert wrapper.given == (8, {"seed": 3, "options": None})


def test_seeding_determines_the_draws_of_a_task_independently_of_reset() -> None:
    env, tasks, starts = CountingEnv(), list[Any](), list[float]()
    env.reset_task = lambda task: tasks.append((task, env.np_random.random()))  # type: ignore[attr-defined]
    lanes = GymEnv([env])
    for options in ({"task": 4}, {"task": 4}, None):
        lanes.reset_lanes([0], [3], [options])
        starts.append(env.np_random.random())
    assert tasks == [(4, tasks[0][1])] * 2
    assert tasks[0][1] not in starts
    assert len(set(starts)) == 1


# Generators and interfaces of the old gym


class OldNoiseEnv(gymnasium.Env[Any, Any]):
    """Environment that uses the old gym's names of generators."""

    def seed(self, seed: Any = None) -> None:
        self.seed_given = seed
        self.np_random = seeding.np_random(seed)[0]

    def reset(self) -> Any:  # type: ignore[override]
        rng: Any = self.np_random
        self.drawn = [rng.rand(), rng.randn(), rng.randint(3, 9), rng.random_sample()]
        return self.drawn[0]

    def step(self, action: Any) -> Any:
        return self.np_random.rand(), 0.0, True, {}  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_legacy_generator_names_are_available(is_wrapped: bool) -> None:
    inner = OldNoiseEnv()
    env = GymEnv([TimeLimit(inner, 5) if is_wrapped else inner], seed=3)
    for _ in range(2):
        env.reset()
        (observation, _), _ = env.step(action(0))
        same = np.random.default_rng(inner.seed_given)
        old = np.random.RandomState(same.bit_generator)
        expected = [old.rand(), old.randn(), old.randint(3, 9), old.random_sample()]
        assert inner.drawn == expected
        assert type(inner.drawn[0]) is float
        assert observation["frame"].tolist() == [np.float32(same.random())]
    modern = CountingEnv()
    GymEnv([modern], seed=0).reset()
    assert type(modern.np_random) is np.random.Generator


def test_a_legacy_reset_without_a_seed_method_uses_the_episodes_seed() -> None:
    class Env(gymnasium.Env[Any, Any]):
        def reset(self) -> Any:  # type: ignore[override]
            return self.np_random.rand()  # type: ignore[attr-defined]

        def step(self, action: Any) -> Any:
            return 0.0, 0.0, True, {}

    first, again, other = (GymEnv([Env()], seed=s).reset()[0]["frame"] for s in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist()
