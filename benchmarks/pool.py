"""Speed and memory of the pool, compared with other replay buffers.

    python benchmarks/pool.py [--sizes 10000 1000000] [--rounds 15] [--threads 1] [--frames 200000]
                              [--stacks 50000] [--stacked 1000000]

The others are TorchRL, Stable-Baselines3, tianshou and cpprb (``requirements-pool.txt``); one that
is not installed is reported as missing. All store the same five keys and get the same trajectory
batch, so flattening is included for all; see ``pool_peers.py`` for their configuration.

- ``extend``: 10,000 transitions of CartPole-v1, episodes of an untrained policy. The pools are
  full, so these replace the oldest ones.
- ``extend_result``: the same for the pool with a result of ``EpisodeBatcher.get()`` that has not
  been accessed. The others are timed as for ``extend``, without the cost of computing ``_frame``.
- ``sample``: 256 transitions, uniformly.
- ``sequences``: 32 pieces of episodes of at most 64 steps. Most others do not support this (frame
  stacking returns only observations).
- ``prioritised``: 256 transitions in proportion to their priorities with importance weights, and
  then new priorities for them.

In each round every contender runs every operation, in random order, each for ``--window`` seconds.
``ratio`` is the time of the other divided by that of the pool in the same round, so the pool is
faster above 1. Samples are torch tensors or NumPy arrays, as returned by the contender.

- ``memory``: a full pool of 84 × 84 uint8 image frames in episodes of 100 steps. Its ``nbytes``,
  and the growth of this process, divided by the bytes of one frame per transition.
- ``frame_stack``: pools of stacks of four such frames, with and without ``frame_stack=4``: bytes
  per transition, and the times of the former divided by those of the latter, measured alternately.
  Episodes of 1,000 steps are added in windows of 128. ``--stacked N`` only fills the former, with N
  transitions.

Prints JSON lines.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
from pool_peers import KEYS, PEERS, Contender, RlPool
from workloads import SEED, WORKLOADS, make_batcher, quartiles, versions

from rlpool import Pool, TemporalDictTensor

N_TRANSITIONS = 10_000
N_EPISODES = 600  # more than enough for N_TRANSITIONS
EPISODE_FRAMES = 100
STACK_EPISODE = 1000
Watch = Callable[[], float]
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def episodes() -> tuple[TemporalDictTensor, TemporalDictTensor]:
    """Return exactly ``N_TRANSITIONS`` in ordinary tensors, and a result of a batcher.

    The latter has the same episodes except for the last one, and its ``_frame`` is not computed.
    """
    with make_batcher(WORKLOADS["W1"], N_EPISODES, n_threads=0) as batcher:
        batcher.execute(N_EPISODES)
        result = batcher.get()
    n_whole = int((result.lengths.cumsum(0) <= N_TRANSITIONS).sum())
    lengths = result.lengths[: n_whole + 1].clone()
    lengths[-1] = N_TRANSITIONS - int(lengths[:-1].sum())
    longest = int(lengths.max())
    tensors = {key: result[key][: n_whole + 1, :longest].contiguous() for key in KEYS}
    with make_batcher(WORKLOADS["W1"], n_whole, n_threads=0) as batcher:
        batcher.execute(n_whole)
        return TemporalDictTensor(tensors, lengths), batcher.get()


def stopwatch(function: Callable[[], Any], window_s: float, clock: Callable[[], float]) -> Watch:
    """Return a function that times another one for roughly ``window_s``: seconds per call."""

    def seconds(n_calls: int) -> float:
        start = clock()
        for _ in range(n_calls):
            function()
        return (clock() - start) / n_calls

    seconds(1)  # warm-up: compilation, allocation, caches
    return partial(seconds, max(1, int(window_s / min(seconds(1) for _ in range(3)))))


def contenders(
    size: int, batch: TemporalDictTensor, *, prioritised: bool
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return filled stores by name, and the reasons why others are missing."""
    made: dict[str, Contender] = {}
    missing: dict[str, str] = {}
    for kind in (RlPool, *PEERS):
        if prioritised and "prioritised" not in kind.operations:
            continue
        try:
            made[kind.name] = contender = kind(size, prioritised=prioritised)
        except (ImportError, RuntimeError) as error:  # RuntimeError: TorchRL without its C++
            missing[kind.name] = str(error)
            continue
        for _ in range(-(-size // N_TRANSITIONS)):
            contender.extend(batch)
    return made, missing


def watches(size: int, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """Return stopwatches by operation and contender, and the reasons why others are missing."""
    batch, result = episodes()
    uniform, missing = contenders(size, batch, prioritised=False)
    by_priority, missing_too = contenders(size, batch, prioritised=True)
    functions: dict[str, dict[str, Callable[[], Any]]] = {}
    for operation in ("sample", "sequences", "prioritised"):
        stores = by_priority if operation == "prioritised" else uniform
        able = {name: store for name, store in stores.items() if operation in store.operations}
        functions[operation] = {name: getattr(store, operation) for name, store in able.items()}
    functions["extend"] = {name: partial(c.extend, batch) for name, c in uniform.items()}
    own = {RlPool.name: partial(uniform[RlPool.name].extend, result)}
    functions["extend_result"] = {**functions["extend"], **own}
    return {
        operation: {
            name: stopwatch(function, args.window, CLOCKS[args.clock])
            for name, function in functions[operation].items()
        }
        for operation in args.operations
    }, missing | missing_too


def compare(size: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all operations on pools of one size."""
    timed, missing = watches(size, args)
    seconds: dict[tuple[str, str], list[float]] = {}
    order = random.Random(SEED)
    for number in range(args.rounds):
        for operation, named in timed.items():
            for name in order.sample(list(named), len(named)):
                seconds.setdefault((operation, name), []).append(named[name]())
        print(f"{size}: round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    kinds = {kind.name: kind for kind in PEERS}
    figures: list[dict[str, Any]] = [
        {"pool_size": size, "peer": name, "missing": why} for name, why in missing.items()
    ]
    for (operation, name), peer_s in seconds.items():
        own_s = seconds[operation, RlPool.name]
        if name != RlPool.name:
            ratio = quartiles([peer / own for peer, own in zip(peer_s, own_s, strict=True)], 2)
            figures.append(
                {
                    "operation": operation,
                    "pool_size": size,
                    "peer": name,
                    "ratio": ratio["median"],
                    "quartiles": ratio["quartiles"],
                    "n_rounds": ratio["n"],
                    "rlpool_us": round(quartiles(own_s, 9)["median"] * 1e6, 1),
                    "peer_us": round(quartiles(peer_s, 9)["median"] * 1e6, 1),
                    "threads": torch.get_num_threads(),
                    "clock": args.clock,
                    "versions": versions(*kinds[name].packages),
                }
            )
    return figures


def memory(n_frames: int) -> dict[str, Any]:
    """Measure the memory of a pool of frames, divided by the bytes of its frames."""
    # One additional step, since the frame after each step is the one before the next.
    shape = (10, EPISODE_FRAMES + 1, 84, 84)
    frames = torch.from_numpy(np.random.default_rng(SEED).integers(0, 256, shape, dtype=np.uint8))
    zeros = torch.zeros(10, EPISODE_FRAMES)
    done = (torch.arange(EPISODE_FRAMES) == EPISODE_FRAMES - 1).expand(10, -1)
    steps = {"frame": frames[:, :-1], "_frame": frames[:, 1:], "_done": done, "_reward": zeros}
    batch = TemporalDictTensor({**steps, "action": zeros.long()})
    process = psutil.Process()
    pool = Pool(pool_size=n_frames, seed=0)
    Pool(pool_size=done.numel(), seed=0).extend(batch)  # temporary memory of adding
    before = process.memory_info().rss
    # Twice the capacity, so that evicted frames count too.
    for _ in range(-(-2 * n_frames // done.numel())):
        pool.extend(batch)
    raw = n_frames * frames[0, 0].nbytes
    return {
        "measure": "memory",
        "n_frames": n_frames,
        "raw_mb": round(raw / 1e6, 1),
        "nbytes_ratio": round(pool.nbytes / raw, 4),
        "rss_ratio": round((process.memory_info().rss - before) / raw, 4),
        "versions": versions(),
    }


def windows_of_stacks() -> Iterator[TemporalDictTensor]:
    """Generate windows ``[8, 128]`` of episodes of 1,000 steps, with stacks of four frames."""
    n_lanes, n_steps = 8, 128
    rng = np.random.default_rng(SEED)
    images = rng.integers(0, 256, (n_lanes, 8 * n_steps, 84, 84), dtype=np.uint8)
    time_of = np.zeros(n_lanes, int)  # step of the episode
    for start in itertools.count(0, n_steps):
        # The ages of the frames of a stack, or the first frame of the episode.
        numbers = start + np.arange(n_steps + 1)
        steps = (time_of[:, None] + np.arange(n_steps + 1)) % STACK_EPISODE
        ages = np.minimum(np.arange(3, -1, -1), steps[..., None])
        frames = images[
            np.arange(n_lanes)[:, None, None], (numbers[:, None] - ages) % (8 * n_steps)
        ]
        done = steps[:, :-1] == STACK_EPISODE - 1
        tensors = {
            "frame": frames[:, :-1],
            "action": np.zeros(done.shape, np.int64),
            "_reward": np.zeros(done.shape, np.float32),
            "_done": done,
            "_terminated": done,
            "_frame": frames[:, 1:],
        }
        time_of = (time_of + n_steps) % STACK_EPISODE
        yield TemporalDictTensor({key: torch.from_numpy(array) for key, array in tensors.items()})


def filled(size: int, frame_stack: int | None) -> tuple[Pool, dict[str, Any]]:
    """Fill a pool of stacks with twice its capacity; returns also its memory."""
    process, windows = psutil.Process(), windows_of_stacks()
    next(windows)
    before = process.memory_info().rss
    pool = Pool(pool_size=size, seed=0, frame_stack=frame_stack)
    n_added = 0
    while n_added < 2 * size:
        pool.extend(window := next(windows))
        n_added += window.lengths.sum()
    return pool, {
        "pool_size": size,
        "gb": round(pool.nbytes / 1e9, 3),
        "rss_gb": round((process.memory_info().rss - before) / 1e9, 3),
        "bytes_per_transition": round(pool.nbytes / size),
    }


def compare_stacks(size: int, args: argparse.Namespace) -> dict[str, Any]:
    """Compare pools of stacks that store single frames and whole stacks."""
    pools, figures = {}, {}
    for name, frame_stack in (("frames", 4), ("stacks", None)):
        pools[name], figures[name] = filled(size, frame_stack)
    window = next(windows_of_stacks())
    operations: dict[str, Callable[[Pool], Any]] = {
        "sample_32": lambda pool: pool.sample(32),
        "sample_256": lambda pool: pool.sample(256),
        "n_step_256": lambda pool: pool.sample(256, n_step=3),
        "sequences_32x16": lambda pool: pool.sample_sequences(32, 16),
        "extend": lambda pool: pool.extend(window),
    }
    timed = {
        (operation, name): stopwatch(partial(function, pool), args.window, CLOCKS[args.clock])
        for operation, function in operations.items()
        for name, pool in pools.items()
    }
    order = random.Random(SEED)
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.rounds):
        for operation in operations:
            for name in order.sample(list(pools), len(pools)):
                seconds.setdefault((operation, name), []).append(timed[operation, name]())
    times = {}
    for operation in operations:
        own, other = seconds[operation, "frames"], seconds[operation, "stacks"]
        ratio = quartiles([mine / theirs for mine, theirs in zip(own, other, strict=True)], 2)
        times[operation] = {
            "ratio": ratio["median"],
            "quartiles": ratio["quartiles"],
            "us": round(quartiles(own, 9)["median"] * 1e6, 1),
        }
    return {"measure": "frame_stack", **figures, "times": times}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    operations = ["extend", "extend_result", "sample", "sequences", "prioritised"]
    parser.add_argument("--sizes", type=int, nargs="*", default=[10_000, 1_000_000])
    parser.add_argument("--operations", nargs="+", choices=operations, default=operations)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--window", type=float, default=0.05, help="seconds per measurement")
    parser.add_argument(
        "--clock",
        choices=list(CLOCKS),
        default="wall",
        help="cpu counts the time of all threads of this process: for shared machines",
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads; 0 for its default")
    parser.add_argument(
        "--frames", type=int, default=200_000, help="of the memory test; 0 for none"
    )
    parser.add_argument("--stacks", type=int, default=50_000, help="transitions; 0 for none")
    parser.add_argument("--stacked", type=int, default=0, help="transitions; 0 for none")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.frames:
        print(json.dumps(memory(args.frames)), flush=True)
    if args.stacks:
        print(json.dumps(compare_stacks(args.stacks, args)), flush=True)
    if args.stacked:
        _, figures = filled(args.stacked, 4)
        print(json.dumps({"measure": "frame_stack", **figures}), flush=True)
    for size in args.sizes:
        for figures in compare(size, args):
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
