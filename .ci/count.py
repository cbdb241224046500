#!/usr/bin/env python3
"""Print lines of code with their budgets, and the layers of rooms.

A line of code contains more than a comment or a docstring. A room is a package or a module directly
in ``rlpool/``. The floor of a room is the length of the longest chain of imports below it; rooms
that import each other share a floor and are listed as a circle.

Budgets of rooms are only reported. Those of whole trees and of the number of modules are enforced:
the exit code is 1 above one of them.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREES = ("rlpool", "tests", "benchmarks", "benchmarks/conformance", "tutorials")
PACKAGE = "rlpool"

TREE_BUDGETS = {
    "rlpool": 17_200,
    "tests": 19_000,
    "benchmarks": 3_000,
    "benchmarks/conformance": 1_500,
}
MODULE_BUDGET = 130  # modules of the package, without the ``__init__`` of packages
ROOM_BUDGETS = {
    ("batch", "workers", "manager", "cluster"): 4_300,
    ("loop", "slots"): 1_440,
    ("envs",): 1_450,
    ("pool",): 1_500,
    ("data",): 1_650,
    ("integrations",): 760,
    ("evaluation",): 640,
    ("record", "observe", "machine"): 1_250,
    ("meta", "testing", "agents", "training"): 1_600,
    ("__init__", "__main__", "demo", "doctor", "errors", "patterns", "seeding"): 600,
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
    """Count the lines of code of a module."""
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
    """Return the package or the module directly in a tree to which a file belongs."""
    parts = file.relative_to(tree).parts
    return parts[0] if len(parts) > 1 else Path(parts[0]).stem


def imported(source: str) -> Iterator[str]:
    """Find the modules of the package that a module imports, at any level."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imports_of_rooms(tree: Path) -> dict[str, set[str]]:
    """Return the rooms that each room of the package imports."""
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
    """Return all rooms that each room depends on, directly or indirectly."""
    below = {room: set(targets) for room, targets in imports.items()}
    for middle in imports:
        for targets in below.values():
            if middle in targets:
                targets |= below[middle]
    return below


def floors(imports: dict[str, set[str]]) -> dict[str, int]:
    """Return the floor of each room, from 0."""
    below = reachable(imports)

    def floor(room: str) -> int:
        others = {other for other in below[room] if room not in below[other]}
        return 1 + max(map(floor, others), default=-1)

    return {room: floor(room) for room in imports}


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Find groups of rooms that import each other."""
    below = reachable(imports)
    groups = {tuple(sorted(o for o in below if o in below[r] and r in below[o])) for r in below}
    return sorted([*group] for group in groups if len(group) > 1)


def sizes(tree: Path) -> dict[str, int]:
    """Count the lines of code of each room of a tree, without nested trees."""
    counts: dict[str, int] = {}
    within = [ROOT / each for each in TREES if tree in (ROOT / each).parents]
    for file in sorted(tree.rglob("*.py")):
        if any(each in file.parents for each in within):
            continue
        room = room_of(file, tree)
        counts[room] = counts.get(room, 0) + code_lines(file.read_text(encoding="utf-8"))
    return counts


def beside(n: int, most: int | None) -> str:
    """Format a number and its budget."""
    return f"{n:>7,} of {most:>6,}" if most else f"{n:>7,}"


def report_package(tree: Path, counts: dict[str, int]) -> Iterator[str]:
    """Format the rooms of the package, by floor and by budget."""
    imports = imports_of_rooms(tree)
    floor_of = floors(imports)
    yield f"  {len(counts)} rooms on {1 + max(floor_of.values(), default=-1)} floors"
    for room in sorted(counts, key=lambda room: (-floor_of[room], room)):
        yield f"  {room:<22} {counts[room]:>7,}  floor {floor_of[room]}"
    for rooms, most in ROOM_BUDGETS.items():
        n = sum(counts.get(room, 0) for room in rooms)
        yield f"  {beside(n, most)}  {' + '.join(rooms)}"
    yield from (f"  circle: {' <-> '.join(group)}" for group in circles(imports))


def report(trees: Iterable[Path]) -> tuple[list[str], list[str]]:
    """Return the lines of the table, and of the exceeded budgets."""
    lines, above = [], []
    for tree in trees:
        counts, name = sizes(tree), tree.relative_to(ROOT).as_posix()
        total, most = sum(counts.values()), TREE_BUDGETS.get(name)
        lines.append(f"{name + '/':<24} {beside(total, most)} lines of code")
        if most is not None and total > most:
            above.append(f"{name}/ has {total:,} lines of code, {most:,} are allowed")
        if tree.name != PACKAGE:
            rooms = (room for room in counts if (tree / room).is_dir())
            lines += [f"  {room:<22} {counts[room]:>7,}" for room in rooms]
            continue
        modules = sum(1 for file in tree.rglob("*.py") if file.name != "__init__.py")
        lines.append(f"  {beside(modules, MODULE_BUDGET)} modules")
        if modules > MODULE_BUDGET:
            above.append(f"{tree.name}/ has {modules} modules, {MODULE_BUDGET} are allowed")
        lines += report_package(tree, counts)
    return lines, above


if __name__ == "__main__":
    table, exceeded = report(ROOT / tree for tree in TREES)
    sys.stdout.write("\n".join([*table, *exceeded]) + "\n")
    sys.exit(bool(exceeded))
