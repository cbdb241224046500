"""A failed episode can be repeated: by its number with the policy, by its actions without."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlpool import (
    AgentError,
    Batcher,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    GymEnv,
    ParallelEnvManager,
    SpecError,
    UsageError,
    WorkerDiedError,
    WorkerError,
    replay,
)

from support.agents import FunctionAgent, StepCounter, zeros
from support.envs import create_counting
from support.unlucky import UnluckyEnv, UnluckyError, create_unlucky

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(240)]

N_EPISODES = 40
TASKS = {"task": torch.arange(N_EPISODES)}


def make(create_env: Any, env_args: Any = None, **arguments: Any) -> EpisodeBatcher:
    return EpisodeBatcher(5, 6, StepCounter, {}, create_env, env_args, seeds=3, **arguments)


def failure_of(create_env: Any, env_args: Any = None, **arguments: Any) -> WorkerError:
    """The failure of the first request that has one, after one that has none."""
    with make(create_env, env_args, **arguments) as batcher:
        batcher.seek(7)
        batcher.execute(N_EPISODES, env_info=TASKS)
        with pytest.raises(WorkerError) as caught:
            batcher.get()
    error = caught.value
    assert error.where.row is not None
    assert error.where.episode == error.where.row + 7
    return pickle.loads(pickle.dumps(error))


def assert_replayed(error: WorkerError, env: Any) -> None:
    with pytest.raises(UnluckyError) as caught:
        replay(env, error)
    assert error.what.endswith(f"raised UnluckyError: {caught.value}")


def test_the_number_of_an_episode_repeats_its_failure() -> None:
    env_args = {"chance": 0.01, "end": 0.0}
    error = failure_of(create_unlucky, env_args, n_threads=2)
    assert error.options == {"task": error.where.row}
    assert len(error.actions) == error.where.step + 1
    with make(create_unlucky, env_args, n_workers=0) as batcher:
        batcher.seek(error.where.episode)
        row = error.where.row
        batcher.execute(1, env_info={"task": TASKS["task"][row : row + 1]})
        with pytest.raises(EnvError) as caught:
            batcher.get()
    again = caught.value
    assert isinstance(again.__cause__, UnluckyError)
    assert (again.what, again.where[4:6]) == (error.what, error.where[4:6])  # step and seed
    assert again.actions.tolist() == error.actions.tolist()
    for env in (lambda: UnluckyEnv(**env_args)), UnluckyEnv(**env_args):
        assert_replayed(error, env)


ACTIONS = spaces.Dict(
    a=spaces.Tuple((spaces.Discrete(5), spaces.Box(-1, 1, (2,), np.float32))), b=spaces.Discrete(3)
)


def act_nested(state: Any, observation: Any, *_: Any) -> Any:
    noise = observation["noise"]
    output = {
        "action/a/0": (noise[:, 0] * 5).long(),
        "action/a/1": noise[:, 1:3],
        "action/b": (noise[:, 3] * 3).long(),
    }
    return DictTensor(), DictTensor(output), DictTensor()


def make_nested() -> UnluckyEnv:
    return UnluckyEnv(action_space=ACTIONS, end=0.0)


class BrokenEnv(UnluckyEnv):
    """Never gets through a reset."""

    def reset(self, **arguments: Any) -> Any:
        raise UnluckyError("reset")


def test_a_failure_in_the_first_reset_names_its_episode() -> None:
    def create_env(seed: int) -> GymEnv:
        return GymEnv([BrokenEnv() for _ in range(2)], seed)

    with make(create_counting, n_workers=0) as batcher:
        batcher.seek(7)
        batcher.execute(2)
        seeds = batcher.get().info["seed"]
    error = failure_of(create_env, n_workers=1)
    assert (error.where.row, error.where.episode, error.where.seed) == (0, 7, seeds[0])
    assert error.options == {"task": 0}
    assert_replayed(error, BrokenEnv)


def test_actions_have_the_form_of_the_space() -> None:
    agent = lambda: FunctionAgent(act_nested, n_noise=4)  # noqa: E731
    create_env = lambda seed: GymEnv([make_nested(), make_nested()], seed)  # noqa: E731
    with EpisodeBatcher(5, 6, agent, {}, create_env, n_workers=0, seeds=1) as batcher:
        batcher.execute(4)
        with pytest.raises(EnvError) as caught:
            batcher.get()
    actions, n_steps = caught.value.actions, caught.value.where.step + 1
    assert actions.keys() == {"a", "b"}
    first, second = actions["a"]
    assert (first.shape, second.shape) == ((n_steps,), (n_steps, 2))
    assert_replayed(caught.value, make_nested)


def create_manager(seed: int) -> ParallelEnvManager:
    return ParallelEnvManager([UnluckyEnv] * 3, seed=seed, envs_per_worker=2)


def test_environments_in_processes_are_repeated_here() -> None:
    assert_replayed(failure_of(create_manager, n_workers=0), UnluckyEnv)
    with ParallelEnvManager([UnluckyEnv] * 3, seed=0, on_worker_failure="raise") as manager:
        with pytest.raises(EnvError) as caught:  # noqa: PT012
            while True:
                manager.reset_lanes([0, 1, 2], [1, 2, 3], [None] * 3)
                for t in range(100):
                    manager.step_lanes([0, 1, 2], {"action": np.array([t, 7, t])})
        assert len(caught.value.actions) == caught.value.where.step + 1
        assert_replayed(caught.value, UnluckyEnv)


@pytest.mark.parametrize(("n_threads", "restarts"), [(0, False), (2, True)])
def test_failures_in_windows_carry_all_actions_of_the_episode(
    n_threads: int, restarts: bool
) -> None:
    env_args = {"restarts": restarts, "end": 0.1 if restarts else 0.0, "chance": 0.02}
    options: Any = {"n_workers": n_threads, "seeds": 5}
    with Batcher(4, None, StepCounter, {}, create_unlucky, env_args, **options) as batcher:
        batcher.reset()
        with pytest.raises(EnvError) as caught:  # noqa: PT012
            while True:
                batcher.execute()
                batcher.get()
    error = caught.value
    assert error.where.episode is None
    assert len(error.actions) == error.where.step + 1
    assert_replayed(error, UnluckyEnv(chance=0.02, end=env_args["end"]))


class Mortal(UnluckyEnv):
    """Kills its process in one of its steps; in each of several episodes, or only once."""

    def __init__(self, step: int, marker: str = "") -> None:
        super().__init__(chance=0.0, end=0.0)
        self.marker, self.dies_at = marker, step

    @property
    def t(self) -> int:
        """Steps made; the course has two entries for the reset and for each of them."""
        return len(self.course) // 2 - 1

    def step(self, action: Any) -> Any:
        if self.t == self.dies_at and not os.path.exists(self.marker):
            if self.marker:
                Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.chance = 1.0 if self.marker and self.t == 11 else 0.0
        return super().step(action)


def create_mortal(seed: int, **arguments: Any) -> GymEnv:
    return GymEnv([Mortal(**arguments)], seed)


@pytest.mark.parametrize(("step", "policy"), [(3, {"on_worker_failure": "raise"}), (12, {})])
def test_the_actions_of_an_episode_survive_its_worker(step: int, policy: dict[str, Any]) -> None:
    error = failure_of(create_mortal, {"step": step}, n_workers=1, **policy)
    assert isinstance(error, WorkerDiedError)
    assert error.where.step == step
    assert error.actions.tolist() == list(range(1, step + 2))
    replayed = replay(UnluckyEnv(chance=0.0, end=0.0), error)
    assert (replayed.n_steps, replayed.has_ended) == (step + 1, False)
    assert np.array_equal(replayed.observation, replay(replayed.env, error).observation)


def test_an_episode_that_a_successor_took_over_is_repeated(tmp_path: Path) -> None:
    env_args = {"step": 6, "marker": str(tmp_path / "marker")}
    with Batcher(4, None, StepCounter, {}, create_mortal, env_args, seeds=0) as batcher:
        batcher.reset()
        for _ in range(2):
            batcher.execute()
            batcher.get()
        assert (tmp_path / "marker").exists()
        batcher.execute()
        with pytest.raises(EnvError) as caught:
            batcher.get()
    assert caught.value.actions.tolist() == list(range(1, 13))
    assert_replayed(caught.value, Mortal(**env_args))


def test_an_agent_that_fails_leaves_the_environment_at_that_step() -> None:
    def fail_late(state: Any, observation: Any, *_: Any) -> Any:
        if (observation["frame"][:, 0] > 0.95).any():
            raise RuntimeError("late")
        return None, DictTensor({"action": zeros(observation)}), None

    env_args = {"chance": 0.0, "end": 0.0}
    arguments: Any = {"n_workers": 0, "seeds": 1}
    agent = lambda: FunctionAgent(fail_late)  # noqa: E731
    with EpisodeBatcher(5, 9, agent, {}, create_unlucky, env_args, **arguments) as batcher:
        batcher.execute(2)
        with pytest.raises(AgentError, match="in one call for the rows 0, 1") as caught:
            batcher.get()
    error = caught.value
    assert len(error.actions) == error.where.step
    replayed = replay(UnluckyEnv(**env_args), error)
    assert replayed.n_steps == error.where.step
    assert replayed.observation.shape == (3,)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda error: replay(UnluckyEnv, "crash.npz"), SpecError, "error"),
        (lambda error: replay(3, error), SpecError, "env"),
        (lambda error: replay(UnluckyEnv, EnvError("it broke")), UsageError, "actions"),
    ],
)
def test_what_cannot_be_replayed_is_refused(call: Any, kind: Any, words: str) -> None:
    error = EnvError("it broke", actions=np.zeros(1, np.int64))
    error.where = error.where._replace(seed=1)
    with pytest.raises(kind, match=words):
        call(error)
