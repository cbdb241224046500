"""Crash capsules: what they hold, wherever an episode fails, and the files that keep them."""

from __future__ import annotations

import io
import json
import os
import pickle
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import (
    Agent,
    Batcher,
    CrashCapsule,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    GymEnv,
    SpecError,
    Where,
    WorkerError,
    replay_crash,
)
from rlpool.loop import crash_scene
from rlpool.record import tape as tapes

from support.agents import FunctionAgent, InitialStateCounter, StepCounter
from support.envs import CountingEnv, FailingEnv

pytestmark = pytest.mark.promise("I9")

WHERE = Where(worker=3, lane=1, episode=27, step=2, seed=99, env_info={"task": 5, "goal": [1.5]})


UMASK = os.umask(0o022)
os.umask(UMASK)


def capsule(**changes: Any) -> CrashCapsule:
    """A capsule with something in every field."""
    given: dict[str, Any] = {
        "call": "agent",
        "where": WHERE,
        "error": "the agent raised KeyError: 'goal'",
        "traceback": "Traceback: ü\n",
        "seed": 99,
        "worker_seed": 2**63 - 1,
        "n_lanes": 2,
        "env_type": "GymEnv",
        "options": WHERE.env_info,
        "agent_info": {"id": np.array(7), "x": np.ones(2, np.float32)},
        "actions": {"action/a/0": np.arange(2), "action/b": np.ones((2, 3), np.float32)},
        "rewards": np.array([1.5, np.nan], np.float64),
        "observation": {"frame": np.zeros((2, 0)), "done": np.array(False)},
        "batch": {"observation/frame": np.ones((2, 3), np.uint8)},
    }
    return CrashCapsule(**{**given, **changes})


def assert_same(got: CrashCapsule, expected: CrashCapsule) -> None:
    """Every field agrees; arrays bit for bit."""
    for name, value in vars(expected).items():
        found = getattr(got, name)
        arrays = value if isinstance(value, dict) else {"": value}
        for key, array in arrays.items():
            other = found[key] if isinstance(value, dict) else found
            if isinstance(array, np.ndarray):
                assert (other.dtype, other.shape) == (array.dtype, array.shape), name
                assert other.tobytes() == array.tobytes(), name
            else:
                assert other == array, name
        if isinstance(value, dict):
            assert list(found) == list(value)


def failure_of(batcher: Any, n_episodes: int = 4, **infos: Any) -> WorkerError:
    """The error of a request."""
    with batcher:
        batcher.execute(n_episodes, **infos)
        with pytest.raises(WorkerError) as caught:
            batcher.get()
    return caught.value


def make(envs: list[Any], agent: Agent | None = None, **arguments: Any) -> EpisodeBatcher:
    given: dict[str, Any] = {"n_timesteps": 4, "n_slots": 50, "seeds": 0, **arguments}
    return EpisodeBatcher(
        create_agent=lambda: agent or StepCounter(),
        create_env=lambda seed: GymEnv(envs, seed),
        n_threads=0,
        **given,
    )


def info_of(length: int, n: int = 4) -> dict[str, DictTensor]:
    return {
        "env_info": DictTensor({"length": torch.full((n,), length), "id": torch.arange(n)}),
        "agent_info": DictTensor({"x": torch.arange(n) * 10.0}),
    }


def values(arrays: Any) -> dict[str, Any]:
    return {key: array.tolist() for key, array in arrays.items()}


# What a capsule holds ---------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "n_slots"), [(0, 2), (3, 50), (4, 2), (11, 2)])
def test_a_failing_step_leaves_all_actions_of_its_episode(step: int, n_slots: int) -> None:
    envs = [FailingEnv(KeyError("goal"), step=step, fails_at=2) for _ in range(2)]
    error = failure_of(make(envs, n_slots=n_slots), **info_of(20))
    found = error.capsule
    assert isinstance(error, EnvError)
    where = found.where
    assert where == error.where == Where(0, 0, 2, step, found.seed, {"length": 20, "id": 2})
    assert (found.call, found.error) == ("step", "env.step raised KeyError: 'goal'")
    assert (found.traceback, found.options) == (error.traceback_text, where.env_info)
    assert (found.first_step, found.n_lanes, found.env_type) == (0, 2, "GymEnv")
    assert values(found.agent_info) == {"x": 20.0}
    assert values(found.actions) == {"action": list(range(1, step + 2))}
    assert found.rewards.tolist() == [200 + t for t in range(1, step + 1)]
    assert values(found.observation) == {
        "frame": [step, 2],
        "reward": 200 + step if step else 0,
        "last_action": step,
        "initial_state": step == 0,
        **dict.fromkeys(("done", "terminated", "truncated"), False),
    }
    assert not found.batch


def test_a_failing_initial_state_leaves_the_first_observation() -> None:
    class Failing(InitialStateCounter):
        def initial_state(self, agent_info: DictTensor | None, n: int) -> DictTensor:
            if agent_info is not None and bool((agent_info["x"] == 20).any()):
                raise KeyError("state")
            return super().initial_state(agent_info, n)

    error = failure_of(make([CountingEnv(), CountingEnv()], Failing()), **info_of(3))
    found = error.capsule
    assert (found.call, found.where.episode, found.where.step) == ("initial_state", 2, 0)
    assert found.n_actions == 0
    assert found.observation["frame"].tolist() == [0, 2]
    assert found.batch["agent_info/x"].tolist() == [20, 30]


def test_the_first_reset_and_the_first_call_of_all_have_capsules() -> None:
    env = FailingEnv(KeyError("goal"), "reset", fails_at=0)
    found = failure_of(make([env]), **info_of(6)).capsule
    assert (found.call, found.options["id"], found.agent_info["x"]) == ("reset", 0, 0)
    assert (found.seed, found.n_actions, found.observation) == (found.where.seed, 0, {})

    def fails(*arguments: Any) -> Any:
        raise KeyError("policy")

    found = failure_of(make([CountingEnv(), CountingEnv()], FunctionAgent(fails)), **info_of(6))
    assert found.capsule.call == "agent"
    assert found.capsule.observation["frame"].tolist() == [0, 0]
    assert found.capsule.batch["observation/frame"].tolist() == [[0, 0], [0, 1]]


def test_what_is_kept_of_long_episodes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    # Per lane 800 bytes: a step takes 8 + 4 bytes, and 32 slots of one step are joined.
    monkeypatch.setattr(crash_scene, "MOST_BYTES", 1600)
    monkeypatch.setattr(tapes, "_CHUNK_BYTES", 300)
    envs = [FailingEnv(KeyError("goal"), step=142, fails_at=0) for _ in range(2)]
    infos = {"env_info": DictTensor({"length": torch.tensor([999])})}
    found = failure_of(make(envs, n_timesteps=1), 1, **infos).capsule
    assert 32 <= found.first_step <= 128
    assert found.actions["action"].tolist() == list(range(found.first_step + 1, 144))
    assert found.rewards.tolist() == [float(t) for t in range(found.first_step + 1, 143)]
    assert not found.observation["initial_state"]
    assert found.where.step == 142


def test_what_goes_wrong_with_a_capsule_does_not_hide_the_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(crash_scene.CrashCapsule, "of_tape", lambda *_, **__: 1 / 0)
    envs = [FailingEnv(KeyError("goal"), fails_at=0)]
    error = failure_of(make(envs))
    assert "KeyError: 'goal'" in str(error)
    assert error.capsule is None
    assert "ZeroDivisionError" in caplog.text


# Ways of a capsule ------------------------------------------------------------------------------


OPTIONS: list[Any] = [
    None,
    {"a": (1, [2.5, None]), "b": {"c": True}, "d": "ü"},
    {"goal": np.array([[1.5, 2.5]], np.float32), "n": np.int8(3), "m": np.array(3, np.int8)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["none", "nested", "arrays"])
def test_a_file_holds_everything(options: Any, tmp_path: Path) -> None:
    where = Where() if options is None else WHERE._replace(env_info=options)
    expected = capsule(where=where, options=options, seed=None, worker_seed=None)
    path = expected.save(tmp_path / "a b.crash")
    assert path == tmp_path / "a b.crash"
    found = CrashCapsule.load(str(path))
    assert repr((found.where, found.options)) == repr((where, options))
    for name, value in (options or {}).items():
        assert type((found.options or {})[name]) is type(value)
    assert_same(found, replace(expected, where=found.where))
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o666 & ~UMASK
    assert str(found) == f"CrashCapsule({found.error}; {found.where}; 2 actions)"
    assert {"rlpool", "python", "gymnasium", "torch", "numpy"} == found.versions.keys()


@pytest.mark.parametrize("value", [object(), {1: 2}, {"__array__": 1}, np.array([None]), 1j])
def test_options_that_a_file_cannot_keep_are_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"options\['goal'\]\[0\]"):
        capsule(options={"goal": [value]}).save(tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_save_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = capsule().save(tmp_path / "x")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="no space left"):
        capsule(seed=5).save(path)
    assert list(tmp_path.iterdir()) == [path]
    assert CrashCapsule.load(path).seed == 99


def test_a_pipe_is_neither_waited_for_nor_replaced_and_a_link_stays(tmp_path: Path) -> None:
    pipe, link, file = (tmp_path / name for name in ("pipe", "link", "file"))
    os.mkfifo(pipe)
    with pytest.raises(SpecError, match="it is not a file"):
        capsule().save(pipe)
    with pytest.raises(SpecError, match="it is not a file"):
        CrashCapsule.load(pipe)
    assert pipe.is_fifo()
    with pytest.raises(SpecError, match="is in a folder that does not exist"):
        capsule().save(tmp_path / "no" / "file")
    link.symlink_to(file)
    assert capsule().save(link) == link
    assert link.is_symlink()
    assert CrashCapsule.load(file).seed == 99


# The files that a batcher writes ----------------------------------------------------------------


def changed(path: Path, **changes: Any) -> bytes:
    """A file whose header is another one."""
    with np.load(path) as archive:
        arrays = dict(archive)
    header = {**json.loads(arrays["header"].tobytes()), **changes}
    whole = io.BytesIO()
    np.savez(whole, **{**arrays, "header": np.frombuffer(json.dumps(header).encode(), np.uint8)})
    return whole.getvalue()


class Explosive:
    """Fails the test when it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("unpickled",)


def test_what_is_no_capsule_is_refused(tmp_path: Path) -> None:
    path = capsule().save(tmp_path / "x.npz")
    headers = ({"format": "other"}, {"version": 2}, {"call": "close"}, {"where": {"x": 3}})
    headers += ({"seed": "one"}, {"n_lanes": "two"}, {"options": [1]}, {"where": {"lane": "x"}})
    damaged = [b"", b"no capsule", pickle.dumps(Explosive()), path.read_bytes()[:-60]]
    for words in [*damaged, *(changed(path, **header) for header in headers)]:
        path.write_bytes(words)
        with pytest.raises(SpecError, match=r"x\.npz' is not a crash capsule(.|\n)*fix:"):
            CrashCapsule.load(path)


def create_failing(seed: int) -> GymEnv:
    return GymEnv([FailingEnv(KeyError("goal"), fails_at=0, step=2)], seed)


def files_of(directory: Any, create_agent: Any = StepCounter) -> EpisodeBatcher:
    return EpisodeBatcher(
        4, 8, create_agent, {}, create_failing, {}, n_threads=0, seeds=0, crash_dir=directory
    )


def error_of(batcher: Any) -> WorkerError:
    batcher.execute(*[4] * isinstance(batcher, EpisodeBatcher))
    with pytest.raises(WorkerError) as caught:
        batcher.get()
    return caught.value


def test_every_error_names_its_file(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    with files_of(directory) as batcher:
        assert directory.is_dir()
        (directory / "crash-0-0-0.npz").write_text("mine")  # kept
        errors = error_of(batcher), error_of(batcher)
    for number, error in enumerate(errors, 1):
        path = directory / f"crash-0-0-{number}.npz"
        assert f"rlpool.replay_crash({str(path)!r}, create_env)" in str(error)
        assert "KeyError: 'goal'" in str(error)
        assert traceback.extract_tb(error.__cause__.__traceback__)[-1].name == "step"
        with pytest.raises(KeyError, match="goal"):
            replay_crash(path, create_failing)
    assert (directory / "crash-0-0-0.npz").read_text() == "mine"
    assert len(list(directory.iterdir())) == 3


def test_a_relative_directory_stays_where_it_was_and_advice_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "later").mkdir()
    monkeypatch.chdir(tmp_path)
    with Batcher(
        4, None, StepCounter, {}, create_failing, {}, n_threads=0, crash_dir="crashes"
    ) as windows:
        (tmp_path / "crashes").rmdir()  # it is made again
        os.chdir("later")
        windows.reset()
        assert str(tmp_path / "crashes" / "crash-0-0-0.npz") in str(error_of(windows))
    with files_of(tmp_path, lambda: FunctionAgent(lambda *_: 3)) as episodes:
        text = str(error_of(episodes))
    assert "return (state, output, new_state); repeat it" in text
    assert "crash-0-0-0" in text
    assert not list((tmp_path / "later").iterdir())


def full(*_: Any, **__: Any) -> None:
    raise OSError("no space left on device")


def test_what_cannot_be_written_does_not_lose_the_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "crashes"
    with files_of(directory) as batcher:
        with monkeypatch.context() as patch:
            patch.setattr(np, "savez", full)
            error_of(batcher)
        directory.rmdir()  # nothing was left in it
        directory.write_text("in the way")
        error = error_of(batcher)
    assert "KeyError: 'goal'" in str(error)
    assert "debug it here" in str(error)
    assert error.capsule is not None
    assert caplog.text.count("no crash file") == 2


@pytest.mark.parametrize("wrong", [3, "", True, b"x"])
def test_what_is_no_path_is_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="crash_dir should be a path or None"):
        files_of(wrong)
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="cannot be created"):
        files_of(tmp_path / "file" / "inside")
