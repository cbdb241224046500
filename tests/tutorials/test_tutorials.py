"""Every tutorial runs, made small by its flags, and does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tutorials import test_algorithms

from support.programs import run_as_main

FOLDER = Path(__file__).resolve().parents[2] / "tutorials"
TUTORIALS = sorted(
    path for path in FOLDER.glob("*.py") if path.stem != "running"
)  # what they share

# Flags that make a tutorial small, and the files that it leaves where it was started.
SMALL = {
    "arrays": ("", []),
    "datastructures": ("", []),
    "environments": ("--n-steps 20", []),
    "evaluation": (
        "--n-iterations 2 --n-directions 2 --n-steps 20 --n-episodes 4 --n-workers 0",
        ["early.json", "late.json", "evaluation.png"],
    ),
    "multiprocess_episode_batcher": ("--n-cartpole-episodes 40 --n-threads 0", []),
    "nonblocking": ("--n-epochs 2 --n-episodes 4 --n-evaluation-episodes 4", []),
    "pool": ("", []),
}
PUBLIC_MODULES = {
    "rlpool",
    "rlpool.cluster",
    "rlpool.integrations.pettingzoo",
    "rlpool.patterns",
}


def test_no_tutorial_is_forgotten() -> None:
    assert {path.stem for path in TUTORIALS} == {*SMALL, "cluster", *test_algorithms.SMALL}


@pytest.mark.parametrize("name", SMALL)
def test_tutorial_runs(name: str, program_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags, files = SMALL[name]
    run_as_main(FOLDER / f"{name}.py", *flags.split(), folder=program_folder)
    output, errors = capfd.readouterr()
    assert "Traceback" not in errors
    assert output
    assert ("tqdm" in (FOLDER / f"{name}.py").read_text(encoding="utf-8")) == ("100%|" in errors)
    assert all((program_folder / file).stat().st_size for file in files)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_says_what_it_teaches_and_uses_public_names_only(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "you will learn" in text.lower()
    assert set(re.findall(r"^\s*(?:from|import) (rlpool\S*)", text, re.MULTILINE)) <= PUBLIC_MODULES


# cluster.py ------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.parametrize("n_nodes", [1, 2])
def test_the_tutorial_of_clusters_runs(n_nodes: int, program_folder: Path) -> None:
    pytest.importorskip("ray", reason='needs Ray: pip install "rlpool[ray]"')
    # In a process of its own: Ray prints, and takes signals.
    command = [sys.executable, str(FOLDER / "cluster.py"), f"--n-nodes={n_nodes}"]
    output = subprocess.run(
        [*command, "--n-epochs=2", "--n-episodes=8"],
        cwd=program_folder,
        stdout=subprocess.PIPE,
        text=True,
        timeout=120.0,
        check=True,
    ).stdout
    assert "16 episodes of the cluster are bit by bit those of one machine" in output
