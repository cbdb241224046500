"""How fast a whole training loop is: proximal policy optimisation on CartPole-v1.

    python benchmarks/ppo_loop.py [--lanes 16] [--windows 7] [--seconds 4] [--cleanrl ppo.py]

Windows of 128 steps of all lanes, then 4 epochs of 4 minibatches; networks of 4-64-64, torch on
one thread. The contenders take turns, and count the steps that they have learned from:

- ``no workers``: a ``Batcher`` with ``n_threads=0``
- ``2 workers``: half of the lanes in each
- ``2 workers, ahead``: the next window is collected while this one is learned from, so that its
  actions come from the parameters before
- ``Stable-Baselines3``: its ``PPO`` over a ``DummyVecEnv``, if it is installed
- ``CleanRL``: its script ``ppo.py``, if a path is given, run once, with the speed that it prints

``ratio`` compares each of them with the windows of ``no workers`` around it. Prints a JSON line per
contender.

Reference:
    Schulman et al. 2017, "Proximal policy optimization algorithms", https://arxiv.org/abs/1707.06347;
    Schulman et al. 2016, "High-dimensional continuous control using generalized advantage
    estimation", https://arxiv.org/abs/1506.02438.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import gymnasium
import torch
from torch import nn
from workloads import SEED, Window, in_turns, make_cartpole, note, parser_of, quartiles, show

from rlpool import (
    Agent,
    Batcher,
    DictTensor,
    GymEnvInf,
    categorical_log_probability,
    sample_categorical,
)

N_STEPS, N_EPOCHS, N_MINIBATCHES = 128, 4, 4
DISCOUNT, LAMBDA, CLIP, VALUE_WEIGHT, ENTROPY_WEIGHT, MAX_NORM = 0.99, 0.95, 0.2, 0.5, 0.01, 0.5


class ActorCritic(nn.Module, Agent):
    """Chooses actions and estimates values."""

    n_noise = 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.actor, self.critic = make_network(2), make_network(1)

    def __call__(self, state, observation, agent_info=None, history=None):  # type: ignore[no-untyped-def]
        logits = self.actor(observation["frame"])
        action, log_probability = sample_categorical(logits, observation["noise"])
        output = {"action": action, "log_probability": log_probability}
        return DictTensor(), DictTensor(output), DictTensor()

    def update(self, info: Any) -> None:
        self.load_state_dict(info)


def make_network(n_outputs: int) -> nn.Sequential:
    hidden = nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()
    return nn.Sequential(*hidden, nn.Linear(64, n_outputs))


def create_env(n_lanes: int, seed: int | None = None) -> GymEnvInf:
    return GymEnvInf([make_cartpole() for _ in range(n_lanes)], seed)


class Learner:
    """Learns from windows of lanes that restart."""

    def __init__(self) -> None:
        self.policy = ActorCritic()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=2.5e-4, eps=1e-5)

    def learn(self, window: Any) -> None:
        """Learn from one window, ``[n_lanes, N_STEPS]``."""
        frames, actions = window["frame"], window["action"]
        with torch.no_grad():
            values, after = (self.policy.critic(x).squeeze(-1) for x in (frames, window["_frame"]))
            done, after = window["_done"].float(), after * ~window["_terminated"]
            errors = window["_reward"] + DISCOUNT * after - values
            advantages, running = torch.zeros_like(values), torch.zeros(len(values))
            for step in reversed(range(values.shape[1])):
                running = errors[:, step] + DISCOUNT * LAMBDA * (1 - done[:, step]) * running
                advantages[:, step] = running
        parts = frames, actions, window["log_probability"], advantages, advantages + values
        flat = [part.flatten(0, 1) for part in parts]
        for _ in range(N_EPOCHS):
            for rows in torch.randperm(actions.numel()).chunk(N_MINIBATCHES):
                self._step(*(part[rows] for part in flat))

    def _step(
        self,
        frames: torch.Tensor,
        actions: torch.Tensor,
        before: torch.Tensor,
        advantages: torch.Tensor,
        returns: torch.Tensor,
    ) -> None:
        logits = self.policy.actor(frames)
        ratio = (categorical_log_probability(logits, actions) - before).exp()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        gain = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
        value_loss = (self.policy.critic(frames).squeeze(-1) - returns).square().mean()
        entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
        loss = -gain + VALUE_WEIGHT * value_loss - ENTROPY_WEIGHT * entropy
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), MAX_NORM)
        self.optimizer.step()


class Loop:
    """A training loop over a batcher.

    Args:
        n_lanes: Lanes of all workers together.
        n_workers: Worker processes, 0 for none.
        is_ahead: Whether the next window is requested before this one is learned from.
    """

    def __init__(self, n_lanes: int, n_workers: int, is_ahead: bool = False) -> None:
        self._n_lanes, self._is_ahead = n_lanes, is_ahead
        self._learner = Learner()
        self._batcher = Batcher(
            n_timesteps=N_STEPS,
            create_agent=ActorCritic,
            create_env=create_env,
            env_args={"n_lanes": n_lanes // (n_workers or 1)},
            n_threads=n_workers,
            seeds=SEED,
        )
        self._batcher.reset()
        self.close = self._batcher.close

    def window(self, seconds: float) -> float:
        """Train for at least this long; returns the steps learned from per second."""
        n_steps = 0
        start = now = time.perf_counter()
        self._request()
        while now - start < seconds:
            collected = self._batcher.get()
            if self._is_ahead:
                self._request()
            self._learner.learn(collected)
            if not self._is_ahead:
                self._request()
            n_steps += N_STEPS * self._n_lanes
            now = time.perf_counter()
        self._batcher.get()
        return n_steps / (now - start)

    def _request(self) -> None:
        self._batcher.update(self._learner.policy.state_dict())
        self._batcher.execute()


def baselines_window(n_lanes: int) -> Window | None:
    """Windows of Stable-Baselines3's training loop, ``None`` if it is not installed."""
    try:
        from stable_baselines3 import PPO
        from stable_baselines3.common.vec_env import DummyVecEnv
    except ImportError:
        return None
    env = DummyVecEnv([make_cartpole] * n_lanes)
    size = n_lanes * N_STEPS
    model = PPO(
        "MlpPolicy", env, n_steps=N_STEPS, batch_size=size // N_MINIBATCHES, n_epochs=N_EPOCHS
    )

    def window(seconds: float) -> float:
        n_steps = 0
        start = now = time.perf_counter()
        while now - start < seconds:
            model.learn(size, reset_num_timesteps=False)
            n_steps += size
            now = time.perf_counter()
        return n_steps / (now - start)

    return window


def cleanrl_steps_per_s(script: str, n_lanes: int) -> float:
    """The last speed that CleanRL's script prints."""
    sizes = {"num-envs": n_lanes, "num-steps": N_STEPS, "num-minibatches": N_MINIBATCHES}
    sizes |= {"update-epochs": N_EPOCHS, "total-timesteps": 40 * N_STEPS * n_lanes}
    command = [sys.executable, script, *(f"--{name}={size}" for name, size in sizes.items())]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=one_thread)
    return float(re.findall(r"SPS: (\d+)", done.stdout)[-1])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--lanes", type=int, default=16)
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--cleanrl", help="path of CleanRL's ppo.py")
    args: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(1)
    gymnasium.logger.min_level = gymnasium.logger.ERROR
    with ExitStack() as stack:
        loops = {
            "no workers": Loop(args.lanes, 0),
            "2 workers": Loop(args.lanes, 2),
            "2 workers, ahead": Loop(args.lanes, 2, is_ahead=True),
        }
        for loop in loops.values():
            stack.callback(loop.close)
        windows: dict[str, Window] = {name: loop.window for name, loop in loops.items()}
        baselines = baselines_window(args.lanes)
        if baselines is None:
            note("Stable-Baselines3 is not installed")
        else:
            windows["Stable-Baselines3"] = baselines
        base, others = in_turns(windows.pop("no workers"), windows, args.windows, args.seconds)
    show(
        {"loop": "no workers", "lanes": args.lanes, "steps_per_s": round(quartiles(base)["median"])}
    )
    for name, (rates, ratios) in others.items():
        ratio = quartiles(ratios)
        figures = {"ratio": ratio["median"], "quartiles": ratio["quartiles"]}
        show({"loop": name, **figures, "steps_per_s": round(quartiles(rates)["median"])})
    if args.cleanrl:
        rate = round(cleanrl_steps_per_s(args.cleanrl, args.lanes))
        show({"loop": "CleanRL", "steps_per_s": rate})


if __name__ == "__main__":
    main()
