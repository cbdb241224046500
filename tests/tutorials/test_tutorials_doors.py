"""Tutorials say at the start, in one line, what would fail later; --help needs no extra."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "tutorials"
TUTORIALS = [path for path in sorted(FOLDER.glob("*.py")) if path.stem != "running"]
SAVING = [path for path in TUTORIALS if '"--resume"' in path.read_text("utf-8")]
FAILS_LATER = [  # one of each kind that fails later if it is not refused
    ("ppo --checkpoint=folder", "--checkpoint: folder is a folder"),
    ("ppo --checkpoint=ppo.png", "a picture as the curve is"),
    ("ppo --video=/proc/nope", "--video: /proc/nope cannot be written (No such file or directory)"),
    ("ppo --track=file/logs", "--track: file/logs cannot be written (Not a directory)"),
    ("ppo_atari --video=/proc/nope", "--video: /proc/nope cannot be written"),
    ("reinforce --env-id=Pendulum-v1", "actions Box(-2.0, 2.0, (1,), float32); those of this"),
    ("impala --env-id=FrozenLake-v1", "--env-id: FrozenLake-v1 has observations Discrete(16)"),
    ("td3 --env-id=CartPole-v1", "and actions Discrete(2); those of this tutorial are vectors"),
    ("sac --env-id=nowhere:Env-v1", "--env-id: No module named 'nowhere'"),
    ("sac --discount=nan", "argument --discount: should be a number of at least 0, got nan"),
    ("dqn --evaluate=-1", "argument --evaluate: should be an int of at least 0, got -1"),
    ("dqn --seed=one", "argument --seed: should be an int of at least 0, got one"),
    ("dqn --resume --checkpoint=file", "--resume: file is damaged, or no checkpoint (Unpickling"),
    ("dqn --resume --checkpoint=empty", "--resume: empty is damaged, or no checkpoint (EOFError)"),
    ("dqn --resume --checkpoint=other.pt", "--resume: other.pt is of a run with other flags; "),
]
EXTRAS = ("tqdm", "ray", "ale_py", "matplotlib", "mujoco", "tensorboard")


def run(path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> object:
    """Run a tutorial until it exits; returns its exit code."""
    monkeypatch.setattr(sys, "argv", [str(path), *flags])
    monkeypatch.syspath_prepend(str(path.parent))
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(path), run_name="__main__")
    return caught.value.code


def test_help_needs_no_extra_and_unknown_flags_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in EXTRAS:
        monkeypatch.setitem(sys.modules, name, None)
    for path in TUTORIALS:
        assert run(path, monkeypatch, "--help") == 0
        assert "usage:" in capsys.readouterr().out
        assert run(path, monkeypatch, "--foo", "bar") == 2
        assert "unrecognized arguments: --foo bar\n" in capsys.readouterr().err


def test_the_tutorial_of_clusters_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(FOLDER / "cluster.py", monkeypatch) == 2
    assert capsys.readouterr().err == 'this tutorial needs Ray: pip install "rlpool[ray]"\n'


def test_a_checkpoint_that_cannot_be_used_is_refused_at_the_start_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    missing, nowhere = ["--resume", "--checkpoint=mine.pt"], ["--checkpoint=no/such/mine.pt"]
    for path in SAVING:
        for flags in (missing, nowhere):
            assert run(path, monkeypatch, *flags) == 2
            assert capsys.readouterr().err.count("\n") == 1
    assert not [*tmp_path.iterdir()]


def test_what_would_fail_later_is_refused_at_the_start_in_one_line(
    program_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(program_folder)
    Path("folder").mkdir()
    Path("file").write_text("no checkpoint", encoding="utf-8")
    Path("empty").touch()
    torch.save({"q_network": {}, "random": torch.get_rng_state(), "progress": {}}, "other.pt")
    before = sorted(program_folder.iterdir())
    for flags, told in FAILS_LATER:
        name, *flags_of = flags.split()
        assert run(FOLDER / f"{name}.py", monkeypatch, *flags_of) == 2, flags
        error = capsys.readouterr().err
        assert told in error
        assert error.count("\n") == 1
    assert sorted(program_folder.iterdir()) == before
