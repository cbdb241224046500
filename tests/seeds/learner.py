# The programs of the document of parallel environments, with their imports renamed. The document
# shows two methods of a class and fragments; omitted parts are added here and marked as such.

import gymnasium
import numpy as np
import torch

from rlpool import AGENT_ARCHS, collect_rollouts_parallel
from rlpool import make_env, make_parallel_env

# In learner.py init_env method:
class Learner:
    def init_env(self, env_type, env_name, max_rollouts_per_task,
                 num_train_tasks, num_eval_tasks, num_parallel_workers=4, **kwargs):

        # Create single env for evaluation
        self.eval_env = make_env(
            env_name,
            max_rollouts_per_task,
            seed=self.seed + 1,
            num_train_tasks=num_train_tasks,
            num_eval_tasks=num_eval_tasks,
            **kwargs,
        )

        # Create parallel envs for training
        if num_parallel_workers > 1:
            self.train_env_parallel = make_parallel_env(
                env_name,
                max_rollouts_per_task,
                num_workers=num_parallel_workers,
                seed=self.seed,
                num_train_tasks=num_train_tasks,
                num_eval_tasks=num_eval_tasks,
                **kwargs,
            )
        else:
            self.train_env_parallel = None

        # Also keep single env for compatibility
        self.train_env = make_env(
            env_name,
            max_rollouts_per_task,
            seed=self.seed,
            num_train_tasks=num_train_tasks,
            num_eval_tasks=num_eval_tasks,
            **kwargs,
        )

        # Added: attributes that collecting and the loop below need.
        self.train_tasks = list(range(num_train_tasks))
        self.max_trajectory_len = self.train_env.horizon_bamdp

# In learner.py train method:
    def train(self):
        self._start_training()

        # Initial pool collection
        if self.num_init_rollouts_pool > 0:
            logger.log("Collecting initial pool of data..")
            while self._n_env_steps_total < self.num_init_rollouts_pool * self.max_trajectory_len:
                # Use parallel collection if available
                self.collect_rollouts_parallel(
                    num_rollouts=1,
                    random_actions=True,
                    parallel_env=self.train_env_parallel,  # Will fallback to sequential if None
                )

        # Main training loop
        while self._n_env_steps_total < self.n_env_steps_total:
            # Collect data in parallel
            env_steps = self.collect_rollouts_parallel(
                num_rollouts=self.num_rollouts_per_iter,
                parallel_env=self.train_env_parallel,
            )

            # Update policy
            train_stats = self.update(...)
            self.log_train_stats(train_stats)

    # Added: everything below, which the document leaves to the learner's author.
    collect_rollouts_parallel = collect_rollouts_parallel

    def __init__(self, agent_arch, seed, num_init_rollouts_pool, num_rollouts_per_iter, n_env_steps_total):
        self.agent_arch, self.seed = agent_arch, seed
        self.agent = MemoryAgent() if agent_arch is AGENT_ARCHS.Memory else MarkovAgent()
        self.policy_storage = Storage()
        self.num_init_rollouts_pool = num_init_rollouts_pool
        self.num_rollouts_per_iter = num_rollouts_per_iter
        self.n_env_steps_total = n_env_steps_total
        self.stats = []

    def _start_training(self):
        self._n_env_steps_total = 0
        self._n_rollouts_total = 0

    def update(self, num_updates):
        return {"n_env_steps": self._n_env_steps_total}

    def log_train_stats(self, train_stats):
        self.stats.append(train_stats)


class logger:
    log = print


class AntDir(gymnasium.Env):
    """Replacement of MuJoCo's: a point that is rewarded for moving in the task's direction."""

    def __init__(self, num_train_tasks, num_eval_tasks):
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gymnasium.spaces.Box(-2.0, 2.0, (2,), np.float32)
        self.n_tasks = num_train_tasks + num_eval_tasks
        self.reset_task(0)

    def get_all_task_idx(self):
        return range(self.n_tasks)

    def get_current_task(self):
        return self.direction

    def reset_task(self, task):
        self.task = int(self.np_random.integers(self.n_tasks)) if task is None else task
        angle = 2 * np.pi * self.task / self.n_tasks
        self.direction = np.array([np.cos(angle), np.sin(angle)], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=2).astype(np.float32)
        return self.place.copy(), {}

    def step(self, action):
        self.place += action
        return self.place.copy(), float(action @ self.direction), False, False, {}


gymnasium.register(id="AntDir-v0", entry_point=AntDir, max_episode_steps=5)


class MarkovAgent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.policy = torch.nn.Linear(3, 2)

    @torch.no_grad()
    def act(self, obs, deterministic=False):
        return torch.tanh(self.policy(obs)), None, None, None


class MemoryAgent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.memory = torch.nn.GRU(6, 4)
        self.policy = torch.nn.Linear(4, 2)

    def get_initial_info(self):
        return torch.zeros(1, 2), torch.zeros(1, 1), torch.zeros(1, 1, 4)

    @torch.no_grad()
    def act(self, *args, **kwargs):
        return self._act(*args, **kwargs)

    def _act(self, prev_internal_state, prev_action, reward, obs, deterministic=False):
        seen = torch.cat([prev_action, reward, obs], -1)[None]
        memory, state = self.memory(seen, prev_internal_state)
        return (torch.tanh(self.policy(memory[0])), None, None, None), state


class Storage:
    def __init__(self):
        self.samples, self.episodes = [], []

    def add_sample(self, observation, action, reward, terminal, next_observation):
        self.samples.append((observation, action, reward, terminal, next_observation))

    def add_episode(self, observations, actions, rewards, terminals, next_observations):
        self.episodes.append((observations, actions, rewards, terminals, next_observations))


def phase_by_phase(self, parallel_env, n_steps):
    """The document's phases, one after another, with the names that its fragments use."""
    num_workers = parallel_env.num_envs
    results, tasks = [], []
    # In collect_rollouts_parallel:
    for worker_id in range(num_workers):
        task = self.train_tasks[np.random.randint(len(self.train_tasks))]
        parallel_env.remotes[worker_id].send(('reset', {'task': task}))
        tasks.append(task)
    obs = [parallel_env.remotes[worker_id].recv()[1] for worker_id in range(num_workers)]
    for _ in range(n_steps):
        # Send commands to ALL workers (non-blocking)
        for worker_id in range(num_workers):
            remote = parallel_env.remotes[worker_id]
            action = np.full(2, 0.5, np.float32)
            remote.send(('step', action))  # Returns immediately
        # Collect results after all workers finish
        for worker_id in range(num_workers):
            remote = parallel_env.remotes[worker_id]
            result = remote.recv()  # Blocks until this worker is done
            results.append((worker_id, obs[worker_id], result))
            obs[worker_id] = result[1][0]
    return tasks, results


if __name__ == "__main__":
    import sys

    # In your config YAML, with fewer tasks and other numbers:
    learner = Learner(
        AGENT_ARCHS(sys.argv[1]), seed=3, num_init_rollouts_pool=2, num_rollouts_per_iter=4,
        n_env_steps_total=100,
    )
    learner.init_env(
        env_type="meta", env_name="AntDir-v0", max_rollouts_per_task=2, num_train_tasks=5,
        num_eval_tasks=2, num_parallel_workers=int(sys.argv[2]),
    )
    learner.train()
    parallel_env = learner.train_env_parallel
    by_hand = phase_by_phase(learner, parallel_env, 3) if parallel_env is not None else None

    if parallel_env is not None:
        # explicit cleanup
        parallel_env.close()
    # Automatic cleanup on deletion
    del parallel_env
