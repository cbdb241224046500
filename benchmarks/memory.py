"""Memory of the caller during collection, and its growth. Linux only.

    python benchmarks/memory.py [--parts peak growth] [--requests 1000]

- ``peak``: maximum memory of the caller while it makes a batcher, collects 32 episodes of 200
  frames of 84 × 84 × 4 bytes, ``n_results`` times, with ``n_pending`` requests at a time, and reads
  each result completely, dropping it before the next request. It is given as a multiple of the
  bytes of one result, without keys such as ``_frame``, which are copies made on access. Measured
  as the growth of the largest resident set (VmHWM), plus shared memory that workers have written
  but the caller has not read. Each line is measured in a separate process. With fewer slots than
  episodes, results are joined from chunks that were copied out of their slots.
- ``growth``: many successive small requests, each result dropped when the next one has arrived.
  Total memory of caller and workers (shared pages counted once, without files such as libraries)
  and descriptors, at equal intervals; ``growth_mb`` is the growth after the first tenth, by when
  every slot should have been written once.

Prints JSON lines, with the threshold, if any, and whether it is met.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from resources import workers
from workloads import (
    FRAMES,
    WORKLOADS,
    FramesEnv,
    Workload,
    make_batcher,
    make_frames_policy,
    parser_of,
    show,
)

PEAKS = [  # workers (0: the caller collects), slots, pending requests, results
    (2, 32, 1, 1),
    (2, 32, 1, 10),
    (2, 64, 2, 10),
    (0, 32, 1, 10),
    (2, 16, 1, 10),
]

PEAK_BAR = 1.05
"""Maximum peak per pending request, if every episode has its own slot."""


def measure_peak(n_workers: int, n_slots: int, n_pending: int, n_results: int) -> dict[str, Any]:
    """Return the maximum memory of this process, which should be fresh, during collection."""
    torch.set_num_threads(1)
    small = Workload("small", partial(FramesEnv, 8), make_frames_policy, 2, 8, 16, 8)
    peak_and_size(small, n_workers, 16, 1, 1)  # imports and one-time allocations
    peak, n_bytes = peak_and_size(FRAMES, n_workers, n_slots, n_pending, n_results)
    figures = {"peak": round(peak / n_bytes, 3), "result_mb": round(n_bytes / 1e6, 1)}
    if n_slots >= n_pending * FRAMES.n_episodes:
        bar = PEAK_BAR * n_pending
        figures |= {"bar": bar, "is_met": peak <= bar * n_bytes}
    about = {"n_workers": n_workers, "n_slots": n_slots, "n_pending": n_pending}
    return {"measure": "peak", **about, "n_results": n_results, **figures}


def peak_and_size(
    workload: Workload, n_workers: int, n_slots: int, n_pending: int, n_results: int
) -> tuple[int, int]:
    """Collect; returns the maximum growth of this process, and the size of a result, in bytes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, shared_before = bytes_of("VmRSS"), bytes_of("RssShmem")
    peak = n_bytes = 0
    with make_batcher(workload, n_slots, n_workers) as batcher:
        for _ in range(n_pending - 1):
            batcher.execute(workload.n_episodes)
        for _ in range(n_results):
            batcher.execute(workload.n_episodes)
            result = batcher.get()
            stored = [result[key] for key in result if not key.startswith("_")]
            for tensor in stored:
                tensor.max()
            n_bytes = sum(tensor.nbytes for tensor in stored)
            unread = shared_bytes() - (bytes_of("RssShmem") - shared_before)
            peak = max(peak, bytes_of("VmHWM") - before + unread)
            del result, stored, tensor
    return peak, n_bytes


def bytes_of(name: str) -> int:
    """Return a value of the kernel's memory statistics of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def shared_bytes() -> int:
    """Return the bytes written to anonymous files that this process has open."""
    n_bytes = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            if os.readlink(path).startswith("/memfd:"):
                n_bytes += 512 * path.stat().st_blocks
    return n_bytes


def measure_growth(workload: Workload, n_episodes: int, n_requests: int) -> dict[str, Any]:
    """Measure memory and descriptors over many requests."""
    caller = psutil.Process()
    memory_mb, caller_descriptors, worker_descriptors = [], [], []
    every = max(1, n_requests // 10)
    with make_batcher(workload, n_episodes) as batcher:
        children = workers()
        result = None
        for request in range(1, n_requests + 1):
            batcher.execute(n_episodes)
            # The variable keeps the previous result until this one has arrived.
            result = batcher.get()
            result["frame"][:, ::8].max()  # reading maps its pages into the caller
            if request % every == 0:
                gc.collect()
                memory_mb.append(memory_mb_of([caller, *children]))
                caller_descriptors.append(caller.num_fds())
                worker_descriptors.append(sum(worker.num_fds() for worker in children))
        del result
    return {
        "measure": "growth",
        "workload": workload.name,
        "n_episodes": n_episodes,
        "n_requests": n_requests,
        "growth_mb": round(memory_mb[-1] - memory_mb[0], 1),
        "memory_mb": memory_mb,
        "caller_descriptors": caller_descriptors,
        "worker_descriptors": worker_descriptors,
    }


def memory_mb_of(processes: list[psutil.Process]) -> float:
    """Return anonymous and shared memory of some processes, counting every page once.

    Pages of files are excluded: the share of a library in a process's memory depends on other
    processes on this machine.
    """
    kilobytes = 0
    for process in processes:
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                kilobytes += int(line.split()[1])
    return round(kilobytes * 1024 / 1e6, 1)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", default=["peak", "growth"], help="measurements")
    parser.add_argument("--requests", type=int, default=1000, help="requests of each growth")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for peak in PEAKS if "peak" in args.parts else []:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            show(fresh.submit(measure_peak, *peak).result())
    for name, n_episodes in (("W1", 64), ("W3", 32)) if "growth" in args.parts else ():
        show(measure_growth(WORKLOADS[name], n_episodes, args.requests))


if __name__ == "__main__":
    main()
