"""Makes the tables of documents from the raw results in docs/results.

    python benchmarks/page.py          # writes them into the documents
    python benchmarks/page.py --check  # fails where a document has other figures

A table stands between ``<!-- name -->`` and ``<!-- /name -->``. It stays as it is while the folder
lacks its raw results:

- ``returns``: what tutorials learn, from the files that ``learning.py`` writes, one per run.
- ``trials``: what ``meta_rl.py`` prints at its end, from ``meta_rl.jsonl``: agent, seed, and the
  average return of each episode of a trial, on tasks that were not trained on.
- ``figures``: batchers beside the bare loop, from ``throughput.jsonl``, which holds what
  ``throughput.py --workloads W1 W2 W3 W4`` prints.
- ``requests``: requests as training loops make them, from ``requests.jsonl``, likewise of
  ``throughput.py --workloads requests``.
- ``lanes``: workers and lanes, from ``choosing.jsonl``, likewise of ``choosing.py``.
- ``rows``: what a fixed number of rows costs, from ``agent_rows.jsonl``, of ``agent_rows.py``.
- ``agents``: many agents, from ``many_agents.jsonl``, of ``many_agents.py``.
- ``speed``: whole training loops, from ``learning_speed.jsonl``, of
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
    "docs/choosing.md",
    "docs/evaluation.md",
    "docs/performance.md",
    "docs/results.md",
)

WORKLOADS = {
    "W1": "CartPole-v1, MLP policy, 2 workers × 16 lanes, 8,000 episodes per request",
    "W2": "HalfCheetah-v5, MLP policy, 2 workers × 8 lanes",
    "W3": "84×84×4 uint8 frames, random policy, 2 workers × 8 lanes",
    "W4": "episodes of 10 to 200 steps of 1 ms, 8 workers × 1 lane (of the ideal)",
}
KINDS = {
    "cartpole": "CartPole, 4-64-64-2 policy",
    "half_cheetah": "HalfCheetah, 17-256-256-6 policy",
    "frames": "`frames`: 84×84×4 uint8 at no cost, random policy",
    "computes": "steps that compute for 1 ms",
    "sleeps": "steps that sleep for 1 ms",
    "unequal": "`unequal`",
}
AGENTS = {
    "MLP": "MLP 4-64-64-2, CartPole",
    "GRU": "GRU with 64 numbers, CartPole",
    "Nature CNN": "Nature CNN, frames at no cost",
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
    """What a script has printed, a JSON object per line; empty if that is not there."""
    path = folder / f"{name}.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def spread(found: Mapping[str, Any]) -> str:
    """A ratio with its quartiles."""
    low, high = found["quartiles"]
    return f"{found['median']:.2f} ({low:.2f} to {high:.2f})"


def returns(folder: Path) -> Iterator[str]:
    """What tutorials learn, beside what is published."""
    if not any(results_of(task, folder) for task in TASKS):
        return
    yield "| script | environment | steps | published | rlpool | seeds |"
    yield "|---|---|---|---|---|---|"
    for task in TASKS:
        results, theirs = results_of(task, folder), results_of(task, folder, cleanrl_path)
        reference = task.reference
        if theirs:
            n_runs = f"{len(theirs)} run{'s' * (len(theirs) > 1)} of its script"
            reference = f"CleanRL {mean_and_spread(theirs)} ({n_runs})"
        if task.n_greedy:
            reference += ", greedy"
        seeds = ", ".join(f"{result['result']:.1f}" for result in results)
        row = (
            f"| [{task.script}.py](../tutorials/{task.script}.py) | {task.env_id} "
            f"| {task.n_steps:,} | {reference} | {mean_and_spread(results)} | {seeds} |"
        )
        yield re.sub(r"(?<=[ |])-(?=\d)", "−", row)


def trials(folder: Path) -> Iterator[str]:
    """What a memory is worth, for the same seeds one agent after the other."""
    runs = lines_of(folder, "meta_rl")
    if not runs:
        return
    yield "| agent | seeds | first episode of a trial | second episode |"
    yield "|---|---|---|---|"
    for agent in dict.fromkeys(run["agent"] for run in runs):
        own = sorted((run for run in runs if run["agent"] == agent), key=lambda run: run["seed"])
        seeds = ", ".join(str(run["seed"]) for run in own)
        episodes = zip(*(run["returns"] for run in own), strict=True)
        cells = [f"{fmean(e):.1f} ({', '.join(f'{one:.1f}' for one in e)})" for e in episodes]
        yield f"| `{agent}` | {seeds} | {' | '.join(cells)} |"


def figures(folder: Path) -> Iterator[str]:
    """Batchers, as a share of the bare loop's speed."""
    lines = lines_of(folder, "throughput")
    if not lines:
        return
    yield "| workload | environments | median, share of the bare loop's speed | quartiles |"
    yield "|---|---|---|---|"
    for line in lines:
        name, median = line["workload"], line.get("ratio", line.get("efficiency"))
        low, high = line["quartiles"]
        yield f"| {name} | {WORKLOADS[name]} | {median:.2f} | {low:.2f} to {high:.2f} |"


def requests(folder: Path) -> Iterator[str]:
    """Small requests, without and with an update before each."""
    ratios = {line["requests"]: line["ratio"] for line in lines_of(folder, "requests")}
    if not ratios:
        return
    yield "| | without updates | with an `update` before each |"
    yield "|---|---|---|"
    for name, ratio in ratios.items():
        if not name.endswith(", updates"):
            told = name.replace("8000", "8,000").replace(" x ", " × ")
            yield f"| {told} | {ratio:.2f} | {ratios[f'{name}, updates']:.2f} |"


def lanes(folder: Path) -> Iterator[str]:
    """Steps per second by workers and lanes, the best of each row in bold."""
    for number, line in enumerate(lines_of(folder, "choosing")):
        rates = line["steps_per_s"]
        if not number:
            names = [name.replace("x", "×") for name in rates]
            yield f"| | {' | '.join(names)} |"
            yield "|---" * (1 + len(names)) + "|"
        best = max(rates.values())
        cells = [f"**{rate:,}**" if rate == best else f"{rate:,}" for rate in rates.values()]
        yield f"| {KINDS[line['kind']]} | {' | '.join(cells)} |"


def rows(folder: Path) -> Iterator[str]:
    """How many times as long a batch step takes with so many rows."""
    before = ""
    for line in lines_of(folder, "agent_rows"):
        name, times = line["agent"], line["times"]
        if not before:
            yield f"| agent | lanes | {' | '.join(f'{n} rows' for n in times)} |"
            yield "|---" * (2 + len(times)) + "|"
        cells = " | ".join(f"{one:.2f}" for one in times.values())
        yield f"| {AGENTS[name] + ' ' if name != before else ''}| {line['lanes']} | {cells} |"
        before = name


def agents(folder: Path) -> Iterator[str]:
    """Joint steps of many agents."""
    lines = lines_of(folder, "many_agents")
    if not lines:
        return
    yield "| | joint steps per second | of the bare loop |"
    yield "|---|---|---|"
    for line in lines:
        ratio = spread(line["ratio"]) if "ratio" in line else "1"
        rate = line["steps_per_s"]["median"]
        yield f"| {CONTENDERS[line['many_agents']]} | {rate:,.0f} | {ratio} |"


def speed(folder: Path) -> Iterator[str]:
    """Whole training loops: rlpool's script and its variants beside those of others."""
    lines = lines_of(folder, "learning_speed")
    if not lines:
        return
    others = ("CleanRL", "Stable-Baselines3")
    yield f"| | rlpool | {' | '.join(others)} | {' | '.join(f'rlpool / {who}' for who in others)} |"
    yield "|---" * 6 + "|"
    for line in lines:
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
            yield "|" + "".join(f" {cell} |" if cell else " |" for cell in (name, *cells))


TABLES: dict[str, Callable[[Path], Iterator[str]]] = {
    each.__name__: each for each in (returns, trials, figures, requests, lanes, rows, agents, speed)
}


def with_tables(text: str, folder: Path = FOLDER) -> str:
    """A document with the tables that the raw results of a folder give."""

    def made(table: re.Match[str]) -> str:
        rows = list(TABLES[table[1]](folder))
        return (
            "\n".join([f"<!-- {table[1]} -->", *rows, f"<!-- /{table[1]} -->"])
            if rows
            else table[0]
        )

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
        sys.exit(f"not what docs/results gives: {', '.join(stale)}; run benchmarks/page.py")


if __name__ == "__main__":
    main()
