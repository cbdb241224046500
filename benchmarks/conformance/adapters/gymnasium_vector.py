"""Gymnasium's vector environments, with the loop of https://farama.org/Vector-Autoreset-Mode."""

from __future__ import annotations

from typing import ClassVar

import gymnasium as gym
import numpy as np

from benchmarks.conformance import interface
from benchmarks.conformance.interface import Job, Stepping

LACKS = interface.NO_EPISODES | interface.NO_EVALUATION | interface.NO_TARGETS


class Sync(Stepping):
    package = "gymnasium"
    lacks: ClassVar[dict[str, str]] = LACKS | interface.IN_CALLER
    intended: ClassVar[dict[str, str]] = {
        "neighbouring_seeds_share_nothing": "“`int` - `[seed, seed+1, ..., seed+n]`” "
        "(of SyncVectorEnv: https://gymnasium.farama.org/api/vector/sync_vector_env/)"
    }

    def open(self, job: Job) -> None:
        self.envs = self.vectorise([job.make_stacked_env] * job.n_envs)
        self.observation, _ = self.envs.reset(seed=job.seed, options=job.options)
        self.starts = np.zeros(job.n_envs, bool)

    def vectorise(self, env_fns: list) -> gym.vector.VectorEnv:
        return gym.vector.SyncVectorEnv(env_fns)

    def call(self, action: np.ndarray) -> tuple:
        return self.envs.step(action)

    def step(self, action: np.ndarray) -> tuple:
        after, reward, terminated, truncated, infos = self.call(action)
        found: list[tuple | None] = []
        for i, is_reset in enumerate(self.starts):
            info = {key: infos[key][i] for key in infos if infos.get(f"_{key}", self.starts)[i]}
            row = (reward[i], terminated[i], truncated[i], after[i], info)
            found.append(None if is_reset else row)
        self.starts = terminated | truncated
        return after, found


class Async(Sync):
    lacks: ClassVar[dict[str, str]] = LACKS | interface.PER_ENVIRONMENT
    intended: ClassVar[dict[str, str]] = Sync.intended | {
        "environment_starts_processes": "“`daemon=True` prevents subprocesses to spawn children” "
        "(https://gymnasium.farama.org/api/vector/async_vector_env/)"
    }

    def vectorise(self, env_fns: list) -> gym.vector.VectorEnv:
        return gym.vector.AsyncVectorEnv(env_fns)

    def call(self, action: np.ndarray) -> tuple:
        self.envs.step_async(action)
        return self.envs.step_wait(timeout=self.job.timeout_s)

    def close(self) -> None:
        self.envs.close(timeout=self.job.timeout_s)
