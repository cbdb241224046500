"""Examples in docstrings show the real output."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import rlpool

from support.examples import complaints
from support.programs import run_with_ray

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = TESTS.parent / "rlpool"
MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in sorted(PACKAGE.rglob("[!_]*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]
CLUSTER = [name for name in MODULES if name.startswith("rlpool.cluster.")]


@pytest.mark.parametrize("module", sorted({*MODULES} - {*CLUSTER}))
@pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")  # EnvPool's spaces
def test_docstring_examples_show_the_real_output(
    module: str, program_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(program_folder)  # for those that write files
    failures = complaints(module)
    assert not failures, failures


def test_the_main_classes_have_examples() -> None:
    for name in ("Array", "Batcher", "DictTensor", "EpisodeBatcher", "Pool", "TemporalDictTensor"):
        assert ">>> " in (inspect.getdoc(getattr(rlpool, name)) or ""), name


@pytest.mark.ray
def test_the_cluster_examples_run_on_one_machine() -> None:
    failures = run_with_ray("-m", "support.examples", *CLUSTER, folder=TESTS)
    assert not failures, failures
