"""Claims of episodes: whoever dies, every episode has one owner."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import numpy as np
import pytest

from rlpool.batch.claims import MAX_CLAIM, ClaimLock, Claims
from rlpool.memory.storage import Memory

pytestmark = pytest.mark.promise("I1")

N_WORKERS, N_LANES = 3, 2


@pytest.mark.parametrize("n_episodes", [1, 8, 101, 400])
def test_every_episode_is_claimed_once_whoever_dies(n_episodes: int) -> None:
    claims = Claims({"claim": np.zeros((N_WORKERS, N_LANES), np.int64)}, n_episodes)
    rng = random.Random(n_episodes)
    claimed: list[int] = []
    last: dict[int, dict[int, range]] = {worker: {} for worker in range(N_WORKERS)}
    while not claims.all_made or rng.random() < 0.9:
        worker, lane = rng.randrange(N_WORKERS), rng.randrange(N_LANES)
        if rng.random() < 0.1:
            owed = claims.give_back(worker)
            assert owed == sorted(n for episodes in last[worker].values() for n in episodes)
            assert claims.give_back(worker) == []  # its successor owes them from now on
            last[worker].clear()
            continue
        episodes = claims.make(worker, lane)
        assert all(episode % N_LANES == lane for episode in episodes)
        n_left = n_episodes // N_LANES - len(claimed) // N_LANES
        assert len(episodes) <= (MAX_CLAIM if n_left > 8 * N_WORKERS else 2)
        claimed.extend(episodes)
        if episodes:
            last[worker][lane] = episodes
    assert sorted(claimed) == list(range(n_episodes))


def lock_in_a_child(fd: int, do: Callable[[ClaimLock], int]) -> int:
    """Run something in a forked process; returns its exit code."""
    pid = os.fork()
    if pid == 0:
        os._exit(do(ClaimLock(fd)))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # for its os.fork()
def test_the_lock_excludes_other_processes_and_ends_with_its_holder() -> None:
    memory = Memory.shared(4096)
    assert memory.fd is not None
    lock, me = ClaimLock(memory.fd), os.getpid()
    lock.acquire()
    assert lock_in_a_child(memory.fd, lambda child: int(child.try_acquire())) == 0
    assert lock_in_a_child(memory.fd, lambda child: int(child.holder() == me)) == 1
    lock.release()
    assert lock_in_a_child(memory.fd, lambda child: int(child.try_acquire())) == 1
    assert lock.holder() is None
    assert lock.try_acquire()
