"""TorchRL: batches and trajectories of a Collector, Evaluator, MultiStep, GAE."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torchrl import collectors, data, envs
from torchrl.objectives.value import GAE

from benchmarks.conformance.interface import IN_CALLER, Collector, Job, Steps


def make_env(job: Job) -> envs.EnvBase:
    env = envs.GymWrapper(job.make_env(), categorical_action_encoding=True)
    return env.set_info_dict_reader(envs.default_info_dict_reader(list(job.info_keys)))


def make_envs(job: Job, n_envs: int) -> envs.EnvBase:
    env = envs.TransformedEnv(envs.SerialEnv(n_envs, lambda: make_env(job)), envs.RewardSum())
    if job.frame_stack > 1:
        env.append_transform(envs.CatFrames(job.frame_stack, dim=-1, in_keys=["observation"]))
    return env


def module(function: Any, key: str = "action") -> TensorDictModule:
    return TensorDictModule(lambda x: torch.tensor(function(x.numpy())), ["observation"], [key])


class Single(Collector):
    package = "torchrl"
    lacks: ClassVar[dict[str, str]] = IN_CALLER

    def open(self, job: Job) -> None:
        self.args, self.more = (make_envs(job, job.n_envs), module(job.policy)), {}

    def run(self, n_steps: int, **more: Any) -> Any:
        if self.opened is None:
            more |= self.more | {"frames_per_batch": n_steps * self.job.n_envs}
            collector = collectors.Collector(*self.args, **more)
            self.at_end.callback(collector.shutdown)
            if self.job.seed is not None:
                collector.set_seed(self.job.seed)
            if not self.more:
                collector.reset(options=self.job.options)
            self.opened = iter(collector)
        return next(self.opened)

    def steps(self, rows: Any) -> Steps:
        then, keys = rows["next"], ("reward", "terminated", "truncated")
        info = [{key: int(row[key]) for key in self.job.info_keys} for row in then]
        found = [rows["observation"], rows["action"], *(then[key].squeeze(-1) for key in keys)]
        return Steps(*(each.numpy() for each in [*found, then["observation"]]), info)

    def window(self, n_steps: int) -> list[Steps]:
        return list(map(self.steps, self.run(n_steps)))

    def episodes(self, n: int) -> list[Steps]:
        found = self.run(16, trajs_per_batch=n, traj_format="padded")
        return [self.steps(rows[rows["collector", "mask"]]) for rows in found]

    def evaluate(self, n: int) -> list[float]:
        numbers = {"num_trajectories": n, "frames_per_batch": 16 * self.job.n_envs}
        return [collectors.Evaluator(*self.args, **numbers).evaluate()["eval/reward"]]

    def n_step(self, n_steps: int, n: int, gamma: float) -> Steps:
        return self.steps(self.run(n_steps, postproc=data.MultiStep(gamma, n)).flatten())

    def targets(self, n_steps: int, value: Any, gamma: float) -> list[tuple[Steps, np.ndarray]]:
        values = module(lambda x: np.float32([value(rows) for rows in x])[..., None], "state_value")
        gae = GAE(gamma=gamma, lmbda=1, value_network=values, deactivate_vmap=True)
        found = gae(self.run(n_steps))
        return [(self.steps(rows), rows["value_target"].squeeze(-1).numpy()) for rows in found]


class Multi(Single):
    start_s = 15.0
    lacks: ClassVar[dict[str, str]] = {"options": "passes none to `reset` in other processes"}

    def open(self, job: Job) -> None:
        self.args = (lambda: make_envs(job, job.n_envs // job.n_workers)), module(job.policy)
        self.more = {"num_collectors": job.n_workers, "sync": True, "cat_results": 0}
