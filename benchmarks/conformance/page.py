"""Write docs/conformance.md from the results and the template page.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.conformance.adapters import LIBRARIES
from benchmarks.conformance.checks.every import CHECKS, GROUPS

SIGNS = {"green": "✅", "red": "❌", "grey": "–", "intended": "ⓘ"}
TEMPLATE = Path(__file__).with_suffix(".md")


def row(*cells: object) -> str:
    """Return a row of a table, without blanks."""
    return f"|{'|'.join(map(str, cells))}|"


def summary(columns: dict[str, Any]) -> Iterator[str]:
    """Yield the table of versions, dates and counts of cells."""
    yield row("library", "version", "date", *SIGNS.values())
    yield row(*["---"] * (3 + len(SIGNS)))
    for name, column in columns.items():
        found = [cell["status"] for check, cell in column["cells"].items() if check in CHECKS]
        counts = [found.count(status) for status in SIGNS]
        yield row(name, column["version"].split(",")[0], column["date"], *counts)


def tables(columns: dict[str, Any]) -> Iterator[str]:
    """Yield one table per group, with a link to each check's thread."""
    for group in GROUPS:
        yield f"\n## {group.capitalize()}\n\n{row('check', *columns)}"
        yield row(*["---"] * (1 + len(columns)))
        for name in (name for name, check in CHECKS.items() if check.group == group):
            url = "https://github.com/" + CHECKS[name].thread.replace("#", "/issues/")
            cells = [each["cells"].get(name, {"status": "grey"}) for each in columns.values()]
            yield row(f"[{name}]({url})", *(SIGNS[cell["status"]] for cell in cells))


def failed(columns: dict[str, Any]) -> Iterator[str]:
    """Yield the red cells of each column."""
    for name, column in columns.items():
        found = [(each, column["cells"].get(each, {"status": ""})) for each in CHECKS]
        red = [f"`{each}` ({brief(cell)})" for each, cell in found if cell["status"] == "red"]
        yield f"- {name}: {', '.join(red) or 'none'}"


def brief(cell: dict[str, Any]) -> str:
    """Return the first words of a cell's message."""
    head, differs, _ = cell["message"].partition(": expected")
    text = f"wrong {head}" if differs else head.removeprefix("raised ")
    words = re.sub(r"[\[|`].*", "", " ".join(text.split())).split()
    return " ".join(words[:10]).rstrip(":,") + ("…" if len(words) > 10 else "")


def notes(columns: dict[str, Any], status: str, text: str) -> Iterator[str]:
    """Yield each text once, with the columns it applies to."""
    names: dict[str, dict[str, None]] = {}
    for name, column in columns.items():
        for check in (each for each in CHECKS if each in column["cells"]):
            if (cell := column["cells"][check])["status"] == status:
                names.setdefault(text.format(check=check, **cell), {})[name] = None
    yield from (f"- {each} ({', '.join(found)})" for each, found in names.items())


def write(results: dict[str, Any], path: Path) -> None:
    """Write the page."""
    columns = {name: results[name] for name in LIBRARIES if name in results}
    parts = {"SUMMARY": summary(columns), "TABLES": tables(columns), "FAILED": failed(columns)}
    parts |= {"INTENDED": notes(columns, "intended", "`{check}`: {reason}")}
    parts |= {"GREY": notes(columns, "grey", "{message}")}
    parts |= {"N_CHECKS": [str(len(CHECKS))], "N_COLUMNS": [str(len(columns))]}
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, lines in parts.items():
        text = text.replace(name, "\n".join(lines))
    path.write_text(text, encoding="utf-8")
