"""REINFORCE for environments with discrete actions, from episodes to a learning curve.

You will learn

- how an agent that is a ``torch.nn.Module`` collects in worker processes and learns in this one,
- how its random numbers come with the observation (``n_noise``), so that runs are reproducible,
- how ``replay_agent`` computes the same outputs again, this time with gradients,
- how ``update`` sends the new parameters to the workers.

REINFORCE raises the probability of actions that were followed by more reward than usual.

Reference:
    Williams 1992, "Simple statistical gradient-following algorithms for connectionist
    reinforcement learning".
"""

from pathlib import Path
from statistics import fmean

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

# For CartPole-v1: the first value that we tried, and good enough to see the agent learn.
LEARNING_RATE = 1e-2
N_EPISODES = 32  # per gradient step


class Policy(nn.Module, Agent):
    n_noise = 1  # one uniform number per step is enough to choose one of n actions

    def __init__(self, n_inputs, n_actions):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(n_inputs, 64), nn.Tanh(), nn.Linear(64, n_actions))

    def forward(self, observation):
        logits = self.model(observation["frame"])
        action, _ = sample_categorical(logits, observation["noise"])
        return {"action": action, "logits": logits}


def create_env(seed, env_id, n_envs=8, render_mode=None):
    return GymEnv([gym.make(env_id, render_mode=render_mode) for _ in range(n_envs)], seed)


def learn(agent, optimizer, episodes):
    """Take one gradient step; returns the loss."""
    # The reward of action t is "_reward": a leading underscore means "after the step". An action
    # can only affect the rewards after it.
    rewards, mask = episodes["_reward"], episodes.mask()
    returns = rewards.flip(1).cumsum(1).flip(1)
    # The baseline of a step is the mean over the episodes of at least that length, without the
    # padding.
    baseline = (returns * mask).sum(0) / mask.sum(0)
    advantages = (returns - baseline) * mask
    advantages = advantages / (advantages[mask.bool()].std() + 1e-8)
    # The same outputs as in the workers, this time with gradients. For an agent without state,
    # state="stored" computes all steps in one call.
    outputs = replay_agent(agent, episodes, state="stored")
    log_probabilities = categorical_log_probability(outputs["logits"], episodes["action"])
    loss = -(log_probabilities * advantages).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def main():
    parser = running.Parser(__doc__)
    parser.add_argument("--env-id", default="CartPole-v1", help="with vector observations")
    parser.add_number("--n-epochs", least=1, default=40, help="gradient steps")
    parser.add_number(
        "--n-workers", "--n-threads", least=0, default=2, help="worker processes, 0 for none"
    )
    parser.add_number("--seed", least=0, default=1, help="random seed")
    parser.add_argument("--track", nargs="?", const="runs", help="folder for TensorBoard")
    parser.add_argument("--video", metavar="FOLDER", help="for a video of the final policy")
    parser.add_argument("--checkpoint", default="reinforce.pt", help="with its curve as .png")
    parser.add_number("--checkpoint-interval", least=1, default=10, help="in epochs")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    arguments = parser.parse_args()
    running.check_arguments(arguments)
    env = running.make_env(arguments, is_discrete=True)
    from tqdm import tqdm  # here, to keep --help fast

    # The workers need the other cores, and these networks are too small to gain from threads.
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    sizes = {"n_inputs": env.observation_space.shape[0], "n_actions": int(env.action_space.n)}
    agent = Policy(**sizes)
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE)
    progress = {"n_epochs": 0, "n_steps": 0, "steps": [], "returns": []}  # one per episode
    writer = None
    if arguments.track:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(arguments.track)
    with (
        running.CtrlC() as ctrl_c,
        EpisodeBatcher(
            n_timesteps=env.spec.max_episode_steps,  # one slot per episode
            n_slots=2 * N_EPISODES,
            n_workers=arguments.n_workers,
            seed=arguments.seed,
            create_agent=Policy,
            agent_args=sizes,
            create_env=create_env,
            env_args={"env_id": arguments.env_id},
        ) as batcher,
    ):
        parts = {"agent": agent, "optimizer": optimizer, "batcher": batcher}
        if arguments.resume:
            progress = running.load_checkpoint(arguments.checkpoint, parts)
        bar = tqdm(desc="REINFORCE", unit=" steps", initial=progress["n_steps"])
        while progress["n_epochs"] < arguments.n_epochs and not ctrl_c.is_pressed:
            batcher.update(agent.state_dict())  # the agents of the workers load it
            batcher.execute(N_EPISODES)
            episodes = batcher.get()
            loss = learn(agent, optimizer, episodes)
            returns = episode_returns(episodes).tolist()
            n_steps = int(episodes.lengths.sum())
            progress["n_epochs"] += 1
            progress["n_steps"] += n_steps
            progress["steps"] += [progress["n_steps"]] * N_EPISODES
            progress["returns"] += returns
            bar.set_postfix({"return": f"{fmean(returns):.1f}"}, refresh=False)
            bar.update(n_steps)
            if writer is not None:
                for name, value in {"loss": loss, "return": fmean(returns)}.items():
                    writer.add_scalar(name, value, progress["n_steps"])
            if progress["n_epochs"] % arguments.checkpoint_interval == 0:
                running.save_checkpoint(arguments.checkpoint, parts, progress)
        running.save_checkpoint(arguments.checkpoint, parts, progress)
        bar.close()

    average = fmean(progress["returns"][-100:])
    print(f"average return of the last 100 episodes: {average:.1f}")
    running.save_curve(progress, Path(arguments.checkpoint).with_suffix(".png"))
    if arguments.video:
        running.film(agent, create_env, arguments.video, {"env_id": arguments.env_id, "n_envs": 1})


if __name__ == "__main__":
    main()
