"""The number of workers and the seed have one name everywhere, and older ones go on working."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlpool import (
    Batcher,
    EpisodeBatcher,
    MonoThreadEpisodeBatcher,
    Pool,
    evaluate,
    make_parallel_env,
)
from rlpool.cluster import RayBatcher, RayEpisodeBatcher
from rlpool.errors import SpecError

from support.agents import ConstantAgent
from support.examples import create_env

FACTORIES: Any = {"create_agent": ConstantAgent, "create_env": create_env}


def episodes(**arguments: Any) -> torch.Tensor:
    with EpisodeBatcher(3, 4, **FACTORIES, **arguments) as batcher:
        batcher.execute(4)
        result = batcher.get()
    assert result is not None
    return result.info["seed"]


@pytest.mark.parametrize(
    "function",
    [EpisodeBatcher, Batcher, RayEpisodeBatcher, RayBatcher, evaluate, Pool, make_parallel_env],
)
def test_the_number_of_workers_has_one_name_in_every_signature(
    function: Callable[..., Any],
) -> None:
    names = inspect.signature(function).parameters
    assert "n_workers" in names
    assert not {"n_threads", "processes", "num_workers"} & set(names)


def test_n_threads_and_n_workers_mean_the_same() -> None:
    assert torch.equal(episodes(n_threads=0, seeds=5), episodes(n_workers=0, seeds=5))


def test_a_seed_is_one_entry_of_seeds() -> None:
    assert torch.equal(episodes(n_workers=0, seed=5), episodes(n_workers=0, seeds=5))
    with MonoThreadEpisodeBatcher(**FACTORIES, seed=5) as batcher:
        batcher.execute(4)
        result = batcher.get()
    assert result is not None
    assert torch.equal(result.info["seed"], episodes(n_workers=0, seeds=5))


def test_evaluate_takes_a_seed() -> None:
    one, other = (
        evaluate(ConstantAgent(), create_env, 2, **s) for s in ({"seed": 3}, {"seeds": 3})
    )
    assert torch.equal(one.seeds, other.seeds)


def test_processes_of_a_pool_are_workers() -> None:
    named, positional = Pool(processes=2, pool_size=8), Pool(None, 2, 8)
    assert named.pool_size == positional.pool_size == Pool(n_workers=2, pool_size=8).pool_size


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: episodes(n_threads=0, n_workers=0), ("n_threads", "n_workers")),
        (lambda: episodes(n_workers=0, seed=1, seeds=1), ("seed", "seeds")),
        (lambda: Pool(None, 2, 8, processes=2), ("processes", "n_workers")),
        (
            lambda: make_parallel_env("CartPole-v1", 2, 1, num_workers=1),
            ("num_workers", "n_workers"),
        ),
    ],
)
def test_an_argument_given_by_both_names_is_refused_with_both(
    call: Callable[[], Any], names: tuple[str, str]
) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert all(name in str(caught.value) for name in names)


@pytest.mark.parametrize(
    ("seed", "fix"),
    [
        ([1, 2], "give several as seeds"),
        *((seed, "give an int from 0 on") for seed in (0.5, -1, True, "a")),
    ],
)
def test_a_seed_that_is_no_int_is_refused(seed: Any, fix: str) -> None:
    with pytest.raises(SpecError, match="seed should be an int of at least 0") as caught:
        episodes(n_workers=0, seed=seed)
    assert caught.value.fix == fix


def test_num_workers_makes_parallel_environments() -> None:
    with make_parallel_env("CartPole-v1", 2, num_workers=1) as env:
        assert env.n_lanes == 1
