"""What windows of one step cost, as off-policy training wants them.

    python benchmarks/single_steps.py [--threads 0 2] [--windows 7] [--seconds 1]

One CartPole lane per worker and the policy of W1, with a window, an update and a replay pool in
between. Turns alternate between the bare loop (the same environment and policy, without rlpool) and
each of the others. Microseconds per window:

- ``collect``: ``execute`` and ``get``
- ``update``: the same, with an ``update`` of all parameters before each
- ``train``: that, the window added to a ``Pool``, and 128 transitions drawn from it

Prints one JSON line per number of workers.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from workloads import (
    SEED,
    CartPolePolicy,
    PolicyAgent,
    in_turns,
    make_cartpole,
    parser_of,
    quartiles,
    seeded_policy,
    show,
)

from rlpool import Batcher, GymEnvInf, Pool


def bare(seconds: float) -> float:
    """Steps per second of a loop without rlpool."""
    env, policy = make_cartpole(), seeded_policy(CartPolePolicy)
    generator = torch.Generator().manual_seed(SEED)
    frame, _ = env.reset(seed=SEED)
    n_steps, end = 0, time.perf_counter() + seconds
    with torch.inference_mode():
        while time.perf_counter() < end:
            noise = torch.rand(1, 1, generator=generator)
            action = policy(torch.as_tensor(frame).unsqueeze(0), noise)["action"].item()
            frame, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                frame, _ = env.reset()
            n_steps += 1
    return n_steps / seconds


def create_env(seed: int) -> GymEnvInf:
    """One lane."""
    return GymEnvInf([make_cartpole()], seed)


def windows(batcher: Batcher, parameters: Any, pool: Pool | None, seconds: float) -> float:
    """Windows per second."""
    n_windows, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        if parameters is not None:
            batcher.update(parameters)
        batcher.execute()
        window = batcher.get()
        if pool is not None:
            pool.extend(window)
            if len(pool) >= 128:
                pool.sample(128)
        n_windows += 1
    return n_windows / seconds


def compare(n_threads: int, n_windows: int, seconds: float) -> None:
    """Print what windows of so many workers cost."""
    parameters, pool = seeded_policy(CartPolePolicy).state_dict(), Pool(pool_size=100_000, seed=0)
    agent = {"make_policy": CartPolePolicy}
    with Batcher(
        1, None, PolicyAgent, agent, create_env, {}, n_threads=n_threads, seeds=SEED
    ) as batcher:
        batcher.reset()
        runs = {
            "collect": partial(windows, batcher, None, None),
            "update": partial(windows, batcher, parameters, None),
            "train": partial(windows, batcher, parameters, pool),
        }
        base, found = in_turns(bare, runs, n_windows, seconds)
    times = {name: quartiles([1e6 / rate for rate in found[name][0]], 1) for name in runs}
    times["bare"] = quartiles([1e6 / rate for rate in base], 1)
    show({"n_threads": n_threads, "us": times})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--threads", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for n_threads in args.threads:
        compare(n_threads, args.windows, args.seconds)


if __name__ == "__main__":
    main()
