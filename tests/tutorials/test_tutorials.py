"""Every tutorial runs, shrunk by its flags, and reports at startup what would fail later."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tutorials import test_algorithms

from support.programs import run_as_main, run_with_ray

FOLDER = Path(__file__).resolve().parents[2] / "tutorials"
TUTORIALS = [path for path in sorted(FOLDER.glob("*.py")) if path.stem != "running"]

# Flags that shrink a tutorial.
SMALL = {
    "arrays": "",
    "datastructures": "",
    "environments": "--n-steps 20",
    "evaluation": "--n-iterations 2 --n-directions 2 --n-steps 20 --n-episodes 4 --n-workers 0",
    "multiprocess_episode_batcher": "--n-cartpole-episodes 40 --n-threads 0",
    "nonblocking": "--n-epochs 2 --n-episodes 4 --n-evaluation-episodes 4",
    "pool": "",
}
PUBLIC_MODULES = {
    *("rlpool", "rlpool.cluster", "rlpool.integrations.pettingzoo", "rlpool.patterns"),
}


@pytest.mark.parametrize("name", SMALL)
def test_tutorial_runs(name: str, program_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_as_main(FOLDER / f"{name}.py", *SMALL[name].split(), folder=program_folder)
    output, errors = capfd.readouterr()
    assert "Traceback" not in errors
    assert output
    assert ("tqdm" in (FOLDER / f"{name}.py").read_text(encoding="utf-8")) == ("100%|" in errors)
    if name == "evaluation":
        files = {path.name for path in program_folder.iterdir() if path.stat().st_size}
        assert {"early.json", "late.json", "evaluation.png"} <= files


@pytest.mark.ray
def test_the_cluster_tutorial_runs(program_folder: Path) -> None:
    flags = ("--n-nodes=2", "--n-epochs=2", "--n-episodes=8")
    output = run_with_ray(str(FOLDER / "cluster.py"), *flags, folder=program_folder)
    assert "16 episodes of the cluster are bitwise equal to those of one machine" in output


def test_tutorials_state_what_they_teach_and_use_only_public_names() -> None:
    assert {path.stem for path in TUTORIALS} == {*SMALL, "cluster", *test_algorithms.SMALL}
    for path in TUTORIALS:
        text = path.read_text(encoding="utf-8")
        assert "you will learn" in text.lower()
        used = re.findall(r"^\s*(?:from|import) (rlpool\S*)", text, re.MULTILINE)
        assert {*used} <= PUBLIC_MODULES


# Refusals at startup -----------------------------------------------------------------------------

FAILS_LATER = [  # one of each kind that would fail later, and the name in its error
    ("ppo --checkpoint=folder", "--checkpoint: folder"),
    ("ppo --checkpoint=ppo.png", "--checkpoint"),
    ("ppo --checkpoint=no/such/mine.pt", "--checkpoint"),
    ("ppo --track=file/logs", "--track: file/logs"),
    ("ppo_atari --video=/proc/nope", "--video: /proc/nope"),
    ("reinforce --env-id=Pendulum-v1", "actions Box(-2.0, 2.0, (1,), float32)"),
    ("impala --env-id=FrozenLake-v1", "--env-id: FrozenLake-v1"),
    ("sac --env-id=nowhere:Env-v1", "--env-id: No module named 'nowhere'"),
    ("sac --discount=nan", "argument --discount"),
    ("dqn --evaluate=-1", "argument --evaluate"),
    ("dqn --resume --checkpoint=mine.pt", "--resume"),
    ("dqn --resume --checkpoint=file", "--resume: file"),
    ("dqn --resume --checkpoint=other.pt", "--resume: other.pt"),
]


def run(path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> object:
    """Run a tutorial until it exits and return its exit code."""
    monkeypatch.setattr(sys, "argv", [str(path), *flags])
    monkeypatch.syspath_prepend(str(path.parent))
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(path), run_name="__main__")
    return caught.value.code


def test_help_needs_no_extras_and_unknown_flags_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tqdm", "ray", "ale_py", "matplotlib", "mujoco", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    for path in TUTORIALS:
        assert run(path, monkeypatch, "--help") == 0
        assert "usage:" in capsys.readouterr().out
        assert run(path, monkeypatch, "--foo", "bar") == 2
        assert "--foo bar\n" in capsys.readouterr().err
    assert run(FOLDER / "cluster.py", monkeypatch) == 2
    assert '"rlpool[ray]"' in capsys.readouterr().err


def test_arguments_that_would_fail_later_are_refused_at_startup_in_one_line(
    program_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(program_folder)
    Path("folder").mkdir()
    Path("file").write_text("no checkpoint", encoding="utf-8")
    torch.save({"q_network": {}, "random": torch.get_rng_state(), "progress": {}}, "other.pt")
    before = sorted(program_folder.iterdir())
    for flags, named in FAILS_LATER:
        name, *flags_of = flags.split()
        assert run(FOLDER / f"{name}.py", monkeypatch, *flags_of) == 2, flags
        error = capsys.readouterr().err
        assert named in error
        assert error.count("\n") == 1
    assert sorted(program_folder.iterdir()) == before
