"""The state of a pool: another one goes on from it, and one that does not fit is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlpool import Pool, SpecError, TemporalDictTensor

WIDTH = 3
"""Numbers per state, which is the one before it, shifted by one: a stack of so many frames."""


def add_numbers(pool: Pool, start: int, stop: int, episode_length: int = 7) -> None:
    """Add transitions ``start`` to ``stop``, one by one."""
    for number in range(start, stop):
        done = number % episode_length == episode_length - 1
        state = np.arange(number, number + WIDTH)
        pool(state, number, state + 1, float(number), done)


def small_pool(start: int, seed: int) -> Pool:
    pool = Pool(pool_size=30, seed=seed)
    add_numbers(pool, start, start + 37)
    pool.sample(3)
    return pool


@pytest.mark.parametrize("was_filled", [False, True])
def test_the_state_of_an_empty_pool_empties_a_pool(was_filled: bool) -> None:
    pool, empty = small_pool(0, 1), Pool(pool_size=30, seed=2)
    if was_filled:
        empty = small_pool(7, 2)
        empty.clear()
    pool.load_state_dict(empty.state_dict())
    assert len(pool) == 0
    for each in (pool, empty):
        add_numbers(each, 0, 5)
    assert torch.equal(pool.sample(5)["action"], empty.sample(5)["action"])


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"pool_size": 31}, "pool_size"),
        ({"processes": 2}, "n_workers"),
        ({"priority_exponent": 1.0}, "priority_exponent"),
        ({"window_size": 7}, "window_size"),
        ({"clearing_freq": 7, "window_size_": 2}, "clearing_freq"),
        ({"random": False}, "random"),
        ({"frame_stack": 2}, "frame_stack"),
        ({"keys": ["frame", "_frame", "action", "_reward", "_done"]}, "keys"),
        ({"info_keys": ["seed"]}, "info_keys"),
    ],
)
def test_the_state_of_another_pool_is_refused_and_what_there_is_kept(
    other: dict[str, Any], named: str
) -> None:
    pool, there = Pool(pool_size=30), Pool(**{"pool_size": 30, **other})
    add_numbers(pool, 0, 3)
    with pytest.raises(SpecError, match=named):
        there.load_state_dict(pool.state_dict())
    assert not there.specs


def test_a_pool_with_values_of_no_numbers_is_saved() -> None:
    pool, other = Pool(pool_size=30, seed=0), Pool(pool_size=30)
    for number in range(3):
        pool({"nothing": [], "place": number}, number, {"nothing": [], "place": 1}, 0.0, False)
    other.load_state_dict(pool.state_dict())
    every = other.transitions()
    assert every["nothing"].shape == (3, 0)
    assert all(torch.equal(every[key], each) for key, each in pool.transitions().items())


def states() -> list[Any]:
    """Nothing, parts of a state, and states with a part that is missing or damaged."""
    whole = small_pool(0, 1).state_dict()
    arrays = dict(whole["store"]["arrays"])
    missing = {k: arrays[k] for k in arrays if k != "columns/frame/0.0"}
    cut = {**arrays, "columns/frame/0.0": arrays["columns/frame/0.0"][1:]}
    return [
        *(None, {}, {"format": 5}, {**whole, "format": 4}, {**whole, "generator": {}}),
        *({**whole, "store": {**whole["store"], "arrays": each}} for each in (missing, cut)),
    ]


@pytest.mark.parametrize("number", range(len(states())))
def test_a_state_that_is_damaged_decides_nothing(number: int) -> None:
    empty, filled = Pool(pool_size=30), small_pool(100, 2)
    before = filled.transitions()
    for pool in (empty, filled):
        with pytest.raises(SpecError):
            pool.load_state_dict(states()[number])
    assert torch.equal(filled.transitions()["frame"], before["frame"])
    empty.extend(TemporalDictTensor({"other": torch.ones(1, 2)}))
    assert list(empty.specs) == ["other"]
