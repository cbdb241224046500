"""An environment that says more in its infos than in its observations."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from rlpool import Agent, DictTensor, VecEnv, VectorGymEnv

from support.vector_envs import OwnVectorEnv

KEYS = {
    "success": bool,  # only in the last info, as a float
    "pair": (np.float32, 2),  # the same, a tuple
    "cost": float,  # not in that of a reset
    "task": int,  # only in that of a reset
    "action_mask": (np.int8, 3),
    "part/d": np.float32,  # in a dict
    "flat/t": int,  # a key with a slash
}


class TellingEnv(gymnasium.Env[Any, Any]):
    """An episode of 3, 4 or 5 steps.

    Args:
        extra: More for the info of every step.
    """

    observation_space = spaces.Box(0, 10, (1,))
    action_space = spaces.Discrete(1000)

    def __init__(self, extra: Any = None) -> None:
        self._extra = extra or {}
        self.n_resets = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.n_resets += 1
        self.t, self.length = 0, int(self.np_random.integers(3, 6))
        self.mask = np.array([1, 0, 1], np.int8)
        return np.zeros(1, np.float32), {"task": 7, "action_mask": self.mask.copy()}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        self.mask[self.t % 3], self.mask[(self.t + 1) % 3] = 0, 1
        has_ended = self.t == self.length
        info = {
            "cost": self.t / 2,
            "action_mask": self.mask.copy(),
            "part": {"d": np.float64(self.t), "none": None},
            "flat/t": self.t,
            **({"success": 1.0, "pair": (1, 2.5)} if has_ended else {}),
            **self._extra,
        }
        return np.full(1, self.t, np.float32), 1.0, has_ended, False, info


class MaskedAgent(Agent):
    """Uniform among the actions that the mask allows."""

    n_noise = 1

    def __call__(
        self, state: Any, observation: Any, agent_info: Any = None, history: Any = None
    ) -> tuple[DictTensor, DictTensor, DictTensor]:
        mask = observation["action_mask"].bool()
        n_before = torch.cumsum(mask, 1) - mask.long()
        wanted = (observation["noise"] * mask.sum(1, keepdim=True)).long()
        action = (mask & (n_before == wanted)).long().argmax(1)
        return DictTensor(), DictTensor({"action": action}), DictTensor()


def create_telling(
    seed: int, kind: str = "DISABLED", restarts: bool = False, **extra: Any
) -> VecEnv:
    """Four lanes of telling environments.

    Args:
        seed: See ``VectorGymEnv``.
        kind: The name of an autoreset mode: with ``"DISABLED"`` lanes are reset one by one, else
            together.
        restarts: Whether lanes restart in windows.
        extra: See ``TellingEnv``.
    """
    vector = OwnVectorEnv([partial(TellingEnv, extra)] * 4, AutoresetMode[kind])
    seeding: Any = "episode" if kind == "DISABLED" else "request"
    return VectorGymEnv(vector, seed, seeding=seeding, info_keys=KEYS, auto_reset=restarts)
