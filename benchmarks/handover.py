"""What it costs the caller to take a result, and whether memory stays flat.

    python benchmarks/handover.py [--repeats 15] [--requests 1000]

- ``get``: 1,000 episodes of CartPole-v1, then 32 episodes of image frames. Collected by two workers
  while the caller does nothing but look at ``progress`` now and then; once all episodes are
  finished, ``get()`` is timed alone. ``fraction`` is its time by that of the collection.
- ``successor``: the first and the second look at ``_frame``, which is computed when it is first
  asked for, and the copy of ``frame`` for comparison.
- ``memory``: many small requests in a row, each result dropped when the next one has arrived.
  Memory of caller and workers together (shared pages once, files such as libraries left out) and
  descriptors, at equal distances; ``growth_mb`` is what was added after the first tenth, by the end
  of which every slot should have been written to once. Linux only.

Prints JSON lines.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from resources import workers
from workloads import WORKLOADS, Workload, make_batcher, quartiles, versions

from rlpool import EpisodeBatcher

_LOOK_S = 2e-3
"""Between two looks at the progress: short against a collection, long against a look."""

_SETTLE_S = 0.05
"""Between the last episode and ``get()``, for the workers' last messages to arrive."""


def collect(batcher: EpisodeBatcher, n_episodes: int) -> float:
    """Request episodes and wait until all are finished; returns the seconds that took."""
    start = time.perf_counter()
    batcher.execute(n_episodes)
    while batcher.progress[0] < n_episodes:
        time.sleep(_LOOK_S)
    elapsed_s = time.perf_counter() - start
    time.sleep(_SETTLE_S)
    return elapsed_s


def seconds_of(function: Any, *args: Any) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def measure_get(workload: Workload, n_episodes: int, n_repeats: int) -> list[dict[str, Any]]:
    """Fractions of ``get()`` and costs of ``_frame``."""
    fractions, gets_s, collections_s = [], [], []
    first_s, second_s, copy_s = [], [], []
    n_bytes = 0
    with make_batcher(workload, n_episodes) as batcher:
        for repeat in range(-1, n_repeats):
            collection_s = collect(batcher, n_episodes)
            start = time.perf_counter()
            result = batcher.get()
            get_s = time.perf_counter() - start
            costs = [seconds_of(result.__getitem__, "_frame") for _ in range(2)]
            costs.append(seconds_of(result["frame"].clone))
            n_bytes = result["frame"].nbytes
            del result
            if repeat < 0:
                continue  # warm-up
            fractions.append(get_s / collection_s)
            gets_s.append(get_s)
            collections_s.append(collection_s)
            for values, cost in zip((first_s, second_s, copy_s), costs, strict=True):
                values.append(cost)
    about = {"workload": workload.name, "n_episodes": n_episodes}
    fraction = quartiles(fractions, 5)
    return [
        {
            "measure": "get",
            **about,
            "fraction": fraction["median"],
            "quartiles": fraction["quartiles"],
            "n": fraction["n"],
            "get_ms": milliseconds(gets_s),
            "collection_ms": milliseconds(collections_s),
        },
        {
            "measure": "successor",
            **about,
            "first_ms": milliseconds(first_s),
            "second_ms": milliseconds(second_s),
            "copy_of_frame_ms": milliseconds(copy_s),
            "frame_mb": round(n_bytes / 1e6, 1),
        },
    ]


def measure_memory(workload: Workload, n_episodes: int, n_requests: int) -> dict[str, Any]:
    """Memory and descriptors over many requests."""
    caller = psutil.Process()
    memory_mb, caller_descriptors, worker_descriptors = [], [], []
    every = max(1, n_requests // 10)
    with make_batcher(workload, n_episodes) as batcher:
        children = workers()
        result = None
        for request in range(1, n_requests + 1):
            batcher.execute(n_episodes)
            # The variable holds the result before until this one is there.
            result = batcher.get()
            result["frame"][:, ::8].max()  # looked at: only then its pages are the caller's too
            if request % every == 0:
                gc.collect()
                memory_mb.append(memory_mb_of([caller, *children]))
                caller_descriptors.append(caller.num_fds())
                worker_descriptors.append(sum(worker.num_fds() for worker in children))
        del result
    return {
        "measure": "memory",
        "workload": workload.name,
        "n_episodes": n_episodes,
        "n_requests": n_requests,
        "growth_mb": round(memory_mb[-1] - memory_mb[0], 1),
        "memory_mb": memory_mb,
        "caller_descriptors": caller_descriptors,
        "worker_descriptors": worker_descriptors,
    }


def memory_mb_of(processes: list[psutil.Process]) -> float:
    """Anonymous and shared memory of some processes, every page once.

    Pages of files are left out: how much of a library counts for a process depends on who else
    uses it on this machine.
    """
    kilobytes = 0
    for process in processes:
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                kilobytes += int(line.split()[1])
    return round(kilobytes * 1024 / 1e6, 1)


def milliseconds(seconds: list[float]) -> float:
    """Median in milliseconds."""
    return round(1e3 * statistics.median(seconds), 3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15, help="results that are timed")
    parser.add_argument("--requests", type=int, default=1000, help="requests of the memory test")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name, n_episodes in (("W1", 1000), ("W3", 32)):
        show(*measure_get(WORKLOADS[name], n_episodes, args.repeats))
    for name, n_episodes in (("W1", 64), ("W3", 32)):
        show(measure_memory(WORKLOADS[name], n_episodes, args.requests))


def show(*figures: dict[str, Any]) -> None:
    for figure in figures:
        print(json.dumps({**figure, "versions": versions()}), flush=True)


if __name__ == "__main__":
    main()
