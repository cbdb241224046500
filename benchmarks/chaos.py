"""What is left of the data when workers are killed, stopped, fed up and starved, all the time.

    python benchmarks/chaos.py --minutes 10 [--seed 0] [--workers 4]

Batchers are opened, collect and are closed, in turns: an ``EpisodeBatcher``, whose requests are
often larger than its slots and whose longest episodes take several of them, with a new policy for
every request, and a ``Batcher``. Their agent has a recurrent state and noise. Meanwhile

- a thread sends SIGKILL, SIGSEGV and SIGSTOP to workers picked by chance, at random times, and
  SIGKILL to the template from which they are forked;
- environments, at random times, raise, call ``sys.exit`` and ``os._exit``, run out of a limit of
  memory, take memory and are killed as by the kernel, and hoard it until the batcher recycles
  their worker.

Everything is collected once more in this process, undisturbed, and compared bit by bit. In the end
no process, descriptor, thread or shared memory may be left.

Prints a JSON line; the exit code is 1 if anything was lost, wrong or left. ``restarts`` counts
environments that were made again, and not the workers that died before they came to that.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import rough
import torch
from resources import held, memory_mib, templates, workers
from workloads import versions

from rlpool import Batcher, EpisodeBatcher, RlpoolError, TemporalDictTensor

KINDS = ("raise", "sys_exit", "os_exit", "memory_error", "oom_kill", "hoard")
"""How environments strike."""

HOARDERS_MIB = 96
"""What a worker may hold more than one that has hardly begun, before it is recycled; one hoard is
larger."""

SETTLE_S = 3.0
"""What ends with the last batcher may take so long to be gone."""


@dataclass(frozen=True)
class Plan:
    """How much chaos, and for how long.

    Attributes:
        seconds: No life begins after so long, unless too little has happened.
        seed: Of the episodes, and of who is struck from outside.
        n_workers: Workers of the ``EpisodeBatcher``; the ``Batcher`` has half as many.
        strike_s: Mean seconds between two strikes of the environments of a worker.
        signal_s: Mean seconds between two signals to any worker.
        template_s: Mean seconds between two ends of the template.
        signals_per_result: No more of them between two results, so that there is progress however
            slow the machine.
        at_starting: Share of the signals that may hit a worker that is still starting. One that
            fails again and again before it is ready is given up, so it must not be large.
        rounds: Requests in the life of a batcher.
        sizes: Episodes per request to choose from.
        timeout_s: After which a stopped worker counts as hanging.
        least_episodes: Go on until there were so many.
        least_windows: Go on until there were so many.
        least_faults: Go on until there were so many.
    """

    seconds: float = 600.0
    seed: int = 0
    n_workers: int = 4
    strike_s: float = 3.0
    signal_s: float = 0.15
    template_s: float = 8.0
    signals_per_result: int = 20
    at_starting: float = 0.1
    rounds: int = 10
    sizes: tuple[int, ...] = (1, 12, 100, 400)
    timeout_s: float = 2.0
    least_episodes: int = 0
    least_windows: int = 0
    least_faults: int = 0

    @property
    def n_windows_workers(self) -> int:
        """Workers of the ``Batcher``."""
        return max(1, self.n_workers // 2)


@dataclass
class Tally:
    """What was counted.

    Attributes:
        episodes: Episodes that came back.
        windows: Windows that came back.
        lost: Rows that did not come back.
        wrong: Rows that differ from the undisturbed ones.
        signals: Signals sent from outside, by name.
        errors: What was raised, which nothing should be.
        lives: Batchers that were opened.
    """

    episodes: int = 0
    windows: int = 0
    lost: int = 0
    wrong: int = 0
    signals: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    lives: int = 0


class Sniper:
    """A thread that sends signals to workers.

    Args:
        plan: How often.
        notes: Where environments leave notes: a process without one is still importing.
        signals: Where to count.

    Attributes:
        n_since_result: Signals since the last result came back; whoever gets it resets it.
        has_peace: Whether nobody is shot at for a while.
        spared: Processes that are not shot at.
    """

    def __init__(self, plan: Plan, notes: str, signals: Counter[str]) -> None:
        self._mean_s = 1 / (1 / plan.signal_s + 1 / plan.template_s)
        self._at_template = self._mean_s / plan.template_s
        self._at_starting = plan.at_starting
        self._most = plan.signals_per_result
        self._notes = notes
        self._signals = signals
        self._rng = random.Random(plan.seed)
        self.n_since_result = 0
        self.has_peace = False
        self.spared: set[psutil.Process] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Shoot while this section lasts."""
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._rng.expovariate(1 / self._mean_s)):
            if not self.has_peace and self.n_since_result < self._most:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._shoot()

    def _shoot(self) -> None:
        if self._rng.random() < self._at_template:
            for template in templates():
                template.kill()
                self._signals["SIGKILL of the template"] += 1
            return
        alive = [worker for worker in workers() if worker not in self.spared]
        at_work = [worker for worker in alive if self._has_begun(worker)]
        names = ["SIGKILL", "SIGKILL", "SIGSEGV"]
        if self._rng.random() >= self._at_starting:
            alive = at_work
            names += ["SIGSTOP", "SIGSTOP+SIGCONT"]
        if not alive:
            return
        worker, name = self._rng.choice(alive), self._rng.choice(names)
        worker.send_signal(getattr(signal, name.partition("+")[0]))
        self._signals[name] += 1
        self.n_since_result += 1
        if name.endswith("SIGCONT"):
            self._over.wait(0.1)
            worker.resume()

    def _has_begun(self, worker: psutil.Process) -> bool:
        return os.path.exists(os.path.join(self._notes, f"{worker.pid}.notes"))


# Lives ------------------------------------------------------------------------------------------


class Lives:
    """Batchers, one after another, each beside its undisturbed twin.

    Args:
        plan: How they are disturbed.
        notes: Directory for notes.
        tally: Where to count.
        sniper: Who must be told whom to spare.
        worker_mib: Resident memory of a worker.
    """

    N_SLOTS, N_TIMESTEPS, N_LANES = 12, 16, 2

    def __init__(
        self, plan: Plan, notes: str, tally: Tally, sniper: Sniper, worker_mib: float
    ) -> None:
        self._plan = plan
        self._tally = tally
        self._sniper = sniper
        self._rng = random.Random(plan.seed)
        self._notes = notes
        self._start_s = time.monotonic()
        self._strikes = {"notes": notes, "mean_s": plan.strike_s, "kinds": KINDS}
        self._options = {
            "timeout": plan.timeout_s,
            "on_worker_failure": "restart",
            "on_env_error": "restart",
            "max_restarts": None,
            "max_episodes_per_worker": 400,
            "max_rss_bytes": int((worker_mib + HOARDERS_MIB) * 2**20),
        }

    def run(self) -> None:
        """Go on until there was enough."""
        kinds = itertools.cycle((self._episodes, self._windows))
        while not self._tally.errors and not self._is_enough():
            self._tally.lives += 1
            try:
                next(kinds)(self._plan.seed + self._tally.lives)
            except RlpoolError as error:  # in opening: the others are counted with their rows
                self._tally.errors.append(f"{type(error).__name__}: {error}")

    def _is_enough(self) -> bool:
        tally, faults = self._tally, rough.noted(self._notes)
        faults.pop("created", None)
        return (
            time.monotonic() - self._start_s > self._plan.seconds
            and tally.episodes >= self._plan.least_episodes
            and tally.windows >= self._plan.least_windows
            and sum(faults.values()) + sum(tally.signals.values()) >= self._plan.least_faults
        )

    def _open(self, kind: type[Any], seed: int, n_workers: int, disturbed: bool) -> Any:
        env_args: dict[str, Any] = {"n_lanes": self.N_LANES, "restarts": kind is Batcher}
        if disturbed:
            # Steps that take a while give more time to be hit in the middle of an episode.
            env_args |= {**self._strikes, "sleep_s": 5e-4}
        return kind(
            self.N_TIMESTEPS,
            self.N_SLOTS,
            rough.create_agent,
            {},
            rough.create_env,
            env_args,
            n_workers,
            seed,
            **(self._options if disturbed else {}),
        )

    def _episodes(self, seed: int) -> None:
        with (
            self._open(EpisodeBatcher, seed, 0, False) as twin,
            self._open(EpisodeBatcher, seed, self._plan.n_workers, True) as batcher,
        ):
            for number in range(0, self._plan.rounds, 2):
                sizes = [self._rng.choice(self._plan.sizes) for _ in "ab"]
                for offset, n_episodes in enumerate(sizes):  # two requests in flight
                    for one in (batcher, twin):
                        one.update(rough.parameters(number + offset))
                        one.execute(n_episodes, **rough.infos(n_episodes, number))
                for n_episodes in sizes:
                    self._tally.episodes += self._compare(batcher, twin, n_episodes)
                if self._tally.errors or self._is_enough():
                    return

    def _windows(self, seed: int) -> None:
        n_workers = self._plan.n_windows_workers
        # A twin in this process would have another number of lanes in its only worker, and
        # arithmetic depends on that in the last bit.
        self._sniper.has_peace = True
        with self._open(Batcher, seed, n_workers, False) as twin:
            self._sniper.spared = set(workers())
            self._sniper.has_peace = False
            with self._open(Batcher, seed, n_workers, True) as batcher:
                self._collect_windows(batcher, twin)

    def _collect_windows(self, batcher: Batcher, twin: Batcher) -> None:
        n_lanes = twin.n_lanes
        for number in range(self._plan.rounds):
            for one in (batcher, twin):
                if number % 20 == 0:
                    one.reset(**rough.infos(n_lanes, number))
                one.update(rough.parameters(number))
                one.execute()
            self._tally.windows += bool(self._compare(batcher, twin, n_lanes))
            if self._tally.errors or self._is_enough():
                return

    def _compare(self, batcher: Any, twin: Any, n_rows: int) -> int:
        """Compare the next results of both; returns how many rows came back."""
        expected = twin.get()
        try:
            got = batcher.get()
        except RlpoolError as error:
            self._tally.errors.append(f"{type(error).__name__}: {error}")
            self._tally.lost += n_rows
            return 0
        self._sniper.n_since_result = 0
        self._tally.lost += n_rows - got.n_elems()
        self._tally.wrong += n_wrong_rows(got, expected)
        return int(got.n_elems())


def n_wrong_rows(got: TemporalDictTensor, expected: TemporalDictTensor) -> int:
    """How many rows differ in any bit of any key, or in what was noted about them."""
    n_rows = expected.n_elems()
    if got.n_elems() != n_rows or set(got.keys()) != set(expected.keys()):
        return n_rows
    if got.info is None or expected.info is None:
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


# All of it --------------------------------------------------------------------------------------


def run(plan: Plan) -> dict[str, Any]:
    """Go through chaos; returns the report. ``is_sound`` says whether all is well."""
    worker_mib = warm_up()
    notes = tempfile.mkdtemp(prefix="rlpool-chaos-")
    tally = Tally()
    before = held()
    start_s = time.monotonic()
    try:
        sniper = Sniper(plan, notes, tally.signals)
        lives = Lives(plan, notes, tally, sniper, worker_mib)
        with sniper.at_work():
            lives.run()
        noted = rough.noted(notes)
    finally:
        shutil.rmtree(notes)
    passed_s = time.monotonic() - start_s
    left = before_and_after(before)
    n_pairs, is_odd = divmod(tally.lives, 2)
    n_started = (n_pairs + is_odd) * plan.n_workers + n_pairs * plan.n_windows_workers
    restarts = noted.pop("created", 0) - n_started
    faults = dict(sorted((noted + tally.signals).items()))
    is_sound = not (tally.lost or tally.wrong or tally.errors or any(left.values()))
    return {
        "is_sound": is_sound,
        "minutes": round(passed_s / 60, 2),
        "episodes": tally.episodes,
        "windows": tally.windows,
        "faults": sum(faults.values()),
        "faults_by_kind": faults,
        "restarts": restarts,
        "lost": tally.lost,
        "wrong": tally.wrong,
        "left": left,
        "errors": tally.errors,
        "lives": tally.lives,
    }


def warm_up() -> float:
    """Open once what stays open for the life of the interpreter; returns a worker's MiB."""
    with EpisodeBatcher(
        4, 4, rough.create_agent, {}, rough.create_env, {}, n_threads=1, seeds=0
    ) as batcher:
        batcher.execute(1)
        batcher.get()
        return max(memory_mib(worker)["rss"] for worker in workers())


def before_and_after(before: Any) -> dict[str, Any]:
    """What is left, once it had a moment to go."""
    deadline_s = time.monotonic() + SETTLE_S
    while any((left := held().left_since(before)).values()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return left


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    for name, seconds, of_what in (
        ("--strike-every", Plan.strike_s, "two strikes of the environments of a worker"),
        ("--signal-every", Plan.signal_s, "two signals to any worker"),
        ("--template-every", Plan.template_s, "two ends of the template"),
    ):
        help_text = f"mean seconds between {of_what}"
        parser.add_argument(name, type=float, default=seconds, help=help_text)
    args = parser.parse_args()
    torch.set_num_threads(1)
    plan = Plan(
        seconds=60 * args.minutes,
        seed=args.seed,
        n_workers=args.workers,
        strike_s=args.strike_every,
        signal_s=args.signal_every,
        template_s=args.template_every,
    )
    report = run(plan)
    print(json.dumps({**report, "seed": args.seed, "versions": versions()}), flush=True)
    sys.exit(0 if report["is_sound"] else 1)


if __name__ == "__main__":
    main()
