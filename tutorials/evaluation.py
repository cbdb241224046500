"""Evaluation: a reproducible comparison of two checkpoints of a policy on the same episodes.

You will learn

- how ``agent_info`` gives every episode its own parameters, so that a batcher evaluates a whole
  population of policies at once (here: random search, Mania et al. 2018),
- how ``evaluate`` runs exactly the episodes with the given seeds, with the same bits for any number
  of workers and environments,
- how to use ``summary``, ``compare``, ``plot`` and ``verify``.

References:
    Mania, Guy and Recht 2018, "Simple random search of static policies is competitive for
    reinforcement learning".
"""

import gymnasium as gym
import torch
from torch import nn

from rlpool import (
    EpisodeBatcher,
    Evaluation,
    GymEnv,
    compare,
    episode_returns,
    evaluate,
    plot,
    verify,
)

import running

ENV_ID, N_INPUTS, N_ACTIONS = "HalfCheetah-v5", 17, 6
LEARNING_RATE, NOISE = 0.05, 0.1  # noise: standard deviation of perturbed policies


class Linear(nn.Module):
    """Actions are linear in the observation; ``agent_info`` can hold weights for each row."""

    def __init__(self, weights=None):
        super().__init__()
        self.weights = nn.Parameter(
            torch.zeros(N_ACTIONS, N_INPUTS) if weights is None else weights
        )

    def forward(self, observation, agent_info):
        frame = observation["frame"]
        if agent_info is None:
            action = frame @ self.weights.T
        else:
            action = (agent_info["weights"] @ frame[:, :, None])[:, :, 0]
        return {"action": action.clamp(-1, 1)}


def create_env(seed, n_steps, n_envs=8):
    make = gym.make
    return GymEnv([make(ENV_ID, max_episode_steps=n_steps) for _ in range(n_envs)], seed)


def search(weights, batcher, n_directions):
    """Take one step of random search, towards the directions with higher returns."""
    directions = torch.randn(n_directions, N_ACTIONS, N_INPUTS)
    population = torch.cat([weights + NOISE * directions, weights - NOISE * directions])
    # Both policies of a direction run an episode with the same seed.
    seeds = torch.randint(2**31, (n_directions,)).repeat(2)
    batcher.execute(len(population), agent_info={"weights": population}, episode_seeds=seeds)
    plus, minus = episode_returns(batcher.get()).chunk(2)
    spread = torch.cat([plus, minus]).std() + 1e-8
    gradient = ((plus - minus)[:, None, None] * directions).mean(0) / spread
    return weights + LEARNING_RATE * gradient


def main():
    parser = running.Parser(__doc__)
    parser.add_number("--n-iterations", least=1, default=60, help="steps of random search")
    parser.add_number("--n-directions", least=1, default=16, help="per step")
    parser.add_number("--n-steps", least=1, default=250, help="per episode")
    parser.add_number("--n-episodes", least=1, default=50, help="per evaluation")
    parser.add_number("--n-workers", least=0, default=2, help="worker processes")
    parser.add_number("--seed", least=0, default=1, help="random seed")
    arguments = parser.parse_args()
    from tqdm import tqdm  # here, to keep --help fast

    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    env_args = {"n_steps": arguments.n_steps}

    # The policies after a fifth of the search, and at its end.
    weights = torch.zeros(N_ACTIONS, N_INPUTS)
    checkpoints = {"early": weights}
    with EpisodeBatcher(
        arguments.n_steps,
        2 * arguments.n_directions,
        create_agent=Linear,
        create_env=create_env,
        env_args=env_args,
        n_workers=arguments.n_workers,
        seed=arguments.seed,
    ) as batcher:
        for iteration in tqdm(range(arguments.n_iterations), "search"):
            weights = search(weights, batcher, arguments.n_directions)
            if iteration == arguments.n_iterations // 5:
                checkpoints["early"] = weights
    checkpoints["late"] = weights

    # The same episodes for both. They can be repeated from the record.
    for name, parameters in checkpoints.items():
        evaluation = evaluate(
            Linear(parameters),
            create_env,
            env_args=env_args,
            episode_seeds=range(arguments.n_episodes),
            n_workers=arguments.n_workers,
        )
        evaluation.save(f"{name}.json")
        print(f"{name}\n{evaluation.summary()}\n")

    # The intervals above include the variation between episodes; pairs cancel it.
    early, late = Evaluation.load("early.json"), Evaluation.load("late.json")
    print(f"late compared with early\n{compare(late, early)}\n")

    # The same bits without workers and with another number of environments.
    other_args = {**env_args, "n_envs": 3}
    print(verify(late, lambda: Linear(weights), create_env, env_args=other_args))

    plot(late, early, names=["late", "early"]).savefig("evaluation.png")
    print("evaluation.png shows returns, intervals and the differences of pairs")


if __name__ == "__main__":
    main()
