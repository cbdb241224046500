"""Stable-Baselines3: the loop of its VecEnv guide, evaluate_policy, the buffers of DQN and A2C."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from stable_baselines3 import A2C, DQN
from stable_baselines3.common import env_util, evaluation, vec_env

from benchmarks.conformance import interface
from benchmarks.conformance.interface import Job, Stepping, Steps

GUIDE = "(https://stable-baselines3.readthedocs.io/en/master/guide/vec_envs.html)"


class Dummy(Stepping):
    package, kind = "stable-baselines3", vec_env.DummyVecEnv
    lacks: ClassVar[dict[str, str]] = interface.NO_EPISODES | interface.IN_CALLER
    intended: ClassVar[dict[str, str]] = {
        "options_hold_in_later_episodes": f"“discarded after each call to `reset()`” {GUIDE}",
        "neighbouring_seeds_share_nothing": f"“by incrementing the given seed” {GUIDE}",
    }

    def open(self, job: Job) -> None:
        self.envs = env_util.make_vec_env(job.make_env, job.n_envs, job.seed, vec_env_cls=self.kind)
        if job.frame_stack > 1:
            self.envs = vec_env.VecFrameStack(self.envs, job.frame_stack)
        self.envs.set_options(job.options)
        self.observation = self.envs.reset()

    def step(self, action: np.ndarray) -> tuple:
        after, reward, done, infos = self.envs.step(action)
        truncated = np.array([info.get("TimeLimit.truncated", False) for info in infos])
        last = [info.get("terminal_observation", after[i]) for i, info in enumerate(infos)]
        return after, list(zip(reward, done & ~truncated, truncated, last, infos, strict=True))

    def predict(self, observation: np.ndarray, *_: Any, **__: Any) -> tuple[np.ndarray, None]:
        return self.job.policy(observation), None

    def evaluate(self, n: int) -> list[float]:
        return evaluation.evaluate_policy(self, self.envs, n, return_episode_rewards=True)[0]

    def n_step(self, n_steps: int, n: int, gamma: float) -> Steps:
        more = {"learning_starts": 0, "exploration_initial_eps": 0, "exploration_final_eps": 0}
        more |= {"n_steps": n, "gamma": gamma, "train_freq": n_steps}
        model = DQN("MlpPolicy", self.envs, **more)
        model.policy.predict = self.predict
        rows = model.learn(n_steps * self.job.n_envs).replay_buffer.sample(4096)
        _, once = np.unique(rows.observations, axis=0, return_index=True)
        observation, action, after, done, reward, _ = (each[once].numpy() for each in rows)
        ends = done[:, 0] > 0  # by termination, as samples do not contain more
        return Steps(observation, action, reward[:, 0], ends, np.zeros_like(ends), after)

    def targets(self, n_steps: int, value: Any, gamma: float) -> list[tuple[Steps, np.ndarray]]:
        def values(rows: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(value(rows.numpy()))[:, None]

        def forward(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
            actions = torch.from_numpy(self.job.policy(rows.numpy()))
            return actions, values(rows), torch.zeros(len(rows))

        model = A2C("MlpPolicy", self.envs, n_steps=n_steps, gamma=gamma, gae_lambda=1.0)
        model.policy.forward, model.policy.predict_values = forward, values
        found = model.learn(n_steps * model.n_envs).rollout_buffer
        ends = found.episode_starts.T[:, 1:] > 0  # says nothing about the last step
        columns = (found.observations, found.actions, found.returns)
        columns = [each.reshape(model.n_envs, n_steps, -1)[:, :-1] for each in columns]
        found = (*columns[:2], found.rewards.T[:, :-1], ends, np.zeros_like(ends))
        return [(Steps(*row, None), t[:, 0]) for *row, t in zip(*found, columns[2], strict=True)]


class Subproc(Dummy):
    kind = vec_env.SubprocVecEnv
    start_s = 30.0  # a process per environment, each importing PyTorch
    lacks: ClassVar[dict[str, str]] = interface.NO_EPISODES | interface.PER_ENVIRONMENT
