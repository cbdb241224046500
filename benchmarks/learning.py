"""Comparison of the tutorials with published results, on several seeds.

    python benchmarks/learning.py --all                    # all runs that are not in the folder yet
    python benchmarks/learning.py --tasks ppo-CartPole-v1  # those of one task
    python benchmarks/learning.py --all --cleanrl FOLDER --cleanrl-python PYTHON  # and CleanRL's
    python benchmarks/learning.py --table                  # results in the folder, as Markdown

A run is a process, ``python tutorials/<script>.py --seed <seed> ...``, without worker processes.
``--jobs`` of them run in parallel; an interrupted run is resumed from its checkpoint. Its curve,
its result and the versions are written to ``<folder>/<task>-<seed>.json``, and a plot of all seeds
to ``<folder>/<task>.png``. If there are no published results for the budget, the reference is
CleanRL's own script, unchanged, on the same seeds; its ``FOLDER`` holds ``ppo_atari.py``. These
runs are written to ``<folder>/<task>-cleanrl-<seed>.json``.

The result of a run is the mean return of the last 100 training episodes at the end of the budget,
as in CleanRL's tables, or the mean return of 50 greedy episodes after training if the reference is
an evaluation, as in rl-baselines3-zoo's.

References:
    CleanRL's results: https://docs.cleanrl.dev/rl-algorithms/overview (Huang et al. 2022, "CleanRL:
    High-quality single-file implementations of deep reinforcement learning algorithms").
    rl-baselines3-zoo's: https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/benchmark.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from workloads import ATARI, cleanrl_command, interpreter

REPOSITORY = Path(__file__).resolve().parents[1]
N_POINTS = 200
"""Number of points kept of a curve."""

EPISODE = re.compile(r"global_step=(\d+), episodic_return=\[?\s*(-?[\d.]+)")
"""Output of CleanRL's scripts at the end of an episode."""


@dataclass(frozen=True)
class Task:
    """A script on an environment.

    Attributes:
        script: Name of the tutorial.
        env_id: The environment.
        n_steps: Budget in environment steps.
        bar: Required mean result, ``None`` if the reference is another run.
        reference: The published result and its source.
        n_seeds: Number of seeds.
        n_greedy: Number of greedy episodes of the result; 0 for training returns.
        cleanrl: CleanRL's script and its arguments, if its runs are the reference.
        setup: Code that CleanRL's interpreter runs before the script.
        flags: Arguments of the script in place of ``--env-id``.
    """

    script: str
    env_id: str
    n_steps: int
    bar: float | None
    reference: str
    n_seeds: int = 5
    n_greedy: int = 0
    cleanrl: tuple[str, ...] = ()
    setup: str = ""
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.script}-{self.env_id.replace('/', '-')}"

    @property
    def published(self) -> tuple[float, float] | None:
        """Mean and spread of the reference."""
        words = self.reference.replace("−", "-").split()
        numbers = [float(word) for word in words if word.lstrip("-").replace(".", "").isdigit()]
        return (numbers[0], numbers[1]) if len(numbers) == 2 else None


TASKS = [
    Task("a2c", "CartPole-v1", 500_000, 475.0, "zoo 500 ± 0 (greedy)"),
    Task("ppo", "CartPole-v1", 500_000, 485.0, "CleanRL 490.0 ± 6.1"),
    Task("ppo", "Acrobot-v1", 500_000, -88.0, "CleanRL −86.4 ± 1.3"),
    Task("ppo_continuous", "HalfCheetah-v4", 1_000_000, 1400.0, "CleanRL 1442.6 ± 46.0"),
    Task("ppo_continuous", "Hopper-v4", 1_000_000, 2111.2, "CleanRL 2382.9 ± 271.7", 3),
    Task("ppo_continuous", "Walker2d-v4", 1_000_000, 1716.2, "CleanRL 2288.0 ± 571.8", 3),
    Task("dqn", "CartPole-v1", 500_000, 475.0, "CleanRL 488.7 ± 16.1"),
    Task("ppo_recurrent", "CartPole-v1", 100_000, 480.0, "zoo 500 ± 0", n_greedy=50),
    Task("sac", "Pendulum-v1", 20_000, -165.0, "zoo −157.0 ± 88.7", n_greedy=50),
    Task("td3", "Pendulum-v1", 20_000, -165.0, "zoo −151.9 ± 90.2", n_greedy=50),
    Task(
        *("ppo_atari", "pong", 1_000_000, None, "CleanRL's script, run here"),
        n_seeds=3,
        cleanrl=("ppo_atari.py", "--env-id=PongNoFrameskip-v4"),
        setup=ATARI,
    ),
    Task(
        *("multi_agent", "simple_spread-ippo", 2_000_000, None),
        "−29 at 20 million steps, see below",
        n_seeds=3,
        flags=("--n-workers=0",),
    ),
    Task(
        *("multi_agent", "simple_spread-mappo", 2_000_000, None),
        "−29 at 20 million steps, see below",
        n_seeds=3,
        flags=("--n-workers=0", "--central-critic"),
    ),
]


# Running ------------------------------------------------------------------------------------------


def run(task: Task, seed: int, folder: Path) -> None:
    """Run a script to its end, and write its result."""
    checkpoint = folder / f"{task.name}-{seed}.pt"
    command = [sys.executable, str(REPOSITORY / "tutorials" / f"{task.script}.py")]
    command += [*(task.flags or [f"--env-id={task.env_id}"]), f"--total-timesteps={task.n_steps}"]
    command += [f"--seed={seed}", f"--checkpoint={checkpoint}"]
    if task.n_greedy:
        command.append(f"--evaluate={task.n_greedy}")
    if checkpoint.exists():
        command.append("--resume")
    with Path(f"{checkpoint}.log").open("a") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    progress = torch.load(checkpoint, weights_only=True)["progress"]
    Path(result_path(task, seed, folder)).write_text(json.dumps(result_of(task, seed, progress)))


def run_cleanrl(scripts: Path, python: str, task: Task, seed: int, folder: Path) -> None:
    """Run CleanRL's script to its end, and write its result."""
    script, *arguments = task.cleanrl
    command = cleanrl_command(python, scripts / script, task.setup)
    command += [*arguments, f"--total-timesteps={task.n_steps}", f"--seed={seed}", "--no-cuda"]
    versions = "from importlib.metadata import version as v; import json; "
    versions += "print(json.dumps({name: v(name) for name in ('torch', 'gymnasium')}))"
    found = subprocess.run([python, "-c", versions], check=True, capture_output=True).stdout
    log = folder / f"{task.name}-cleanrl-{seed}.log"
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as output, tempfile.TemporaryDirectory() as runs:
        subprocess.run(command, check=True, stdout=output, cwd=runs, env=environ)
    episodes = [(int(step), float(value)) for step, value in EPISODE.findall(log.read_text())]
    steps, returns = zip(*episodes, strict=True)
    progress = {"returns": returns, "steps": steps, "n_steps": task.n_steps}
    result = {**result_of(task, seed, progress), "versions": json.loads(found)}
    cleanrl_path(task, seed, folder).write_text(json.dumps(result))


def cleanrl_path(task: Task, seed: int, folder: Path) -> Path:
    return folder / f"{task.name}-cleanrl-{seed}.json"


def result_path(task: Task, seed: int, folder: Path) -> Path:
    return folder / f"{task.name}-{seed}.json"


def result_of(task: Task, seed: int, progress: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a run, and its curve: the mean of the last episodes at some points.

    The means are over 100 episodes, or a tenth of a run with fewer than a thousand.
    """
    returns, steps = progress["returns"], progress["steps"]
    width = min(100, max(1, len(returns) // 10))
    ends = sorted(
        {round(point * len(returns) / N_POINTS) for point in range(1, N_POINTS + 1)} - {0}
    )
    final = progress["evaluation"] if task.n_greedy else returns[-100:]
    return {
        "task": task.name,
        "seed": seed,
        "n_steps": progress["n_steps"],
        "n_episodes": len(returns),
        "result": fmean(final),
        "episodes_per_point": width,
        "curve": [
            [steps[end - 1], round(fmean(returns[max(0, end - width) : end]), 3)] for end in ends
        ],
        "versions": {name: metadata.version(name) for name in ("rlpool", "torch", "gymnasium")},
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
    }


# Output -------------------------------------------------------------------------------------------


def results_of(
    task: Task, folder: Path, path_of: Callable[[Task, int, Path], Path] = result_path
) -> list[dict[str, Any]]:
    """Return the existing results of our scripts, or with ``cleanrl_path`` of CleanRL's."""
    paths = (path_of(task, seed, folder) for seed in range(1, task.n_seeds + 1))
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def mean_and_spread(results: Sequence[dict[str, Any]]) -> str:
    """Format the mean of the results, and their standard deviation if there are several."""
    values = [result["result"] for result in results]
    return f"{fmean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def draw(task: Task, folder: Path) -> None:
    """Plot the curves of all seeds with the published result."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    axes = (figure := Figure(figsize=(5, 3.2), layout="constrained")).subplots()
    results = results_of(task, folder)
    for result in results_of(task, folder, cleanrl_path):
        label = "CleanRL" if result["seed"] == 1 else None
        axes.plot(*zip(*result["curve"], strict=True), color="grey", linewidth=1, label=label)
    for result in results:
        axes.plot(*zip(*result["curve"], strict=True), linewidth=1, label=f"seed {result['seed']}")
    if (published := task.published) is not None:
        mean, spread = published
        axes.axhspan(mean - spread, mean + spread, color="grey", alpha=0.2, linewidth=0)
        axes.axhline(mean, color="grey", linestyle=":", label=task.reference.split()[0])
    width = min((result.get("episodes_per_point", 100) for result in results), default=100)
    axes.set(xlabel="environment steps", ylabel=f"return, mean of {width} episodes")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_title(task.name)
    axes.legend(fontsize="small", frameon=False)
    figure.savefig(folder / f"{task.name}.png", dpi=100)


def rows(tasks: Sequence[Task], folder: Path) -> Iterator[str]:
    """Return the rows of a Markdown table of the results."""
    yield "| script | environment | steps | reference | bar | rlpool | seeds |"
    yield "|---|---|---|---|---|---|---|"
    for task in tasks:
        results = results_of(task, folder)
        ours = mean_and_spread(results) if results else "not run"
        listed = ", ".join(f"{result['result']:.1f}" for result in results)
        bar = (
            ("as CleanRL's" if task.cleanrl else "none") if task.bar is None else f"≥ {task.bar:g}"
        )
        reference = task.reference
        if theirs := results_of(task, folder, cleanrl_path):
            reference = f"CleanRL {mean_and_spread(theirs)}, its script run here"
        kind = f" ({task.n_greedy} greedy episodes)" if task.n_greedy else ""
        yield (
            f"| {task.script} | {task.env_id} | {task.n_steps:,} | {reference}{kind} "
            f"| {bar} | {ours} | {listed} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="run every task")
    parser.add_argument("--tasks", nargs="+", default=[], choices=[task.name for task in TASKS])
    parser.add_argument("--seeds", nargs="+", type=int, help="only these seeds")
    parser.add_argument("--jobs", type=int, default=2, help="parallel runs")
    parser.add_argument("--cleanrl", metavar="FOLDER", type=Path, help="CleanRL's scripts")
    parser.add_argument(
        "--cleanrl-python", metavar="PYTHON", type=interpreter, default=sys.executable
    )
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "docs" / "results")
    parser.add_argument("--table", action="store_true", help="only print existing results")
    arguments = parser.parse_args()
    tasks = [t for t in TASKS if arguments.all or arguments.table or t.name in arguments.tasks]
    if not tasks:
        parser.error("nothing to do: pass --all, --tasks or --table")
    folder = arguments.folder.resolve()
    if not arguments.table:
        folder.mkdir(parents=True, exist_ok=True)
        wanted = [
            (task, seed)
            for seed, task in product(range(1, 6), tasks)
            if seed <= task.n_seeds and (arguments.seeds is None or seed in arguments.seeds)
        ]
        missing = [partial(run, *w, folder) for w in wanted if not result_path(*w, folder).exists()]
        if arguments.cleanrl:
            theirs = partial(run_cleanrl, arguments.cleanrl.resolve(), arguments.cleanrl_python)
            missing += [
                partial(theirs, task, seed, folder)
                for task, seed in wanted
                if task.cleanrl and not cleanrl_path(task, seed, folder).exists()
            ]
        with ThreadPoolExecutor(arguments.jobs) as pool:
            for _ in pool.map(lambda job: job(), missing):
                pass
        for task in tasks:
            draw(task, folder)
    print("\n".join(rows(tasks, folder)))


if __name__ == "__main__":
    main()
