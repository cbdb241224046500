"""What batchers collect in ``CountingEnv`` and in environments with observations of many parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from rlpool import Agent, Batcher, DictTensor, EpisodeBatcher, GymEnv, TemporalDictTensor

from support.agents import ConstantAgent, StepCounter
from support.envs import SpaceEnv, create_counting

LENGTHS = [3, 5, 1, 4]


def episodes_of(
    create_agent: Any, create_env: Any, n_episodes: int = 3, env_info: Any = None
) -> TemporalDictTensor:
    """Episodes, two at a time."""
    with EpisodeBatcher(8, 8, create_agent, {}, create_env, {}, n_threads=0, seeds=1) as batcher:
        batcher.execute(n_episodes, env_info=env_info)
        return batcher.get()


def counting_episodes(lengths: Sequence[int] = LENGTHS) -> TemporalDictTensor:
    """Episodes of these numbers of steps."""
    return episodes_of(StepCounter, create_counting, len(lengths), {"length": list(lengths)})


def counting_window(n_timesteps: int = 7, **arguments: Any) -> TemporalDictTensor:
    """Two lanes, whose episodes have 3 steps, by default."""
    env_args = {"restarts": True, **arguments}
    with Batcher(
        n_timesteps, None, StepCounter, {}, create_counting, env_args, n_threads=0, seeds=1
    ) as batcher:
        batcher.reset()
        batcher.execute()
        return batcher.get()


def create_parts(seed: int) -> GymEnv:
    """Two environments whose observations have images, numbers and flags."""
    parts = {
        "image": spaces.Box(0, 255, (4, 3, 2), np.uint8),
        "pose": spaces.Tuple([spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32)]),
        "is_open": spaces.MultiBinary(2),
    }
    return GymEnv([SpaceEnv(spaces.Dict(parts), spaces.Discrete(3)) for _ in range(2)], seed)


def episodes_of_parts(create_agent: type[Agent] = ConstantAgent) -> TemporalDictTensor:
    """Three episodes of them, with an info that has a NaN."""
    return episodes_of(create_agent, create_parts, 3, {"cost": [1.5, float("nan"), -0.0]})


def assert_same_bits(got: Any, expected: Any) -> None:
    """Two results, or rows of them, have the same keys, dtypes, shapes, lengths, infos and bits."""
    assert type(got) is type(expected)
    pairs = [(got, expected)]
    if isinstance(got, TemporalDictTensor):
        assert got.lengths.tolist() == expected.lengths.tolist()
        pairs.append((got.info, expected.info))
    for one, other in pairs:
        assert isinstance(one, TemporalDictTensor | DictTensor)
        assert set(one) == set(other)
        for key, tensor in other.items():
            assert (one[key].dtype, one[key].shape) == (tensor.dtype, tensor.shape), key
            assert one[key].numpy().tobytes() == tensor.numpy().tobytes(), key
