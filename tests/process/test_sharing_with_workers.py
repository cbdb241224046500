"""Objects shared with workers: memory always, other objects if workers are spawned."""

from __future__ import annotations

import gc
import logging
import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from process.watching import n_descriptors
from torch import nn

from rlpool import (
    Agent,
    Array,
    DictTensor,
    EpisodeBatcher,
    GymEnv,
    SpecError,
    WorkerStartupError,
    evaluate,
)

from support.agents import ConstantAgent
from support.envs import CountingEnv
from support.variants import variants

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(120)]

SPAWN = multiprocessing.get_context("spawn")


def nothing() -> None:
    """Share nothing."""


class SharingEnv(CountingEnv):
    """Environment that calls a function in its constructor."""

    def __init__(self, share: Callable[[], Any] = nothing) -> None:
        super().__init__(length=2)
        share()


def create_env(seed: int, share: Callable[[], Any] = nothing) -> GymEnv:
    return GymEnv([SharingEnv(share)], seed)


def open_batcher(share: Callable[[], Any] = nothing, **options: Any) -> EpisodeBatcher:
    options = {"n_threads": 1, "env_args": {"share": share}, **options}
    return EpisodeBatcher(4, 2, ConstantAgent, {}, create_env, **options)


def run_successors(batcher: EpisodeBatcher) -> None:
    """Run an episode with new workers."""
    for worker in batcher.stats().workers:
        psutil.Process(worker.pid).kill()
    batcher.execute(1)
    batcher.get()


def add_to_memory() -> tuple[Callable[[], Any], Callable[[], list[float]]]:
    """Return a function that adds 1 to every object with memory, and one that reads them."""
    tensor, other = torch.zeros(1).share_memory_(), torch.zeros(1).share_memory_()
    named = DictTensor({"x": other})
    model, array = nn.Linear(1, 1, bias=False), Array(1, np.int64, storage="shared")
    nn.init.zeros_(model.weight)
    model.share_memory()
    dropped, seen = torch.zeros(1).share_memory_(), torch.zeros(1).share_memory_()

    def add() -> None:
        array[0] = array.to_ndarray()[0] + 1
        seen.copy_(dropped.add_(1))
        for each in (tensor, named["x"], model.weight.data):
            each.add_(1)

    def read() -> list[float]:
        values = (tensor, other, model.weight.data, seen, array.to_ndarray()[0])
        return [float(value) for value in values]

    return add, read


def add_to_value(method: str) -> tuple[Callable[[], Any], Callable[[], int]]:
    context: Any = multiprocessing.get_context(method)
    value, lock, queue = context.Value("i", 0), context.Lock(), context.Queue()
    ours, theirs = context.Pipe()

    def add() -> None:
        with lock:
            value.value += 1
        queue.put(value.value)
        theirs.send(value.value)

    def read() -> int:
        number = queue.get(timeout=30)
        assert number == ours.recv() == value.value
        return int(number)

    return add, read


def test_memory_is_shared_with_workers_and_their_successors_and_released(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    counts = []
    for _ in range(3):
        add, read = add_to_memory()
        with open_batcher(add) as batcher:
            assert read() == [1] * 5
            del add
            gc.collect()
            run_successors(batcher)
            assert read() == [2] * 5
        del batcher, read
        gc.collect()
        counts.append(n_descriptors())
    assert counts[2] == counts[1]
    assert "workers are spawned" not in caplog.text


@pytest.mark.parametrize(
    ("method", "is_killed"), variants([("forkserver", False)], [("spawn", True)])
)
def test_queues_locks_values_and_pipes_reach_workers_spawned_for_them(
    method: str, is_killed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    add, read = add_to_value(method)
    with open_batcher(add) as batcher:
        assert read() == 1
        if is_killed:
            del add
            gc.collect()
            run_successors(batcher)
            assert read() == 2
    assert caplog.text.count("workers are spawned") == 1


def test_objects_that_only_forks_inherit_are_refused_with_a_fix() -> None:
    context = multiprocessing.get_context("fork")
    for thing in (context.Queue(), context.Lock(), context.Value("i", 0)):
        with pytest.raises(WorkerStartupError, match=r"env_args\['share'\]\['it'\]") as caught:
            open_batcher(env_args={"share": {"it": thing}})
        assert 'get_context("spawn")' in caught.value.fix


def test_unshared_objects_are_copied() -> None:
    weight = nn.Parameter(torch.zeros(1))
    with open_batcher(partial(weight.data.fill_, 7)):
        assert weight.item() == 0
        assert not weight.is_shared()


class Writer(Agent):
    """Agent that writes into every object it is given."""

    def __init__(self) -> None:
        self.info: Any = None
        self.weights = nn.Parameter(torch.zeros(1)).share_memory_()

    def __call__(self, state, observation, agent_info=None, history=None):
        for tensor in (self.info, self.weights.data, agent_info and agent_info["x"]):
            if tensor is not None:
                tensor.fill_(7)
        return ConstantAgent()(state, observation)

    def update(self, info: Any) -> None:
        self.info = info


@pytest.mark.parametrize("n_workers", [0, 1])
def test_infos_updates_and_evaluated_agents_are_always_copies(n_workers: int) -> None:
    info, update = torch.zeros(2).share_memory_(), torch.zeros(1).share_memory_()
    with EpisodeBatcher(4, 2, Writer, {}, create_env, {}, n_workers) as batcher:
        batcher.update(update)
        batcher.execute(2, agent_info={"x": info}, env_info={"y": info})
        batcher.get()
    assert info.tolist() == [0, 0]
    assert update.item() == 0
    agent = Writer()
    evaluate(agent, create_env, 2, n_workers=n_workers)
    assert agent.weights.item() == 0


def test_inherited_objects_are_refused_in_an_update() -> None:
    with open_batcher(n_threads=0) as batcher, pytest.raises(SpecError, match="info"):
        batcher.update({"what": SPAWN.Value("i", 0)})
