"""Crash capsules: what they hold, wherever an episode fails, and the files that keep them."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlpool import (
    Agent,
    AgentError,
    AgentSpecError,
    Batcher,
    CrashCapsule,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    GymEnv,
    GymEnvInf,
    SpecError,
    Where,
    WorkerDiedError,
    WorkerError,
)
from rlpool.loop import crash_scene
from rlpool.record import tape as tapes

from support.agents import ConstantAgent, FunctionAgent, InitialStateCounter, StepCounter, zeros
from support.envs import AncestorCountingEnv, CountingEnv, EchoEnv, FailingEnv

WHERE = Where(worker=3, lane=1, episode=27, step=2, seed=99, env_info={"task": 5, "goal": [1.5]})


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


# What a capsule holds ---------------------------------------------------------------------------


@pytest.mark.parametrize("n_slots", [2, 50])
@pytest.mark.parametrize("step", [0, 2, 3, 4, 11])
def test_a_failing_step_leaves_all_actions_of_its_episode(step: int, n_slots: int) -> None:
    envs = [FailingEnv(KeyError("goal"), step=step, fails_at=2) for _ in range(2)]
    error = failure_of(make(envs, n_slots=n_slots), **info_of(20))
    found = error.capsule
    assert isinstance(error, EnvError)
    assert isinstance(found, CrashCapsule)
    assert (found.call, found.where) == ("step", error.where)
    assert found.error == "env.step raised KeyError: 'goal'"
    assert found.traceback == error.traceback_text
    assert (found.where.episode, found.where.lane, found.where.step) == (2, 0, step)
    assert found.seed == error.where.seed
    assert found.options == {"length": 20, "id": 2}
    assert {key: array.tolist() for key, array in found.agent_info.items()} == {"x": 20.0}
    assert {k: a.tolist() for k, a in found.actions.items()} == {"action": list(range(1, step + 2))}
    assert found.rewards.tolist() == [200 + t for t in range(1, step + 1)]
    assert found.observation["frame"].tolist() == [step, 2]
    assert found.observation["last_action"] == step
    assert found.observation["initial_state"] == (step == 0)
    assert not found.observation["done"]
    assert (found.first_step, found.n_lanes, found.env_type) == (0, 2, "GymEnv")
    assert found.n_actions == step + 1
    assert not found.batch


def test_a_failing_reset_leaves_no_action() -> None:
    envs = [FailingEnv(KeyError("goal"), "reset", fails_at=2) for _ in range(2)]
    found = failure_of(make(envs), **info_of(6)).capsule
    assert (found.call, found.where.step, found.where.episode) == ("reset", 0, 2)
    assert {key: array.shape for key, array in found.actions.items()} == {"action": (0,)}
    assert found.rewards.shape == (0,)
    assert not found.observation
    assert found.options == {"length": 6, "id": 2}
    assert found.agent_info["x"] == 20


def failing_agent(step: int) -> FunctionAgent:
    """A ``StepCounter`` that spoils what it was shown, and fails in that step of episode 2."""
    inner = StepCounter()

    def act(state: Any, observation: Any, agent_info: Any, history: Any) -> Any:
        frame = observation["frame"]
        if bool(((frame[:, 0] == step) & (frame[:, 1] == 2)).any()):
            frame.fill_(-1)
            observation["reward"].fill_(-1)
            raise KeyError("policy")
        return inner(state, observation, agent_info, history)

    return FunctionAgent(act)


@pytest.mark.parametrize("step", [0, 1, 4, 7])
def test_a_failing_agent_leaves_what_it_was_shown(step: int) -> None:
    envs = [CountingEnv() for _ in range(2)]
    error = failure_of(make(envs, failing_agent(step)), **info_of(9))
    found = error.capsule
    assert isinstance(error, AgentError)
    assert (found.call, found.where.lane) == ("agent", 0)
    assert found.where.episode == 2
    assert found.where.step == found.n_actions == step
    assert found.actions["action"].tolist() == list(range(1, step + 1))
    assert found.rewards.tolist() == [200 + t for t in range(1, step + 1)]
    assert found.observation["frame"].tolist() == [step, 2]
    assert found.observation["reward"] == (200 + step if step else 0)
    batch = found.batch
    assert batch["observation/frame"].tolist() == [[step, 2], [step, 3]]
    assert batch["observation/initial_state"].tolist() == [step == 0] * 2
    assert batch["agent_info/x"].tolist() == [20, 30]
    if step:
        assert batch["state/steps"].tolist() == [10 + step] * 2


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
    assert (found.seed, found.n_actions) == (found.where.seed, 0)

    def fails(*arguments: Any) -> Any:
        raise KeyError("policy")

    found = failure_of(make([CountingEnv(), CountingEnv()], FunctionAgent(fails)), **info_of(6))
    assert found.capsule.call == "agent"
    assert found.capsule.observation["frame"].tolist() == [0, 0]
    assert found.capsule.batch["observation/frame"].tolist() == [[0, 0], [0, 1]]


def test_an_agents_wrong_shapes_have_capsules() -> None:
    def act(state: Any, observation: Any, *_: Any) -> Any:
        n = 1 if bool((observation["frame"][:, 0] == 1).any()) else 2
        return DictTensor(), DictTensor({"action": torch.zeros(n, dtype=torch.int64)}), DictTensor()

    error = failure_of(make([CountingEnv(), CountingEnv()], FunctionAgent(act)))
    assert isinstance(error, AgentSpecError)
    assert (error.capsule.call, error.capsule.where.step) == ("agent", 1)


def run_windows(batcher: Batcher) -> None:
    """Windows until one of them fails."""
    for _ in range(20):
        batcher.execute()
        batcher.get()


class FailsWith(EchoEnv):
    """Fails in a step of the episode whose action is ``at``."""

    def __init__(self, at: int, length: int = 3) -> None:
        super().__init__(length)
        self.at = at

    def step(self, action: Any) -> Any:
        if action == self.at:
            raise KeyError("goal")
        return super().step(action)


@pytest.mark.parametrize("at", range(3, 25))
def test_in_windows_only_the_actions_since_the_lanes_own_restart_count(at: int) -> None:
    # Counts its calls, so that the 3 steps of every episode have other actions.
    n_calls = -1  # the first call tells what there is, its action is never taken

    def act(state: Any, observation: Any, *_: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        return DictTensor(), DictTensor({"action": zeros(observation) + n_calls}), DictTensor()

    batcher = Batcher(
        n_timesteps=4,
        create_agent=lambda: FunctionAgent(act),
        create_env=lambda seed: GymEnvInf([FailsWith(at, 7), FailsWith(-1, 5)], seed),
        n_threads=0,
        seeds=0,
    )
    with batcher:
        batcher.reset()
        with pytest.raises(EnvError) as caught:
            run_windows(batcher)
    found = caught.value.capsule
    start = (at - 1) // 7 * 7 + 1
    assert found.actions["action"].tolist() == list(range(start, at + 1))
    assert found.rewards.tolist() == [t + 1.0 for t in range(at - start)]
    assert found.where.step == at - start
    assert found.observation["step"] == at - start
    assert found.observation["seed"] == found.seed


def test_nested_and_undeclared_actions_have_their_keys() -> None:
    space = spaces.Dict(a=spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,)))))

    class Env(FailingEnv):
        action_space = space

    def act(state: Any, observation: Any, *_: Any) -> Any:
        n = observation.n_elems()
        first = observation["frame"][:, 0].long()
        actions = {"action/a/0": first, "action/a/1": torch.full((n, 2), 0.5) * first[:, None]}
        return DictTensor(), DictTensor({**actions, "actionable": first}), DictTensor()

    envs = [Env(KeyError("goal"), fails_at=0, step=2)]
    found = failure_of(make(envs, FunctionAgent(act))).capsule
    assert {key: array.tolist() for key, array in found.actions.items()} == {
        "action/a/0": [0, 1, 2],
        "action/a/1": [[0, 0], [0.5, 0.5], [1, 1]],
    }

    class Old(AncestorCountingEnv):
        def step(self, action: Any) -> Any:
            if self.t == 2:
                raise KeyError("goal")
            return super().step(action)

    found = failure_of(make([Old()], ConstantAgent(4))).capsule
    assert found.actions["action"].tolist() == [4, 4, 4]


def test_what_is_kept_of_long_episodes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    # Per lane 200 bytes: a step takes 8 + 4 bytes, so that 4 chunks of 4 steps fit.
    monkeypatch.setattr(crash_scene, "MOST_BYTES", 400)
    monkeypatch.setattr(tapes, "_CHUNK_BYTES", 1)
    envs = [FailingEnv(KeyError("goal"), step=42, fails_at=0) for _ in range(2)]
    found = failure_of(make(envs), 1, env_info=DictTensor({"length": torch.tensor([99])})).capsule
    assert found.first_step == 24
    assert found.actions["action"].tolist() == list(range(25, 44))
    assert found.rewards.tolist() == [float(t) for t in range(25, 43)]
    assert not found.observation["initial_state"]
    assert found.where.step == 42


def test_what_goes_wrong_with_a_capsule_does_not_hide_the_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(crash_scene.CrashCapsule, "of_tape", lambda *_, **__: 1 / 0)
    envs = [FailingEnv(KeyError("goal"), fails_at=0)]
    error = failure_of(make(envs))
    assert "KeyError: 'goal'" in str(error)
    assert error.capsule is None
    assert "ZeroDivisionError" in caplog.text


def test_errors_without_an_episode_have_no_capsule() -> None:
    class Stubborn(StepCounter):
        def update(self, info: Any) -> None:
            raise KeyError("weights")

    batcher = make([CountingEnv()], Stubborn())
    batcher.update({})
    assert failure_of(batcher).capsule is None


# Ways of a capsule ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        EnvError("it broke", where=WHERE, capsule=capsule()),
        AgentSpecError("it broke", capsule=capsule()),
        WorkerDiedError("it broke", exitcode=1, capsule=capsule()),
    ],
)
def test_capsules_survive_pickling_and_rewording(error: WorkerError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), error.reworded(what="x", fix="y")):
        assert type(other) is type(error)
        assert_same(other.capsule, capsule())


@pytest.mark.parametrize(
    "given",
    [
        capsule(),
        capsule(options=None, where=Where(), seed=None, worker_seed=None, actions={}),
        capsule(options={"a": (1, [2.5, None]), "b": {"c": True}, "d": "ü"}),
    ],
)
def test_a_file_holds_everything(given: CrashCapsule, tmp_path: Path) -> None:
    given = capsule() if given is None else given
    given = CrashCapsule(**{**vars(given), "where": given.where._replace(env_info=given.options)})
    path = given.save(tmp_path / "a b.crash")
    assert path == tmp_path / "a b.crash"
    assert_same(CrashCapsule.load(path), given)
    assert_same(CrashCapsule.load(str(path)), given)
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o600 == 0o600


def test_options_with_arrays_come_back_as_arrays(tmp_path: Path) -> None:
    options = {"goal": np.array([[1.5, 2.5]], np.float32), "n": np.int8(3)}
    path = capsule(options=options).save(tmp_path / "x")
    found = CrashCapsule.load(path).options
    assert found is not None
    assert found["goal"].dtype == np.float32
    assert found["goal"].tolist() == [[1.5, 2.5]]
    assert (found["n"], found["n"].dtype) == (3, np.int8)


@pytest.mark.parametrize("value", [object(), {1: 2}, {"__array__": 1}, np.array([None]), 1j])
def test_options_that_a_file_cannot_keep_are_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"options\['goal'\]\[0\]"):
        capsule(options={"goal": [value]}).save(tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_save_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = capsule().save(tmp_path / "x")

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="no space left"):
        capsule(seed=5).save(path)
    assert list(tmp_path.iterdir()) == [path]
    assert CrashCapsule.load(path).seed == 99


def changed(**changes: Any) -> bytes:
    """A file with another header; ``None`` leaves an entry out."""
    whole = io.BytesIO()
    header = json.loads(capsule()._header().tobytes())
    header.update(changes)
    header = {key: value for key, value in header.items() if value is not None}
    words = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(whole, header=words, rewards=np.zeros(0))
    return whole.getvalue()


def of_arrays(**arrays: Any) -> bytes:
    whole = io.BytesIO()
    np.savez(whole, **arrays)
    return whole.getvalue()


def shut(words: bytes) -> bytes:
    """An archive with a header that is no array."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("header.npy", words)
    return whole.getvalue()


class Explosive:
    """Says so when it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("unpickled",)


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"no capsule",
        pickle.dumps(Explosive()),
        changed()[:-60],
        changed(format="other"),
        changed(version=2),
        changed(version=None),
        changed(call="close"),
        changed(n_lanes="two"),
        changed(seed=1.5),
        changed(error=None),
        changed(error=7),
        changed(where={"planet": 3}),
        changed(where=None),
        changed(options=[1]),
        of_arrays(x=np.zeros(3)),
        of_arrays(header=np.frombuffer(b"[]", np.uint8), rewards=np.zeros(0)),
        of_arrays(header=np.frombuffer(b"\xff{", np.uint8), rewards=np.zeros(0)),
        of_arrays(header=np.array([Explosive()], object)),
        shut(b"nothing"),
    ],
    ids=range(20),
)
def test_bad_files_are_refused(words: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(words)
    with pytest.raises(SpecError, match=r"x\.npz' is not a crash capsule") as caught:
        CrashCapsule.load(path)
    assert "fix:" in str(caught.value)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nowhere\.npz' cannot be read: No such file"):
        CrashCapsule.load(tmp_path / "nowhere.npz")
    with pytest.raises(SpecError, match="cannot be read: Is a directory"):
        CrashCapsule.load(tmp_path)


def test_the_unchanged_file_of_the_test_above_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(changed())
    assert CrashCapsule.load(path).where == WHERE


def test_a_capsule_is_shown_in_one_line() -> None:
    assert str(capsule()) == repr(capsule())
    assert str(capsule()) == (
        "CrashCapsule(the agent raised KeyError: 'goal'; worker 3, lane 1, episode 27, step 2, "
        "seed 99, env_info {'task': 5, 'goal': [1.5]}; 2 actions)"
    )


def test_versions_are_those_of_this_process() -> None:
    found = capsule().versions
    assert found["torch"] == torch.__version__
    assert found["numpy"] == np.__version__
    assert {"rlpool", "python", "gymnasium"} < found.keys()
    assert found["rlpool"] != "unknown"
