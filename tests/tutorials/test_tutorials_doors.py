"""Tutorials say at the start, in one line, what would fail later; --help needs no extra."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "tutorials"
WITH_FLAGS = [p for p in sorted(FOLDER.glob("*.py")) if "argparse" in p.read_text("utf-8")]
SAVING = [path for path in WITH_FLAGS if '"--resume"' in path.read_text("utf-8")]
EXTRAS = ("tqdm", "ray", "ale_py", "matplotlib", "mujoco", "tensorboard")


def run(path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> object:
    """Run a tutorial until it exits; returns its exit code."""
    monkeypatch.setattr(sys, "argv", [str(path), *flags])
    monkeypatch.syspath_prepend(str(path.parent))
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(path), run_name="__main__")
    return caught.value.code


@pytest.mark.parametrize("path", WITH_FLAGS, ids=lambda path: path.stem)
def test_help_needs_no_extra(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in EXTRAS:
        monkeypatch.setitem(sys.modules, name, None)
    assert run(path, monkeypatch, "--help") == 0
    assert "usage:" in capsys.readouterr().out


def test_the_tutorial_of_clusters_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(FOLDER / "cluster.py", monkeypatch) == 2
    assert capsys.readouterr().err == 'this tutorial needs Ray: pip install "rlpool[ray]"\n'


@pytest.mark.parametrize("path", SAVING, ids=lambda path: path.stem)
def test_what_cannot_work_is_refused_at_the_start_in_one_line(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    missing, nowhere = (
        ("--resume", "--checkpoint=mine.pt"),
        ("--checkpoint=no/such/folder/mine.pt",),
    )
    cases = {missing: "mine.pt; run without --resume", nowhere: "a folder that can be written"}
    if '"--env-id"' in path.read_text("utf-8") and path.stem != "ppo_recurrent":
        cases["--env-id=Nowhere-v1",] = "--env-id: "
    for flags, told in cases.items():
        assert run(path, monkeypatch, *flags) == 2
        error = capsys.readouterr().err
        assert told in error
        assert error.count("\n") == 1
    assert not [*tmp_path.iterdir()]
