"""Advantage actor-critic (A2C) for environments with discrete actions.

You will learn

- how a ``Batcher`` returns windows: the next steps of all environments, across ends of episodes,
- what a window contains around the end of an episode,
- how to bootstrap: from the value of the next state after a truncation and at the end of a window,
  but not after a termination.

A pole that falls has no future. A pole stopped by the time limit would have gone on: counting its
future as zero would teach the critic that balancing for long is bad.

References:
    Mnih et al. 2016, "Asynchronous methods for deep reinforcement learning".
"""

from pathlib import Path
from statistics import fmean

import gymnasium as gym
import torch
from torch import nn

from rlpool import (
    Agent,
    Batcher,
    EpisodeStatistics,
    GymEnvInf,
    categorical_log_probability,
    discounted_returns,
    sample_categorical,
)

import running

# The hyper-parameters of Stable-Baselines3's A2C, with the number of environments that
# rl-baselines3-zoo (https://github.com/DLR-RM/rl-baselines3-zoo) uses for CartPole-v1.
LEARNING_RATE = 7e-4  # initial value; decays linearly to 0, which stabilises the final policy
N_ENVS, N_STEPS = 8, 5  # a window: this many steps of each environment
BATCH_SIZE = N_ENVS * N_STEPS
DISCOUNT = 0.99
VALUE_WEIGHT, MAX_GRADIENT_NORM = 0.5, 0.5


class ActorCritic(nn.Module, Agent):
    n_noise = 1  # random numbers per step, for reproducible runs

    def __init__(self, n_inputs, n_actions):
        super().__init__()
        self.actor = make_network(n_inputs, n_actions, last_gain=0.01)
        self.critic = make_network(n_inputs, 1, last_gain=1.0)

    def forward(self, observation):
        logits = self.actor(observation["frame"])
        action, _ = sample_categorical(logits, observation["noise"])
        return {"action": action}


def make_network(n_inputs, n_outputs, last_gain):
    layers = nn.Linear(n_inputs, 64), nn.Linear(64, 64), nn.Linear(64, n_outputs)
    for layer, gain in zip(layers, (2**0.5, 2**0.5, last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def create_env(seed, env_id, n_envs, render_mode=None):
    # "Inf" for infinite: environments restart automatically when an episode ends.
    return GymEnvInf([gym.make(env_id, render_mode=render_mode) for _ in range(n_envs)], seed)


def learn(agent, optimizer, window):
    """Take one gradient step; returns the losses."""
    value = agent.critic(window["frame"]).squeeze(-1)
    # "frame" is the observation before an action, "_frame" the one after it. Within an episode,
    # "_frame" equals the "frame" of the next step. At its end, it is the last observation, which
    # the critic needs, while the next step has the first observation of another episode.
    # Discounted rewards up to the end of the episode or of the window, then the critic's estimate:
    # "_done" stops the sum, "_terminated" omits the estimate.
    reward, terminated, done = (window[key] for key in ("_reward", "_terminated", "_done"))
    with torch.no_grad():
        ends = {"next_value": agent.critic(window["_frame"]).squeeze(-1), "terminated": terminated}
    target = discounted_returns(reward, done, DISCOUNT, **ends)
    logits = agent.actor(window["frame"]).flatten(0, 1)
    log_probability = categorical_log_probability(logits, window["action"].flatten())
    error = target - value
    losses = {
        "policy": -(log_probability * error.detach().flatten()).mean(),
        "value": error.square().mean(),
    }
    optimizer.zero_grad()
    (losses["policy"] + VALUE_WEIGHT * losses["value"]).backward()
    nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()
    return losses


def main():
    parser = running.Parser(__doc__)
    parser.add_argument("--env-id", default="CartPole-v1", help="with vector observations")
    parser.add_number("--total-timesteps", least=1, default=500_000)
    parser.add_argument(
        "--n-workers", "--n-threads", type=int, default=0, choices=(0, 1, 2, 4, 8), help="workers"
    )
    parser.add_number("--seed", least=0, default=1, help="random seed")
    parser.add_argument("--track", nargs="?", const="runs", help="folder for TensorBoard")
    parser.add_argument("--video", metavar="FOLDER", help="for a video of the final policy")
    parser.add_argument("--checkpoint", default="a2c.pt", help="with its curve as .png")
    parser.add_number("--checkpoint-interval", least=1, default=1_000, help="in windows")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    arguments = parser.parse_args()
    running.check_arguments(arguments)
    env = running.make_env(arguments, is_discrete=True)
    from tqdm import tqdm  # here, to keep --help fast

    torch.set_num_threads(1)  # the networks are small
    torch.manual_seed(arguments.seed)
    sizes = {"n_inputs": env.observation_space.shape[0], "n_actions": int(env.action_space.n)}
    agent, episodes = ActorCritic(**sizes), EpisodeStatistics()
    optimizer = torch.optim.RMSprop(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)
    progress = {"n_steps": 0, "steps": [], "returns": []}  # one entry per episode
    writer = None
    if arguments.track:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(arguments.track)
    with (
        running.CtrlC() as ctrl_c,
        Batcher(
            n_timesteps=N_STEPS,
            n_workers=arguments.n_workers,
            seed=arguments.seed,
            create_agent=ActorCritic,
            agent_args=sizes,
            create_env=create_env,
            env_args={"env_id": arguments.env_id, "n_envs": N_ENVS // max(1, arguments.n_workers)},
        ) as batcher,
    ):
        parts = {"agent": agent, "optimizer": optimizer, "batcher": batcher}
        if arguments.resume:
            progress = running.load_checkpoint(arguments.checkpoint, parts)
        batcher.reset()  # a resumed run begins new episodes
        total = arguments.total_timesteps
        bar = tqdm(desc="A2C", unit=" steps", total=total, initial=progress["n_steps"])
        while progress["n_steps"] + BATCH_SIZE <= total and not ctrl_c.is_pressed:
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - progress["n_steps"] / total)
            batcher.update(agent.state_dict())
            batcher.execute()
            window = batcher.get()
            losses = learn(agent, optimizer, window)
            progress["n_steps"] += BATCH_SIZE
            returns = episodes.update(window).returns.tolist()
            progress["steps"] += [progress["n_steps"]] * len(returns)
            progress["returns"] += returns
            average = fmean(progress["returns"][-100:] or [torch.nan])
            bar.set_postfix({"return": f"{average:.1f}"}, refresh=False)
            bar.update(BATCH_SIZE)
            if writer is not None:
                for name, value in {**losses, "return": average}.items():
                    writer.add_scalar(name, value, progress["n_steps"])
            if progress["n_steps"] // BATCH_SIZE % arguments.checkpoint_interval == 0:
                running.save_checkpoint(arguments.checkpoint, parts, progress)
        running.save_checkpoint(arguments.checkpoint, parts, progress)
        bar.close()

    average = fmean(progress["returns"][-100:] or [torch.nan])
    print(f"average return of the last 100 episodes: {average:.1f}")
    running.save_curve(progress, Path(arguments.checkpoint).with_suffix(".png"))
    if arguments.video:
        running.film(agent, create_env, arguments.video, {"env_id": arguments.env_id, "n_envs": 1})


if __name__ == "__main__":
    main()
