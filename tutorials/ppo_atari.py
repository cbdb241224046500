"""Proximal policy optimisation (PPO) for Atari games, from pixels.

You will learn

- how a C++ vector environment, that of ale-py, becomes lanes that restart by themselves,
- how a key of ``info`` reaches the learner: a lost life ends the credit of an action,
- how to speed up a convolutional network on a CPU.

    python tutorials/ppo_atari.py --env-id breakout --seed 1 --track

References:
    Schulman et al. 2017, "Proximal policy optimization algorithms".
    Mnih et al. 2015, "Human-level control through deep reinforcement learning": the network.
    Huang et al. 2022, "The 37 implementation details of proximal policy optimization".
"""

from pathlib import Path
from statistics import fmean
from typing import ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import nn

from rlpool import (
    Agent,
    Batcher,
    EpisodeBatcher,
    EpisodeStatistics,
    VectorGymEnv,
    categorical_log_probability,
    episode_returns,
    gae,
    sample_categorical,
)

import running

# The hyper-parameters of CleanRL's ppo_atari.py (https://docs.cleanrl.dev/rl-algorithms/ppo), with
# which docs/results.md compares this script.
LEARNING_RATE = 2.5e-4  # initial value; decays linearly to zero
N_ENVS, N_STEPS, BATCH_SIZE = 8, 128, 8 * 128  # a window: steps (of four frames) of each game
N_EPOCHS, N_MINIBATCHES = 4, 4  # passes over a window, and minibatches per pass
DISCOUNT, LAMBDA = 0.99, 0.95  # lambda: from one-step TD (0) to Monte Carlo (1)
CLIP = 0.1  # largest change of probability ratios and values per window
VALUE_WEIGHT, ENTROPY_WEIGHT, MAX_GRADIENT_NORM = 0.5, 0.01, 0.5
LAYOUT = torch.channels_last  # halves the time of convolutions


class ActorCritic(nn.Module, Agent):
    """A policy and a critic with a shared convolutional network."""

    n_noise = 1  # random numbers per step, for reproducible runs

    def __init__(self, n_actions, bfloat16):
        super().__init__()
        self.uses_bfloat16 = bfloat16
        # The last convolution is a linear layer over all pixels, and keeps the layout.
        sizes = (4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1), (64, 512, 7, 1)
        layers = [part for size in sizes for part in (nn.Conv2d(*size), nn.ReLU())]
        self.network = nn.Sequential(*layers, nn.Flatten())
        self.actor, self.critic = nn.Linear(512, n_actions), nn.Linear(512, 1)
        gains = (2**0.5, 2**0.5, 2**0.5, 2**0.5, 0.01, 1.0)
        for layer, gain in zip((*layers[::2], self.actor, self.critic), gains, strict=True):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
        self.to(memory_format=LAYOUT)

    def forward(self, observation):
        logits, value = self.logits_and_value(observation["frame"])
        action, log_probability = sample_categorical(logits, observation["noise"])
        return {"action": action, "log_probability": log_probability, "value": value}

    def logits_and_value(self, frame):
        pixels = frame.to(torch.float32, memory_format=LAYOUT).div_(255)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.uses_bfloat16):
            hidden = self.network(pixels)
        return self.actor(hidden.float()), self.critic(hidden.float()).squeeze(-1)


class SeededLanes(gymnasium.vector.VectorWrapper):
    """Lanes of ale-py that are reset one by one, each with its own seed."""

    # Lanes do not restart by themselves.
    metadata: ClassVar = {"autoreset_mode": AutoresetMode.DISABLED}

    def reset(self, *, seed=None, options=None):
        if isinstance(seed, list):  # one per lane, but ale-py expects one per lane to be reset
            seed = np.array(seed)[(options or {}).get("reset_mask", ...)]
        return self.env.reset(seed=seed, options=options)


def create_env(seed, env_id, n_workers, auto_reset=True):
    # Frames are skipped, resized and stacked in C++. The learner clips the rewards, so returns are
    # those of the game.
    n_envs, cores = (N_ENVS // n_workers, 1) if n_workers else (N_ENVS, 0)  # 0: all
    from ale_py.vector_env import AtariVectorEnv  # here, to keep --help fast

    env = AtariVectorEnv(env_id, n_envs, num_threads=cores, reward_clipping=False)
    keys = {"lives": np.int32}
    return VectorGymEnv(SeededLanes(env), seed, auto_reset=auto_reset, info_keys=keys)


def learn(agent, optimizer, window):
    """Learn from one window; returns the losses of the last minibatch."""
    value = window["value"]
    # The observation after an action is that of the next step, except at the end of the window and
    # of episodes, where a truncated episode has a future and a terminated one does not.
    next_value = value.roll(-1, dims=1)
    is_last = window["_truncated"].clone()
    is_last[:, -1] = True
    with torch.no_grad():
        next_value[is_last] = agent.logits_and_value(window["_frame"][is_last])[1]
    has_lost_life = window["_lives"] < window["lives"]
    terminated, done = (window[key] | has_lost_life for key in ("_terminated", "_done"))
    advantage = gae(window["_reward"].sign(), value, next_value, terminated, done, DISCOUNT, LAMBDA)
    frame = window["frame"].flatten(0, 1).contiguous(memory_format=LAYOUT)  # still uint8
    parts = window["action"], window["log_probability"], value, advantage, advantage + value
    parts = [frame, *(part.flatten() for part in parts)]
    for _ in range(N_EPOCHS):
        for rows in torch.randperm(done.numel()).chunk(N_MINIBATCHES):
            losses = losses_of(agent, *(part[rows] for part in parts))
            loss = losses["policy"] + VALUE_WEIGHT * losses["value"]
            optimizer.zero_grad()
            (loss - ENTROPY_WEIGHT * losses["entropy"]).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRADIENT_NORM)
            optimizer.step()
    return losses


def losses_of(agent, frame, action, old_log_probability, old_value, advantage, target):
    logits, value = agent.logits_and_value(frame)
    ratio = (categorical_log_probability(logits, action) - old_log_probability).exp()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    clipped = old_value + (value - old_value).clamp(-CLIP, CLIP)
    error = torch.max((value - target).square(), (clipped - target).square())
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return {"policy": -gain.mean(), "value": 0.5 * error.mean(), "entropy": entropy.mean()}


def film(agent, sizes, env_id, folder):
    """Film an episode as the agent sees it: the last of the four frames of every step."""
    from moviepy import ImageSequenceClip

    with EpisodeBatcher(
        n_timesteps=1000,
        n_slots=1,
        n_workers=0,
        seed=0,
        create_agent=ActorCritic,
        agent_args=sizes,
        create_env=create_env,
        env_args={"env_id": env_id, "n_workers": N_ENVS, "auto_reset": False},  # one environment
    ) as batcher:
        batcher.update(agent.state_dict())
        batcher.execute(1)
        episode = batcher.get()
    frames = episode["frame"][0, :, -1, :, :, None].expand(-1, -1, -1, 3)
    path = Path(folder) / f"episode-return-{episode_returns(episode).item():.0f}.mp4"
    path.parent.mkdir(parents=True, exist_ok=True)
    ImageSequenceClip(list(frames.numpy()), fps=15).write_videofile(str(path), logger=None)
    print(f"video of an episode: {path}")


def check_game(game):
    from ale_py import roms

    if game not in (games := roms.get_all_rom_ids()):
        running.refuse(f"--env-id: {game} is not a game of ale-py; choose one of {games}")


def main():
    parser = running.Parser(__doc__)
    parser.add_argument("--env-id", default="pong", help="a game of ale-py: space_invaders, ...")
    parser.add_number("--total-timesteps", least=1, default=1_000_000)
    parser.add_argument(
        "--n-workers", "--n-threads", type=int, default=2, choices=(0, 1, 2, 4, 8), help="workers"
    )
    parser.add_argument("--bfloat16", action="store_true", help="faster on CPUs that support it")
    parser.add_number("--seed", least=0, default=1, help="random seed")
    parser.add_argument("--track", nargs="?", const="runs", help="folder for TensorBoard")
    parser.add_argument("--checkpoint", default="ppo_atari.pt", help="with its curve as .png")
    parser.add_number("--checkpoint-interval", least=1, default=100, help="in windows")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--video", metavar="FOLDER", help="for a video of the final policy")
    arguments = parser.parse_args()
    running.check_arguments(arguments)
    check_game(arguments.env_id)
    from ale_py.vector_env import AtariVectorEnv
    from tqdm import tqdm  # here, to keep --help fast

    torch.manual_seed(arguments.seed)
    n_actions = int(AtariVectorEnv(arguments.env_id, 1).single_action_space.n)
    sizes = {"n_actions": n_actions, "bfloat16": arguments.bfloat16}
    agent, episodes = ActorCritic(**sizes), EpisodeStatistics()
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5, fused=True)
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
            env_args={"env_id": arguments.env_id, "n_workers": arguments.n_workers},
        ) as batcher,
    ):
        parts = {"agent": agent, "optimizer": optimizer, "batcher": batcher}
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
        film(agent, sizes, arguments.env_id, arguments.video)


if __name__ == "__main__":
    main()
