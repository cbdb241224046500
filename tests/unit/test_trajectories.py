"""Trajectories: copies and pickles, memory, lazy values, and unpadded parts.

The property tests compare their values with hand-written loops.
"""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import TransformObservation

from rlpool import EpisodeBatcher, GymEnv, TemporalDictTensor, UsageError
from rlpool.slots.blocks import Layout
from rlpool.slots.trajectories import Unpadded, trajectories_of

from support.agents import ConstantAgent, StepCounter
from support.envs import (
    CountingEnv,
    assert_same_tensors,
    counting_trajectories,
    create_counting,
)
from support.fragile import RecurrentAgent, create_fragile

LENGTHS = [3, 1, 7, 2, 12, 4]
IDS = [1, 2, 3, 4, 5, 6]


def collect(
    lengths: Sequence[int] = LENGTHS, ids: Sequence[int] = IDS, n_timesteps: int = 100
) -> TemporalDictTensor:
    info = {"length": torch.tensor(lengths), "id": torch.tensor(ids)}
    make = partial(EpisodeBatcher, create_agent=StepCounter, n_threads=0, seeds=0)
    with make(n_timesteps, 100, create_env=create_counting) as batcher:
        batcher.execute(len(lengths), env_info=info)
        trajectories = batcher.get()
    assert trajectories is not None
    return trajectories


def create_wide(seed: int) -> GymEnv:
    space, wide = gymnasium.spaces.Box(0, 255, (8192,), np.uint8), np.ones(8192, np.uint8)
    envs = [TransformObservation(CountingEnv(), lambda _: wide, space) for _ in range(4)]
    return GymEnv(envs, seed)


@pytest.mark.promise("I8")
@pytest.mark.parametrize(("longest", "most"), [(100, 1.06), (101, 2.2)])
def test_collecting_uses_little_memory_besides_the_result(longest: int, most: float) -> None:
    lengths = [100] * 31 + [longest]  # one is longer than a slot, so all have to be copied
    tracemalloc.start()  # includes NumPy's memory, which holds slots and results
    with EpisodeBatcher(100, 32, ConstantAgent, {}, create_wide, {}, n_threads=0) as batcher:
        batcher.execute(32, env_info={"length": lengths})
        got = batcher.get()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert got["frame"][:, :100].all()
    assert peak < most * sum(got[key].nbytes for key in got if not key.startswith("_"))


def test_all_ways_of_reading_give_the_same_tensors() -> None:
    got = collect()
    expected = counting_trajectories(LENGTHS, IDS)
    ways: list[Any] = [
        *({key: got[key] for key in got}, dict(got.items()), got.clone(), got.shorten()),
        *(got.get(list(got.keys())), got.slice(0, 6), got.index(torch.arange(6))),
        TemporalDictTensor.cat([got.slice(0, 2), got.slice(2, 6)]),
        *(TemporalDictTensor.cat(got.unfold()), pickle.loads(pickle.dumps(collect()))),
        *(copy.copy(collect()), copy.deepcopy(collect()), collect().to("cpu")),
    ]
    for way in ways:
        assert_same_tensors(way, expected)


def test_a_pickled_result_contains_its_values_but_not_its_block() -> None:
    got = collect([2, 3], [1, 2], n_timesteps=10_000)
    assert len(pickle.dumps(got)) < 20_000
    again = pickle.loads(pickle.dumps(got))
    assert_same_tensors(again, counting_trajectories([2, 3], [1, 2]))
    assert again.info["env_info/id"].tolist() == [1, 2]


def test_a_result_may_be_changed_in_place() -> None:
    got = collect()
    kept = got.clone()
    got["frame"].zero_()
    got["_reward"].fill_(5.0)
    assert not got["frame"].any()
    assert torch.equal(kept["frame"], counting_trajectories(LENGTHS, IDS)["frame"])
    other = collect()
    other["frame"].zero_()  # before "_frame" was computed from it
    with pytest.raises(UsageError, match="'frame'"):
        other["_frame"]


@pytest.mark.parametrize("sizes", [(9,), (4, 1, 4)])
def test_unpadded_parts_of_a_request_restore_all_its_tensors(
    sizes: tuple[int, ...],
) -> None:
    make = partial(EpisodeBatcher, 4, 12, RecurrentAgent, {}, create_fragile, {"n_lanes": 3}, 0, 5)
    parts = []
    with make() as whole, make() as divided:
        whole.execute(9)
        expected = whole.get()
        for n_episodes in sizes:
            divided.execute(n_episodes)
            parts.append(Unpadded.of(divided.get()._tensors.part).copy())
        step = whole._not_closed()._blocks.layout.step
    assert all(len(rows) == part.lengths.sum() for part in parts for rows in part.rows.values())
    joined = Unpadded.joined(parts)
    found = trajectories_of(Layout(step, 9, 1, 1), joined.lengths, lambda: joined)
    assert torch.equal(found.lengths, expected.lengths)
    assert_same_tensors(found, expected)
