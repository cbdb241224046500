"""How fast environments in processes step, beside what other libraries have for that.

    python benchmarks/parallel_env.py [--parts step loop] [--windows 7] [--seconds 2]

``step``: the time of one step of all environments, there and back, with actions that are ready: 2
processes of 8 environments, CartPole-v1, HalfCheetah-v5 and uint8 frames of 84 × 84 × 4. Beside
``ParallelEnvManager`` and environments in this process: Gymnasium's
``AsyncVectorEnv(shared_memory=True)``, ``SubprocVecEnv`` of Stable-Baselines3 and
``ShmemVectorEnv`` of tianshou, where they are installed. Those have one environment per process;
so that the number of processes is the same as well, each of their environments is a batch of 8
that is stepped in a loop, its observations joined into one array. Episodes that end are reset in
the step.

``loop``: the rollout loop over a ``ParallelEnvManager`` beside the bare loop (see
``bare_loop.py``): W1 with 2 processes of 16 environments, W2 with 2 of 8.

All take turns, window by window; a window of one is compared with the mean of the two windows
around it of the other. Prints one JSON line per workload, and every window to stderr. ``ratio`` of
``step`` says how many times the steps of the other one we make in the same time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any

import gymnasium
import numpy as np
import torch
from bare_loop import BareLoop
from throughput import batcher_window, to_neighbours
from workloads import SEED, WORKLOADS, PolicyAgent, Workload, quartiles, versions

from rlpool import EpisodeBatcher, GymEnv, ParallelEnvManager, VecEnv

N_WORKERS, N_LANES = 2, 8
"""Of ``step``: processes, and environments in each."""

MIN_RATIO = {"W1": 0.55, "W2": 0.65}
"""Bars of ``loop``."""

N_ANNOUNCED = 16_000
"""Episodes announced at a time in ``step``."""

Window = Callable[[float], float]
"""Steps for so many seconds; returns steps per second, of single environments."""


class Batch(gymnasium.Env[Any, Any]):
    """Several environments as one, for libraries with one environment per process.

    Args:
        make_env: Creates one of them.
    """

    def __init__(self, make_env: Callable[[], gymnasium.Env[Any, Any]]) -> None:
        self._envs = [make_env() for _ in range(N_LANES)]
        self.observation_space = gymnasium.vector.utils.batch_space(
            self._envs[0].observation_space, N_LANES
        )
        self.action_space = gymnasium.vector.utils.batch_space(self._envs[0].action_space, N_LANES)
        self._observation = np.zeros(self.observation_space.shape, self.observation_space.dtype)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        for row, env in zip(self._observation, self._envs, strict=True):
            row[...] = env.reset(seed=seed)[0]
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        total = 0.0
        for row, env, part in zip(self._observation, self._envs, action, strict=True):
            observation, reward, terminated, truncated, _ = env.step(part)
            total += float(reward)
            if terminated or truncated:
                observation, _ = env.reset()
            row[...] = observation
        return self._observation, total, False, False, {}


def actions_of(workload: Workload, n: int) -> np.ndarray[Any, Any]:
    """Some batches of actions, to be used in turn."""
    env = workload.make_env()
    env.action_space.seed(SEED)
    actions = np.array([[env.action_space.sample() for _ in range(n)] for _ in range(64)])
    env.close()
    return actions


def loop_of(step: Callable[[Any], Any], actions: np.ndarray[Any, Any]) -> Window:
    """A window that repeats a step."""

    def window(seconds: float) -> float:
        n = 0
        start = now = time.perf_counter()
        while now - start < seconds:
            step(actions[n % len(actions)])
            n += 1
            now = time.perf_counter()
        return n * N_WORKERS * N_LANES / (now - start)

    return window


@contextmanager
def over_lanes(env: VecEnv, workload: Workload) -> Iterator[Window]:
    """Steps of a ``VecEnv`` of ours; lanes that end are reset, as the rollout loop does."""
    lanes = list(range(env.n_lanes))
    episodes = list(lanes)  # each lane's

    def begin() -> None:
        env.announce_episodes(range(N_ANNOUNCED), {})
        episodes[:] = lanes
        env.reset_lanes(lanes, episodes, [None] * len(lanes))

    def step(actions: Any) -> None:
        ended = env.step_lanes(lanes, {"action": actions})
        if ended:
            for lane in ended:
                episodes[lane] += len(lanes)
            if max(episodes) >= N_ANNOUNCED:
                begin()
            else:
                env.reset_lanes(ended, [episodes[lane] for lane in ended], [None] * len(ended))

    begin()

    try:
        yield loop_of(step, actions_of(workload, env.n_lanes))
    finally:
        env.close()


def rlpool_manager(workload: Workload) -> Any:
    manager = ParallelEnvManager(
        [workload.make_env] * (N_WORKERS * N_LANES), envs_per_worker=N_LANES, seed=SEED
    )
    return over_lanes(manager, workload)


def in_this_process(workload: Workload) -> Any:
    return over_lanes(
        GymEnv([workload.make_env() for _ in range(N_WORKERS * N_LANES)], SEED), workload
    )


@contextmanager
def batches(make: Callable[[list[Any]], Any], workload: Workload) -> Iterator[Window]:
    """Steps of another library's environments, each a ``Batch``."""
    env = make([partial(Batch, workload.make_env)] * N_WORKERS)
    actions = actions_of(workload, N_WORKERS * N_LANES)
    env.reset()
    try:
        yield loop_of(env.step, actions.reshape(64, N_WORKERS, N_LANES, *actions.shape[2:]))
    finally:
        env.close()


def gymnasium_async(workload: Workload) -> Any:
    return batches(
        lambda fns: gymnasium.vector.AsyncVectorEnv(fns, shared_memory=True, context="spawn"),
        workload,
    )


def sb3_subproc(workload: Workload) -> Any:
    vec_env = importlib.import_module("stable_baselines3.common.vec_env")
    return batches(lambda fns: vec_env.SubprocVecEnv(fns, start_method="spawn"), workload)


def tianshou_shmem(workload: Workload) -> Any:
    return batches(importlib.import_module("tianshou.env").ShmemVectorEnv, workload)


PEERS: dict[str, tuple[str, Callable[[Workload], Any]]] = {
    "in_this_process": ("rlpool", in_this_process),
    "gymnasium_async": ("gymnasium", gymnasium_async),
    "sb3_subproc": ("stable-baselines3", sb3_subproc),
    "tianshou_shmem": ("tianshou", tianshou_shmem),
}


def compare_steps(workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Round trips of a step, ours and the others' in turns."""
    ours: list[float] = []
    theirs: dict[str, list[float]] = {}
    with ExitStack() as stack:
        window = stack.enter_context(rlpool_manager(workload))
        others: dict[str, Window] = {}
        for name in args.peers:
            try:
                others[name] = stack.enter_context(PEERS[name][1](workload))
            except ImportError as error:
                note(f"{name} is left out: {error}")
        for number in range(-1, args.windows):
            for name, other in others.items():
                rates = window(args.seconds), other(args.seconds)
                if number >= 0:  # the first are for warming up
                    ours.append(rates[0])
                    theirs.setdefault(name, []).append(rates[1])
                    note(f"{workload.name} {number}: rlpool {rates[0]:.0f}, {name} {rates[1]:.0f}")
        ours.append(window(args.seconds))
    n = N_WORKERS * N_LANES
    figures: dict[str, Any] = {
        "part": "step",
        "workload": workload.name,
        "n_processes": N_WORKERS,
        "n_environments": n,
        "step_us": round(n / quartiles(ours)["median"] * 1e6, 1),
        "peers": {},
    }
    for place, (name, rates) in enumerate(theirs.items()):
        before, after = ours[place :: len(theirs)], ours[place + 1 :: len(theirs)]
        inverse = to_neighbours(rates, before[: len(rates)], after[: len(rates)])
        figures["peers"][name] = {
            "ratio": quartiles([1 / value for value in inverse]),
            "step_us": round(n / quartiles(rates)["median"] * 1e6, 1),
        }
    return figures


def create_manager(seed: int, workload: Workload) -> ParallelEnvManager:
    return ParallelEnvManager(
        [workload.make_env] * (workload.n_workers * workload.n_lanes),
        envs_per_worker=workload.n_lanes,
        seed=seed,
    )


def compare_loops(workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """The rollout loop over a manager and the bare loop in turns."""
    n_episodes = min(workload.n_episodes, 2000)
    workload = replace(workload, n_episodes=n_episodes)
    bare: list[float] = []
    ours: list[float] = []
    with (
        BareLoop(workload) as bare_loop,
        EpisodeBatcher(
            n_timesteps=workload.n_timesteps,
            n_slots=n_episodes,
            create_agent=PolicyAgent,
            agent_args={"make_policy": workload.make_policy},
            create_env=create_manager,
            env_args={"workload": workload},
            n_threads=0,
            seeds=SEED,
        ) as batcher,
    ):
        for number in range(-1, args.windows):
            rates = (
                bare_loop.window(args.seconds),
                batcher_window(batcher, n_episodes, 1, args.seconds),
            )
            if number >= 0:
                bare.append(rates[0])
                ours.append(rates[1])
                note(f"{workload.name} {number}: bare {rates[0]:.0f}, rlpool {rates[1]:.0f}")
        bare.append(bare_loop.window(args.seconds))
    return {
        "part": "loop",
        "workload": workload.name,
        "ratio": quartiles(to_neighbours(ours, bare[:-1], bare[1:])),
        "bar": MIN_RATIO[workload.name],
        "bare_to_bare": quartiles(to_neighbours(bare[1:-1], bare[:-2], bare[2:])),
        "steps_per_s": round(quartiles(ours)["median"]),
    }


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def peer_versions() -> dict[str, str]:
    found = {}
    for name in ("stable-baselines3", "tianshou", "mujoco"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=["step", "loop"], default=["step", "loop"])
    parser.add_argument("--workloads", nargs="+", choices=["W1", "W2", "W3"])
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a window")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for part in args.parts:
        names = args.workloads or ["W1", "W2", "W3"]
        for name in names:
            if part == "loop" and name not in MIN_RATIO:
                continue
            compare = compare_steps if part == "step" else compare_loops
            figures = compare(WORKLOADS[name], args)
            print(json.dumps({**figures, "versions": {**versions(), **peer_versions()}}))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
