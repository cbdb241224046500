"""Meta-RL with environments in worker processes."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from rlpool import (
    AGENT_ARCHS,
    EnvError,
    Learner,
    UsageError,
    make_env,
    make_parallel_env,
)

from support.meta import (
    DrawnTaskEnv,
    LegacyDrawingEnv,
    MarkovActor,
    MemoryActor,
    RaggedTaskEnv,
    Storage,
    TaskFirstEnv,
)
from support.variants import variants

RAGGED = "support.meta:Ragged-v0"
ARGUMENTS = {"limit": 6, "noise": 1.0}


class FailingTask(RaggedTaskEnv):
    """Environment that raises in the first step of task 6."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.task == 6:
            raise KeyError("goal")
        return super().step(action)


def test_the_manager_passes_tasks_on_to_its_trials() -> None:
    with make_parallel_env(RAGGED, 2, 2, seed=1, **ARGUMENTS) as two:
        assert (two.num_envs, two.n_tasks, two.horizon_bamdp) == (2, 7, 12)
        assert two.observation_space == make_env(RAGGED, 2, **ARGUMENTS).observation_space

        def asked(name: str, arguments: dict[str, Any]) -> list[Any]:
            for remote in two.remotes:
                remote.send((name, arguments))
            return [remote.recv()[1] for remote in two.remotes]

        # Each is created and reset with its own seed.
        first, second = asked("get_attr", {"attr": "action_space"})
        assert first.sample().tolist() != second.sample().tolist()
        first, second = asked("reset", {"task": 3})
        assert first[1] == second[1] == 3
        assert first.tolist() != second.tolist()
        assert "done_mdp" in asked("step", {"action": [0.0, 0.0]})[0][3]


class KillsWorkers(Storage):
    """Storage that kills a worker at every fifth rollout."""

    pids: Any = staticmethod(list)  # of the workers that there are

    def add_episode(self, *columns: Any) -> None:
        super().add_episode(*columns)
        if len(self.episodes) % 5 == 0:
            for pid in self.pids()[len(self.episodes) // 5 % 2 :][:1]:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.promise("I2")
@pytest.mark.parametrize(
    ("make", "tasks"),
    variants([(TaskFirstEnv, range(7))], [(DrawnTaskEnv, None), (LegacyDrawingEnv, [None])]),
)
def test_results_match_a_single_environment_bit_for_bit_even_if_workers_are_killed(
    make: Any, tasks: Any
) -> None:
    def collect(parallel_env: Any, storage: Any) -> list[list[bytes]]:
        env = make_env(make, 2, show_start=True)
        learner = Learner(MemoryActor(), storage, env, tasks, AGENT_ARCHS.Memory, seed=3)
        for n_rollouts in (6, 7):
            learner.collect_rollouts_parallel(n_rollouts, parallel_env=parallel_env)
        rows: list[list[bytes]] = storage.as_bytes()
        return rows

    expected = collect(None, Storage())
    options: Any = {"show_start": True, "envs_per_worker": 2, "min_ready": 1}
    with make_parallel_env(make, 2, 2, seed=1, **options) as env:
        assert collect(env, Storage()) == expected
        pids = [worker.pid for worker in env.workers]
        storage = KillsWorkers()
        storage.pids = lambda: [worker.pid for worker in env.workers]
        assert collect(env, storage) == expected
        assert pids != [worker.pid for worker in env.workers]


def test_failures_report_where_and_keep_complete_rollouts() -> None:
    storage = Storage()
    with make_parallel_env(FailingTask, 2, 2, seed=1, **ARGUMENTS) as env:
        learner = Learner(MarkovActor(), storage, None, [0, 6], "memory_markov", seed=4)
        with pytest.raises(EnvError, match="KeyError: 'goal'") as caught:
            learner.collect_rollouts_parallel(10, parallel_env=env)
        where = caught.value.where
        assert where.row is not None
        assert where.lane == where.worker == where.row % 2
        assert where.env_info == {"task": 6}
        assert "step it in this process" in str(caught.value)
        assert learner.n_rollouts_total == len(storage.episodes) <= where.row
        learner.train_tasks = [1, 2]
        n_steps = learner.collect_rollouts_parallel(10, parallel_env=env)
        assert n_steps == sum(len(episode[0]) for episode in storage.episodes[-10:])
    with pytest.raises(UsageError, match="closed"):
        learner.collect_rollouts_parallel(1, parallel_env=env)
