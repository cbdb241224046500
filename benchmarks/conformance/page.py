"""Write docs/conformance.md from results and the texts of page.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.conformance.adapters import LIBRARIES
from benchmarks.conformance.checks.every import CHECKS, GROUPS

COMMAND = "python -m benchmarks.conformance"
SIGNS = {"green": "✅", "red": "❌", "grey": "–", "intended": "ⓘ"}
TEMPLATE = Path(__file__).with_suffix(".md")


def table(results: dict[str, Any]) -> Iterator[str]:
    """One part per group."""
    columns = [name for name in LIBRARIES if name in results]
    for group, text in GROUPS.items():
        question = text.partition(": ")[2]
        yield f"\n## {group.capitalize()}\n\n{question[0].upper()}{question[1:]}\n"
        yield f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}"
        for name in (name for name, check in CHECKS.items() if check.group == group):
            cells = [results[each]["cells"].get(name, {"status": "grey"}) for each in columns]
            yield f"| `{name}` | {' | '.join(SIGNS[cell['status']] for cell in cells)} |"
        yield ""
        for name, check in CHECKS.items():
            if check.group == group:
                url = "https://github.com/" + check.thread.replace("#", "/issues/")
                yield f"- `{name}`: {check} [{check.thread}]({url})"


def remarks(column: dict[str, Any], name: str) -> Iterator[str]:
    """What was seen in cells that are not green, and why others are grey."""
    cells = {check: column["cells"][check] for check in CHECKS if check in column["cells"]}
    for check, cell in cells.items():
        seen = " ".join(cell["message"].split())[:200].replace("|", "/")
        if cell["status"] == "red":
            yield f"- ❌ `{check}`: {seen}\n  `{COMMAND} --library {name} --check {check}`"
        elif cell["status"] == "intended":
            yield f"- ⓘ `{check}`: {cell['reason']}"
    grey = dict.fromkeys(cell["message"] for cell in cells.values() if cell["status"] == "grey")
    yield f"- –: {'; '.join(grey) or 'nothing'}"


def write(results: dict[str, Any], path: Path) -> None:
    """The page."""
    head = ["library", "version", "date", *SIGNS.values()]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    columns = {name: results[name] for name in LIBRARIES if name in results}
    for name, column in columns.items():
        found = [cell["status"] for cell in column["cells"].values()]
        counts = [str(found.count(status)) for status in SIGNS]
        lines.append(f"| {' | '.join([name, column['version'], column['date'], *counts])} |")
    lines += [*table(results), "\n## What was seen"]
    for name, column in columns.items():
        lines += [f"\n### {name}\n", *remarks(column, name)]
    text = TEMPLATE.read_text(encoding="utf-8").replace("N_CHECKS", str(len(CHECKS)))
    path.write_text(text.replace("TABLES", "\n".join(lines)), encoding="utf-8")
