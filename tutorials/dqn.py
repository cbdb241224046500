"""Deep Q-learning (DQN) for environments with discrete actions.

You will learn

- how a ``Pool`` stores the windows of a ``Batcher`` and samples random transitions to learn from,
- how ``agent_info`` changes exploration from window to window, even within episodes,
- why a time limit is not an end: only ``_terminated`` excludes the value of the next state,
- how networks, pool and seeds are saved together, so that a run can be resumed.

References:
    Mnih et al. 2015, "Human-level control through deep reinforcement learning".
    Pardo et al. 2018, "Time limits in reinforcement learning".
"""

from pathlib import Path
from statistics import fmean

import gymnasium as gym
import torch
from torch import nn

from rlpool import Agent, Batcher, EpisodeStatistics, GymEnvInf, Pool, evaluate

import running

# The hyper-parameters of CleanRL's dqn.py (https://docs.cleanrl.dev/rl-algorithms/dqn), with whose
# published results docs/results.md compares this script.
LEARNING_RATE, DISCOUNT = 2.5e-4, 0.99
POOL_SIZE, BATCH_SIZE = 10_000, 128
N_STEPS = 10  # steps of an environment per window, and so per gradient step
LEARNING_STARTS = 10_000  # in environment steps, like the next one
TARGET_PERIOD = 500  # steps between copies to the target network
FIRST_EPSILON, LAST_EPSILON = 1.0, 0.05  # probability of a random action
EXPLORATION_FRACTION = 0.5  # fraction of all steps in which epsilon decays


class QNetwork(nn.Module, Agent):
    """Takes the action with the largest value, or with probability epsilon a random one."""

    n_noise = 2  # one number decides whether to explore, the other one chooses the action

    def __init__(self, n_inputs, n_actions):
        super().__init__()
        layers = nn.Linear(n_inputs, 120), nn.Linear(120, 84), nn.Linear(84, n_actions)
        self.model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])

    def forward(self, observation, agent_info):
        values = self.model(observation["frame"])
        explore, where = observation["noise"].unbind(1)
        is_random = explore < agent_info["epsilon"]
        action = torch.where(is_random, (where * values.shape[1]).long(), values.argmax(1))
        return {"action": action}


def create_env(seed, env_id, n_envs=1, render_mode=None):
    # "Inf" for infinite: environments restart automatically when an episode ends.
    return GymEnvInf([gym.make(env_id, render_mode=render_mode) for _ in range(n_envs)], seed)


def epsilon_after(n_steps, total):
    slope = (LAST_EPSILON - FIRST_EPSILON) / (EXPLORATION_FRACTION * total)
    return max(FIRST_EPSILON + slope * n_steps, LAST_EPSILON)


def targets_of(batch, target_network):
    """Return the targets for the values of the actions in a batch, ``[B]``."""
    with torch.no_grad():
        next_value = target_network.model(batch["_frame"]).amax(1)
    # A pole that fell has no future. A pole stopped by the time limit is also "_done", but would
    # have kept standing: its value counts.
    return batch["_reward"] + DISCOUNT * next_value * ~batch["_terminated"]


def learn(batch, q_network, target_network, optimizer):
    """Make one gradient step; returns the loss and the average value."""
    value = q_network.model(batch["frame"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
    loss = nn.functional.mse_loss(value, targets_of(batch, target_network))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {"loss": loss, "value": value.mean()}


def main():
    parser = running.Parser(__doc__)
    parser.add_argument("--env-id", default="CartPole-v1", help="with vector observations")
    parser.add_number("--total-timesteps", least=1, default=500_000)
    parser.add_number("--learning-starts", least=0, default=LEARNING_STARTS)
    parser.add_number(
        "--n-workers", "--n-threads", least=0, default=0, help="worker processes, 0 for none"
    )
    parser.add_number("--seed", least=0, default=1, help="random seed")
    parser.add_number("--evaluate", least=0, default=0, help="greedy episodes at the end")
    parser.add_argument("--track", nargs="?", const="runs", help="folder for TensorBoard")
    parser.add_argument("--video", metavar="FOLDER", help="for a video of the final policy")
    parser.add_argument("--checkpoint", default="dqn.pt", help="with its curve as .png")
    parser.add_number("--checkpoint-interval", least=1, default=50_000, help="in steps")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    arguments = parser.parse_args()
    running.check_arguments(arguments)
    env = running.make_env(arguments, is_discrete=True)
    from tqdm import tqdm  # here, to keep --help fast

    torch.set_num_threads(1)  # the networks are small
    torch.manual_seed(arguments.seed)
    sizes = {"n_inputs": env.observation_space.shape[0], "n_actions": int(env.action_space.n)}
    q_network, target_network = QNetwork(**sizes), QNetwork(**sizes)
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(q_network.parameters(), lr=LEARNING_RATE, fused=True)
    keys = ["frame", "action", "_frame", "_reward", "_done", "_terminated"]
    pool = Pool(pool_size=POOL_SIZE, keys=keys, seed=arguments.seed)
    episodes = EpisodeStatistics()
    progress = {"n_steps": 0, "steps": [], "returns": []}  # one entry per episode
    writer = None
    if arguments.track:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(arguments.track)
    env_args = {"env_id": arguments.env_id}  # one environment, or one in each worker
    with (
        running.CtrlC() as ctrl_c,
        Batcher(
            n_timesteps=N_STEPS,
            n_workers=arguments.n_workers,
            seed=arguments.seed,
            create_agent=QNetwork,
            agent_args=sizes,
            create_env=create_env,
            env_args=env_args,
        ) as batcher,
    ):
        parts = {"q_network": q_network, "target_network": target_network, "optimizer": optimizer}
        parts |= {"pool": pool, "batcher": batcher}
        if arguments.resume:
            progress = running.load_checkpoint(arguments.checkpoint, parts)
        batcher.reset()  # a resumed run begins new episodes
        total, window_size = arguments.total_timesteps, N_STEPS * batcher.n_lanes
        bar = tqdm(desc="DQN", unit=" steps", total=total, initial=progress["n_steps"])
        while progress["n_steps"] + window_size <= total and not ctrl_c.is_pressed:
            batcher.update(q_network.state_dict())
            batcher.execute(agent_info={"epsilon": epsilon_after(progress["n_steps"], total)})
            window = batcher.get()
            pool.extend(window)
            returns = episodes.update(window).returns.tolist()
            for _ in range(batcher.n_lanes):
                progress["n_steps"] += N_STEPS
                if progress["n_steps"] > arguments.learning_starts:
                    batch = pool.sample(min(len(pool), BATCH_SIZE))
                    results = learn(batch, q_network, target_network, optimizer)
                    if progress["n_steps"] % TARGET_PERIOD == 0:
                        target_network.load_state_dict(q_network.state_dict())
            bar.update(window_size)
            if returns:
                progress["steps"] += [progress["n_steps"]] * len(returns)
                progress["returns"] += returns
                average = fmean(progress["returns"][-100:])
                bar.set_postfix({"return": f"{average:.1f}"}, refresh=False)
                if writer is not None and progress["n_steps"] > arguments.learning_starts:
                    for name, value in {**results, "return": average}.items():
                        writer.add_scalar(name, value, progress["n_steps"])
            if progress["n_steps"] % arguments.checkpoint_interval < window_size:
                running.save_checkpoint(arguments.checkpoint, parts, progress)
        running.save_checkpoint(arguments.checkpoint, parts, progress)
        bar.close()
        if arguments.evaluate and not ctrl_c.is_pressed:
            greedy = {"env_args": {**env_args, "n_envs": 10}, "agent_info": {"epsilon": 0.0}}
            evaluation = evaluate(q_network, create_env, arguments.evaluate, **greedy)
            progress["evaluation"] = evaluation.returns.tolist()
            running.save_checkpoint(arguments.checkpoint, parts, progress)

    final, kind = progress["returns"][-100:] or [torch.nan], "the last 100"
    if arguments.evaluate:  # the final policy, without exploration
        final, kind = progress["evaluation"], f"{arguments.evaluate} greedy"
    print(f"average return of {kind} episodes: {fmean(final):.1f}")
    running.save_curve(progress, Path(arguments.checkpoint).with_suffix(".png"))
    if arguments.video:
        running.film(q_network, create_env, arguments.video, env_args, {"epsilon": 0.0})


if __name__ == "__main__":
    main()
