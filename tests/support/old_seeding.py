"""Environments that seed themselves as most do that are older than Gymnasium."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlpool import Agent, DictTensor, GymEnv, GymEnvInf


def plant(seed: Any) -> None:
    """Seed what takes no long seeds, as a simulator in C does."""
    struct.pack("i", seed)
    np.random.seed(seed)  # noqa: NPY002
    np.random.RandomState(seed)
    random.seed(seed)


class OldSeedingEnv(gymnasium.Env[Any, Any]):
    """Its observation is the seed of its episode, twice in episodes of two steps.

    Args:
        length: Steps of an episode.
        fails_at: Step in which it raises.
        seed: What the function got that made it.
    """

    observation_space = spaces.Box(0, 2**31 - 1, (1,), np.int64)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 2, fails_at: int | None = None, seed: int = 0) -> None:
        plant(seed)
        self.length, self.fails_at = length, fails_at
        self.episode_seed = 0

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            plant(seed)
            self.episode_seed = seed
        self.t = 0
        return np.array([self.episode_seed]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.t == self.fails_at:
            raise KeyError(int(np.random.randint(2**31)))  # noqa: NPY002
        self.t += 1
        return np.array([self.episode_seed]), 1.0, self.t >= self.length, False, {}


class OldTaskEnv(OldSeedingEnv):
    """With tasks, whose seed a trial's further episodes keep."""

    n_tasks = 3
    max_episode_steps = 2
    _max_episode_steps = 2
    observation_space = spaces.Box(0, 2**31 - 1, (1,), np.float64)

    def reset_task(self, task: Any) -> None:
        self.task = task

    def get_current_task(self) -> Any:
        return np.zeros(1)

    def get_all_task_idx(self) -> list[int]:
        return [0, 1, 2]


class OwnActionsEnv:
    """Chooses its actions itself; its state is the seed of its episode."""

    def __init__(self) -> None:
        self.given = 0

    def seed(self, seed: int) -> None:
        plant(seed)
        self.given = seed

    def reset(self) -> tuple[Any, int]:
        self.t = 0
        return np.array([self.given]), 0

    def step(self, action: int) -> tuple[int, Any, float, bool]:
        self.t += 1
        return 0, np.array([self.given]), 1.0, self.t == 2


class SeedTellingAgent(Agent):
    """Its output ``agent_seed`` is what ``seed`` gave it."""

    def seed(self, seed: int) -> None:
        plant(seed)
        self.given = seed

    def __call__(
        self, state: Any, observation: DictTensor, agent_info: Any = None, history: Any = None
    ) -> tuple[DictTensor, DictTensor, DictTensor]:
        seeds = observation["reward"].long() * 0
        output = {"action": seeds, "agent_seed": seeds + self.given}
        return DictTensor(), DictTensor(output), DictTensor()


def create_old(
    seed: int, n_lanes: int = 2, restarts: bool = False, fails_at: int | None = None
) -> GymEnv:
    """Environments that get the seed of ``create_env`` as well."""
    envs = [OldSeedingEnv(fails_at=fails_at, seed=seed) for _ in range(n_lanes)]
    return (GymEnvInf if restarts else GymEnv)(envs, seed)
