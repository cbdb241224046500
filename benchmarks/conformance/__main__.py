"""Run the suite: ``python -m benchmarks.conformance --all``, or one column, or one cell."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.conformance import page
from benchmarks.conformance.adapters import LIBRARIES
from benchmarks.conformance.checks import ALONE
from benchmarks.conformance.checks.every import CHECKS
from benchmarks.conformance.watch import ROOT, Watched, namespace

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "rlpool-conformance"


def environment(library: str, python: str, cache: Path | None) -> str:
    """Return the interpreter of a library's virtual environment, which is created if missing."""
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


def describe(python: str, library: str) -> dict[str, Any]:
    """Return an adapter's description; ``start_s`` includes its import time on this machine."""
    started = time.monotonic()
    command = [python, "-m", "benchmarks.conformance.cell", library, "/dev/stdout"]
    found = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    about = json.loads(found.stdout.splitlines()[-1])
    return about | {"start_s": about["start_s"] + time.monotonic() - started}


def run(python: str, library: str, names: list[str], about: dict[str, Any]) -> tuple[dict, str]:
    """Run checks in one process, or several if a check hangs or ends it; return cells and a log."""
    cells: dict[str, Any] = {}
    lacks, intended, log = about["lacks"], about["intended"], ""
    for name in names:
        if reasons := [lacks[need] for need in CHECKS[name].needs if need in lacks]:
            cells[name] = {"status": "grey", "message": reasons[0], "seconds": 0.0}
    while left := [name for name in names if name not in cells]:
        for _ in range(CHECKS[left[0]].times):
            watched = Watched(python, library, left, about["start_s"])
            cells |= watched.run()
            if cells[left[0]]["status"] != "green":
                break
        log = watched.log.read_text(encoding="utf-8", errors="replace")
    for name, cell in cells.items():
        if cell["status"] == "red" and name in intended:
            cell |= {"status": "intended", "reason": intended[name]}
    return cells, log


def show(library: str, name: str, python: str) -> int:
    """Print one cell: the property, the expected and the actual value, in at most twenty lines."""
    cells, log = run(python, library, [name], describe(python, library))
    cell = cells[name]
    print(f"{library}, {name}: {cell['status']}, {cell['seconds']:.1f} s")
    print(f"{CHECKS[name]} ({CHECKS[name].thread})\n{cell['message'][:1500]}")
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
    jobs = [shared] * bool(shared) + [[each] for each in names if each not in shared]
    about = {"date": dt.date.today().isoformat(), "python": platform.python_version()}
    results |= {library: {"cells": {}, **about} for library in libraries}

    def work(library: str, checks: list[str]) -> None:
        cells, _ = run(pythons[library], library, checks, found[library])
        results[library]["version"] = found[library]["version"]
        results[library]["cells"] |= cells
        for name, cell in cells.items():
            print(f"{library:20} {name:58} {cell['status']:8} {cell['seconds']:6.1f} s", flush=True)

    with ThreadPoolExecutor(2 if namespace() else 1) as pool:  # /dev/shm may be shared
        found = dict(zip(libraries, pool.map(describe, pythons.values(), libraries), strict=True))
        list(pool.map(work, *zip(*[(key, job) for key in libraries for job in jobs], strict=True)))
    if not arguments.check:
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        page.write(results, ROOT / "docs" / "conformance.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
