"""Proximal policy optimisation (PPO) for environments with continuous actions, such as MuJoCo's.

You will learn

- how a normal distribution is sampled from an agent's noise,
- how the agent normalises observations, so that workers and learner see the same numbers, and the
  learner rewards, so that windows and returns keep those of the environment,
- that the algorithm is that of ppo.py, with more passes over longer windows.

References:
    Schulman et al. 2017, "Proximal policy optimization algorithms".
    Schulman et al. 2016, "High-dimensional continuous control using generalized advantage
    estimation".
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
    RewardNormalizer,
    RunningNormalizer,
    gae,
    normal_log_probability,
    sample_normal,
)

import running

# The hyper-parameters of CleanRL's ppo_continuous_action.py, with whose published results
# (https://docs.cleanrl.dev/rl-algorithms/ppo) docs/results.md compares this script.
LEARNING_RATE = 3e-4  # initial value; decays linearly to zero
N_ENVS, N_STEPS = 1, 2048  # a window: this many steps of each environment
BATCH_SIZE = N_ENVS * N_STEPS
N_EPOCHS, N_MINIBATCHES = 10, 32  # passes over a window, and minibatches per pass
DISCOUNT, LAMBDA = 0.99, 0.95  # lambda: from one-step TD (0) to Monte Carlo (1)
CLIP = 0.2  # largest change of probability ratios and values per window
VALUE_WEIGHT, MAX_GRADIENT_NORM = 0.5, 0.5


class ActorCritic(nn.Module, Agent):
    def __init__(self, n_inputs, n_actions):
        super().__init__()
        self.n_noise = n_actions  # random numbers per step, for reproducible runs
        self.normalizer = RunningNormalizer(n_inputs)
        self.actor = make_network(n_inputs, n_actions, last_gain=0.01)
        self.log_std = nn.Parameter(torch.zeros(n_actions))
        self.critic = make_network(n_inputs, 1, last_gain=1.0)

    def forward(self, observation):
        mean = self.actor(self.normalizer(observation["frame"]))
        action, log_probability = sample_normal(mean, self.log_std, observation["noise"])
        return {"action": action, "log_probability": log_probability}


def make_network(n_inputs, n_outputs, last_gain):
    layers = nn.Linear(n_inputs, 64), nn.Linear(64, 64), nn.Linear(64, n_outputs)
    for layer, gain in zip(layers, (2**0.5, 2**0.5, last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def create_env(seed, env_id, n_envs, render_mode=None):
    # Actions of a normal distribution are unbounded; those of a joint are bounded.
    envs = [gym.make(env_id, render_mode=render_mode) for _ in range(n_envs)]
    return GymEnvInf([gym.wrappers.ClipAction(env) for env in envs], seed)


def learn(agent, reward_normalizer, optimizer, window):
    """Learn from one window; returns the losses of the last minibatch."""
    with torch.no_grad():
        frame, next_frame = (agent.normalizer(window[key]) for key in ("frame", "_frame"))
        value, next_value = agent.critic(frame).squeeze(-1), agent.critic(next_frame).squeeze(-1)
        reward, terminated, done = (window[key] for key in ("_reward", "_terminated", "_done"))
        reward_normalizer.update(reward, done)
        reward = reward_normalizer(reward)
        advantage = gae(reward, value, next_value, terminated, done, DISCOUNT, LAMBDA)
    parts = [frame, window["action"], window["log_probability"], value, advantage]
    parts = [part.flatten(0, 1) for part in (*parts, advantage + value)]
    for _ in range(N_EPOCHS):
        for rows in torch.randperm(done.numel()).chunk(N_MINIBATCHES):
            losses = losses_of(agent, *(part[rows] for part in parts))
            optimizer.zero_grad()
            (losses["policy"] + VALUE_WEIGHT * losses["value"]).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRADIENT_NORM)
            optimizer.step()
    agent.normalizer.update(window["frame"])  # takes effect from the next window
    return losses


def losses_of(agent, frame, action, old_log_probability, old_value, advantage, target):
    log_probability = normal_log_probability(agent.actor(frame), agent.log_std, action)
    ratio = (log_probability - old_log_probability).exp()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    value = agent.critic(frame).squeeze(-1)
    clipped = old_value + (value - old_value).clamp(-CLIP, CLIP)
    error = torch.max((value - target).square(), (clipped - target).square())
    return {"policy": -gain.mean(), "value": 0.5 * error.mean()}


def main():
    parser = running.Parser(__doc__)
    parser.add_argument("--env-id", default="HalfCheetah-v4", help="with vector observations")
    parser.add_number("--total-timesteps", least=1, default=1_000_000)
    parser.add_argument(
        "--n-workers", "--n-threads", type=int, default=0, choices=(0, 1), help="worker processes"
    )
    parser.add_number("--seed", least=0, default=1, help="random seed")
    parser.add_argument("--track", nargs="?", const="runs", help="folder for TensorBoard")
    parser.add_argument("--video", metavar="FOLDER", help="for a video of the final policy")
    parser.add_argument("--checkpoint", default="ppo_continuous.pt", help="with its curve as .png")
    parser.add_number("--checkpoint-interval", least=1, default=25, help="in windows")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    arguments = parser.parse_args()
    running.check_arguments(arguments)
    env = running.make_env(arguments, is_discrete=False)
    from tqdm import tqdm  # here, to keep --help fast

    torch.set_num_threads(1)  # the networks are small
    torch.manual_seed(arguments.seed)
    sizes = {"n_inputs": env.observation_space.shape[0], "n_actions": env.action_space.shape[0]}
    agent, reward_normalizer = ActorCritic(**sizes), RewardNormalizer(N_ENVS, DISCOUNT)
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5, fused=True)
    episodes = EpisodeStatistics()
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
        parts = {"agent": agent, "reward_normalizer": reward_normalizer}
        parts |= {"optimizer": optimizer, "batcher": batcher}
        if arguments.resume:
            progress = running.load_checkpoint(arguments.checkpoint, parts)
        batcher.reset()  # a resumed run begins new episodes
        total = arguments.total_timesteps
        bar = tqdm(desc="PPO", unit=" steps", total=total, initial=progress["n_steps"])
        while progress["n_steps"] + BATCH_SIZE <= total and not ctrl_c.is_pressed:
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - progress["n_steps"] / total)
            batcher.update(agent.state_dict())
            batcher.execute()
            window = batcher.get()
            losses = learn(agent, reward_normalizer, optimizer, window)
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
