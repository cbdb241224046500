"""Environments that carry state from one episode to the next."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import NormalizeObservation, NormalizeReward

from rlpool import GymEnv, ParallelEnvManager


class Seeded(gymnasium.Env[Any, Any]):
    """Environment whose observations, rewards and length of an episode depend on its seed."""

    observation_space = spaces.Box(-20, 20, (2,), np.float32)
    action_space = spaces.Discrete(5000)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.length = 0, int(self.np_random.integers(4, 9))
        self.start = self.np_random.random(2, np.float32)
        return self.start, {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.start + self.t, float(self.t), self.t == self.length, False, {}


class EpisodicLifeEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Ends an episode after three steps, and resets only if the inner one is over."""

    is_over = True

    def reset(self, **arguments: Any) -> Any:
        self.t = 0
        return self.env.reset(**arguments) if self.is_over else self.step(0)[::4]

    def step(self, action: Any) -> Any:
        observation, reward, self.is_over, truncated, info = self.env.step(action)
        self.t += 1
        return observation, reward, self.is_over or self.t > 3, truncated, info


class Counter(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that changes rewards by a function of the number of resets."""

    def __init__(self, env: Any, factor: Callable[[int], float]) -> None:
        super().__init__(env)
        self.factor, self.n_resets = factor, 0

    def reset(self, **arguments: Any) -> Any:
        self.n_resets += 1
        return self.env.reset(**arguments)

    def step(self, action: Any) -> Any:
        observation, reward, *rest = self.env.step(action)
        return observation, reward * self.factor(self.n_resets), *rest


class Beginner(Counter):
    """Wrapper in which only the observation of a reset depends on the number of resets."""

    def reset(self, **arguments: Any) -> Any:
        observation, info = super().reset(**arguments)
        return observation + self.factor(self.n_resets), info

    step = gymnasium.Wrapper.step


KEEPING: dict[str, Callable[[], Any]] = {
    "NormalizeObservation": lambda: NormalizeObservation(Seeded()),
    "NormalizeReward": lambda: NormalizeReward(NormalizeObservation(Seeded())),
    "EpisodicLifeEnv": lambda: EpisodicLifeEnv(Seeded()),
    "the environment": lambda: Counter(Seeded(), lambda n: 1 + n % 2),
    "the environment, later": lambda: Counter(Seeded(), lambda n: 1 + n // 10),
    "the environment, in resets": lambda: Beginner(Seeded(), float),
}


def make(name: str) -> Any:
    return KEEPING[name]()


def create_keeping(seed: int, name: str, n_envs: int, over_manager: bool = False) -> Any:
    makers = [partial(make, name)] * n_envs
    if over_manager:
        return ParallelEnvManager(makers, seed=seed)
    return GymEnv([maker() for maker in makers], seed)
