"""Check that all data arrives while workers are killed, stopped, recycled and starved.

    python tests/stress/chaos.py --minutes 10 [--seed 0] [--workers 4] [--slowness 1]

Batchers are opened, collect and are closed, alternating between an ``EpisodeBatcher``, whose
requests are often larger than its slots and whose longest episodes span several of them, with a
new policy for every request, and a ``Batcher``. Their agent has a recurrent state and noise.
Meanwhile

- a thread sends SIGKILL, SIGSEGV and SIGSTOP to random workers at random times, and SIGKILL to the
  template from which they are forked;
- environments, at random times, raise, call ``sys.exit`` and ``os._exit``, exceed a memory limit,
  and allocate memory and are killed as by the kernel.

Everything is collected once more, undisturbed, and compared bit for bit. In the end no process,
descriptor, thread or shared memory may be left. The memory of this process is measured between two
batchers after a warm-up of a fifth of the time, and the slope of a fitted line is its growth.

Prints a JSON line; the exit code is 1 if anything was lost, wrong or left. ``restarts`` counts
environments that were created again, not workers that died before creating any.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from stress.rough import create_rough, held, infos, noted, parameters, workers

import rlpool
from rlpool import Batcher, EpisodeBatcher, RlpoolError, TemporalDictTensor

from support.fragile import RecurrentAgent

SETTLE_S = 3.0
"""How long what ends with the last batcher may take."""


@dataclass(frozen=True)
class Plan:
    """Intensity and duration of the chaos.

    Attributes:
        seconds: Time after which no new batcher is opened, unless too little has happened.
        seed: Seed of the episodes and of the choice of workers to signal.
        n_workers: Workers of the ``EpisodeBatcher``; the ``Batcher`` has half as many.
        strike_s: Mean seconds between two failures of an environment.
        signal_s: Mean seconds between two signals to any worker.
        template_s: Mean seconds between two kills of the template.
        signals_per_result: Maximum number of signals between two results, so that slow machines
            make progress.
        at_starting: Share of the signals that may hit a worker that is still starting. It must be
            small: a worker that fails repeatedly before it is ready is given up.
        rounds: Number of requests per batcher.
        sizes: Episodes per request to choose from.
        timeout_s: Seconds after which a stopped worker counts as hanging.
        least_episodes: Minimum number of episodes, regardless of time.
        least_faults: Minimum number of faults, regardless of time.
    """

    seconds: float = 600.0
    seed: int = 0
    n_workers: int = 4
    strike_s: float = 6.0
    signal_s: float = 0.15
    template_s: float = 8.0
    signals_per_result: int = 20
    at_starting: float = 0.1
    rounds: int = 10
    sizes: tuple[int, ...] = (1, 12, 100, 400)
    timeout_s: float = 2.0
    least_episodes: int = 0
    least_faults: int = 0


class Chaos:
    """A sequence of batchers, each with an undisturbed twin, and the attacks on them.

    Args:
        plan: Intensity and duration of the attacks.
        notes: Directory for notes.
    """

    def __init__(self, plan: Plan, notes: str) -> None:
        self.counts: Counter[str] = Counter(episodes=0, windows=0, lost=0, wrong=0, lives=0)
        self.signals: Counter[str] = Counter()
        self.errors: list[str] = []
        self.mib: list[tuple[float, float]] = []
        self.n_workers = 0
        self._plan, self._notes = plan, notes
        self._rng = random.Random(plan.seed)
        self._start_s = time.monotonic()
        self._options = {
            "timeout": plan.timeout_s,
            "on_worker_failure": "restart",
            "on_env_error": "restart",
            "max_restarts": None,
            "max_episode_restarts": None,  # two accidents may hit the same step of an episode
            "max_episodes_per_worker": 400,
        }
        self._n_since_result = 0
        self._spared: set[psutil.Process] | None = set()  # None: no process is a target
        self._over = threading.Event()

    def run(self) -> None:
        """Run until enough has happened."""
        kinds = itertools.cycle((self._episodes, self._windows))
        thread = threading.Thread(target=self._shoot_again_and_again, daemon=True)
        thread.start()
        while not self.errors and not self._is_enough():
            self.counts["lives"] += 1
            try:
                next(kinds)(self._plan.seed + self.counts["lives"])
            except RlpoolError as error:
                self.errors.append(f"{type(error).__name__}: {error}")
            resident_mib = psutil.Process().memory_info().rss / 2**20
            self.mib.append((time.monotonic() - self._start_s, resident_mib))
        self._over.set()
        thread.join()

    def _is_enough(self) -> bool:
        faults = noted(self._notes) + self.signals
        return (
            time.monotonic() - self._start_s > self._plan.seconds
            and self.counts["episodes"] >= self._plan.least_episodes
            and faults.total() - faults["created"] >= self._plan.least_faults
        )

    def _open(self, kind: type[Any], seed: int, n_workers: int, disturbed: bool) -> Any:
        env_args: dict[str, Any] = {"n_lanes": 2, "restarts": kind is Batcher}
        if disturbed:
            self.n_workers += n_workers
            # Slow steps make it likelier to be hit in the middle of an episode.
            env_args |= {"notes": self._notes, "mean_s": self._plan.strike_s, "sleep_s": 5e-4}
            # A worker that fails three times before all are ready is given up.
            self._n_since_result = self._plan.signals_per_result - 2
        arguments = (16, 12, RecurrentAgent, {}, create_rough, env_args, n_workers, seed)
        opened = kind(*arguments, **(self._options if disturbed else {}))
        self._n_since_result = 0
        return opened

    def _episodes(self, seed: int) -> None:
        with (
            self._open(EpisodeBatcher, seed, 0, False) as twin,
            self._open(EpisodeBatcher, seed, self._plan.n_workers, True) as batcher,
        ):
            for number in range(0, self._plan.rounds, 2):
                sizes = self._rng.choices(self._plan.sizes, k=2)
                for offset, n_episodes in enumerate(sizes):  # two requests in flight
                    for one in (batcher, twin):
                        one.update(parameters(number + offset))
                        one.execute(n_episodes, **infos(n_episodes, number))
                for n_episodes in sizes:
                    self._compare(batcher, twin, n_episodes, "episodes")
                if self._is_enough():
                    return

    def _windows(self, seed: int) -> None:
        n_workers = max(1, self._plan.n_workers // 2)
        # A twin in this process would have a different number of lanes in its only worker, which
        # changes the last bit of results.
        self._spared = None
        with self._open(Batcher, seed, n_workers, False) as twin:
            self._spared = set(workers())
            with self._open(Batcher, seed, n_workers, True) as batcher:
                for number in range(self._plan.rounds):
                    for one in (batcher, twin):
                        if number % 20 == 0:
                            one.reset(**infos(twin.n_lanes, number))
                        one.update(parameters(number))
                        one.execute()
                    self._compare(batcher, twin, twin.n_lanes, "windows")
                    if self._is_enough():
                        return

    def _compare(self, batcher: Any, twin: Any, n_rows: int, what: str) -> None:
        expected = twin.get()
        self.counts["lost"] += n_rows
        got = batcher.get()
        self.counts["lost"] -= got.n_elems()
        self._n_since_result = 0
        self.counts["wrong"] += n_wrong_rows(got, expected)
        self.counts[what] += n_rows if what == "episodes" else 1

    # Signals from outside -----------------------------------------------------------------------

    def _shoot_again_and_again(self) -> None:
        plan, rng = self._plan, random.Random(self._plan.seed)
        rate = 1 / plan.signal_s + 1 / plan.template_s
        while not self._over.wait(rng.expovariate(rate)):
            if self._spared is not None and self._n_since_result < plan.signals_per_result:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if rng.random() < 1 / plan.template_s / rate:
                        self._kill_template()
                    else:
                        self._shoot(rng)

    def _kill_template(self) -> None:
        for child in set(psutil.Process().children()) - set(workers()):
            if not any("resource_tracker" in part for part in child.cmdline()):
                child.kill()
                self.signals["SIGKILL of the template"] += 1

    def _shoot(self, rng: random.Random) -> None:
        alive = [worker for worker in workers() if worker not in (self._spared or ())]
        names = ["SIGKILL", "SIGKILL", "SIGSEGV"]
        if rng.random() >= self._plan.at_starting:  # only those that have written a note by now
            alive = [each for each in alive if (Path(self._notes) / str(each.pid)).exists()]
            names += ["SIGSTOP", "SIGSTOP+SIGCONT"]
        if not alive:
            return
        worker, name = rng.choice(alive), rng.choice(names)
        worker.send_signal(getattr(signal, name.partition("+")[0]))
        self.signals[name] += 1
        self._n_since_result += 1
        if name.endswith("SIGCONT"):
            self._over.wait(0.1)
            worker.resume()


def n_wrong_rows(got: TemporalDictTensor, expected: TemporalDictTensor) -> int:
    """Count the rows that differ in any bit of any key or info."""
    n_rows = expected.n_elems()
    if got.n_elems() != n_rows or set(got.keys()) != set(expected.keys()):
        return n_rows
    wrong = got.lengths != expected.lengths
    if wrong.any():
        return int(wrong.sum())
    pairs = [(got[key], values) for key, values in expected.items()]
    pairs += [(got.info[key], values) for key, values in expected.info.items()]
    for mine, theirs in pairs:
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            return n_rows
        wrong |= (mine != theirs).reshape(n_rows, -1).any(1)
    return int(wrong.sum())


def mib_per_hour(points: list[tuple[float, float]]) -> float | None:
    """Return the growth of memory; ``None`` after only a few batchers."""
    points = points[len(points) // 5 :]
    if len(points) < 3:
        return None
    return round(3600 * statistics.linear_regression(*zip(*points, strict=True)).slope, 1)


def run(plan: Plan) -> dict[str, Any]:
    """Run the chaos and return the report; ``is_sound`` is the verdict."""
    # Open everything once that stays open for the life of the interpreter.
    with EpisodeBatcher(4, 4, RecurrentAgent, {}, create_rough, {}, 1, 0) as batcher:
        batcher.execute(1)
        batcher.get()
    before, start_s = held(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rlpool-chaos-") as notes:
        chaos = Chaos(plan, notes)
        chaos.run()
        faults = noted(notes) + chaos.signals
    rlpool.shutdown()  # waits for a killed template, and resets the count of kills
    passed_s = time.monotonic() - start_s
    deadline_s = time.monotonic() + SETTLE_S
    while (left := held() - before) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    restarts = faults.pop("created", 0) - chaos.n_workers
    counts = chaos.counts
    return {
        "is_sound": not (counts["lost"] or counts["wrong"] or chaos.errors or left),
        "minutes": round(passed_s / 60, 2),
        **counts,
        "faults": faults.total(),
        "faults_by_kind": dict(sorted(faults.items())),
        "restarts": restarts,
        "mib_per_hour": mib_per_hour(chaos.mib),
        "left": dict(left),
        "errors": chaos.errors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    help_text = "makes failures so many times rarer and the timeout longer, for an emulator"
    parser.add_argument("--slowness", type=float, default=1.0, help=help_text)
    args = parser.parse_args()
    torch.set_num_threads(1)
    plan = Plan(seconds=60 * args.minutes, seed=args.seed, n_workers=args.workers)
    times = ("strike_s", "signal_s", "template_s", "timeout_s")
    slower = {name: getattr(plan, name) * args.slowness for name in times}
    report = run(replace(plan, **slower))
    versions = {"rlpool": rlpool.__version__, "torch": torch.__version__}
    print(json.dumps({**report, "seed": args.seed, "versions": versions}), flush=True)
    sys.exit(0 if report["is_sound"] else 1)


if __name__ == "__main__":
    main()
