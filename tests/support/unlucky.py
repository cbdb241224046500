"""An environment that fails now and then, and whose failures tell what led to them."""

from __future__ import annotations

import zlib
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlpool import GymEnv, GymEnvInf


class UnluckyError(ValueError):
    """Its text depends on every argument of the episode so far, and on every number drawn."""


class UnluckyEnv(gymnasium.Env[Any, Any]):
    """Draws observations and rewards, and whether to fail or to end, from its seeded generator.

    Args:
        chance: Of failing, per step.
        end: Of ending, per step.
        action_space: Any space.
        reset_chance: Of failing, per reset.
        dtype: Of the observations.
    """

    def __init__(
        self,
        chance: float = 0.05,
        end: float = 0.02,
        action_space: Any = None,
        reset_chance: float = 0.0,
        dtype: Any = np.float32,
    ) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (3,), dtype)
        self.action_space = action_space or spaces.Discrete(1000)
        self.chance, self.end, self.reset_chance = chance, end, reset_chance

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.course = [repr((seed, options))]
        return self.drawn(self.reset_chance), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.course.append(repr(action))
        observation = self.drawn(self.chance)
        draws = self.np_random.random(2)
        return observation, float(draws[0]), bool(draws[1] < self.end), False, {}

    def drawn(self, chance: float) -> Any:
        """The next observation."""
        if self.np_random.random() < chance:
            raise UnluckyError(f"{zlib.crc32(repr(self.course).encode())}")
        observation = self.np_random.random(3).astype(self.observation_space.dtype)
        self.course.append(observation.tobytes().hex())
        return observation


def create_unlucky(
    seed: int, n_envs: int = 2, restarts: bool = False, keep_float64: bool = False, **arguments: Any
) -> GymEnv:
    """``UnluckyEnv`` lanes."""
    kind = GymEnvInf if restarts else GymEnv
    envs = [UnluckyEnv(**arguments) for _ in range(n_envs)]
    return kind(envs, seed, keep_float64=keep_float64)
