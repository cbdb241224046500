"""Episodes whose seeds the user names."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from rlpool import EpisodeBatcher, GymEnv, SpecError, VectorGymEnv

from support.agents import ConstantAgent, StepCounter
from support.envs import create_counting


def create_cartpoles(n_lanes: int, seed: int) -> GymEnv:
    return GymEnv([gymnasium.make("CartPole-v1") for _ in range(n_lanes)], seed)


def first_observation(seed: int) -> torch.Tensor:
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=seed)
    env.close()
    return torch.from_numpy(observation)


@pytest.mark.parametrize("n_threads", [0, 2])
@pytest.mark.parametrize(
    "named",
    [range(9), (8, 0, 8, 2**31 - 1, 5, 6, 7, 1, 3), np.arange(9), torch.arange(9)],
    ids=repr,
)
def test_episodes_are_reset_with_the_seeds_that_were_named(named: Any, n_threads: int) -> None:
    with EpisodeBatcher(
        4, 9, ConstantAgent, None, create_cartpoles, {"n_lanes": 2}, n_threads, 1
    ) as batcher:
        batcher.execute(9, episode_seeds=named)
        result = batcher.get()
        batcher.reexecute()
        again = batcher.get()
        batcher.execute(9)
        others = batcher.get()
    seeds = [int(seed) for seed in named]
    assert result.info["seed"].tolist() == again.info["seed"].tolist() == seeds
    for row, seed in enumerate(seeds):
        assert torch.equal(result["frame"][row, 0], first_observation(seed))
    assert not set(seeds) & set(others.info["seed"].tolist())


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ([1, 2], "episode_seeds has 2 seeds for 3 episodes"),
        ([1, 2, -3], r"episode_seeds\[2\] should be an int of at least 0, got -3"),
        ([1, 2.5, 3], r"episode_seeds\[1\] should be an int"),
        ([1, 2, 2**31], r"episode_seeds\[2\] is 2147483648, not below"),
        (np.zeros((3, 1), int), r"episode_seeds\[0\] should be an int"),
        (torch.tensor(3), "episode_seeds should be a list of ints"),
        (3, "episode_seeds should be a list of ints"),
        ("123", "episode_seeds should be a list of ints"),
        ({1, 2, 3}, "episode_seeds should be a list of ints"),
    ],
)
def test_what_is_no_list_of_seeds_is_refused(named: Any, message: str) -> None:
    with EpisodeBatcher(4, 6, StepCounter, None, create_counting, None, 0, 1) as batcher:
        with pytest.raises(SpecError, match=message):
            batcher.execute(3, episode_seeds=named)
        batcher.execute(3)
        assert batcher.get().info["episode"].tolist() == [0, 1, 2]


def test_environments_that_are_reset_together_refuse_a_seed_for_each() -> None:
    def create_vector(seed: int) -> VectorGymEnv:
        return VectorGymEnv(gymnasium.make_vec("CartPole-v1", num_envs=2), seed)

    with (
        EpisodeBatcher(4, 6, StepCounter, None, create_vector, None, 0, 1) as batcher,
        pytest.raises(SpecError, match="one reset serves all lanes"),
    ):
        batcher.execute(2, episode_seeds=[1, 2])
