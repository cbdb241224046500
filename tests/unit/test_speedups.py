"""The cheaper functions of workers give what Gymnasium's own ones give."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Discrete, MultiDiscrete
from gymnasium.utils import seeding

from rlpool.workers.speedups import FastSeeding, install_fast_checks


@pytest.fixture
def originals() -> Iterator[tuple[Any, Any]]:
    kept: Any = Discrete.contains, seeding.np_random, MultiDiscrete.contains
    yield kept
    Discrete.contains, seeding.np_random, MultiDiscrete.contains = kept


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
                    assert space.contains(value) is originals[2](space, value), (space, value)


def test_seeds_give_the_generators_of_gymnasium(originals: Any) -> None:
    fast = FastSeeding()
    assert fast.install()
    fast.announce([3, 2**31 - 1])
    for seed in (3, 2**31 - 1, 4):
        (mine, my_seed), (expected, its_seed) = seeding.np_random(seed), originals[1](seed)
        assert my_seed == its_seed
        assert mine.random(5).tolist() == expected.random(5).tolist()
        for _ in range(2):
            (child,), (expected_child,) = mine.spawn(1), expected.spawn(1)
            assert child.random() == expected_child.random()
    assert seeding.np_random(None)[0].random() != seeding.np_random(None)[0].random()


def test_seeds_are_left_alone_where_gymnasium_makes_other_generators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        seeding, "np_random", lambda seed: (np.random.Generator(np.random.MT19937(seed)), seed)
    )
    before = seeding.np_random
    assert not FastSeeding().install()
    assert seeding.np_random is before
