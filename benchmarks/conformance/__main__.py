"""Run the suite: ``python -m benchmarks.conformance --all``, or one column, or one cell."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.conformance import page
from benchmarks.conformance.adapters import LIBRARIES
from benchmarks.conformance.checks import ALONE
from benchmarks.conformance.checks.every import CHECKS
from benchmarks.conformance.watch import ROOT, Watched

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "rlpool-conformance"


def environment(library: str, python: str, cache: Path | None) -> str:
    """The interpreter of a library's own environment, which is made where it does not exist."""
    if cache is None:
        return python
    module = LIBRARIES[library].partition(":")[0]
    requirements = HERE / "requirements" / f"{module}.txt"
    folder, wanted = cache / module, requirements.read_text(encoding="utf-8")
    own, stamp = folder / "bin" / "python", folder / "requirements.txt"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([own, "-m", "pip", "install", "-q", "-r", requirements], check=True)
        stamp.write_text(wanted, encoding="utf-8")
    return str(own)


def run(python: str, library: str, names: list[str]) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Cells of checks that share a process, or several where one hangs or ends it."""
    cells: dict[str, Any] = {}
    while left := [name for name in names if name not in cells]:
        watched = Watched(python, library, left)
        cells |= watched.run()
    about, log = watched.about, watched.log.read_text(encoding="utf-8", errors="replace")
    for name, cell in cells.items():
        if cell["status"] == "red" and name in about.get("intended", {}):
            cell |= {"status": "intended", "reason": about["intended"][name]}
    return cells, about, log


def show(library: str, name: str, python: str) -> int:
    """One cell: the property, what was expected and what came, in at most twenty lines."""
    cells, _, log = run(python, library, [name])
    cell = cells[name]
    print(f"{library}, {name}: {cell['status']}, {cell['seconds']:.1f} s")
    print(CHECKS[name], f"({CHECKS[name].thread})")
    print(cell["message"][:1500])
    print("\n".join(line[:200] for line in log.splitlines()[-14:]))
    return int(cell["status"] == "red")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conformance")
    parser.add_argument("--all", action="store_true", help="all libraries")
    parser.add_argument("--library", nargs="+", choices=LIBRARIES, default=[])
    parser.add_argument("--check", nargs="+", choices=CHECKS, default=[])
    parser.add_argument("--python", default=sys.executable, help="makes environments (3.11)")
    parser.add_argument("--here", action="store_true", help="run --python itself, as it is")
    arguments = parser.parse_args()
    libraries = list(LIBRARIES) if arguments.all else arguments.library
    cache = None if arguments.here else CACHE
    pythons = {each: environment(each, arguments.python, cache) for each in libraries}
    if len(libraries) == len(arguments.check) == 1:
        return show(libraries[0], arguments.check[0], pythons[libraries[0]])
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    names = arguments.check or list(CHECKS)
    shared = [name for name in names if CHECKS[name].group not in ALONE]
    tasks = [shared] * bool(shared) + [[each] for each in names if each not in shared]
    about = {"date": dt.date.today().isoformat(), "python": platform.python_version()}
    results |= {library: {"cells": {}, **about} for library in libraries}

    def work(task: tuple[str, list[str]]) -> None:
        library, checks = task
        cells, adapter, _ = run(pythons[library], library, checks)
        results[library]["version"] = adapter.get("version", "?")
        results[library]["cells"] |= cells
        for name, cell in cells.items():
            print(f"{library:20} {name:58} {cell['status']:8} {cell['seconds']:6.1f} s", flush=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, [(each, task) for each in libraries for task in tasks]))
    if not arguments.check:
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        page.write(results, ROOT / "docs" / "conformance.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
