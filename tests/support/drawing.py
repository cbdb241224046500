"""Environments and agents that draw from the global generators wherever they can."""

from __future__ import annotations

import random
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from rlpool import Agent, DictTensor, GymEnv, GymEnvInf, ParallelEnvManager


def drawn() -> list[float]:
    """One number from every generator; normal ones are drawn in pairs, and the second is kept."""
    return [
        random.random(),
        random.gauss(0.0, 1.0),
        float(np.random.rand()),  # noqa: NPY002
        float(np.random.normal()),  # noqa: NPY002
        torch.rand(()).item(),
        torch.randn(()).item(),
    ]


class DrawingEnv(gymnasium.Env[Any, Any]):
    """Its observation is what it has just drawn."""

    observation_space = spaces.Box(-np.inf, np.inf, (6,), np.float64)
    action_space = spaces.Discrete(1000)

    def __init__(self) -> None:
        self.base = np.array(drawn())

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.base + drawn(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self.base + drawn(), float(action), self.t == 3, False, {}

    def close(self) -> None:
        drawn()


class DrawingAgent(Agent):
    """A network that nobody has ever seeded or updated, and random actions."""

    def __init__(self) -> None:
        drawn()
        self.linear = torch.nn.Linear(6, 3)

    def __call__(self, state, observation, agent_info=None, history=None):
        n = observation.n_elems()
        output = {
            "action": torch.randint(1000, (n,)),
            "logits": self.linear(observation["frame"].float()),
            "noisy": torch.from_numpy(np.random.normal(size=n)),  # noqa: NPY002
        }
        return DictTensor(), DictTensor(output), DictTensor()

    def update(self, info: Any) -> None:
        torch.nn.init.normal_(self.linear.weight)

    def close(self) -> None:
        drawn()


def create_drawing(seed: int, restarts: bool = False) -> GymEnv:
    drawn()
    random.seed(random.random())
    envs = [DrawingEnv() for _ in range(2)]
    return (GymEnvInf if restarts else GymEnv)(envs, seed, keep_float64=True)


def create_drawing_manager(seed: int) -> ParallelEnvManager:
    drawn()
    return ParallelEnvManager([DrawingEnv] * 2, seed=seed, keep_float64=True, envs_per_worker=2)
