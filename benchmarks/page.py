"""Generates the tables of documents from the raw results in docs/results.

    python benchmarks/page.py          # writes them into the documents
    python benchmarks/page.py --check  # fails if a document has other figures

A table is between ``<!-- name -->`` and ``<!-- /name -->``. It is kept while the folder lacks its
raw results:

- ``returns``: results of the tutorials, from the files of ``learning.py``, one per run.
- ``trials``: final output of ``meta_rl.py``, from ``meta_rl.jsonl``: agent, seed, and the average
  return of each episode of a trial, on tasks not used for training.
- ``figures``: batchers relative to the bare loop, from ``throughput.jsonl``, the output of
  ``throughput.py --workloads long W1 W2 W3 W4``.
- ``requests``: requests of training loops, from ``requests.jsonl``, the output of
  ``throughput.py --workloads requests``.
- ``lanes``: workers and lanes, from ``choosing.jsonl``, the output of ``choosing.py``.
- ``agents``: many agents, from ``many_agents.jsonl``, the output of ``many_agents.py``.
- ``speed``: whole training loops, from ``learning_speed.jsonl``, the output of
  ``learning_speed.py --variants`` with CleanRL and Stable-Baselines3.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

from learning import TASKS, cleanrl_path, mean_and_spread, results_of

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = REPOSITORY / "docs" / "results"
DOCUMENTS = (
    "README.md",
    "docs/performance.md",
    "docs/results.md",
)

WORKLOADS = {
    "long": "CartPole, episodes of 500 steps, MLP, 2×16, 64 per request",
    "W1": "CartPole, MLP, 2×16, 8,000 episodes per request",
    "W2": "HalfCheetah, MLP, 2×8",
    "W3": "84×84×4 uint8 frames, random policy, 2×8",
    "W4": "episodes of 10 to 200 steps of 1 ms, 8×1 (of the ideal)",
}
KINDS = {
    "cartpole": "CartPole, 4-64-64-2 policy",
    "half_cheetah": "HalfCheetah, 17-256-256-6 policy",
    "frames": "84×84×4 uint8 frames at no cost, random policy",
    "computes": "steps that compute for 1 ms",
    "sleeps": "steps that sleep for 1 ms",
    "unequal": "`unequal`",
}
CONTENDERS = {
    "bare loop": "bare loop, one process",
    "rlpool": "`EpisodeBatcher`, 2 workers of 8 environments",
    "torchrl": "TorchRL, `MultiSyncCollector`, 2 workers of 8 `PettingZooEnv`",
    "agilerl": "AgileRL, `AsyncPettingZooVecEnv`, 2 processes of one environment",
}
PROGRAMS = {
    "cartpole": "PPO, CartPole-v1, 4 environments",
    "half_cheetah": "PPO, HalfCheetah-v4, 1 environment",
    "pong": "PPO, Pong, 8 environments, 2 workers",
}


def lines_of(folder: Path, name: str) -> list[Any]:
    """Return the output of a script, one JSON object per line; empty if it is missing."""
    path = folder / f"{name}.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def spread(found: Mapping[str, Any]) -> str:
    """Format a ratio with its quartiles."""
    low, high = found["quartiles"]
    return f"{found['median']:.2f} ({low:.2f} to {high:.2f})"


def row(*cells: str) -> str:
    """Format a row of a table."""
    return f"|{'|'.join(cells)}|"


def head(*cells: str) -> str:
    """Format the first two rows of a table."""
    return f"{row(*cells)}\n{'|---' * len(cells)}|"


def returns(folder: Path) -> Iterator[str]:
    """Results of the tutorials and published ones."""
    if not any(results_of(task, folder) for task in TASKS):
        return
    yield head("script", "environment", "steps", "published", "rlpool", "seeds")
    for task in TASKS:
        results, theirs = results_of(task, folder), results_of(task, folder, cleanrl_path)
        reference = task.reference
        if theirs:
            n_runs = f"{len(theirs)} run{'s' * (len(theirs) > 1)} of its script"
            reference = f"CleanRL {mean_and_spread(theirs)} ({n_runs})"
        if task.n_greedy:
            reference += ", greedy"
        seeds = ", ".join(f"{result['result']:.1f}" for result in results)
        script = f"[{task.script}.py](../tutorials/{task.script}.py)"
        found = mean_and_spread(results)
        cells = row(script, task.env_id, f"{task.n_steps:,}", reference, found, seeds)
        yield re.sub(r"(?<=[ |])-(?=\d)", "−", cells)


def trials(folder: Path) -> Iterator[str]:
    """The benefit of memory: agents on the same seeds."""
    runs = lines_of(folder, "meta_rl")
    for number, agent in enumerate(dict.fromkeys(run["agent"] for run in runs)):
        if not number:
            yield head("agent", "seeds", "first episode of a trial", "second episode")
        own = sorted((run for run in runs if run["agent"] == agent), key=lambda run: run["seed"])
        seeds = ", ".join(str(run["seed"]) for run in own)
        episodes = zip(*(run["returns"] for run in own), strict=True)
        cells = [f"{fmean(e):.1f} ({', '.join(f'{one:.1f}' for one in e)})" for e in episodes]
        yield row(f"`{agent}`", seeds, *cells)


def figures(folder: Path) -> Iterator[str]:
    """Throughput of batchers relative to the bare loop."""
    for number, line in enumerate(lines_of(folder, "throughput")):
        if not number:
            yield head("", "environment, policy, workers×lanes", "median", "quartiles")
        name, median = line["workload"], line.get("ratio", line.get("efficiency"))
        low, high = line["quartiles"]
        yield row(name, WORKLOADS[name], f"{median:.2f}", f"{low:.2f} to {high:.2f}")


def requests(folder: Path) -> Iterator[str]:
    """Small requests, without and with an update before each."""
    ratios = {line["requests"]: line["ratio"] for line in lines_of(folder, "requests")}
    if ratios:
        yield head("", "without updates", "with an `update` before each")
    for name, ratio in ratios.items():
        if not name.endswith(", updates"):
            title = name.replace("8000", "8,000").replace(" x ", " × ")
            yield row(title, f"{ratio:.2f}", f"{ratios[f'{name}, updates']:.2f}")


def lanes(folder: Path) -> Iterator[str]:
    """Steps per second by workers and lanes, the best of each row in bold."""
    for number, line in enumerate(lines_of(folder, "choosing")):
        rates = line["steps_per_s"]
        if not number:
            yield head("", *(name.replace("x", "×") for name in rates))
        best = max(rates.values())
        cells = [f"**{rate:,}**" if rate == best else f"{rate:,}" for rate in rates.values()]
        yield row(KINDS[line["kind"]], *cells)


def agents(folder: Path) -> Iterator[str]:
    """Joint steps of many agents."""
    for number, line in enumerate(lines_of(folder, "many_agents")):
        if not number:
            yield head("", "joint steps per second", "of the bare loop")
        ratio = spread(line["ratio"]) if "ratio" in line else "1"
        rate = f"{line['steps_per_s']['median']:,.0f}"
        yield row(CONTENDERS[line["many_agents"]], rate, ratio)


def speed(folder: Path) -> Iterator[str]:
    """Whole training loops: rlpool's script and its variants, and those of others."""
    others = ("CleanRL", "Stable-Baselines3")
    for number, line in enumerate(lines_of(folder, "learning_speed")):
        if not number:
            yield head("", "rlpool", *others, *(f"rlpool / {who}" for who in others))
        rates = line["rates"]
        for who in [who for who in rates if who not in others]:
            name = PROGRAMS[line["workload"]]
            if who != "rlpool":
                name = f"the same with {who.removeprefix('rlpool, ')}"
            cells = [f"{median(rates[who]):,.0f}"]
            cells += [
                f"{median(rates[other]):,.0f}" if who == "rlpool" and other in rates else ""
                for other in others
            ]
            for other in others:
                by = [a / b for a, b in zip(rates[who], rates.get(other, ()), strict=False)]
                cells.append(f"{median(by):.2f} ({min(by):.2f} to {max(by):.2f})" if by else "")
            yield row(name, *cells)


TABLES: dict[str, Callable[[Path], Iterator[str]]] = {
    each.__name__: each for each in (returns, trials, figures, requests, lanes, agents, speed)
}


def with_tables(text: str, folder: Path = FOLDER) -> str:
    """Return a document with tables from the raw results of a folder."""

    def made(table: re.Match[str]) -> str:
        lines = [f"<!-- {table[1]} -->", *TABLES[table[1]](folder), f"<!-- /{table[1]} -->"]
        return "\n".join(lines) if len(lines) > 2 else table[0]

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", made, text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    stale = []
    for document in DOCUMENTS:
        path = REPOSITORY / document
        text = path.read_text(encoding="utf-8")
        if (made := with_tables(text)) != text:
            stale.append(document)
            if not arguments.check:
                path.write_text(made, encoding="utf-8")
    if arguments.check and stale:
        sys.exit(f"tables differ from docs/results: {', '.join(stale)}; run benchmarks/page.py")


if __name__ == "__main__":
    main()
