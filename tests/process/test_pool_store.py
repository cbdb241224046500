"""Pool.store(): one episode of each environment, each in its own process."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from process.watching import is_running, worker_pids

from rlpool import (
    EnvError,
    Pool,
    SpecError,
    UsageError,
    WorkerDiedError,
    WorkerStartupError,
    WorkerTimeoutError,
)

from support.acting_envs import (
    ActingEnv,
    DuckEnv,
    NoisyEnv,
    Unloadable,
    actions,
    states,
)
from support.envs import CountingEnv
from support.faults import strike
from support.striking import Alarm, alarms

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(200)]

KEYS = ("frame", "action", "_frame", "_reward", "_done")


@pytest.fixture
def make() -> Iterator[Callable[..., Pool]]:
    """Return a function that makes pools in time order per process, closed after the test."""
    made: list[Pool] = []

    def make_pool(envs: list[Any], **options: Any) -> Pool:
        defaults = {"pool_size": 10_000 * len(envs), "random": False, "seed": 0}
        made.append(Pool(envs, **{**defaults, **options}))
        return made[-1]

    yield make_pool
    for pool in made:
        pool.close()


def stored(pool: Pool) -> list[dict[str, Any]]:
    """Return the data that one ``store()`` adds for each environment."""
    pool.clear()
    pool.store()
    every, stops = pool.transitions(), np.cumsum(pool.lengths)
    return [
        {key: tensor[stop - n : stop].numpy() for key, tensor in every.items()}
        for n, stop in zip(pool.lengths, stops, strict=True)
    ]


def assert_same(episode: dict[str, Any], expected: tuple[Any, ...]) -> None:
    for key, wanted in zip(KEYS, expected, strict=True):
        assert episode[key].dtype == wanted.dtype
        np.testing.assert_array_equal(episode[key], wanted)


# Stored data --------------------------------------------------------------------------------------


def test_random_sub_pools_share_the_episodes_and_each_process_starts_with_its_own(
    make: Any,
) -> None:
    pool = make([ActingEnv(10, number) for number in range(2)], pool_size=50, random=True)
    assert [array.shape for array in pool.get_pool()] == [(0,)] * 5
    pool.store()
    assert [a.shape for a in pool.get_pool()] == [(20, 4), (20,), (20, 4), (20,), (20,)]
    assert sum(pool.lengths) == 20
    expected = [ActingEnv.expected(10, 1, number) for number in range(2)]
    for array, *wanted in zip(pool.get_pool(), *expected, strict=True):
        assert sorted(map(str, array)) == sorted(map(str, np.concatenate(wanted)))
    pool = make([ActingEnv(1, number) for number in range(4)], random=True)
    pool.store()
    assert pool.get_pool()[0][:, 3].tolist() == [0, 1, 2, 3]


def test_without_random_a_sub_pool_holds_its_processs_episodes_in_time_order(make: Any) -> None:
    lengths = [1, 300, 40]
    envs = [ActingEnv(length, number) for number, length in enumerate(lengths)]
    pool = make(envs)
    for n_resets in (1, 2):
        for number, episode in enumerate(stored(pool)):
            assert_same(episode, ActingEnv.expected(lengths[number], n_resets, number))
    assert envs[0].n_resets == 0
    batch = pool.sample_sequences(sum(lengths), 300)  # the ends of episodes are known
    left = torch.tensor(lengths)[batch["frame"][:, 0, 3].long()] - batch["frame"][:, 0, 0].long()
    assert torch.equal(batch.lengths, left)


def test_a_policy_acts_in_gymnasium_environments(make: Any) -> None:
    leaning = lambda state: int(state[2] + state[3] > 0)  # noqa: E731  (lambdas are sent, too)
    pool = make([gymnasium.make("CartPole-v1", max_episode_steps=150)], policy=leaning)
    (episode,) = stored(pool)
    assert len(episode["_reward"]) == 150
    assert episode["_done"].nonzero()[0].tolist() == [149]
    assert not episode["_terminated"].any()  # truncated
    np.testing.assert_array_equal(episode["frame"][1:], episode["_frame"][:-1])
    assert episode["action"].tolist() == [leaning(state) for state in episode["frame"]]


@pytest.mark.slow  # because processes are spawned
def test_a_policy_may_hold_a_multiprocessing_lock(make: Any) -> None:
    context = multiprocessing.get_context("spawn")
    lock, n_calls = context.Lock(), context.Value("i", 0)

    def policy(state: Any) -> int:
        with lock:
            n_calls.value += 1
        return 0

    pool = make([CountingEnv(), CountingEnv()], policy=policy)
    pool.store()
    assert n_calls.value == len(pool) > 2


def test_environments_incompatible_with_each_other_or_the_pool_are_refused(make: Any) -> None:
    for envs in (
        [states(*[np.zeros(4)] * 3), DuckEnv()],
        [actions(0, 0), actions(0, [0, 1])],
        [states(*[{"action": 0.0}] * 3)],
    ):
        with pytest.raises(SpecError):
            make(envs).store()


# Seeds --------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_pool_with_different_noise_per_process(make: Any) -> None:
    def data(n: int, **options: Any) -> list[Any]:
        pool = make([NoisyEnv() for _ in range(n)], **options)
        return [episode["frame"].tolist() for _ in range(2) for episode in stored(pool)]

    first, fewer, other = data(2), data(1), data(1, seed=4)
    assert fewer == first[::2]
    columns = np.array([episode[0] for episode in (*first, *other)]).T
    assert columns.shape == (8, 6)
    assert all(len(set(column)) == 6 for column in columns)
    pool, same = (make([NoisyEnv(), NoisyEnv()], random=True, seed=seed) for seed in (1, 2))
    pool.store()
    same.load_state_dict(pool.state_dict())
    for each in (pool, same):  # a resumed pool stores the same data as the saved one
        each.store()
    assert pool.lengths == same.lengths
    assert torch.equal(pool.transitions()["frame"], same.transitions()["frame"])


# Failures -----------------------------------------------------------------------------------------


def struck(kind: str, episode: int = 1) -> ActingEnv:
    return ActingEnv(5, script={(episode, 2): partial(strike, kind)})


def test_a_failing_environment_raises_and_no_stored_data_is_lost(make: Any) -> None:
    pool = make([ActingEnv(40), struck("raise", episode=2)])
    pool.store()
    before = pool.transitions()
    with pytest.raises(EnvError, match="'struck'") as caught:
        pool.store()
    where = caught.value.where
    assert (where.worker, where.step) == (1, 2)
    assert torch.equal(pool.transitions()["frame"], before["frame"])
    assert not worker_pids()
    assert_same(stored(pool)[1], ActingEnv.expected(5, n_resets=1))  # in a new process


def test_a_dead_process_is_replaced(make: Any) -> None:
    pool = make([ActingEnv(40), struck("sigkill")])
    with pytest.raises(WorkerDiedError, match="worker 1"):
        pool.store()
    assert not worker_pids()
    pool = make([ActingEnv(4)])  # between runs as well
    pool.store()
    (pid,) = worker_pids()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        pool.store()
    assert_same(stored(pool)[0], ActingEnv.expected(4))


@pytest.mark.slow
def test_a_hung_process_is_killed(make: Any) -> None:
    with pytest.raises(WorkerTimeoutError, match="worker 1"):
        make([ActingEnv(40), struck("hang")], timeout=0.7).store()
    assert not worker_pids()


def test_an_interrupted_run_can_be_followed_by_another(make: Any) -> None:
    pool = make([ActingEnv(3), struck("hang", episode=2)])
    pool.store()
    with alarms():
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Alarm):
            pool.store()
    assert_same(stored(pool)[1], ActingEnv.expected(5, n_resets=1))


def test_an_environment_or_a_policy_that_cannot_be_loaded_is_named(make: Any) -> None:
    with pytest.raises(WorkerStartupError, match="environment 1"):
        make([ActingEnv(), Unloadable()]).store()
    lock = threading.Lock()
    with pytest.raises(WorkerStartupError, match=r"policy.*'lock'"):
        make([CountingEnv()], policy=lambda state: lock)


# Life ---------------------------------------------------------------------------------------------


def test_processes_end_on_close_and_with_the_pool(make: Any, tmp_path: Path) -> None:
    env = ActingEnv(3)
    env.closes = str(tmp_path / "closed")
    pool = make([env])
    assert not worker_pids()  # nothing starts before the first run
    pool.store()
    pool.close()
    pool.close()
    assert not worker_pids()
    assert Path(env.closes).exists()
    assert len(pool) == 3
    with pytest.raises(UsageError, match="closed"):
        pool.store()
    dropped = Pool([ActingEnv(3)], pool_size=5)
    dropped.store()
    pids = worker_pids()
    gc.disable()
    try:
        del dropped
        assert not any(map(is_running, pids))
    finally:
        gc.enable()
