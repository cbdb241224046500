"""rlpool: windows of a Batcher, episodes of an EpisodeBatcher, evaluate, Pool, gae."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

import rlpool
from benchmarks.conformance.interface import Collector, Job, Steps

COLUMNS = ("frame", "action", "_reward", "_terminated", "_truncated", "_frame")


def create_env(seed: int, job: Job, kind: Any) -> rlpool.GymEnv:
    envs = [job.make_stacked_env() for _ in range(job.n_envs // job.n_workers)]
    return kind(envs, seed, info_keys=dict.fromkeys(job.info_keys, np.int64))


def act(observation: Any, policy: Any) -> dict[str, torch.Tensor]:
    return {"action": torch.from_numpy(policy(observation["frame"].numpy()))}


class Batchers(Collector):
    package = "rlpool"
    intended: ClassVar[dict[str, str]] = {
        "observations_keep_float64": "“Observations in float64 are stored in float32.” "
        "`keep_float64=True` keeps them (docs/episodes.md)",
        "rewards_keep_float64": "“Rewards are float32” (docs/limits.md)",
    }
    batcher: Any = None

    def environments(self, kind: Any) -> dict[str, Any]:
        env_args = {"job": self.job, "kind": kind}
        return {"create_env": create_env, "env_args": env_args, "n_workers": self.job.n_workers}

    def run(self, kind: Any, env_kind: Any, n_timesteps: int, *request: int) -> Any:
        policy, options = self.job.policy, self.job.options
        if self.batcher is None:
            arguments = {"seed": self.job.seed, "timeout": self.job.timeout_s}
            arguments |= {"create_agent": lambda: partial(act, policy=policy)}
            self.batcher = kind(n_timesteps, **arguments, **self.environments(env_kind))
            if kind is rlpool.Batcher:
                self.batcher.reset(env_info=options)
        self.batcher.execute(*request, env_info=options)
        return self.batcher.get()

    def steps(self, n_steps: int) -> Any:
        return self.run(rlpool.Batcher, rlpool.GymEnvInf, n_steps)

    def rows(self, found: Any) -> list[Steps]:
        rows = []
        for i, n in enumerate(found.lengths.tolist()):
            infos = {key: found[f"_{key}"][i].tolist() for key in self.job.info_keys}
            info = [{key: infos[key][t] for key in infos} for t in range(n)]
            rows.append(Steps(*(found[key][i, :n].numpy() for key in COLUMNS), info))
        return rows

    def window(self, n_steps: int) -> list[Steps]:
        return self.rows(self.steps(n_steps))

    def episodes(self, n: int) -> list[Steps]:
        return self.rows(self.run(rlpool.EpisodeBatcher, rlpool.GymEnv, 64, n))

    def evaluate(self, n: int) -> list[float]:
        agent = partial(act, policy=self.job.policy)
        arguments = {"seed": self.job.seed or 0, **self.environments(rlpool.GymEnv)}
        return rlpool.evaluate(agent, n_episodes=n, **arguments).returns.tolist()

    def n_step(self, n_steps: int, n: int, gamma: float) -> Steps:
        pool = rlpool.Pool(pool_size=1000, seed=0)
        pool.extend(self.steps(n_steps))
        batch = pool.sample(len(pool), n_step=n, discount=gamma)
        keys = (key.replace("_reward", "n_step_return") for key in COLUMNS)
        return Steps(*(batch[key].numpy() for key in keys))

    def targets(self, n_steps: int, value: Any, gamma: float) -> list[tuple[Steps, np.ndarray]]:
        found = self.steps(n_steps)
        values = [np.stack(list(map(value, found[key].numpy()))) for key in ("frame", "_frame")]
        ends = found["_terminated"], found["_done"]
        now, then = map(torch.tensor, values)
        target = rlpool.gae(found["_reward"], now, then, *ends, gamma, 1.0) + now
        return list(zip(self.rows(found), target.numpy(), strict=True))

    def close(self) -> None:
        if self.batcher is not None:
            self.batcher.close()
