"""Predicted throughput of many workers on one machine, from measurements with few workers.

    python benchmarks/many_workers.py [--sleep-ms 1] [--seconds 4]

Environments sleep instead of computing, so a step needs little processor time and many workers fit
on few cores. Each worker has one environment. The caller has its own core and the workers share the
others, so the caller's work takes as long as on a machine with a core per process. An environment
reads the clock at the beginning of each step: the time since its previous step is its *cycle*,
which includes all waiting.

``episodes``: two requests pending, each of 4 episodes of 10 to 40 steps per worker. ``windows``: a
``Batcher``, 128 steps per window.

The model: the cycle of a single worker consists of a time ``z`` without a processor, and the
processor time ``p`` of a step. ``n`` workers on ``m`` cores are a closed queue: each is away for
``z`` and then needs a core for ``p``, as in M/M/m//n. With a core per worker the cycle is ``z + p``
again, plus the serial parts, which do not depend on the number of cores:

- claims: a lock, held for ``claim_us`` per claim (measured for this number of workers, without
  processes): a worker waits as in M/D/1;
- the caller: processor time ``c0 + c1 n`` per request, fitted on up to 8 workers. With two requests
  pending, workers do not wait for it while this is less than the time of a request;
- windows: a single worker waits ``gap_ms`` between windows, by its own clock. Many workers wait
  longer by the additional time of the caller's ``get``, ``g0 + g1 n``, measured when all messages
  have already arrived, although most are handled while other workers still run. (The wait measured
  here is even longer, since all workers prepare their windows on the same core.)

``efficiency`` is the time of a bare sleep divided by the cycle. Steps take longer in larger runs so
that the cores suffice (``RUNS``), and ``p`` is measured in each run, since processes that share a
core also share its cache. The model ignores memory bandwidth, reduced clock rates under load, and
locks of the kernel.

Prints a JSON line per run with ``cycle_ms`` and the model's expectation (for 64 workers also start
time and memory per worker), then one per prediction.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from resources import workers
from workloads import (
    WORKLOADS,
    StragglerEnv,
    Workload,
    make_batcher,
    make_window_batcher,
    parser_of,
    show,
)

from rlpool.batch.plans import Claims
from rlpool.data.storage import Memory

MOST_FITTED = 8
RUNS = ((1, 1), (2, 1), (4, 1), (8, 1), (2, 10), (8, 10), (16, 5), (32, 15), (64, 30))
"""Numbers of workers, and the factor of the sleep of steps in that run."""

PREDICTED = (64, 256)

N_EPISODES, N_STEPS = 4, (10, 40)
"""Per worker and request; shortest and longest episode."""

N_WINDOW_STEPS = 128


class CyclesEnv(StragglerEnv):
    """Observes the time between the last two steps, in seconds."""

    _before = 0.0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        now = time.perf_counter()
        self._observation = np.array([now - self._before], np.float32)
        self._before = now
        return super().step(action)


@dataclass(frozen=True)
class Run:
    """Measurements of a run, in seconds.

    Attributes:
        kind: ``episodes`` or ``windows``.
        n: Number of workers.
        bare_s: Time of a bare sleep.
        cycle_s: The mean cycle; in windows without the first step.
        processor_s: Processor time of a worker per step.
        gap_s: Additional time of the first cycle of a window.
        request_s: Median processor time of the caller per request.
        get_s: The same if all messages have already arrived.
        start_s: Time until the workers were ready.
        memory_mb: Mean private and proportional memory of a worker.
        load: Load averages at its end.
    """

    kind: str
    n: int
    bare_s: float
    cycle_s: float
    processor_s: float
    gap_s: float
    request_s: float
    get_s: float
    start_s: float
    memory_mb: tuple[float, float]
    load: tuple[float, float, float]

    @property
    def length_s(self) -> float:
        """Time of a request."""
        if self.kind == "windows":
            return N_WINDOW_STEPS * self.cycle_s + self.gap_s
        return N_EPISODES * sum(N_STEPS) / 2 * self.cycle_s


# Measuring --------------------------------------------------------------------------------------


def measured(kind: str, n: int, sleep_s: float, seconds: float) -> Run:
    """Run requests for some time, with the caller on its own core."""
    env = partial(CyclesEnv, sleep_s, *N_STEPS)
    workload = replace(WORKLOADS["W4"], make_env=env, n_workers=n, n_timesteps=N_STEPS[1])
    cores = sorted(os.sched_getaffinity(0))
    before_s = bare_sleep_s(sleep_s)
    start_s = time.perf_counter()
    batcher, execute = opened(kind, workload)
    with batcher:
        start_s = time.perf_counter() - start_s
        pids = [worker.pid for worker in workers()]
        for pid, core in [(0, cores[:1]), *((pid, cores[1:]) for pid in pids)]:
            os.sched_setaffinity(pid, core)
        try:
            figures = collected(batcher, execute, pids, seconds)
        finally:
            os.sched_setaffinity(0, cores)
        sizes = [worker.memory_full_info() for worker in workers()]
    bare_s = (before_s + bare_sleep_s(sleep_s)) / 2
    memory_mb = tuple(np.mean([(size.uss, size.pss) for size in sizes], axis=0) / 1e6)
    return Run(kind, n, bare_s, *figures, start_s, memory_mb, os.getloadavg())


def opened(kind: str, workload: Workload) -> tuple[Any, Callable[[], None]]:
    """Return a batcher with ready workers, and a function that makes a request."""
    if kind == "windows":
        windows = make_window_batcher(workload, N_WINDOW_STEPS, workload.n_workers)
        windows.reset()
        return windows, windows.execute
    n_episodes = N_EPISODES * workload.n_workers
    batcher = make_batcher(workload, n_episodes, n_pending=2)
    return batcher, partial(batcher.execute, n_episodes)


def collected(
    batcher: Any, execute: Callable[[], None], pids: Sequence[int], seconds: float
) -> tuple[float, float, float, float, float]:
    """Keep two requests pending; returns cycle, processor time, gap, request and get."""
    for _ in range(3):
        execute()
    batcher.get()
    used_s, start_s = processor_s(pids), time.perf_counter()
    first, others, own_s = [], [], []
    while time.perf_counter() < start_s + seconds or len(own_s) < 2:
        own_start_s = time.process_time()
        result = batcher.get()
        execute()
        own_s.append(time.process_time() - own_start_s)
        cycles = result["_frame"][..., 0].numpy()
        is_step = np.arange(cycles.shape[1]) < result.lengths.numpy()[:, None]
        first.append(cycles[:, 0])
        others.append(cycles[:, 1:][is_step[:, 1:]])
    wall_s, request_s = time.perf_counter() - start_s, float(np.median(own_s))
    used_s = processor_s(pids) - used_s
    first_s, other_s = (np.concatenate(part) for part in (first, others))
    mean_s = float(np.concatenate([first_s, other_s]).mean())
    gap_s = float(first_s.mean() - other_s.mean())
    n_steps = wall_s * len(pids) / mean_s  # results only count steps of whole requests
    if isinstance(execute, partial):  # an episode's first cycle is like any other
        return mean_s, used_s / n_steps, 0.0, request_s, 0.0
    get_s = late_get_s(batcher, execute, wall_s / len(own_s))
    return float(other_s.mean()), used_s / n_steps, gap_s, request_s, get_s


def late_get_s(batcher: Any, execute: Callable[[], None], length_s: float) -> float:
    """Return the caller's median processor time for a complete window."""
    times = []
    for _ in range(min(9, 3 + int(1 / length_s))):
        time.sleep(1.5 * length_s)
        start_s = time.process_time()
        batcher.get()
        execute()
        times.append(time.process_time() - start_s)
    return float(np.median(times))


def processor_s(pids: Sequence[int]) -> float:
    """Return the processor time used by processes."""
    texts = [Path(f"/proc/{pid}/schedstat").read_text() for pid in pids]
    return sum(int(text.split()[0]) for text in texts) / 1e9


def bare_sleep_s(sleep_s: float) -> float:
    """Return the actual time of a sleep of this length."""
    n = max(10, round(0.5 / sleep_s))
    start_s = time.perf_counter()
    for _ in range(n):
        time.sleep(sleep_s)
    return (time.perf_counter() - start_s) / n


def claim_s(n: int, n_claims: int = 3000) -> float:
    """Return the time for which a claim holds the lock."""
    memory = Memory.shared(4096)
    claims = Claims({"claim": np.zeros((n, 1), np.int64)}, 10 * n_claims, memory.fd)
    times = []
    for _ in range(5):
        start_s = time.perf_counter()
        for i in range(n_claims // 5):
            claims.make(i % n, [0])
        times.append((time.perf_counter() - start_s) * 5 / n_claims)
    return min(times)


# The model --------------------------------------------------------------------------------------


def queued_cycle_s(n: int, m: int, away_s: float, needs_s: float) -> float:
    """Return the mean cycle of n workers that are away for a time and then need one of m cores."""
    weight, weights = 1.0, [1.0]  # of k workers at the cores
    for k in range(n):
        weight *= (n - k) * needs_s / (away_s * min(k + 1, m))
        weights.append(weight)
    busy = np.minimum(np.arange(n + 1), m) @ np.array(weights) / sum(weights)
    return float(n * needs_s / busy)


class Fitted:
    """Fitted costs of the caller, from the runs of few workers.

    Args:
        runs: All runs of one kind, one worker first.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.alone = runs[0]
        few = [run for run in runs if run.n <= MOST_FITTED]
        terms = np.array([(1, run.n) for run in few])
        self._costs, *_ = np.linalg.lstsq(terms, [run.request_s for run in few], rcond=None)
        self._gets, *_ = np.linalg.lstsq(terms, [run.get_s for run in few], rcond=None)

    def request_s(self, n: int) -> float:
        """Return the caller's processor time for a request."""
        return float(self._costs @ (1, n))

    def get_s(self, n: int) -> float:
        """Return the caller's processor time for a complete window."""
        return float(self._gets @ (1, n))


def predict(fitted: Fitted, n: int) -> dict[str, Any]:
    """Predict the efficiency of ``n`` workers with a core each."""
    alone, figures = fitted.alone, {}
    cycle_s = alone.cycle_s
    if alone.kind == "windows":
        gap_s = alone.gap_s + fitted.get_s(n) - fitted.get_s(1)
        cycle_s += gap_s / N_WINDOW_STEPS
        figures["gap_ms"] = round(1e3 * gap_s, 2)
    else:
        held_s, episode_s = claim_s(n), cycle_s * sum(N_STEPS) / 2
        share = n * held_s / episode_s
        cycle_s *= 1 + held_s * share / (2 * (1 - share)) / episode_s
        figures = {"claim_us": round(1e6 * held_s, 1), "lock_share": round(share, 4)}
    length_s = replace(alone, cycle_s=cycle_s, gap_s=0.0).length_s
    share = fitted.request_s(n) / length_s
    efficiency = alone.bare_s / cycle_s / max(1.0, share)
    shares = {"efficiency": round(efficiency, 3), "caller_share": round(share, 3)}
    return {"predicted": alone.kind, "n_workers": n, **shares, **figures}


def show_run(run: Run, fitted: Fitted, n_cores: int) -> None:
    """Print a run with the model's expectation."""
    alone = fitted.alone
    away_s = alone.cycle_s - alone.processor_s + run.bare_s - alone.bare_s
    modelled_s = queued_cycle_s(run.n, n_cores, away_s, run.processor_s)
    request_s = fitted.request_s(run.n)
    figures = {
        "kind": run.kind,
        "n_workers": run.n,
        "sleep_ms": round(1e3 * run.bare_s, 3),
        "cycle_ms": [round(1e3 * s, 3) for s in (run.cycle_s, modelled_s)],
        "processor_us": round(1e6 * run.processor_s, 1),
        "caller_ms": [round(1e3 * s, 2) for s in (run.request_s, request_s)],
        "load": [round(average, 2) for average in run.load],
    }
    if run.kind == "windows":
        figures["gap_ms"] = round(1e3 * run.gap_s, 2)
        figures["get_ms"] = [round(1e3 * s, 2) for s in (run.get_s, fitted.get_s(run.n))]
    if run.n == RUNS[-1][0]:
        figures["start_s"] = round(run.start_s, 2)
        figures["private_and_proportional_mb"] = [round(size, 1) for size in run.memory_mb]
    show(figures)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sleep-ms", type=float, default=1.0, help="sleep of the shortest steps")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a run")
    parser.add_argument("--kinds", nargs="+", default=["episodes", "windows"])
    args = parser.parse_args()
    n_cores = len(os.sched_getaffinity(0)) - 1
    if not n_cores:
        parser.error("at least two cores are needed: one for the caller, the others for workers")
    torch.set_num_threads(1)
    for kind in args.kinds:
        runs = []
        for n, times in RUNS:
            runs.append(measured(kind, n, times * args.sleep_ms / 1e3, args.seconds))
        fitted = Fitted(runs)
        for run in runs:
            show_run(run, fitted, n_cores)
        for n in PREDICTED:
            show(predict(fitted, n))


if __name__ == "__main__":
    main()
