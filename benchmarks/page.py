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
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

from learning import TASKS, cleanrl_path, mean_and_spread, results_of

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = REPOSITORY / "docs" / "results"
DOCUMENTS = ("README.md", "docs/performance.md", "docs/results.md")

WORKLOADS = {
    "W1": "CartPole-v1, MLP policy, 2 workers × 16 lanes, 8,000 episodes per request",
    "W2": "HalfCheetah-v5, MLP policy, 2 workers × 8 lanes",
    "W3": "84×84×4 uint8 frames, random policy, 2 workers × 8 lanes",
    "W4": "episodes of 10 to 200 steps of 1 ms, 8 workers × 1 lane (of the ideal)",
}


def returns(folder: Path) -> Iterator[str]:
    """What tutorials learn, beside what is published."""
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
    path = folder / "meta_rl.jsonl"
    if not path.exists():
        return
    yield "| agent | seeds | first episode of a trial | second episode |"
    yield "|---|---|---|---|"
    runs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for agent in dict.fromkeys(run["agent"] for run in runs):
        own = sorted((run for run in runs if run["agent"] == agent), key=lambda run: run["seed"])
        seeds = ", ".join(str(run["seed"]) for run in own)
        episodes = zip(*(run["returns"] for run in own), strict=True)
        cells = [f"{fmean(e):.1f} ({', '.join(f'{one:.1f}' for one in e)})" for e in episodes]
        yield f"| `{agent}` | {seeds} | {' | '.join(cells)} |"


def figures(folder: Path) -> Iterator[str]:
    """Batchers, as a share of the bare loop's speed."""
    path = folder / "throughput.jsonl"
    if not path.exists():
        return
    yield "| workload | environments | median, share of the bare loop's speed | quartiles |"
    yield "|---|---|---|---|"
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        name, median = line["workload"], line.get("ratio", line.get("efficiency"))
        low, high = line["quartiles"]
        yield f"| {name} | {WORKLOADS[name]} | {median:.2f} | {low:.2f} to {high:.2f} |"


TABLES: dict[str, Callable[[Path], Iterator[str]]] = {
    each.__name__: each for each in (returns, trials, figures)
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
