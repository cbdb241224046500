"""Environments for ``ParallelEnvManager``, and functions that make managers.

All at module level, so that worker processes can unpickle them by name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlpool import GymEnv, GymEnvInf, ParallelEnvManager

from support.envs import CountingEnv

EnvFn = Callable[[], Any]


class TaskEnv(gymnasium.Env[Any, Any]):
    """The observation is ``[step, task]``; the task is an argument of ``reset``, -1 without."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    n_tasks = 7
    horizon_bamdp = 3

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.last_action: Any = None

    def reset(self, *, task: Any = None, seed: Any = None, options: Any = None) -> Any:
        self.task, self.given_options = task, options
        self.t = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        self.last_action = action
        return self._observation(), float(self.t), self.t >= 3, False, {"t": self.t}

    def _observation(self) -> Any:
        return np.array([self.t, -1 if self.task is None else self.task], np.float32)


class SleepyEnv(CountingEnv):
    """A ``CountingEnv`` whose steps take ``sleep_ms``, an option of the reset."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.sleep_s = (options or {}).get("sleep_ms", 0) / 1000
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self.sleep_s)
        return super().step(action)


class WideEnv(CountingEnv):
    """A ``CountingEnv`` with a different observation space."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)


make_cartpole = partial(gymnasium.make, "CartPole-v1")


def create_serial(
    seed: int, make_env: EnvFn, n_lanes: int, restarts: bool = False, **options: Any
) -> GymEnv:
    """Create the environments of ``create_manager`` in this process."""
    kind = GymEnvInf if restarts else GymEnv
    return kind([make_env() for _ in range(n_lanes)], seed, **options)


def create_manager(
    seed: int, make_env: EnvFn, n_lanes: int, restarts: bool = False, **options: Any
) -> ParallelEnvManager:
    """Create environments in processes; usable as ``create_env``."""
    return ParallelEnvManager([make_env] * n_lanes, seed=seed, auto_reset=restarts, **options)


open_manager = partial(create_manager, 1)


def no_actions(manager: ParallelEnvManager) -> dict[str, Any]:
    """Return actions that are all zero."""
    leaves = manager.action_leaves or {}
    return {
        key: np.zeros((manager.num_envs, *leaf.spec.shape), leaf.spec.dtype)
        for key, leaf in leaves.items()
    }
