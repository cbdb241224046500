"""Throughput of batchers, relative to the bare loop (see ``bare_loop.py``).

    python benchmarks/throughput.py [--workloads long W1 W2 W3 W4 V1 requests]
                                    [--windows 10] [--seconds 3]

- long: CartPole-v1 with episodes of 500 steps, otherwise as W1
- W1: CartPole-v1, network 4-64-64-2, 2 workers of 16 environments
- W2: HalfCheetah-v5, network 17-256-256-6, 2 workers of 8 environments
- W3: uint8 frames of 84 × 84 × 4, trivial step, random policy, 2 workers of 8 environments
- W4: stragglers, 256 episodes of 10 to 200 steps that sleep 1 ms, 8 workers of 1 environment
- V1: Gymnasium's ``CartPoleVectorEnv``, network of W1, 2 workers of one with 64 or 256 lanes

long and W1 to W3: the bare loop and the batcher alternate, window by window; one is blocked while
the other runs. Requests do not extend beyond a window. A window of the batcher repeats ``execute``,
``get`` and dropping the result; it counts the steps of the received episodes, over the time from
the first ``execute`` to the last ``get``, which is slightly more than ``--seconds``. ``ratio``
compares each window of the batcher with the mean of the two adjacent windows of the bare loop.
``bare_to_bare`` compares the bare loop with itself: its deviation from 1 is noise.

W4: ``efficiency`` is the sleep of all steps, divided by 8 times the time from ``execute`` to
``get``.

V1: the bare loop of W1 alternates with the bare loop over the vector environment and with two
batchers. ``windows`` is a ``Batcher`` whose lanes restart, with windows of 512 steps: lanes are
never idle. ``episodes`` is an ``EpisodeBatcher`` with requests of 128 episodes per lane: lanes are
idle at the end of a request, since each has a fixed share of episodes. ``ratio`` compares with W1's
bare loop, that of Python environments, and ``of_bare`` with the bare loop over the vector
environment. Steps in which lanes restart are not counted.

``requests``: W1 with the requests of training loops: small requests, of which one or two are
pending, and windows of 128 steps of 8 lanes that restart; each with and without an ``update``
before every request. ``request_us`` is the time of a ``get`` and an ``execute`` for a complete
result: the cost of a request without an update for the caller, excluding waiting for its steps or
for a core that a woken worker takes.

Prints one JSON line per workload, and every window to stderr; for ``requests`` a line per row of
the table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from bare_loop import BareLoop
from workloads import (
    V1,
    WORKLOADS,
    Window,
    Workload,
    in_turns,
    make_batcher,
    make_window_batcher,
    noise_of,
    note,
    parser_of,
    quartiles,
    seeded_policy,
    show,
)

from rlpool import EpisodeBatcher

STEP_SLEEP_S = 1e-3  # of W4

REQUESTS = ((32, 1), (32, 2), (128, 2), (512, 1), (512, 2), (8000, 1))
"""Episodes per request, and requests pending."""

N_WINDOW_STEPS, N_WINDOW_LANES = 128, 8

N_VECTOR_STEPS = 512
"""Steps of a window of V1."""


def batcher_window(batcher: EpisodeBatcher, n_episodes: int, seconds: float) -> float:
    """Collect for at least this long; returns steps per second.

    Args:
        batcher: A batcher without pending requests.
        n_episodes: Episodes per request.
        seconds: Requests are made for this long.
    """
    n_steps = 0
    start = now = time.perf_counter()
    while now - start < seconds:
        batcher.execute(n_episodes)
        n_steps += int(batcher.get().lengths.sum())
        now = time.perf_counter()
    return n_steps / (now - start)


def compare(workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Alternate between batcher and bare loop."""
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


def pending_window(
    batcher: Any, request: Callable[[], None], n_pending: int, update: Any, seconds: float
) -> float:
    """Collect with requests pending; returns steps per second.

    Args:
        batcher: A batcher without pending requests.
        request: Makes a request.
        n_pending: Number of requests pending at a time.
        update: Argument of an update before each request, ``None`` for none.
        seconds: Requests are made for this long.
    """
    for _ in range(n_pending):
        request()
    n_steps = 0
    start = now = time.perf_counter()
    while now - start < seconds:
        n_steps += int(batcher.get().lengths.sum())
        if update is not None:
            batcher.update(update)
        request()
        now = time.perf_counter()
    for _ in range(n_pending):
        batcher.get()
    return n_steps / (now - start)


def request_us(batcher: Any, request: Callable[[], None], request_s: float) -> float:
    """Return the median time of ``get`` and ``execute`` for a complete result, in microseconds.

    Args:
        batcher: A batcher without pending requests.
        request: Makes a request.
        request_s: Time of the workers for a request.
    """
    times = []
    request()
    for _ in range(20):
        time.sleep(2 * request_s + 0.01)
        start = time.perf_counter()
        batcher.get()
        request()
        times.append(time.perf_counter() - start)
    batcher.get()
    return 1e6 * statistics.median(times)


def small_requests(workload: Workload, args: argparse.Namespace) -> None:
    """Alternate between requests of training loops and the bare loop; prints the table."""
    update = seeded_policy(workload.make_policy).state_dict()
    with BareLoop(workload) as bare_loop, ExitStack() as stack:
        makers: dict[str, tuple[Any, Callable[[], None], int]] = {}
        for n_episodes, n_pending in REQUESTS:
            batcher = stack.enter_context(make_batcher(workload, n_episodes, n_pending=n_pending))
            name = f"{n_episodes} episodes, {n_pending} pending"
            makers[name] = batcher, partial(batcher.execute, n_episodes), n_pending
        narrow = replace(workload, n_lanes=N_WINDOW_LANES // workload.n_workers)
        windows = stack.enter_context(make_window_batcher(narrow, N_WINDOW_STEPS))
        windows.reset()
        name = f"windows of {N_WINDOW_LANES} lanes x {N_WINDOW_STEPS} steps"
        makers[name] = windows, windows.execute, 1
        turns = {
            f"{name}{suffix}": partial(pending_window, *maker, given)
            for name, maker in makers.items()
            for suffix, given in (("", None), (", updates", update))
        }
        _, others = in_turns(bare_loop.window, turns, args.windows, args.seconds)
        costs = {}
        for name, (batcher, request, _) in makers.items():
            start = time.perf_counter()
            request()
            batcher.get()
            costs[name] = request_us(batcher, request, time.perf_counter() - start)
    for name, (_, ratios) in others.items():
        ratio = quartiles(ratios)
        row = {"requests": name, "ratio": ratio["median"], "quartiles": ratio["quartiles"]}
        show({**row, "request_us": round(costs[name.removesuffix(", updates")])})


def vector_envs(workloads: Sequence[Workload], args: argparse.Namespace) -> None:
    """Alternate between bare loops and batchers over vector environments; prints the results."""
    for workload in workloads:
        n_episodes = args.n_episodes or workload.n_episodes
        with ExitStack() as stack:
            enter = stack.enter_context
            python_loop = enter(BareLoop(WORKLOADS["W1"]))
            windows = enter(make_window_batcher(workload, N_VECTOR_STEPS))
            windows.reset()
            episodes = enter(make_batcher(workload, n_episodes))
            turns: dict[str, Window] = {
                "bare": enter(BareLoop(workload)).window,
                "windows": partial(pending_window, windows, windows.execute, 1, None),
                "episodes": partial(batcher_window, episodes, n_episodes),
            }
            _, others = in_turns(python_loop.window, turns, args.windows, args.seconds)
        bare = others["bare"][1]
        rows = {
            name: {
                "ratio": quartiles(ratios),
                "of_bare": quartiles([ratio / of for ratio, of in zip(ratios, bare, strict=True)]),
                "steps_per_s": round(quartiles(rates)["median"]),
            }
            for name, (rates, ratios) in others.items()
        }
        size = {"n_workers": workload.n_workers, "n_lanes": workload.n_lanes}
        show({"workload": workload.name, **size, **rows})


def stragglers(workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the efficiency of requests of episodes that sleep."""
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
        # A sleep takes slightly longer than requested: the upper limit of any batcher.
        "efficiency_of_sleeping": round(STEP_SLEEP_S / measured_sleep_s(), 3),
        "n_episodes": n_episodes,
    }


def measured_sleep_s(n: int = 500) -> float:
    """Return the actual time of a sleep of ``STEP_SLEEP_S`` on this machine."""
    start = time.perf_counter()
    for _ in range(n):
        time.sleep(STEP_SLEEP_S)
    return (time.perf_counter() - start) / n


def main() -> None:
    parser = parser_of(__doc__)
    names = [*WORKLOADS, "V1", "requests"]
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--windows", type=int, default=10, help="windows of the batcher; W4: requests"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a window")
    parser.add_argument("--n-episodes", type=int, help="episodes per request, for sensitivity")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.workloads:
        if name == "V1":
            vector_envs(V1, args)
        elif name == "requests":
            small_requests(WORKLOADS["W1"], args)
        else:
            measure = stragglers if name == "W4" else compare
            show(measure(WORKLOADS[name], args), *(["mujoco"] if name == "W2" else []))


if __name__ == "__main__":
    main()
