"""Pools of stacked observations: stored data, accepted input, and refusals.

The property test covers all other operations on stacks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.wrappers import FrameStackObservation

from rlpool import Batcher, GymEnvInf, Pool, SpecError, TemporalDictTensor

from support.agents import ConstantAgent
from support.envs import CountingEnv, assert_same_tensors


def stacks(start: int, stop: int) -> torch.Tensor:
    """Return values of steps, each a stack of four frames of nine equal numbers."""
    numbers = torch.arange(start, stop)[:, None] + torch.arange(4)
    return numbers[..., None].expand(-1, 4, 9).contiguous()


def steps(start: int, stop: int, **others: torch.Tensor) -> TemporalDictTensor:
    """Return one row of steps whose stacks continue from ``start``."""
    frame = stacks(start, stop + 1)
    done = torch.zeros(stop - start, dtype=torch.bool)
    tensors = {"frame": frame[:-1], "_frame": frame[1:], "_done": done, **others}
    return TemporalDictTensor({key: tensor[None] for key, tensor in tensors.items()})


def random_episode(rng: Any, length: int, dtype: Any) -> dict[str, Any]:
    """Return an episode with stacks of three random frames, some equal by chance."""
    frames = rng.integers(0, 3, (length + 3, 4)).astype(dtype)
    if dtype == np.float32:
        frames[rng.random(length + 3) < 0.2] = np.nan
    front = rng.integers(3)
    frames[:2] = [frames[2], np.zeros(4), frames[:2]][front]
    stacked = np.stack([frames[t : t + 3] for t in range(length + 1)])
    after = stacked[1:].copy()
    if rng.random() < 0.3:
        after[-1] = 0  # some environments return this
    return {
        "frame": stacked[:-1],
        "_frame": after,
        "hidden": stacked[:-1, -1].astype(np.float64),
        "number": rng.integers(2**60, size=length),
        "_done": np.arange(length) == length - 1,
    }


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_single_frames_reproduce_whole_stacks_bit_for_bit(dtype: Any) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        options = {"pool_size": [9, 60][seed % 2], "processes": 1 + seed % 3, "seed": seed}
        pools = [Pool(**options, frame_stack=stack) for stack in (3, None)]
        for _ in range(6):
            parts = [random_episode(rng, rng.integers(1, 7), dtype) for _ in range(3)]
            row = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
            n_kept = int(rng.integers(1, len(row["number"]) + 1))  # may end within an episode
            given = {key: torch.from_numpy(values[None]) for key, values in row.items()}
            for pool in pools:
                pool.extend(TemporalDictTensor(given, torch.tensor([n_kept])))
            n = len(pools[0])
            for look in (
                *(Pool.transitions, lambda pool, n=n: pool.sample(n)),
                lambda pool, n=n: pool.sample_sequences(n, 4),
            ):
                found, expected = map(look, pools)
                assert set(found) == set(expected)
                for key in expected:
                    assert found[key].numpy().tobytes() == expected[key].numpy().tobytes(), key


def test_stacks_span_window_boundaries() -> None:
    pools = [Pool(pool_size=150, seed=0, frame_stack=stack) for stack in (3, None)]
    envs = [FrameStackObservation(CountingEnv(length=n), 3) for n in (3, 16, 90)]
    create_env = lambda seed: GymEnvInf(envs, seed)  # noqa: E731
    with Batcher(1, None, ConstantAgent, {}, create_env, n_workers=0, seeds=0) as batcher:
        batcher.reset()
        for _ in range(70):  # the ring wraps around
            batcher.execute()
            window = batcher.get()
            for pool in pools:
                pool.extend(window)
    assert_same_tensors(*(pool.transitions() for pool in pools))
    assert_same_tensors(*(pool.sample(150, n_step=5) for pool in pools))
    sequences = [pool.sample_sequences(150, 99) for pool in pools]
    assert_same_tensors(*sequences)
    assert sequences[0].lengths.max() > 16


def test_invalid_values_are_refused_and_nothing_is_added() -> None:
    broken = steps(0, 9)
    broken["_frame"][0, 5] += 7
    state = np.arange(4 * 9).reshape(4, 9)
    for frame_stack, add in (
        (5, lambda pool: pool.extend(steps(0, 9))),
        (9, lambda pool: pool.extend(steps(0, 9))),
        (4, lambda pool: pool.extend(broken)),
        (4, lambda pool: pool(state, 0, state + 1, 0.0, False)),
    ):
        pool = Pool(pool_size=20, frame_stack=frame_stack)
        with pytest.raises(SpecError, match="frame_stack"):
            add(pool)
        assert len(pool) == 0


def test_frames_are_stored_once() -> None:
    frames = stacks(0, 41).numpy()
    single, together = (Pool(pool_size=50, seed=0, frame_stack=4) for _ in range(2))
    for step in range(40):
        single(frames[step], step, frames[step + 1], 0.0, step == 39)
    together.extend(steps(0, 20))
    together.extend(steps(20, 40))
    for pool, n_episodes in ((single, 1), (together, 2)):
        # An episode stores its frames, the three before them, and the stack after its last step.
        assert pool.nbytes < 50 * 40 + (40 + n_episodes * (3 + 8)) * 9 * 8
        every = pool.transitions()
        assert torch.equal(every["frame"], stacks(0, 40))
        assert torch.equal(every["_frame"], stacks(1, 41))
