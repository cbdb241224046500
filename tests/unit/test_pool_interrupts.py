"""A pool whose additions are interrupted, between any two lines."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import rlpool.pool
from rlpool import NotEnoughDataError, Pool, TemporalDictTensor, UsageError

PACKAGE = str(Path(rlpool.pool.__file__).parent)


class InterruptsAt:
    """Raises ``KeyboardInterrupt`` before a line of the pool's modules is run, counted from 0."""

    def __init__(self, n_lines: int) -> None:
        self.n_left = n_lines

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.n_left -= 1
            if self.n_left < 0:
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> None:
        self.before = sys.gettrace()
        sys.settrace(self)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)


def trajectories(start: int, lengths: list[int]) -> TemporalDictTensor:
    number = torch.arange(start, start + sum(lengths))
    frame = number[:, None].expand(-1, 2).clone()
    steps = {"number": number, "frame": frame, "_frame": frame + 1}
    return TemporalDictTensor.from_packed(steps, torch.tensor(lengths))


def is_whole(batch: Any) -> bool:
    frame = batch["number"][:, None].expand(-1, 2)
    return torch.equal(batch["frame"], frame) and torch.equal(batch["_frame"], frame + 1)


@pytest.mark.parametrize("storage", ["local", "shared"])
@pytest.mark.parametrize("lengths", [[1, 1, 1], [2, 3], [5, 9, 4]])  # the last is too long
@pytest.mark.parametrize("options", [{}, {"clearing_freq": 4, "window_size_": 2}])
def test_an_interrupted_addition_leaves_whole_transitions_and_a_pool_that_works(
    lengths: list[int], storage: str, options: dict[str, int]
) -> None:
    pool = Pool(pool_size=8, priority_exponent=1.0, storage=storage, seed=0, **options)
    number = n_lines = 0
    is_interrupted = True
    while is_interrupted:
        pool.extend(trajectories(number, [1] * 20))  # each with a value after it of its own
        number += 20
        try:
            with InterruptsAt(n_lines):
                pool.extend(trajectories(number, lengths))
            is_interrupted = False
        except KeyboardInterrupt:
            pass
        number += sum(lengths)
        n_lines += 1
        held = pool.transitions()
        assert is_whole(held)
        try:
            batch = pool.sample(max(1, len(pool)))
        except (NotEnoughDataError, UsageError):  # what is held has no priority yet
            continue
        assert is_whole(batch)
        assert set(batch["number"].tolist()) <= set(held["number"].tolist())
    assert n_lines > 100
