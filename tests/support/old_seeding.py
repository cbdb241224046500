"""Environments that seed themselves as most did before Gymnasium."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
from gymnasium import spaces

from support.envs import CountingEnv


def plant(seed: Any) -> None:
    """Seed generators that refuse long seeds, such as those of a simulator in C."""
    struct.pack("i", seed)
    np.random.seed(seed)  # noqa: NPY002
    np.random.RandomState(seed)
    random.seed(seed)


class OldSeedingEnv(CountingEnv):
    """Its observation is the seed of its episode, twice in episodes of two steps.

    Args:
        length: Steps of an episode.
        seed: The seed that ``create_env`` got.
    """

    observation_space = spaces.Box(0, 2**31 - 1, (1,), np.int64)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 2, seed: int = 0) -> None:
        super().__init__(length)
        plant(seed)
        self.episode_seed = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            plant(seed)
            self.episode_seed = seed
        return super().reset(seed=seed)

    def observation(self) -> Any:
        return np.array([self.episode_seed])


class OldTaskEnv(OldSeedingEnv):
    """Has tasks; later episodes of a trial keep the seed."""

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


class ResetSeededEnv(OwnActionsEnv):
    """Takes its seed in ``reset``."""

    seed = None  # type: ignore[assignment]

    def reset(self, seed: int) -> tuple[Any, int]:  # type: ignore[override]
        OwnActionsEnv.seed(self, seed)
        return super().reset()
