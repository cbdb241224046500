"""Seeds are below 2**31 wherever they come to light, and episodes of one batcher share none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import (
    AGENT_ARCHS,
    Batcher,
    CrashCapsule,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    GymEnvInf,
    Learner,
    ParallelEnvManager,
    Pool,
    TemporalDictTensor,
    make_env,
    make_parallel_env,
    replay_crash,
)

from support.envs import CountingEnv
from support.meta import MarkovActor, Storage
from support.old_seeding import (
    OldSeedingEnv,
    OldTaskEnv,
    OwnActionsEnv,
    SeedTellingAgent,
    create_old,
)


def create_manager(seed: int, restarts: bool = False) -> ParallelEnvManager:
    return ParallelEnvManager([OldSeedingEnv] * 3, seed=seed, auto_reset=restarts)


def result_of(batcher: EpisodeBatcher | Batcher) -> TemporalDictTensor:
    result = batcher.get()
    assert result is not None
    assert result.info is not None
    return result


def check_range(seeds: Iterable[int]) -> None:
    assert all(0 <= seed < 2**31 for seed in seeds)


def episodes(create_env: Callable[..., Any], n_threads: int) -> list[TemporalDictTensor]:
    with EpisodeBatcher(
        2, 8, SeedTellingAgent, {}, create_env, {}, n_threads=n_threads, seeds=4
    ) as batcher:
        batcher.execute(11)
        batcher.reexecute()
        batcher.execute(3)
        return [result_of(batcher) for _ in range(3)]


def test_episodes_of_any_number_of_workers_have_the_same_short_seeds() -> None:
    collected = [episodes(create_old, n_threads) for n_threads in (0, 2)]
    collected.append(episodes(create_manager, 0))
    for results in collected:
        seeds = []
        for result in results:
            assert result.info is not None
            assert torch.equal(result["frame"][:, 0, 0], result.info["seed"])
            check_range(result["agent_seed"].flatten().tolist())
            seeds += result.info["seed"].tolist()
        check_range(seeds)
        assert len(set(seeds)) == 25
        assert seeds == [s for r in collected[0] for s in r.info["seed"].tolist()]  # type: ignore[union-attr]


def windows(create_env: Callable[..., Any], n_threads: int, n_lanes: int) -> list[list[int]]:
    """Per lane the seeds of its episodes, which have two steps each, over three resets."""
    with Batcher(
        4,
        None,
        SeedTellingAgent,
        {},
        create_env,
        {"restarts": True},
        n_threads=n_threads,
        seeds=4,
    ) as batcher:
        found: list[list[int]] = [[] for _ in range(n_lanes)]
        for n_windows in (3, 1, 5):
            batcher.reset()
            for _ in range(n_windows):
                batcher.execute()
            for _ in range(n_windows):
                result = result_of(batcher)
                check_range(result["agent_seed"].flatten().tolist())
                for lane, row in enumerate(result["frame"][:, ::2, 0].tolist()):
                    found[lane] += row
    return found


def test_lanes_that_restart_share_no_seed_and_have_the_same_for_any_number_of_workers() -> None:
    serial, two, three = (windows(create_old, n, 2 * max(1, n)) for n in (0, 2, 3))
    for lanes in (serial, two, three):
        assert lanes[:2] == serial
        seeds = [seed for lane in lanes for seed in lane]
        check_range(seeds)
        assert len(set(seeds)) == len(seeds) == 18 * len(lanes)
    assert two == three[:4]
    lanes = windows(create_manager, 0, 3)
    assert len({seed for lane in lanes for seed in lane}) == 54


def test_a_reset_with_windows_that_nobody_took_gives_new_seeds() -> None:
    arguments = (4, None, SeedTellingAgent, {}, create_old, {"restarts": True})
    runs = []
    for n_threads in (0, 1):
        with Batcher(*arguments, n_threads=n_threads, seeds=4) as batcher:  # type: ignore[arg-type]
            seeds = []
            for _ in range(4):
                batcher.reset()
                batcher.execute()
                seeds += result_of(batcher)["frame"][:, ::2, 0].flatten().tolist()
                batcher.execute()
                batcher.execute()
        assert len(set(seeds)) == len(seeds) == 16
        runs.append(seeds)
    assert runs[0] == runs[1]


def test_environments_that_are_reset_by_hand_share_no_seed() -> None:
    """By lanes that restart, by resets and by remotes of one manager, also without its ``seed``."""
    action = DictTensor({"action": torch.zeros(3, dtype=torch.int64)})
    with ParallelEnvManager([OldSeedingEnv] * 3, auto_reset=True) as manager:
        seeds: list[int] = []
        for n_steps in (5, 0, 9):
            observation, _ = manager.reset()
            seeds += observation["frame"].flatten().tolist()
            for _ in range(n_steps):
                _, (observation, _) = manager.step(action)
                if observation["initial_state"].any():
                    seeds += observation["frame"].flatten().tolist()
        for remote in manager.remotes:
            for _ in range(20):
                remote.send(("reset", None))
                seeds.append(int(remote.recv()[1][0]))
    check_range(seeds)
    assert len(set(seeds)) == len(seeds) == 3 * (3 + 1 + 5) + 60
    envs = [OldSeedingEnv() for _ in range(3)]
    alone = GymEnvInf(envs, seed=0)
    seeds = []
    for _ in range(3):
        observation, _ = alone.reset()
        seeds += observation["frame"].flatten().tolist()
        for _ in range(8):
            _, (observation, _) = alone.step(action)
            if observation["initial_state"].any():
                seeds += observation["frame"].flatten().tolist()
    check_range(seeds)
    assert len(set(seeds)) == len(seeds) == 45


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
                check_range(seeds)
                assert len(set(seeds)) == 10
                runs.append(seeds)
        assert runs[0] == runs[2]
        assert runs[1] == runs[3]
        assert runs[0][0] == 5


def test_episodes_of_a_pool_have_short_seeds_in_both_protocols() -> None:
    for envs in ([OldSeedingEnv(), OldSeedingEnv()], [OwnActionsEnv(), OwnActionsEnv()]):
        pool = Pool(envs, 2, 100, seed=3)
        with pool:
            for _ in range(4):
                pool.store()
            states, _, next_states, _, _ = pool.get_pool()
        assert states.shape[0] == 16
        seeds = states.flatten().tolist()
        check_range(seeds)
        assert next_states.tolist() == states.tolist()
        assert len(set(seeds)) == 8


def test_trials_and_learners_have_short_seeds() -> None:
    for seed in (0, 2**31 - 1, 2**31, 2**62 + 1):
        env = make_env(OldTaskEnv, 2, seed)
        check_range([env.unwrapped.episode_seed])
    make = partial(make_env, OldTaskEnv, 2, seed=9)
    with make_parallel_env(OldTaskEnv, 2, 2, seed=2**40) as manager:
        for train_env, parallel in ((make(), None), (None, manager)):
            storage = Storage()
            learner = Learner(
                MarkovActor(2), storage, train_env, range(3), AGENT_ARCHS.Memory_Markov, seed=1
            )
            learner.collect_rollouts_parallel(5, True, parallel_env=parallel)
            learner.collect_rollouts_parallel(6, True, parallel_env=parallel)
            seeds = [int(observations[0][0]) for observations, *_ in storage.episodes]
            check_range(seeds)
            assert len(set(seeds)) == 11


@pytest.mark.parametrize("n_threads", [0, 1])
def test_a_crash_is_replayed_with_the_same_short_seeds(n_threads: int, tmp_path: Any) -> None:
    with EpisodeBatcher(
        4,
        8,
        SeedTellingAgent,
        {},
        create_old,
        {"n_lanes": 1, "fails_at": 1},
        n_threads=n_threads,
        seeds=4,
    ) as batcher:
        batcher.execute(4)
        with pytest.raises(EnvError) as caught:
            batcher.get()
    capsule = caught.value.capsule
    assert capsule is not None
    assert capsule.seed is not None
    assert capsule.worker_seed is not None
    check_range([capsule.seed, capsule.worker_seed])
    path = capsule.save(tmp_path / "crash.npz")
    with pytest.raises(KeyError) as again:
        replay_crash(path, create_old, {"n_lanes": 1, "fails_at": 1})
    assert str(again.value) in capsule.error  # it drew the same number


def test_capsules_with_long_seeds_are_still_replayed(caplog: pytest.LogCaptureFixture) -> None:
    class Env(CountingEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            assert seed == 2**62 + 5
            return super().reset(seed=seed)

        def step(self, action: Any) -> Any:
            raise KeyError("goal")

    capsule = CrashCapsule(
        call="step",
        where=EnvError("it", fix="").where._replace(lane=0),
        error="env.step raised KeyError: 'goal'",
        seed=2**62 + 5,
        worker_seed=2**62 + 7,
        actions={"action": np.zeros(1, np.int64)},
    )
    with pytest.raises(KeyError, match="goal"):
        replay_crash(capsule, Env)
    assert "seeds were longer" in caplog.text
