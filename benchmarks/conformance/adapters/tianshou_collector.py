"""tianshou: a Collector over vector environments, its buffer, n-step returns and GAE."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from tianshou import data
from tianshou.algorithm import Algorithm
from tianshou.algorithm.algorithm_base import Policy
from tianshou.env import BaseVectorEnv, DummyVectorEnv, SubprocVectorEnv

from benchmarks.conformance.interface import Collector, Job, Steps

VENVS = "https://github.com/thu-ml/tianshou/blob/v2.0.1/tianshou/env/venvs.py"
COLUMNS = ("obs", "act", "rew", "terminated", "truncated", "obs_next")


class Given(Policy):
    """The policy of the job, ``choose``."""

    def forward(self, batch: data.Batch, state: Any = None) -> data.Batch:
        return data.Batch(act=self.choose(batch.obs))


def steps_of(found: data.Batch) -> Steps:
    return Steps(*(found[key] for key in COLUMNS), found.info.to_list_of_dicts())


class Dummy(Collector):
    package, start_s = "tianshou", 60.0  # numba compiles its functions in each process
    lacks: ClassVar[dict[str, str]] = {
        "workers": "steps environments in the caller's process",
        "worker_count": "has a process per environment, or none",
    }
    intended: ClassVar[dict[str, str]] = {
        "neighbouring_seeds_share_nothing": "“an int (which will extend ``i`` to "
        f"``[i, i + 1, i + 2, ...]``)” ({VENVS})"
    }
    vectorise: ClassVar[type[BaseVectorEnv]] = DummyVectorEnv

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        envs = self.vectorise([job.make_env] * job.n_envs)
        if job.seed is not None:
            envs.seed(job.seed)
        policy, size = Given(envs.action_space[0]), 1000 * job.n_envs
        policy.choose = job.policy
        self.buffer = data.VectorReplayBuffer(size, job.n_envs, stack_num=job.frame_stack)
        self.collector = data.Collector(policy, envs, self.buffer)
        self.options = {"gym_reset_kwargs": {"options": job.options}}
        self.collector.reset(**self.options)

    def steps(self, n_steps: int) -> tuple[data.Batch, np.ndarray]:
        self.collector.reset_buffer(keep_statistics=True)
        self.collector.collect(n_step=n_steps * self.job.n_envs, **self.options)
        return self.buffer.sample(0)

    def window(self, n_steps: int) -> list[Steps]:
        return list(map(steps_of, self.steps(n_steps)[0].split(n_steps, shuffle=False)))

    def episodes(self, n: int) -> list[Steps]:
        ended: list[data.Batch] = []
        self.collector.set_on_episode_done_hook(ended.append)
        self.collector.reset_buffer()
        self.collector.collect(n_episode=n, **self.options)
        return list(map(steps_of, ended))

    def evaluate(self, n: int) -> list[float]:
        found = self.collector.collect(n_episode=n, reset_before_collect=True, **self.options)
        return found.returns.tolist()

    def n_step(self, n_steps: int, n: int, gamma: float) -> Steps:
        batch, indices = self.steps(n_steps)

        def target_q(buffer: data.ReplayBuffer, indices: np.ndarray) -> torch.Tensor:
            batch.obs_next = buffer[indices].obs_next
            return torch.zeros(len(indices))

        found = Algorithm.compute_nstep_return(batch, self.buffer, indices, target_q, gamma, n)
        batch.rew = found.returns.flatten().numpy()
        return steps_of(batch)

    def targets(self, n_steps: int, value: Any, gamma: float) -> list[tuple[Steps, np.ndarray]]:
        batch, indices = self.steps(n_steps)
        values = value(batch.obs_next), value(batch.obs), gamma, 1.0
        found, _ = Algorithm.compute_episodic_return(batch, self.buffer, indices, *values)
        parts = map(steps_of, batch.split(n_steps, shuffle=False))
        return list(zip(parts, np.split(found, self.job.n_envs), strict=True))

    def close(self) -> None:
        self.collector.close()


class Subproc(Dummy):
    lacks: ClassVar[dict[str, str]] = {"worker_count": Dummy.lacks["worker_count"]}
    vectorise = SubprocVectorEnv
