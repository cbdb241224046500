"""Double DQN on CartPole-v1: workers fill a pool while the learner samples from it.

You will learn

- how a ``Pool`` takes what a batcher returns and gives random transitions to learn from,
- how collecting and learning go on at the same time: the workers always have a next request, and
  ``get(blocking=False)`` asks between gradient steps whether one is finished,
- how rows of ``agent_info`` let some episodes of a request explore and others evaluate,
- why a time limit is not an end: only ``_terminated`` cuts off the value of what comes next,
- how to save the learner together with its pool, and to resume from there with ``--resume``.

References:
    Mnih et al. 2015, "Human-level control through deep reinforcement learning".
    Sutton 1988, "Learning to predict by the methods of temporal differences" (several steps).
    van Hasselt, Guez and Silver 2016, "Deep reinforcement learning with double Q-learning".
"""

import argparse
import time
from collections import deque
from pathlib import Path
from statistics import fmean

import gymnasium as gym
import torch
from torch import nn
from tqdm import tqdm

from rlpool import Agent, DictTensor, EpisodeBatcher, GymEnv, Pool

BATCH_SIZE, N_STEP, DISCOUNT = 64, 10, 0.99
# Instead of one epsilon that shrinks, each episode of a request has its own, from 0.5 to 0.016.
# The greedy ones show how good the policy is, and teach the learner as well.
EPSILONS = torch.cat([0.5 ** torch.linspace(1, 6, 12), torch.zeros(4)])


class EpsilonGreedyAgent(nn.Module, Agent):
    """Takes the action of the largest value, or any with probability epsilon."""

    n_noise = 2  # one number decides whether to explore, the other one where to

    def __init__(self):
        super().__init__()
        first, second = nn.Linear(4, 128), nn.Linear(128, 128)
        self.model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(128, 2))

    def __call__(self, state, observation, agent_info=None, history=None):
        values = self.model(observation["frame"])
        explore, where = observation["noise"].unbind(1)
        # Row i of agent_info belongs to episode i of the request, wherever that runs.
        is_random = explore < agent_info["epsilon"]
        action = torch.where(is_random, (where * values.shape[1]).long(), values.argmax(1))
        return DictTensor(), DictTensor({"action": action}), DictTensor()

    def update(self, info):
        self.load_state_dict(info)


def create_env(seed, n_envs=4):
    return GymEnv([gym.make("CartPole-v1") for _ in range(n_envs)], seed)


def targets_of(batch, agent, older):
    """What the values of the actions in a batch should be: ``[B]``."""
    with torch.no_grad():
        # Double: the learner says which action is best, its older copy how good that one is.
        best = agent.model(batch["_frame"]).argmax(1, keepdim=True)
        future = older.model(batch["_frame"]).gather(1, best).squeeze(1)
    # A pole that fell has no future. One that was stopped by the time limit is "_done" as well, but
    # would have kept standing: its value counts. So "n_step_discount" is the discount of the steps
    # that were made, and 0 only after "_terminated".
    return batch["n_step_return"] + batch["n_step_discount"] * future


def learn(batch, agent, older, optimizer):
    values = agent.model(batch["frame"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
    loss = nn.functional.huber_loss(values, targets_of(batch, agent, older))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def save_checkpoint(path, parts, progress):
    """Write all that a run consists of into one file, so that its parts always fit together."""
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**state, "progress": progress}, f"{path}.new")
    Path(f"{path}.new").replace(path)  # there is a complete file at any time


def load_checkpoint(path, parts):
    state = torch.load(path, weights_only=True)  # tensors and plain values: no code is run
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return state["progress"]


def save_curve(progress, target, path):
    from matplotlib.figure import Figure  # here, because the workers import this file as well

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(progress["steps"], progress["returns"], ".")
    axes.axhline(target, color="grey", linestyle=":")
    axes.set(xlabel="gradient steps", ylabel="greedy return", title="Double DQN on CartPole-v1")
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n-steps", type=int, default=30_000, help="gradient steps, at most")
    parser.add_argument("--n-threads", type=int, default=2, help="worker processes")
    parser.add_argument("--seed", type=int, default=0, help="another one is another run")
    parser.add_argument("--target", type=float, default=400.0, help="average return")
    parser.add_argument("--checkpoint", default="dqn.pt", help="where learner and pool are saved")
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint")
    parser.add_argument("--output", default="dqn.png", help="where the curve goes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the workers need the cores, too
    torch.manual_seed(arguments.seed)
    agent, older = EpsilonGreedyAgent(), EpsilonGreedyAgent()
    older.load_state_dict(agent.state_dict())
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3, fused=True)
    keys = ["frame", "action", "_frame", "_reward", "_done", "_terminated"]
    pool = Pool(pool_size=200_000, keys=keys, seed=arguments.seed)
    parts = {"agent": agent, "older": older, "optimizer": optimizer, "pool": pool}
    progress = {"n_steps": 0, "n_env_steps": 0, "steps": [], "returns": []}  # with the curve
    if arguments.resume:
        progress = load_checkpoint(arguments.checkpoint, parts)
        print(f"resumed after {progress['n_steps']} steps with {len(pool)} transitions")
    recent, began = deque(maxlen=5), time.perf_counter()

    with EpisodeBatcher(
        n_timesteps=500,
        n_slots=2 * len(EPSILONS) + 50,  # two requests and an evaluation
        n_threads=arguments.n_threads,
        seeds=arguments.seed + progress["n_env_steps"] * 2**32,  # resumed runs see other episodes
        create_agent=EpsilonGreedyAgent,
        create_env=create_env,
    ) as batcher:

        def request(epsilons):
            batcher.update(agent.state_dict())
            batcher.execute(len(epsilons), agent_info=DictTensor({"epsilon": epsilons}))

        def take(blocking):
            """Move finished episodes into the pool, if there are any."""
            episodes = batcher.get(blocking=blocking)
            if episodes is not None:
                request(EPSILONS)  # before anything else, to keep the workers busy
                pool.extend(episodes)
                returns = episodes["_reward"].sum(dim=1)
                recent.append(returns[episodes.info["agent_info/epsilon"] == 0].mean().item())
                progress["n_env_steps"] += int(episodes.lengths.sum())
                progress["steps"].append(progress["n_steps"])
                progress["returns"].append(recent[-1])

        def evaluate():
            """The average return of the current policy, without exploration."""
            request(torch.zeros(50))
            take(blocking=True)  # results come in order: first the two that are with the workers
            take(blocking=True)
            return batcher.get()["_reward"].sum(dim=1).mean().item()

        for _ in range(2):  # while one is fetched, the workers run the other
            request(EPSILONS)
        while len(pool) < 2_000:
            take(blocking=True)
        steps = range(progress["n_steps"] + 1, arguments.n_steps + 1)
        bar = tqdm(steps, "DQN", unit="step", initial=progress["n_steps"], total=arguments.n_steps)
        for step in bar:
            take(blocking=False)
            batch = pool.sample(BATCH_SIZE, n_step=N_STEP, discount=DISCOUNT)
            learn(batch, agent, older, optimizer)
            progress["n_steps"] = step
            if step % 25 == 0:
                older.load_state_dict(agent.state_dict())
                bar.set_postfix({"average return": f"{progress['returns'][-1]:.0f}"}, refresh=False)
            if step % 1_000 == 0:
                save_checkpoint(arguments.checkpoint, parts, progress)
            # A few good episodes may be luck, and come from older policies: look closely.
            if len(recent) == recent.maxlen and fmean(recent) >= arguments.target:
                recent.clear()
                average_return = evaluate()
                if average_return >= arguments.target:
                    break
        else:
            average_return = evaluate()
        bar.close()

    seconds = time.perf_counter() - began
    print(f"average return {average_return:.1f}: {progress['n_steps']} steps, {seconds:.1f} s")
    save_checkpoint(arguments.checkpoint, parts, progress)
    save_curve(progress, arguments.target, arguments.output)
    print(f"checkpoint: {arguments.checkpoint}, learning curve: {arguments.output}")
    if arguments.n_steps >= 30_000:
        assert average_return >= arguments.target, "did not reach the target"
        assert seconds < 300.0


if __name__ == "__main__":
    main()
