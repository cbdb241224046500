"""The state of a pool: another one goes on from it, and one that does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlpool import Pool, SpecError, TemporalDictTensor

from support.transitions import add_numbers, trajectories_of_numbers

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "three sub-pools": {"processes": 3},
    "priorities": {"priority_exponent": 0.6},
    "windows": {"window_size": 7, "clearing_freq": 5, "window_size_": 2},
    "memmap": {"storage": "memmap"},
}


def go_on(pool: Pool) -> list[torch.Tensor]:
    """Add, sample and set priorities; gives all that was seen."""
    seen: list[torch.Tensor] = []
    for start in (100, 120, 140):
        batch = pool.sample(8, n_step=2)
        if "index" in batch:
            pool.update_priorities(
                batch["index"], torch.rand(8, generator=torch.Generator().manual_seed(start))
            )
        seen += batch.values()
        seen += pool.sample_sequences(4, 3).values()
        add_numbers(pool, start, start + 10)
        pool.extend(trajectories_of_numbers(start + 10, [3, 5]))
        seen += pool.transitions().values()
    return seen


def small_pool(start: int, seed: int, **options: Any) -> Pool:
    pool = Pool(pool_size=30, seed=seed, **options)
    pool.extend(trajectories_of_numbers(start, [3, 17, 15]))
    add_numbers(pool, start + 35, start + 37)
    pool.sample(3)
    return pool


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("was_filled", [False, True])
def test_a_pool_goes_on_where_the_saved_one_was(
    kind: str, was_filled: bool, tmp_path: Path
) -> None:
    pool = small_pool(0, 1, **KINDS[kind])
    other = Pool(pool_size=30, seed=2, **KINDS[kind])
    if was_filled:
        add_numbers(other, 500, 540)
    torch.save(pool.state_dict(), tmp_path / "pool.pt")
    other.load_state_dict(torch.load(tmp_path / "pool.pt", weights_only=True, mmap=was_filled))
    for mine, its in zip(go_on(other), go_on(pool), strict=True):
        assert torch.equal(mine, its)


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
        *(None, {}, {"format": 4}, {**whole, "format": 5}, {**whole, "generator": {}}),
        {**whole, "extra": 1},
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
