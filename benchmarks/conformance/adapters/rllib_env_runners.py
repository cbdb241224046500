"""RLlib: the EnvRunners of a PPO, and Algorithm.evaluate."""

from __future__ import annotations

from functools import reduce
from typing import Any, ClassVar

import numpy as np
import torch
from ray import init, tune
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule

from benchmarks.conformance.data import join
from benchmarks.conformance.interface import Collector, Job, Steps

LACKS = dict.fromkeys(("n_step", "targets"), "computed by its learners, not by env runners")
RAISED = "exception_names_its_cause unpicklable_exception_reaches_the_caller sys_exit_is_noticed"
RESTARTED = "“RLlib tries to restart the lost EnvRunner(s)” (`AlgorithmConfig.fault_tolerance`)"


class Act(TorchRLModule):
    def setup(self) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(1))  # optimizers require at least one

    def _forward(self, batch: dict, **kwargs: Any) -> dict:
        return {"actions": torch.tensor(self.model_config["policy"](batch["obs"].numpy()))}


def label(*, episode: Any, env_runner: Any, env_index: int, **kwargs: Any) -> None:
    episode.custom_data["env"] = env_runner.worker_index, env_index


def steps(episode: Any) -> Steps:
    shown, n = np.asarray(episode.get_observations()), len(episode)
    ends = [(np.arange(n) == n - 1) & end for end in (episode.is_terminated, episode.is_truncated)]
    acted = np.asarray(episode.get_actions()), np.asarray(episode.get_rewards())
    return Steps(shown[:-1], *acted, *ends, shown[1:], list(episode.get_infos()[1:]))


class Runners(Collector):
    package, start_s = "ray", 30.0
    lacks: ClassVar[dict[str, str]] = LACKS | {"options": "`reset` gets no options"}
    intended: ClassVar[dict[str, str]] = dict.fromkeys(RAISED.split(), RESTARTED)

    def open(self, job: Job) -> None:
        init(num_cpus=4, include_dashboard=False, log_to_driver=False, ignore_reinit_error=True)
        tune.register_env("job", lambda _: job.make_stacked_env())

    def algorithm(self, n: int, **more: Any) -> Any:
        if self.opened is None or more != self.more:
            self.close()
            job, self.more, n_envs = self.job, more, self.job.n_envs // self.job.n_workers
            config = PPOConfig().environment("job").debugging(seed=job.seed).evaluation(**more)
            config.env_runners(num_env_runners=n, num_envs_per_env_runner=n_envs)
            config.rl_module(rl_module_spec=RLModuleSpec(Act, model_config={"policy": job.policy}))
            self.opened = config.callbacks(on_episode_created=label).build_algo()
            self.at_end.callback(self.opened.stop)
        return self.opened

    def sample(self, request: Any) -> list[Any]:
        group = self.algorithm(self.job.n_workers).env_runner_group
        self.opened.restore_env_runners(group)
        more = {"local_env_runner": False, "timeout_seconds": self.job.timeout_s}
        return reduce(list.__add__, group.foreach_env_runner(request, **more), [])

    def window(self, n_steps: int) -> list[Steps]:
        streams: dict[tuple, list[Steps]] = {}
        for episode in self.sample(lambda r: r.sample(num_timesteps=n_steps * r.num_envs)):
            streams.setdefault(episode.custom_data["env"], []).append(steps(episode))
        return [reduce(join, streams[env]) for env in sorted(streams)]

    def episodes(self, n: int) -> list[Steps]:
        n, more = divmod(n, self.job.n_workers)  # distributed as by `evaluate`
        found = self.sample(lambda r: r.sample(num_episodes=n + (r.worker_index <= more)))
        return list(map(steps, found))

    def evaluate(self, n: int) -> list[float]:
        more = {"evaluation_duration": n, "evaluation_num_env_runners": self.job.n_workers}
        return [self.algorithm(0, **more).evaluate()["env_runners"]["episode_return_mean"]]
