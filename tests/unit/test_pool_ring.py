"""Which transitions a sub-pool holds, and where they lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlpool import Pool, TemporalDictTensor
from rlpool.pool.ring import Ring, WindowRules, capacities, emptiest_first


def held(n_added: int, pool_size: int, at_once: int = 1, **options: int) -> list[int]:
    """Numbers of the transitions that a pool holds after so many were added."""
    pool = Pool(pool_size=pool_size, seed=0, **options)
    for start in range(0, n_added, at_once):
        numbers = torch.arange(start, min(n_added, start + at_once))
        pool.extend(TemporalDictTensor({"number": numbers[None]}))
    got: list[int] = pool.transitions()["number"].tolist()
    return got


def held_by_the_rules(n_added: int, capacity: int, **options: int) -> list[int]:
    """The same, one after the other as the document says it."""
    numbers: list[int] = []
    for number in range(n_added):
        numbers.append(number)
        if options.get("clearing_freq") and (number + 1) % options["clearing_freq"] == 0:
            del numbers[: options["window_size_"]]
        if len(numbers) > capacity:
            if "window_size" in options:
                numbers = numbers[-min(options["window_size"], capacity) :]
            else:
                del numbers[0]
    return numbers


@pytest.mark.parametrize("at_once", [1, 5, 12])
def test_examples_of_the_document(at_once: int) -> None:
    assert held(12, 10, at_once) == list(range(2, 12))
    assert held(12, 10, at_once, window_size=3) == [8, 9, 10, 11]
    assert held(12, 10, at_once, clearing_freq=5, window_size_=2) == list(range(4, 12))


@pytest.mark.parametrize("at_once", [1, 7, 64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window_size": 1},
        {"window_size": 10},
        {"window_size": 99},
        {"clearing_freq": 1, "window_size_": 1},
        {"clearing_freq": 3, "window_size_": 99},
        {"clearing_freq": 11, "window_size_": 4, "window_size": 6},
        {"clearing_freq": 10, "window_size_": 1, "window_size": 2},
    ],
)
def test_adding_at_once_keeps_what_adding_one_by_one_keeps(
    options: dict[str, int], at_once: int
) -> None:
    for n_added in (1, 9, 10, 11, 12, 20, 21, 64):
        assert held(n_added, 10, at_once, **options) == held_by_the_rules(n_added, 10, **options)


def test_a_pool_of_one_keeps_the_newest() -> None:
    assert held(5, 1) == [4]
    assert held(5, 1, 5) == [4]
    assert held(5, 1, window_size=1) == [4]
    assert held(5, 1, clearing_freq=5, window_size_=1) == [4]
    assert held(5, 1, clearing_freq=5, window_size_=2) == []


def test_clearing_counts_transitions_of_each_sub_pool_by_itself() -> None:
    pool = Pool(processes=2, pool_size=20, clearing_freq=4, window_size_=2, seed=0)
    for number in range(6):
        pool.extend(TemporalDictTensor({"number": torch.tensor([[number]])}), number % 2)
    assert pool.lengths == [3, 3]
    pool.extend(TemporalDictTensor({"number": torch.tensor([[6]])}), 0)
    assert pool.lengths == [2, 3]
    assert pool.transitions()["number"].tolist() == [4, 6, 1, 3, 5]


@pytest.mark.parametrize(
    ("pool_size", "processes", "expected"),
    [(10, 3, [4, 3, 3]), (11, 3, [4, 4, 3]), (9, 3, [3, 3, 3]), (3, 3, [1, 1, 1]), (7, 1, [7])],
)
def test_capacities_add_up_to_the_size_of_the_pool(
    pool_size: int, processes: int, expected: list[int]
) -> None:
    assert capacities(pool_size, processes) == expected
    pool = Pool(processes=processes, pool_size=pool_size, seed=0)
    for index in range(processes):
        pool.extend(TemporalDictTensor({"number": torch.arange(2 * pool_size)[None]}), index)
    assert pool.lengths == expected


def test_rows_of_a_ring_wrap_round_its_capacity() -> None:
    ring = Ring(100, 5, np.zeros(2, np.int64))
    assert ring.pieces(0, 5) == [slice(100, 105)]
    assert ring.pieces(3, 7) == [slice(103, 105), slice(100, 102)]
    assert ring.pieces(5, 10) == [slice(100, 105)]
    assert ring.pieces(8, 8) == []
    assert ring.rows(np.arange(3, 8)).tolist() == [103, 104, 100, 101, 102]


def test_the_numbers_of_a_ring_survive_more_transitions_than_32_bits_count() -> None:
    numbers = np.array([2**40, 2**40 + 3], np.int64)
    ring = Ring(0, 7, numbers)
    admission = ring.admission(100)
    assert (admission.n_skipped, admission.first) == (93, 2**40 + 96)
    assert admission.dropped == (2**40, 2**40 + 3)


def test_a_long_addition_is_counted_from_clearing_to_clearing() -> None:
    rules = WindowRules.checked(None, 1000, 10)
    assert rules.length_after(0, 10**8, 0, 10**9) == 10**8 - 10**6
    assert (
        WindowRules(window_size=3).length_after(0, 10**15 + 1, 0, 10) == 3 + (10**15 + 1 - 11) % 8
    )


def test_the_emptiest_sub_pool_is_the_likeliest() -> None:
    np.testing.assert_allclose(emptiest_first([0, 1, 3]), np.array([4, 2, 1]) / 7)


def test_transitions_go_to_sub_pools_in_inverse_proportion_to_their_length_plus_one() -> None:
    n = 500
    counts = np.zeros(3)
    pool = Pool(processes=3, pool_size=30, seed=3)
    for _ in range(n):
        pool.clear()
        for index, length in enumerate((0, 1, 3)):
            if length:
                pool.extend(TemporalDictTensor({"number": torch.arange(length)[None]}), index)
        before = np.array(pool.lengths)
        pool.extend(TemporalDictTensor({"number": torch.tensor([[9]])}))
        counts += np.array(pool.lengths) - before
    expected = np.array([4, 2, 1]) / 7 * n
    assert ((counts - expected) ** 2 / expected).sum() < 13.8  # 2 degrees of freedom, 0.001


def test_dropping_never_moves_what_stays() -> None:
    pool = Pool(pool_size=1000, seed=0)
    pool.extend(TemporalDictTensor({"frame": torch.arange(1000.0)[None]}))
    store = pool._store
    assert store is not None
    before = store.columns["frame"].copy()
    pool.extend(TemporalDictTensor({"frame": torch.full((1, 10), -1.0)}))
    changed = np.flatnonzero(store.columns["frame"] != before)
    assert changed.tolist() == list(range(10))
