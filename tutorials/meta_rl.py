"""Learning to learn: an agent that finds out in one episode what it needs in the next.

You will learn

- what a task is: an environment that ``reset`` turns into one of many, without telling which,
- what a trial is: several episodes on one task (``make_env``, ``make_parallel_env``), through
  which an agent keeps its memory,
- how a ``Learner`` collects rollouts in worker processes, each on a task of its own, while the
  policy stays in this process: ``collect_rollouts_parallel``,
- what memory is worth, between an agent that has none and one that is told the task (the oracle).

A point robot starts in the middle of a half circle on which a goal is hidden, and is rewarded only
while it is there. It has two episodes. In the first, there is nothing better to do than to walk
along the half circle; in the second, an agent that remembers goes straight to the goal.

Run it with ``python tutorials/meta_rl.py``, or with ``--config tutorials/meta_rl.yaml``. On the
ant, which has to run in an unknown direction (``env_name: AntDir``), learning takes hours.

References:
    Duan et al. 2016, "RL²: fast reinforcement learning via slow reinforcement learning".
    Schulman et al. 2017, "Proximal policy optimization algorithms", equation 7.
"""

import argparse
import contextlib
import dataclasses
import json
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


class PointRobot(gym.Env):
    """A point in the plane, and a goal somewhere on the upper half of the unit circle.

    What makes it an environment for meta-learning are ``n_tasks``, ``reset_task``,
    ``get_current_task`` and ``get_all_task_idx``.
    """

    GOAL_RADIUS = 0.3
    STEP = 0.2

    def __init__(self, num_train_tasks=80, num_eval_tasks=40, max_episode_steps=15):
        self.observation_space = Box(-10.0, 10.0, (2,))  # where it is; not where the goal is
        self.action_space = Box(-self.STEP, self.STEP, (2,))
        self.max_episode_steps = max_episode_steps
        self.n_tasks = num_train_tasks + num_eval_tasks
        angles = np.random.default_rng(0).permutation(np.linspace(0.0, np.pi, self.n_tasks))
        self.goals = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
        self.goal = self.goals[0]

    def get_all_task_idx(self):
        return range(self.n_tasks)

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
        x, y = self.position - self.goal
        is_there = x * x + y * y < self.GOAL_RADIUS**2
        # The episode goes on at the goal; the trial's wrapper keeps the time.
        return self.position, float(is_there), False, False, {}


class AntDir(gym.Wrapper):
    """Gymnasium's ant, rewarded for its velocity in a direction that it is not told."""

    def __init__(self, num_train_tasks=80, num_eval_tasks=40, max_episode_steps=200):
        super().__init__(gym.make("Ant-v5", max_episode_steps=max_episode_steps))
        self.n_tasks = num_train_tasks + num_eval_tasks
        angles = 2.0 * np.pi / self.n_tasks * np.random.default_rng(0).permutation(self.n_tasks)
        self.directions = np.stack([np.cos(angles), np.sin(angles)], 1)
        self.direction = self.directions[0]

    def get_all_task_idx(self):
        return range(self.n_tasks)

    def reset_task(self, task=None):
        number = self.unwrapped.np_random.integers(self.n_tasks) if task is None else task
        self.direction = self.directions[number]

    def get_current_task(self):
        return self.direction

    def step(self, action):
        observation, _, terminated, truncated, info = self.env.step(action)
        velocity = np.array([info["x_velocity"], info["y_velocity"]])
        reward = velocity @ self.direction + info["reward_survive"] + info["reward_ctrl"]
        return observation, reward, terminated, truncated, info


BATCH_ROWS = 32  # of the policy: with or without processes the same, so that results are, too
LAMBDA = 0.95  # of the advantages: between one-step differences (0) and whole returns (1)
MAX_DIVERGENCE = 0.1  # between two policies, in nats
ENVS = {"PointRobot": PointRobot, "AntDir": AntDir}


class ActorCritic(nn.Module, Agent):
    """Normally distributed actions; with a memory it is an RL² agent."""

    def __init__(self, n_observed, n_actions, has_memory, n_hidden=64):
        super().__init__()
        self.n_noise = n_actions
        self.has_memory = has_memory
        # RL²: what the last action was and what it earned are part of what the agent sees.
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
        """The memory is empty when a rollout begins: that is a trial, not an episode."""
        if self.memory is None:
            return DictTensor()
        return DictTensor({"hidden": torch.zeros(n, self.memory.hidden_size)})

    def __call__(self, state, observation, agent_info=None, history=None):
        mean, _, hidden = self.evaluate(
            observation["frame"].unsqueeze(0),
            observation["last_action"].unsqueeze(0),
            observation["reward"].unsqueeze(0),
            state["hidden"].unsqueeze(0) if self.has_memory else None,
        )
        action, _ = sample_normal(mean[0], self.log_std, observation["noise"])
        new_state = DictTensor({"hidden": hidden[0]} if self.has_memory else {})
        return state, DictTensor({"action": action}), new_state

    def evaluate(self, frame, last_action, reward, hidden=None):
        """Means and values of T steps of B rollouts, everything ``[T, B, ...]``."""
        inputs = [frame, last_action, reward.unsqueeze(-1)] if self.has_memory else [frame]
        features = self.encoder(torch.cat(inputs, -1))
        if self.memory is not None:
            features, hidden = self.memory(features, hidden)
        return self.actor(features), self.critic(features).squeeze(-1), hidden


class Trials:
    """A storage: a learner calls ``add_episode`` once per rollout."""

    def __init__(self):
        self.rollouts = []

    def add_episode(self, observations, actions, rewards, terminals, next_observations):
        arrays = (observations, actions, rewards[:, 0], np.ones(len(rewards)))
        self.rollouts.append([torch.from_numpy(np.float32(array)) for array in arrays])

    def take_all(self):
        """Frames, actions, rewards and mask ``[T, B, ...]``, padded with zeros; forgets them."""
        columns = zip(*self.rollouts, strict=True)
        self.rollouts = []
        return [nn.utils.rnn.pad_sequence(list(column)) for column in columns]


class PPO(Learner):
    """Collects with ``Learner``'s method, and learns."""

    def __init__(self, config, seed, has_memory, train_env, parallel_env):
        torch.manual_seed(seed)
        self.config = config
        self.curve = []  # average returns of the episodes of a trial, iteration by iteration
        space, actions = train_env.observation_space, train_env.action_space
        super().__init__(
            ActorCritic(space.shape[0], actions.shape[0], has_memory),
            Trials(),
            train_env,
            range(config.num_train_tasks),
            # All are stored by rollout; one of them also decides by all of the rollout.
            AGENT_ARCHS.Memory if has_memory else AGENT_ARCHS.Memory_Markov,
            seed=seed,
            batch_rows=BATCH_ROWS,
        )
        self.parallel_env = parallel_env
        self.optimizer = torch.optim.Adam(self.agent.parameters(), config.learning_rate, eps=1e-5)

    def collect(self, num_rollouts):
        self.collect_rollouts_parallel(num_rollouts, parallel_env=self.parallel_env)
        return self.policy_storage.take_all()

    def train(self, until, n_iters, description):
        """Go on to iteration ``until`` of ``n_iters``."""
        progress = tqdm(range(len(self.curve), until), desc=description, unit="iteration")
        for iteration in progress:
            for group in self.optimizer.param_groups:
                group["lr"] = self.config.learning_rate * (1.0 - 0.8 * iteration / n_iters)
            frames, actions, rewards, mask = self.collect(self.config.num_rollouts_per_iter)
            returns = returns_of_episodes(frames, rewards, self.config.max_rollouts_per_task)
            self.curve.append(returns)
            progress.set_postfix(first=f"{returns[0]:.1f}", last=f"{returns[-1]:.1f}")
            self.update(frames, actions, rewards, mask)

    def update(self, frames, actions, rewards, mask):
        inputs = (frames, delayed(actions), delayed(rewards))
        with torch.no_grad():
            mean, values, _ = self.agent.evaluate(*inputs)
            old = normal_log_probability(mean, self.agent.log_std, actions)
            advantages, following = torch.zeros_like(rewards), torch.zeros(rewards.shape[1])
            next_values = torch.cat([values[1:] * mask[1:], torch.zeros_like(values[:1])])
            differences = rewards + self.config.discount * next_values - values
            # Over the ends of episodes, too: what the first one finds out pays in the second.
            for step in reversed(range(len(rewards))):
                following = differences[step] + self.config.discount * LAMBDA * following
                advantages[step] = following = following * mask[step]
            targets = values + advantages
            is_step = mask.bool()
            advantages = (advantages - advantages[is_step].mean()) / advantages[is_step].std()
        for rows in [r for _ in range(6) for r in torch.randperm(mask.shape[1]).chunk(4)]:
            mean, values, _ = self.agent.evaluate(*(tensor[:, rows] for tensor in inputs))
            new = normal_log_probability(mean, self.agent.log_std, actions[:, rows])
            ratio, advantage = (new - old[:, rows]).exp(), advantages[:, rows]
            divergence = ((ratio - 1.0 - ratio.log()) * mask[:, rows]).sum() / mask[:, rows].sum()
            if divergence > MAX_DIVERGENCE:
                return  # far enough from the policy that collected: further is how it forgets
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = 0.25 * (values - targets[:, rows]).square() - gain
            self.optimizer.zero_grad()
            ((loss * mask[:, rows]).sum() / mask[:, rows].sum()).backward()
            nn.utils.clip_grad_norm_(self.agent.parameters(), 0.5)
            self.optimizer.step()


def delayed(tensor):
    """Each step with the value of the step before, the first with zeros."""
    return torch.cat([torch.zeros_like(tensor[:1]), tensor[:-1]])


def returns_of_episodes(frames, rewards, n_episodes):
    """Average return of each episode of the trials. A flag in the frame says where one ended."""
    number = frames[..., -1].cumsum(0)
    return [(rewards * (number == e)).sum(0).mean().item() for e in range(n_episodes)]


@dataclasses.dataclass
class Config:
    """What can stand in the sections ``env`` and ``train`` of a configuration."""

    env_type: str = "meta"
    env_name: str = "PointRobot"
    max_rollouts_per_task: int = 2
    num_train_tasks: int = 80
    num_eval_tasks: int = 40
    num_parallel_workers: int | str = 2
    envs_per_worker: int = 16
    num_iters: int = 250
    num_iters_baselines: int = 120
    num_starts: int = 3
    num_rollouts_per_iter: int = 64
    learning_rate: float = 1e-3
    discount: float = 0.97
    seed: int = 0


def read_config(path):
    """Read a YAML file, for which PyYAML has to be installed, or a JSON file."""
    text = Path(path).read_text(encoding="utf-8")
    if Path(path).suffix == ".json":
        sections = json.loads(text)
    else:
        try:
            import yaml  # here, because nothing else needs it
        except ImportError:
            raise SystemExit("YAML needs PyYAML: pip install pyyaml. JSON does not.") from None

        sections = yaml.safe_load(text)
    values = {key: value for section in sections.values() for key, value in section.items()}
    unknown = sorted(values.keys() - {field.name for field in dataclasses.fields(Config)})
    if unknown:
        raise SystemExit(f"{path}: unknown keys {unknown}")
    return Config(**values)


@dataclasses.dataclass
class Result:
    """What became of an agent: while it learnt, and on tasks that it has never seen."""

    curve: np.ndarray  # [iteration, episode]
    returns: list[float]  # of each episode on unseen tasks
    paths: dict[int, torch.Tensor]  # task to frames [T, ...] of one trial


@contextlib.contextmanager
def environments(config, oracle):
    """Environments in this process, and in others if there are to be any."""
    env_id = ENVS.get(config.env_name, config.env_name)
    arguments = {
        "episodes_per_task": config.max_rollouts_per_task,
        "oracle": oracle,
        "num_train_tasks": config.num_train_tasks,
        "num_eval_tasks": config.num_eval_tasks,
    }
    with contextlib.ExitStack() as stack:
        parallel_env = None
        if config.num_parallel_workers == "auto" or config.num_parallel_workers > 1:
            parallel_env = make_parallel_env(
                env_id,
                num_workers=config.num_parallel_workers,
                envs_per_worker=config.envs_per_worker,
                seed=config.seed,
                **arguments,
            )
            stack.enter_context(parallel_env)
        # Without other processes everything runs here, with the same results to the last bit.
        n_envs = 1 if parallel_env is not None else config.envs_per_worker
        train_env = GymEnv([make_env(env_id, **arguments) for _ in range(n_envs)])
        stack.callback(train_env.close)
        yield train_env, parallel_env


def train(config, envs, name, n_iters, has_memory):
    # Some runs get stuck: the robot always searches on the same side. So we begin several, and go
    # on with the one that has come farthest.
    n_starts = config.num_starts if has_memory else 1
    started = []
    for start in range(n_starts):
        started.append(PPO(config, config.seed + start, has_memory, *envs))
        if n_starts > 1:
            until = max(1, n_iters * 3 // 10)
            started[-1].train(until, n_iters, f"{name} {start + 1}/{n_starts}")
    learner = max(started, key=lambda one: sum(returns[-1] for returns in one.curve[-10:]))
    learner.train(n_iters, n_iters, name)
    # Tasks are drawn from train_tasks. The others were never seen.
    n_tasks = config.num_train_tasks + config.num_eval_tasks
    learner.train_tasks = unseen = range(config.num_train_tasks, n_tasks)
    frames, _, rewards, _ = learner.collect(config.num_rollouts_per_iter)
    returns = returns_of_episodes(frames, rewards, config.max_rollouts_per_task)
    paths = {}
    for task in unseen[:3]:
        learner.train_tasks = [task]
        paths[task] = learner.collect(1)[0][:, 0]
    return Result(np.array(learner.curve), returns, paths)


def draw(results, path):
    from matplotlib.figure import Figure  # here, because the workers import this file as well

    figure = Figure(figsize=(12, 3.5), layout="constrained")
    left, *right = figure.subplots(1, 4, width_ratios=[3, 2, 2, 2])
    rl2 = results["RL²"]
    left.plot(rl2.curve[:, 0], label="RL², first episode")
    left.plot(rl2.curve[:, -1], label="RL², last episode")
    for name, style in (("oracle", "--"), ("Markov", ":")):
        left.axhline(results[name].returns[-1], color="gray", linestyle=style, label=name)
    left.set(xlabel="iteration", ylabel="average return of an episode")
    left.set_ylim(0.0, 1.4 * left.get_ylim()[1])
    left.legend(loc="upper left", ncols=2, fontsize="small")
    angles = np.linspace(0.0, np.pi)
    for axes, (task, frames) in zip(right, rl2.paths.items(), strict=True):
        number = frames[:, -1].cumsum(0)
        for episode in range(int(number[-1]) + 1):
            # The first frame after an end is where the last episode ended.
            x, y = frames[number == episode][episode > 0 :, :2].T
            axes.plot(x, y, ".-", label=f"episode {episode + 1}")
        axes.plot(np.cos(angles), np.sin(angles), color="gray", linestyle=":")
        goal = PointRobot().goals[task]
        axes.plot(*goal, "*", color="black", markersize=12)
        axes.set(aspect="equal", xlim=(-1.5, 1.5), ylim=(-0.8, 1.5), title=f"unseen task {task}")
        axes.legend(loc="lower center", ncols=2, fontsize="x-small")
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", help="a YAML or JSON file, see meta_rl.yaml")
    parser.add_argument("--env-name", help="PointRobot, AntDir, or an id for gymnasium.make")
    parser.add_argument("--num-iters", type=int, help="iterations of PPO")
    parser.add_argument(
        "--num-iters-baselines", type=int, help="the same for agents without memory"
    )
    parser.add_argument("--num-rollouts-per-iter", type=int, help="trials per iteration")
    parser.add_argument(
        "--num-parallel-workers",
        type=lambda text: text if text == "auto" else int(text),
        help="1 or less: no processes; auto: all cores but two",
    )
    parser.add_argument("--seed", type=int, help="another one is another run")
    parser.add_argument("--output", default="meta_rl.png", help="where the curves go")
    arguments = vars(parser.parse_args())
    path, output = arguments.pop("config"), arguments.pop("output")
    given = {key: value for key, value in arguments.items() if value is not None}
    config = dataclasses.replace(read_config(path) if path else Config(), **given)

    torch.set_num_threads(1)  # the workers need the other cores
    baselines = config.num_iters_baselines
    results = {}
    with environments(config, oracle=True) as envs:
        results["oracle"] = train(config, envs, "oracle", baselines, has_memory=False)
    with environments(config, oracle=False) as envs:
        results["Markov"] = train(config, envs, "Markov", baselines, has_memory=False)
        results["RL²"] = train(config, envs, "RL²", config.num_iters, has_memory=True)
    for name, result in results.items():
        returns = ", ".join(f"{value:.1f}" for value in result.returns)
        print(f"{name} on unseen tasks, average return of each episode: {returns}")
    if config.env_name == "PointRobot":
        draw(results, output)
        print(f"learning curves and paths: {output}")
    if config.env_name == "PointRobot" and config.num_iters >= Config.num_iters:
        first, last = results["RL²"].returns
        assert last > 1.25 * first, "what the first episode found out did not help the second"
        assert last > 2.0 * results["Markov"].returns[-1], "the memory did not help"
        if baselines >= Config.num_iters_baselines:
            assert last < 1.1 * max(results["oracle"].returns), "better than who knows the task?"


if __name__ == "__main__":
    main()
