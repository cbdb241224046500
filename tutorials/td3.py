"""Twin delayed deep deterministic policy gradient (TD3) for continuous actions.

You will learn

- how a deterministic policy explores: with noise that its agent adds,
- how networks, pool and seeds are saved together, so that a run can be resumed,
- the differences from soft actor-critic: compare with sac.py.

References:
    Fujimoto, van Hoof and Meger 2018, "Addressing function approximation error in actor-critic
    methods".
    Lillicrap et al. 2016, "Continuous control with deep reinforcement learning".
"""

import copy
import math
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from rlpool import Agent, Batcher, EpisodeStatistics, GymEnvInf, Pool, evaluate, sample_normal

import running


@dataclass(frozen=True)
class Hyperparameters:
    """CleanRL's for MuJoCo (https://docs.cleanrl.dev/rl-algorithms/td3)."""

    total_timesteps: int = 1_000_000
    learning_rate: float = 3e-4
    discount: float = 0.99
    tau: float = 0.005  # step of the target networks per step of the actor
    batch_size: int = 256
    pool_size: int = 1_000_000
    learning_starts: int = 25_000  # in steps; until then, actions are random
    actor_period: int = 2  # steps of the critics for each step of the actor
    hidden_1: int = 256  # sizes of the hidden layers
    hidden_2: int = 256


# rl-baselines3-zoo's (hyperparams/td3.yml, and the defaults of Stable-Baselines3).
PENDULUM = Hyperparameters(
    total_timesteps=20_000,
    learning_rate=1e-3,
    discount=0.98,
    pool_size=200_000,
    learning_starts=10_000,
    hidden_1=400,
    hidden_2=300,
)
# Standard deviations of the noise of actions taken, and of actions in targets, whose noise is
# clipped.
EXPLORATION_NOISE, TARGET_NOISE, NOISE_CLIP = 0.1, 0.2, 0.5
GREEDY, NOISY, UNIFORM = 0, 1, 2  # values of agent_info["exploration"]


def make_network(n_inputs, hidden, n_outputs):
    sizes = (n_inputs, *hidden, n_outputs)
    layers = [nn.Linear(*ends) for ends in pairwise(sizes)]
    relu = nn.ReLU(inplace=True)  # its input is not needed again
    return nn.Sequential(layers[0], relu, layers[1], relu, layers[2])


class Actor(nn.Module, Agent):
    """One action per observation, optionally with noise."""

    def __init__(self, n_inputs, n_actions, hidden):
        super().__init__()
        self.n_noise = n_actions  # random numbers per step, for reproducible runs
        self.model = nn.Sequential(make_network(n_inputs, hidden, n_actions), nn.Tanh())

    def forward(self, observation, agent_info):
        action, noise = self.model(observation["frame"]), observation["noise"]
        exploration = agent_info["exploration"].unsqueeze(1)
        noisy, _ = sample_normal(action, torch.tensor(math.log(EXPLORATION_NOISE)), noise)
        action = torch.where(exploration == NOISY, noisy.clamp(-1, 1), action)
        action = torch.where(exploration == UNIFORM, 2 * noise - 1, action)
        return {"action": action}


def create_env(seed, env_id, n_envs=1, render_mode=None):
    # Actions are rescaled to [-1, 1]. "Inf" for infinite: environments restart automatically when
    # an episode ends.
    envs = [gym.make(env_id, render_mode=render_mode) for _ in range(n_envs)]
    one = np.float32(1.0)
    return GymEnvInf([gym.wrappers.RescaleAction(env, -one, one) for env in envs], seed)


class Learner(nn.Module):
    def __init__(self, n_inputs, n_actions, hidden, hyper):
        super().__init__()
        self.hyper = hyper
        self.actor = Actor(n_inputs, n_actions, hidden)
        self.critics = nn.ModuleList(
            make_network(n_inputs + n_actions, hidden, 1) for _ in range(2)
        )
        self.targets = copy.deepcopy(nn.ModuleList([self.actor, self.critics]))
        self.optimizers = {
            name: torch.optim.Adam(part.parameters(), hyper.learning_rate, fused=True)
            for name, part in (("actor", self.actor), ("critics", self.critics))
        }

    def targets_of(self, batch):
        """Return the targets for the values of the actions in a batch, ``[B]``."""
        target_actor, target_critics = self.targets
        with torch.no_grad():
            # Target policy smoothing: similar actions should have similar values.
            noise = TARGET_NOISE * torch.randn_like(batch["action"])
            noise = noise.clamp(-NOISE_CLIP, NOISE_CLIP)
            next_action = (target_actor.model(batch["_frame"]) + noise).clamp(-1, 1)
            next_value = values_of(target_critics, batch["_frame"], next_action).amin(0)
        # A truncated episode has a future, a terminated one does not.
        return batch["_reward"] + self.hyper.discount * next_value * ~batch["_terminated"]

    def learn(self, batch, n_steps):
        """Learn from a batch; returns the values to track."""
        values = values_of(self.critics, batch["frame"], batch["action"])
        loss = (values - self.targets_of(batch)).square().mean(1).sum()
        self.step("critics", loss)
        if n_steps % self.hyper.actor_period == 0:
            action = self.actor.model(batch["frame"])
            self.step("actor", -values_of(self.critics[:1], batch["frame"], action).mean())
            with torch.no_grad():  # a moving average, of all parameters in one call
                followed = [*self.actor.parameters(), *self.critics.parameters()]
                torch._foreach_lerp_(list(self.targets.parameters()), followed, self.hyper.tau)
        return {"loss": loss, "value": values.mean()}

    def step(self, name, loss):
        """Step some parameters, without computing the gradients of others."""
        optimizer = self.optimizers[name]
        optimizer.zero_grad()
        loss.backward(inputs=optimizer.param_groups[0]["params"])
        optimizer.step()


def values_of(critics, frame, action):
    inputs = torch.cat([frame, action], -1)
    return torch.stack([critic(inputs).squeeze(-1) for critic in critics])  # [2, B]


def main():
    parser = running.Parser(__doc__)
    parser.add_argument("--env-id", default="Pendulum-v1", help="with vector observations")
    parser.add_number(
        "--n-workers", "--n-threads", least=0, default=0, help="worker processes, 0 for none"
    )
    parser.add_number("--seed", least=0, default=1, help="random seed")
    parser.add_number("--evaluate", least=0, default=50, help="greedy episodes at the end")
    parser.add_argument("--track", nargs="?", const="runs", help="folder for TensorBoard")
    parser.add_argument("--video", metavar="FOLDER", help="for a video of the final policy")
    parser.add_argument("--checkpoint", default="td3.pt", help="with its curve as .png")
    parser.add_number("--checkpoint-interval", least=1, default=10_000, help="in steps")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    for field in fields(Hyperparameters):
        least = 1 if field.type is int and field.name != "learning_starts" else 0
        parser.add_number(f"--{field.name.replace('_', '-')}", least=least, type=field.type)
    arguments = parser.parse_args()
    running.check_arguments(arguments)
    env = running.make_env(arguments, is_discrete=False)
    from tqdm import tqdm  # here, to keep --help fast

    hyper = PENDULUM if arguments.env_id == "Pendulum-v1" else Hyperparameters()
    given = {field.name: getattr(arguments, field.name) for field in fields(hyper)}
    hyper = replace(hyper, **{name: value for name, value in given.items() if value is not None})
    torch.set_num_threads(1)  # the networks are small
    torch.manual_seed(arguments.seed)
    sizes = {"n_inputs": env.observation_space.shape[0], "n_actions": env.action_space.shape[0]}
    agent_args = {**sizes, "hidden": (hyper.hidden_1, hyper.hidden_2)}
    learner, episodes = Learner(**agent_args, hyper=hyper), EpisodeStatistics()
    keys = ["frame", "action", "_frame", "_reward", "_done", "_terminated"]
    pool = Pool(pool_size=hyper.pool_size, keys=keys, seed=arguments.seed)
    progress = {"n_steps": 0, "steps": [], "returns": []}  # one entry per episode
    writer = None
    if arguments.track:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(arguments.track)
    env_args = {"env_id": arguments.env_id}  # one environment, or one in each worker
    with (
        running.CtrlC() as ctrl_c,
        Batcher(
            n_timesteps=1,
            n_workers=arguments.n_workers,
            seed=arguments.seed,
            create_agent=Actor,
            agent_args=agent_args,
            create_env=create_env,
            env_args=env_args,
        ) as batcher,
    ):
        parts = {"learner": learner, "pool": pool, "batcher": batcher}
        parts |= {f"{name}_optimizer": part for name, part in learner.optimizers.items()}
        if arguments.resume:
            progress = running.load_checkpoint(arguments.checkpoint, parts)
        batcher.reset()  # a resumed run begins new episodes
        total, n_envs = hyper.total_timesteps, batcher.n_lanes
        bar = tqdm(desc="TD3", unit=" steps", total=total, initial=progress["n_steps"])
        while progress["n_steps"] + n_envs <= total and not ctrl_c.is_pressed:
            is_learning = progress["n_steps"] >= hyper.learning_starts
            batcher.update(learner.actor.state_dict())
            batcher.execute(agent_info={"exploration": NOISY if is_learning else UNIFORM})
            window = batcher.get()
            pool.extend(window)
            for _ in range(n_envs):  # a gradient step per step
                progress["n_steps"] += 1
                if is_learning:
                    batch = pool.sample(min(len(pool), hyper.batch_size))
                    results = learner.learn(batch, progress["n_steps"])
            bar.update(n_envs)
            if returns := episodes.update(window).returns.tolist():
                progress["steps"] += [progress["n_steps"]] * len(returns)
                progress["returns"] += returns
                average = fmean(progress["returns"][-10:])
                bar.set_postfix({"return": f"{average:.1f}"}, refresh=False)
                if writer is not None and is_learning:
                    for name, value in {**results, "return": average}.items():
                        writer.add_scalar(name, value, progress["n_steps"])
            if progress["n_steps"] % arguments.checkpoint_interval < n_envs:
                running.save_checkpoint(arguments.checkpoint, parts, progress)
        running.save_checkpoint(arguments.checkpoint, parts, progress)
        bar.close()
        if arguments.evaluate and not ctrl_c.is_pressed:
            greedy = {"env_args": {**env_args, "n_envs": 10}, "agent_info": {"exploration": GREEDY}}
            evaluation = evaluate(learner.actor, create_env, arguments.evaluate, **greedy)
            progress["evaluation"] = evaluation.returns.tolist()
            running.save_checkpoint(arguments.checkpoint, parts, progress)

    final, kind = progress["returns"][-100:] or [torch.nan], "the last 100"
    if arguments.evaluate:  # the final policy, without exploration
        final, kind = progress["evaluation"], f"{arguments.evaluate} greedy"
    print(f"average return of {kind} episodes: {fmean(final):.1f}")
    running.save_curve(progress, Path(arguments.checkpoint).with_suffix(".png"))
    if arguments.video:
        running.film(learner.actor, create_env, arguments.video, env_args, {"exploration": GREEDY})


if __name__ == "__main__":
    main()
