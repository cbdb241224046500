"""Crash capsules from processes: batchers, environments in processes, pools."""

from __future__ import annotations

import os
import pickle
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlpool import (
    Batcher,
    CrashCapsule,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    GymEnv,
    ParallelEnvManager,
    Pool,
    WorkerDiedError,
    WorkerError,
    replay_crash,
)

from support.acting_envs import ActingEnv
from support.agents import StepCounter
from support.unlucky import UnluckyEnv, UnluckyError, create_unlucky
from support.variants import variants

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(240)]


def failure_of(create_env: Any, env_args: Any = None, **arguments: Any) -> WorkerError:
    numbers, functions = torch.arange(40), (StepCounter, {}, create_env, env_args)
    with EpisodeBatcher(5, 6, *functions, seeds=3, **arguments) as batcher:
        batcher.execute(40, DictTensor({"x": numbers}), DictTensor({"task": numbers}))
        with pytest.raises(EnvError) as caught:
            batcher.get()
    return caught.value


def assert_repeats(error: WorkerError, create_env: Any, env_args: Any = None) -> None:
    with pytest.raises(UnluckyError) as caught:
        replay_crash(error, create_env, env_args)
    assert error.what.endswith(f"raised UnluckyError: {caught.value}")


def test_failures_in_workers_come_again_here(tmp_path: Path) -> None:
    error = failure_of(create_unlucky, n_threads=2, crash_dir=tmp_path)
    found = error.capsule
    assert found.options == {"task": error.where.episode}
    assert found.agent_info["x"] == error.where.episode
    assert found.where == error.where
    assert found.n_actions == error.where.step + 1
    assert_repeats(error, create_unlucky)
    assert_repeats(pickle.loads(pickle.dumps(error)), create_unlucky)
    (path,) = tmp_path.iterdir()
    assert str(path) in str(error)
    with pytest.raises(UnluckyError):
        replay_crash(path, create_unlucky)


class Mortal(UnluckyEnv):
    """Kills its process once, in the second window, and fails later on."""

    def __init__(self, marker: str) -> None:
        super().__init__(chance=0.0, end=0.0)
        self.marker = Path(marker)

    def step(self, action: Any) -> Any:
        if action == 7 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.chance = 1.0 if action == 11 else 0.0
        return super().step(action)


def create_mortal(seed: int, marker: str) -> GymEnv:
    return GymEnv([Mortal(marker)], seed)


def test_an_episode_that_a_successor_took_over_comes_again(tmp_path: Path) -> None:
    env_args = {"marker": str(tmp_path / "marker")}
    with Batcher(4, None, StepCounter, {}, create_mortal, env_args, seeds=0) as batcher:
        batcher.reset()
        for _ in range(2):
            batcher.execute()
            batcher.get()
        assert (tmp_path / "marker").exists()
        batcher.execute()
        with pytest.raises(EnvError) as caught:
            batcher.get()
    found = caught.value.capsule
    assert found.actions["action"].tolist() == list(range(1, 12))
    assert not np.isnan(found.rewards).any()
    assert_repeats(caught.value, create_mortal, env_args)


def create_manager(seed: int, **arguments: Any) -> ParallelEnvManager:
    return ParallelEnvManager([UnluckyEnv] * 3, seed=seed, **arguments)


@pytest.mark.parametrize(
    "env_args", variants([{"envs_per_worker": 2}], [{"min_ready": 1}]), ids=str
)
def test_failures_of_environments_in_processes_come_again_here(
    env_args: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    error = failure_of(create_manager, env_args, n_threads=0)
    assert error.capsule.where == error.where
    assert_repeats(error, create_manager, env_args)
    assert_repeats(error, UnluckyEnv)
    assert not caplog.records


class Acting(ActingEnv):
    """Chooses its own actions with the process's generator, and fails now and then."""

    def step(self, action: Any) -> tuple[Any, Any, Any, Any]:
        drawn = random.random()
        self.drawn = [*getattr(self, "drawn", []), drawn] if self.t else [drawn]
        if self.t and drawn < 0.05:
            raise UnluckyError(f"{sum(self.drawn)}")
        _, state, reward, done = super().step(int(100 * drawn))
        return int(100 * drawn), state, reward + drawn, done


def failure_of_store(pool: Pool) -> WorkerError:
    with pool:
        for _ in range(100):
            try:
                pool.store()
            except EnvError as error:
                return error
    raise AssertionError("nothing failed")


def test_failures_of_a_pools_environments_come_again_here() -> None:
    for create_env in (lambda: UnluckyEnv(end=0.0), lambda: Acting(1000)):
        error = failure_of_store(Pool([create_env()], processes=1, pool_size=5000, seed=5))
        assert error.capsule.env_type == "OneEnv"
        assert error.capsule.n_actions == error.where.step + 1
        state = random.getstate()
        assert_repeats(error, create_env)
        assert random.getstate() == state


# Environments in processes, driven by hand ------------------------------------------------------


ACTIONS = spaces.Dict(
    a=spaces.Tuple((spaces.Discrete(5), spaces.Box(-1, 1, (2,), np.float64))), b=spaces.Discrete(3)
)


def make_nested() -> UnluckyEnv:
    return UnluckyEnv(action_space=ACTIONS, end=0.0, reset_chance=0.1)


def make_doomed() -> UnluckyEnv:
    return UnluckyEnv(chance=1.0)


def drive(manager: ParallelEnvManager, how: str, generator: Any) -> EnvError:
    """Steps and resets until an environment fails."""
    lanes = list(range(manager.num_envs))
    while True:
        try:
            seeds = generator.integers(2**60, size=len(lanes)).tolist()
            manager.reset_lanes(lanes, seeds, [None] * len(lanes))
            for _ in range(40):
                actions = {
                    "action/a/0": generator.integers(5, size=3),
                    "action/a/1": generator.random((3, 2)),
                    "action/b": generator.integers(3, size=3),
                }
                some = lanes if generator.random() < 0.7 else lanes[1:]
                if how == "some":
                    manager.step_some(len(some), some, actions)
                else:
                    manager.step_lanes(some, actions)
        except EnvError as error:
            return error


@pytest.mark.parametrize("how", ["all", "some"])
def test_failures_of_environments_that_are_driven_by_hand_come_again(
    how: str, tmp_path: Path
) -> None:
    # With crash_dir there are capsules also where nothing is restarted.
    policy = "restart" if how == "all" else "raise"
    manager = ParallelEnvManager(
        [make_nested] * 3, envs_per_worker=2, crash_dir=tmp_path, on_worker_failure=policy
    )
    with manager:
        calls = set()
        for seed in range(4):
            error = drive(manager, how, np.random.default_rng(seed))
            found = error.capsule
            calls.add(found.call)
            assert found.where == error.where
            assert found.n_actions == found.where.step + (found.call == "step")
            assert len(found.rewards) == found.where.step
            assert_repeats(error, make_nested)
            assert f"crash-{error.where.worker}-lane{error.where.lane}-" in str(error)
            assert isinstance(pickle.loads(pickle.dumps(error)).capsule, CrashCapsule)
        assert calls == {"reset", "step"}
    assert len(list(tmp_path.iterdir())) == 4


def test_failures_told_to_a_remote_come_again(tmp_path: Path) -> None:
    with ParallelEnvManager([make_nested] * 2, seed=3, crash_dir=tmp_path) as manager:
        remote, calls = manager.remotes[1], set()
        ACTIONS.seed(0)
        while calls != {"reset", "step"}:
            remote.send(("reset", {"options": {"goal": (1, np.arange(2))}}))
            kind, value = remote.recv()
            while kind != "error":
                assert remote.capsule is None or calls
                remote.send(("step", ACTIONS.sample()))
                kind, value = remote.recv()
            found = remote.capsule
            assert found is not None
            calls.add(found.call)
            assert found.where.step == found.n_actions - (found.call == "step")
            with pytest.raises(UnluckyError) as caught:
                replay_crash(found, make_nested)
            assert str(caught.value) in value
            path = value.rpartition("replay_crash('")[2].partition("'")[0]
            with pytest.raises(UnluckyError, match=str(caught.value)):
                replay_crash(path, make_nested)
        assert manager.remotes[0].capsule is None
        remote.send(("get_attr", {"attr": "missing"}))
        assert remote.recv()[0] == "error"
        assert remote.capsule is None  # of this error there is none


def test_failures_that_were_tried_again_have_capsules_in_the_history(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"max_restarts": 1, "max_episode_restarts": None}
    with ParallelEnvManager(
        [make_doomed], seed=1, crash_dir=tmp_path, on_env_error="restart", **limits
    ) as manager:
        manager.reset_lanes([0], [5], [None])
        manager.remotes[0].send(("step", 3))
        with pytest.raises(WorkerDiedError) as caught:
            manager.remotes[0].recv()
    assert len(caught.value.history) == 2
    for error in caught.value.history:
        assert "replay_crash" in str(error)
        assert error.capsule.where == error.where
        assert_repeats(error, make_doomed)
    assert len(list(tmp_path.iterdir())) == 2
