"""The fastest numbers of workers and lanes for several kinds of environments.

    python benchmarks/choosing.py [--kinds cartpole ...] [--seconds 0.8] [--lanes 1 4 16]

Each kind of environment runs with 0, 1 and 2 workers (also 4 if steps sleep) of 1 to 16 lanes each,
in windows (``Batcher``) or, for episodes of unequal length, in requests of episodes with two
pending (``EpisodeBatcher``). The caller only waits, without learning.

Prints a JSON line per kind: steps per second by ``workers x lanes``.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium
import torch
from workloads import (
    WORKLOADS,
    StragglerEnv,
    Workload,
    make_batcher,
    make_straggler_policy,
    make_window_batcher,
    note,
    parser_of,
    show,
)


@dataclass(frozen=True)
class Kind:
    """A kind of environment.

    Attributes:
        workload: The environment and the policy.
        n_timesteps: Steps of a window, or of the longest episode.
        workers: Numbers of workers to try.
        is_episodic: Whether complete episodes are collected.
    """

    workload: Workload
    n_timesteps: int = 128
    workers: tuple[int, ...] = (0, 1, 2)
    is_episodic: bool = False


def stragglers(name: str, **arguments: Any) -> Workload:
    return Workload(name, partial(StragglerEnv, **arguments), make_straggler_policy, 0, 0, 0, 200)


KINDS = {
    "cartpole": Kind(WORKLOADS["W1"]),
    "half_cheetah": Kind(WORKLOADS["W2"]),
    "frames": Kind(WORKLOADS["W3"]),
    "sleeps": Kind(stragglers("sleeps", shortest=200), 16, (0, 1, 2, 4)),
    "computes": Kind(stragglers("computes", shortest=200, computes=True), 16),
    "unequal": Kind(stragglers("unequal", step_s=1e-4, computes=True), 200, is_episodic=True),
}


def steps_per_s(kind: Kind, n_workers: int, n_lanes: int, seconds: float) -> float:
    """Return the steps per second of ``n_workers`` workers with ``n_lanes`` lanes each."""
    workload = replace(kind.workload, n_lanes=n_lanes)
    all_lanes = max(1, n_workers) * n_lanes
    if kind.is_episodic:
        batcher: Any = make_batcher(workload, 4 * all_lanes, n_workers, n_pending=2)
        arguments: tuple[int, ...] = (4 * all_lanes,)
    else:
        batcher, arguments = make_window_batcher(workload, kind.n_timesteps, n_workers), ()
    with batcher:
        if not kind.is_episodic:
            batcher.reset()
        n_pending = 2 if kind.is_episodic else 1
        for _ in range(n_pending):
            batcher.execute(*arguments)
        n_steps, start = 0, 0.0
        for n_requests in itertools.count():
            collected = batcher.get()
            if n_requests == 0:  # warm-up
                start = time.perf_counter()
            else:
                n_steps += int(collected.lengths.sum())
            now = time.perf_counter()
            if n_requests and now - start > seconds:
                return n_steps / (now - start)
            del collected
            batcher.execute(*arguments)
    raise AssertionError


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--seconds", type=float, default=0.8)
    parser.add_argument("--lanes", nargs="+", type=int, default=[1, 4, 16])
    args = parser.parse_args()
    torch.set_num_threads(1)
    gymnasium.logger.min_level = gymnasium.logger.ERROR
    for name in args.kinds:
        kind, found = KINDS[name], {}
        for n_workers, n_lanes in itertools.product(kind.workers, args.lanes):
            rate = steps_per_s(kind, n_workers, n_lanes, args.seconds)
            found[f"{n_workers} x {n_lanes}"] = round(rate)
            note(f"{name}, {n_workers} x {n_lanes}: {rate:.0f} steps/s")
        show({"kind": name, "steps_per_s": found})


if __name__ == "__main__":
    main()
