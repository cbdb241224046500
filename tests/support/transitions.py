"""Transitions whose every value follows from one number, to be told apart and checked."""

from __future__ import annotations

import numpy as np
import torch

from rlpool import DictTensor, Pool, TemporalDictTensor

WIDTH = 64
"""Numbers per state: enough to see a state that is half of one transition, half of another. Each
state is the one before it, shifted by one number: a stack of so many frames."""


def add_numbers(pool: Pool, start: int, stop: int, episode_length: int = 7) -> None:
    """Add transitions ``start`` to ``stop``, one by one."""
    for number in range(start, stop):
        done = number % episode_length == episode_length - 1
        state = np.arange(number, number + WIDTH)
        pool(state, number, state + 1, float(number), done)


def trajectories_of_numbers(start: int, lengths: list[int]) -> TemporalDictTensor:
    """The same as trajectories: rows of these lengths, one after the other."""
    numbers = torch.arange(start, start + sum(lengths))
    state = numbers[:, None] + torch.arange(WIDTH)
    ends = torch.zeros(len(numbers), dtype=torch.bool)
    ends[torch.tensor(lengths).cumsum(0) - 1] = True
    return TemporalDictTensor.from_packed(
        {
            "frame": state,
            "action": numbers,
            "_frame": state + 1,
            "_reward": numbers.float(),
            "_done": ends,
            "_terminated": ends,
        },
        torch.tensor(lengths),
    )


def is_whole(batch: DictTensor) -> bool:
    """Whether every row is one transition, not parts of several."""
    number = batch["action"][:, None] + torch.arange(WIDTH)
    return bool(
        (batch["frame"] == number).all()
        and (batch["_frame"] == number + 1).all()
        and (batch["_reward"] == batch["action"]).all()
    )
