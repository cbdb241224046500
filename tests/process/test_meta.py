"""Meta-RL with environments in worker processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rlpool import (
    AGENT_ARCHS,
    EnvError,
    Learner,
    ParallelEnvManager,
    SpecError,
    UsageError,
    WorkerDiedError,
    WorkerStartupError,
    make_env,
    make_parallel_env,
)

from support.meta import MarkovActor, MemoryActor, RaggedTaskEnv, Storage

RAGGED = "support.meta:Ragged-v0"
ARGUMENTS = {"limit": 6, "noise": 1.0}


class FailingTask(RaggedTaskEnv):
    """Raises in the first step of task 6."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.task == 6:
            raise KeyError("goal")
        return super().step(action)


@pytest.fixture(scope="module")
def three() -> Iterator[ParallelEnvManager]:
    with make_parallel_env(RAGGED, 2, 3, seed=1, **ARGUMENTS) as env:
        yield env


def test_the_manager_knows_what_the_trials_are(three: ParallelEnvManager) -> None:
    assert (three.num_envs, three.n_tasks, three.horizon_bamdp) == (3, 7, 12)
    assert three.observation_space == make_env(RAGGED, 2, **ARGUMENTS).observation_space


def test_the_manager_knows_the_tasks_and_what_lies_behind_the_wrappers(
    three: ParallelEnvManager,
) -> None:
    assert three.all_tasks == list(range(7))
    for name, value in (("noise", 1.0), ("horizon_bamdp", 12)):
        three.remotes[1].send(("get_attr", {"attr": name}))
        assert three.remotes[1].recv() == ("attr", value)


def test_actions_of_another_kind_are_refused(three: ParallelEnvManager) -> None:
    three.reset()
    with pytest.raises(SpecError, match="'action' is complex64"):
        three.step_lanes([0], {"action": np.zeros((3, 2), np.complex64)})


def test_a_task_reaches_its_environment_by_remote(three: ParallelEnvManager) -> None:
    for lane, task in enumerate((5, 2, 6)):
        three.remotes[lane].send(("reset", {"task": task}))
    observations = [remote.recv()[1] for remote in three.remotes]
    assert [observation[1] for observation in observations] == [5, 2, 6]
    three.remotes[0].send(("step", {"action": [0.0, 0.0]}))
    kind, (observation, _, done, info) = three.remotes[0].recv()
    assert kind == "transition"
    assert observation[1] == 5
    assert not done
    assert "done_mdp" in info


@pytest.mark.parametrize(
    ("envs_per_worker", "is_random", "min_ready"),
    [(1, False, None), (2, True, None), (2, False, 1)],
)
def test_processes_give_the_bits_of_one_environment(
    envs_per_worker: int, is_random: bool, min_ready: int | None
) -> None:
    def collected(parallel_env: Any) -> tuple[list[int], list[list[bytes]]]:
        storage = Storage()
        train_env = make_env(RAGGED, 2, **ARGUMENTS)
        learner = Learner(
            MemoryActor("lstm"), storage, train_env, range(5), AGENT_ARCHS.Memory, seed=3
        )
        steps = [learner.collect_rollouts_parallel(n, is_random, parallel_env) for n in (9, 2)]
        return steps, storage.as_bytes()

    with make_parallel_env(
        RAGGED, 2, 2, 1, envs_per_worker=envs_per_worker, min_ready=min_ready, **ARGUMENTS
    ) as env:
        assert env.num_envs == 2 * envs_per_worker
        assert collected(env) == collected(None)


def test_a_failing_environment_says_which_worker_it_was_and_the_others_go_on() -> None:
    storage = Storage()
    with make_parallel_env(FailingTask, 2, 2, seed=1, **ARGUMENTS) as env:
        learner = Learner(MarkovActor(), storage, None, [0, 6], "memory_markov", seed=4)
        with pytest.raises(EnvError, match="KeyError: 'goal'") as caught:
            learner.collect_rollouts_parallel(10, parallel_env=env)
        where = caught.value.where
        assert where.episode is not None
        assert where.lane == where.worker == where.episode % 2
        assert where.env_info == {"task": 6}
        assert "parallel_env=None" in str(caught.value)
        assert learner.n_rollouts_total == len(storage.episodes) <= where.episode
        learner.train_tasks = [1, 2]
        n_steps = learner.collect_rollouts_parallel(10, parallel_env=env)
        assert n_steps == sum(len(episode[0]) for episode in storage.episodes[-10:])


def test_a_death_is_an_error_in_time_and_a_closed_manager_is_refused() -> None:
    learner = Learner(MarkovActor(), Storage(), None, None, "memory_markov", seed=4)
    with make_parallel_env(RAGGED, 2, 2, seed=1, on_worker_failure="raise", **ARGUMENTS) as env:
        os.kill(env.workers[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            learner.collect_rollouts_parallel(10, parallel_env=env)
    with pytest.raises(UsageError, match="closed"):
        learner.collect_rollouts_parallel(1, parallel_env=env)


def test_what_cannot_be_imported_in_a_worker_is_said_at_the_start() -> None:
    with pytest.raises(WorkerStartupError, match="No module named 'nowhere'"):
        make_parallel_env("nowhere:Ragged-v0", 2, 1)


def test_workers_make_environments_of_their_own_seeds() -> None:
    with make_parallel_env(RAGGED, 2, 2, seed=1, **ARGUMENTS) as env:
        for remote in env.remotes:
            remote.send(("reset", {"task": 3}))
        first, second = (remote.recv()[1].tolist() for remote in env.remotes)
        assert first != second
