"""What the DQN tutorial claims beyond running through: its targets, and going on from a file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rlpool import Pool, TemporalDictTensor

from support.programs import run_as_main

PATH = Path(__file__).resolve().parents[2] / "tutorials" / "dqn.py"


@pytest.fixture(scope="module")
def dqn() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dqn", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Constant:
    """A network whose values of the two actions are always the same."""

    def __init__(self, values: list[float]) -> None:
        self._values = torch.tensor(values)

    def model(self, frame: torch.Tensor) -> torch.Tensor:
        return self._values.expand(len(frame), -1)


@pytest.mark.parametrize(("end", "future"), [("_terminated", 0.0), ("_truncated", 3.0)])
def test_targets_are_cut_off_by_a_termination_only(
    dqn: ModuleType, end: str, future: float
) -> None:
    is_last = torch.tensor([[False, True]])
    episode = {
        "frame": torch.arange(8.0).reshape(1, 2, 4),
        "_frame": torch.arange(4.0, 12.0).reshape(1, 2, 4),
        "action": torch.zeros(1, 2, dtype=torch.int64),
        "_reward": torch.ones(1, 2),
        "_done": is_last,
        "_terminated": torch.zeros_like(is_last),
        end: is_last,
    }
    pool = Pool(pool_size=20, seed=0)
    for _ in range(10):
        pool.extend(TemporalDictTensor(episode))
    batch = pool.sample(20, n_step=dqn.N_STEP, discount=dqn.DISCOUNT)
    assert batch["frame"][:, 0].unique().tolist() == [0.0, 4.0]
    # Double: the learner prefers action 0, and its older copy says what that is worth.
    targets = dqn.targets_of(batch, Constant([9.0, 1.0]), Constant([3.0, 7.0]))
    is_first = batch["frame"][:, 0] == 0
    one, two = 1.0 + dqn.DISCOUNT * future, 1.0 + dqn.DISCOUNT + dqn.DISCOUNT**2 * future
    torch.testing.assert_close(targets, torch.where(is_first, two, one))


def test_a_run_goes_on_with_its_learner_and_its_pool(
    program_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_as_main(PATH, "--n-threads=1", "--n-steps=20", folder=program_folder)
    before = _checkpoint(program_folder)
    first = capsys.readouterr().out
    run_as_main(PATH, "--n-threads=1", "--n-steps=25", "--resume", folder=program_folder)
    second = capsys.readouterr().out
    after = _checkpoint(program_folder)
    assert "resumed" not in first
    assert f"resumed after 20 steps with {_n_held(before)} transitions" in second
    assert before["progress"]["n_steps"] == 20
    assert after["progress"]["n_steps"] == 25
    assert after["progress"]["n_env_steps"] > before["progress"]["n_env_steps"]
    n_before = len(before["progress"]["returns"])
    assert after["progress"]["returns"][:n_before] == before["progress"]["returns"]
    assert _n_held(after) == after["progress"]["n_env_steps"]
    # Adam counts its steps: they go on as well.
    steps = {float(part["step"]) for part in after["optimizer"]["state"].values()}
    assert steps == {25.0}


def _checkpoint(folder: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(folder / "dqn.pt", weights_only=True)
    return checkpoint


def _n_held(checkpoint: dict[str, Any]) -> int:
    """Transitions in the pool of a checkpoint."""
    pool = Pool(pool_size=200_000)
    pool.load_state_dict(checkpoint["pool"])
    return len(pool)
