"""TorchRL: batches and trajectories of a Collector, Evaluator, MultiStep, GAE."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict.nn import TensorDictModule

from benchmarks.conformance.interface import Collector, Job, Steps

os.environ["MAX_IDLE_COUNT"] = "15"  # seconds that a process may hang, read by the next imports

from torchrl import collectors, envs
from torchrl.data import MultiStep
from torchrl.objectives.value import GAE


def make_env(job: Job) -> envs.EnvBase:
    env = envs.GymWrapper(job.make_env(), categorical_action_encoding=True)
    return env.set_info_dict_reader(envs.default_info_dict_reader(list(job.info_keys)))


def make_envs(job: Job, n_envs: int) -> envs.EnvBase:
    env = envs.TransformedEnv(envs.SerialEnv(n_envs, partial(make_env, job)), envs.RewardSum())
    if "pixels" in list(env.observation_spec.keys()):  # its name for images
        env.append_transform(envs.RenameTransform(["pixels"], ["observation"]))
    if job.frame_stack > 1:
        env.append_transform(envs.CatFrames(job.frame_stack, dim=-1, in_keys=["observation"]))
    return env


def apply(observation: torch.Tensor, function: Any) -> torch.Tensor:
    return torch.tensor(function(observation.numpy()))


def module(function: Any, key: str) -> TensorDictModule:
    return TensorDictModule(partial(apply, function=function), ["observation"], [key])


class Single(Collector):
    package = "torchrl"
    lacks: ClassVar[dict[str, str]] = dict.fromkeys(
        ("workers", "worker_count"), "steps environments in the caller's process"
    )
    collector: Any = None

    def create(self, **more: Any) -> Any:
        env, options = make_envs(self.job, self.job.n_envs), self.job.options
        if self.job.seed is not None:
            env.set_seed(self.job.seed)
        collector = collectors.Collector(env, module(self.job.policy, "action"), **more)
        if options is not None:
            collector.reset(options=options)
        return collector

    def run(self, n_steps: int, **more: Any) -> Any:
        if self.collector is None:
            self.collector = self.create(frames_per_batch=n_steps * self.job.n_envs, **more)
            self.batches = iter(self.collector)
        return next(self.batches)

    def steps(self, rows: Any) -> Steps:
        then, keys = rows["next"], ("reward", "terminated", "truncated")
        info = [{key: int(row[key]) for key in self.job.info_keys} for row in then]
        arrays = rows["observation"].numpy(), rows["action"].numpy()
        arrays += tuple(then[key].squeeze(-1).numpy() for key in keys)
        return Steps(*arrays, then["observation"].numpy(), info)

    def window(self, n_steps: int) -> list[Steps]:
        return list(map(self.steps, self.run(n_steps)))

    def episodes(self, n: int) -> list[Steps]:
        found = self.run(16, trajs_per_batch=n, traj_format="padded")
        return [self.steps(rows[rows["collector", "mask"]]) for rows in found]

    def evaluate(self, n: int) -> list[float]:
        env, policy = make_envs(self.job, self.job.n_envs), module(self.job.policy, "action")
        numbers = {"num_trajectories": n, "frames_per_batch": 16 * self.job.n_envs}
        return [collectors.Evaluator(env, policy, **numbers).evaluate()["eval/reward"]]

    def n_step(self, n_steps: int, n: int, gamma: float) -> Steps:
        return self.steps(self.run(n_steps, postproc=MultiStep(gamma, n)).flatten())

    def targets(self, n_steps: int, value: Any, gamma: float) -> list[tuple[Steps, np.ndarray]]:
        values = module(lambda x: np.float32([value(rows) for rows in x])[..., None], "state_value")
        gae = GAE(gamma=gamma, lmbda=1.0, value_network=values, deactivate_vmap=True)
        found = gae(self.run(n_steps))
        return [(self.steps(rows), rows["value_target"].squeeze(-1).numpy()) for rows in found]

    def close(self) -> None:
        if self.collector is not None:
            self.collector.shutdown()


class Multi(Single):
    start_s = 15.0
    lacks: ClassVar[dict[str, str]] = {"options": "passes none to `reset` in other processes"}

    def create(self, **more: Any) -> Any:
        env = partial(make_envs, self.job, self.job.n_envs // self.job.n_workers)
        more |= {"num_collectors": self.job.n_workers, "sync": True, "cat_results": 0}
        collector = collectors.Collector(env, module(self.job.policy, "action"), **more)
        if self.job.seed is not None:
            collector.set_seed(self.job.seed)
        return collector
