"""Start and restart times of workers, and their memory and descriptors.

    python benchmarks/startup.py [--repeats 7]

Workers forked from a template and spawned ones alternate, each in a separate program. A worker has
16 CartPoles unless stated otherwise.

- ``first_batcher``: seconds from creating the first batcher of a program to receiving its first
  episodes; ``from_program_start``: the same since the start of the program, including imports.
- ``later_batcher``: the same for the next batcher of the program.
- ``idle_memory``: private memory of a worker (unique set size) when it is ready; and
  ``busy_memory``: after its first million steps.
- ``descriptors``: descriptors in the caller per worker while a batcher is open;
  ``descriptors_kept``: those that the first batcher leaves open, for the tracker of multiprocessing
  and the template; ``descriptors_left``: those that a later one leaves open.
- ``restart``: milliseconds from SIGKILL of a worker to the first step of its successor, minus the
  construction of the successor's environments, measured by its own clock; for an environment that
  is created immediately, and one that takes a second.
- ``slow_import``: seconds for a later batcher whose environments need a package that takes 2 s to
  import, with and without ``rlpool.preload``.

Prints JSON lines: medians, quartiles, the load average, and the threshold, if any, with whether the
template's median meets it. Workers import this module too, so imports that they do not need are
inside functions.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
from workloads import WORKLOADS, PolicyAgent, create_env, parser_of, quartiles, show

import rlpool
from rlpool import EpisodeBatcher, GymEnv

if TYPE_CHECKING:
    from collections.abc import Callable

N_LANES = 16
N_STEPS = 1_000_000
IMPORT_S = 2.0

METHODS = {"template": "auto", "spawn": "spawn"}

BARS = {
    ("first_batcher", 8): 2.5,
    ("later_batcher", 8): 0.3,
    ("idle_memory", 8): 15.0,
    ("busy_memory", 2): 25.0,
    ("restart", 0.0): 100.0,
    ("restart", 1.0): 100.0,
}
"""Maximum median with the template, by measure and argument."""


# Measurements, each in a separate program -------------------------------------------------------


def make_batcher(
    n_workers: int, start_method: str, create: Callable[..., GymEnv], **env_args: Any
) -> EpisodeBatcher:
    return EpisodeBatcher(
        n_timesteps=500,
        n_slots=n_workers * N_LANES,
        create_agent=PolicyAgent,
        agent_args={"make_policy": WORKLOADS["W1"].make_policy},
        create_env=create,
        env_args=env_args,
        n_threads=n_workers,
        seeds=0,
        max_restarts=None,
        start_method=start_method,
    )


def create_cartpoles(seed: int) -> GymEnv:
    return create_env(WORKLOADS["W1"].make_env, N_LANES, seed)


def first_episodes_s(n_workers: int, start_method: str, create: Callable[..., GymEnv]) -> float:
    """Return the time from creating a batcher to receiving one episode per lane."""
    start = time.monotonic()
    with make_batcher(n_workers, start_method, create) as batcher:
        batcher.execute(n_workers * N_LANES)
        batcher.get()
        return time.monotonic() - start


def run_batchers(start_method: str, n_workers: int) -> dict[str, Any]:
    """Run the first batcher of this program, and two more."""
    n_before = n_descriptors()
    first_s = first_episodes_s(n_workers, start_method, create_cartpoles)
    from_start_s = time.monotonic() - program_start_s()
    n_kept = n_descriptors()
    later_s = first_episodes_s(n_workers, start_method, create_cartpoles)
    with make_batcher(n_workers, start_method, create_cartpoles):
        n_open = n_descriptors()
        idle_mb = workers_mb()
    return {
        "first_batcher": [first_s],
        "from_program_start": [from_start_s],
        "later_batcher": [later_s],
        "idle_memory": idle_mb,
        "descriptors": [(n_open - n_kept) / n_workers],
        "descriptors_kept": [n_kept - n_before],
        "descriptors_left": [n_descriptors() - n_kept],
    }


def run_long(start_method: str, n_workers: int) -> dict[str, Any]:
    """Run workers for a million steps each."""
    n_steps = 0
    with make_batcher(n_workers, start_method, create_cartpoles) as batcher:
        while n_steps < n_workers * N_STEPS:
            batcher.execute(200 * N_LANES)
            n_steps += int(batcher.get().lengths.sum())
        return {"busy_memory": workers_mb()}


def run_restart(start_method: str, delay_s: float) -> dict[str, Any]:
    """Kill the only worker in the middle of a request."""
    with tempfile.TemporaryDirectory() as notes:
        with make_batcher(1, start_method, create_noting, notes=notes, delay_s=delay_s) as batcher:
            batcher.execute(500 * N_LANES)
            while not (stepped := os.listdir(notes)):
                time.sleep(0.01)
            os.kill(int(stepped[0]), signal.SIGKILL)
            killed_s = time.monotonic()
            batcher.get()
        (note,) = (path for path in Path(notes).iterdir() if path.name != stepped[0])
        construction_s, first_step_s = json.loads(note.read_text())
    return {"restart": [1000 * (first_step_s - killed_s - construction_s)]}


def create_noting(notes: str, delay_s: float, seed: int) -> GymEnv:
    """Make CartPoles, one of which notes the time of making all of them, and of its first step."""
    start_s = time.monotonic()
    time.sleep(delay_s)
    envs = [gymnasium.make("CartPole-v1") for _ in range(N_LANES)]
    note, step = Path(notes) / str(os.getpid()), envs[0].step

    def noting_step(action: Any) -> Any:
        note.write_text(json.dumps([construction_s, time.monotonic()]))
        envs[0].step = step  # type: ignore[method-assign]
        return step(action)

    envs[0].step = noting_step  # type: ignore[method-assign]
    made = GymEnv(envs, seed)
    construction_s = time.monotonic() - start_s
    return made


def run_slow_import(start_method: str, is_preloaded: bool) -> dict[str, Any]:
    """Run a later batcher whose workers need a package with a slow import."""
    if is_preloaded:
        rlpool.preload("slow_package")
    first_episodes_s(2, start_method, create_with_slow_package)
    return {"slow_import": [first_episodes_s(2, start_method, create_with_slow_package)]}


def create_with_slow_package(seed: int) -> GymEnv:
    __import__("slow_package")
    return create_cartpoles(seed)


def workers_mb() -> list[float]:
    """Return the private memory of each worker."""
    from resources import workers

    return [worker.memory_full_info().uss / 1e6 for worker in workers()]


def n_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) - 1  # one is the listing's own


PROGRAMS: dict[str, Callable[..., dict[str, Any]]] = {
    "batchers": run_batchers,
    "long": run_long,
    "restart": run_restart,
    "slow_import": run_slow_import,
}


# Alternating programs ---------------------------------------------------------------------------


def program_start_s() -> float:
    """Return the start time of this program, by the clock that all processes share."""
    return float(os.environ["STARTUP_BENCHMARK_S"])


def result_of(name: str, *arguments: Any) -> dict[str, list[float]]:
    """Run a program in a fresh interpreter."""
    command = [sys.executable, __file__, "--program", json.dumps([name, *arguments])]
    environment = {**os.environ, "STARTUP_BENCHMARK_S": str(time.monotonic())}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else every worker compiles these scripts
    result: dict[str, list[float]] = json.loads(subprocess.check_output(command, env=environment))
    return result


def compare(name: str, n_repeats: int, about: str, value: float, *more: tuple[Any, ...]) -> None:
    """Alternate between variants of a program, by default both start methods; print figures."""
    variants = dict(more) or {kind: (method, value) for kind, method in METHODS.items()}
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(n_repeats):
        for variant, arguments in variants.items():
            for measure, values in result_of(name, *arguments).items():
                figures[measure][variant] += values
    for measure, by_variant in figures.items():
        summary = {variant: quartiles(values, 2) for variant, values in by_variant.items()}
        line = {"measure": measure, about: value, **summary}
        bar = BARS.get((measure, value))
        if bar is not None:
            line |= {"bar": bar, "is_met": summary["template"]["median"] <= bar}
        show({**line, "load": [round(average, 2) for average in os.getloadavg()]})


def compare_slow_import(n_repeats: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "slow_package.py").write_text(f"import time\ntime.sleep({IMPORT_S})\n")
        paths = [directory, *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        preloaded = ("template_preloaded", ("auto", True))
        others = [(kind, (method, False)) for kind, method in METHODS.items()]
        compare("slow_import", n_repeats, "import_s", IMPORT_S, preloaded, *others)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--program", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program:
        name, *arguments = json.loads(args.program)
        print(json.dumps(PROGRAMS[name](*arguments)))
        return
    for n_workers in (8, 2):
        compare("batchers", args.repeats, "n_workers", n_workers)
    for delay_s in (0.0, 1.0):
        compare("restart", args.repeats, "construction_s", delay_s)
    compare_slow_import(args.repeats)
    compare("long", 1, "n_workers", 2)


if __name__ == "__main__":
    main()
