# The example of the document of Pool, with its imports renamed and nothing else, except where a
# comment says so. (A second document repeats its text without the code.)

import numpy as np
import multiprocessing as mp
import math
import gymnasium as gym # Assuming gym environments
from rlpool import Pool

# Define a dummy environment for demonstration
class DummyEnv:
    def __init__(self):
        self.state = 0
        self.steps = 0

    def reset(self):
        self.state = np.random.rand(4)
        self.steps = 0
        print(f"Env {self.id}: Resetting. Initial state: {self.state}")
        return self.state, 0 # Return state and dummy action

    def step(self, action):
        self.state += np.random.rand(4) * 0.1
        reward = np.sum(self.state)
        self.steps += 1
        done = self.steps >= 10 # Example: episode ends after 10 steps
        print(f"Env {self.id}: Step {self.steps}. State: {self.state}, Reward: {reward}, Done: {done}")
        return np.random.randint(0,2), self.state, reward, done # Dummy action, next_state, reward, done

if __name__ == "__main__":
    num_processes = 2
    envs = [DummyEnv() for _ in range(num_processes)]
    # Added: the environments print their self.id, which the document never sets.
    for number, env in enumerate(envs):
        env.id = number
    total_pool_size = 50

    # Example with clearing_freq and window_size_
    # pool_manager = Pool(envs, num_processes, total_pool_size, clearing_freq=5, window_size_=2, random=False)

    # Example with window_size
    pool_manager = Pool(envs, num_processes, total_pool_size, window_size=5, random=True)

    print("Starting data collection...")

    pool_manager.store()

    # Now, get the collected data
    state, action, next_state, reward, done = pool_manager.get_pool()

    print(f"\nCollected States Shape: {state.shape}")
    print(f"Collected Actions Shape: {action.shape}")
    print(f"Collected Next States Shape: {next_state.shape}")
    print(f"Collected Rewards Shape: {reward.shape}")
    print(f"Collected Dones Shape: {done.shape}")

    print("\nSample of collected data:")
    if state.shape[0] > 0:
        print(f"First State: {state[0]}")
        print(f"First Action: {action[0]}")
        print(f"First Next State: {next_state[0]}")
        print(f"First Reward: {reward[0]}")
        print(f"First Done: {done[0]}")
    else:
        print("No data collected yet. Increase sleep time or episode length in DummyEnv.")
