"""Prints constraints with the lowest versions that pyproject.toml declares.

Other packages have the version of constraints.txt:

    python .ci/lowest.py > lowest.txt
    python -m pip install -c lowest.txt ".[test]"
"""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
BOUND = re.compile(r'"([\w.-]+)(?:\[[\w,]+\])?>=([\d.]+)')


def main() -> None:
    """Print a line for each package."""
    found: dict[str, list[str]] = {}
    _, text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8").split("\n[project]\n")
    for name, version in BOUND.findall(text):
        found.setdefault(name, []).append(version)
    for name, versions in found.items():
        lowest = min(versions, key=lambda version: [int(part) for part in version.split(".")])
        print(f"{name}=={lowest}")
    for line in (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if "==" in line and line.split("==")[0] not in found:
            print(line)


if __name__ == "__main__":
    main()
