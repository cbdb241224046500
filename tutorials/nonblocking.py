"""Learning and evaluation at the same time.

You will learn

- that ``execute`` returns immediately, so that two batchers can work at the same time,
- how ``get(blocking=False)`` checks for a result; ``None`` means that it is not ready,
- that a batch is collected with one version of the parameters, ``policy_version``, even if others
  are sent in the meantime.

A policy is evaluated on many long episodes without exploration. Learning does not wait for this: it
continues with newer parameters and checks after each step whether an evaluation is finished.
"""

import gymnasium as gym
import torch
from torch import nn

from rlpool import (
    Agent,
    EpisodeBatcher,
    GymEnv,
    categorical_log_probability,
    episode_returns,
    replay_agent,
    sample_categorical,
)

import running


class PolicyAgent(nn.Module, Agent):
    n_noise = 1

    def __init__(self, is_greedy=False):
        super().__init__()
        self.is_greedy = is_greedy
        self.model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, observation):
        logits = self.model(observation["frame"])
        action, _ = sample_categorical(logits, observation["noise"])
        if self.is_greedy:
            action = logits.argmax(dim=1)
        return {"action": action, "logits": logits}


def create_env(seed, n_envs=8):
    return GymEnv([gym.make("CartPole-v1") for _ in range(n_envs)], seed)


def create_batcher(n_episodes, seed, is_greedy):
    return EpisodeBatcher(
        n_timesteps=500,
        n_slots=2 * n_episodes,
        n_workers=1,
        seed=seed,
        create_agent=PolicyAgent,
        agent_args={"is_greedy": is_greedy},
        create_env=create_env,
    )


def learn(agent, optimizer, episodes):
    """Take one step of REINFORCE, as explained in ``reinforce.py``."""
    mask = episodes.mask()
    returns = episodes["_reward"].flip(1).cumsum(1).flip(1)
    advantages = (returns - (returns * mask).sum(0) / mask.sum(0)) * mask
    advantages = advantages / advantages[mask.bool()].std()
    logits = replay_agent(agent, episodes, state="stored")["logits"]
    log_probabilities = categorical_log_probability(logits, episodes["action"])
    loss = -(log_probabilities * advantages).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def average_return(episodes):
    return episode_returns(episodes).mean().item()


def main():
    parser = running.Parser(__doc__)
    parser.add_number("--n-epochs", least=1, default=25, help="steps of learning")
    parser.add_number("--n-episodes", least=1, default=32, help="episodes per step")
    parser.add_number("--n-evaluation-episodes", least=1, default=100)
    arguments = parser.parse_args()
    from tqdm import tqdm  # here, to keep --help fast

    torch.set_num_threads(1)  # the workers need the other cores
    torch.manual_seed(0)
    agent = PolicyAgent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2)
    epoch_of_version = {}
    evaluations = {}

    def evaluate(batcher, epoch):
        """Request episodes with the current parameters, without waiting for them."""
        batcher.update(agent.state_dict())
        batcher.execute(arguments.n_evaluation_episodes)
        # The first update of a batcher creates version 1, the next one version 2, and so on.
        epoch_of_version[len(epoch_of_version) + 1] = epoch

    def note(episodes):
        versions = episodes.info["policy_version"].unique()
        assert len(versions) == 1  # one batch, one policy
        evaluations[epoch_of_version[versions.item()]] = average_return(episodes)

    with (
        create_batcher(arguments.n_episodes, seed=0, is_greedy=False) as learning,
        create_batcher(arguments.n_evaluation_episodes, seed=1, is_greedy=True) as evaluation,
    ):
        evaluate(evaluation, epoch=0)
        progress = tqdm(range(1, arguments.n_epochs + 1), desc="learning", unit="epoch")
        for epoch in progress:
            learning.update(agent.state_dict())
            learning.execute(arguments.n_episodes)
            episodes = learning.get()
            learn(agent, optimizer, episodes)

            # Is the evaluation of earlier parameters finished? If not, check again later.
            finished = evaluation.get(blocking=False)
            if finished is not None:
                note(finished)
                evaluate(evaluation, epoch)
            progress.set_postfix(
                learning=f"{average_return(episodes):.0f}",
                evaluation=f"{list(evaluations.values())[-1]:.0f}" if evaluations else "...",
            )
        # Wait for the last one.
        note(evaluation.get())

    for epoch, value in evaluations.items():
        print(f"after {epoch:3} epochs: average return {value:.1f}")
    # All requested evaluations have arrived, in order, under the epoch of their policy.
    assert list(evaluations) == list(epoch_of_version.values())
    assert list(evaluations) == sorted(evaluations)
    if arguments.n_epochs >= 25:
        values = list(evaluations.values())
        assert values[-1] > values[0] + 100.0, "no improvement"


if __name__ == "__main__":
    main()
