"""Workloads of the benchmarks (environments, policies, sizes), alternating windows, and output.

Everything is at module level, so that spawned processes can import it by name. A policy does not
depend on rlpool: the bare loop calls the same object on the same batch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from rlpool import (
    Agent,
    Batcher,
    DictTensor,
    EpisodeBatcher,
    GymEnv,
    GymEnvInf,
    VecEnv,
    VectorGymEnv,
    sample_categorical,
    sample_tanh_normal,
)

SEED = 0

# Environments -----------------------------------------------------------------------------------


class FramesEnv(gymnasium.Env[Any, Any]):
    """Image frames at no cost: the cost of a step is only that of handling its observation.

    Args:
        episode_steps: Length of every episode.
    """

    N_FRAMES = 4
    """Distinct frames, returned in turn, so that consecutive steps differ."""

    N_ACTIONS = 6

    def __init__(self, episode_steps: int = 100) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (84, 84, 4), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(self.N_ACTIONS)
        generator = np.random.default_rng(SEED)
        self._frames = list(generator.integers(0, 256, (self.N_FRAMES, 84, 84, 4), dtype=np.uint8))
        self._episode_steps = episode_steps
        self._n_steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._n_steps = 0
        return self._frames[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._n_steps = n_steps = self._n_steps + 1
        frame = self._frames[n_steps % self.N_FRAMES]
        return frame, 1.0, n_steps == self._episode_steps, False, {}


class StragglerEnv(gymnasium.Env[Any, Any]):
    """Steps that take a while, in episodes of very different lengths.

    Args:
        step_s: Seconds per step.
        shortest: Steps of the shortest episode.
        longest: Steps of the longest episode.
        computes: Whether a step computes; otherwise it sleeps.
    """

    def __init__(
        self, step_s: float = 1e-3, shortest: int = 10, longest: int = 200, computes: bool = False
    ) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._observation = np.zeros(1, np.float32)
        self._step_s, self._computes = step_s, computes
        self._bounds = (shortest, longest + 1)
        self._steps_left = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps_left = int(self.np_random.integers(*self._bounds))
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._computes:
            end = time.thread_time() + self._step_s  # unaffected by threads that share the core
            while time.thread_time() < end:
                pass
        else:
            time.sleep(self._step_s)
        self._steps_left -= 1
        return self._observation, 1.0, not self._steps_left, False, {}


def make_cartpole() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1")


def make_long_cartpole() -> gymnasium.Env[Any, Any]:
    """Make CartPole without termination: episodes of 500 steps, like those of a trained policy."""
    env: Any = gymnasium.make("CartPole-v1")
    env.unwrapped.theta_threshold_radians = env.unwrapped.x_threshold = math.inf
    return env


def make_half_cheetah() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("HalfCheetah-v5")


def make_cartpole_vector(n_lanes: int, seed: int | None = None) -> Any:
    return gymnasium.make_vec("CartPole-v1", n_lanes, "vector_entry_point")


# Policies ---------------------------------------------------------------------------------------


class CartPolePolicy(torch.nn.Module):
    """Categorical, 4-64-64-2."""

    n_noise = 1

    def __init__(self) -> None:
        super().__init__()
        self.layers = _mlp(4, 64, 64, 2)

    def forward(self, frame: torch.Tensor, noise: torch.Tensor) -> dict[str, torch.Tensor]:
        action, log_probability = sample_categorical(self.layers(frame), noise)
        return {"action": action, "log_probability": log_probability}


class HalfCheetahPolicy(torch.nn.Module):
    """Normal squashed by tanh, 17-256-256-6, with state-independent standard deviations.

    Deviations of 1 keep an untrained policy moving, like exploration.
    """

    n_noise = 6

    def __init__(self) -> None:
        super().__init__()
        self.layers = _mlp(17, 256, 256, 6)
        self.log_std = torch.nn.Parameter(torch.zeros(6))

    def forward(self, frame: torch.Tensor, noise: torch.Tensor) -> dict[str, torch.Tensor]:
        action, log_probability = sample_tanh_normal(self.layers(frame), self.log_std, noise)
        return {"action": action, "log_probability": log_probability}


class RandomPolicy(torch.nn.Module):
    """Random actions."""

    n_noise = 1

    def __init__(self, n_actions: int) -> None:
        super().__init__()
        self._n_actions = n_actions

    def forward(self, frame: torch.Tensor, noise: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"action": (noise[:, 0] * self._n_actions).long()}


def make_frames_policy() -> RandomPolicy:
    return RandomPolicy(FramesEnv.N_ACTIONS)


def make_straggler_policy() -> RandomPolicy:
    return RandomPolicy(2)


def _mlp(*sizes: int) -> torch.nn.Sequential:
    layers: list[torch.nn.Module] = []
    for n_in, n_out in itertools.pairwise(sizes):
        layers += [torch.nn.Linear(n_in, n_out), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1])


# Workloads --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """An environment and a policy, with their numbers.

    Attributes:
        name: Short name.
        make_env: Creates one environment.
        make_policy: Creates the policy; its parameters depend on ``SEED``.
        n_workers: Number of collecting processes.
        n_lanes: Environments in each of them.
        n_episodes: Episodes per request: enough to make idle lanes at the end negligible.
        n_timesteps: Longest episode.
        make_vector_env: Creates one vector environment of the given number of lanes, with a seed,
            in place of as many environments.
    """

    name: str
    make_env: Callable[[], gymnasium.Env[Any, Any]]
    make_policy: Callable[[], Any]
    n_workers: int
    n_lanes: int
    n_episodes: int
    n_timesteps: int
    make_vector_env: Callable[[int, int | None], Any] | None = None


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("long", make_long_cartpole, CartPolePolicy, 2, 16, 64, 500),
        Workload("W1", make_cartpole, CartPolePolicy, 2, 16, 8000, 500),
        Workload("W2", make_half_cheetah, HalfCheetahPolicy, 2, 8, 32, 1000),
        Workload("W3", FramesEnv, make_frames_policy, 2, 8, 64, 100),
        Workload("W4", StragglerEnv, make_straggler_policy, 8, 1, 256, 200),
    )
}

FRAMES = Workload("frames", partial(FramesEnv, 200), make_frames_policy, 2, 8, 32, 200)
"""Long episodes of frames, for the cost of results for the caller."""

V1 = [
    Workload(
        "V1", make_cartpole, CartPolePolicy, 2, n_lanes, 256 * n_lanes, 500, make_cartpole_vector
    )
    for n_lanes in (64, 256)
]
"""128 episodes per lane and request: even so, some lanes finish long before the last one."""


class PolicyAgent(Agent):
    """A policy as an agent without state.

    Args:
        make_policy: Creates the policy.
    """

    def __init__(self, make_policy: Callable[[], Any]) -> None:
        self.policy = seeded_policy(make_policy)
        self.n_noise = self.policy.n_noise

    def __call__(self, observation: DictTensor) -> dict[str, torch.Tensor]:
        output: dict[str, torch.Tensor] = self.policy(observation["frame"], observation["noise"])
        return output

    def update(self, info: Mapping[str, torch.Tensor]) -> None:
        self.policy.load_state_dict(info)


def seeded_policy(make_policy: Callable[[], Any]) -> Any:
    """Create the policy, with the same parameters in every process."""
    torch.manual_seed(SEED)
    return make_policy()


def create_env(
    make_env: Callable[[], gymnasium.Env[Any, Any]], n_lanes: int, seed: int | None = None
) -> GymEnv:
    return GymEnv([make_env() for _ in range(n_lanes)], seed)


def create_lanes(workload: Workload, auto_reset: bool, seed: int | None = None) -> VecEnv:
    """Create the lanes of one worker."""
    n_lanes = workload.n_lanes
    if workload.make_vector_env is None:
        kind = GymEnvInf if auto_reset else GymEnv
        return kind([workload.make_env() for _ in range(n_lanes)], seed)
    return VectorGymEnv(workload.make_vector_env(n_lanes, seed), seed, auto_reset=auto_reset)


def make_batcher(
    workload: Workload,
    n_episodes: int | None = None,
    n_threads: int | None = None,
    n_pending: int = 1,
    kind: Callable[..., EpisodeBatcher] = EpisodeBatcher,
) -> EpisodeBatcher:
    """Make a batcher with one slot for every episode.

    Args:
        workload: The workload.
        n_episodes: Episodes per request, in place of the workload's.
        n_threads: Worker processes, in place of the workload's.
        n_pending: Requests at a time.
        kind: Its class.
    """
    return kind(
        n_timesteps=workload.n_timesteps,
        n_slots=n_pending * (n_episodes or workload.n_episodes),
        create_agent=PolicyAgent,
        agent_args={"make_policy": workload.make_policy},
        create_env=create_lanes,
        env_args={"workload": workload, "auto_reset": False},
        n_threads=workload.n_workers if n_threads is None else n_threads,
        seeds=SEED,
    )


def make_window_batcher(
    workload: Workload,
    n_timesteps: int,
    n_threads: int | None = None,
    n_lanes: int | None = None,
) -> Batcher:
    """Make a batcher of windows of lanes that restart.

    Args:
        workload: The workload.
        n_timesteps: Steps of a window.
        n_threads: Worker processes, in place of the workload's.
        n_lanes: Lanes of each of them, in place of the workload's.
    """
    workload = replace(workload, n_lanes=n_lanes or workload.n_lanes)
    return Batcher(
        n_timesteps=n_timesteps,
        create_agent=PolicyAgent,
        agent_args={"make_policy": workload.make_policy},
        create_env=create_lanes,
        env_args={"workload": workload, "auto_reset": True},
        n_threads=workload.n_workers if n_threads is None else n_threads,
        seeds=SEED,
    )


# Figures ----------------------------------------------------------------------------------------

Window = Callable[[float], float]
"""Steps for a number of seconds; returns steps per second."""


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Make a parser with the description of a script."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=form)


def note(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def show(figures: Mapping[str, Any], *more: str) -> None:
    """Print figures as a JSON line, with the versions of the packages."""
    print(json.dumps({**figures, "versions": versions(*more)}), flush=True)


def timed(collect: Callable[[], int]) -> Window:
    """Return a window that repeats ``collect``, which returns its number of steps."""

    def window(seconds: float) -> float:
        n_steps = 0
        start = now = time.perf_counter()
        while now - start < seconds:
            n_steps += collect()
            now = time.perf_counter()
        return n_steps / (now - start)

    return window


def in_turns(
    base: Window, others: Mapping[str, Window], n_windows: int, seconds: float
) -> tuple[list[float], dict[str, tuple[list[float], list[float]]]]:
    """Alternate between windows, with ``base`` before and after each of the others.

    Returns:
        Steps per second of the base, and of the others by name, with the ratio of each of their
        windows to the mean of the two adjacent windows of the base.
    """
    names = [name for _ in range(-1, n_windows) for name in others]  # the first ones warm up
    before, rates = [base(seconds)], []
    for name in names:
        rates.append(others[name](seconds))
        before.append(base(seconds))
        note(f"base {before[-1]:.0f}, {name} {rates[-1]:.0f} steps/s")
    ratios = to_neighbours(rates, before)
    n = len(others)
    found = {
        name: (rates[n + place :: n], ratios[n + place :: n]) for place, name in enumerate(others)
    }
    return before[n:], found


def to_neighbours(windows: Sequence[float], around: Sequence[float]) -> list[float]:
    """Divide each window by the mean of the two adjacent ones of ``around``, which has one more."""
    pairs = zip(windows, itertools.pairwise(around), strict=True)
    return [2 * window / sum(neighbours) for window, neighbours in pairs]


def noise_of(base: Sequence[float]) -> dict[str, Any]:
    """Compare windows of the base with each other: their deviation from 1 is noise."""
    triples = zip(base[:-2], base[1:-1], base[2:], strict=True)
    return quartiles([2 * middle / (left + right) for left, middle, right in triples])


def versions(*more: str) -> dict[str, Any]:
    """Return the versions of the packages.

    Args:
        more: Further distributions, if they are installed.
    """
    found: dict[str, Any] = {}
    for name in ("rlpool", "torch", "gymnasium", "numpy", *more):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {**found, "python": platform.python_version(), "cpus": len(os.sched_getaffinity(0))}


def quartiles(values: Sequence[float], n_digits: int = 3) -> dict[str, Any]:
    """Return the median, the quartiles and the number of values."""
    if not values:
        return {"median": None, "quartiles": None, "n": 0}
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return {
        "median": round(middle, n_digits),
        "quartiles": [round(low, n_digits), round(high, n_digits)],
        "n": len(values),
    }


# Programs of other libraries --------------------------------------------------------------------

ATARI = """
try:
    import ale_py.env
    from ale_py.registration import register_v0_v4_envs
    register_v0_v4_envs()  # ale-py 0.12 does not do it by itself for Gymnasium 0.29
except ImportError:
    pass
"""
"""Setup of CleanRL's scripts for Atari."""


def interpreter(path: str) -> str:
    """Argument type: a Python interpreter that can be started in any folder."""
    return os.path.abspath(shutil.which(path) or path)


def cleanrl_command(python: str, script: Path, setup: str = "", n_threads: int = 1) -> list[str]:
    """Return the command for an unchanged script of CleanRL, to be followed by its arguments.

    Args:
        python: An interpreter with the script's dependencies.
        script: Its path, such as ``.../cleanrl/ppo.py``.
        setup: Code to run before.
        n_threads: Threads of torch.
    """
    start = f"{setup}\nimport runpy, sys, torch\nsys.argv = sys.argv[1:]\n"
    start += f"torch.set_num_threads({n_threads})\n"
    start += "sys.path.insert(0, sys.argv[0].rpartition('/cleanrl/')[0])\n"
    start += "runpy.run_path(sys.argv[0], run_name='__main__')"
    return [python, "-W", "ignore", "-c", start, str(script)]
