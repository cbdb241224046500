"""Whether anything grows while batchers collect, close and open again, for a long time.

    python benchmarks/soak.py --minutes 60 [--seed 0] [--kill-every 20]

In each of many lives batchers are opened, collect, keep some of their results, and are closed,
forgotten or left by an exception: ``EpisodeBatcher`` on CartPole and on episodes of several chunks
with a new policy for every request, ``Batcher``, and every fourth time ``ParallelEnvManager``.
With ``--kill-every`` a worker picked by chance gets a SIGKILL about so often, in seconds, and the
batchers replace it. Between two rounds the script sleeps, so that all of it takes about one core.

Looked at between two lives, when no batcher is open and all results are dropped: resident memory
of the caller, descriptors, threads, mappings of shared memory, processes and files in
``/dev/shm``. Looked at while collecting: the resident memory of the largest worker, and the
proportional share of all processes together, of which the most in each life counts. Memory is
compared with the time that passed by a robust line (Theil and Sen), after a warm-up of a fifth of
the time; it is flat if that line rises by less than ``--flat-mib-per-hour``, or by no more
altogether than what memory comes and goes by anyway, which is all that a run of a few minutes can
tell. Everything else must not change at all.

Prints a JSON line per minute and one at the end; the exit code is 1 if something is not flat.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import rough
import torch
from resources import Held, held, memory_mib, workers
from workloads import CartPolePolicy, PolicyAgent, create_env, make_cartpole, versions

from rlpool import Batcher, EpisodeBatcher, ParallelEnvManager

_NOISE_MIB = 4.0
"""Memory of a process comes and goes by so much with the allocator's arenas: no growth if it is all
there is."""

_LOOK_S = 5.0
"""How often the workers are looked at: reading their memory maps costs milliseconds."""


class Killer:
    """A thread that now and then kills a worker of this process.

    Args:
        every_s: Mean seconds between two kills, 0 for never.
        rng: What decides when and whom.
    """

    def __init__(self, every_s: float, rng: random.Random) -> None:
        self.n_kills = 0
        self._every_s = every_s
        self._rng = rng
        self.is_looking = threading.Lock()  # who looks at processes has files open
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Kill workers while this section lasts."""
        if not self._every_s:
            yield
            return
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._rng.expovariate(1 / self._every_s)):
            with self.is_looking, suppress(psutil.NoSuchProcess):
                alive = workers()
                if alive:
                    self._rng.choice(alive).kill()
                    self.n_kills += 1


class Watch:
    """What was seen, and when.

    Args:
        killer: Whose kills are told.
    """

    def __init__(self, killer: Killer) -> None:
        self.start_s = time.monotonic()
        self.counts: dict[str, int] = {"episodes": 0, "windows": 0, "steps": 0, "lives": 0}
        self.idle: list[tuple[float, float, Held]] = []  # time, resident memory, what is held
        self.busy: list[tuple[float, float, float]] = []  # of each life: time, and as _most
        self._most = (0.0, 0.0)  # of this life so far: the largest worker, the share of all
        self._killer = killer
        self._last_busy_s = self._last_told_s = self.start_s

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self.start_s

    def look_idle(self) -> None:
        """Look when no batcher is open, at the end of a life."""
        with self._killer.is_looking:
            self.idle.append((self.passed_s, memory_mib(psutil.Process())["rss"], held()))
        if self._most != (0.0, 0.0):
            self.busy.append((self.passed_s, *self._most))
        self._most = (0.0, 0.0)

    def look_busy(self) -> None:
        """Look while batchers collect, if it is time to; tell, if it is time to."""
        now_s = time.monotonic()
        if now_s - self._last_busy_s > _LOOK_S:
            self._last_busy_s = now_s
            each = [memory_mib(process) for process in workers()]
            everyone = [*each, memory_mib(psutil.Process())]
            # What is shared is the same memory in all of them.
            share = sum(m["own"] for m in everyone) + max(m["shared"] for m in everyone)
            largest = max((m["rss"] for m in each), default=0.0)
            self._most = (max(self._most[0], largest), max(self._most[1], share))
        if now_s - self._last_told_s > 60.0 and self.idle:
            self._last_told_s = now_s
            _, rss, what = self.idle[-1]
            print(
                json.dumps(
                    {
                        "minute": round(self.passed_s / 60, 1),
                        "caller_mib": round(rss, 1),
                        "largest_worker_mib": round(self.busy[-1][1], 1) if self.busy else None,
                        "descriptors": what.n_descriptors,
                        "mappings": what.n_mappings,
                        "threads": what.n_threads,
                        "kills": self._killer.n_kills,
                        **self.counts,
                    }
                ),
                flush=True,
            )


# Lives ------------------------------------------------------------------------------------------


class Life:
    """Batchers from their opening to their end.

    Args:
        number: Its number, which decides how it ends.
        watch: Counts what is collected.
        options: Further arguments of batchers.
        rng: What decides the sizes.
    """

    def __init__(
        self, number: int, watch: Watch, options: dict[str, Any], rng: random.Random
    ) -> None:
        self._number = number
        self._watch = watch
        self._options = options
        self._rng = rng
        self._kept: list[Any] = []

    def run(self, n_rounds: int) -> None:
        """Open, collect, end."""
        self._watch.counts["lives"] += 1
        opened = [self._cartpole(), self._long_episodes(), self._windows()]
        try:
            opened[2].reset()
            for number in range(n_rounds):
                start_s = time.process_time()
                self._round(number, *opened)
                if self._number % 4 == 0 and number == 0:
                    self._manager()
                self._watch.look_busy()
                # Room for others: what the workers do meanwhile takes about as long as this.
                time.sleep(0.05 + time.process_time() - start_s)
            if self._number % 3 == 2:
                opened[0].execute(50)  # left in the middle
        finally:
            if self._number % 3 != 1:  # else they are dropped
                for batcher in opened:
                    batcher.close()

    def _cartpole(self) -> EpisodeBatcher:
        return EpisodeBatcher(
            n_timesteps=200,
            n_slots=32,
            create_agent=PolicyAgent,
            agent_args={"make_policy": CartPolePolicy},
            create_env=create_env,
            env_args={"make_env": make_cartpole, "n_lanes": 4},
            n_threads=1,
            seeds=self._number,
            **self._options,
        )

    def _long_episodes(self) -> EpisodeBatcher:
        return EpisodeBatcher(
            n_timesteps=16,
            n_slots=12,
            create_agent=rough.create_agent,
            create_env=rough.create_env,
            env_args={"n_lanes": 2, "longest": 100},
            n_threads=2,
            seeds=self._number,
            **self._options,
        )

    def _windows(self) -> Batcher:
        return Batcher(
            n_timesteps=20,
            create_agent=rough.create_agent,
            create_env=rough.create_env,
            env_args={"n_lanes": 4, "restarts": True},
            n_threads=1,
            seeds=self._number,
            **self._options,
        )

    def _round(
        self, number: int, cartpole: EpisodeBatcher, long: EpisodeBatcher, windows: Batcher
    ) -> None:
        counts = self._watch.counts
        n_episodes = self._rng.choice((1, 8, 40))
        long.update(rough.parameters(number))
        cartpole.execute(n_episodes)
        long.execute(n_episodes, **rough.infos(n_episodes, number))
        windows.update(rough.parameters(number))
        for _ in range(5):
            windows.execute()
        for batcher in (long, cartpole):
            result = batcher.get()
            assert result is not None
            assert result.n_elems() == n_episodes
            counts["episodes"] += n_episodes
            counts["steps"] += int(result.lengths.sum())
            self._keep(result)
        for _ in range(5):
            window = windows.get()
            assert window is not None
            counts["windows"] += 1
            self._keep(window)

    def _keep(self, result: Any) -> None:
        """Keep some results for a while, whole or in part."""
        if self._rng.random() < 0.2:
            self._kept.append(self._rng.choice((result, result["frame"], result["_reward"][0])))
        del self._kept[: max(0, len(self._kept) - 5)]

    def _manager(self) -> None:
        """Episodes whose policy is in this process."""
        with EpisodeBatcher(
            n_timesteps=16,
            n_slots=12,
            create_agent=rough.create_agent,
            create_env=create_managed,
            n_threads=0,
            seeds=self._number,
        ) as batcher:
            batcher.execute(10)
            result = batcher.get()
            assert result is not None
            self._watch.counts["episodes"] += result.n_elems()


def create_managed(seed: int) -> ParallelEnvManager:
    """Two environments in a process of their own."""
    return ParallelEnvManager([rough.RoughEnv] * 2, envs_per_worker=2, seed=seed)


# The verdict ------------------------------------------------------------------------------------


def slope_per_hour(points: list[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs of points; time in seconds."""
    if len(points) > 400:  # pairs grow with the square
        points = points[:: len(points) // 400 + 1]
    slopes = [
        (y2 - y1) / (t2 - t1) for (t1, y1), (t2, y2) in itertools.combinations(points, 2) if t2 > t1
    ]
    return 3600 * statistics.median(slopes) if slopes else 0.0


def verdict(watch: Watch, flat_mib_per_hour: float) -> dict[str, Any]:
    """Whether all is flat, and the figures."""
    warm_up_s = watch.passed_s / 5
    idle = [seen for seen in watch.idle if seen[0] >= warm_up_s]
    busy = [seen for seen in watch.busy if seen[0] >= warm_up_s]
    figures: dict[str, Any] = {"minutes": round(watch.passed_s / 60, 1), "looks": len(idle)}
    lines = {
        "caller_mib": [(t, rss) for t, rss, _ in idle],
        "largest_worker_mib": [(t, largest) for t, largest, _ in busy],
        "all_together_mib": [(t, share) for t, _, share in busy],
    }
    is_flat = len(idle) >= 3
    for name, points in lines.items():
        if len(points) < 3:
            is_flat = False
            continue
        values = [value for _, value in points]
        slope = slope_per_hour(points)
        hours = (points[-1][0] - points[0][0]) / 3600
        n_processes = 5 if name == "all_together_mib" else 1
        is_flat &= slope < flat_mib_per_hour or slope * hours < _NOISE_MIB * n_processes
        figures[name] = {
            "mib_per_hour": round(slope, 2),
            "least": round(min(values), 1),
            "median": round(statistics.median(values), 1),
            "most": round(max(values), 1),
        }
    for name in ("n_descriptors", "n_threads", "n_mappings", "n_processes"):
        numbers = [getattr(what, name) for _, _, what in idle]
        figures[name] = {"least": min(numbers, default=0), "most": max(numbers, default=0)}
        is_flat &= len(set(numbers)) <= 1
    names = [what.in_dev_shm for _, _, what in idle]
    new = sorted(frozenset().union(*names) - names[0]) if names else []
    figures["new_in_dev_shm"] = new
    return {"is_flat": is_flat and not new, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=40, help="requests between open and close")
    parser.add_argument("--kill-every", type=float, default=0.0, help="mean seconds; 0: never")
    parser.add_argument("--flat-mib-per-hour", type=float, default=4.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(args.seed)
    killer = Killer(args.kill_every, random.Random(args.seed + 1))
    options: dict[str, Any] = {}
    if args.kill_every:
        options = {"on_worker_failure": "restart", "max_restarts": None}
    watch = Watch(killer)
    cpu = os.times()
    with killer.at_work():
        for number in itertools.count():
            Life(number, watch, options, rng).run(args.rounds)
            watch.look_idle()
            if watch.passed_s > 60 * args.minutes:
                break
    used = os.times()
    cores = sum(used[:4]) - sum(cpu[:4])
    result = {
        **verdict(watch, args.flat_mib_per_hour),
        **watch.counts,
        "kills": killer.n_kills,
        "cores_used": round(cores / watch.passed_s, 2),
        "versions": versions(),
    }
    print(json.dumps(result), flush=True)
    sys.exit(0 if result["is_flat"] else 1)


if __name__ == "__main__":
    main()
