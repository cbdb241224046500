"""rlpool: windows of a Batcher, episodes of an EpisodeBatcher, evaluate, Pool, gae."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

import rlpool
from benchmarks.conformance.interface import Collector, Job, Steps

WINDOW = rlpool.Batcher, rlpool.GymEnvInf
COLUMNS = ("frame", "action", "_reward", "_terminated", "_truncated", "_frame")


def create_env(seed: int, job: Job, kind: Any) -> rlpool.GymEnv:
    envs = [job.make_stacked_env() for _ in range(job.n_envs // job.n_workers)]
    return kind(envs, seed, info_keys=dict.fromkeys(job.info_keys, np.int64))


def act(observation: Any, policy: Any) -> dict[str, torch.Tensor]:
    return {"action": torch.from_numpy(policy(observation["frame"].numpy()))}


class Batchers(Collector):
    package = "rlpool"
    intended: ClassVar[dict[str, str]] = {
        "observations_keep_float64": "“stored as float32”; see `keep_float64` (docs/episodes.md)",
        "environments_that_ignore_seeds_are_evaluated": "“`check_repeatable=False` skips the "
        "check, for real robots” (docs/training.md)",
        "rewards_keep_float64": "“Rewards are float32” (docs/reliability.md)",
    }

    def run(self, kind: Any, env_kind: Any, n_timesteps: int, *request: int) -> Any:
        job = self.job
        if self.opened is None:
            arguments = {"seed": job.seed, "timeout": job.timeout_s, "n_workers": job.n_workers}
            arguments |= {"create_env": partial(create_env, job=job, kind=env_kind)}
            arguments |= {"create_agent": lambda: partial(act, policy=job.policy)}
            self.opened = kind(n_timesteps, **arguments)
            self.at_end.callback(self.opened.close)
            if kind is rlpool.Batcher:
                self.opened.reset(env_info=job.options)
        self.opened.execute(*request, env_info=job.options)
        return self.opened.get()

    def rows(self, found: Any) -> list[Steps]:
        rows, keys = [], self.job.info_keys
        for i, n in enumerate(found.lengths.tolist()):
            info = [{key: int(found[f"_{key}"][i, t]) for key in keys} for t in range(n)]
            rows.append(Steps(*(found[key][i, :n].numpy() for key in COLUMNS), info))
        return rows

    def window(self, n_steps: int) -> list[Steps]:
        return self.rows(self.run(*WINDOW, n_steps))

    def episodes(self, n: int) -> list[Steps]:
        return self.rows(self.run(rlpool.EpisodeBatcher, rlpool.GymEnv, 64, n))

    def evaluate(self, n: int) -> list[float]:
        agent, job = partial(act, policy=self.job.policy), self.job
        make, more = partial(create_env, job=job, kind=rlpool.GymEnv), {"n_workers": job.n_workers}
        return rlpool.evaluate(agent, make, n, seed=job.seed or 0, **more).returns.tolist()

    def n_step(self, n_steps: int, n: int, gamma: float) -> Steps:
        pool = rlpool.Pool(pool_size=1000, seed=0)
        pool.extend(self.run(*WINDOW, n_steps))
        batch = pool.sample(len(pool), n_step=n, discount=gamma)
        return Steps(*(batch[key.replace("_reward", "n_step_return")].numpy() for key in COLUMNS))

    def targets(self, n_steps: int, value: Any, gamma: float) -> list[tuple[Steps, np.ndarray]]:
        found = self.run(*WINDOW, n_steps)
        values = [np.stack(list(map(value, found[key].numpy()))) for key in ("frame", "_frame")]
        ends = found["_terminated"], found["_done"]
        now, then = map(torch.tensor, values)
        target = rlpool.gae(found["_reward"], now, then, *ends, gamma, 1.0) + now
        return list(zip(self.rows(found), target.numpy(), strict=True))
