"""How long an evaluation takes: ``evaluate`` beside Stable-Baselines3's ``evaluate_policy``.

    python benchmarks/evaluation.py [--episodes 200] [--steps 200] [--windows 5]

HalfCheetah-v5 in episodes of ``--steps`` steps, a policy 17-256-256-6, 2 workers of 16
environments. Turns alternate between ``evaluate`` with ``agent_rows=None`` (the base) and

- ``evaluate``: with as many rows as lanes, as by default
- ``sb3``: ``evaluate_policy`` with a ``SubprocVecEnv`` of two processes, if it is installed. Its
  vector environments have one environment per process.

A turn is a whole call, the start of the workers included. ``ratio`` says how many times as many
episodes per second as the base. Prints a JSON line for each.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import gymnasium
import torch
from torch import nn
from workloads import in_turns, parser_of, quartiles, show

from rlpool import Agent, DictTensor, GymEnv, evaluate

N_WORKERS, N_LANES = 2, 16


class Policy(nn.Module, Agent):
    """A deterministic policy, for both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(17, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 6)
        )

    def __call__(self, state: Any, observation: Any, *_: Any) -> Any:
        action = torch.tanh(self.layers(observation["frame"]))
        return DictTensor(), DictTensor({"action": action}), DictTensor()

    def predict(self, observation: Any, *_: Any, **__: Any) -> Any:
        """As models of Stable-Baselines3 do."""
        with torch.inference_mode():
            return torch.tanh(self.layers(torch.as_tensor(observation).float())).numpy(), None


def make_env(steps: int) -> gymnasium.Env[Any, Any]:
    return gymnasium.make("HalfCheetah-v5", max_episode_steps=steps)


def create_env(seed: int, steps: int) -> GymEnv:
    return GymEnv([make_env(steps) for _ in range(N_LANES)], seed)


def ours(agent: Policy, n_episodes: int, steps: int, rows: int | None, seconds: float) -> float:
    """Episodes per second of one evaluation."""
    start = time.perf_counter()
    options = {"env_args": {"steps": steps}, "n_workers": N_WORKERS, "agent_rows": rows}
    evaluate(agent, create_env, n_episodes, **options)
    return n_episodes / (time.perf_counter() - start)


def theirs(stack: ExitStack, agent: Policy, n_episodes: int, steps: int) -> Callable[..., float]:
    """Episodes per second of ``evaluate_policy``; its processes are started beforehand."""
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import SubprocVecEnv

    envs = SubprocVecEnv([partial(make_env, steps)] * N_WORKERS, start_method="spawn")
    stack.callback(envs.close)

    def window(seconds: float) -> float:
        start = time.perf_counter()
        evaluate_policy(agent, envs, n_episodes, warn=False)
        return n_episodes / (time.perf_counter() - start)

    return window


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--steps", type=int, default=200, help="of an episode")
    parser.add_argument("--windows", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    agent, size = Policy(), (args.episodes, args.steps)
    with ExitStack() as stack:
        turns = {"evaluate": partial(ours, agent, *size, N_LANES)}
        if importlib.util.find_spec("stable_baselines3"):
            turns["sb3"] = theirs(stack, agent, *size)
        base, others = in_turns(partial(ours, agent, *size, None), turns, args.windows, 0.0)
    rate = quartiles(base)["median"]
    show({"evaluation": "a row per lane", "episodes_per_s": round(rate, 2)}, "mujoco")
    for name, (rates, ratios) in others.items():
        row = {"evaluation": name, "ratio": quartiles(ratios)}
        show({**row, "episodes_per_s": round(quartiles(rates)["median"], 2)}, "stable-baselines3")


if __name__ == "__main__":
    main()
