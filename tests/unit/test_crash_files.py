"""Crash files: written by the caller, named in the error, and never in the error's way."""

from __future__ import annotations

import logging
import os
import traceback
from pathlib import Path
from typing import Any

import pytest

from rlpool import (
    Batcher,
    CrashCapsule,
    EnvError,
    EpisodeBatcher,
    GymEnv,
    SpecError,
    WorkerError,
    replay_crash,
)

from support.agents import FunctionAgent, StepCounter
from support.envs import CountingEnv, FailingEnv


def create_env(seed: int) -> GymEnv:
    return GymEnv([FailingEnv(KeyError("goal"), fails_at=0, step=2)], seed)


def make(**arguments: Any) -> EpisodeBatcher:
    given: dict[str, Any] = {"create_agent": StepCounter, "create_env": create_env, **arguments}
    return EpisodeBatcher(4, 8, n_threads=0, seeds=0, **given)


def failure_of(batcher: EpisodeBatcher) -> WorkerError:
    batcher.execute(4)
    with pytest.raises(WorkerError) as caught:
        batcher.get()
    return caught.value


def test_the_error_names_its_file(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    with make(crash_dir=directory) as batcher:
        assert directory.is_dir()
        first, second = failure_of(batcher), failure_of(batcher)
    paths = [directory / f"crash-0-0-{n}.npz" for n in (0, 1)]
    assert sorted(directory.iterdir()) == paths
    for error, path in zip((first, second), paths, strict=True):
        assert isinstance(error, EnvError)
        assert f"rlpool.replay_crash({str(path)!r}, create_env)" in str(error)
        assert "KeyError: 'goal'" in str(error)
        assert isinstance(error.__cause__, KeyError)
        assert traceback.extract_tb(error.__cause__.__traceback__)[-1].name == "step"
        found = CrashCapsule.load(path)
        assert (found.where, found.seed) == (error.where, error.capsule.seed)
        with pytest.raises(KeyError, match="goal"):
            replay_crash(path, create_env)


def test_files_that_are_there_are_kept(tmp_path: Path) -> None:
    (tmp_path / "crash-0-0-0.npz").write_text("mine")
    with make(crash_dir=str(tmp_path)) as batcher:
        assert "crash-0-0-1.npz" in str(failure_of(batcher))
    assert (tmp_path / "crash-0-0-0.npz").read_text() == "mine"


def test_windows_and_first_calls_have_files_as_well(tmp_path: Path) -> None:
    batcher = Batcher(
        4, create_agent=StepCounter, create_env=create_env, n_threads=0, crash_dir=tmp_path
    )
    with batcher:
        batcher.reset()
        batcher.execute()
        with pytest.raises(EnvError, match="crash-0-0-0"):
            batcher.get()

    def fails(*_: Any) -> Any:
        raise KeyError("policy")

    with make(create_agent=lambda: FunctionAgent(fails), crash_dir=tmp_path) as episodes:
        assert "crash-0-0-1" in str(failure_of(episodes))


def test_advice_of_the_error_stays(tmp_path: Path) -> None:
    class Wrong(CountingEnv):
        def step(self, action: Any) -> Any:
            return super().step(action)[0]

    def create_agent() -> FunctionAgent:
        return FunctionAgent(lambda *_: 3)

    with make(create_agent=create_agent, crash_dir=tmp_path) as batcher:
        text = str(failure_of(batcher))
    assert "return (state, output, new_state); repeat it" in text
    assert len(text.splitlines()) == 3


def test_without_a_directory_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with make() as batcher:
        assert "debug it here" in str(failure_of(batcher))
    assert not list(tmp_path.iterdir())


def test_a_relative_directory_is_that_of_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "later").mkdir()
    monkeypatch.chdir(tmp_path)
    with make(crash_dir="crashes") as batcher:
        os.chdir("later")
        failure_of(batcher)
    assert [path.name for path in (tmp_path / "crashes").iterdir()] == ["crash-0-0-0.npz"]


def test_a_directory_that_is_gone_is_made_again(tmp_path: Path) -> None:
    directory = tmp_path / "crashes"
    with make(crash_dir=directory) as batcher:
        directory.rmdir()
        failure_of(batcher)
    assert len(list(directory.iterdir())) == 1


def test_what_cannot_be_written_does_not_lose_the_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "crashes"
    with make(crash_dir=directory) as batcher:
        directory.rmdir()
        directory.write_text("in the way")
        with caplog.at_level(logging.WARNING, "rlpool"):
            error = failure_of(batcher)
    assert "KeyError: 'goal'" in str(error)
    assert "debug it here" in str(error)
    assert error.capsule is not None
    assert "no crash file" in caplog.text


def test_a_file_that_cannot_be_finished_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(CrashCapsule, "save", full)
    with make(crash_dir=tmp_path) as batcher:
        assert "KeyError: 'goal'" in str(failure_of(batcher))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", [3, "", True, b"x", object()])
def test_what_is_no_path_is_refused(wrong: Any) -> None:
    with pytest.raises(SpecError, match="crash_dir should be a path or None"):
        make(crash_dir=wrong)


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(SpecError, match="cannot be made one"):
            make(crash_dir=path)
