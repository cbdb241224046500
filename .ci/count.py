#!/usr/bin/env python3
"""Print how many lines of code there are beside their budgets, and how rooms build on each other.

A line of code is one that holds more than a comment, a docstring or nothing. A room is a package or
a module directly in ``rlpool/``. A room's floor is the length of the longest chain of imports below
it; rooms that import each other share a floor and are listed as a circle. A budget is the most that
a room may have before it should be made simpler. Nothing is enforced.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREES = ("rlpool", "tests", "benchmarks", "tutorials")
PACKAGE = "rlpool"

TREE_BUDGETS = {"rlpool": 19_900, "tests": 20_000, "benchmarks": 2_800}
ROOM_BUDGETS = {
    "__init__": 150,
    "__main__": 25,
    "agents": 420,
    "batch": 2_300,
    "cluster": 1_400,
    "data": 1_450,
    "demo": 150,
    "doctor": 240,
    "envs": 1_650,
    "errors": 115,
    "evaluation": 600,
    "integrations": 1_300,
    "loop": 850,
    "machine": 450,
    "manager": 1_900,
    "meta": 600,
    "observe": 400,
    "patterns": 6,
    "pool": 1_800,
    "record": 560,
    "seeding": 140,
    "slots": 420,
    "testing": 600,
    "training": 230,
    "workers": 2_150,
}

_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """Lines of a module that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def room_of(file: Path, tree: Path) -> str:
    """The package or the module directly in a tree that a file belongs to."""
    parts = file.relative_to(tree).parts
    return parts[0] if len(parts) > 1 else Path(parts[0]).stem


def imported(source: str) -> Iterator[str]:
    """Modules of the package that a module imports, wherever it does so."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imports_of_rooms(tree: Path) -> dict[str, set[str]]:
    """What each room of the package imports of the others."""
    imports: dict[str, set[str]] = {}
    for file in sorted(tree.rglob("*.py")):
        room = room_of(file, tree)
        own = imports.setdefault(room, set())
        for name in imported(file.read_text(encoding="utf-8")):
            package, _, rest = name.partition(".")
            target = rest.split(".")[0]
            exists = (tree / target).is_dir() or (tree / f"{target}.py").is_file()
            if package == tree.name and target and exists and target != room:
                own.add(target)
    return imports


def reachable(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """All rooms that each room builds on, directly or not."""
    below = {room: set(targets) for room, targets in imports.items()}
    for middle in imports:
        for targets in below.values():
            if middle in targets:
                targets |= below[middle]
    return below


def floors(imports: dict[str, set[str]]) -> dict[str, int]:
    """The floor of each room, from 0."""
    below = reachable(imports)

    def floor(room: str) -> int:
        others = {other for other in below[room] if room not in below[other]}
        return 1 + max(map(floor, others), default=-1)

    return {room: floor(room) for room in imports}


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of rooms that import each other."""
    below = reachable(imports)
    groups = {tuple(sorted(o for o in below if o in below[r] and r in below[o])) for r in below}
    return sorted([*group] for group in groups if len(group) > 1)


def report(trees: Iterable[Path]) -> Iterator[str]:
    """The lines of the table."""
    for tree in trees:
        counts: dict[str, int] = {}
        for file in sorted(tree.rglob("*.py")):
            room = room_of(file, tree)
            counts[room] = counts.get(room, 0) + code_lines(file.read_text(encoding="utf-8"))
        total, most = sum(counts.values()), TREE_BUDGETS.get(tree.name)
        beside = f" of {most:,}" if most else ""
        yield f"{tree.name + '/':<24} {total:>7,}{beside} lines of code"
        if tree.name != PACKAGE:
            yield from (
                f"  {room:<22} {n:>7,}" for room, n in counts.items() if (tree / room).is_dir()
            )
            continue
        imports = imports_of_rooms(tree)
        floor_of = floors(imports)
        yield f"  {len(counts)} rooms on {1 + max(floor_of.values(), default=-1)} floors"
        for room in sorted(counts, key=lambda room: (-floor_of[room], room)):
            most = ROOM_BUDGETS.get(room, 0)
            yield f"  {room:<22} {counts[room]:>7,} of {most:>5,}  floor {floor_of[room]}"
        yield from (f"  circle: {' <-> '.join(group)}" for group in circles(imports))


if __name__ == "__main__":
    sys.stdout.write("\n".join(report(ROOT / tree for tree in TREES)) + "\n")
