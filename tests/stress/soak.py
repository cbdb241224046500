"""Whether anything grows while batchers collect, close and open again, for a long time.

    python tests/stress/soak.py --minutes 60 [--seed 0] [--kill-every 20]

In each of many lives batchers are opened, collect, keep some of their results, and are closed or
dropped: an ``EpisodeBatcher`` of short episodes, one of episodes of several chunks with a new
policy for every request, a ``Batcher``, and every fourth time a ``ParallelEnvManager``. With
``--kill-every`` a random worker gets SIGKILL about every so many seconds, and the batchers replace
it. Between two rounds the script sleeps, so that all of it takes about one core.

Looked at between two lives, when no batcher is open and all results are dropped: resident memory
of the caller, descriptors, threads, mappings of shared memory, processes and files in ``/dev/shm``.
Looked at while collecting: the resident memory of the largest worker, and the private memory of
all processes together; the most in each life counts. A robust line (Theil and Sen) is fitted to
memory against time, after a warm-up of a fifth of the time. Memory is flat if that line rises by
less than ``--flat-mib-per-hour``, or in all by no more than memory fluctuates anyway, which is all
that a run of a few minutes can tell. Everything else must not change at all.

Prints a JSON line; the exit code is 1 if something is not flat.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from stress.rough import RoughEnv, create_rough, held, infos, parameters, workers

import rlpool
from rlpool import Batcher, EpisodeBatcher, ParallelEnvManager

from support.fragile import RecurrentAgent

_NOISE_MIB = {"caller_mib": 4.0, "largest_worker_mib": 4.0, "all_together_mib": 20.0}
"""By how much memory fluctuates with the allocator's arenas."""

_LOOK_S = 5.0
"""How often the workers are looked at: reading their memory maps costs milliseconds."""


def memory_mib(process: psutil.Process) -> tuple[float, float]:
    """Resident memory of a process, and what of it is its own; zeros if it is gone."""
    with suppress(psutil.NoSuchProcess):
        memory = process.memory_full_info()
        return memory.rss / 2**20, memory.uss / 2**20
    return 0.0, 0.0


class Soak:
    """All lives, and what was seen of them.

    Args:
        seed: What decides sizes, and when whom to kill.
        kill_every_s: Mean seconds between two kills, 0 for never.
    """

    def __init__(self, seed: int, kill_every_s: float) -> None:
        self.counts: Counter[str] = Counter(lives=0, episodes=0, windows=0, kills=0)
        self.mib: dict[str, list[tuple[float, float]]] = {name: [] for name in _NOISE_MIB}
        self.held: list[Counter[str]] = []
        self._rng = random.Random(seed)
        self._kill_every_s = kill_every_s
        self._options = {"max_restarts": None} if kill_every_s else {"on_worker_failure": "raise"}
        self._start_s = time.monotonic()
        self._last_look_s = 0.0
        self._most: dict[str, float] = {}  # of this life so far
        self._kept: list[Any] = []
        self._looking = threading.Lock()  # who looks at processes has files open
        if kill_every_s:
            threading.Thread(target=self._kill, daemon=True).start()

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self._start_s

    def _kill(self) -> None:
        rng = random.Random(self._rng.random())
        while True:
            time.sleep(rng.expovariate(1 / self._kill_every_s))
            with self._looking, suppress(psutil.NoSuchProcess, IndexError):
                rng.choice(workers()).kill()
                self.counts["kills"] += 1

    def live(self, n_rounds: int) -> None:
        """Open, collect, end, look."""
        self._live(self.counts["lives"], n_rounds)
        self.counts["lives"] += 1
        self._kept.clear()
        self._look_idle()

    def _live(self, number: int, n_rounds: int) -> None:
        short = self._open(EpisodeBatcher, 200, 32, 1, n_lanes=4)
        long = self._open(EpisodeBatcher, 16, 12, 2)
        windows = self._open(Batcher, 20, None, 1, n_lanes=4, restarts=True)
        try:
            windows.reset()
            for round_number in range(n_rounds):
                start_s = time.process_time()
                self._collect(round_number, short, long, windows)
                if number % 4 == 0 and round_number == 0:
                    self._manage()
                self._look_busy()
                # Room for others: what the workers do meanwhile takes about as long as this.
                time.sleep(0.05 + time.process_time() - start_s)
            if number % 3 == 2:
                short.execute(50)  # left in the middle
        finally:
            if number % 3 != 1:  # else they are dropped
                for batcher in (short, long, windows):
                    batcher.close()

    def _open(
        self, kind: type[Any], n_timesteps: int, n_slots: Any, n_workers: int, **env_args: Any
    ) -> Any:
        arguments = (n_timesteps, n_slots, RecurrentAgent, {}, create_rough, env_args, n_workers)
        return kind(*arguments, self.counts["lives"], **self._options)

    def _collect(self, number: int, short: Any, long: Any, windows: Any) -> None:
        n_episodes = self._rng.choice((1, 8, 40))
        for batcher in (long, windows):
            batcher.update(parameters(number))
        short.execute(n_episodes)
        long.execute(n_episodes, **infos(n_episodes, number, longest=100))
        for _ in range(5):
            windows.execute()
        for batcher, n_results in ((long, 1), (short, 1), (windows, 5)):
            for _ in range(n_results):
                result = batcher.get()
                if batcher is windows:
                    self.counts["windows"] += 1
                else:
                    assert result.n_elems() == n_episodes
                    self.counts["episodes"] += n_episodes
                if self._rng.random() < 0.2:  # some are kept for a while, whole or in part
                    parts = (result, result["frame"], result["_reward"][0])
                    self._kept.append(self._rng.choice(parts))
        del self._kept[:-5]

    def _manage(self) -> None:
        """Episodes whose policy is in this process."""
        with EpisodeBatcher(16, 12, RecurrentAgent, {}, create_managed, {}, 0, 1) as batcher:
            batcher.execute(10)
            assert batcher.get() is not None
            self.counts["episodes"] += 10

    def _look_idle(self) -> None:
        with self._looking:
            self.held.append(held())
            self._most["caller_mib"] = memory_mib(psutil.Process())[0]
        for name, value in self._most.items():
            self.mib[name].append((self.passed_s, value))
        self._most = {}

    def _look_busy(self) -> None:
        """Look while batchers collect, if it is time to."""
        if self.passed_s - self._last_look_s > _LOOK_S:
            self._last_look_s = self.passed_s
            each = [memory_mib(process) for process in (psutil.Process(), *workers())]
            seen = {"all_together_mib": sum(own for _, own in each)}
            seen["largest_worker_mib"] = max((resident for resident, _ in each[1:]), default=0.0)
            self._most = {name: max(self._most.get(name, 0.0), seen[name]) for name in seen}

    def verdict(self, flat_mib_per_hour: float) -> dict[str, Any]:
        """Whether all is flat, and the figures."""
        figures: dict[str, Any] = {}
        is_flat = len(self.held) >= 4
        for name, all_points in self.mib.items():
            points = [point for point in all_points if point[0] >= self.passed_s / 5]
            if len(points) < 3:
                is_flat = False
                continue
            values = [value for _, value in points]
            slope = slope_per_hour(points)
            hours = (points[-1][0] - points[0][0]) / 3600
            is_flat &= slope < flat_mib_per_hour or slope * hours < _NOISE_MIB[name]
            figures[name] = {"mib_per_hour": round(slope, 2), "least": round(min(values), 1)}
            figures[name]["most"] = round(max(values), 1)
        late = self.held[len(self.held) // 5 :]
        changed = {key for seen in late for key in (seen - late[0]) + (late[0] - seen)}
        figures |= {"held": dict(late[-1]), "changed": sorted(changed)}
        return {"is_flat": is_flat and not changed, **figures}


def create_managed(seed: int) -> ParallelEnvManager:
    """Two environments in a process of their own."""
    return ParallelEnvManager([RoughEnv] * 2, envs_per_worker=2, seed=seed)


def slope_per_hour(points: list[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs of points; time in seconds."""
    points = points[:: len(points) // 400 + 1]  # pairs grow with the square
    pairs = itertools.combinations(points, 2)
    return 3600 * statistics.median((y2 - y1) / (t2 - t1) for (t1, y1), (t2, y2) in pairs)


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
    soak = Soak(args.seed, args.kill_every)
    while soak.passed_s < 60 * args.minutes:
        soak.live(args.rounds)
    result = {**soak.verdict(args.flat_mib_per_hour), **soak.counts}
    versions = {"rlpool": rlpool.__version__, "torch": torch.__version__}
    print(json.dumps({**result, "versions": versions}), flush=True)
    sys.exit(0 if result["is_flat"] else 1)


if __name__ == "__main__":
    main()
