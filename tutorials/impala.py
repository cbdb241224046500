"""IMPALA: concurrent acting and learning, with V-trace to correct for slightly old policies.

You will learn

- how ``batcher.stream`` keeps requests in flight while the learner learns, so that workers seldom
  wait,
- the age of the policy of each episode: ``--n-pending`` bounds it, and it depends only on the order
  of calls, so a run is as reproducible as a synchronous one (``--n-pending 1``),
- how ``vtrace`` computes targets from actions of an older policy.

References:
    Espeholt et al. 2018, "IMPALA: scalable distributed deep-RL with importance weighted
    actor-learner architectures".
"""

import time
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
    sample_categorical,
    vtrace,
)

import running

N_EPISODES = 16  # per request, and so per gradient step
LEARNING_RATE, DISCOUNT = 1e-2, 0.99  # the learning rate decays linearly to zero
REWARD_SCALE = 0.01  # makes sums of discounted rewards about 1
VALUE_WEIGHT, ENTROPY_WEIGHT, MAX_GRADIENT_NORM = 1.0, 0.01, 1.0


class ActorCritic(nn.Module, Agent):
    n_noise = 1  # random numbers per step, for reproducible runs

    def __init__(self, n_inputs, n_actions):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_inputs, 64), nn.Tanh())
        self.actor, self.critic = nn.Linear(64, n_actions), nn.Linear(64, 1)

    def forward(self, observation):
        logits = self.actor(self.body(observation["frame"]))
        action, log_probability = sample_categorical(logits, observation["noise"])
        return {"action": action, "log_probability": log_probability}


def create_env(seed, env_id, n_envs=8, render_mode=None):
    return GymEnv([gym.make(env_id, render_mode=render_mode) for _ in range(n_envs)], seed)


def learn(agent, optimizer, episodes):
    """Take one gradient step."""
    features, next_features = agent.body(episodes["frame"]), agent.body(episodes["_frame"])
    logits, value = agent.actor(features), agent.critic(features)[..., 0]
    log_probability = categorical_log_probability(logits, episodes["action"])
    with torch.no_grad():
        # Probability of the action now, relative to that under the policy that chose it.
        log_ratio = log_probability - episodes["log_probability"]
        next_value = agent.critic(next_features)[..., 0]
        ends = episodes["_terminated"], episodes["_done"]
        targets = vtrace(
            log_ratio,
            episodes["_reward"] * REWARD_SCALE,
            value,
            next_value,
            *ends,
            DISCOUNT,
            lengths=episodes.lengths,
        )
    mask = episodes.mask()  # padding does not count
    advantage = targets.advantage / (targets.advantage[mask.bool()].std() + 1e-8)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    gain = log_probability * advantage + ENTROPY_WEIGHT * entropy
    error = (targets.target - value).square()
    loss = ((VALUE_WEIGHT * error - gain) * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()


def main():
    parser = running.Parser(__doc__)
    parser.add_argument("--env-id", default="CartPole-v1", help="with vector observations")
    parser.add_number("--n-updates", least=1, default=150, help="gradient steps")
    parser.add_number("--n-pending", least=1, default=3, help="requests in flight; 1 waits")
    parser.add_number("--n-workers", least=0, default=2, help="worker processes, 0 for none")
    parser.add_number("--seed", least=0, default=1, help="random seed")
    parser.add_argument("--video", metavar="FOLDER", help="for a video of the final policy")
    parser.add_argument("--checkpoint", default="impala.pt", help="with its curve as .png")
    parser.add_number("--checkpoint-interval", least=1, default=20, help="in updates")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    arguments = parser.parse_args()
    running.check_arguments(arguments)
    env = running.make_env(arguments, is_discrete=True)
    from tqdm import tqdm  # here, to keep --help fast

    torch.set_num_threads(1)  # the networks are small
    torch.manual_seed(arguments.seed)
    sizes = {"n_inputs": env.observation_space.shape[0], "n_actions": int(env.action_space.n)}
    agent = ActorCritic(**sizes)
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE)
    progress = {"n_updates": 0, "n_steps": 0, "steps": [], "returns": [], "ages": []}
    with (
        running.CtrlC() as ctrl_c,
        EpisodeBatcher(
            n_timesteps=env.spec.max_episode_steps,  # one slot per episode
            n_slots=(arguments.n_pending + 1) * N_EPISODES,
            create_agent=ActorCritic,
            agent_args=sizes,
            create_env=create_env,
            env_args={"env_id": arguments.env_id},
            n_workers=arguments.n_workers,
            seed=arguments.seed,
        ) as batcher,
    ):
        parts = {"agent": agent, "optimizer": optimizer, "batcher": batcher}
        if arguments.resume:  # requests in flight are collected again, with this policy
            progress = running.load_checkpoint(arguments.checkpoint, parts)
        total, n_before, start = arguments.n_updates, progress["n_steps"], time.perf_counter()
        requests = batcher.stream(n_episodes=N_EPISODES, n_pending=arguments.n_pending)
        bar = tqdm(desc="IMPALA", unit=" steps", initial=n_before)
        while progress["n_updates"] < total and not ctrl_c.is_pressed:
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - progress["n_updates"] / total)
            batcher.update(agent.state_dict())  # takes effect with the next request
            episodes = next(requests)
            learn(agent, optimizer, episodes)
            n_steps, returns = int(episodes.lengths.sum()), episode_returns(episodes).tolist()
            progress["n_updates"] += 1
            progress["n_steps"] += n_steps
            progress["steps"] += [progress["n_steps"]] * N_EPISODES
            progress["returns"] += returns
            progress["ages"] += episodes.info["policy_age"].tolist()
            bar.set_postfix({"return": f"{fmean(returns):.1f}"}, refresh=False)
            bar.update(n_steps)
            if progress["n_updates"] % arguments.checkpoint_interval == 0:
                running.save_checkpoint(arguments.checkpoint, parts, progress)
        elapsed_s = time.perf_counter() - start
        running.save_checkpoint(arguments.checkpoint, parts, progress)
        bar.close()

    returns, ages = progress["returns"], progress["ages"]
    assert max(ages) < arguments.n_pending
    print(f"average return of the last 100 episodes: {fmean(returns[-100:]):.1f}")
    print(f"policies were {fmean(ages):.1f} updates old on average, at most {max(ages)}")
    n_steps = progress["n_steps"]
    print(f"{n_steps} steps, {(n_steps - n_before) / elapsed_s:,.0f} per second")
    running.save_curve(progress, Path(arguments.checkpoint).with_suffix(".png"))
    if arguments.video:
        running.film(agent, create_env, arguments.video, {"env_id": arguments.env_id, "n_envs": 1})


if __name__ == "__main__":
    main()
