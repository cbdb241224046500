"""Learning to learn: an agent that finds out in one episode what it needs in the next.

You will learn

- what a task is: ``reset`` turns one environment into one of many, without saying which,
- what a trial is: several episodes on one task, through which an agent keeps its memory,
- how a ``Learner`` collects rollouts in worker processes, each on a task of its own, while the
  policy stays in this process (``make_parallel_env``, ``collect_rollouts_parallel``),
- what memory is worth, between an agent that has none and one that knows the task (the oracle).

A point robot starts in the middle of a half circle on which a goal is hidden, and is rewarded only
while it is there. It has two episodes. In the first, it can do no better than to walk along the
half circle; in the second, an agent that remembers goes straight to the goal.

Run it with ``python tutorials/meta_rl.py``, or with ``--config tutorials/meta_rl.yaml``.

References:
    Duan et al. 2016, "RL²: fast reinforcement learning via slow reinforcement learning".
    Schulman et al. 2017, "Proximal policy optimization algorithms", equation 7.
"""

import argparse
import contextlib
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box
from torch import nn
from tqdm import tqdm

from rlpool import (
    AGENT_ARCHS,
    Agent,
    DictTensor,
    GymEnv,
    Learner,
    make_env,
    make_parallel_env,
    normal_log_probability,
    sample_normal,
)

DISCOUNT, LAMBDA, LEARNING_RATE = 0.97, 0.95, 1e-3
MAX_DIVERGENCE = 0.1  # between the policy that collected and the one that learns, in nats


class PointRobot(gym.Env):
    """A point in the plane, and a goal somewhere on the upper half of the unit circle."""

    def __init__(self, n_tasks, max_episode_steps=15):
        self.observation_space = Box(-10.0, 10.0, (2,))  # where it is; not where the goal is
        self.action_space = Box(-0.2, 0.2, (2,))
        self.max_episode_steps = max_episode_steps
        # What makes an environment one for meta-RL: n_tasks, reset_task and get_current_task.
        self.n_tasks = n_tasks
        angles = np.random.default_rng(0).permutation(np.linspace(0.0, np.pi, n_tasks))
        self.goals = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
        self.goal = self.goals[0]

    def reset_task(self, task=None):
        self.goal = self.goals[self.np_random.integers(self.n_tasks) if task is None else task]

    def get_current_task(self):
        return self.goal  # what the oracle sees

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = np.zeros(2, np.float32)
        return self.position, {}

    def step(self, action):
        self.position = self.position + action
        is_there = np.linalg.norm(self.position - self.goal) < 0.3
        # Reaching the goal ends nothing; the trial's wrapper keeps the time.
        return self.position, float(is_there), False, False, {}


class ActorCritic(nn.Module, Agent):
    """Normally distributed actions; with a memory it is an RL² agent."""

    def __init__(self, n_observed, n_actions, has_memory, n_hidden=64):
        super().__init__()
        self.n_noise = n_actions
        self.has_memory = has_memory
        # RL²: the last action and what it earned are part of what the agent sees.
        n_inputs = n_observed + (n_actions + 1 if has_memory else 0)
        self.encoder = nn.Sequential(nn.Linear(n_inputs, n_hidden), nn.Tanh())
        self.memory = nn.GRU(n_hidden, n_hidden) if has_memory else None
        self.actor = nn.Linear(n_hidden, n_actions)
        self.critic = nn.Linear(n_hidden, 1)
        self.log_std = nn.Parameter(torch.full((n_actions,), -0.2))
        nn.init.orthogonal_(self.actor.weight, 0.01)
        for weight in self.memory.parameters() if has_memory else ():
            if weight.ndim == 2:
                nn.init.orthogonal_(weight)

    def initial_state(self, agent_info, n):
        """The memory is empty when a rollout begins, that is a trial, not an episode."""
        return DictTensor({"hidden": torch.zeros(n, self.critic.in_features)})

    def __call__(self, state, observation, agent_info=None, history=None):
        inputs = (observation["frame"], observation["last_action"], observation["reward"])
        mean, _, hidden = self.evaluate(*(part[None] for part in inputs), state["hidden"][None])
        action, _ = sample_normal(mean[0], self.log_std, observation["noise"])
        return state, DictTensor({"action": action}), DictTensor({"hidden": hidden[0]})

    def evaluate(self, frame, last_action, reward, hidden=None):
        """Means and values of T steps of B rollouts, everything ``[T, B, ...]``."""
        inputs = [frame, last_action, reward.unsqueeze(-1)] if self.has_memory else [frame]
        features = self.encoder(torch.cat(inputs, -1))
        if self.has_memory:
            features, hidden = self.memory(features, hidden)
        return self.actor(features), self.critic(features).squeeze(-1), hidden


class Trials:
    """A storage: a learner calls ``add_episode`` once per rollout."""

    def __init__(self):
        self.rollouts = []

    def add_episode(self, observations, actions, rewards, terminals, next_observations):
        arrays = (observations, actions, rewards[:, 0])
        self.rollouts.append([torch.from_numpy(array) for array in arrays])

    def take_all(self):
        """Frames, actions and rewards ``[T, B, ...]``; all trials have the same length here."""
        columns = zip(*self.rollouts, strict=True)
        self.rollouts = []
        return [torch.stack(column, 1) for column in columns]


class PPO(Learner):
    """Collects with ``Learner``'s method, and learns."""

    def __init__(self, arguments, has_memory, train_env, parallel_env):
        torch.manual_seed(arguments.seed)
        n_observed, n_actions = (
            train_env.observation_space.shape[0],
            train_env.action_space.shape[0],
        )
        super().__init__(
            ActorCritic(n_observed, n_actions, has_memory),
            Trials(),
            train_env,
            range(arguments.num_train_tasks),
            AGENT_ARCHS.Memory,  # stored rollout by rollout
            seed=arguments.seed,
            batch_rows=32,  # with or without processes the same, so that results are, too
        )
        self.parallel_env = parallel_env
        self.num_rollouts = arguments.num_rollouts_per_iter
        self.optimizer = torch.optim.Adam(self.agent.parameters(), LEARNING_RATE, eps=1e-5)

    def collect(self):
        self.collect_rollouts_parallel(self.num_rollouts, parallel_env=self.parallel_env)
        return self.policy_storage.take_all()

    def train(self, n_iters, description):
        """Returns the average returns of the episodes of a trial, iteration by iteration."""
        curve = []
        for iteration in (progress := tqdm(range(n_iters), desc=description, unit="iteration")):
            self.optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1.0 - 0.8 * iteration / n_iters)
            frames, actions, rewards = self.collect()
            curve.append(returns_of_episodes(frames, rewards))
            progress.set_postfix(first=f"{curve[-1][0]:.1f}", last=f"{curve[-1][-1]:.1f}")
            self.learn(frames, actions, rewards)
        return np.array(curve)

    def learn(self, frames, actions, rewards):
        inputs = (frames, delayed(actions), delayed(rewards))
        with torch.no_grad():
            mean, values, _ = self.agent.evaluate(*inputs)
            old = normal_log_probability(mean, self.agent.log_std, actions)
            next_values = torch.cat([values[1:], torch.zeros_like(values[:1])])
            differences = rewards + DISCOUNT * next_values - values
            advantages, following = torch.zeros_like(rewards), 0.0
            # Across the ends of episodes, too: what the first one finds out pays in the second.
            for step in reversed(range(len(rewards))):
                advantages[step] = following = differences[step] + DISCOUNT * LAMBDA * following
            targets = values + advantages
            advantages = (advantages - advantages.mean()) / advantages.std()
        for rows in [r for _ in range(6) for r in torch.randperm(rewards.shape[1]).chunk(4)]:
            mean, values, _ = self.agent.evaluate(*(tensor[:, rows] for tensor in inputs))
            new = normal_log_probability(mean, self.agent.log_std, actions[:, rows])
            ratio, advantage = (new - old[:, rows]).exp(), advantages[:, rows]
            if (ratio - 1.0 - ratio.log()).mean() > MAX_DIVERGENCE:
                return  # far enough from the policy that collected
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = (0.25 * (values - targets[:, rows]).square() - gain).mean()
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.agent.parameters(), 0.5)
            self.optimizer.step()


def delayed(tensor):
    """Each step with the value of the step before, the first with zeros."""
    return torch.cat([torch.zeros_like(tensor[:1]), tensor[:-1]])


def returns_of_episodes(frames, rewards):
    """Average return of each episode of the trials. A flag in the frame says where one ended."""
    number = frames[..., -1].cumsum(0)
    n_episodes = int(number.max()) + 1
    return [(rewards * (number == e)).sum(0).mean().item() for e in range(n_episodes)]


@contextlib.contextmanager
def environments(arguments, oracle):
    """Environments in this process, and in others if there are to be any."""
    n_tasks = arguments.num_train_tasks + arguments.num_eval_tasks
    shared = {"episodes_per_task": 2, "oracle": oracle, "n_tasks": n_tasks}
    with contextlib.ExitStack() as stack:
        n_envs, parallel_env = arguments.envs_per_worker, None
        if arguments.num_parallel_workers > 1:
            n_workers = arguments.num_parallel_workers
            parallel_env = make_parallel_env(
                PointRobot, num_workers=n_workers, envs_per_worker=n_envs, **shared
            )
            stack.enter_context(parallel_env)
        # Without other processes everything runs here, with the same results to the last bit.
        train_env = GymEnv([make_env(PointRobot, **shared) for _ in range(n_envs)])
        yield train_env, parallel_env


def train(arguments, name, has_memory=False, oracle=False):
    """Train an agent; returns its curve and its average returns on tasks that it never saw."""
    n_iters = arguments.num_iters if has_memory else arguments.num_iters // 2
    with environments(arguments, oracle) as envs:
        learner = PPO(arguments, has_memory, *envs)
        curve = learner.train(n_iters, name)
        n_seen = arguments.num_train_tasks
        learner.train_tasks = range(n_seen, n_seen + arguments.num_eval_tasks)
        frames, _, rewards = learner.collect()
    returns = returns_of_episodes(frames, rewards)
    episodes = ", ".join(f"{value:.1f}" for value in returns)
    print(f"{name} on unseen tasks, average return of each episode: {episodes}")
    return curve, returns


def draw(curve, baselines, path):
    from matplotlib.figure import Figure  # here, because the workers import this file as well

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(curve[:, 0], label="RL², first episode")
    axes.plot(curve[:, -1], label="RL², last episode")
    for (name, value), style in zip(baselines.items(), ("--", ":"), strict=True):
        axes.axhline(value, color="gray", linestyle=style, label=name)
    axes.set(xlabel="iteration", ylabel="average return of an episode")
    axes.legend()
    figure.savefig(path)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", help="a YAML file with sections of these arguments")
    parser.add_argument("--num-train-tasks", type=int, default=80)
    parser.add_argument("--num-eval-tasks", type=int, default=40, help="never trained on")
    parser.add_argument("--num-parallel-workers", type=int, default=2, help="1 or less: none")
    parser.add_argument("--envs-per-worker", type=int, default=16)
    parser.add_argument("--num-iters", type=int, default=250, help="half as many without memory")
    parser.add_argument("--num-rollouts-per-iter", type=int, default=64, help="trials")
    parser.add_argument("--seed", type=int, default=0, help="another one is another run")
    parser.add_argument("--output", default="meta_rl.png", help="where the curves go")
    arguments = parser.parse_args()
    if arguments.config:
        import yaml  # here, because nothing else needs it

        sections = yaml.safe_load(Path(arguments.config).read_text(encoding="utf-8")).values()
        values = {key: value for section in sections for key, value in section.items()}
        if unknown := sorted(values.keys() - vars(arguments).keys()):
            raise SystemExit(f"{arguments.config}: unknown keys {unknown}")
        parser.set_defaults(**values)  # what is on the command line comes first
        arguments = parser.parse_args()
    return arguments


def main():
    arguments = parse_arguments()
    torch.set_num_threads(1)  # the workers need the other cores
    _, oracle = train(arguments, "oracle", oracle=True)
    _, markov = train(arguments, "Markov")
    curve, (first, last) = train(arguments, "RL²", has_memory=True)
    draw(curve, {"oracle": oracle[-1], "Markov": markov[-1]}, arguments.output)
    print(f"learning curves: {arguments.output}")
    if arguments.num_iters >= 250:
        assert last > 1.25 * first, "what the first episode found out did not help the second"
        assert last > 2.0 * markov[-1], "the memory did not help"
        assert last < 1.1 * max(oracle), "better than an agent that knows the task?"


if __name__ == "__main__":
    main()
