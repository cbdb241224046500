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

from rlpool import (
    Batcher,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    GymEnv,
    ParallelEnvManager,
    Pool,
    WorkerError,
    replay_crash,
)

from support.acting_envs import ActingEnv
from support.agents import StepCounter
from support.unlucky import UnluckyEnv, UnluckyError, create_unlucky

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(240)]


def failure_of(batcher: EpisodeBatcher, n_episodes: int = 40) -> WorkerError:
    infos = {
        "env_info": DictTensor({"task": torch.arange(n_episodes)}),
        "agent_info": DictTensor({"x": torch.arange(n_episodes)}),
    }
    with batcher:
        batcher.execute(n_episodes, **infos)
        with pytest.raises(EnvError) as caught:
            batcher.get()
    return caught.value


def assert_repeats(error: WorkerError, create_env: Any, env_args: Any = None) -> None:
    with pytest.raises(UnluckyError) as caught:
        replay_crash(error, create_env, env_args)
    assert error.what.endswith(f"raised UnluckyError: {caught.value}")


def test_failures_in_workers_come_again_here(tmp_path: Path) -> None:
    batcher = EpisodeBatcher(
        5,
        6,
        create_agent=StepCounter,
        create_env=create_unlucky,
        n_threads=2,
        seeds=3,
        crash_dir=tmp_path,
    )
    error = failure_of(batcher)
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
    batcher = Batcher(
        4, create_agent=StepCounter, create_env=create_mortal, env_args=env_args, seeds=0
    )
    with batcher:
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
    assert np.isnan(found.rewards).tolist() == [True] * 3 + [False] * 7
    assert_repeats(caught.value, create_mortal, env_args)


def create_manager(seed: int, **arguments: Any) -> ParallelEnvManager:
    return ParallelEnvManager([UnluckyEnv] * 3, seed=seed, **arguments)


@pytest.mark.parametrize("env_args", [{"envs_per_worker": 2}, {"min_ready": 1}], ids=str)
def test_failures_of_environments_in_processes_come_again_here(
    env_args: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    batcher = EpisodeBatcher(
        5,
        6,
        create_agent=StepCounter,
        create_env=create_manager,
        env_args=env_args,
        n_threads=0,
        seeds=1,
    )
    error = failure_of(batcher)
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
    for env in (UnluckyEnv(end=0.0), Acting(1000)):
        error = failure_of_store(Pool([env], processes=1, pool_size=5000, seed=5))
        assert error.capsule.env_type == "OneEnv"
        assert error.capsule.n_actions == error.where.step + 1
        create_env: Any = type(env) if isinstance(env, UnluckyEnv) else lambda: Acting(1000)
        state = random.getstate()
        assert_repeats(error, create_env)
        assert random.getstate() == state
