"""Selection of the tested ``rlpool``: the installed one, which users get and scripts import."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

import pytest


def prefer_the_installed_package(repository: Path) -> None:
    """Remove a repository from ``sys.path``, where ``python -m pytest`` puts it first.

    It would hide the installed package. Without an installed package, or with an editable one,
    the repository's is used anyway.

    Raises:
        pytest.UsageError: If ``PYTHONPATH`` names a different ``rlpool`` from the one selected:
            changes to it would pass untested.
    """
    before = list(sys.path)
    sys.path[:] = [entry for entry in before if Path(entry or ".").resolve() != repository]
    if find_spec("rlpool") is None:
        sys.path[:] = before
    # An empty entry of several means the working directory.
    entries = os.environ.get("PYTHONPATH") or None
    path = [str(Path(entry).resolve()) for entry in entries.split(os.pathsep)] if entries else []
    asked, tested = _folder(PathFinder.find_spec("rlpool", path)), _folder(find_spec("rlpool"))
    if asked not in (None, tested):
        raise pytest.UsageError(
            f"PYTHONPATH names {asked}, but {tested} is installed and would be tested: unset "
            f"PYTHONPATH, or install the other one (python -m pip install -e {asked.parent})"
        )


def _folder(spec: ModuleSpec | None) -> Path | None:
    return Path(spec.origin).resolve().parent if spec is not None and spec.origin else None
