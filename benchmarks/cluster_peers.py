"""What other libraries offer for a Ray cluster, as windows of ``cluster.py``.

Both have one actor for each worker of the workload, with as many environments, each stepped by
Python one after the other, and call the workload's policy on one torch thread. They return complete
episodes only, with what a learner needs of every step: observation, action, its log-probability if
it has one, reward and the two flags. TorchRL keeps the next observation as well.

- ``rllib``: ``EnvRunnerGroup`` with remote runners and ``complete_episodes``, the policy in an
  ``RLModule``. A request of ``n`` episodes asks each runner for its share and drops what their
  other environments have begun meanwhile.
- ``torchrl``: ``RayCollector`` with ``trajs_per_batch``, first come, first served: collectors whose
  episodes have different lengths cannot be waited for together. A window ends when all collectors
  have stopped.

``bare_transfer`` is what Ray takes for the frames alone, without environments: actors that return
the same array again and again, two of them on the way from each, and a caller that copies them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np
import ray
import torch
from vector_peers import TensorPolicy, timed
from workloads import Window, Workload, seeded_policy

N_POLLED_STEPS = 128
"""Steps of each environment after which a TorchRL collector looks for complete episodes."""


@contextmanager
def rllib_runners(workload: Workload, n_episodes: int) -> Iterator[Window]:
    """RLlib's runners."""
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.rl_module import RLModuleSpec
    from ray.rllib.env.env_runner_group import EnvRunnerGroup

    def make_env(_: Any) -> gymnasium.Env[Any, Any]:
        return workload.make_env()

    config = (
        PPOConfig()
        .environment(make_env, disable_env_checking=True)
        .env_runners(
            num_env_runners=workload.n_workers,
            num_envs_per_env_runner=workload.n_lanes,
            num_cpus_per_env_runner=1,
            batch_mode="complete_episodes",
        )
        .fault_tolerance(restart_failed_env_runners=False)
        .rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=rllib_module(), model_config={"make_policy": workload.make_policy}
            )
        )
    )
    group = EnvRunnerGroup(config=config, local_env_runner=False)
    n_each = n_episodes // workload.n_workers
    group.foreach_env_runner(lambda _: torch.set_num_threads(1))

    def collect() -> int:
        parts = group.foreach_env_runner(
            lambda runner: runner.sample(num_episodes=n_each), local_env_runner=False
        )
        return sum(len(episode) for part in parts for episode in part)

    yield timed(collect)
    group.stop()


def rllib_module() -> Any:
    """The class of a module that holds a policy."""
    from ray.rllib.core.columns import Columns
    from ray.rllib.core.rl_module.torch import TorchRLModule

    class PolicyModule(TorchRLModule):
        """The policy with noise of its own."""

        def setup(self) -> None:
            self.policy = seeded_policy(self.model_config["make_policy"])

        def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
            observation = batch[Columns.OBS]
            noise = torch.rand(len(observation), self.policy.n_noise)
            with torch.no_grad():
                output = self.policy(observation, noise)
            found = {Columns.ACTIONS: output["action"]}
            if "log_probability" in output:
                found[Columns.ACTION_LOGP] = output["log_probability"]
            return found

    return PolicyModule


def make_torchrl_env(workload: Workload) -> Any:
    from torchrl.envs import DoubleToFloat, GymWrapper, TransformedEnv

    disabled = gymnasium.vector.AutoresetMode.DISABLED
    envs = gymnasium.vector.SyncVectorEnv(
        [workload.make_env] * workload.n_lanes, autoreset_mode=disabled
    )
    env = GymWrapper(envs, categorical_action_encoding=True)
    if env.observation_spec["observation"].dtype == torch.float64:
        return TransformedEnv(env, DoubleToFloat(in_keys=["observation"]))
    return env


class FlatPolicy(TensorPolicy):
    """The policy as TorchRL calls it; returns the action alone if that is all there is."""

    def forward(self, observation: torch.Tensor) -> Any:
        noise = torch.rand(len(observation), self.policy.n_noise)
        return tuple(self.policy(observation, noise).values())


@contextmanager
def torchrl_collector(workload: Workload, n_episodes: int) -> Iterator[Window]:
    """TorchRL's collectors."""
    from tensordict.nn import TensorDictModule
    from torchrl.collectors.distributed import RayCollector

    has_log_probability = workload.name != "W3"
    collector = RayCollector(
        [partial(make_torchrl_env, workload)] * workload.n_workers,
        TensorDictModule(
            FlatPolicy(workload.make_policy),
            in_keys=["observation"],
            out_keys=["action", "log_probability"][: 1 + has_log_probability],
        ),
        frames_per_batch=N_POLLED_STEPS * workload.n_lanes,
        total_frames=2**62,
        trajs_per_batch=n_episodes // workload.n_workers,
        collector_kwargs={"traj_format": "cat"},
        remote_configs={"num_cpus": 1},
    )
    collector.update_policy_weights_()
    batches = iter(collector)

    def window(seconds: float) -> float:
        n_steps = 0
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            n_steps += next(batches).numel()
        ray.get([remote.__ray_ready__.remote() for remote in collector.remote_collectors])
        return n_steps / (time.perf_counter() - start)

    yield window
    collector.shutdown()


class Sender:
    """Has rows of frames, and returns them.

    Args:
        shape: Their shape.
        dtype: Their dtype.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self._frames = np.ones(shape, dtype)

    def frames(self) -> Any:
        return self._frames


@contextmanager
def bare_transfer(workload: Workload, _: int) -> Iterator[Window]:
    """Frames of a quarter of a request of the batcher at a time."""
    space: Any = workload.make_env().observation_space
    n_steps = workload.n_episodes // 4 * workload.n_timesteps
    shape = n_steps, *space.shape
    kind: Any = ray.remote(num_cpus=1)(Sender)
    actors = [
        kind.options(scheduling_strategy="SPREAD").remote(shape, space.dtype)
        for _ in range(workload.n_workers)
    ]
    frames = np.empty(shape, space.dtype)

    def window(seconds: float) -> float:
        waiting = {actor.frames.remote(): actor for actor in actors for _ in range(2)}
        n_received, start = 0, time.perf_counter()
        while waiting:
            (ready,), _ = ray.wait(list(waiting))
            actor = waiting.pop(ready)
            frames[:] = ray.get(ready)
            del ready  # the store keeps it as long as there is a reference
            n_received += 1
            if time.perf_counter() - start < seconds:
                waiting[actor.frames.remote()] = actor
        return n_received * n_steps / (time.perf_counter() - start)

    yield window
    for actor in actors:
        ray.kill(actor)


def installed() -> dict[str, Callable[[Workload, int], AbstractContextManager[Window]]]:
    """Those that can be imported, by name of the module."""
    every = {"ray.rllib": rllib_runners, "torchrl": torchrl_collector}
    return {name: make for name, make in every.items() if find_spec(name) is not None}
