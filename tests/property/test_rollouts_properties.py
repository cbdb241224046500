"""Rollouts of a learner against the same rollouts played by hand, one after another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpool import AGENT_ARCHS, GymEnv, Learner
from rlpool.meta import learner as learner_module
from rlpool.seeding import episode_seeds, root_from, task_draws

from support.meta import CountingActor, Storage, ragged_trials

TASKS = (1, 4, 6)
SEED = 11


def by_hand(collection: int, n_before: int, n_rollouts: int) -> list[list[Any]]:
    """Observations, actions, rewards, terminals and next observations of each rollout."""
    root = root_from(SEED)
    seeds = episode_seeds(root, n_before, n_rollouts)
    draws = task_draws(root, collection, n_rollouts, len(TASKS))
    rollouts = []
    for seed, draw in zip(seeds, draws, strict=True):
        env = ragged_trials()
        observation, _ = env.reset(seed=seed, task=TASKS[draw])
        steps: list[list[Any]] = []
        is_over = False
        while not is_over:
            action = np.float32([len(steps) + 1] * 2) / np.float32(100)
            following, reward, terminated, truncated, _ = env.step(action)
            steps.append([observation, action, [np.float32(reward)], [terminated], following])
            observation = following
            is_over = terminated or truncated
        rollouts.append([np.array(column) for column in zip(*steps, strict=True)])
    return rollouts


@given(
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    n_lanes=st.integers(1, 6),
    batch_rows=st.integers(1, 9),
    chunk=st.integers(1, 15),
)
def test_every_rollout_is_there_once_and_in_order_whoever_ran_it(
    counts: list[int], n_lanes: int, batch_rows: int, chunk: int
) -> None:
    lanes = GymEnv([ragged_trials() for _ in range(n_lanes)])
    storage = Storage()
    learner = Learner(
        CountingActor(), storage, None, TASKS, AGENT_ARCHS.Memory, seed=SEED, batch_rows=batch_rows
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner_module, "MAX_CHUNK", chunk)
        for count in counts:
            learner.collect_rollouts_parallel(count, parallel_env=lanes)
    expected = [
        rollout for i, count in enumerate(counts) for rollout in by_hand(i, sum(counts[:i]), count)
    ]
    assert len(storage.episodes) == len(expected)
    for got, wanted in zip(storage.episodes, expected, strict=True):
        for array, other in zip(got, wanted, strict=True):
            assert array.tolist() == other.tolist()


@given(st.integers(0, 2**40), st.integers(0, 50), st.integers(0, 40), st.integers(1, 30))
def test_tasks_depend_on_seed_collection_and_rollout_alone(
    seed: int, collection: int, n_rollouts: int, n_tasks: int
) -> None:
    root = root_from(seed)
    draws = task_draws(root, collection, n_rollouts, n_tasks)
    assert len(draws) == n_rollouts
    assert all(0 <= draw < n_tasks for draw in draws)
    assert task_draws(root, collection, n_rollouts + 5, n_tasks)[:n_rollouts] == draws
