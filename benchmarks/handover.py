"""Cost of receiving a result for the caller.

    python benchmarks/handover.py [--repeats 15]

- ``get``: 1,000 episodes of CartPole-v1, then 32 episodes of 200 image frames. Collected by two
  workers while the caller only polls ``progress``; ``get()`` is timed after all episodes have
  finished. ``fraction`` is its time divided by the time of the collection.
- ``successor``: the first and the second access to ``_frame``, which is computed on first access,
  and a copy of ``frame`` for comparison.

Prints JSON lines, with the threshold, if any, and whether the median meets it.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from workloads import FRAMES, WORKLOADS, Workload, make_batcher, parser_of, quartiles, show

from rlpool import EpisodeBatcher

_LOOK_S = 2e-3
"""Interval between polls of the progress: much shorter than a collection, longer than a poll."""

_SETTLE_S = 0.05
"""Wait between the last episode and ``get()``, for the workers' last messages to arrive."""

BARS = {"frames": 0.02}
"""Maximum median of ``fraction``, by workload."""


def collect(batcher: EpisodeBatcher, n_episodes: int) -> float:
    """Request episodes and wait until all are finished; returns the time in seconds."""
    start = time.perf_counter()
    batcher.execute(n_episodes)
    while batcher.progress[0] < n_episodes:
        time.sleep(_LOOK_S)
    elapsed_s = time.perf_counter() - start
    time.sleep(_SETTLE_S)
    return elapsed_s


def seconds_of(function: Any, *args: Any) -> float:
    """Return the time of one call."""
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def measure_get(workload: Workload, n_episodes: int, n_repeats: int) -> None:
    """Measure the fractions of ``get()`` and the cost of ``_frame``."""
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
    kept = {name: values[1:] for name, values in seconds.items()}  # without the warm-up
    pairs = zip(kept["get"], kept["collection"], strict=True)
    fraction = quartiles([get / collection for get, collection in pairs], 5)
    ms = {f"{name}_ms": round(1e3 * statistics.median(kept[name]), 3) for name in kept}
    about = {"workload": workload.name, "n_episodes": n_episodes}
    get_ms = {name: ms.pop(name) for name in ("get_ms", "collection_ms")}
    figures = {"fraction": fraction["median"], "quartiles": fraction["quartiles"]}
    bar = BARS.get(workload.name)
    if bar is not None:
        figures |= {"bar": bar, "is_met": fraction["median"] <= bar}
    show({"measure": "get", **about, **figures, "n": fraction["n"], **get_ms})
    show({"measure": "successor", **about, **ms, "frame_mb": round(n_bytes / 1e6, 1)})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="timed results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for workload, n_episodes in ((WORKLOADS["W1"], 1000), (FRAMES, 32)):
        measure_get(workload, n_episodes, args.repeats)


if __name__ == "__main__":
    main()
