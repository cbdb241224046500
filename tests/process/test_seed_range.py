"""Seeds are below 2**31 wherever they come to light, and episodes of one batcher share none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlpool import (
    DictTensor,
    GymEnvInf,
    ParallelEnvManager,
    Pool,
)

from support.envs import CountingEnv

pytestmark = pytest.mark.promise("I2")


def check_all_differ(seeds: list[int], n: int) -> None:
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert len(set(seeds)) == len(seeds) == n


class SeenSeedEnv(CountingEnv):
    """Its observation is the seed of its episode of two steps, that of the former one without."""

    observation_space = spaces.Box(0, 2**31 - 1, (1,), np.int64)
    action_space = spaces.Discrete(2)
    episode_seed = 0

    def __init__(self) -> None:
        super().__init__(length=2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode_seed = self.episode_seed if seed is None else seed
        return super().reset(seed=seed)

    def observation(self) -> Any:
        return np.array([self.episode_seed])


class OldSeenSeedEnv:
    """Likewise in the pool's protocol: it chooses its actions itself."""

    def seed(self, seed: int) -> None:
        self.given = seed

    def reset(self) -> tuple[Any, int]:
        self.t = 0
        return np.array([self.given]), 0

    def step(self, action: int) -> tuple[int, Any, float, bool]:
        self.t += 1
        return 0, np.array([self.given]), 1.0, self.t == 2


def seeds_of_lanes(env: Any) -> list[int]:
    """Of three lanes that restart, over three resets."""
    seeds: list[int] = []
    action = DictTensor({"action": torch.zeros(3, dtype=torch.int64)})
    for n_steps in (5, 0, 9):
        observation, _ = env.reset()
        seeds += observation["frame"].flatten().tolist()
        for _ in range(n_steps):
            _, (observation, _) = env.step(action)
            if observation["initial_state"].any():
                seeds += observation["frame"].flatten().tolist()
    return seeds


def seeds_of_remote(remote: Any, n: int) -> list[int]:
    seeds = []
    for _ in range(n):
        remote.send(("reset", None))
        seeds.append(int(remote.recv()[1][0]))
    return seeds


def test_environments_that_are_reset_by_hand_share_no_seed() -> None:
    """By lanes that restart, by resets and by remotes of one manager, also without its ``seed``."""
    lanes = GymEnvInf([SeenSeedEnv() for _ in range(3)], seed=0)
    check_all_differ(seeds_of_lanes(lanes), 27)
    with ParallelEnvManager([SeenSeedEnv] * 3, auto_reset=True) as manager:
        seeds = seeds_of_lanes(manager)
        for remote in manager.remotes:
            seeds += seeds_of_remote(remote, 20)
        check_all_differ(seeds, 27 + 60)
        runs = []
        for remote in manager.remotes[:2]:  # each goes on from a seed that it is given
            for given in (5, 2**62):
                remote.send(("seed", {"seed": given}))
                assert remote.recv() == ("done", None)
                runs.append(seeds_of_remote(remote, 10))
                check_all_differ(runs[-1], 10)
        assert runs[:2] == runs[2:]
        assert runs[0][0] == 5


def test_episodes_of_a_pool_have_short_seeds_in_both_protocols() -> None:
    with Pool([SeenSeedEnv(), OldSeenSeedEnv()], 2, 100, seed=3) as pool:
        for _ in range(4):
            pool.store()
        states, _, next_states, _, _ = pool.get_pool()
    assert next_states.tolist() == states.tolist()
    check_all_differ(sorted(set(states.flatten().tolist())), 8)
