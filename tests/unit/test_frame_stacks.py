"""Pools of stacked observations: what they store, what they take, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.wrappers import FrameStackObservation

from rlpool import Batcher, EpisodeBatcher, GymEnv, GymEnvInf, Pool, SpecError, TemporalDictTensor

from support.agents import ConstantAgent
from support.envs import assert_same_tensors
from support.machines import limit_disk

FRAME_BYTES = 12 * 12


class Images(gym.Env[Any, Any]):
    """Random images, in episodes of a given length."""

    observation_space = gym.spaces.Box(0, 255, (12, 12), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int = 60) -> None:
        self.length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.n_steps = 0
        return self.image(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        return self.image(), 1.0, self.n_steps >= self.length, False, {}

    def image(self) -> Any:
        return self.np_random.integers(0, 256, (12, 12), dtype=np.uint8)


def create_env(seed: int, padding: str, kind: Any = GymEnv) -> GymEnv:
    lengths = (60, 75, 90)
    envs = [FrameStackObservation(Images(n), 4, padding_type=padding) for n in lengths]
    return kind(envs, seed)


def stacks(start: int, stop: int) -> torch.Tensor:
    """Values of steps, each a stack of four frames of nine equal numbers."""
    numbers = torch.arange(start, stop)[:, None] + torch.arange(4)
    return numbers[..., None].expand(-1, 4, 9).contiguous()


def steps(start: int, stop: int, **others: torch.Tensor) -> TemporalDictTensor:
    """One row of steps whose stacks go on from ``start``."""
    frame = stacks(start, stop + 1)
    done = torch.zeros(stop - start, dtype=torch.bool)
    tensors = {"frame": frame[:-1], "_frame": frame[1:], "_done": done, **others}
    return TemporalDictTensor({key: tensor[None] for key, tensor in tensors.items()})


@pytest.mark.parametrize("padding", ["reset", "zero"])
def test_what_batchers_give_is_sampled_bit_by_bit_from_the_newest_frames(padding: str) -> None:
    pools = [Pool(pool_size=500, seed=0, frame_stack=stack) for stack in (4, None)]
    with EpisodeBatcher(
        100, 6, ConstantAgent, {}, create_env, {"padding": padding}, n_workers=0, seeds=1
    ) as batcher:
        batcher.execute(6)
        episodes = batcher.get()
    for pool in pools:
        pool.extend(episodes)
    # An episode has its frames, the three before them, and the stack after its last step.
    n_frames = int(episodes.lengths.sum()) + 6 * 7
    assert pools[0].nbytes - n_frames * FRAME_BYTES < 100 * len(pools[0])
    with Batcher(
        16,
        create_agent=ConstantAgent,
        create_env=create_env,
        env_args={"padding": padding, "kind": GymEnvInf},
        n_workers=0,
        seeds=1,
    ) as batcher:
        batcher.reset()
        for _ in range(15):
            batcher.execute()
            window: Any = batcher.get()
            for pool in pools:
                pool.extend(window)
    assert_same_tensors(pools[0].transitions(), pools[1].transitions())
    for options in ({}, {"n_step": 5}):
        assert_same_tensors(pools[0].sample(200, **options), pools[1].sample(200, **options))
    assert_same_tensors(pools[0].sample_sequences(50, 8), pools[1].sample_sequences(50, 8))
    assert pools[0].nbytes < 2 * FRAME_BYTES * 500


def test_only_observations_of_several_dimensions_are_stacks() -> None:
    vector = torch.rand(10, 4)
    pool = Pool(pool_size=20, seed=0, frame_stack=4)
    pool.extend(steps(0, 9, angles=vector[:-1], _angles=vector[1:]))
    assert "frame int64[4, 9] as 4 frames" in repr(pool)
    assert "angles float32[4]," in repr(pool)


@pytest.mark.parametrize(("frame_stack", "at"), [(5, None), (9, None), (4, 5)])
def test_other_values_are_refused_and_nothing_is_added(frame_stack: int, at: int | None) -> None:
    batch = steps(0, 9)
    if at is not None:
        batch["_frame"][0, at] += 7
    pool = Pool(pool_size=20, frame_stack=frame_stack)
    with pytest.raises(SpecError, match="frame_stack"):
        pool.extend(batch)
    assert len(pool) == 0
    state = np.arange(4 * 9).reshape(4, 9)
    with pytest.raises(SpecError, match="frame_stack"):
        pool(state, 0, state + 1, 0.0, False)


def test_single_transitions_share_their_frames() -> None:
    pool, frames = Pool(pool_size=50, seed=0, frame_stack=4), stacks(0, 41).numpy()
    for step in range(40):
        pool(frames[step], step, frames[step + 1], 0.0, step == 39)
    assert pool.nbytes < 50 * 40 + (40 + 3 + 8) * 9 * 8
    every = pool.transitions()
    assert torch.equal(every["frame"], stacks(0, 40))
    assert torch.equal(every["_frame"], stacks(1, 41))


def test_a_disk_that_is_full_keeps_the_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(pool_size=5000, storage="memmap", directory=tmp_path, frame_stack=4)
    pool.extend(steps(0, 20))
    before = pool.transitions()
    limit_disk(monkeypatch, lambda start, n_bytes: n_bytes > 3000 * 9 * 8)  # frames
    with pytest.raises(SpecError, match="disk"):
        pool.extend(steps(20, 3800))
    monkeypatch.undo()
    assert_same_tensors(pool.transitions(), before)
    pool.extend(steps(20, 3800))
    assert torch.equal(pool.transitions()["frame"], steps(0, 3800)["frame"][0])
