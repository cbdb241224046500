"""What taking a result costs the caller, and whether memory stays flat.

    python benchmarks/handover.py [--repeats 15] [--requests 1000]

- ``get``: 1,000 episodes of CartPole-v1, then 32 episodes of image frames. Collected by two workers
  while the caller only polls ``progress``; once all episodes are finished, ``get()`` is timed
  alone. ``fraction`` is its time divided by the time of the collection.
- ``successor``: the first and the second access to ``_frame``, which is computed when it is first
  accessed, and a copy of ``frame`` for comparison.
- ``memory``: many small requests in a row, each result dropped when the next one has arrived.
  Memory of caller and workers together (shared pages once, without files such as libraries) and
  descriptors, at equal intervals; ``growth_mb`` is what was added after the first tenth, by the end
  of which every slot should have been written to once. Linux only.

Prints JSON lines.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import torch
from resources import workers
from workloads import WORKLOADS, Workload, make_batcher, parser_of, quartiles, show

from rlpool import EpisodeBatcher

_LOOK_S = 2e-3
"""Between two polls of the progress: short beside a collection, long beside a poll."""

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


def measure_get(workload: Workload, n_episodes: int, n_repeats: int) -> None:
    """Fractions of ``get()`` and costs of ``_frame``."""
    seconds: dict[str, list[float]] = defaultdict(list)
    with make_batcher(workload, n_episodes) as batcher:
        for _ in range(n_repeats + 1):
            collection_s = collect(batcher, n_episodes)
            start = time.perf_counter()
            result = batcher.get()
            seconds["get"].append(time.perf_counter() - start)
            seconds["collection"].append(collection_s)
            seconds["first"].append(seconds_of(result.__getitem__, "_frame"))
            seconds["second"].append(seconds_of(result.__getitem__, "_frame"))
            seconds["copy_of_frame"].append(seconds_of(result["frame"].clone))
            n_bytes = result["frame"].nbytes
            del result
    kept = {name: values[1:] for name, values in seconds.items()}  # the first one warms up
    pairs = zip(kept["get"], kept["collection"], strict=True)
    fraction = quartiles([get / collection for get, collection in pairs], 5)
    ms = {f"{name}_ms": round(1e3 * statistics.median(kept[name]), 3) for name in kept}
    about = {"workload": workload.name, "n_episodes": n_episodes}
    get_ms = {name: ms.pop(name) for name in ("get_ms", "collection_ms")}
    figures = {"fraction": fraction["median"], "quartiles": fraction["quartiles"]}
    show({"measure": "get", **about, **figures, "n": fraction["n"], **get_ms})
    show({"measure": "successor", **about, **ms, "frame_mb": round(n_bytes / 1e6, 1)})


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
    """Anonymous and shared memory of some processes, counting every page once.

    Pages of files are left out: how much of a library counts for a process depends on who else
    uses it on this machine.
    """
    kilobytes = 0
    for process in processes:
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                kilobytes += int(line.split()[1])
    return round(kilobytes * 1024 / 1e6, 1)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="results that are timed")
    parser.add_argument("--requests", type=int, default=1000, help="requests of the memory test")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name, n_episodes in (("W1", 1000), ("W3", 32)):
        measure_get(WORKLOADS[name], n_episodes, args.repeats)
    for name, n_episodes in (("W1", 64), ("W3", 32)):
        show(measure_memory(WORKLOADS[name], n_episodes, args.requests))


if __name__ == "__main__":
    main()
