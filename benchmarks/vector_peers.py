"""What other libraries offer for the environment of V1, as windows of ``throughput.py``.

All call the policy of V1 under ``torch.no_grad`` on one torch thread, and keep what a learner needs
of every step: observation, action, its log-probability, reward and the two flags. TorchRL keeps the
next observation as well, Stable-Baselines3 where episodes start instead of the flags. Of
CartPole-v1:

- ``gymnasium``: a loop over what ``make_vec`` returns, the lanes of both workers in one process,
  writing into arrays that were made before. Steps in which lanes restart are not counted.
- ``torchrl``: ``MultiSyncCollector`` with as many workers and lanes. It takes no vector environment
  that restarts its lanes in the next step, as this one does: it gets a ``SyncVectorEnv``.
- ``stable_baselines3``: its ``DummyVecEnv`` with the lanes of both workers and a ``RolloutBuffer``,
  filled as ``collect_rollouts`` does. It takes no vector environment of Gymnasium.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np
import torch
from workloads import SEED, Window, Workload, make_cartpole, seeded_policy, timed

N_STEPS = 512
"""Steps that are kept at a time, as in a window of the batcher."""


@contextmanager
def gymnasium_loop(workload: Workload) -> Iterator[Window]:
    """A loop in this process."""
    n_lanes = workload.n_workers * workload.n_lanes
    env = gymnasium.make_vec("CartPole-v1", n_lanes, "vector_entry_point")
    policy = seeded_policy(workload.make_policy)
    space: Any = env.single_observation_space
    arrays = [
        np.zeros((N_STEPS, n_lanes, *shape), dtype)
        for shape, dtype in (
            (space.shape, space.dtype),
            ((), np.int64),
            *[((), np.float32)] * 2,
            *[((), np.bool_)] * 2,
        )
    ]
    shown = [env.reset(seed=SEED)[0]]

    def collect() -> int:
        observation, n_ended = shown[0], 0
        for step in range(N_STEPS):
            with torch.no_grad():
                noise = torch.rand(n_lanes, policy.n_noise)
                output = policy(torch.from_numpy(observation), noise)
            action = output["action"].numpy()
            following, *results, _ = env.step(action)
            values = observation, action, output["log_probability"].numpy(), *results
            for array, value in zip(arrays, values, strict=True):
                array[step] = value
            observation = following
            n_ended += np.count_nonzero(results[1] | results[2])
        shown[0] = observation
        return N_STEPS * n_lanes - n_ended

    yield timed(collect)
    env.close()


class TensorPolicy(torch.nn.Module):
    """The policy with noise of its own, from a tensor to two.

    Args:
        make_policy: Creates the policy.
    """

    def __init__(self, make_policy: Callable[[], Any]) -> None:
        super().__init__()
        self.policy = seeded_policy(make_policy)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.rand(*observation.shape[:-1], self.policy.n_noise)
        output = self.policy(observation, noise)
        return output["action"], output["log_probability"]


def make_torchrl_env(n_lanes: int) -> Any:
    from torchrl.envs import GymWrapper

    disabled = gymnasium.vector.AutoresetMode.DISABLED
    env = gymnasium.vector.SyncVectorEnv([make_cartpole] * n_lanes, autoreset_mode=disabled)
    return GymWrapper(env, categorical_action_encoding=True)


@contextmanager
def torchrl_collector(workload: Workload) -> Iterator[Window]:
    """TorchRL's workers."""
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import MultiSyncCollector

    collector = MultiSyncCollector(
        [partial(make_torchrl_env, workload.n_lanes)] * workload.n_workers,
        TensorDictModule(
            TensorPolicy(workload.make_policy),
            in_keys=["observation"],
            out_keys=["action", "log_probability"],
        ),
        frames_per_batch=N_STEPS * workload.n_workers * workload.n_lanes,
        total_frames=-1,
        num_threads=1,
        num_sub_threads=1,
    )
    batches = iter(collector)
    yield timed(lambda: int(next(batches).numel()))
    collector.shutdown()


@contextmanager
def sb3_rollouts(workload: Workload) -> Iterator[Window]:
    """Stable-Baselines3 in this process."""
    from stable_baselines3.common.buffers import RolloutBuffer
    from stable_baselines3.common.vec_env import DummyVecEnv

    n_lanes = workload.n_workers * workload.n_lanes
    env = DummyVecEnv([make_cartpole] * n_lanes)
    policy = TensorPolicy(workload.make_policy)
    buffer = RolloutBuffer(N_STEPS, env.observation_space, env.action_space, "cpu", n_envs=n_lanes)
    values = torch.zeros(n_lanes)  # of a critic, which the others have not either
    last: list[Any] = [env.reset(), np.ones(n_lanes, bool)]

    def collect() -> int:
        buffer.reset()
        for _ in range(N_STEPS):
            with torch.no_grad():
                action, log_probability = policy(torch.from_numpy(last[0]))
            observation, reward, done, _ = env.step(action.numpy())
            rows = action.numpy()[:, None]
            buffer.add(last[0], rows, reward, last[1], values, log_probability)
            last[:] = observation, done
        return N_STEPS * n_lanes

    yield timed(collect)
    env.close()


def installed() -> dict[str, Callable[[Workload], AbstractContextManager[Window]]]:
    """Those that can be imported, by name of the module."""
    every = {
        "gymnasium": gymnasium_loop,
        "torchrl": torchrl_collector,
        "stable_baselines3": sb3_rollouts,
    }
    return {name: make for name, make in every.items() if find_spec(name) is not None}
