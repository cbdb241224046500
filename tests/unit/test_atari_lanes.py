"""ale-py's AtariVectorEnv: lanes have seeds of their own, and restart when they are told to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from process.watching import assert_equal

from rlpool import Batcher, EpisodeBatcher, VectorGymEnv

from support.agents import NoisyAgent

LENGTH = 12  # steps of an episode, each of 4 frames


def make_env(n_lanes: int = 2, is_wrapped: bool = False, **arguments: Any) -> Any:
    limit = {"max_num_frames_per_episode": 4 * LENGTH}
    env = AtariVectorEnv("breakout", n_lanes, num_threads=1, **limit, **arguments)
    return RecordEpisodeStatistics(env) if is_wrapped else env


def create_lanes(seed: int, auto_reset: bool = False, **arguments: Any) -> VectorGymEnv:
    return VectorGymEnv(make_env(**arguments), seed, auto_reset=auto_reset)


def first_frames(seed: int) -> torch.Tensor:
    return torch.from_numpy(make_env(1).reset(seed=np.array([seed]))[0][0])


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_single_lanes_are_reset_with_seeds_of_their_own(is_wrapped: bool) -> None:
    lanes = VectorGymEnv(make_env(3, is_wrapped))
    lanes.reset_lanes([0, 1, 2], [6, 7, 8], [None] * 3)
    lanes.step_lanes([0, 1, 2], {"action": np.zeros(3, np.int64)})
    before = torch.tensor(lanes.current["frame"])
    lanes.reset_lanes([0, 2], [9, 10], [None] * 2)
    after = torch.tensor(lanes.current["frame"])
    assert torch.equal(after, torch.stack([first_frames(9), before[1], first_frames(10)]))
    assert not torch.equal(after[0], after[2])


def test_episodes_are_the_same_for_any_number_of_workers() -> None:
    results = []
    for n_threads in (0, 2):
        with EpisodeBatcher(LENGTH, 3, NoisyAgent, {}, create_lanes, {}, n_threads, 5) as batcher:
            batcher.execute(3)
            results.append(batcher.get())
    assert_equal(*results)


def test_windows_are_full_and_a_lane_restarts_within_a_step() -> None:
    lanes = {"auto_reset": True, "reward_clipping": False}
    with Batcher(
        n_timesteps=2 * LENGTH + 3,
        create_agent=NoisyAgent,
        create_env=create_lanes,
        env_args=lanes,
        n_threads=0,
        seeds=3,
    ) as batcher:
        batcher.reset()
        batcher.execute()
        window = batcher.get()
    assert window.full()
    assert window["_truncated"].nonzero()[:, 1].tolist() == [LENGTH - 1, 2 * LENGTH - 1] * 2


@pytest.mark.parametrize(
    ("arguments", "seeding"),
    [
        ({"is_wrapped": True}, "episode"),
        ({"autoreset_mode": AutoresetMode.SAME_STEP}, "request"),  # they have restarted already
    ],
)
def test_lanes_are_reset_one_by_one_where_that_is_possible(arguments: Any, seeding: str) -> None:
    assert VectorGymEnv(make_env(**arguments)).seeding == seeding
