"""Claims of episodes: every episode has one owner, even if processes die."""

from __future__ import annotations

import fcntl
import random

import numpy as np
import pytest

from rlpool.batch.plans import MAX_CLAIM, Claims
from rlpool.machine.platform import FileLock

pytestmark = pytest.mark.promise("I1")

N_WORKERS, N_LANES = 3, 2


@pytest.mark.parametrize("n_episodes", [1, 8, 101, 400])
def test_every_episode_is_claimed_once_even_if_processes_die(n_episodes: int) -> None:
    first = n_episodes // 3
    claims = Claims({"claim": np.zeros((N_WORKERS, N_LANES), np.int64)}, n_episodes, first)
    rng = random.Random(n_episodes)
    claimed: list[int] = []
    last: dict[int, dict[int, range]] = {worker: {} for worker in range(N_WORKERS)}
    while not claims.all_made or rng.random() < 0.9:
        worker, lane = rng.randrange(N_WORKERS), rng.randrange(N_LANES)
        if rng.random() < 0.1:
            owed = claims.give_back(worker)
            assert sorted(owed) == sorted(n for some in last[worker].values() for n in some)
            assert claims.give_back(worker) == []  # its successor owns them from now on
            last[worker].clear()
            continue
        episodes = claims.make(worker, lane)
        assert all((first + episode) % N_LANES == lane for episode in episodes)
        n_left = n_episodes // N_LANES - len(claimed) // N_LANES
        assert len(episodes) <= (MAX_CLAIM if n_left > 8 * N_WORKERS else 2)
        claimed.extend(episodes)
        if episodes:
            last[worker][lane] = episodes
    assert sorted(claimed) == list(range(n_episodes))


@pytest.mark.linux
def test_a_claim_starts_after_those_made_while_it_waited_for_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    control = {"claim": np.zeros((2, 1), np.int64)}
    others: list[int] = []
    calls: list[int] = []

    def lockf(fd: int, operation: int) -> None:
        calls.append(operation)
        if operation == fcntl.LOCK_EX:
            others.extend(Claims(control, 99, 0).make(1, 0))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    own = Claims(control, 99, 0, lock=FileLock(9)).make(0, 0)
    assert calls == [fcntl.LOCK_EX, fcntl.LOCK_UN]
    assert min(own) == max(others) + 1
