"""Speed of environments in processes, compared with other libraries.

    python benchmarks/parallel_env.py [--parts step loop] [--windows 7] [--seconds 2]

``step``: the round trip of one step of all environments with given actions: 2 processes of 8
environments, CartPole-v1, HalfCheetah-v5 and uint8 frames of 84 × 84 × 4. Compared are
``ParallelEnvManager``, environments in this process, Gymnasium's
``AsyncVectorEnv(shared_memory=True)``, ``SubprocVecEnv`` of Stable-Baselines3 and
``ShmemVectorEnv`` of tianshou, if they are installed. The latter have one environment per process.
For the same number of processes, each of these environments is a batch of 8 that is stepped in a
loop, with observations joined into one array. Episodes that end are reset in the step.

``loop``: the rollout loop over a ``ParallelEnvManager`` and the bare loop (see ``bare_loop.py``):
W1 with 2 processes of 16 environments, W2 with 2 of 8, and as many episodes per request as in
``throughput.py``.

All alternate, window by window; a window of one is compared with the mean of the two adjacent
windows of the other. Prints one JSON line per workload, and every window to stderr. ``ratio`` of
``step`` is the number of our steps divided by the other's in the same time.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from bare_loop import BareLoop
from throughput import batcher_window
from workloads import (
    SEED,
    WORKLOADS,
    PolicyAgent,
    Window,
    Workload,
    in_turns,
    noise_of,
    note,
    parser_of,
    quartiles,
    show,
)

from rlpool import EpisodeBatcher, GymEnv, ParallelEnvManager, VecEnv

PARTS = ("step", "loop")

N_WORKERS, N_LANES = 2, 8
"""Processes of ``step``, and environments in each."""


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
    """Return some batches of actions, to be used in turn."""
    env = workload.make_env()
    env.action_space.seed(SEED)
    actions = np.array([[env.action_space.sample() for _ in range(n)] for _ in range(64)])
    env.close()
    return actions


def loop_of(step: Callable[[Any], Any], actions: np.ndarray[Any, Any]) -> Window:
    """Return a window that repeats a step."""

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
    """Steps of our ``VecEnv``, with lanes reset as by the rollout loop."""
    lanes = list(range(env.n_lanes))
    episodes = list(lanes)  # each lane's

    def step(actions: Any) -> None:
        ended = env.step_lanes(lanes, {"action": actions})
        if ended:
            for lane in ended:
                episodes[lane] += len(lanes)
            env.reset_lanes(ended, [episodes[lane] for lane in ended], [None] * len(ended))

    env.reset_lanes(lanes, episodes, [None] * len(lanes))
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


PEERS: dict[str, Callable[[Workload], Any]] = {
    "in_this_process": in_this_process,
    "gymnasium_async": gymnasium_async,
    "sb3_subproc": sb3_subproc,
    "tianshou_shmem": tianshou_shmem,
}


def compare_steps(workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Alternate between steps of our manager and of the others."""
    with ExitStack() as stack:
        ours = stack.enter_context(rlpool_manager(workload))
        others: dict[str, Window] = {}
        for name in args.peers:
            try:
                others[name] = stack.enter_context(PEERS[name](workload))
            except ImportError as error:
                note(f"{name} is skipped: {error}")
        rates, peers = in_turns(ours, others, args.windows, args.seconds)
    n = N_WORKERS * N_LANES
    return {
        "part": "step",
        "workload": workload.name,
        "n_processes": N_WORKERS,
        "n_environments": n,
        "step_us": round(n / quartiles(rates)["median"] * 1e6, 1),
        "peers": {
            name: {
                "ratio": quartiles([1 / ratio for ratio in ratios]),
                "step_us": round(n / quartiles(peer_rates)["median"] * 1e6, 1),
            }
            for name, (peer_rates, ratios) in peers.items()
        },
    }


def create_manager(seed: int, workload: Workload) -> ParallelEnvManager:
    return ParallelEnvManager(
        [workload.make_env] * (workload.n_workers * workload.n_lanes),
        envs_per_worker=workload.n_lanes,
        seed=seed,
    )


def compare_loops(workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Alternate between the rollout loop over a manager and the bare loop."""
    n_episodes = workload.n_episodes
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
        windows = {f"manager on {workload.name}": partial(batcher_window, batcher, n_episodes)}
        bare, others = in_turns(bare_loop.window, windows, args.windows, args.seconds)
    ((rates, ratios),) = others.values()
    return {
        "part": "loop",
        "workload": workload.name,
        "ratio": quartiles(ratios),
        "bare_to_bare": noise_of(bare),
        "steps_per_s": round(quartiles(rates)["median"]),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--workloads", nargs="+", choices=["W1", "W2", "W3"])
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a window")
    args = parser.parse_args()
    torch.set_num_threads(1)
    compare = dict(zip(PARTS, (compare_steps, compare_loops), strict=True))
    default = {"step": ["W1", "W2", "W3"], "loop": ["W1", "W2"]}
    for part in args.parts:
        for name in args.workloads or default[part]:
            figures = compare[part](WORKLOADS[name], args)
            show(figures, "stable-baselines3", "tianshou", "mujoco")


if __name__ == "__main__":
    main()
