"""Soft actor-critic (SAC) for environments with continuous actions.

You will learn

- how steps of the environments and gradient steps alternate, with a ``Pool`` in between,
- how an agent samples from a squashed normal distribution with its noise, as does the learner,
- how ``agent_info`` selects uniform actions, samples of the policy, or greedy actions.

References:
    Haarnoja et al. 2018, "Soft actor-critic algorithms and applications".
    Fujimoto, van Hoof and Meger 2018, "Addressing function approximation error in actor-critic
    methods" (the smaller value of two critics).
"""

import copy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from rlpool import Agent, Batcher, EpisodeStatistics, GymEnvInf, Pool, evaluate, sample_tanh_normal

import running


@dataclass(frozen=True)
class Hyperparameters:
    """CleanRL's for MuJoCo (https://docs.cleanrl.dev/rl-algorithms/sac)."""

    total_timesteps: int = 1_000_000
    actor_lr: float = 3e-4
    critic_lr: float = 1e-3  # also for the weight of the entropy
    discount: float = 0.99
    tau: float = 0.005  # step of the target critics towards the critics per gradient step
    batch_size: int = 256
    pool_size: int = 1_000_000
    learning_starts: int = 5_000  # in steps; until then, actions are random
    actor_period: int = 2  # after this many steps of the critics, the actor makes as many


# rl-baselines3-zoo's (hyperparams/sac.yml, and the defaults of Stable-Baselines3).
PENDULUM = Hyperparameters(20_000, actor_lr=1e-3, learning_starts=100, actor_period=1)
LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0  # of the normal distribution, before it is squashed
GREEDY, SAMPLED, UNIFORM = 0, 1, 2  # values of agent_info["exploration"]


def make_network(n_inputs, n_outputs):
    layers = nn.Linear(n_inputs, 256), nn.Linear(256, 256), nn.Linear(256, n_outputs)
    relu = nn.ReLU(inplace=True)  # its input is not needed again
    return nn.Sequential(layers[0], relu, layers[1], relu, layers[2])


class Actor(nn.Module, Agent):
    """A normal distribution of actions, squashed into (-1, 1)."""

    def __init__(self, n_inputs, n_actions):
        super().__init__()
        self.n_noise = n_actions  # random numbers per step, for reproducible runs
        self.model = make_network(n_inputs, 2 * n_actions)

    def distribution(self, frame):
        mean, log_std = self.model(frame).chunk(2, -1)
        return mean, LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (log_std.tanh() + 1)

    def forward(self, observation, agent_info):
        mean, log_std = self.distribution(observation["frame"])
        exploration, noise = agent_info["exploration"].unsqueeze(1), observation["noise"]
        action, _ = sample_tanh_normal(mean, log_std, noise)
        action = torch.where(exploration == GREEDY, mean.tanh(), action)
        action = torch.where(exploration == UNIFORM, 2 * noise - 1, action)
        return {"action": action}


def create_env(seed, env_id, n_envs=1, render_mode=None):
    # Actions are rescaled to [-1, 1]. "Inf" for infinite: environments restart automatically when
    # an episode ends.
    envs = [gym.make(env_id, render_mode=render_mode) for _ in range(n_envs)]
    one = np.float32(1.0)
    return GymEnvInf([gym.wrappers.RescaleAction(env, -one, one) for env in envs], seed)


class Learner(nn.Module):
    def __init__(self, n_inputs, n_actions, hyper):
        super().__init__()
        self.hyper, self.target_entropy = hyper, -n_actions
        self.actor = Actor(n_inputs, n_actions)
        self.critics = nn.ModuleList(make_network(n_inputs + n_actions, 1) for _ in range(2))
        self.target_critics = copy.deepcopy(self.critics)
        self.log_alpha = nn.Parameter(torch.zeros(()))  # of the weight of the entropy
        self.optimizers = {
            "actor": torch.optim.Adam(self.actor.parameters(), hyper.actor_lr, fused=True),
            "critics": torch.optim.Adam(self.critics.parameters(), hyper.critic_lr, fused=True),
            "log_alpha": torch.optim.Adam([self.log_alpha], hyper.critic_lr, fused=True),
        }

    def sample(self, frame):
        mean, log_std = self.actor.distribution(frame)
        return sample_tanh_normal(mean, log_std, torch.rand_like(mean))

    def targets_of(self, batch):
        """Return the targets for the values of the actions in a batch, ``[B]``."""
        with torch.no_grad():
            next_action, log_probability = self.sample(batch["_frame"])
            next_value = values_of(self.target_critics, batch["_frame"], next_action).amin(0)
            next_value -= self.log_alpha.exp() * log_probability
        # A truncated episode has a future, a terminated one does not.
        return batch["_reward"] + self.hyper.discount * next_value * ~batch["_terminated"]

    def learn(self, batch, n_steps):
        """Learn from a batch; returns the values to track."""
        values = values_of(self.critics, batch["frame"], batch["action"])
        loss = (values - self.targets_of(batch)).square().mean(1).sum()
        self.step("critics", loss)
        if n_steps % self.hyper.actor_period == 0:
            for _ in range(self.hyper.actor_period):
                self.learn_actor(batch["frame"])
        with torch.no_grad():
            # A moving average of the critics, of all parameters in one call.
            targets, critics = self.target_critics.parameters(), self.critics.parameters()
            torch._foreach_lerp_(list(targets), list(critics), self.hyper.tau)
        return {"loss": loss, "value": values.mean(), "alpha": self.log_alpha.exp()}

    def learn_actor(self, frame):
        action, log_probability = self.sample(frame)
        alpha, value = self.log_alpha.exp(), values_of(self.critics, frame, action).amin(0)
        self.step("actor", (alpha.detach() * log_probability - value).mean())
        # The weight of the entropy grows if it is below its target, and shrinks if it is above.
        excess = -log_probability.detach().mean() - self.target_entropy
        self.step("log_alpha", alpha * excess)

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
    parser.add_argument("--checkpoint", default="sac.pt", help="with its curve as .png")
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
    learner, episodes = Learner(**sizes, hyper=hyper), EpisodeStatistics()
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
            agent_args=sizes,
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
        bar = tqdm(desc="SAC", unit=" steps", total=total, initial=progress["n_steps"])
        while progress["n_steps"] + n_envs <= total and not ctrl_c.is_pressed:
            is_learning = progress["n_steps"] >= hyper.learning_starts
            batcher.update(learner.actor.state_dict())
            batcher.execute(agent_info={"exploration": SAMPLED if is_learning else UNIFORM})
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
