"""Start-up and footprint of workers.

    python benchmarks/startup.py [--repeats 3]

- ``first_data``: seconds from creating the batcher to having the first episodes, for 2 and for 8
  workers.
- ``private_memory``: memory that is a worker's alone (unique set size) after its first episodes,
  minus that of processes that were started in the same way and do nothing but import torch and
  gymnasium.
- ``descriptors``: descriptors in the caller per worker, while a batcher is open, and those left
  over when it is closed.
- ``slow_create_env``: how much later four workers are ready when each ``create_env`` takes 1 s.

Prints JSON lines. Imports what it needs inside of functions, because spawned processes import this
module.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from rlpool import EpisodeBatcher, GymEnv

_END_S = 5.0


def measure_start(n_workers: int, n_repeats: int) -> list[dict[str, Any]]:
    """Time to the first data, memory of the workers and descriptors of the caller."""
    import psutil

    caller = psutil.Process()
    first_data_s, workers_mb, per_worker, n_left = [], [], [], 0
    for _ in range(n_repeats):
        others = set(caller.children())
        n_before = caller.num_fds()
        start = time.perf_counter()
        with make_batcher(n_workers) as batcher:
            batcher.execute(n_workers)
            batcher.get()
            first_data_s.append(time.perf_counter() - start)
            workers = [child for child in caller.children() if child not in others]
            # multiprocessing starts its resource tracker along with the first worker.
            workers = [worker for worker in workers if "spawn_main" in "".join(worker.cmdline())]
            workers_mb += [private_mb(worker) for worker in workers]
            per_worker.append((caller.num_fds() - n_before) / n_workers)
        n_left = caller.num_fds() - n_before
    bare_mb = imported_mb(n_repeats)
    about = {"n_workers": n_workers, "n": n_repeats}
    return [
        {"measure": "first_data", **about, "seconds": median(first_data_s)},
        {
            "measure": "private_memory",
            **about,
            "worker_mb": median(workers_mb),
            "imports_only_mb": median(bare_mb),
            "difference_mb": round(median(workers_mb) - median(bare_mb), 1),
        },
        {
            "measure": "descriptors",
            **about,
            "per_worker": median(per_worker),
            "left_after_close": n_left,
        },
    ]


def measure_slow_create_env(n_workers: int, n_repeats: int) -> dict[str, Any]:
    """Time until workers are ready, with and without a slow ``create_env``, in turns."""
    ready_s: dict[float, list[float]] = {0.0: [], 1.0: []}
    for _ in range(n_repeats):
        for delay_s, values in ready_s.items():
            start = time.perf_counter()
            with make_batcher(n_workers, delay_s):
                values.append(time.perf_counter() - start)
    fast, slow = (median(values) for values in ready_s.values())
    return {
        "measure": "slow_create_env",
        "n_workers": n_workers,
        "n": n_repeats,
        "ready_s": fast,
        "ready_with_1_s_create_env_s": slow,
        "difference_s": round(slow - fast, 2),
    }


def make_batcher(n_workers: int, delay_s: float = 0.0) -> EpisodeBatcher:
    """A small batcher on CartPole-v1, which spares memory for the sake of the measurement."""
    from workloads import WORKLOADS, PolicyAgent

    from rlpool import EpisodeBatcher

    return EpisodeBatcher(
        n_timesteps=100,
        n_slots=2 * n_workers,
        create_agent=PolicyAgent,
        agent_args={"make_policy": WORKLOADS["W1"].make_policy},
        create_env=create_env_slowly,
        env_args={"delay_s": delay_s},
        n_threads=n_workers,
        seeds=0,
    )


def create_env_slowly(delay_s: float, seed: int | None = None) -> GymEnv:
    from workloads import create_env, make_cartpole

    time.sleep(delay_s)
    return create_env(make_cartpole, 1, seed)


def imported_mb(n_processes: int) -> list[float]:
    """Private memory of processes that import torch and gymnasium, one at a time."""
    import psutil

    context = multiprocessing.get_context("spawn")
    sizes = []
    for _ in range(n_processes):
        here, there = context.Pipe()
        process = context.Process(target=only_import, args=(there,), daemon=True)
        process.start()
        there.close()
        try:
            here.recv()
            sizes.append(private_mb(psutil.Process(process.pid)))
        finally:
            here.close()
            process.join(_END_S)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
    return sizes


def only_import(pipe: Connection) -> None:
    import gymnasium  # noqa: F401
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send("ready")
        pipe.recv()
    except (EOFError, OSError):
        pass  # measured


def private_mb(process: Any) -> float:
    return float(process.memory_full_info().uss / 1e6)


def median(values: list[float]) -> float:
    return round(statistics.median(values), 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    with make_batcher(1):
        pass  # what happens once per process: multiprocessing's resource tracker, imports
    for n_workers in (2, 8):
        show(*measure_start(n_workers, args.repeats))
    show(measure_slow_create_env(4, args.repeats))


def show(*figures: dict[str, Any]) -> None:
    from workloads import versions

    for figure in figures:
        print(json.dumps({**figure, "versions": versions()}), flush=True)


if __name__ == "__main__":
    main()
