"""Pool.store(): an episode per environment, in processes, and which sub-pools it goes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from rlpool import EnvError, Pool

from support.envs import CountingEnv, FailingEnv


class OwnActions:
    """Chooses its own actions, updates its state in place, ends after ten steps."""

    def __init__(self, number: int, length: int = 10) -> None:
        self.number, self.length = number, length
        self.n_episodes = 0

    def reset(self) -> tuple[Any, int]:
        self.n_episodes += 1
        self.state = np.zeros(4, np.float32)
        self.state[:] = [self.number, self.n_episodes, 0, 0]
        return self.state, 1000

    def step(self, action: int) -> tuple[int, Any, float, bool]:
        self.state[2] += 1
        self.state[3] = action
        t = int(self.state[2])
        return t, self.state, float(t), t == self.length


@pytest.fixture
def pools() -> Iterator[list[Pool]]:
    """Pools to be closed after the test."""
    made: list[Pool] = []
    yield made
    for pool in made:
        pool.close()


def make(pools: list[Pool], *arguments: Any, **options: Any) -> Pool:
    pools.append(Pool(*arguments, **{"seed": 0, **options}))
    return pools[-1]


def test_the_example_of_the_document(pools: list[Pool]) -> None:
    pool = make(pools, [OwnActions(0), OwnActions(1)], 2, 50)
    assert [array.shape for array in pool.get_pool()] == [(0,)] * 5
    pool.store()
    s, a, next_s, r, done = pool.get_pool()
    assert [array.shape for array in (s, a, next_s, r, done)] == [
        (20, 4),
        (20,),
        (20, 4),
        (20,),
        (20,),
    ]
    assert sum(pool.lengths) == 20
    assert min(pool.lengths) >= 1
    # Every step of both episodes is there once, as it was when it was handed out.
    assert Counter(map(tuple, s[:, :3].tolist())) == Counter(
        (number, 1, t) for number in (0, 1) for t in range(10)
    )
    np.testing.assert_array_equal(next_s[:, 2], s[:, 2] + 1)
    np.testing.assert_array_equal(a, s[:, 2] + 1)  # the action that step() returned
    np.testing.assert_array_equal(next_s[:, 3], np.where(s[:, 2] == 0, 1000, s[:, 2]))
    np.testing.assert_array_equal(r, a)
    assert r.dtype == np.float32
    np.testing.assert_array_equal(done, a == 10)
    pool.store()
    assert len(pool) == 40
    assert set(pool.get_pool()[0][:, 1].tolist()) == {1.0, 2.0}


def test_without_random_a_sub_pool_holds_its_process_in_time_order(pools: list[Pool]) -> None:
    envs = [CountingEnv(length, number) for number, length in enumerate((3, 8, 5))]
    pool = make(pools, envs, 3, 30, random=False, keys=None)
    pool.store()
    pool.store()
    assert pool.lengths == [6, 10, 10]
    s, _, next_s, r, done = pool.get_pool()
    times = [0, 1, 2] * 2 + [6, 7, *range(8)] + [0, 1, 2, 3, 4] * 2
    assert s[:, 0].tolist() == times
    assert s[:, 1].tolist() == [0] * 6 + [1] * 10 + [2] * 10
    assert next_s[:, 0].tolist() == [time + 1 for time in times]
    assert r.tolist() == (100 * s[:, 1] + next_s[:, 0]).tolist()
    assert done.sum() == 6
    # Episodes are known as such: sequences and n steps stay within them.
    batch = pool.sample_sequences(26, 8)
    ends = torch.tensor([3, 8, 5])[batch["frame"][:, 0, 1].long()]
    assert torch.equal(batch.lengths, ends - batch["frame"][:, 0, 0].long())


def test_with_random_the_first_sample_of_each_process_goes_into_its_own_sub_pool(
    pools: list[Pool],
) -> None:
    envs = [CountingEnv(1, number) for number in range(3)]
    pool = make(pools, envs, 3, 30)
    pool.store()
    assert pool.lengths == [1, 1, 1]
    assert pool.get_pool()[0][:, 1].tolist() == [0, 1, 2]
    for _ in range(3):
        pool.store()
    assert sum(pool.lengths) == 12


def test_the_same_seed_stores_the_same_pool(pools: list[Pool]) -> None:
    def stored() -> Any:
        envs = [gymnasium.make("CartPole-v1") for _ in range(2)]
        pool = make(pools, envs, 2, 100, seed=1)
        pool.store()
        first_run = pool.lengths
        pool.store()
        assert pool.get_pool()[3].dtype == np.float32
        return first_run, pool.lengths, *pool.get_pool()

    for one, two in zip(stored(), stored(), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_failing_environment_raises_and_nothing_that_is_stored_is_lost(
    pools: list[Pool],
) -> None:
    envs = [CountingEnv(3, 0), FailingEnv(KeyError("goal"), fails_at=0, step=2)]
    pool = make(pools, envs, 2, 30, random=False)
    pool([7.0, 7.0], 0, [8.0, 8.0], 1.0, True, 0)
    with pytest.raises(EnvError, match="goal"):
        pool.store()
    assert pool.get_pool()[0].tolist() == [[7.0, 7.0]]
    pool(np.zeros(2), 0, np.ones(2), 1.0, True, 1)
    assert len(pool) == 2
