"""Seeds are below 2**31 wherever they come to light, and episodes of one batcher share none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch

from rlpool import (
    AGENT_ARCHS,
    Batcher,
    DictTensor,
    EpisodeBatcher,
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
    SeedTellingAgent,
    create_old,
)

pytestmark = pytest.mark.promise("I2")


def create_manager(seed: int, restarts: bool = False) -> ParallelEnvManager:
    return ParallelEnvManager([OldSeedingEnv] * 3, seed=seed, auto_reset=restarts)


def check_range(seeds: Iterable[int]) -> None:
    assert all(0 <= seed < 2**31 for seed in seeds)


def check_all_differ(seeds: list[int], n: int) -> None:
    check_range(seeds)
    assert len(set(seeds)) == len(seeds) == n


def episode_seeds(create_env: Callable[..., Any], n_threads: int) -> list[int]:
    seeds: list[int] = []
    with EpisodeBatcher(2, 8, SeedTellingAgent, {}, create_env, {}, n_threads, seeds=4) as batcher:
        batcher.execute(11)
        batcher.reexecute()
        batcher.execute(3)
        for _ in range(3):
            result: Any = batcher.get()
            assert torch.equal(result["frame"][:, 0, 0], result.info["seed"])
            check_range(result["agent_seed"].flatten().tolist())
            seeds += result.info["seed"].tolist()
    return seeds


def test_episodes_of_any_number_of_workers_have_the_same_short_seeds() -> None:
    seeds = episode_seeds(create_old, 0)
    check_all_differ(seeds, 25)
    assert episode_seeds(create_old, 2) == episode_seeds(create_manager, 0) == seeds


def windows(create_env: Callable[..., Any], n_threads: int, n_lanes: int) -> list[list[int]]:
    """Per lane the seeds of its episodes, which have two steps each, over three resets."""
    restarts = {"restarts": True}
    found: list[list[int]] = [[] for _ in range(n_lanes)]
    with Batcher(
        4, None, SeedTellingAgent, {}, create_env, restarts, n_threads, seeds=4
    ) as batcher:
        for n_windows, n_taken in ((3, 3), (3, 1), (5, 5)):  # two of the second nobody takes
            batcher.reset()
            for _ in range(n_windows):
                batcher.execute()
            for _ in range(n_taken):
                result: Any = batcher.get()
                check_range(result["agent_seed"].flatten().tolist())
                for lane, row in enumerate(result["frame"][:, ::2, 0].tolist()):
                    found[lane] += row
    return found


def test_lanes_that_restart_share_no_seed_and_have_the_same_for_any_number_of_workers() -> None:
    serial, two = windows(create_old, 0, 2), windows(create_old, 2, 4)
    assert two[:2] == serial
    for lanes in (two, windows(create_manager, 0, 3)):
        check_all_differ([seed for lane in lanes for seed in lane], 18 * len(lanes))


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
    with Pool([OldSeedingEnv(), OwnActionsEnv()], 2, 100, seed=3) as pool:
        for _ in range(4):
            pool.store()
        states, _, next_states, _, _ = pool.get_pool()
    assert next_states.tolist() == states.tolist()
    check_all_differ(sorted(set(states.flatten().tolist())), 8)


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
