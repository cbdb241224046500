"""Windows get other rows of env_info, which hold for episodes that begin from then on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode
from process.watching import assert_equal

from rlpool import Batcher, SpecError, VectorGymEnv
from rlpool.testing import CountingEnv

from support.agents import BinaryAgent, ConstantAgent
from support.vector_envs import ArrayEnv, create_lanes


def open_batcher(n_workers: int, over: str = "gym", **options: Any) -> Batcher:
    env_args = {"over": over, "n_lanes": 2, "kind": CountingEnv, "length": 4, "restarts": True}
    factories: Any = {"create_agent": ConstantAgent, "create_env": create_lanes}
    return Batcher(6, **factories, env_args=env_args, n_workers=n_workers, seed=0, **options)


def ends(window: Any) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in window["_done"]]


@pytest.mark.parametrize("over", ["gym", "own"])
def test_a_worker_that_is_replaced_repeats_with_what_episodes_began_with(over: str) -> None:
    windows = []
    for options in ({}, {"max_episodes_per_worker": 2}):
        with open_batcher(1, over, **options) as batcher:
            batcher.reset(env_info={"length": [4, 4]})
            collected = []
            for length in (4, 9, 2, 7):
                batcher.execute(env_info={"length": [length, length]})
                collected.append(batcher.get()["_reward"])
            windows.append(torch.stack(collected))
    assert torch.equal(*windows)


def test_rows_of_another_number_are_refused_and_change_nothing() -> None:
    with open_batcher(0) as batcher:
        batcher.reset(env_info={"length": [2, 2]})
        with pytest.raises(SpecError, match="env_info"):
            batcher.execute(env_info={"length": [1, 2, 3]})
        batcher.execute()
        assert ends(batcher.get()) == [[1, 3, 5], [1, 3, 5]]


@pytest.mark.parametrize("is_queued", [False, True])
def test_different_rows_for_lanes_that_are_reset_together_are_refused_and_change_nothing(
    is_queued: bool,
) -> None:
    def create(seed: int) -> VectorGymEnv:
        lanes = ArrayEnv(2, AutoresetMode.NEXT_STEP, "all")
        return VectorGymEnv(lanes, seed, seeding="request", auto_reset=True)

    arguments: Any = (6, None, BinaryAgent, {}, create, {}, 0)
    with Batcher(*arguments, seed=0) as batcher, Batcher(*arguments, seed=0) as other:
        for each in (batcher, other):
            each.reset(env_info={"length": 4})
            each.execute()
            if not is_queued:
                each.get()
        for call in (batcher.execute, batcher.reset):
            with pytest.raises(SpecError, match="different rows, and one reset serves all lanes"):
                call(env_info={"length": [3, 4]})
        for each in (batcher, other):
            each.execute()
        for _ in range(1 + is_queued):
            assert_equal(batcher.get(), other.get())
