"""``make_env``: one environment of trials."""

from __future__ import annotations

import os
from typing import Any

import gymnasium
import pytest

from rlpool import SpecError, VariBadWrapper, make_env, make_parallel_env

from support.meta import RaggedTaskEnv, TaskEnv


def test_an_id_with_a_module_is_imported_and_made() -> None:
    env = make_env("support.meta:Ragged-v0", 3, limit=5, noise=1.0)
    assert isinstance(env, VariBadWrapper)
    assert env.horizon_bamdp == 15
    assert env.unwrapped.noise == 1.0
    assert isinstance(env.unwrapped, RaggedTaskEnv)


def test_max_episode_steps_is_the_time_limit() -> None:
    assert make_env("CartPole-v1", 2, max_episode_steps=7).horizon_bamdp == 14
    assert make_env("CartPole-v1", 2).horizon_bamdp == 1000


def test_a_class_or_function_makes_an_environment_too() -> None:
    assert make_env(TaskEnv, 2, limit=4).horizon_bamdp == 8
    oracle = make_env(TaskEnv, 2, oracle=True)
    assert oracle.observation_space.shape == (5,)


def test_the_seed_determines_environment_and_action_space() -> None:
    def beginning(seed: int | None) -> list[Any]:
        env = make_env(RaggedTaskEnv, 2, seed, limit=6, noise=1.0)
        return [env.reset()[0].tolist(), env.action_space.sample().tolist()]

    assert beginning(3) == beginning(3)
    assert beginning(3) != beginning(4)
    assert beginning(2**62 + 1) != beginning(2**62 + 3)
    assert beginning(None) != beginning(None)


def test_an_environment_that_does_not_exist_is_gymnasiums_error() -> None:
    with pytest.raises(gymnasium.error.NameNotFound):
        make_env("support.meta:Nowhere-v0", 2)
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        make_env("nowhere:Ragged-v0", 2)


@pytest.mark.parametrize("num_workers", [0, -1, 1.5, "all", None, True])
def test_a_number_of_workers_that_is_none_is_refused(num_workers: Any) -> None:
    with pytest.raises(SpecError, match="num_workers should be 'auto' or an int from 1"):
        make_parallel_env(TaskEnv, 2, num_workers)


def test_more_workers_than_descriptors_allow_are_refused_before_any_starts() -> None:
    n_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SpecError, match=r"100000 workers need"):
        make_parallel_env(TaskEnv, 2, 100_000)
    assert len(os.listdir("/proc/self/fd")) == n_before
