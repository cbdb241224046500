"""The scripts that train: they run, and resume bit by bit wherever they were cut off."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from support.programs import run_as_main

FOLDER = Path(__file__).resolve().parents[2] / "tutorials"

# Flags with which each script saves several times within a few seconds.
SMALL = {
    "a2c": "--total-timesteps=400 --checkpoint-interval=4",
    "meta_rl": "--num-iters=3 --num-rollouts-per-iter=8 --envs-per-worker=2 "
    "--num-parallel-workers=0 --checkpoint-interval=1",
    "ppo": "--total-timesteps=2048 --checkpoint-interval=1",
    "ppo_atari": "--total-timesteps=2048 --checkpoint-interval=1 --n-threads=0",
    "ppo_continuous": "--env-id=Pendulum-v1 --total-timesteps=4096 --checkpoint-interval=1",
    "ppo_recurrent": "--total-timesteps=1024 --checkpoint-interval=1 --evaluate=2",
    "reinforce": "--n-epochs=4 --checkpoint-interval=1 --n-threads=1",
}


class PowerFailureError(Exception):
    """What ends a program in the middle."""


def run(name: str, folder: Path, *flags: str) -> dict[str, Any]:
    """Run a script; returns what it saved."""
    run_as_main(FOLDER / f"{name}.py", *SMALL[name].split(), *flags, folder=folder)
    saved: dict[str, Any] = torch.load(folder / f"{name}.pt", weights_only=True)
    return saved


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {k: v for key in value for k, v in leaves(value[key], f"{path}/{key}").items()}
    if isinstance(value, list | tuple):
        return leaves(dict(enumerate(value)), path)
    return {path: value}


@pytest.mark.parametrize("name", SMALL)
def test_a_run_that_is_cut_off_resumes_bit_by_bit(
    name: str, program_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = run(name, program_folder)
    assert (program_folder / f"{name}.png").stat().st_size
    output, errors = capfd.readouterr()
    assert "average return" in output
    assert "steps/s" in errors  # the bar
    (program_folder / f"{name}.pt").unlink()

    n_saved = 0
    save = torch.save

    def save_once(*args: Any) -> None:
        nonlocal n_saved
        n_saved += 1
        if n_saved == 2:
            raise PowerFailureError
        save(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", save_once)
        with pytest.raises(PowerFailureError):
            run(name, program_folder)
    resumed = run(name, program_folder, "--resume")
    expected, got = leaves(whole), leaves(resumed)
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        equal = torch.equal(value, got[key]) if torch.is_tensor(value) else value == got[key]
        assert equal, key


def test_a_run_is_logged_for_tensorboard(program_folder: Path) -> None:
    run("ppo", program_folder, "--track=logs")
    (log,) = (program_folder / "logs").iterdir()
    assert log.name.startswith("events")
    assert b"return" in log.read_bytes()
