"""Claims of episodes: whoever dies at whatever point, nothing is lost and nothing is doubled."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlpool.batch.claims import MAX_CLAIM, ClaimLock, Claims
from rlpool.memory.storage import Memory
from rlpool.slots.blocks import Layout, StepSpecs

N_WORKERS, N_LANES = 3, 2


class Died(Exception):
    """A worker died between two stores."""


class Mortal:
    """An array whose owner dies before one of its stores.

    Args:
        array: What is written to.
        lives: One element: stores that are left to its owner.
    """

    def __init__(self, array: Any, lives: list[int]) -> None:
        self.data = self
        self.shape = array.shape
        self._array = array
        self._lives = lives

    def __getitem__(self, key: Any) -> int:
        return int(self._array[key])

    def __setitem__(self, key: Any, value: int) -> None:
        if not self._lives[0]:
            raise Died
        self._lives[0] -= 1
        self._array[key] = value


def make_control() -> dict[str, Any]:
    step = StepSpecs(N_LANES, False, {}, {}, {})
    layout = Layout.__new__(Layout)
    object.__setattr__(layout, "step", step)
    object.__setattr__(layout, "n_slots", 4)
    object.__setattr__(layout, "n_workers", N_WORKERS)
    control = {key: np.zeros(spec.shape, spec.dtype) for key, spec in layout.control.items()}
    control["cursor"][:] = range(N_LANES)
    return control


def claims_of(control: dict[str, Any], n_episodes: int) -> Claims:
    return Claims(control, n_episodes, ClaimLock(None))


def test_all_episodes_are_claimed_once_and_in_their_rows() -> None:
    control = make_control()
    claims = claims_of(control, 101)
    claimed: list[int] = []
    for turn in range(1000):
        worker, lane = turn % N_WORKERS, (turn // N_WORKERS) % N_LANES
        episodes = claims.make(worker, lane)
        assert all(episode % N_LANES == lane for episode in episodes)
        assert len(episodes) <= MAX_CLAIM
        claimed.extend(episodes)
    assert sorted(claimed) == list(range(101))
    assert claims.all_made


def test_near_the_end_episodes_are_claimed_one_by_one() -> None:
    claims = claims_of(make_control(), 8)
    assert [len(claims.make(0, 0)) for _ in range(5)] == [1, 1, 1, 1, 0]


def test_a_workers_claims_are_those_it_made_last() -> None:
    claims = claims_of(make_control(), 400)
    first = [*claims.make(1, 0), *claims.make(1, 1)]
    assert claims.of(1) == sorted(first)
    assert claims.of(0) == []
    later = claims.make(1, 0)
    assert claims.of(1) == sorted([*later, *first[len(first) // 2 :]])


@pytest.mark.parametrize("lives", range(5))
@pytest.mark.parametrize("who_comes_next", ["another worker", "the caller"])
def test_a_death_while_claiming_leaves_every_episode_with_one_owner(
    lives: int, who_comes_next: str
) -> None:
    control = make_control()
    claims_of(control, 400).make(1, 0)  # so that there is an old claim to be replaced
    before = {key: array.copy() for key, array in control.items()}
    mortal = {**control, **{k: Mortal(control[k], [99]) for k in ("cursor", "claim", "pending")}}
    left = [lives]
    for key in ("cursor", "claim", "pending"):
        mortal[key]._lives = left
    dying = claims_of(mortal, 400)
    if lives < 4:
        with pytest.raises(Died):
            dying.make(1, 0)
    else:
        dying.make(1, 0)
    claims = claims_of(control, 400)
    next_one: list[int] = []
    if who_comes_next == "another worker":
        next_one = list(claims.make(2, 0))
    owned = [episode for episode in claims.of(1) if episode % N_LANES == 0]
    next_one += claims.make(0, 0)
    n_before = int(before["cursor"][0]) // N_LANES
    old = list(range(0, 2 * n_before, 2))
    if lives == 0:  # nothing was written: the worker still has its old claim
        assert owned == old
        owned = []
    everything = sorted([*old, *owned, *next_one])
    assert everything == list(range(0, int(control["cursor"][0]), N_LANES))


def lock_in_a_child(fd: int, do: Callable[[ClaimLock], int]) -> int:
    """Run something in a forked process; returns its exit code."""
    pid = os.fork()
    if pid == 0:
        os._exit(do(ClaimLock(fd)))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # for its os.fork()
def test_the_lock_excludes_other_processes_and_names_its_holder() -> None:
    memory = Memory.shared(4096)
    lock = ClaimLock(memory.fd)
    lock.acquire()
    assert lock_in_a_child(memory.fd, lambda child: int(child.try_acquire())) == 0
    me = os.getpid()
    assert lock_in_a_child(memory.fd, lambda child: int(child.holder() == me)) == 1
    lock.release()
    assert lock_in_a_child(memory.fd, lambda child: int(child.try_acquire())) == 1
    assert lock.holder() is None  # gone with the child that had it


def test_a_lock_for_one_is_always_free() -> None:
    lock = ClaimLock(None)
    lock.acquire()
    assert lock.try_acquire()
    assert lock.holder() is None
    lock.release()
