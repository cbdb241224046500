"""The cheaper checks of workers give what Gymnasium's own ones give."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Discrete, MultiDiscrete

from rlpool.workers.worker_process import install_fast_checks


@pytest.fixture
def originals() -> Iterator[tuple[Any, Any]]:
    kept: Any = Discrete.contains, MultiDiscrete.contains
    yield kept
    Discrete.contains, MultiDiscrete.contains = kept


def test_actions_are_checked_as_by_gymnasium(originals: Any) -> None:
    install_fast_checks()
    for space in (Discrete(1), Discrete(6), Discrete(4, start=-2)):
        for kind in (np.int64, np.int32, np.uint8, np.float32, int, bool):
            for value in map(kind, range(8)):
                assert space.contains(value) is (value in space) is originals[0](space, value)
    space.n = np.int64(9)  # it is looked at anew
    assert space.contains(np.int64(6))


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_actions_of_all_lanes_are_checked_as_by_gymnasium(originals: Any, dtype: Any) -> None:
    install_fast_checks()
    extremes = [np.iinfo(np.int64).min, np.iinfo(np.int64).max]
    for space in (
        MultiDiscrete([2, 3], dtype),
        MultiDiscrete([1, 4], dtype, start=[3, 0]),
        MultiDiscrete([2**63 - 1, 5], start=[-5, -2]),
    ):
        for kind in (np.int64, np.int32, np.float32):
            for pair in itertools.product([*range(-6, 6), *extremes], repeat=2):
                if kind is not np.int64 and not -6 <= min(pair) <= max(pair) < 6:
                    continue
                for value in (np.array(pair, kind), np.array([pair], kind), list(pair)):
                    expected = originals[1](space, value)
                    if np.shape(value) == (2,) and getattr(value, "dtype", None) == space.dtype:
                        # Before 1.4, Gymnasium takes numbers for which its int64s wrap around.
                        ends = zip(pair, space.start.tolist(), space.nvec.tolist(), strict=True)
                        expected = all(low <= x < low + n for x, low, n in ends)
                    assert space.contains(value) is expected, (space, value)
