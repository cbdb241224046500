"""Trajectories: every key worked out by hand, chunks that are joined, what is computed lazily."""

from __future__ import annotations

import copy
import io
import pickle
import tracemalloc
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import TransformObservation

from rlpool import DictTensor, EpisodeBatcher, GymEnv, TemporalDictTensor, UsageError

from support.agents import ConstantAgent, StepCounter
from support.envs import (
    CountingEnv,
    assert_same_tensors,
    counting_trajectories,
)

LENGTHS = [3, 1, 7, 2, 12, 4]
IDS = [1, 2, 3, 4, 5, 6]


def infos(
    lengths: Sequence[int], ids: Sequence[int], ends: Sequence[str] | None = None
) -> DictTensor:
    info = {"length": torch.tensor(lengths), "id": torch.tensor(ids)}
    if ends is not None:
        info["ends"] = torch.tensor([CountingEnv.ENDS.index(end) for end in ends])
    return DictTensor(info)


def collect(
    lengths: Sequence[int] = LENGTHS,
    ids: Sequence[int] = IDS,
    ends: Sequence[str] | None = None,
    n_timesteps: int = 100,
    n_slots: int = 100,
    n_envs: int = 2,
    agent: Any = StepCounter,
    max_episode_steps: int | None = None,
) -> TemporalDictTensor:
    with EpisodeBatcher(
        n_timesteps,
        n_slots,
        create_agent=agent,
        create_env=lambda seed: GymEnv(
            [CountingEnv() for _ in range(n_envs)], seed, max_episode_steps=max_episode_steps
        ),
        n_threads=0,
        seeds=0,
    ) as batcher:
        batcher.execute(len(lengths), env_info=infos(lengths, ids, ends))
        trajectories = batcher.get()
    assert trajectories is not None
    return trajectories


# By hand


def test_every_key_of_one_episode_is_as_written_here() -> None:
    got = collect([3], [5], n_envs=1)
    assert got.lengths.tolist() == [3]
    expected = {
        "frame": [[0, 5], [1, 5], [2, 5]],
        "_frame": [[1, 5], [2, 5], [3, 5]],
        "reward": [0, 501, 502],
        "_reward": [501, 502, 503],
        "action": [1, 2, 3],
        "last_action": [0, 1, 2],
        "_last_action": [1, 2, 3],
        "steps": [10, 11, 12],
        "_steps": [11, 12, 13],
        "initial_state": [True, False, False],
        "_initial_state": [False, False, False],
        "done": [False, False, False],
        "_done": [False, False, True],
        "terminated": [False, False, False],
        "_terminated": [False, False, True],
        "truncated": [False, False, False],
        "_truncated": [False, False, False],
    }
    assert set(got.keys()) == set(expected)
    for key, values in expected.items():
        assert got[key][0].tolist() == values, key


# Shapes of requests


def create_wide(seed: int) -> GymEnv:
    space, wide = gymnasium.spaces.Box(0, 255, (8192,), np.uint8), np.ones(8192, np.uint8)
    envs = [TransformObservation(CountingEnv(), lambda _: wide, space) for _ in range(4)]
    return GymEnv(envs, seed)


@pytest.mark.promise("I8")
@pytest.mark.parametrize(("longest", "most"), [(200, 1.05), (201, 2.2)])
def test_collecting_takes_little_memory_beside_the_result(longest: int, most: float) -> None:
    lengths = [200] * 31 + [longest]  # one that is longer than a slot, and all have to be copied
    tracemalloc.start()  # knows of NumPy's memory, in which slots and results are
    with EpisodeBatcher(200, 32, ConstantAgent, {}, create_wide, {}, n_threads=0) as batcher:
        batcher.execute(32, env_info=infos(lengths, range(32)))
        got = batcher.get()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert got["frame"][:, :200].all()
    assert peak < most * sum(got[key].nbytes for key in got if not key.startswith("_"))


# What is derived


def test_all_ways_of_reading_give_the_same_tensors() -> None:
    got = collect()
    expected = counting_trajectories(LENGTHS, IDS)
    ways: list[Any] = [
        {key: got[key] for key in got},
        dict(got.items()),
        dict(zip(got.keys(), got.values(), strict=True)),
        got.clone(),
        got.get(list(got.keys())),
        got.slice(0, 6),
        got.shorten(),
        got.index(torch.arange(6)),
        TemporalDictTensor.cat([got.slice(0, 2), got.slice(2, 6)]),
        TemporalDictTensor.cat(got.unfold()),
        pickle.loads(pickle.dumps(collect())),
        copy.copy(collect()),
        copy.deepcopy(collect()),
        collect().to("cpu"),
    ]
    for way in ways:
        assert_same_tensors(way, expected)


def test_a_pickled_result_has_its_values_and_not_its_block() -> None:
    got = collect([2, 3], [1, 2], n_timesteps=10_000, n_slots=50)
    assert len(pickle.dumps(got)) < 20_000
    stream = io.BytesIO()
    torch.save(got["frame"].clone(), stream)
    assert len(stream.getvalue()) < 5_000
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
    with pytest.raises(UsageError, match="'frame' was modified in place before '_frame'"):
        other["_frame"]
