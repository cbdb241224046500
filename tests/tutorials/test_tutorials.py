"""Every tutorial runs, made small by its flags, and does what it says."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpool import Pool, TemporalDictTensor

from support.programs import run_as_main

FOLDER = Path(__file__).resolve().parents[2] / "tutorials"
TUTORIALS = sorted(FOLDER.glob("*.py"))

# Flags that make a tutorial small, and the files that it leaves where it was started.
SMALL = {
    "arrays": ("", []),
    "datastructures": ("", []),
    "environments": ("--n-steps 20", []),
    "multiprocess_episode_batcher": ("--n-cartpole-episodes 40 --n-threads 1", []),
    "nonblocking": ("--n-epochs 3 --n-episodes 8 --n-evaluation-episodes 8", []),
    "pool": ("", []),
}

PUBLIC_MODULES = {"rlpool", "rlpool.cluster", "rlpool.patterns"}


def test_no_tutorial_is_forgotten() -> None:
    assert {path.stem for path in TUTORIALS} == {*SMALL, "cluster", "dqn"}  # with own tests


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


# dqn.py ----------------------------------------------------------------------------------------


class Constant:
    """A network whose values of the two actions are always the same."""

    def __init__(self, values: list[float]) -> None:
        self._values = torch.tensor(values)

    def model(self, frame: torch.Tensor) -> torch.Tensor:
        return self._values.expand(len(frame), -1)


@pytest.mark.parametrize(("end", "future"), [("_terminated", 0.0), ("_truncated", 3.0)])
def test_targets_of_dqn_are_cut_off_by_a_termination_only(end: str, future: float) -> None:
    dqn = runpy.run_path(str(FOLDER / "dqn.py"))
    is_last = torch.tensor([[False, True]])
    frames = torch.arange(12.0).reshape(1, 3, 4)
    episode = {
        "frame": frames[:, :2],
        "_frame": frames[:, 1:],
        "action": torch.zeros(1, 2, dtype=torch.int64),
        "_reward": torch.ones(1, 2),
        "_done": is_last,
        "_terminated": torch.zeros_like(is_last),
        end: is_last,
    }
    pool = Pool(pool_size=20, seed=0)
    for _ in range(10):
        pool.extend(TemporalDictTensor(episode))
    discount = dqn["DISCOUNT"]
    batch = pool.sample(20, n_step=dqn["N_STEP"], discount=discount)
    # Double: the learner prefers action 0, and its older copy says what that is worth.
    targets = dqn["targets_of"](batch, Constant([9.0, 1.0]), Constant([3.0, 7.0]))
    one, two = 1.0 + discount * future, 1.0 + discount + discount**2 * future
    torch.testing.assert_close(targets, torch.where(batch["frame"][:, 0] == 0, two, one))


def test_dqn_resumes_with_its_learner_and_its_pool(
    program_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints: list[dict[str, Any]] = []
    for n_steps, resume in ((20, []), (25, ["--resume"])):
        flags = ["--n-threads=1", f"--n-steps={n_steps}", *resume]
        run_as_main(FOLDER / "dqn.py", *flags, folder=program_folder)
        checkpoints.append(torch.load(program_folder / "dqn.pt", weights_only=True))
    before, after = (checkpoint["progress"] for checkpoint in checkpoints)
    assert f"resumed after 20 steps with {before['n_env_steps']} transi" in capsys.readouterr().out
    assert (before["n_steps"], after["n_steps"]) == (20, 25)
    assert after["returns"][: len(before["returns"])] == before["returns"]
    pool = Pool(pool_size=200_000)
    pool.load_state_dict(checkpoints[1]["pool"])
    assert len(pool) == after["n_env_steps"] > before["n_env_steps"]
    # Adam counts its steps: they go on as well.
    assert {float(p["step"]) for p in checkpoints[1]["optimizer"]["state"].values()} == {25.0}
    assert (program_folder / "dqn.png").stat().st_size
