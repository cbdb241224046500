"""tianshou: a Collector over vector environments, its buffer, n-step returns and GAE."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from tianshou import data
from tianshou.algorithm import Algorithm
from tianshou.algorithm.algorithm_base import Policy
from tianshou.env import BaseVectorEnv, DummyVectorEnv, SubprocVectorEnv

from benchmarks.conformance.interface import IN_CALLER, PER_ENVIRONMENT, Collector, Job, Steps

SEEDS = "“an int (which will extend ``i`` to ``[i, i + 1, i + 2, ...]``)” (tianshou/env/venvs.py)"
COLUMNS = ("obs", "act", "rew", "terminated", "truncated", "obs_next")


class Given(Policy):
    """The job's policy, ``choose``."""

    def forward(self, batch: data.Batch, state: Any = None) -> data.Batch:
        return data.Batch(act=self.choose(batch.obs))


def steps_of(found: data.Batch) -> Steps:
    return Steps(*(found[key] for key in COLUMNS), found.info.to_list_of_dicts())


class Dummy(Collector):
    package, start_s = "tianshou", 60.0  # numba compiles its functions in each process
    lacks: ClassVar[dict[str, str]] = IN_CALLER
    intended: ClassVar[dict[str, str]] = {"neighbouring_seeds_share_nothing": SEEDS}
    vectorise: ClassVar[type[BaseVectorEnv]] = DummyVectorEnv

    def open(self, job: Job) -> None:
        envs = self.vectorise([job.make_env] * job.n_envs)
        envs.seed(job.seed)
        policy, size = Given(envs.action_space[0]), 1000 * job.n_envs
        policy.choose = job.policy
        self.buffer = data.VectorReplayBuffer(size, job.n_envs, stack_num=job.frame_stack)
        self.collector = data.Collector(policy, envs, self.buffer)
        self.more = {"gym_reset_kwargs": {"options": job.options}}
        self.collector.reset(**self.more)
        self.at_end.callback(self.collector.close)

    def steps(self, n_steps: int) -> tuple[data.Batch, np.ndarray]:
        self.collector.reset_buffer(keep_statistics=True)
        self.collector.collect(n_step=n_steps * self.job.n_envs, **self.more)
        return self.buffer.sample(0)

    def window(self, n_steps: int) -> list[Steps]:
        return list(map(steps_of, self.steps(n_steps)[0].split(n_steps, shuffle=False)))

    def episodes(self, n: int) -> list[Steps]:
        ended: list[data.Batch] = []
        self.collector.set_on_episode_done_hook(ended.append)
        self.collector.collect(n_episode=n, **self.more)
        return list(map(steps_of, ended))

    def evaluate(self, n: int) -> list[float]:
        return self.collector.collect(n_episode=n, reset_before_collect=True, **self.more).returns

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
        batch.target, _ = Algorithm.compute_episodic_return(batch, self.buffer, indices, *values)
        return [(steps_of(rows), rows.target) for rows in batch.split(n_steps, shuffle=False)]


class Subproc(Dummy):
    lacks: ClassVar[dict[str, str]] = PER_ENVIRONMENT
    vectorise = SubprocVectorEnv
