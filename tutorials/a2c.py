"""Advantage actor-critic on CartPole-v1 with environments that restart by themselves.

You will learn

- how a ``Batcher`` returns the next steps of all environments, whether or not an episode ends,
- what is in a window around the end of an episode,
- how to bootstrap: the value of what follows counts after a truncation and at the end of a window,
  and does not count after a termination.

A CartPole that falls has no future. One that is stopped by the time limit has a future that we
merely do not see: counting it as zero would teach the critic that balancing for long is bad.

References:
    Mnih et al. 2016, "Asynchronous methods for deep reinforcement learning".
    Schulman et al. 2016, "High-dimensional continuous control using generalized advantage
    estimation", equation 16.
"""

import argparse
from statistics import fmean

import gymnasium as gym
import torch
from torch import nn
from tqdm import tqdm

from rlpool import (
    Agent,
    Batcher,
    DictTensor,
    GymEnvInf,
    categorical_log_probability,
    replay_agent,
    sample_categorical,
)

DISCOUNT = 0.98
LAMBDA = 0.95  # between one-step differences (0) and whole returns (1)


class ActorCriticAgent(nn.Module, Agent):
    n_noise = 1

    def __init__(self, n_hidden):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, n_hidden), nn.Tanh(), nn.Linear(n_hidden, 2))
        self.critic = nn.Sequential(nn.Linear(4, n_hidden), nn.Tanh(), nn.Linear(n_hidden, 1))

    def __call__(self, state, observation, agent_info=None, history=None):
        logits = self.actor(observation["frame"])
        action, _ = sample_categorical(logits, observation["noise"])
        return DictTensor(), DictTensor({"action": action, "logits": logits}), DictTensor()

    def value(self, frames):
        """Only the learner needs the critic, whose scale is that of an average reward."""
        return self.critic(frames).squeeze(-1)

    def update(self, info):
        self.load_state_dict(info)


def create_agent(n_hidden=64):
    return ActorCriticAgent(n_hidden)


def create_env(seed, n_envs, max_episode_steps):
    # "Inf" for infinite: an environment whose episode ended starts the next one at once.
    envs = [gym.make("CartPole-v1") for _ in range(n_envs)]
    return GymEnvInf(envs, seed, max_episode_steps=max_episode_steps)


def check_window(window):
    """What a window promises about the ends of episodes."""
    assert window.full()  # environments that restart never stop
    assert torch.equal(window["_done"], window["_terminated"] | window["_truncated"])
    # "_frame" is what an action led to. Inside an episode that is the "frame" of the next step.
    # At its end it is the last observation of this episode, which the critic needs, while the next
    # step has the first observation of another episode.
    after = window["frame"][:, 1:]
    led_to, ended = window["_frame"][:, :-1], window["_done"][:, :-1]
    assert torch.equal(window["initial_state"][:, 1:], ended)
    assert torch.equal(after[~ended], led_to[~ended])
    assert not (after[ended] == led_to[ended]).all(-1).any()


def advantages_of(window, value, next_value):
    """Generalised advantage estimation; everything is ``[B, T]``."""
    # A terminated episode has no future; a truncated one has, and so has a window that is full.
    has_future = 1.0 - window["_terminated"].float()
    reward = (1.0 - DISCOUNT) * window["_reward"]
    difference = reward + DISCOUNT * has_future * next_value - value
    # Differences are summed up along an episode: the sums stop at both kinds of ends.
    goes_on = 1.0 - window["_done"].float()
    advantages = torch.zeros_like(difference)
    following = torch.zeros(window.n_elems())
    for step in reversed(range(window.n_timesteps())):
        following = difference[:, step] + DISCOUNT * LAMBDA * goes_on[:, step] * following
        advantages[:, step] = following
    return advantages


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n-epochs", type=int, default=300, help="windows to learn from")
    parser.add_argument("--n-timesteps", type=int, default=32, help="steps per window")
    parser.add_argument("--n-threads", type=int, default=2, help="worker processes")
    parser.add_argument("--seed", type=int, default=0, help="another one is another run")
    parser.add_argument("--n-envs", type=int, default=16, help="environments per worker")
    parser.add_argument("--max-episode-steps", type=int, default=200, help="time limit")
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # the workers need the other cores
    torch.manual_seed(arguments.seed)
    agent = create_agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, arguments.n_epochs)
    finished_returns = []
    values_at_ends = {"_terminated": [], "_truncated": []}

    with Batcher(
        n_timesteps=arguments.n_timesteps,
        n_threads=arguments.n_threads,
        seeds=arguments.seed,
        create_agent=create_agent,
        create_env=create_env,
        env_args={"n_envs": arguments.n_envs, "max_episode_steps": arguments.max_episode_steps},
    ) as batcher:
        running_returns = torch.zeros(batcher.n_lanes)
        batcher.reset()
        progress = tqdm(range(arguments.n_epochs), desc="A2C", unit="window")
        for _ in progress:
            batcher.update(agent.state_dict())
            batcher.execute()
            window = batcher.get()
            check_window(window)

            # Episodes continue across windows, and so do the sums of their rewards.
            for reward, done in zip(window["_reward"].T, window["_done"].T, strict=True):
                running_returns += reward
                finished_returns += running_returns[done].tolist()
                running_returns[done] = 0.0
            recent = finished_returns[-100:]
            average_return = fmean(recent) if recent else 0.0
            progress.set_postfix({"average return": f"{average_return:.0f}"})

            value = agent.value(window["frame"])
            with torch.no_grad():
                next_value = agent.value(window["_frame"])
                advantages = advantages_of(window, value, next_value)
                targets = value + advantages
            logits = replay_agent(agent, window, state="stored")["logits"]
            log_probabilities = categorical_log_probability(logits, window["action"])
            policy_loss = -(log_probabilities * advantages / (1.0 - DISCOUNT)).mean()
            value_loss = (value - targets).square().mean()
            optimizer.zero_grad()
            (policy_loss + value_loss).backward()
            optimizer.step()
            schedule.step()

            for end, values in values_at_ends.items():
                values += next_value[window[end]].tolist()

    print(f"average return of the last {len(recent)} episodes: {average_return:.1f}", end=" ")
    print(f"of {arguments.max_episode_steps}")
    if arguments.n_epochs >= 300:
        assert average_return > 0.75 * arguments.max_episode_steps
        # What the critic thinks at the end of an episode, as a share of the best possible value:
        # a pole that fell is worth less than one that was stopped by the time limit.
        fallen, stopped = (fmean(values[-100:]) for values in values_at_ends.values())
        print(f"value of the last observation: {fallen:.2f} if fallen, {stopped:.2f} if stopped")
        assert stopped > fallen


if __name__ == "__main__":
    main()
