"""REINFORCE for environments with discrete actions, from episodes to a learning curve.

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
from pathlib import Path
from statistics import fmean

import gymnasium as gym
import torch
from torch import nn

from rlpool import (
    Agent,
    DictTensor,
    EpisodeBatcher,
    GymEnv,
    categorical_log_probability,
    episode_returns,
    replay_agent,
    sample_categorical,
)

# Chosen for CartPole-v1: the first that we tried, and good enough to see how learning goes.
LEARNING_RATE = 1e-2
N_EPISODES = 32  # per gradient step
N_ENVS = 8  # per worker


class Policy(nn.Module, Agent):
    n_noise = 1  # one uniform number per step is enough to choose one of n actions

    def __init__(self, n_inputs, n_actions):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(n_inputs, 64), nn.Tanh(), nn.Linear(64, n_actions))

    def __call__(self, state, observation, agent_info=None, history=None):
        logits = self.model(observation["frame"])
        action, _ = sample_categorical(logits, observation["noise"])
        # This agent remembers nothing: the states around its outputs are empty.
        return DictTensor(), DictTensor({"action": action, "logits": logits}), DictTensor()

    update = nn.Module.load_state_dict  # runs in the workers, with what batcher.update() got here


def create_env(seed, env_id):
    return GymEnv([gym.make(env_id) for _ in range(N_ENVS)], seed)


def learn(agent, optimizer, episodes):
    """Take one gradient step; returns the loss."""
    # The reward of action t is "_reward": a leading underscore means "after the step". An action
    # can only affect the rewards after it.
    rewards, mask = episodes["_reward"], episodes.mask()
    returns = rewards.flip(1).cumsum(1).flip(1)
    # The baseline of a step is the mean over the episodes that got that far; padding does not
    # count.
    baseline = (returns * mask).sum(0) / mask.sum(0)
    advantages = (returns - baseline) * mask
    advantages = advantages / (advantages[mask.bool()].std() + 1e-8)
    # The same outputs as in the workers, this time with gradients. An agent without a state
    # computes all steps in one call, which is what state="stored" does.
    outputs = replay_agent(agent, episodes, state="stored")
    log_probabilities = categorical_log_probability(outputs["logits"], episodes["action"])
    loss = -(log_probabilities * advantages).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def save_checkpoint(path, parts, progress):
    """Save all that a run consists of; there is a complete file at any time."""
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**state, "random": torch.get_rng_state(), "progress": progress}, f"{path}.new")
    Path(f"{path}.new").replace(path)


def load_checkpoint(path, parts):
    state = torch.load(path, weights_only=True)  # tensors and plain values: no code is run
    for name, part in parts.items():
        part.load_state_dict(state[name])
    torch.set_rng_state(state["random"])
    return state["progress"]


def check_arguments(parser, arguments):
    """Refuse at the start what would fail later."""
    path = Path(arguments.checkpoint)
    if arguments.resume and not path.is_file():
        parser.exit(2, f"--resume: there is no file {path}; run without --resume first\n")
    try:
        Path(f"{path}.new").touch()
        Path(f"{path}.new").unlink()
    except OSError as error:
        parser.exit(2, f"--checkpoint: {error}; name a file in a folder that can be written\n")
    try:
        gym.spec(arguments.env_id)
    except gym.error.Error as error:
        parser.exit(2, f"--env-id: {error} (gymnasium.pprint_registry() lists what there is)\n")


def save_curve(progress, path):
    from matplotlib.figure import Figure  # here, because workers import this file as well

    axes = (figure := Figure(layout="constrained")).subplots()
    # Single episodes as dots, and what is learned as a line, in short runs of fewer episodes.
    n = min(100, max(1, len(progress["returns"]) // 10))
    sums = torch.tensor([0.0, *progress["returns"]]).cumsum(0)
    axes.plot(progress["steps"], progress["returns"], ".", markersize=1, color="lightgrey")
    axes.plot(progress["steps"][n - 1 :], (sums[n:] - sums[:-n]) / n)
    axes.set(xlabel="environment steps", ylabel=f"return, average of {n} episodes")
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--env-id", default="CartPole-v1", help="with a vector as observation")
    parser.add_argument("--n-epochs", type=int, default=40, help="gradient steps")
    parser.add_argument(
        "--n-workers", "--n-threads", type=int, default=2, help="worker processes, 0 for none"
    )
    parser.add_argument("--seed", type=int, default=1, help="another one is another run")
    parser.add_argument("--track", nargs="?", const="runs", help="folder for TensorBoard")
    parser.add_argument("--checkpoint", default="reinforce.pt", help="its curve is a .png")
    parser.add_argument("--checkpoint-interval", type=int, default=10, help="in epochs")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    arguments = parser.parse_args()
    check_arguments(parser, arguments)
    from tqdm import tqdm  # here, since --help does without it

    # The workers need the other cores, and these networks are too small to gain from threads.
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    env = gym.make(arguments.env_id)
    sizes = {"n_inputs": env.observation_space.shape[0], "n_actions": int(env.action_space.n)}
    agent = Policy(**sizes)
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE)
    progress = {"n_epochs": 0, "n_steps": 0, "steps": [], "returns": []}  # one per episode
    writer = None
    if arguments.track:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(arguments.track)
    with EpisodeBatcher(
        n_timesteps=env.spec.max_episode_steps,  # one slot per episode
        n_slots=2 * N_EPISODES,
        n_workers=arguments.n_workers,
        seeds=arguments.seed,
        create_agent=Policy,
        agent_args=sizes,
        create_env=create_env,
        env_args={"env_id": arguments.env_id},
    ) as batcher:
        parts = {"agent": agent, "optimizer": optimizer, "batcher": batcher}
        if arguments.resume:
            progress = load_checkpoint(arguments.checkpoint, parts)
        bar = tqdm(desc="REINFORCE", unit=" steps", initial=progress["n_steps"])
        while progress["n_epochs"] < arguments.n_epochs:
            batcher.update(agent.state_dict())
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
                save_checkpoint(arguments.checkpoint, parts, progress)
        save_checkpoint(arguments.checkpoint, parts, progress)
        bar.close()

    average = fmean(progress["returns"][-100:] or [torch.nan])
    print(f"average return of the last 100 episodes: {average:.1f}")
    save_curve(progress, Path(arguments.checkpoint).with_suffix(".png"))


if __name__ == "__main__":
    main()
