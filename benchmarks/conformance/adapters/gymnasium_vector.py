"""Gymnasium's vector environments, with the loop of https://farama.org/Vector-Autoreset-Mode."""

from __future__ import annotations

from typing import ClassVar

import gymnasium as gym
import numpy as np

from benchmarks.conformance.interface import Job, Stepping


class Sync(Stepping):
    package = "gymnasium"
    lacks: ClassVar[dict[str, str]] = {
        "episodes": "steps environments, has no function that collects episodes",
        "evaluate": "has no function that evaluates a policy",
        "workers": "steps environments in the caller's process",
        "worker_count": "steps environments in the caller's process",
        "n_step": "computes no n-step returns",
        "targets": "computes no targets",
    }
    intended: ClassVar[dict[str, str]] = {
        "neighbouring_seeds_share_nothing": "“`int` - `[seed, seed+1, ..., seed+n]`” "
        "(https://gymnasium.farama.org/api/vector/sync_vector_env/)"
    }

    def __init__(self, job: Job) -> None:
        super().__init__(job)
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

    def close(self) -> None:
        self.envs.close()


class Async(Sync):
    lacks: ClassVar[dict[str, str]] = Sync.lacks | {"worker_count": "has a process per environment"}
    del lacks["workers"]
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
