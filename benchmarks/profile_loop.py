"""Profile of a batch step in one process.

    python benchmarks/profile_loop.py [--workloads W1 W2 W3] [--passes 10] [--cprofile 25]

The lanes of one worker run in this process (``n_threads=0``), with timers around the policy,
``env.step`` and ``env.reset``. The cost of a timer is measured first and subtracted. Microseconds
per batch step, medians over passes:

- ``whole``: everything
- ``step``, ``reset``: inside the environments, without Gymnasium's wrappers around them
- ``policy``: the network and the sampling, without the noise
- ``rest``: the work of the loop, including wrappers that it calls

``lanes_busy`` is below 1 because the last episodes of a request do not end at the same time.

``--cprofile N`` prints the N functions with the largest own time to stderr. cProfile overestimates
small functions.

Prints one JSON line per workload.
"""

from __future__ import annotations

import cProfile
import functools
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from workloads import SEED, WORKLOADS, PolicyAgent, Workload, create_env, parser_of, show

from rlpool import EpisodeBatcher, GymEnv


class Stopwatch:
    """Sums the time inside functions, minus the cost of the timers.

    Attributes:
        seconds: Time by part.
        n_calls: Calls by part.
    """

    def __init__(self) -> None:
        self._cost_s = 0.0
        self.clear()
        nothing, n_calls = self.around("step", lambda: None), 20_000
        for _ in range(n_calls):
            nothing()
        self._cost_s = self.seconds["step"] / n_calls

    def clear(self) -> None:
        """Reset all sums."""
        self.seconds = dict.fromkeys(("step", "reset", "policy"), 0.0)
        self.n_calls = dict.fromkeys(self.seconds, 0)

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function with a timer."""
        clock = time.perf_counter

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            result = function(*args, **kwargs)
            self.seconds[part] += clock() - start - self._cost_s
            self.n_calls[part] += 1
            return result

        return timed


def timed_batcher(workload: Workload, watch: Stopwatch) -> EpisodeBatcher:
    """Make a batcher in this process with timers around policy and innermost environments."""

    def make_env() -> Any:
        env = workload.make_env()
        inner: Any = env.unwrapped
        inner.step, inner.reset = (watch.around(k, getattr(inner, k)) for k in ("step", "reset"))
        return env

    def make_agent() -> PolicyAgent:
        agent = PolicyAgent(workload.make_policy)
        agent.policy = watch.around("policy", agent.policy)
        return agent

    def make_envs(seed: int) -> GymEnv:
        return create_env(make_env, workload.n_lanes, seed)

    n_slots = workload.n_episodes // workload.n_workers
    arguments = (workload.n_timesteps, n_slots, make_agent, {}, make_envs, {})
    return EpisodeBatcher(*arguments, n_threads=0, seeds=SEED)


def profile(workload: Workload, n_passes: int, n_functions: int) -> None:
    """Print the profile of requests."""
    n_episodes, watch = workload.n_episodes // workload.n_workers, Stopwatch()
    passes: list[dict[str, float]] = []
    with timed_batcher(workload, watch) as batcher, cProfile.Profile() as profiler:
        profiler.disable()
        for _ in range(n_passes + 1):
            watch.clear()
            start = time.perf_counter()
            batcher.execute(n_episodes)
            n_steps = int(batcher.get().lengths.sum())
            seconds = {"whole": time.perf_counter() - start, **watch.seconds}
            n_batches = watch.n_calls["policy"]
            passes.append({part: 1e6 * value / n_batches for part, value in seconds.items()})
            passes[-1]["lanes_busy"] = n_steps / n_batches / workload.n_lanes
        if n_functions:
            profiler.enable()
            batcher.execute(n_episodes)
            batcher.get()
    figures = {k: statistics.median(each[k] for each in passes[1:]) for k in passes[0]}
    lanes_busy = round(figures.pop("lanes_busy"), 3)
    figures["rest"] = 2 * figures["whole"] - sum(figures.values())
    about = {"workload": workload.name, "n_lanes": workload.n_lanes, "n_passes": n_passes}
    show({**about, "lanes_busy": lanes_busy, "us": {k: round(v, 1) for k, v in figures.items()}})
    if n_functions:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(n_functions)


def main() -> None:
    names = ["W1", "W2", "W3"]
    parser = parser_of(__doc__)
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--cprofile", type=int, metavar="N", default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.workloads:
        profile(WORKLOADS[name], args.passes, args.cprofile)


if __name__ == "__main__":
    main()
