"""A recurrent policy where one observation is not enough.

You will learn

- how an agent keeps a state per episode: what it returns as the new state is what it gets next,
- how ``initial_state`` defines the state at the start of an episode (here a learned vector),
- how ``replay_agent`` recomputes the states with gradients: backpropagation through time.

In CartPole-v1 without velocities, an agent sees where the cart and the pole are, but not where
they are going. An agent that decides by the current observation alone cannot balance for long. One
with a memory can work out the velocities by itself.

References:
    Wierstra et al. 2010, "Recurrent policy gradients".
    Cho et al. 2014, "Learning phrase representations using RNN encoder-decoder" (the GRU).
"""

import argparse
from statistics import fmean

import gymnasium as gym
import numpy as np
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

N_TIMESTEPS = 200  # time limit of an episode, so the best possible return


class WithoutVelocities(gym.ObservationWrapper):
    """The positions of the cart and of the pole, in units of where the episode ends."""

    def __init__(self, env):
        super().__init__(env)
        self.observation_space = gym.spaces.Box(-2.0, 2.0, (2,))
        self.scale = np.array([2.4, 0.21], np.float32)

    def observation(self, observation):
        return observation[[0, 2]] / self.scale


class FeedForwardAgent(nn.Module, Agent):
    """Decides by what it sees now."""

    n_noise = 1

    def __init__(self, n_hidden):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, n_hidden), nn.Tanh())
        self.head = nn.Linear(n_hidden, 2)

    def __call__(self, state, observation, agent_info=None, history=None):
        hidden = self.body(observation["frame"])
        return DictTensor(), self.decide(hidden, observation["noise"]), DictTensor()

    def decide(self, hidden, noise):
        logits = self.head(hidden)
        action, _ = sample_categorical(logits, noise)
        return DictTensor({"action": action, "logits": logits})

    def update(self, info):
        self.load_state_dict(info)


class RecurrentAgent(FeedForwardAgent):
    """Decides by what it remembers, a vector that every observation changes."""

    def __init__(self, n_hidden):
        super().__init__(n_hidden)
        self.body = nn.GRUCell(2, n_hidden)
        self.start = nn.Parameter(torch.zeros(n_hidden))

    def initial_state(self, agent_info, n):
        return DictTensor({"hidden": self.start.expand(n, -1)})

    def __call__(self, state, observation, agent_info=None, history=None):
        # Each row has the state of its own episode, whenever that began. Agents that define
        # initial_state are never called with None.
        hidden = self.body(observation["frame"], state["hidden"])
        output = self.decide(hidden, observation["noise"])
        return state, output, DictTensor({"hidden": hidden})


def create_env(seed, n_envs=16):
    envs = [WithoutVelocities(gym.make("CartPole-v1")) for _ in range(n_envs)]
    return GymEnv(envs, seed, max_episode_steps=N_TIMESTEPS)


def train(create_agent, description, arguments):
    """REINFORCE (see ``reinforce.py``) for any agent; returns the average return per epoch."""
    torch.manual_seed(arguments.seed)
    agent = create_agent(arguments.n_hidden)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2)
    average_returns = []
    with EpisodeBatcher(
        n_timesteps=N_TIMESTEPS,
        n_slots=2 * arguments.n_episodes,
        n_threads=arguments.n_threads,
        seeds=arguments.seed,
        create_agent=create_agent,
        agent_args={"n_hidden": arguments.n_hidden},
        create_env=create_env,
    ) as batcher:
        progress = tqdm(range(arguments.n_epochs), desc=description, unit="epoch")
        for _ in progress:
            batcher.update(agent.state_dict())
            batcher.execute(arguments.n_episodes)
            episodes = batcher.get()
            mask = episodes.mask()
            average_returns.append(episodes["_reward"].sum(1).mean().item())
            progress.set_postfix({"average return": f"{average_returns[-1]:.0f}"})

            # Discounted rewards from this step on, compared with their mean over the episodes.
            discounts = 0.99 ** torch.arange(episodes.n_timesteps())
            returns = (episodes["_reward"] * discounts).flip(1).cumsum(1).flip(1) / discounts
            advantages = (returns - (returns * mask).sum(0) / mask.sum(0)) * mask
            advantages = advantages / advantages[mask.bool()].std()

            # The agent is called again step by step, from the initial state on. The outputs are
            # the same ...
            outputs = replay_agent(agent, episodes)
            torch.testing.assert_close(outputs["logits"], episodes["logits"], rtol=1e-3, atol=1e-3)
            # ... but now each depends on all earlier observations, with gradients.
            log_probabilities = categorical_log_probability(outputs["logits"], episodes["action"])
            loss = -(log_probabilities * advantages).sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
            optimizer.step()

            # Where the workers' episodes began is stored as well, like every state on the way.
            if "hidden" in episodes:
                assert (episodes["hidden"][:, 0] == episodes["hidden"][0, 0]).all()
                assert torch.equal(episodes["_hidden"][0, 0], episodes["hidden"][0, 1])
    return average_returns


def save_curves(curves, path):
    from matplotlib.figure import Figure  # here, because the workers import this file as well

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, average_returns in curves.items():
        axes.plot(average_returns, label=name)
    axes.set(xlabel="epoch", ylabel="average return", title="CartPole-v1 without velocities")
    axes.legend()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n-epochs", type=int, default=60)
    parser.add_argument("--n-episodes", type=int, default=32, help="episodes per epoch")
    parser.add_argument("--n-threads", type=int, default=2, help="worker processes")
    parser.add_argument("--seed", type=int, default=0, help="another one is another run")
    parser.add_argument("--n-hidden", type=int, default=32, help="size of the memory")
    parser.add_argument("--output", default="recurrent_policy.png", help="where the curves go")
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # the workers need the other cores
    curves = {
        "feed-forward": train(FeedForwardAgent, "feed-forward", arguments),
        "recurrent": train(RecurrentAgent, "recurrent", arguments),
    }
    # A single epoch is a matter of luck; the last ten together are not.
    final = {name: fmean(curve[-10:]) for name, curve in curves.items()}
    for name, average_return in final.items():
        print(f"{name}: average return {average_return:.1f} of {N_TIMESTEPS}")
    save_curves(curves, arguments.output)
    print(f"learning curves: {arguments.output}")
    if arguments.n_epochs >= 60:
        assert final["recurrent"] > 2.0 * final["feed-forward"], "the memory did not help"


if __name__ == "__main__":
    main()
