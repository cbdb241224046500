"""rlpool: windows of a Batcher, episodes of an EpisodeBatcher, evaluate, Pool, gae."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch

import rlpool
from benchmarks.conformance.interface import Collector, Job, Steps

COLUMNS = ("frame", "action", "_reward", "_terminated", "_truncated", "_frame")


class Scripted(rlpool.Agent):
    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def __call__(self, observation: rlpool.DictTensor) -> dict[str, torch.Tensor]:
        return {"action": torch.from_numpy(self.policy(observation["frame"].numpy()))}


def create_env(seed: int, job: Job, kind: Any) -> rlpool.GymEnv:
    envs = [job.make_env() for _ in range(job.n_envs // job.n_workers)]
    if job.frame_stack > 1:
        envs = [gym.wrappers.FrameStackObservation(env, job.frame_stack) for env in envs]
    return kind(envs, seed, info_keys=dict.fromkeys(job.info_keys, np.int64))


def steps_of(row: Any, n: int, info_keys: Any) -> Steps:
    infos = [{key: int(row[f"_{key}"][t]) for key in info_keys} for t in range(n)]
    return Steps(*(row[key][:n].numpy() for key in COLUMNS), infos)


class Batchers(Collector):
    package = "rlpool"
    intended: ClassVar[dict[str, str]] = {
        "observations_keep_float64": "“Observations in float64 are stored in float32”, unless "
        "`keep_float64=True` (docs/episodes.md)",
        "rewards_keep_float64": "“Rewards are float32” (docs/limits.md)",
    }

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.arguments = {"create_env": create_env, "n_workers": job.n_workers}
        self.batcher: Any = None

    def open(self, kind: Any, env_kind: Any, n_timesteps: int) -> Any:
        return kind(
            n_timesteps=n_timesteps,
            create_agent=Scripted,
            agent_args={"policy": self.job.policy},
            env_args={"job": self.job, "kind": env_kind},
            seed=self.job.seed,
            timeout=self.job.timeout_s,
            **self.arguments,
        )

    def collect(self, n_steps: int) -> Any:
        if self.batcher is None:
            self.batcher = self.open(rlpool.Batcher, rlpool.GymEnvInf, n_steps)
            self.batcher.reset(env_info=self.job.options)
        self.batcher.execute()
        return self.batcher.get()

    def rows(self, found: Any) -> list[Steps]:
        lengths = found.lengths.tolist()
        arrays = {key: found[key] for key in (*COLUMNS, *(f"_{k}" for k in self.job.info_keys))}
        return [
            steps_of({key: value[i] for key, value in arrays.items()}, n, self.job.info_keys)
            for i, n in enumerate(lengths)
        ]

    def window(self, n_steps: int) -> list[Steps]:
        return self.rows(self.collect(n_steps))

    def episodes(self, n: int) -> list[Steps]:
        if self.batcher is None:
            self.batcher = self.open(rlpool.EpisodeBatcher, rlpool.GymEnv, 64)
        self.batcher.execute(n, env_info=self.job.options)
        return self.rows(self.batcher.get())

    def evaluate(self, n: int) -> list[float]:
        arguments = {"env_args": {"job": self.job, "kind": rlpool.GymEnv}, **self.arguments}
        seed = {} if self.job.seed is None else {"seed": self.job.seed}
        return rlpool.evaluate(
            Scripted(self.job.policy), n_episodes=n, **arguments, **seed
        ).returns.tolist()

    def n_step(self, n_steps: int, n: int, gamma: float) -> Steps:
        pool = rlpool.Pool(pool_size=1000, seed=0)
        pool.extend(self.collect(n_steps))
        batch = pool.sample(len(pool), n_step=n, discount=gamma)
        names = ("frame", "action", "n_step_return", "_terminated", "_truncated", "_frame")
        return Steps(*(batch[name].numpy() for name in names))

    def targets(self, n_steps: int, value: Any, gamma: float) -> list[tuple[Steps, np.ndarray]]:
        found = self.collect(n_steps)
        worth, next_worth = (
            torch.tensor(np.stack([value(row.numpy()) for row in found[key]]))
            for key in ("frame", "_frame")
        )
        ends = found["_terminated"], found["_done"]
        target = rlpool.gae(found["_reward"], worth, next_worth, *ends, gamma, 1.0) + worth
        return list(zip(self.rows(found), target.numpy(), strict=True))

    def close(self) -> None:
        if self.batcher is not None:
            self.batcher.close()

    @classmethod
    def version(cls) -> str:
        return f"{rlpool.__version__} (this checkout)"
