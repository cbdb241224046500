"""Proximal policy optimisation (PPO) on a Ray cluster: two simulated nodes here, or a real one.

You will learn

- that ``RayEpisodeBatcher`` has the methods of ``EpisodeBatcher``, with workers on many machines,
- how to simulate a cluster on one machine (a real one only needs an address),
- that the cluster collects the same bits, even if one of its nodes is lost.

On a real cluster, with the same versions installed on every node (see docs/cluster.md):

    python tutorials/cluster.py --address auto --n-workers 8

Needs Ray: ``pip install "rlpool[ray]"``.

References:
    Schulman et al. 2017, "Proximal policy optimization algorithms".
    Schulman et al. 2016, "High-dimensional continuous control using generalized advantage
    estimation", equation 16.
"""

import time
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
)

import running

DISCOUNT = 0.99
LAMBDA = 0.95
CLIP = 0.2  # largest change of probability ratios
N_PASSES, N_MINIBATCHES = 4, 8  # over the steps of every epoch


class ActorCriticAgent(nn.Module, Agent):
    n_noise = 1

    def __init__(self, n_hidden=64):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, n_hidden), nn.Tanh(), nn.Linear(n_hidden, 2))
        self.critic = nn.Sequential(nn.Linear(4, n_hidden), nn.Tanh(), nn.Linear(n_hidden, 1))

    def forward(self, observation):
        logits = self.actor(observation["frame"])
        action, log_probability = sample_categorical(logits, observation["noise"])
        return {"action": action, "log_probability": log_probability}


# Both are sent to the nodes with the code of this file; their imports must be installed there.
def create_agent(seed=0):
    torch.manual_seed(seed)
    return ActorCriticAgent()


def create_env(seed, n_envs=16):
    return GymEnv([gym.make("CartPole-v1") for _ in range(n_envs)], seed)


def advantages_of(episodes, value, next_value):
    """Generalised advantage estimation; tensors are ``[B, T]``, zero past the end of episodes."""
    # A terminated episode has no future; an episode truncated by the time limit does.
    next_value = next_value * ~episodes["_terminated"]
    difference = (episodes["_reward"] + DISCOUNT * next_value - value) * episodes.mask()
    advantages = torch.zeros_like(difference)
    following = torch.zeros(episodes.n_elems())
    for step in reversed(range(episodes.n_timesteps())):
        following = difference[:, step] + DISCOUNT * LAMBDA * following
        advantages[:, step] = following
    return advantages


def learn(agent, optimizer, episodes):
    """Learn for one epoch of PPO."""
    with torch.no_grad():
        value = agent.critic(episodes["frame"]).squeeze(-1)
        advantages = advantages_of(episodes, value, agent.critic(episodes["_frame"]).squeeze(-1))
    # From here on, steps are treated independently of their episodes.
    is_step = episodes.mask().bool()
    keys = "frame", "action", "log_probability"
    parts = [*(episodes[key] for key in keys), advantages, advantages + value]
    parts = [part[is_step] for part in parts]
    for _ in range(N_PASSES):
        for rows in torch.randperm(len(parts[0])).chunk(N_MINIBATCHES):
            frame, action, log_probability_then, advantage, target = (part[rows] for part in parts)
            log_probability = categorical_log_probability(agent.actor(frame), action)
            ratio = (log_probability - log_probability_then).exp()
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            clipped = ratio.clamp(1.0 - CLIP, 1.0 + CLIP)
            gain = torch.min(ratio * advantage, clipped * advantage).mean()
            value_loss = (agent.critic(frame).squeeze(-1) - target).square().mean()
            optimizer.zero_grad()
            (0.1 * value_loss - gain).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


def train(agent, batcher, arguments):
    """Learn until the target is reached; returns the average return of every epoch."""
    from tqdm import tqdm  # here, to keep --help fast

    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    average_returns = []
    progress = tqdm(range(arguments.n_epochs), desc="PPO", unit="epoch")
    for _ in progress:
        # The parameters are put into the object store once for all nodes.
        batcher.update(agent.state_dict())
        batcher.execute(arguments.n_episodes)
        episodes = batcher.get()
        average_returns.append(episode_returns(episodes).mean().item())
        progress.set_postfix({"average return": f"{average_returns[-1]:.0f}"})
        if fmean(average_returns[-3:]) >= arguments.target:
            break
        learn(agent, optimizer, episodes)
    progress.close()
    return average_returns


def main():
    parser = running.Parser(__doc__)
    parser.add_argument("--address", help='of a running cluster, or "auto"; default: simulate one')
    parser.add_number("--n-nodes", least=1, default=2, help="nodes to simulate")
    parser.add_number(
        "--n-workers", "--n-threads", least=1, default=1, help="worker processes per node"
    )
    parser.add_number("--n-epochs", least=1, default=40, help="at most")
    parser.add_number("--n-episodes", least=1, default=64, help="episodes per epoch")
    parser.add_number("--seed", least=0, default=0, help="random seed")
    parser.add_argument("--target", type=float, default=400.0, help="average return to reach")
    arguments = parser.parse_args()
    try:  # here, to keep --help fast
        import ray
        from ray.cluster_utils import Cluster
    except ImportError:
        running.refuse('this tutorial needs Ray: pip install "rlpool[ray]"')
    from rlpool.cluster import RayEpisodeBatcher

    torch.set_num_threads(1)  # the workers need the other cores
    began = time.perf_counter()

    # One machine simulates several: each node has its own processes, object store and number of
    # processors. The first is the head of the cluster.
    cluster, others = None, []
    if arguments.address is None:
        size = {"num_cpus": arguments.n_workers, "object_store_memory": 200 * 2**20}
        cluster = Cluster(initialize_head=True, head_node_args=size)
        others = [cluster.add_node(**size) for _ in range(arguments.n_nodes - 1)]
    # Without log_to_driver=False, Ray prints the logs of the nodes here.
    ray.init(cluster.address if cluster else arguments.address, log_to_driver=False)

    common = {
        "n_timesteps": 500,
        "n_slots": 4 * arguments.n_episodes,
        "seed": arguments.seed,
        "create_agent": create_agent,
        "create_env": create_env,
    }
    agent = create_agent(arguments.seed)
    with RayEpisodeBatcher(**common, n_workers=arguments.n_workers) as batcher:
        average_returns = train(agent, batcher, arguments)

    # Run the trained policy on other episodes.
    n_episodes = 2 * arguments.n_episodes
    with RayEpisodeBatcher(**common, n_workers=arguments.n_workers) as batcher:
        batcher.update(agent.state_dict())
        batcher.execute(n_episodes)
        if others:
            # Like a power failure: its episodes run again on the remaining nodes.
            cluster.remove_node(others.pop(), allow_graceful=False)
        episodes = batcher.get()
    ray.shutdown()
    if cluster:
        cluster.shutdown()

    # The same episodes without a cluster are bitwise equal.
    with EpisodeBatcher(**common, n_workers=0) as batcher:
        batcher.update(agent.state_dict())
        batcher.execute(n_episodes)
        expected = batcher.get()
    assert all(torch.equal(episodes[key], expected[key]) for key in expected)
    print(f"{n_episodes} episodes of the cluster are bitwise equal to those of one machine")

    seconds = time.perf_counter() - began
    print(f"average return {fmean(average_returns[-3:]):.1f}", end=": ")
    print(f"{len(average_returns)} epochs, {seconds:.1f} s in total")
    if arguments.n_epochs >= 40:
        assert fmean(average_returns[-3:]) >= arguments.target, "did not reach the target"
        assert cluster is None or seconds < 120.0


if __name__ == "__main__":
    main()
