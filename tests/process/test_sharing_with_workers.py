"""Workers take whatever a process of ``torch.multiprocessing`` takes as an argument."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import psutil
import pytest
import torch
import torch.multiprocessing
from process.watching import worker_pids

from rlpool import (
    EpisodeBatcher,
    ParallelEnvManager,
    Pool,
    WorkerDiedError,
    make_parallel_env,
)

from support import sharing
from support.sharing import TouchingEnv, TouchingPolicy, create_agent, create_env

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(120)]

Run = Callable[[], Any]
"""Runs an episode."""


def run_episode(batcher: EpisodeBatcher) -> None:
    batcher.execute(1)
    batcher.get()


@contextmanager
def in_create_env(things: Any, start_method: str) -> Iterator[Run]:
    env_args, n_threads = {"things": things}, int(start_method != "none")
    keywords = {} if start_method == "none" else {"start_method": start_method}
    with EpisodeBatcher(
        4, 2, create_agent, {}, create_env, env_args, n_threads, **keywords
    ) as batcher:
        yield functools.partial(run_episode, batcher)


@contextmanager
def in_create_agent(things: Any, start_method: str) -> Iterator[Run]:
    keywords = {"start_method": start_method}
    agent_args = {"things": things}
    with EpisodeBatcher(4, 2, create_agent, agent_args, create_env, {}, 1, **keywords) as batcher:
        yield functools.partial(run_episode, batcher)


@contextmanager
def in_closure(things: Any, start_method: str) -> Iterator[Run]:
    keywords = {"start_method": start_method}

    def create(seed: int) -> Any:
        return create_env(seed, things)

    with EpisodeBatcher(4, 2, create_agent, {}, create, {}, 1, **keywords) as batcher:
        yield functools.partial(run_episode, batcher)


@contextmanager
def in_manager(things: Any, start_method: str) -> Iterator[Run]:
    with closing(ParallelEnvManager([lambda: TouchingEnv(things)], start_method=start_method)) as m:
        yield m.reset


@contextmanager
def in_meta(things: Any, start_method: str) -> Iterator[Run]:
    keywords = {"things": things, "start_method": start_method}
    with closing(make_parallel_env(TouchingEnv, 1, 1, seed=1, **keywords)) as envs:
        yield envs.reset


def run_pool(pool: Pool) -> None:
    """Run an episode; a pool tells when it was interrupted, and starts anew."""
    try:
        pool.store()
    except WorkerDiedError:
        pool.store()


@contextmanager
def in_environments_of_pool(things: Any, start_method: str) -> Iterator[Run]:
    with Pool([TouchingEnv(things)], processes=1, pool_size=8, start_method=start_method) as pool:
        yield functools.partial(run_pool, pool)


@contextmanager
def in_policy_of_pool(things: Any, start_method: str) -> Iterator[Run]:
    keywords = {"policy": TouchingPolicy(things), "start_method": start_method}
    with Pool([TouchingEnv(None)], processes=1, pool_size=8, **keywords) as pool:
        yield functools.partial(run_pool, pool)


DOORS = [
    in_create_env,
    in_create_agent,
    in_closure,
    in_manager,
    in_meta,
    in_environments_of_pool,
    in_policy_of_pool,
]


def check_round(things: Any, run: Run) -> None:
    sharing.begin(things)
    run()
    assert sharing.not_touched(things) == []


def kill_workers(others: set[int]) -> None:
    for pid in worker_pids() - others:
        psutil.Process(pid).kill()


QUICK = [(door, "auto", "fork") for door in DOORS[:-1]] + [
    (in_policy_of_pool, "auto", "spawn"),
    (in_create_agent, "spawn", "spawn"),
]
ALL = [
    (door, start, context)
    for door in DOORS
    for start in ("auto", "spawn")
    for context in ("fork", "spawn")
]


@pytest.mark.parametrize(
    ("door", "start_method", "context"),
    [pytest.param(*each, marks=[] if each in QUICK else pytest.mark.slow) for each in ALL],
)
def test_everything_is_shared_with_workers_and_their_successors(
    door: Any, start_method: str, context: str
) -> None:
    before = worker_pids()
    making = sharing.made(torch.multiprocessing.get_context(context))
    with making as things, door(things, start_method) as run:
        check_round(things, run)
        kill_workers(before)
        check_round(things, run)
