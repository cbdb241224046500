"""The examples of docstrings show what really comes out."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlpool
import rlpool.cluster
import rlpool.patterns
import rlpool.testing
from rlpool import Array, Batcher, DictTensor, EpisodeBatcher, Pool, TemporalDictTensor

from support.examples import complaints

MODULES = {
    rlpool: rlpool.__all__,
    rlpool.testing: rlpool.testing.__all__,
    rlpool.patterns: ["write_to_piped_array"],
}
CONSTANTS = {"__version__": "rlpool"}
"""Name to the module that assigns it, and describes it in the string below."""

MAIN_CLASSES = Array, Batcher, DictTensor, EpisodeBatcher, Pool, TemporalDictTensor
"""Those whose methods may have examples, too."""

NEEDS = {"to_tensordict": "tensordict", "from_tensordict": "tensordict"}
"""Last part of a name to the package without which its example is skipped."""


def docstring_of_constant(module: str, name: str) -> str:
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    for statement, following in itertools.pairwise(body):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
            return str(ast.literal_eval(following.value)) if isinstance(following, ast.Expr) else ""
    raise LookupError(name)


def methods_of(kind: type) -> Iterator[tuple[str, Any]]:
    for name, value in inspect.getmembers(kind, inspect.isroutine):
        is_public = not name.startswith("_") and value.__module__.startswith("rlpool")
        if is_public and "Example:" in (inspect.getdoc(value) or ""):
            yield f"{kind.__name__}.{name}", value


def documented() -> Iterator[tuple[str, str]]:
    """Names and their docstrings."""
    for module, names in MODULES.items():
        for name in names:
            value = getattr(module, name)
            is_constant = name in CONSTANTS
            text = docstring_of_constant(CONSTANTS[name], name) if is_constant else value.__doc__
            if ">>>" in (text or ""):
                yield f"{module.__name__}.{name}", text
    seen = set()
    for kind in MAIN_CLASSES:
        for name, value in methods_of(kind):
            if value not in seen:  # inherited ones are shown once
                seen.add(value)
                yield name, value.__doc__ or ""


EXAMPLES = dict(documented())
HOLDERS = sorted({name.rpartition(".")[0] for name in EXAMPLES})


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")  # EnvPool's spaces
def test_the_examples_of_public_names_show_what_comes_out(
    holder: str, program_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(program_folder)  # for those that write files
    for name, text in EXAMPLES.items():
        extra = NEEDS.get(name.rpartition(".")[2])
        if name.rpartition(".")[0] == holder and (not extra or importlib.util.find_spec(extra)):
            told = complaints(name, text)
            assert not told, told


@pytest.mark.ray
def test_the_examples_of_a_cluster_run_on_one_machine() -> None:
    pytest.importorskip("ray", reason='needs Ray: pip install "rlpool[ray]"')
    # In a process of its own, with a Ray of its own: Ray logs, and takes signals.
    told = subprocess.run(
        [sys.executable, "-m", "support.examples", *rlpool.cluster.__all__],
        cwd=Path(__file__).resolve().parents[1],
        env={**os.environ, "RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=200.0,
        check=True,
    ).stdout
    assert not told, told
