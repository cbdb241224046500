"""Programs that are run as ``__main__`` of this process.

Scripts would do the same, two to three seconds later, because they and a template process would
import torch. Tests that need a fresh interpreter, such as that a script ends, need a script.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import ale_py  # noqa: F401  (registers its environments, for more than one program)
import gymnasium
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def blocks_of(document: str) -> list[str]:
    """Return the Python programs in a document of the repository, such as ``README.md``."""
    text = (REPOSITORY / document).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run_block(document: str, number: int, folder: Path) -> None:
    """Run one of a document's programs in a folder."""
    run_source(blocks_of(document)[number], folder)


def run_source(source: str, folder: Path) -> None:
    """Run a program in a folder, next to ``first.py``."""
    run_as_main(save_program(source, folder), folder=folder)


def save_program(source: str, folder: Path) -> Path:
    """Write a program, and ``first.py`` of the tour, from which other documents import."""
    (folder / "first.py").write_text(blocks_of("docs/tour.md")[0], encoding="utf-8")
    script = folder / "program.py"
    script.write_text(source, encoding="utf-8")
    return script


def run_with_ray(*arguments: str, folder: Path) -> str:
    """Run Python in a separate process, since Ray logs and handles signals; return its output.

    It starts a separate Ray, regardless of others on this machine, and keeps no token.
    """
    pytest.importorskip("ray", reason='needs Ray: pip install "rlpool[ray]"')
    environment = {**os.environ, "RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, timeout=240.0
    )
    assert done.returncode == 0
    return done.stdout


def run_as_main(
    path: Path,
    *arguments: str,
    folder: Path | None = None,
    constants: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run a program; returns its global names.

    Args:
        path: Its file.
        arguments: Command-line arguments after its name.
        folder: Working directory, by default that of the tests.
        constants: New values of global names, set before ``main()`` is called.
    """
    start_method = multiprocessing.get_start_method(allow_none=True)
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(gymnasium.registry):
        if folder is not None:
            patch.chdir(folder)
        patch.setattr(sys, "argv", [str(path), *arguments])
        patch.syspath_prepend(str(path.parent))  # as Python does
        multiprocessing.set_start_method(None, force=True)  # as it is in a new process
        try:
            if constants is None:
                return runpy.run_path(str(path), run_name="__main__")
            names = runpy.run_path(str(path))
            names["main"].__globals__.update(constants)  # these differ from the returned copy
            names["main"]()
            return names
        finally:
            multiprocessing.set_start_method(start_method, force=True)
