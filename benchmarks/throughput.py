"""How fast episodes arrive, compared with the bare loop (see ``bare_loop.py``).

    python benchmarks/throughput.py [--workloads W1 W2 W3 W4] [--windows 10] [--seconds 3]

- W1: CartPole-v1, network 4-64-64-2, 2 workers of 16 environments
- W2: HalfCheetah-v5, network 17-256-256-6, 2 workers of 8 environments
- W3: uint8 frames of 84 × 84 × 4, trivial step, random policy, 2 workers of 8 environments
- W4: stragglers, 256 episodes of 10 to 200 steps that sleep 1 ms, 8 workers of 1 environment

W1 to W3: the bare loop and the batcher take turns, window by window, the one being blocked while
the other runs. Nothing is queued when a window begins and nothing runs when it has ended. A
window of the batcher repeats ``execute``, ``get`` and dropping the result; it counts the steps of
the episodes that it got, over the time from the first ``execute`` to the last ``get``, which is a
little more than ``--seconds``. ``ratio`` compares each window of the batcher with the mean of the
two windows of the bare loop around it, ``bare_to_bare`` does the same with windows of the bare
loop: what it deviates from 1 is noise.

W4: ``efficiency`` is the sleep of all steps, divided by 8 times the time from ``execute`` to
``get``.

Prints one JSON line per workload, and every window to stderr.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch
from bare_loop import BareLoop
from workloads import (
    WORKLOADS,
    Workload,
    in_turns,
    make_batcher,
    noise_of,
    note,
    parser_of,
    quartiles,
    show,
)

from rlpool import EpisodeBatcher

STEP_SLEEP_S = 1e-3  # of W4


def batcher_window(batcher: EpisodeBatcher, n_episodes: int, seconds: float) -> float:
    """Collect for at least this long; returns steps per second.

    Args:
        batcher: A batcher with nothing pending.
        n_episodes: Episodes per request.
        seconds: No request is made after this long.
    """
    n_steps = 0
    start = now = time.perf_counter()
    while now - start < seconds:
        batcher.execute(n_episodes)
        n_steps += int(batcher.get().lengths.sum())
        now = time.perf_counter()
    return n_steps / (now - start)


def compare(workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Batcher and bare loop in turns."""
    n_episodes = args.n_episodes or workload.n_episodes
    with BareLoop(workload) as bare_loop, make_batcher(workload, n_episodes) as batcher:
        windows = {f"batcher on {workload.name}": partial(batcher_window, batcher, n_episodes)}
        bare, others = in_turns(bare_loop.window, windows, args.windows, args.seconds)
    ((batched, ratios),) = others.values()
    ratio = quartiles(ratios)
    return {
        "workload": workload.name,
        "ratio": ratio["median"],
        "quartiles": ratio["quartiles"],
        "n_windows": ratio["n"],
        "bare_to_bare": noise_of(bare),
        "bare_steps_per_s": round(quartiles(bare)["median"]),
        "batcher_steps_per_s": round(quartiles(batched)["median"]),
        "seconds": args.seconds,
        "n_episodes": n_episodes,
    }


def stragglers(workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Efficiency over requests of episodes that sleep."""
    n_episodes = args.n_episodes or workload.n_episodes
    n_at_once = workload.n_workers * workload.n_lanes
    efficiencies = []
    with make_batcher(workload, n_episodes) as batcher:
        batcher.execute(n_at_once)
        batcher.get()
        for request in range(args.windows):
            start = time.perf_counter()
            batcher.execute(n_episodes)
            n_steps = int(batcher.get().lengths.sum())
            wall_s = time.perf_counter() - start
            efficiencies.append(n_steps * STEP_SLEEP_S / n_at_once / wall_s)
            note(f"{workload.name} {request}: efficiency {efficiencies[-1]:.3f}, {wall_s:.2f} s")
    efficiency = quartiles(efficiencies)
    return {
        "workload": workload.name,
        "efficiency": efficiency["median"],
        "quartiles": efficiency["quartiles"],
        "n_requests": efficiency["n"],
        # A sleep takes a little longer than it was asked to: no batcher can do better than this.
        "efficiency_of_sleeping": round(STEP_SLEEP_S / measured_sleep_s(), 3),
        "n_episodes": n_episodes,
    }


def measured_sleep_s(n: int = 500) -> float:
    """How long this machine sleeps when asked for ``STEP_SLEEP_S``."""
    start = time.perf_counter()
    for _ in range(n):
        time.sleep(STEP_SLEEP_S)
    return (time.perf_counter() - start) / n


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument(
        "--windows", type=int, default=10, help="windows of the batcher; W4: requests"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a window")
    parser.add_argument("--n-episodes", type=int, help="episodes per request, for sensitivity")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.workloads:
        measure = stragglers if name == "W4" else compare
        show(measure(WORKLOADS[name], args), *(["mujoco"] if name == "W2" else []))


if __name__ == "__main__":
    main()
