"""Scripts that start workers although they lack their ``__main__`` guard.

A worker imports the caller's main module. If what starts workers is not under a guard,
every worker gets there too and ends with an exit code of its own (``workers/supervisor.py``), which
proves it. In the plain case, a statement at the top of the script that calls rlpool directly or
through functions of the script, there is nothing to prove: it is told before any process starts.
"""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path
from types import FrameType, ModuleType

from rlpool.errors import UsageError

_TELLS_PROCESSES_APART = {"current_process", "parent_process", "getpid", "getppid"}
"""Names of a script that may know workers by other means than a guard."""

_ALWAYS_RUN = (ast.Expr, ast.Assign, ast.AnnAssign, ast.With, ast.For, ast.Try)
"""Statements that do in a worker what they do here."""

_CONDITIONS = (ast.If, ast.IfExp, ast.While, ast.BoolOp, ast.Match)


def missing_guard(where: str = "") -> UsageError:
    """The error of a script without its guard."""
    return UsageError(
        "the script starts workers when it is imported: each worker imports the main module "
        'and would start workers in turn, for want of an `if __name__ == "__main__":` guard',
        where=where,
        fix="put everything but definitions into a function and call it below "
        '`if __name__ == "__main__":`',
    )


def refuse_missing_guard() -> None:
    """Refuse to start workers from a script that surely lacks its guard.

    Raises:
        UsageError: Naming the file and the line.
    """
    main = sys.modules.get("__main__")
    file = None if main is None else _imported_file(main)
    if main is None or file is None:
        return
    line = _line_of_script(main, file)
    if line is None:
        return
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    if not _knows_workers(tree) and _always_runs(tree, line):
        raise missing_guard(f"{file}, line {line}")


def _imported_file(main: ModuleType) -> str | None:
    """The file of the main module, if workers are going to import it."""
    name = getattr(getattr(main, "__spec__", None), "name", "")
    if name == "__main__" or name.endswith(".__main__"):
        return None
    file = getattr(main, "__file__", None)
    return file if file is not None and os.path.exists(file) else None


def _line_of_script(main: ModuleType, file: str) -> int | None:
    """The line at the top level of the script that is running; ``None`` if others run the script.

    They may do so on a condition that no worker meets.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    while frame is not None and frame.f_globals is vars(main):
        if frame.f_code.co_name == "<module>":
            return frame.f_lineno if frame.f_code.co_filename == file else None
        frame = frame.f_back
    return None


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).split(".")[0] == "rlpool"


def _knows_workers(tree: ast.Module) -> bool:
    """Whether a script has means to tell workers from itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.Match):
            inner = ast.walk(node)
            if any(isinstance(part, ast.Name) and part.id == "__name__" for part in inner):
                return True
        for field in ("id", "attr", "name"):
            if getattr(node, field, None) in _TELLS_PROCESSES_APART:
                return True
    return False


def _always_runs(tree: ast.Module, line: int) -> bool:
    """Whether the statement at a line runs whenever the script is imported."""
    for statement in tree.body:
        if not _covers(statement, line):
            continue
        nodes = ast.walk(statement)
        is_conditional = any(isinstance(n, _CONDITIONS) and _covers(n, line) for n in nodes)
        return isinstance(statement, _ALWAYS_RUN) and not is_conditional
    return False


def _covers(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", line + 1), getattr(node, "end_lineno", line)
    return first <= line <= last
