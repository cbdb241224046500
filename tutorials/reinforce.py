"""REINFORCE on CartPole-v1, from episodes to a learning curve.

You will learn

- how an agent that is a ``torch.nn.Module`` collects in worker processes and learns in this one,
- how its random numbers come with the observation (``n_noise``), so that runs can be repeated,
- how ``replay_agent`` computes the same outputs again, this time with gradients,
- how ``update`` sends the new parameters to the workers.

REINFORCE raises the probability of actions that were followed by more reward than usual.

Reference:
    Williams 1992, "Simple statistical gradient-following algorithms for connectionist
    reinforcement learning".
"""

import argparse
import time
from statistics import fmean

import gymnasium as gym
import torch
from torch import nn
from tqdm import tqdm

from rlpool import (
    Agent,
    DictTensor,
    EpisodeBatcher,
    GymEnv,
    categorical_log_probability,
    replay_agent,
    sample_categorical,
)


class PolicyAgent(nn.Module, Agent):
    """A small network that maps observations to probabilities of actions."""

    n_noise = 1  # one uniform number per step is enough to choose one of n actions

    def __init__(self, n_hidden):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, n_hidden), nn.Tanh(), nn.Linear(n_hidden, 2))

    def __call__(self, state, observation, agent_info=None, history=None):
        logits = self.model(observation["frame"])
        action, _ = sample_categorical(logits, observation["noise"])
        # This agent remembers nothing: the states around its outputs are empty.
        return DictTensor(), DictTensor({"action": action, "logits": logits}), DictTensor()

    def update(self, info):
        # Runs in the workers, with what was passed to batcher.update() in this process.
        self.load_state_dict(info)


def create_agent(n_hidden=64):
    return PolicyAgent(n_hidden)


def create_env(seed, n_envs=8):
    return GymEnv([gym.make("CartPole-v1") for _ in range(n_envs)], seed)


def save_curve(average_returns, target, path):
    from matplotlib.figure import Figure  # here, because the workers import this file as well

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(average_returns) + 1), average_returns)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.axhline(target, color="grey", linestyle=":")
    axes.set(xlabel="epoch", ylabel="average return", title="REINFORCE on CartPole-v1")
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n-epochs", type=int, default=150, help="at most")
    parser.add_argument("--n-episodes", type=int, default=32, help="episodes per epoch")
    parser.add_argument("--n-threads", type=int, default=2, help="worker processes")
    parser.add_argument("--seed", type=int, default=0, help="another one is another run")
    parser.add_argument("--target", type=float, default=200.0, help="average return to reach")
    parser.add_argument("--output", default="reinforce.png", help="where the curve goes")
    arguments = parser.parse_args()

    # The workers need the other cores, and these networks are too small to gain from threads.
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    agent = create_agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2)
    average_returns = []
    began = time.perf_counter()

    with EpisodeBatcher(
        n_timesteps=500,  # CartPole-v1 ends after 500 steps at the latest: one slot per episode
        n_slots=2 * arguments.n_episodes,
        n_threads=arguments.n_threads,
        seeds=arguments.seed,
        create_agent=create_agent,
        create_env=create_env,
    ) as batcher:
        progress = tqdm(range(arguments.n_epochs), desc="REINFORCE", unit="epoch")
        for _ in progress:
            batcher.update(agent.state_dict())
            batcher.execute(n_episodes=arguments.n_episodes)
            episodes = batcher.get()

            # The reward of action t is "_reward": a leading underscore means "after the step".
            rewards, mask = episodes["_reward"], episodes.mask()
            average_returns.append(rewards.sum(1).mean().item())
            progress.set_postfix({"average return": f"{average_returns[-1]:.0f}"})
            # One epoch above the target may be luck; the mean of several is not.
            recent = average_returns[-4:]
            if len(recent) == 4 and fmean(recent) >= arguments.target:
                break

            # An action can only affect the rewards after it. The baseline at step t is the mean
            # over the episodes that got that far; padding does not count.
            returns = rewards.flip(1).cumsum(1).flip(1)
            baseline = (returns * mask).sum(0) / mask.sum(0)
            advantages = (returns - baseline) * mask
            advantages = advantages / advantages[mask.bool()].std()

            # The same outputs as in the workers, this time with gradients. An agent without a
            # state computes all steps in one call, which is what state="stored" does.
            outputs = replay_agent(agent, episodes, state="stored")
            log_probabilities = categorical_log_probability(outputs["logits"], episodes["action"])
            loss = -(log_probabilities * advantages).sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        progress.close()

    seconds = time.perf_counter() - began
    print(f"average return {fmean(recent):.1f}: {len(average_returns)} epochs, {seconds:.1f} s")
    save_curve(average_returns, arguments.target, arguments.output)
    print(f"learning curve: {arguments.output}")

    if arguments.n_epochs >= 150:
        assert fmean(recent) >= arguments.target, "did not reach the target"
        assert seconds < 180.0


if __name__ == "__main__":
    main()
