"""Claims of episodes: whoever dies, every episode has one owner."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

from rlpool.batch.plans import MAX_CLAIM, Claims
from rlpool.data.storage import Memory

pytestmark = pytest.mark.promise("I1")

N_WORKERS, N_LANES = 3, 2


@pytest.mark.parametrize("n_episodes", [1, 8, 101, 400])
def test_every_episode_is_claimed_once_whoever_dies(n_episodes: int) -> None:
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
            assert claims.give_back(worker) == []  # its successor owes them from now on
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


def forked(do: Callable[[], object]) -> int:
    """Run something in a forked process; returns its id."""
    if not (pid := os.fork()):
        do()
        os._exit(0)
    return pid


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # for its os.fork()
def test_a_claim_waits_for_the_process_that_has_the_lock_until_that_dies() -> None:
    memory = Memory.shared(4096)
    claims = Claims({"claim": memory.root().view(np.int64)[:1].reshape(1, 1)}, 9, 0, memory.fd)
    reader, writer = os.pipe()

    def hold() -> None:
        fcntl.lockf(memory.fd, fcntl.LOCK_EX)
        os.write(writer, b".")
        signal.pause()

    holder = forked(hold)
    os.read(reader, 1)
    claimer = forked(lambda: claims.make(0, 0))
    time.sleep(0.05)
    assert os.waitpid(claimer, os.WNOHANG) == (0, 0)
    os.kill(holder, signal.SIGKILL)
    assert [os.waitpid(pid, 0)[1] for pid in (claimer, holder)] == [0, signal.SIGKILL]
    assert claims.make(0, 0)[-1] > 0  # what it claimed is seen here
    os.close(reader)
    os.close(writer)
