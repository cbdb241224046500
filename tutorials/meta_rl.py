"""Learning to learn (RL²): an agent that explores in one episode and exploits in the next.

You will learn

- tasks: ``reset`` turns one environment into one of many, which the agent does not know,
- trials: several episodes on one task, through which an agent keeps its memory,
- how a ``Learner`` collects rollouts in worker processes, each on its own task, while the policy
  runs in this process (``make_parallel_env``, ``collect_rollouts_parallel``),
- the benefit of memory: compare ``--agent rl2`` with ``markov``, which has none, and with
  ``oracle``, which sees the task.

A point robot starts in the middle of a half circle with a hidden goal, and is rewarded only at the
goal. It has two episodes. In the first, the best it can do is to walk along the half circle; in the
second, an agent with memory goes almost straight to the goal, and earns 9 to 12 of at most 13,
depending on the seed (docs/results.md).

References:
    Duan et al. 2016, "RL²: fast reinforcement learning via slow reinforcement learning".
    Schulman et al. 2017, "Proximal policy optimization algorithms", equation 7.
"""

from contextlib import nullcontext
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box
from torch import nn

from rlpool import (
    AGENT_ARCHS,
    Agent,
    GymEnv,
    Learner,
    gae,
    make_env,
    make_parallel_env,
    normal_log_probability,
    sample_normal,
)

import running

# Tuned on this environment. PPO as in ppo_continuous.py, over whole trials.
LEARNING_RATE = 1e-3  # initial value; decays linearly to a fifth
N_EPOCHS, N_MINIBATCHES = 6, 4
DISCOUNT, LAMBDA, CLIP = 0.97, 0.95, 0.2
VALUE_WEIGHT, MAX_GRADIENT_NORM = 0.25, 0.5
MAX_DIVERGENCE = 0.1  # of the learning policy from the collecting one, in nats
N_EPISODES = 2  # per trial


class PointRobot(gym.Env):
    """A point in the plane, and a goal somewhere on the upper half of the unit circle."""

    def __init__(self, n_tasks, max_episode_steps=15, render_mode=None):
        self.render_mode, self.metadata = render_mode, {"render_fps": 5}
        self.observation_space = Box(-10.0, 10.0, (2,))  # its position, but not the goal's
        self.action_space = Box(-0.2, 0.2, (2,))
        self.max_episode_steps = max_episode_steps
        # The interface of environments for meta-RL: n_tasks, reset_task and get_current_task.
        self.n_tasks = n_tasks
        angles = np.random.default_rng(0).permutation(np.linspace(0.0, np.pi, n_tasks))
        self.goals = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
        self.goal = self.goals[0]

    def reset_task(self, task=None):
        self.goal = self.goals[self.np_random.integers(self.n_tasks) if task is None else task]

    def get_current_task(self):
        return self.goal  # for the oracle

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = np.zeros(2, np.float32)
        return self.position, {}

    def step(self, action):
        self.position = self.position + action
        is_there = np.linalg.norm(self.position - self.goal) < 0.3
        # Reaching the goal does not end the episode; the trial's wrapper limits the time.
        return self.position, float(is_there), False, False, {}

    def render(self):
        """Draw the goal in green, and the robot in black."""
        picture = np.full((200, 200, 3), 255, np.uint8)
        for (x, y), size, colour in ((self.goal, 12, (90, 200, 90)), (self.position, 4, (0, 0, 0))):
            column, row = (np.clip([100 + 60 * x, 100 - 60 * y], 12, 188)).astype(int)
            picture[row - size : row + size, column - size : column + size] = colour
        return picture


def create_trial(seed, **env_args):
    return GymEnv([make_env(PointRobot, N_EPISODES, **env_args)], seed)


class ActorCritic(nn.Module, Agent):
    """Normally distributed actions; with a memory it is an RL² agent."""

    def __init__(self, n_observed, n_actions, has_memory, n_hidden=64):
        super().__init__()
        self.n_noise = n_actions  # random numbers per step, for reproducible runs
        self.has_memory = has_memory
        # RL²: the last action and its reward are inputs of the agent.
        n_inputs = n_observed + (n_actions + 1 if has_memory else 0)
        self.encoder = nn.Sequential(nn.Linear(n_inputs, n_hidden), nn.Tanh())
        self.memory = nn.GRU(n_hidden, n_hidden, batch_first=True) if has_memory else None
        self.actor = nn.Linear(n_hidden, n_actions)
        self.critic = nn.Linear(n_hidden, 1)
        self.log_std = nn.Parameter(torch.full((n_actions,), -0.2))
        nn.init.orthogonal_(self.actor.weight, 0.01)
        for weight in self.memory.parameters() if has_memory else ():
            if weight.ndim == 2:
                nn.init.orthogonal_(weight)

    def initial_state(self, agent_info, n):
        """Return an empty memory for the start of a rollout, which is a trial, not an episode."""
        return {"hidden": torch.zeros(n, self.critic.in_features)}

    def forward(self, observation, state):
        inputs = (observation["frame"], observation["last_action"], observation["reward"])
        inputs = (part.unsqueeze(1) for part in inputs)  # one step
        mean, _, hidden = self.evaluate(*inputs, state["hidden"].unsqueeze(0))
        action, _ = sample_normal(mean[:, 0], self.log_std, observation["noise"])
        return {"action": action}, {"hidden": hidden[0]}

    def evaluate(self, frame, last_action, reward, hidden=None):
        """Return means and values of T steps of B trials; all tensors are ``[B, T, ...]``."""
        inputs = [frame, last_action, reward.unsqueeze(-1)] if self.has_memory else [frame]
        features = self.encoder(torch.cat(inputs, -1))
        if self.has_memory:
            features, hidden = self.memory(features, hidden)
        return self.actor(features), self.critic(features).squeeze(-1), hidden


class Trials:
    """A storage: a learner calls ``add_episode`` once per rollout."""

    def __init__(self):
        self.trials = []

    def add_episode(self, observations, actions, rewards, terminals, next_observations):
        self.trials.append((observations, actions, rewards[:, 0]))

    def take_all(self):
        """Return frames, actions and rewards ``[B, T, ...]``; all trials have the same length."""
        columns, self.trials = zip(*self.trials, strict=True), []
        return [torch.from_numpy(np.stack(column)) for column in columns]


def learn(agent, optimizer, frames, actions, rewards):
    """Learn from whole trials; returns the losses of the last minibatch."""
    inputs = (frames, delayed(actions), delayed(rewards))
    with torch.no_grad():
        mean, values, _ = agent.evaluate(*inputs)
        old_log_probability = normal_log_probability(mean, agent.log_std, actions)
        # A trial ends with its last step. For the learner, it does not end with its first episode,
        # whose exploration pays off in the second.
        is_last = torch.zeros_like(rewards, dtype=torch.bool)
        is_last[:, -1] = True
        next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
        advantages = gae(rewards, values, next_values, is_last, is_last, DISCOUNT, LAMBDA)
        targets = values + advantages
        advantages = (advantages - advantages.mean()) / advantages.std()
    for _ in range(N_EPOCHS):
        for rows in torch.randperm(len(rewards)).chunk(N_MINIBATCHES):
            mean, values, _ = agent.evaluate(*(part[rows] for part in inputs))
            log_probability = normal_log_probability(mean, agent.log_std, actions[rows])
            ratio = (log_probability - old_log_probability[rows]).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            gain = torch.min(ratio * advantages[rows], clipped * advantages[rows])
            losses = {"policy": -gain.mean(), "value": (values - targets[rows]).square().mean()}
            if (ratio - 1.0 - ratio.log()).mean() > MAX_DIVERGENCE:
                return losses  # far enough from the collecting policy
            optimizer.zero_grad()
            (losses["policy"] + VALUE_WEIGHT * losses["value"]).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRADIENT_NORM)
            optimizer.step()
    return losses


def delayed(tensor):
    """Shift values by one step, with zeros in the first."""
    return torch.cat([torch.zeros_like(tensor[:, :1]), tensor[:, :-1]], 1)


def returns_of_episodes(frames, rewards):
    """Return the average return of each episode of the trials, whose ends are flagged in frames."""
    number = frames[..., -1].cumsum(1)
    return [(rewards * (number == i)).sum(1).mean().item() for i in range(N_EPISODES)]


def save_curve(progress, title, path):
    from matplotlib.figure import Figure  # here, because workers import this file too

    axes = (figure := Figure(layout="constrained")).subplots()
    for number, returns in enumerate(zip(*progress["returns"], strict=True), 1):
        axes.plot(progress["steps"], returns, label=f"episode {number} of a trial")
    axes.set(xlabel="environment steps", ylabel="average return", title=title)
    axes.legend()
    figure.savefig(path)


def parse_arguments():
    parser = running.Parser(__doc__)
    parser.add_argument("--agent", default="rl2", choices=["rl2", "markov", "oracle"])
    parser.add_number("--num-train-tasks", least=1, default=80)
    parser.add_number("--num-eval-tasks", least=1, default=40, help="not used for training")
    parser.add_number("--n-workers", "--num-parallel-workers", least=0, default=2, help="or 0")
    parser.add_number("--envs-per-worker", least=1, default=16)
    parser.add_number("--num-iters", least=1, default=250)
    parser.add_number("--num-rollouts-per-iter", least=1, default=64, help="trials")
    parser.add_number("--seed", least=0, default=0, help="random seed")
    parser.add_argument("--track", nargs="?", const="runs", help="folder for TensorBoard")
    parser.add_argument("--video", metavar="FOLDER", help="for a video of a final trial")
    parser.add_argument("--checkpoint", default="meta_rl.pt", help="with its curve as .png")
    parser.add_number("--checkpoint-interval", least=1, default=50, help="in iterations")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    arguments = parser.parse_args()
    running.check_arguments(arguments)
    return arguments


def main():
    arguments = parse_arguments()
    from tqdm import tqdm  # here, to keep --help fast

    torch.set_num_threads(1)  # the workers need the other cores
    torch.manual_seed(arguments.seed)
    n_train, n_eval = arguments.num_train_tasks, arguments.num_eval_tasks
    shared = {"n_tasks": n_train + n_eval, "oracle": arguments.agent == "oracle"}
    # Without worker processes everything runs here, with bitwise the same results.
    n_envs, n_workers = arguments.envs_per_worker, arguments.n_workers
    train_env = GymEnv([make_env(PointRobot, N_EPISODES, **shared) for _ in range(n_envs)])
    parallel_env = None
    if n_workers > 1:
        parallel_env = make_parallel_env(
            PointRobot, N_EPISODES, n_workers, envs_per_worker=n_envs, **shared
        )
    sizes = [train_env.observation_space.shape[0], train_env.action_space.shape[0]]
    agent = ActorCritic(*sizes, has_memory=arguments.agent == "rl2")
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)
    # Stored by rollout; collected in batches of 32 rows, with or without processes.
    storage, arch = Trials(), AGENT_ARCHS.Memory
    options = {"seed": arguments.seed, "batch_rows": 32}
    learner = Learner(agent, storage, train_env, range(n_train), arch, **options)
    parts = {"agent": agent, "optimizer": optimizer}
    progress = {"n_iters": 0, "steps": [], "returns": []}  # of each episode of the trials
    writer = None
    if arguments.resume:
        progress = running.load_checkpoint(arguments.checkpoint, parts)
        learner.n_env_steps_total = progress["steps"][-1] if progress["steps"] else 0
    if arguments.track:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(arguments.track)
    with running.CtrlC() as ctrl_c, parallel_env or nullcontext():
        bar = tqdm(desc=arguments.agent, unit=" steps", initial=learner.n_env_steps_total)
        while progress["n_iters"] < arguments.num_iters and not ctrl_c.is_pressed:
            share = progress["n_iters"] / arguments.num_iters
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1.0 - 0.8 * share)
            # Tasks and noise depend on the iteration: a resumed run continues with the same ones.
            learner.seed = [arguments.seed, progress["n_iters"]]
            n_steps = learner.collect_rollouts_parallel(
                arguments.num_rollouts_per_iter, parallel_env=parallel_env
            )
            frames, actions, rewards = storage.take_all()
            losses = learn(agent, optimizer, frames, actions, rewards)
            progress["n_iters"] += 1
            progress["steps"].append(learner.n_env_steps_total)
            progress["returns"].append(returns_of_episodes(frames, rewards))
            first, last = progress["returns"][-1][0], progress["returns"][-1][-1]
            bar.set_postfix(first=f"{first:.1f}", last=f"{last:.1f}", refresh=False)
            bar.update(n_steps)
            if writer is not None:
                for name, value in {**losses, "first": first, "last": last}.items():
                    writer.add_scalar(name, value, learner.n_env_steps_total)
            if progress["n_iters"] % arguments.checkpoint_interval == 0:
                running.save_checkpoint(arguments.checkpoint, parts, progress)
        bar.close()
        running.save_checkpoint(arguments.checkpoint, parts, progress)
        if not ctrl_c.is_pressed:
            learner.train_tasks = range(n_train, n_train + n_eval)
            learner.collect_rollouts_parallel(4 * n_eval, parallel_env=parallel_env)
    frames, _, rewards = storage.take_all()
    episodes = ", ".join(f"{value:.1f}" for value in returns_of_episodes(frames, rewards))
    print(f"{arguments.agent} on unseen tasks, average return of each episode: {episodes}")
    save_curve(progress, arguments.agent, Path(arguments.checkpoint).with_suffix(".png"))
    if arguments.video:
        running.film(agent, create_trial, arguments.video, shared)


if __name__ == "__main__":
    main()
