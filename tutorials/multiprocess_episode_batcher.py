"""Many agents on many environments, in worker processes.

You will learn

- how ``env_info`` turns one environment class into many environments, and ``agent_info`` one
  agent into many,
- how ``execute`` requests episodes from worker processes and ``get`` returns them as tensors,
- the contents of these tensors: row *i* is the episode of row *i* of the infos,
- that ``reexecute`` collects new episodes with the same infos,
- that real environments (CartPole-v1) work the same way, with more episodes than slots.

Run it with ``python tutorials/multiprocess_episode_batcher.py``.
"""

import time

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete

from rlpool import Agent, EpisodeBatcher, GymEnv, episode_returns, sample_categorical

import running


class WindyLine(gym.Env):
    """Stay on a line of length 2. The environment's id determines the wind."""

    def __init__(self):
        self.observation_space = Dict({"x": Box(-2.0, 2.0, ()), "env_id": Discrete(1000)})
        self.action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        # One row of env_info arrives here as a dict of Python numbers, together with a seed.
        super().reset(seed=seed)
        self.env_id = 0 if options is None else options["env_id"]
        self.x = self.np_random.uniform(-0.5, 0.5)
        return self.observation(), {}

    def step(self, action):
        wind = 0.05 * (self.env_id % 5)
        self.x += (0.2 if action == 1 else -0.2) + wind
        return self.observation(), 1.0, abs(self.x) > 1.0, False, {}

    def observation(self):
        return {"x": np.float32(np.clip(self.x, -2.0, 2.0)), "env_id": self.env_id}


class LeftwardAgent(Agent):
    """Goes left with a probability that depends on its id."""

    # rlpool provides the random numbers, one per step, so the same seeds give the same episodes for
    # any number of processes.
    n_noise = 1

    def __init__(self, n_agents):
        self.n_agents = n_agents

    def initial_state(self, agent_info, n):
        return {"timestep": torch.zeros(n).long()}

    def __call__(self, observation, state, agent_info):
        ids = agent_info["agent_id"]
        left = (ids + 1) / (self.n_agents + 1)
        logits = torch.stack([left, 1.0 - left], dim=1).log()
        action, _ = sample_categorical(logits, observation["noise"])
        # The outputs of this step, and the state for the next one.
        outputs = {"action": action, "agent_id": ids, "left": left}
        return outputs, {"timestep": state["timestep"] + 1}


class CarefulAgent(LeftwardAgent):
    """For CartPole: pushes in the direction of the fall, and sometimes in the other one."""

    def __call__(self, observation, state, agent_info):
        outputs, next_state = super().__call__(observation, state, agent_info)
        angle, angular_velocity = observation["frame"][:, 2], observation["frame"][:, 3]
        careful = (angle + 0.5 * angular_velocity > 0).long()
        is_careless = observation["noise"][:, 0] < 0.5 * outputs["left"]
        outputs["action"] = torch.where(is_careless, 1 - careful, careful)
        return outputs, next_state


# These functions run in the workers. The seed is for anything that reset() cannot seed.


def create_env(seed, max_episode_steps, n_envs=4):
    return GymEnv([WindyLine() for _ in range(n_envs)], seed, max_episode_steps=max_episode_steps)


def create_cartpole(seed, n_envs=8):
    return GymEnv([gym.make("CartPole-v1") for _ in range(n_envs)], seed)


def get_with_progress(batcher, description):
    """Call ``batcher.get()`` with a progress bar."""
    from tqdm import tqdm  # here, to keep --help fast

    with tqdm(total=batcher.progress[1], desc=description, unit="episode") as bar:
        while (trajectories := batcher.get(blocking=False)) is None:
            bar.update(batcher.progress[0] - bar.n)
            time.sleep(0.02)
        bar.update(bar.total - bar.n)
    return trajectories


def average_return(trajectories):
    return episode_returns(trajectories).mean().item()


def main():
    parser = running.Parser(__doc__)
    parser.add_number("--n-episodes", least=1, default=32, help="on the windy line")
    parser.add_number("--n-cartpole-episodes", least=4, default=100)
    parser.add_number("--n-workers", "--n-threads", least=0, default=2, help="worker processes")
    arguments = parser.parse_args()
    n, n_workers = arguments.n_episodes, arguments.n_workers

    print(f"Each request is for {n} episodes, which {n_workers} worker processes run.")
    print("Row i of a result is the episode of agent i on environment i, run by any worker.")
    # One agent and one environment per episode.
    agent_info = {"agent_id": torch.arange(n)}
    env_info = {"env_id": torch.arange(n)}

    with EpisodeBatcher(
        n_timesteps=100,  # steps in a slot
        n_slots=64,  # bounds the memory
        n_workers=n_workers,
        seed=0,
        create_agent=LeftwardAgent,
        agent_args={"n_agents": n},
        create_env=create_env,
        env_args={"max_episode_steps": 100},
    ) as batcher:
        # The workers start collecting now; this process could do something else.
        batcher.execute(n_episodes=n, agent_info=agent_info, env_info=env_info)
        first = get_with_progress(batcher, "windy line")

        # Row i is the episode of row i of the infos.
        assert torch.equal(first["env_id"][:, 0], env_info["env_id"])
        assert torch.equal(first["agent_id"][:, 0], agent_info["agent_id"])
        # "reward" came with the observation, before the action; "_reward" is the reward of the
        # action: 1 per step here, and zero past the end of an episode.
        assert (first["reward"][:, 0] == 0.0).all()
        assert torch.equal(first["_reward"], first.mask())
        # Every row ends once, at its last step.
        assert torch.equal(first["_done"].sum(dim=1), torch.ones(n).long())
        assert first["_done"][torch.arange(n), first.lengths - 1].all()
        # The agent's state is stored too.
        assert torch.equal(first["timestep"][0, : first.lengths[0]], torch.arange(first.lengths[0]))

        # The same agents on the same environments again, but new episodes with new seeds.
        batcher.reexecute()
        second = get_with_progress(batcher, "once more")
        assert torch.equal(second["env_id"][:, 0], env_info["env_id"])
        assert not torch.equal(second.info["seed"], first.info["seed"])
    # Results outlive their batcher.
    print(f"windy line: average returns {average_return(first):.1f}, {average_return(second):.1f}")

    # On CartPole-v1, env_info holds options of its reset(): bounds of the random initial state.
    n = arguments.n_cartpole_episodes
    agent_info = {"agent_id": torch.arange(n)}
    width = torch.linspace(0.01, 0.2, n)
    env_info = {"low": -width, "high": width}
    with EpisodeBatcher(
        # Episodes are up to 500 steps long, and there are more episodes than slots: slots are
        # emptied and reused while get() waits.
        n_timesteps=100,
        n_slots=64,
        n_workers=n_workers,
        seed=42,
        create_agent=CarefulAgent,
        agent_args={"n_agents": n},
        create_env=create_cartpole,
    ) as batcher:
        batcher.execute(n_episodes=n, agent_info=agent_info, env_info=env_info)
        episodes = get_with_progress(batcher, "CartPole-v1")

    assert (episodes["frame"][:, 0].abs().amax(dim=1) <= width).all()
    print(episodes)
    print(f"CartPole-v1: {n} episodes, {episodes.lengths.sum()} steps")
    most, least = average_return(episodes[: n // 4]), average_return(episodes[-n // 4 :])
    print(f"average return of the most careful quarter {most:.1f}, of the least {least:.1f}")
    assert most > least
    print("As expected, row i has the ids i, and careful agents balance for longer.")
    print("Next: read docs/tour.md, or run tutorials/reinforce.py, which learns from episodes.")


if __name__ == "__main__":
    main()
