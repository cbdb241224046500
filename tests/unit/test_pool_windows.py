"""Windows of a Batcher in a pool: samples cross the border between them, as loops by hand do."""

from __future__ import annotations

import io
import pickle
from itertools import cycle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlpool import Batcher, GymEnv, GymEnvInf, Pool, TemporalDictTensor

from support.agents import ConstantAgent
from support.envs import create_counting

N_LANES, LENGTHS = 3, ((3, 5, 1, 4), (16, 2, 30), (90,))


class Counter(gym.Env[Any, Any]):
    """Counts resets and steps, without end; shows the last three numbers of an episode."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3, 1), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, number: int, lengths: tuple[int, ...]) -> None:
        self.number, self.lengths = number, cycle(lengths)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.number += 1
        self.n_left, self.frames = next(self.lengths), [self.number] * 3
        return np.float32(self.frames)[:, None], {}

    def step(self, action: Any) -> Any:
        self.number += 1
        self.n_left -= 1
        self.frames = [*self.frames[1:], self.number]
        ends, is_cut = self.n_left == 0, self.number % 2 > 0
        frame = np.float32(self.frames)[:, None]
        return frame, self.number % 7, ends and not is_cut, ends and is_cut, {}


def make(n_timesteps: int, first: int = 0, *, restarts: bool = True, seeds: Any = 0) -> Batcher:
    def create(seed: int) -> GymEnv:
        envs = [Counter(first + 10_000 * lane, LENGTHS[lane]) for lane in range(N_LANES)]
        return (GymEnvInf if restarts else GymEnv)(envs, seed)

    batcher = Batcher(n_timesteps, None, ConstantAgent, {}, create, n_workers=0, seeds=seeds)
    batcher.reset()
    return batcher


def window_of(batcher: Batcher) -> TemporalDictTensor:
    batcher.execute()
    window = batcher.get()
    assert window is not None
    return window


def check_samples(pool: Pool, n_step: int) -> None:
    """Compare with a loop over the steps that the pool holds, found by what they start from."""
    every = pool.transitions()
    held = {int(frame[-1, 0]): place for place, frame in enumerate(every["frame"])}
    assert len(held) == len(pool)
    batch = pool.sample(len(pool), n_step=n_step, discount=0.5)
    sequences = pool.sample_sequences(len(pool), n_step)

    def steps_from(frame: torch.Tensor) -> list[int]:
        place, steps = held.get(int(frame[-1, 0])), list[int]()
        while place is not None and len(steps) < n_step:
            steps.append(place)
            is_end, after = every["_done"][place], int(every["_frame"][place][-1, 0])
            place = None if is_end else held.get(after)
        return steps

    for row in range(len(pool)):
        steps = steps_from(batch["frame"][row])
        expected = sum(0.5**n * float(every["_reward"][step]) for n, step in enumerate(steps))
        factor = 0.0 if every["_terminated"][steps[-1]] else 0.5 ** len(steps)
        assert batch["n_step_return"][row] == pytest.approx(expected)
        assert batch["n_step_discount"][row] == factor
        assert torch.equal(batch["_frame"][row], every["_frame"][steps[-1]])
        steps = steps_from(sequences["frame"][row, 0])
        assert sequences.lengths[row] == len(steps)
        for key in ("frame", "_frame", "action", "_reward", "_done"):
            assert torch.equal(sequences[key][row, : len(steps)], every[key][steps])


def saved(pool: Pool, **options: Any) -> Pool:
    """A pool that goes on from the state of another one, written and read."""
    other, file = Pool(pool_size=pool.pool_size, **options), io.BytesIO()
    torch.save(pool.state_dict(), file)
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    return other


WAYS: list[Any] = [  # to keep the info
    lambda window: [window],
    lambda window: [window.clone().to(torch.device("cpu"))],
    lambda window: [pickle.loads(pickle.dumps(window))],
    lambda window: [window.slice(2, 3), window.slice(0, 2)],
]


@pytest.mark.parametrize(
    ("n_timesteps", "options"),
    [
        *((1, {}), (16, {}), (3, {"frame_stack": 3}), (16, {"frame_stack": 3})),
        *((1, {"n_workers": 2}), (3, {"n_workers": 2})),
    ],
    ids=str,
)
def test_samples_cross_the_border_between_windows(
    n_timesteps: int, options: dict[str, Any]
) -> None:
    batchers = [make(n_timesteps, first) for first in (0, 50_000)]  # with the same seeds
    pool = Pool(pool_size=150, seed=0, **options)
    longest = 0
    for number in range(90 // n_timesteps + 2):  # the ring wraps round
        for batcher in batchers[:: 1 if number % 2 else -1]:
            for part in WAYS[number % 4](window_of(batcher)):
                pool.extend(part)
        if number == 20 // n_timesteps:
            pool = saved(pool, **options)
        if number % max(1, 30 // n_timesteps) == 0:
            check_samples(pool, 5)
            longest = max(longest, int(pool.sample_sequences(len(pool), 60).lengths.max()))
    check_samples(pool, 40)
    assert longest > 16


def test_samples_end_where_windows_are_missing_or_lanes_were_reset() -> None:
    batcher, pool = make(2), Pool(pool_size=500, seed=0)
    for number in range(40):
        if number % 13 == 12:
            batcher.reset()
        window = window_of(batcher)
        if number % 7:
            pool.extend(window)
        if number == 20:
            pool.extend(TemporalDictTensor.cat([window_of(batcher), window_of(batcher)]))
    check_samples(pool, 30)
    pool.clear()
    pool.extend(window_of(batcher))
    check_samples(pool, 30)
    ending, pool = make(3, restarts=False), Pool(pool_size=500, seed=0)
    while not ending.all_stopped:  # fewer rows from window to window
        pool.extend(window_of(ending))
    check_samples(pool, 100)
    assert pool.sample_sequences(len(pool), 100).lengths.max() > 80


def test_windows_that_do_not_follow_each_other_in_all_they_hold_are_not_joined() -> None:
    batcher, halves, moved = make(2), Pool(pool_size=100, seed=0), Pool(pool_size=100, seed=0)
    for number in range(4):
        window = window_of(batcher)
        halves.extend(window.temporal_slice(1, 2))
        for key in ("frame", "_frame"):
            window[key].add_(1000 * number)
        moved.extend(window)
    assert halves.sample_sequences(len(halves), 8).lengths.max() == 1
    assert moved.sample_sequences(len(moved), 8).lengths.max() == 2
    create_env, args = create_counting, {"length": 4, "restarts": True}  # shows the same again
    with Batcher(2, None, ConstantAgent, {}, create_env, args, n_workers=0) as alike:
        alike.reset()
        same = [window_of(alike) for _ in range(4)]
        alike.reset()
        same.append(window_of(alike))
    for few in ((same[0], same[3]), (same[3], same[4])):
        pool = Pool(pool_size=100, seed=0)
        for window in few:
            pool.extend(window)
        assert pool.sample_sequences(len(pool), 8).lengths.max() == 2


def test_returns_that_end_with_rows_that_nothing_can_continue_are_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    batcher, pool = make(2), Pool(pool_size=100, seed=0)
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
