"""``python -m rlpool demo``: learn CartPole in ten seconds, with a curve in the terminal.

It is a typical user program: an agent, a batcher with workers, and a loop of update, execute and
get. The algorithm is proximal policy optimisation (PPO), as in tutorials/ppo.py.

References:
    Schulman et al. 2017, "Proximal policy optimization algorithms".
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from statistics import fmean

import gymnasium
import torch
from torch import nn

from rlpool.agents.agent import Agent
from rlpool.agents.sampling import categorical_log_probability, sample_categorical
from rlpool.batch.window_batcher import Batcher
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.gym_env import GymEnvInf
from rlpool.machine.platform import IS_LINUX, n_cores
from rlpool.training.returns import gae
from rlpool.training.statistics import EpisodeStatistics

N_ENVS, N_STEPS = 16, 64  # a window: this many steps of each environment
DISCOUNT, LAMBDA, CLIP = 0.99, 0.95, 0.2
FULL = 500.0  # maximum return of an episode of CartPole-v1


class ActorCritic(nn.Module, Agent):
    """Policy and value function for observations ``[n, 4]``."""

    n_noise = 1  # random numbers per step, the same in every run

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, observation: DictTensor) -> dict[str, torch.Tensor]:
        """Choose an action for every row; runs in the workers."""
        logits = self.actor(observation["frame"])
        action, log_probability = sample_categorical(logits, observation["noise"])
        return {"action": action, "log_probability": log_probability}


def create_env(seed: int, n_envs: int) -> GymEnvInf:
    """Make a worker's environments, which restart by themselves."""
    return GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)


def learn(agent: ActorCritic, optimizer: torch.optim.Optimizer, window: TemporalDictTensor) -> None:
    """Learn from a window ``[N_ENVS, N_STEPS]``."""
    with torch.no_grad():
        value, next_value = (agent.critic(window[key]).squeeze(-1) for key in ("frame", "_frame"))
        reward, terminated, done = (window[key] for key in ("_reward", "_terminated", "_done"))
        advantage = gae(reward, value, next_value, terminated, done, DISCOUNT, LAMBDA)
    parts = [window["frame"], window["action"], window["log_probability"]]
    parts = [part.flatten(0, 1) for part in (*parts, advantage, advantage + value)]
    for _ in range(4):
        for rows in torch.randperm(done.numel()).chunk(4):
            frame, action, old, gain, target = (part[rows] for part in parts)
            logits = agent.actor(frame)
            ratio = (categorical_log_probability(logits, action) - old).exp()
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            gain = torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
            error = (agent.critic(frame).squeeze(-1) - target).square().mean()
            optimizer.zero_grad()
            (0.5 * error - gain).backward()
            optimizer.step()


def run(seconds: float) -> None:
    """Collect and learn for some seconds, and print the progress."""
    torch.manual_seed(1)
    agent, episodes = ActorCritic(), EpisodeStatistics()
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3)
    returns = list[float]()
    n_workers = min(2, n_cores()) if IS_LINUX else 0
    with Batcher(
        n_timesteps=N_STEPS,
        create_agent=ActorCritic,
        create_env=create_env,
        env_args={"n_envs": N_ENVS // max(1, n_workers)},
        n_workers=n_workers,
        seed=1,
    ) as batcher:
        batcher.reset()
        began_s = printed_s = time.monotonic()
        while (now_s := time.monotonic()) - began_s < seconds:
            batcher.update(agent.state_dict())
            batcher.execute()
            window = batcher.get()
            learn(agent, optimizer, window)
            returns += episodes.update(window).returns.tolist()
            if returns and now_s - printed_s >= 0.5:
                printed_s, average = now_s, fmean(returns[-30:])
                bar = "#" * round(30 * average / FULL)
                sys.stdout.write(f"{now_s - began_s:4.1f} s  return {average:5.1f}  {bar}\n")
                sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m rlpool demo``; returns the exit code.

    Args:
        arguments: Arguments after ``demo``, by default those of this process.
    """
    text = "learn CartPole in ten seconds, with a curve in the terminal"
    parser = argparse.ArgumentParser(prog="python -m rlpool demo", description=text)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long (default: 10)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the workers need the other cores
    try:
        run(options.seconds)
    except KeyboardInterrupt:
        return 130
    sys.stdout.write(
        f"The lines above are average returns of {N_ENVS} CartPole-v1 environments.\n"
        f"The program, PPO in one file: {__file__}\n"
        "Next: docs/tour.md in rlpool's repository, the five-minute tour.\n"
    )
    return 0
