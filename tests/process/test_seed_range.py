"""Seeds are below 2**31 wherever they come to light, and episodes of one batcher share none."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch

from rlpool import (
    AGENT_ARCHS,
    DictTensor,
    GymEnvInf,
    Learner,
    ParallelEnvManager,
    Pool,
    make_env,
    make_parallel_env,
)

from support.meta import MarkovActor, Storage
from support.old_seeding import (
    OldSeedingEnv,
    OldTaskEnv,
    OwnActionsEnv,
    ResetSeededEnv,
)

pytestmark = pytest.mark.promise("I2")


def check_range(seeds: Iterable[int]) -> None:
    assert all(0 <= seed < 2**31 for seed in seeds)


def check_all_differ(seeds: list[int], n: int) -> None:
    check_range(seeds)
    assert len(set(seeds)) == len(seeds) == n


def test_environments_that_are_reset_by_hand_share_no_seed() -> None:
    """By lanes that restart, by resets and by remotes of one manager, also without its ``seed``."""

    def seeds_of(env: Any) -> list[int]:
        seeds: list[int] = []
        action = DictTensor({"action": torch.zeros(3, dtype=torch.int64)})
        for n_steps in (5, 0, 9):
            observation, _ = env.reset()
            seeds += observation["frame"].flatten().tolist()
            for _ in range(n_steps):
                _, (observation, _) = env.step(action)
                if observation["initial_state"].any():
                    seeds += observation["frame"].flatten().tolist()
        return seeds

    check_all_differ(seeds_of(GymEnvInf([OldSeedingEnv() for _ in range(3)], seed=0)), 27)
    with ParallelEnvManager([OldSeedingEnv] * 3, auto_reset=True) as manager:
        seeds = seeds_of(manager)
        for remote in manager.remotes:
            for _ in range(20):
                remote.send(("reset", None))
                seeds.append(int(remote.recv()[1][0]))
    check_all_differ(seeds, 27 + 60)


def test_remotes_go_on_from_a_seed_that_they_are_given() -> None:
    with ParallelEnvManager([OldSeedingEnv] * 2, seed=0) as manager:
        runs = []
        for remote in manager.remotes:
            for given in (5, 2**62):
                remote.send(("seed", {"seed": given}))
                assert remote.recv() == ("done", None)
                seeds = []
                for _ in range(10):
                    remote.send(("reset", None))
                    seeds.append(int(remote.recv()[1][0]))
                check_all_differ(seeds, 10)
                runs.append(seeds)
        assert runs[:2] == runs[2:]
        assert runs[0][0] == 5


def test_episodes_of_a_pool_have_short_seeds_in_both_protocols() -> None:
    with Pool([OldSeedingEnv(), OwnActionsEnv(), ResetSeededEnv()], 3, 100, seed=3) as pool:
        for _ in range(4):
            pool.store()
        states, _, next_states, _, _ = pool.get_pool()
    assert next_states.tolist() == states.tolist()
    check_all_differ(sorted(set(states.flatten().tolist())), 12)


def test_trials_and_learners_have_short_seeds() -> None:
    for seed in (0, 2**31 - 1, 2**31, 2**62 + 1):
        check_range([make_env(OldTaskEnv, 2, seed).unwrapped.episode_seed])
    make = partial(make_env, OldTaskEnv, 2, seed=9)
    with make_parallel_env(OldTaskEnv, 2, 2, seed=2**40) as manager:
        for train_env, parallel in ((make(), None), (None, manager)):
            storage = Storage()
            learner = Learner(
                MarkovActor(2), storage, train_env, range(3), AGENT_ARCHS.Memory_Markov, seed=1
            )
            learner.collect_rollouts_parallel(5, True, parallel_env=parallel)
            learner.collect_rollouts_parallel(6, True, parallel_env=parallel)
            check_all_differ([int(seen[0][0]) for seen, *_ in storage.episodes], 11)
