"""Training scripts: they run, and resume from any interruption."""

from __future__ import annotations

import itertools
import runpy
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpool import TemporalDictTensor

from support.programs import run_as_main
from support.variants import variants

FOLDER = Path(__file__).resolve().parents[2] / "tutorials"

# Flags with which each script saves several times within a few seconds.
CONTINUOUS = "--total-timesteps=260 --learning-starts=205 --batch-size=16 --checkpoint-interval=220"
SMALL = {
    "a2c": "--total-timesteps=400 --checkpoint-interval=4",
    "dqn": "--total-timesteps=300 --learning-starts=20 --checkpoint-interval=210",
    "impala": "--n-updates=4 --checkpoint-interval=1 --n-workers=0",
    "meta_rl": "--num-iters=2 --num-rollouts-per-iter=4 --envs-per-worker=2 "
    "--num-parallel-workers=0 --num-eval-tasks=4 --checkpoint-interval=1",
    "multi_agent": "--total-timesteps=600 --checkpoint-interval=1 --n-workers=0",
    "ppo": "--total-timesteps=2048 --checkpoint-interval=1",
    "ppo_atari": "--total-timesteps=128 --checkpoint-interval=1 --n-workers=0",
    "ppo_continuous": "--env-id=Pendulum-v1 --total-timesteps=512 --checkpoint-interval=1",
    "ppo_recurrent": "--total-timesteps=2048 --checkpoint-interval=1 --evaluate=2",
    "reinforce": "--n-epochs=4 --checkpoint-interval=1 --n-workers=1",
    "sac": f"{CONTINUOUS} --evaluate=2",
    "td3": f"{CONTINUOUS} --evaluate=2",
}

SAME_BITS = ("meta_rl", "multi_agent", "reinforce")
"""Nothing is in flight or in the middle of an episode where these are saved."""

# No other test runs these.
ELSEWHERE_NOT_RUN = ("dqn", "impala", "meta_rl", "multi_agent", "ppo_continuous", "ppo_recurrent")

# Flags with which a script ends before any episode: these run once by default, not three times.
SHORT = {
    "a2c": "--total-timesteps=40",
    "ppo_atari": "--total-timesteps=64",
    "ppo_continuous": "--total-timesteps=1",
    "ppo_recurrent": "--total-timesteps=1 --evaluate=0",
    "sac": "--total-timesteps=3 --evaluate=0",
    "td3": "--total-timesteps=3 --evaluate=0",
}

# Learning from whole windows takes longer than all the others together.
CONSTANTS = {
    "multi_agent": {"N_EPISODES": 8, "N_EPOCHS": 1},
    "ppo_atari": {"N_STEPS": 8, "BATCH_SIZE": 8 * 8, "N_EPOCHS": 1},
    "ppo_continuous": {"N_STEPS": 256, "BATCH_SIZE": 256, "N_EPOCHS": 2, "N_MINIBATCHES": 4},
    "ppo_recurrent": {"N_STEPS": 64, "BATCH_SIZE": 8 * 64, "N_EPOCHS": 2},
}


@pytest.fixture(autouse=True)
def what_scripts_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


class PowerFailureError(Exception):
    """Error that ends a program halfway."""


def run(name: str, folder: Path, *flags: str) -> dict[str, Any]:
    """Run a script and return its saved data."""
    path, flags = FOLDER / f"{name}.py", (*SMALL[name].split(), *flags)
    run_as_main(path, *flags, folder=folder, constants=CONSTANTS.get(name))
    saved: dict[str, Any] = torch.load(folder / f"{name}.pt", weights_only=True)
    return saved


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {k: v for key in value for k, v in leaves(value[key], f"{path}/{key}").items()}
    if isinstance(value, list | tuple):
        return leaves(dict(enumerate(value)), path)
    return {path: value}


@pytest.mark.parametrize(
    ("name", "how"),
    variants(
        [("reinforce", "Ctrl-C"), *((name, "power") for name in ELSEWHERE_NOT_RUN)],
        itertools.product(SMALL, ("power", "Ctrl-C")),
    ),
)
def test_an_interrupted_run_resumes(
    name: str, how: str, program_folder: Path, capfd: pytest.CaptureFixture[str]
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
        if n_saved == 2 and how == "power":
            raise PowerFailureError
        save(*args)
        if n_saved == 1 and how == "Ctrl-C":
            signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", save_once)
        with pytest.raises((PowerFailureError, KeyboardInterrupt, SystemExit)):
            run(name, program_folder)
    assert_resumed(name, run(name, program_folder, "--resume"), whole)


def assert_resumed(name: str, saved: Any, whole: Any) -> None:
    """Compare the data saved by a resumed run with that of an uninterrupted one."""
    expected, got = leaves(whole), leaves(saved)
    if name not in SAME_BITS:
        counts = [key for key in expected if key.startswith("/progress/n_")]
        assert counts
        expected = {key: expected[key] for key in counts if key != "/progress/n_steps"}
        got = {key: got[key] for key in expected}
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        equal = torch.equal(value, got[key]) if torch.is_tensor(value) else value == got[key]
        assert equal, key


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_script_runs_without_workers(name: str, program_folder: Path) -> None:
    run(name, program_folder, *(["--n-workers=0"] if name != "meta_rl" else []))


@pytest.mark.parametrize("name", variants(["ppo"], SMALL))
def test_a_run_writes_a_video_and_a_tensorboard_log(
    name: str, program_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(name, program_folder, "--video=films", *(["--track=logs"] if name == "ppo" else []))
    (film,) = (program_folder / "films").iterdir()
    assert film.suffix == ".mp4"
    assert film.stat().st_size > 1000
    assert f"films/{film.name}" in capfd.readouterr().out
    if name == "ppo":
        (log,) = (program_folder / "logs").iterdir()
        assert b"return" in log.read_bytes()


@pytest.mark.parametrize("name", SHORT)
def test_there_is_no_average_return_without_a_complete_episode(
    name: str, program_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(name, program_folder, *SHORT[name].split())["progress"]["returns"] == []
    output, errors = capfd.readouterr()
    assert "average return of the last 100 episodes: nan" in output
    assert "return=0.0" not in errors  # the bar


@pytest.mark.parametrize("name", ["dqn", "sac", "td3"])
def test_only_a_termination_stops_bootstrapping_of_targets(name: str) -> None:
    is_last = torch.tensor([[False, False, True]] * 2)
    batch = TemporalDictTensor(
        {
            "frame": torch.randn(2, 3, 3),
            "_frame": torch.randn(2, 3, 3),
            "action": torch.rand(2, 3, 1),
            "_reward": torch.ones(2, 3),
            "_done": is_last,
            "_terminated": is_last & torch.tensor([[True], [False]]),
        }
    ).flatten()
    script = runpy.run_path(str(FOLDER / f"{name}.py"))
    if name == "dqn":
        targets = script["targets_of"](batch, script["QNetwork"](3, 2))
    else:
        sizes = {"n_inputs": 3, "n_actions": 1} | ({"hidden": (8, 8)} if name == "td3" else {})
        targets = script["Learner"](**sizes, hyper=script["PENDULUM"]).targets_of(batch)
    assert ((targets == batch["_reward"]) == batch["_terminated"]).all()
