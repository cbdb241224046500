"""``Pool``: a replay pool of the most recent transitions.

You will learn

- how a pool runs environments in processes: those that choose their own actions, and those of
  Gymnasium with a policy,
- which transitions a pool keeps (``pool_size``, ``window_size``, ``clearing_freq`` with
  ``window_size_``),
- how to fill a pool from an ``EpisodeBatcher``,
- how to sample transitions, with or without priorities, n-step returns, and sequences,
- how to save and restore a pool.

References:
    Sutton 1988, "Learning to predict by the methods of temporal differences" (n steps).
    Schaul et al. 2016, "Prioritized experience replay".
    Kapturowski et al. 2019, "Recurrent experience replay in distributed reinforcement learning".
"""

import argparse
import random
import tempfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from rlpool import Agent, EpisodeBatcher, GymEnv, Pool, replay_agent


class Walker:
    """Walks on a line for ten steps and chooses its own actions."""

    def reset(self):
        # Position, velocity, time, last action. Python's, NumPy's and torch's generators are seeded
        # for every episode, so the same seed of the pool gives the same walks.
        self.state = np.array([random.gauss(0.0, 1.0), 0.0, 0.0, 0.0])
        return self.state, 0

    def step(self, action):
        # Gets the previous action, and returns the one that it takes now.
        action = 1 - action if random.random() < 0.3 else action
        # Updating the state in place is fine: a pool copies its inputs.
        self.state[1] += 0.1 if action == 1 else -0.1
        self.state[0] += self.state[1]
        self.state[2:] = self.state[2] + 1.0, action
        return action, self.state, -abs(self.state[0]), self.state[2] == 10.0


def environments_that_act():
    """``store()`` runs one episode in each environment, all in parallel."""
    with Pool(env=[Walker(), Walker()], n_workers=2, pool_size=50, seed=0) as pool:
        pool.store()
        state, action, next_state, reward, done = pool.get_pool()
        assert state.shape == next_state.shape == (20, 4)
        assert action.shape == reward.shape == done.shape == (20,)
        assert (action == next_state[:, 3]).all()
        # Each process has half of the pool. Transitions are added to a random half, more often to
        # the emptier one, so both hold steps of both processes.
        assert sum(pool.lengths) == len(pool) == 20
        for _ in range(9):
            pool.store()
        assert pool.lengths == [25, 25]  # a full half drops its oldest transitions
    return len(pool)  # the processes have ended, but transitions are kept


def what_is_kept():
    """A pool drops transitions one by one, down to a window, or at regular intervals."""

    def first_and_last_of_twelve(**window):
        pool = Pool(pool_size=10, **window)
        for number in range(12):
            pool([number], 0, [number + 1], 0.0, False)  # adds a single transition
        states = pool.get_pool()[0].ravel()
        assert (np.diff(states) == 1).all()
        return states[0], states[-1]

    assert first_and_last_of_twelve() == (2, 11)  # the oldest ones are dropped
    # When number 10 overflows, all but the newest three are dropped; then number 11 is added.
    assert first_and_last_of_twelve(window_size=3) == (8, 11)
    # After every fifth transition the oldest two are dropped, even if the pool is not full.
    assert first_and_last_of_twelve(clearing_freq=5, window_size_=2) == (4, 11)


def gymnasium_environments():
    """Actions of Gymnasium environments come from a policy, or are sampled."""

    def policy(state):
        return int(state[2] > 0)  # in the direction of the pole

    envs = [gym.make("CartPole-v1") for _ in range(2)]
    with Pool(envs, n_workers=2, pool_size=1_000, random=False, policy=policy, seed=0) as pool:
        pool.store()
        state, action, _, _, done = pool.get_pool()
        assert (action == (state[:, 2] > 0)).all()
        # With random=False each half holds the episodes of one process, in order.
        assert done.nonzero()[0].tolist() == [pool.lengths[0] - 1, len(pool) - 1]
    return len(pool)


class RecurrentAgent(nn.Module, Agent):
    """Explores randomly, with a recurrent network that computes the value of each action."""

    n_noise = 1

    def __init__(self):
        super().__init__()
        self.memory, self.head = nn.GRUCell(4, 8), nn.Linear(8, 2)

    def initial_state(self, agent_info, n):
        return {"hidden": torch.zeros(n, 8)}

    def forward(self, observation, state):
        hidden = self.memory(observation["frame"], state["hidden"])
        action = (2 * observation["noise"][:, 0]).long()
        return {"action": action, "values": self.head(hidden)}, {"hidden": hidden}


def create_env(seed):
    return GymEnv([gym.make("CartPole-v1") for _ in range(8)], seed, max_episode_steps=30)


def fill_from_batcher(pool, agent):
    """Add a batcher's episodes to the pool: every step becomes a transition."""
    with EpisodeBatcher(30, 64, RecurrentAgent, create_env=create_env, seed=0) as batcher:
        batcher.update(agent.state_dict())
        batcher.execute(n_episodes=64)
        trajectories = batcher.get()
        pool.extend(trajectories)
    assert len(pool) == trajectories.lengths.sum()
    # All keys are stored, unless Pool(keys=[...]) selects some. Values that are the same after one
    # step and before the next, such as "_frame" and "frame", are stored once.
    assert set(pool.specs) == set(trajectories.keys())
    return trajectories


def transitions(pool):
    """Sample transitions uniformly, with n-step returns."""
    batch = pool.sample(256)
    assert batch["frame"].shape == batch["_frame"].shape == (256, 4)
    # Three steps, or fewer at the end of an episode: the sum of their discounted rewards, "_frame"
    # after the last step, and the factor of its value in a learner's target.
    batch = pool.sample(256, n_step=3, discount=0.9)
    returns, factor = batch["n_step_return"], batch["n_step_discount"]
    goes_on = ~batch["_done"]
    assert (returns[goes_on] - (1.0 + 0.9 + 0.9**2)).abs().max() < 1e-5
    assert (factor[goes_on] - 0.9**3).abs().max() < 1e-5
    # A pole that fell has no future; a pole stopped by the time limit does.
    assert (factor[batch["_terminated"]] == 0).all()
    assert (factor[batch["_truncated"] & ~batch["_terminated"]] > 0).all()


def sequences(pool, agent):
    """Sample sequences for recurrent learners: consecutive steps, with the agent's state."""
    batch = pool.sample_sequences(32, length=8)
    assert batch["frame"].shape == (32, 8, 4)
    # A sequence ends with its episode: it never continues into another one.
    assert (batch["_done"].sum(1) <= 1).all()
    assert batch.temporal_multi_index(batch.lengths - 1)["_done"][batch.lengths < 8].all()
    # The state of the agent is stored too, so a replay can start in the middle of an episode. With
    # the parameters of the collection, the outputs are the same.
    values = replay_agent(agent, batch)["values"]
    torch.testing.assert_close(values, batch["values"], rtol=1e-4, atol=1e-5)
    return batch.lengths.float().mean().item()


def priorities(trajectories):
    """Sample surprising transitions more often, with smaller weights."""
    pool = Pool(pool_size=10_000, keys=["frame", "_frame", "_done"], seed=0, priority_exponent=1.0)
    pool.extend(trajectories)
    # A learner would pass its absolute errors. Here the ends of episodes get 10, all others 1.
    for batch in pool.batches(256, n_batches=500):
        pool.update_priorities(batch["index"], 1.0 + 9.0 * batch["_done"])
    batch = pool.sample(512, beta=1.0)
    expected = 10 * trajectories.n_elems() / (len(pool) + 9 * trajectories.n_elems())
    assert abs(batch["_done"].float().mean() - expected) < 0.1
    # A loss multiplied by "weight" has the same mean as under uniform sampling.
    torch.testing.assert_close(batch["weight"], torch.where(batch["_done"], 0.1, 1.0))
    return expected


def save_and_load(pool):
    """A pool that was saved and loaded continues with the same samples."""
    other = Pool(pool_size=pool.pool_size)  # with the same configuration
    with tempfile.TemporaryDirectory() as folder:
        torch.save(pool.state_dict(), Path(folder) / "pool.pt")
        other.load_state_dict(torch.load(Path(folder) / "pool.pt", weights_only=True))
    # The random generator is saved too, so both draw the same samples.
    for mine, its in zip(pool.batches(32, 3), other.batches(32, 3), strict=True):
        assert all(torch.equal(mine[key], its[key]) for key in mine)


def main():
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    torch.manual_seed(0)
    print(f"environments that act: {environments_that_act()} transitions")
    print(f"environments of Gymnasium: {gymnasium_environments()} transitions")
    what_is_kept()
    pool, agent = Pool(pool_size=10_000, seed=0), RecurrentAgent()
    trajectories = fill_from_batcher(pool, agent)
    print(f"from a batcher: {len(pool)} transitions of {pool.nbytes / len(pool):.0f} bytes")
    transitions(pool)
    print(f"sequences: {sequences(pool, agent):.1f} of 8 steps on average")
    print(f"priorities: {priorities(trajectories):.0%} ends of episodes")
    save_and_load(pool)
    print("saved, loaded: the same samples")


if __name__ == "__main__":
    main()
