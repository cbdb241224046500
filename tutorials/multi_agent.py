"""Many agents with one policy: IPPO, and MAPPO, whose critic sees the whole state.

You will learn

- how a ``PettingZooEnv`` collects joint episodes, whose tensors have an axis of agents,
- how agents share a network, but act with separate random numbers,
- the inputs of an independent critic (the agent's observation) and of a centralised one.

Three agents have to cover three landmarks without collisions. They are rewarded together: each
learns from the sum of all rewards.

Needs an extra: pip install "rlpool[pettingzoo,tutorials]"

References:
    Yu et al. 2022, "The surprising effectiveness of PPO in cooperative multi-agent games".
    Papoudakis et al. 2021, "Benchmarking multi-agent deep reinforcement learning algorithms in
    cooperative tasks", whose results docs/results.md compares with this script.
"""

from pathlib import Path
from statistics import fmean

import torch
from torch import nn

from rlpool import (
    Agent,
    EpisodeBatcher,
    categorical_log_probability,
    episode_returns,
    gae,
    sample_categorical,
)

import running

N_AGENTS, N_ACTIONS, N_STEPS = 3, 5, 25  # steps per episode
OBSERVATION_SIZE, STATE_SIZE = 18, 54  # the state consists of all observations
N_EPISODES = 64  # per update
LEARNING_RATE = 7e-4
N_EPOCHS, N_MINIBATCHES = 10, 4
DISCOUNT, LAMBDA = 0.99, 0.95
CLIP = 0.2
VALUE_WEIGHT, ENTROPY_WEIGHT, MAX_GRADIENT_NORM = 0.5, 0.01, 0.5
REWARD_SCALE = 0.1  # makes returns about 1, which is easier for the critic


class Team(nn.Module, Agent):
    """One actor and one critic for all agents, with the index of the agent as an input."""

    n_noise = N_AGENTS  # a random number per agent and step

    def __init__(self, is_central):
        super().__init__()
        self.is_central = is_central
        self.actor = make_network(OBSERVATION_SIZE + N_AGENTS, N_ACTIONS, last_gain=0.01)
        critic_size = STATE_SIZE if is_central else OBSERVATION_SIZE
        self.critic = make_network(critic_size + N_AGENTS, 1, last_gain=1.0)

    def forward(self, observation):
        logits = self.logits(observation["frame"])  # [B, A, 5]
        noise = observation["noise"].flatten()
        action, log_probability = sample_categorical(logits.flatten(0, 1), noise)
        return {
            "action": action.view(-1, N_AGENTS),
            "log_probability": log_probability.view(-1, N_AGENTS),
        }

    def logits(self, frame):
        return self.actor(with_number(frame))

    def values(self, frame, state):
        """Return the value of each agent [..., A], from its observation or the whole state."""
        seen = state.unsqueeze(-2).expand(*frame.shape[:-1], -1) if self.is_central else frame
        return self.critic(with_number(seen)).squeeze(-1)


def with_number(frame):
    """Append the agent's index to the observations ``[..., A, n]``."""
    return torch.cat([frame, torch.eye(N_AGENTS).expand(*frame.shape[:-1], -1)], -1)


def make_network(n_inputs, n_outputs, last_gain):
    layers = nn.Linear(n_inputs, 64), nn.Linear(64, 64), nn.Linear(64, n_outputs)
    for layer, gain in zip(layers, (2**0.5, 2**0.5, last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def create_env(seed, n_envs, render_mode=None):
    from mpe2 import simple_spread_v3  # here, to keep --help fast

    from rlpool.integrations.pettingzoo import PettingZooEnv

    options = {"N": N_AGENTS, "max_cycles": N_STEPS, "render_mode": render_mode}
    envs = [simple_spread_v3.parallel_env(**options) for _ in range(n_envs)]
    return PettingZooEnv(envs, seed, state=True)


def learn(team, optimizer, episodes):
    """Learn from complete episodes; all are truncated after the same number of steps."""
    reward = REWARD_SCALE * episodes["_reward"].unsqueeze(-1).expand(-1, -1, N_AGENTS)
    with torch.no_grad():
        value = team.values(episodes["frame"], episodes["state"])
        next_value = team.values(episodes["_frame"], episodes["_state"])
        terminated, done = episodes["_terminated"], episodes["_done"]
        advantage = gae(reward, value, next_value, terminated, done, DISCOUNT, LAMBDA)  # [n, T, A]
    parts = [episodes[key] for key in ("frame", "state", "action", "log_probability")]
    parts = [part.flatten(0, 1) for part in (*parts, advantage, advantage + value)]
    for _ in range(N_EPOCHS):
        for rows in torch.randperm(done.numel()).chunk(N_MINIBATCHES):
            loss = loss_of(team, *(part[rows] for part in parts))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(team.parameters(), MAX_GRADIENT_NORM)
            optimizer.step()


def loss_of(team, frame, state, action, old_log_probability, advantage, target):
    logits = team.logits(frame)
    ratio = (categorical_log_probability(logits, action) - old_log_probability).exp()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    error = nn.functional.huber_loss(team.values(frame, state), target)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return VALUE_WEIGHT * error - gain.mean() - ENTROPY_WEIGHT * entropy.mean()


def main():
    parser = running.Parser(__doc__)
    parser.add_argument("--central-critic", action="store_true", help="MAPPO instead of IPPO")
    parser.add_number("--total-timesteps", least=1, default=1_000_000, help="joint steps")
    parser.add_argument("--n-workers", type=int, default=2, choices=(0, 1, 2, 4))
    parser.add_number("--seed", least=0, default=1, help="random seed")
    parser.add_argument("--checkpoint", default="multi_agent.pt", help="with its curve as .png")
    parser.add_number("--checkpoint-interval", least=1, default=20, help="in updates")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--video", metavar="FOLDER", help="for a video of the final policy")
    arguments = parser.parse_args()
    running.check_arguments(arguments)
    from tqdm import tqdm  # here, to keep --help fast

    torch.set_num_threads(1)  # the networks are small
    torch.manual_seed(arguments.seed)
    team = Team(arguments.central_critic)
    optimizer = torch.optim.Adam(team.parameters(), lr=LEARNING_RATE, eps=1e-5, fused=True)
    progress = {"n_steps": 0, "steps": [], "returns": []}  # one entry per episode
    with (
        running.CtrlC() as ctrl_c,
        EpisodeBatcher(
            n_timesteps=N_STEPS,
            n_slots=N_EPISODES,
            n_workers=arguments.n_workers,
            seed=arguments.seed,
            create_agent=Team,
            agent_args={"is_central": arguments.central_critic},
            create_env=create_env,
            env_args={"n_envs": 32 // max(1, arguments.n_workers)},
        ) as batcher,
    ):
        parts = {"team": team, "optimizer": optimizer, "batcher": batcher}
        if arguments.resume:
            progress = running.load_checkpoint(arguments.checkpoint, parts)
        total, per_update = arguments.total_timesteps, N_EPISODES * N_STEPS
        bar = tqdm(desc="PPO", unit=" steps", total=total, initial=progress["n_steps"])
        while progress["n_steps"] + per_update <= total and not ctrl_c.is_pressed:
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - progress["n_steps"] / total)
            batcher.update(team.state_dict())
            batcher.execute(N_EPISODES)
            episodes = batcher.get()
            learn(team, optimizer, episodes)
            progress["n_steps"] += per_update
            returns = episode_returns(episodes).tolist()
            progress["steps"] += [progress["n_steps"]] * len(returns)
            progress["returns"] += returns
            bar.set_postfix({"return": f"{fmean(returns):.2f}"}, refresh=False)
            bar.update(per_update)
            if progress["n_steps"] // per_update % arguments.checkpoint_interval == 0:
                running.save_checkpoint(arguments.checkpoint, parts, progress)
        running.save_checkpoint(arguments.checkpoint, parts, progress)
        bar.close()

    average = fmean(progress["returns"][-100:] or [torch.nan])
    print(f"average return of the last 100 episodes: {average:.2f}")
    running.save_curve(progress, Path(arguments.checkpoint).with_suffix(".png"))
    if arguments.video:
        running.film(team, create_env, arguments.video, {"n_envs": 1})


if __name__ == "__main__":
    main()
