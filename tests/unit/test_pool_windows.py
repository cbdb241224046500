"""Windows of a Batcher in a pool: stacks across their borders, and which are not joined.

Samples across the borders are compared with a list of steps in the property tests.
"""

from __future__ import annotations

from typing import Any

import pytest
from gymnasium.wrappers import FrameStackObservation

from rlpool import Batcher, GymEnvInf, Pool, TemporalDictTensor

from support.agents import ConstantAgent
from support.envs import CountingEnv, assert_same_tensors


def create_env(seed: int) -> GymEnvInf:
    lengths = (3, 16, 90)
    envs = [FrameStackObservation(CountingEnv(length=n), 3) for n in lengths]
    return GymEnvInf(envs, seed)


def make(n_timesteps: int = 2) -> Batcher:
    batcher = Batcher(n_timesteps, None, ConstantAgent, {}, create_env, n_workers=0, seeds=0)
    batcher.reset()
    return batcher


def window_of(batcher: Batcher) -> Any:
    batcher.execute()
    return batcher.get()


def longest(pool: Pool) -> int:
    return int(pool.sample_sequences(len(pool), 100).lengths.max())


@pytest.mark.parametrize("n_timesteps", [1, 7])
def test_stacks_of_single_frames_cross_the_border_between_windows(n_timesteps: int) -> None:
    pools = [Pool(pool_size=150, seed=0, frame_stack=stack) for stack in (3, None)]
    batcher = make(n_timesteps)
    for number in range(120 // n_timesteps):  # the ring wraps round
        window = window_of(batcher)
        for pool in pools:
            pool.extend(window)
        if number % (30 // n_timesteps) == 0:
            n = len(pools[0])
            assert_same_tensors(*(pool.transitions() for pool in pools))
            assert_same_tensors(*(pool.sample(n, n_step=5) for pool in pools))
            assert_same_tensors(*(pool.sample_sequences(n, 9) for pool in pools))
    assert longest(pools[0]) > 16


def test_windows_that_do_not_follow_each_other_in_all_they_hold_are_not_joined() -> None:
    batcher = make()
    halves, moved, far, joined = (Pool(pool_size=100, seed=0) for _ in range(4))
    for number in range(4):
        window = window_of(batcher)
        joined.extend(window)
        halves.extend(window.temporal_slice(1, 2))
        if number % 3 == 0:
            far.extend(window)
        window = window.clone()
        for key in ("frame", "_frame"):
            window[key].add_(1000 * number)
        moved.extend(window)
    batcher.reset()
    far.extend(window_of(batcher))
    assert [longest(pool) for pool in (halves, moved, far, joined)] == [1, 2, 2, 8]


def test_returns_that_end_with_rows_that_nothing_can_continue_are_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    batcher, pool = make(), Pool(pool_size=100, seed=0)
    pool.extend(window_of(batcher))
    pool.sample(4, n_step=9)  # the next window may continue it
    window = window_of(batcher)
    pool.extend(TemporalDictTensor(dict(window), window.lengths))
    pool.sample(4, n_step=2)
    assert not caplog.messages
    for _ in range(2):
        pool.sample(4, n_step=3)
    (message,) = caplog.messages
    assert "n_step is 3" in message
