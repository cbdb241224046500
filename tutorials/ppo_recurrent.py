"""Proximal policy optimisation (PPO) with a recurrent policy, where velocities are hidden.

You will learn

- how an agent keeps a state, here that of two GRU cells, and initialises it for an episode,
- how windows are cut into sequences, and how ``replay_agent`` runs them again with gradients
  through time: from the state stored at the start of each row, and from the initial state if an
  episode starts within it,
- how ``evaluate`` runs a trained policy greedily, as requested in ``agent_info``.

References:
    Schulman et al. 2017, "Proximal policy optimization algorithms".
    Hausknecht and Stone 2015, "Deep recurrent Q-learning for partially observable MDPs",
    which hides part of the observations, as this script does with velocities.
"""

from pathlib import Path
from statistics import fmean

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from rlpool import (
    Agent,
    Batcher,
    EpisodeStatistics,
    GymEnvInf,
    RewardNormalizer,
    RunningNormalizer,
    TemporalDictTensor,
    categorical_log_probability,
    evaluate,
    gae,
    replay_agent,
    sample_categorical,
)

import running

# Networks, learning rate, normalisation and the size of a minibatch are those of
# rl-baselines3-zoo's ppo_lstm for CartPoleNoVel-v1, with whose published result
# (https://github.com/DLR-RM/rl-baselines3-zoo) docs/results.md compares this script.
LEARNING_RATE = 1e-3  # initial value; decays linearly to zero
N_SEQUENCES, SEQUENCE_STEPS = 8, 32  # per gradient step
# The original uses windows of one minibatch, 20 passes, a discount of 0.98 and lambda = 0.8, which
# is too short to see the effect of a slow drift of the cart: half of the runs here unlearned to
# stop it. The following are Stable-Baselines3's defaults.
N_ENVS, N_STEPS = 8, 256  # a window: this many steps of each environment
BATCH_SIZE = N_ENVS * N_STEPS
N_EPOCHS = 10  # passes over each window
DISCOUNT, LAMBDA = 0.99, 0.95  # lambda: from one-step TD (0) to Monte Carlo (1)
CLIP = 0.2  # largest change of probability ratios per window
VALUE_WEIGHT, MAX_GRADIENT_NORM = 0.5, 0.5
N_HIDDEN = 64


class Memory(nn.Module):
    """A recurrent network, whose output depends on all observations of the episode so far."""

    def __init__(self, n_inputs, n_outputs):
        super().__init__()
        self.cell = nn.GRUCell(n_inputs, N_HIDDEN)
        self.head = nn.Sequential(
            nn.Linear(N_HIDDEN, N_HIDDEN), nn.ReLU(), nn.Linear(N_HIDDEN, n_outputs)
        )

    def forward(self, frame, hidden):
        hidden = self.cell(frame, hidden)
        return self.head(hidden), hidden


class RecurrentActorCritic(nn.Module, Agent):
    n_noise = 1  # random numbers per step, for reproducible runs

    def __init__(self, n_inputs, n_actions):
        super().__init__()
        self.normalizer = RunningNormalizer(n_inputs)
        self.actor, self.critic = Memory(n_inputs, n_actions), Memory(n_inputs, 1)

    def initial_state(self, agent_info, n):
        return {"actor": torch.zeros(n, N_HIDDEN), "critic": torch.zeros(n, N_HIDDEN)}

    def forward(self, observation, state, agent_info):
        frame = self.normalizer(observation["frame"])
        logits, actor = self.actor(frame, state["actor"])
        value, critic = self.critic(frame, state["critic"])
        action, log_probability = sample_categorical(logits, observation["noise"])
        if agent_info is not None:
            action = torch.where(agent_info["is_greedy"], logits.argmax(-1), action)
        output = {"action": action, "log_probability": log_probability}
        output |= {"logits": logits, "value": value.squeeze(-1)}
        return output, {"actor": actor, "critic": critic}


# 1 for values visible in a single image, 0 for velocities.
VISIBLE = {"CartPole-v1": [1, 0, 1, 0], "MountainCar-v0": [1, 0], "Acrobot-v1": [1, 1, 1, 1, 0, 0]}


class WithoutVelocities(gym.ObservationWrapper):
    def observation(self, observation):
        return observation * np.float32(VISIBLE[self.spec.id])


def create_env(seed, env_id, n_envs, render_mode=None):
    envs = [gym.make(env_id, render_mode=render_mode) for _ in range(n_envs)]
    return GymEnvInf([WithoutVelocities(env) for env in envs], seed)


def losses_of(agent, sequences):
    outputs = replay_agent(agent, sequences)  # step by step, with gradients through time
    log_probability = categorical_log_probability(
        outputs["logits"].flatten(0, 1), sequences["action"].flatten()
    ).view_as(sequences["target"])
    ratio = (log_probability - sequences["log_probability"]).exp()
    advantage = sequences["advantage"]
    gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    error = (outputs["value"] - sequences["target"]).square()
    return {"policy": -gain.mean(), "value": error.mean()}


def learn(agent, reward_normalizer, optimizer, window):
    """Learn from one window; returns the losses of the last gradient step."""
    with torch.no_grad():
        # "_frame" and "_critic" are the values after a step, even if the next step begins another
        # episode: a truncated episode has a future, a terminated one does not.
        next_frame = agent.normalizer(window["_frame"]).flatten(0, 1)
        hidden = window["_critic"].flatten(0, 1)
        value, next_value = window["value"], agent.critic(next_frame, hidden)[0].view(N_ENVS, -1)
        reward, terminated, done = (window[key] for key in ("_reward", "_terminated", "_done"))
        reward_normalizer.update(reward, done)
        reward = reward_normalizer(reward)
        advantage = gae(reward, value, next_value, terminated, done, DISCOUNT, LAMBDA)
        window.set("advantage", (advantage - advantage.mean()) / (advantage.std() + 1e-8))
        window.set("target", advantage + value)
    # Every step has the states before it, so sequences can begin anywhere.
    starts = range(0, N_STEPS, SEQUENCE_STEPS)
    slices = [window.temporal_slice(start, start + SEQUENCE_STEPS) for start in starts]
    sequences = TemporalDictTensor.cat(slices)
    for _ in range(N_EPOCHS):
        for rows in torch.randperm(sequences.n_elems()).split(N_SEQUENCES):
            losses = losses_of(agent, sequences.index(rows))
            optimizer.zero_grad()
            (losses["policy"] + VALUE_WEIGHT * losses["value"]).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRADIENT_NORM)
            optimizer.step()
    agent.normalizer.update(window["frame"])  # takes effect from the next window
    return losses


def main():
    parser = running.Parser(__doc__)
    parser.add_argument("--env-id", default="CartPole-v1", choices=VISIBLE)
    parser.add_number("--total-timesteps", least=1, default=100_000)
    parser.add_argument(
        "--n-workers", "--n-threads", type=int, default=0, choices=(0, 1, 2, 4, 8), help="workers"
    )
    parser.add_number("--seed", least=0, default=1, help="random seed")
    parser.add_argument("--track", nargs="?", const="runs", help="folder for TensorBoard")
    parser.add_argument("--video", metavar="FOLDER", help="for a video of the final policy")
    parser.add_argument("--checkpoint", default="ppo_recurrent.pt", help="with its curve as .png")
    parser.add_number("--checkpoint-interval", least=1, default=10, help="in windows")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_number("--evaluate", least=0, default=50, help="greedy episodes at the end")
    arguments = parser.parse_args()
    running.check_arguments(arguments)
    from tqdm import tqdm  # here, to keep --help fast

    torch.set_num_threads(1)  # the networks are small
    torch.manual_seed(arguments.seed)
    n_actions = int(gym.make(arguments.env_id).action_space.n)
    sizes = {"n_inputs": len(VISIBLE[arguments.env_id]), "n_actions": n_actions}
    agent, episodes = RecurrentActorCritic(**sizes), EpisodeStatistics()
    reward_normalizer = RewardNormalizer(N_ENVS, DISCOUNT)
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
            create_agent=RecurrentActorCritic,
            agent_args=sizes,
            create_env=create_env,
            env_args={"env_id": arguments.env_id, "n_envs": N_ENVS // max(1, arguments.n_workers)},
        ) as batcher,
    ):
        parts = {"agent": agent, "reward_normalizer": reward_normalizer, "optimizer": optimizer}
        parts |= {"batcher": batcher}
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
        if arguments.evaluate and not ctrl_c.is_pressed:
            greedy = {"agent_info": {"is_greedy": True}, "seed": arguments.seed}
            greedy["env_args"] = {"env_id": arguments.env_id, "n_envs": N_ENVS}
            evaluation = evaluate(agent, create_env, arguments.evaluate, **greedy)
            progress["evaluation"] = evaluation.returns.tolist()
            running.save_checkpoint(arguments.checkpoint, parts, progress)

    final, kind = progress["returns"][-100:] or [torch.nan], "the last 100"
    if arguments.evaluate:  # the final policy, without exploration
        final, kind = progress["evaluation"], f"{arguments.evaluate} greedy"
    print(f"average return of {kind} episodes: {fmean(final):.1f}")
    running.save_curve(progress, Path(arguments.checkpoint).with_suffix(".png"))
    if arguments.video:
        env_args = {"env_id": arguments.env_id, "n_envs": 1}
        running.film(agent, create_env, arguments.video, env_args, {"is_greedy": True})


if __name__ == "__main__":
    main()
