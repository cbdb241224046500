"""Where the time of a batch step goes, in one process.

    python benchmarks/profile_loop.py [--workloads W1 W2 W3] [--passes 10] [--cprofile 25]

The lanes of one worker run in this process (``n_threads=0``), in turns with the bare loop on as
many lanes. Each is passed through twice: with a timer around the policy alone, which gives the
whole of a batch step, and with timers around ``env.step`` and ``env.reset`` as well, which gives
their part. What a timer costs is measured beforehand and subtracted. Microseconds per batch step,
medians over passes:

- ``step``, ``reset``: inside the environments, without Gymnasium's wrappers around them
- ``policy``: the network and the sampling, without the noise
- ``rest``: the loop's own work, and the wrappers as far as it goes through them

``lanes_busy`` is below 1 because a request's last episodes do not end at the same time;
``ratio`` compares the time per environment step, as ``throughput.py`` does with all processes.

``--cprofile N`` prints the N functions that take most time of their own to stderr. Under cProfile
small functions look more expensive than they are.

Prints one JSON line per workload.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from bare_loop import Lanes
from workloads import WORKLOADS, PolicyAgent, Workload, create_env, versions

from rlpool import EpisodeBatcher, GymEnv

_PARTS = ("step", "reset", "policy")

Pass = dict[str, float]
"""Microseconds per batch step by part, ``whole``, and environment steps per batch step."""


class Stopwatch:
    """Adds up the time inside functions, what the timers cost left out.

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
        """Begin anew."""
        self.seconds = dict.fromkeys(_PARTS, 0.0)
        self.n_calls = dict.fromkeys(_PARTS, 0)

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with a timer."""
        clock = time.perf_counter

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            result = function(*args, **kwargs)
            self.seconds[part] += clock() - start - self._cost_s
            self.n_calls[part] += 1
            return result

        return timed

    def around_env(self, env: Any) -> Any:
        """The environment with timers around its innermost ``step`` and ``reset``."""
        inner = env.unwrapped
        inner.step = self.around("step", inner.step)
        inner.reset = self.around("reset", inner.reset)
        return env

    def passed(self, elapsed_s: float, n_steps: int) -> Pass:
        """What was measured since ``clear``."""
        n_batches = self.n_calls["policy"]
        parts = {part: 1e6 * self.seconds[part] / n_batches for part in _PARTS}
        return {**parts, "whole": 1e6 * elapsed_s / n_batches, "n_steps": n_steps / n_batches}


class BatcherPasses:
    """A batcher in this process.

    Args:
        workload: What it runs.
        times_envs: Whether the environments are timed.
    """

    def __init__(self, workload: Workload, times_envs: bool) -> None:
        self._watch = watch = Stopwatch()
        self._n_episodes = workload.n_episodes // workload.n_workers

        def make_env() -> Any:
            env = workload.make_env()
            return watch.around_env(env) if times_envs else env

        def make_agent() -> PolicyAgent:
            agent = PolicyAgent(workload.make_policy)
            agent.policy = watch.around("policy", agent.policy)
            return agent

        def make_envs(seed: int) -> GymEnv:
            return create_env(make_env, workload.n_lanes, seed)

        self.batcher = EpisodeBatcher(
            n_timesteps=workload.n_timesteps,
            n_slots=self._n_episodes,
            create_agent=make_agent,
            create_env=make_envs,
            n_threads=0,
            seeds=0,
        )

    def run(self) -> Pass:
        """Collect one request."""
        self._watch.clear()
        start = time.perf_counter()
        self.batcher.execute(self._n_episodes)
        n_steps = int(self.batcher.get().lengths.sum())
        return self._watch.passed(time.perf_counter() - start, n_steps)

    def close(self) -> None:
        self.batcher.close()


class BarePasses:
    """The bare loop in this process.

    Args:
        workload: What it runs.
        times_envs: Whether the environments are timed.
        unwrapped: Whether they are stepped without their wrappers.
    """

    _SECONDS = 0.3

    def __init__(self, workload: Workload, times_envs: bool, *, unwrapped: bool) -> None:
        self._watch = Stopwatch()
        self._lanes = Lanes(workload, unwrapped=unwrapped)
        self._lanes.policy = self._watch.around("policy", self._lanes.policy)
        if times_envs:
            for env in self._lanes.envs:
                self._watch.around_env(env)

    def run(self) -> Pass:
        """Run for a while."""
        self._watch.clear()
        n_steps, elapsed_s = self._lanes.run(self._SECONDS)
        return self._watch.passed(elapsed_s, n_steps)

    def close(self) -> None:
        self._lanes.close()


def divide(light: list[Pass], timed: list[Pass]) -> dict[str, float]:
    """Parts of a batch step, the whole of it taken from the passes with fewer timers."""
    whole, policy = (
        statistics.median(each[part] for each in light) for part in ("whole", "policy")
    )
    step, reset = (statistics.median(each[part] for each in timed) for part in ("step", "reset"))
    parts = {"step": step, "reset": reset, "policy": policy}
    parts["rest"] = whole - sum(parts.values())
    return {"whole": round(whole, 1), **{name: round(part, 1) for name, part in parts.items()}}


def profile(workload: Workload, n_passes: int, *, unwrapped: bool) -> dict[str, Any]:
    """Batcher and bare loop in turns, with few and with all timers."""
    kinds = [
        make(workload, times_envs)
        for make in (functools.partial(BarePasses, unwrapped=unwrapped), BatcherPasses)
        for times_envs in (False, True)
    ]
    passes: list[list[Pass]] = [[] for _ in kinds]
    try:
        for number in range(n_passes + 1):
            for kind, done in zip(kinds, passes, strict=True):
                measured = kind.run()
                if number:  # the first one warms up
                    done.append(measured)
    finally:
        for kind in kinds:
            kind.close()
    bare_light, bare_timed, light, timed = passes
    us_per_step = [
        statistics.median(each["whole"] / each["n_steps"] for each in done)
        for done in (bare_light, light)
    ]
    n_steps = statistics.median(each["n_steps"] for each in light)
    return {
        "workload": workload.name,
        "n_lanes": workload.n_lanes,
        "n_passes": n_passes,
        "bare": "unwrapped" if unwrapped else "plain",
        "ratio": round(us_per_step[0] / us_per_step[1], 3),
        "lanes_busy": round(n_steps / workload.n_lanes, 3),
        "batcher_us": divide(light, timed),
        "bare_us": divide(bare_light, bare_timed),
    }


def print_functions(workload: Workload, n_passes: int, n_functions: int) -> None:
    """What cProfile says about a batcher, to stderr."""
    kind = BatcherPasses(workload, times_envs=False)
    try:
        kind.run()
        with cProfile.Profile() as profiler:
            for _ in range(n_passes):
                kind.run()
    finally:
        kind.close()
    print(f"{workload.name}:", file=sys.stderr)
    pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(n_functions)


def main() -> None:
    names = ["W1", "W2", "W3"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument(
        "--bare",
        choices=["plain", "unwrapped"],
        default="plain",
        help="whether the bare loop steps environments as made, or without Gymnasium's wrappers",
    )
    parser.add_argument("--cprofile", type=int, metavar="N", default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.workloads:
        figures = profile(WORKLOADS[name], args.passes, unwrapped=args.bare == "unwrapped")
        print(json.dumps({**figures, "versions": versions()}), flush=True)
        if args.cprofile:
            print_functions(WORKLOADS[name], args.passes, args.cprofile)


if __name__ == "__main__":
    main()
