"""Prioritised sampling: what is drawn how often, and the weights that make up for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlpool import Pool, SpecError, TemporalDictTensor, UsageError
from rlpool.pool.priorities import PriorityTree


def pool_of(n: int, pool_size: int | None = None, alpha: float = 1.0, **options: Any) -> Pool:
    """A pool of n transitions whose ``number`` counts from 0."""
    pool = Pool(pool_size=pool_size or n, priority_exponent=alpha, seed=0, **options)
    add(pool, 0, n)
    return pool


def add(pool: Pool, start: int, stop: int) -> None:
    pool.extend(TemporalDictTensor({"number": torch.arange(start, stop)[None]}))


def index_of_all(pool: Pool) -> np.ndarray[Any, Any]:
    """The indexes of the transitions, by their numbers."""
    known: dict[int, int] = {}
    while len(known) < len(pool):
        batch = pool.sample(len(pool))
        known.update(zip(batch["number"].tolist(), batch["index"].tolist(), strict=True))
    return np.array([known[number] for number in sorted(known)])


def set_all(pool: Pool, priorities: Any) -> None:
    pool.update_priorities(index_of_all(pool), priorities)


def counts(pool: Pool, n_batches: int, batch_size: int, size: int) -> Any:
    """How often each number was drawn."""
    drawn = [pool.sample(batch_size)["number"] for _ in range(n_batches)]
    return np.bincount(torch.cat(drawn).numpy(), minlength=size)


# What is drawn -------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("processes", [1, 3])
def test_transitions_are_drawn_in_proportion_to_their_priority_to_the_power_alpha(
    alpha: float, processes: int
) -> None:
    pool = Pool(processes=processes, pool_size=30, priority_exponent=alpha, seed=1)
    for start in range(0, 12, 2):
        add(pool, start, start + 2)
    priorities = np.arange(1.0, 13.0)
    set_all(pool, priorities)
    n = 24_000
    expected = priorities**alpha / (priorities**alpha).sum() * n
    observed = counts(pool, n // 12, 12, 12)
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 31.3  # 11 degrees of freedom: the probability of more is 0.001


def test_draws_are_spread_over_equal_shares_of_the_priorities() -> None:
    pool = pool_of(8)
    for _ in range(20):
        assert sorted(pool.sample(8)["number"].tolist()) == list(range(8))


def test_transitions_without_priority_are_never_drawn() -> None:
    pool = pool_of(50)
    priorities = np.zeros(50)
    priorities[[7, 31]] = 1e-12, 1e-12
    set_all(pool, priorities)
    assert set(counts(pool, 100, 50, 50).nonzero()[0].tolist()) == {7, 31}


def test_a_pool_without_any_priority_says_so() -> None:
    pool = pool_of(4)
    set_all(pool, np.zeros(4))
    with pytest.raises(UsageError, match="all priorities are zero"):
        pool.sample(2)
    add(pool, 0, 1)
    assert pool.sample(4)["number"].tolist() == [0, 0, 0, 0]


def test_sequences_start_in_proportion_to_priorities() -> None:
    pool = pool_of(10)
    priorities = np.zeros(10)
    priorities[[3, 8]] = 1.0, 3.0
    set_all(pool, priorities)
    batch = pool.sample_sequences(8, 3, beta=1.0)
    assert batch["number"].tolist() == [[3, 4, 5]] * 2 + [[8, 9, 0]] * 6
    assert batch.lengths.tolist() == [3] * 2 + [2] * 6
    assert batch.info["weight"].tolist() == pytest.approx([1.0] * 2 + [1 / 3] * 6)
    pool.update_priorities(batch.info["index"][:2], [0.0, 0.0])
    assert pool.sample(4)["number"].tolist() == [8] * 4


# Weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_make_up_for_the_probability_to_the_power_beta(beta: float) -> None:
    pool = pool_of(10, alpha=0.6)
    priorities = np.arange(1.0, 11.0)
    set_all(pool, priorities)
    batch = pool.sample(10, beta=beta)
    probabilities = priorities**0.6 / (priorities**0.6).sum()
    weights = (10 * probabilities[batch["number"].numpy()]) ** -beta
    np.testing.assert_allclose(batch["weight"], weights / weights.max(), rtol=1e-6)
    assert batch["weight"].dtype == torch.float32
    assert batch["weight"].max() == 1.0


def test_weighted_samples_are_unbiased() -> None:
    pool = pool_of(16)
    set_all(pool, 1.0 + np.arange(16.0))
    batch = pool.sample(16, beta=1.0)
    priorities = 1.0 + batch["number"].double()
    # With beta = 1, weight times probability is the same for each.
    np.testing.assert_allclose((batch["weight"] * priorities).std(), 0.0, atol=1e-5)


@pytest.mark.parametrize("beta", [-0.1, float("nan"), float("inf"), "much", None])
def test_a_beta_that_makes_no_sense_is_refused(beta: Any) -> None:
    with pytest.raises(SpecError, match="beta"):
        pool_of(4).sample(2, beta=beta)


def test_priorities_of_very_different_size_give_finite_weights() -> None:
    pool = pool_of(4)
    set_all(pool, [1e-280, 1e-280, 1e280, 1e280])
    assert pool.sample(4)["weight"].isfinite().all()


# Changing priorities -------------------------------------------------------------------------


def test_new_transitions_get_the_largest_priority_so_far() -> None:
    pool = pool_of(4, pool_size=10)
    assert pool.sample(4)["weight"].tolist() == [1.0] * 4
    set_all(pool, [2.0, 8.0, 2.0, 4.0])
    set_all(pool, [1.0, 1.0, 1.0, 1.0])
    add(pool, 4, 5)
    batch = pool.sample(5, beta=1.0)
    assert (batch["number"] == 4).sum() >= 3  # 8 of 12 parts
    np.testing.assert_allclose(batch["weight"], np.where(batch["number"] == 4, 0.125, 1.0))


def test_indexes_of_transitions_that_are_gone_change_nothing() -> None:
    pool = pool_of(4, pool_size=4)
    stale = pool.sample(4)["index"]
    add(pool, 4, 8)  # over all of them
    pool.update_priorities(stale, torch.full((4,), 1000.0))
    assert counts(pool, 50, 4, 8).tolist() == [0] * 4 + [50] * 4
    add(pool, 8, 9)
    assert pool.sample(4)["weight"].tolist() == [1.0] * 4  # nor the largest priority so far


def test_indexes_that_never_were_change_nothing() -> None:
    pool = pool_of(4, pool_size=8)
    pool.update_priorities([-1, 4, 10**15], [9.0, 9.0, 9.0])
    assert pool.sample(4)["weight"].tolist() == [1.0] * 4


def test_of_an_index_that_is_given_twice_the_last_priority_counts() -> None:
    pool = pool_of(2)
    first, second = index_of_all(pool)
    pool.update_priorities([first, second, first], [5.0, 0.0, 1.0])
    pool.update_priorities([second, second], [0.0, 3.0])
    batch = pool.sample(2, beta=1.0)
    while set(batch["number"].tolist()) != {0, 1}:
        batch = pool.sample(2, beta=1.0)
    assert batch["weight"].tolist() == pytest.approx([1.0, 1 / 3])


def test_tensors_arrays_and_lists_of_priorities_are_taken() -> None:
    pool = pool_of(4)
    index = index_of_all(pool)
    losses = torch.tensor([1.0, 0.0, 0.0, 0.0], requires_grad=True)
    pool.update_priorities(torch.from_numpy(index), losses)
    assert pool.sample(4)["number"].tolist() == [0] * 4
    pool.update_priorities(index.tolist(), [0, 1, 0, 0])
    assert pool.sample(4)["number"].tolist() == [1] * 4
    pool.update_priorities(torch.from_numpy(index), losses.flip(0).bfloat16())
    assert pool.sample(4)["number"].tolist() == [3] * 4
    pool.update_priorities([], [])


@pytest.mark.parametrize(
    ("index", "priorities", "name"),
    [
        ([0, 1], [1.0], "priorities have"),
        ([0], [-1.0], "priorities"),
        ([0], [float("nan")], "priorities"),
        ([0], [float("inf")], "priorities"),
        ([0], ["high"], "priorities"),
        ([0], None, "priorities"),
        ([0], [1e200], "priorities as large as 1e.200"),
        ([0.0], [1.0], "index"),
        (0, 1.0, "index"),
        ([[0]], [[1.0]], "index"),
        (["first"], [1.0], "index"),
        (None, [1.0], "index"),
    ],
)
def test_priorities_that_make_no_sense_are_refused_and_change_nothing(
    index: Any, priorities: Any, name: str
) -> None:
    pool = pool_of(3, alpha=2.0)
    set_all(pool, [1.0, 2.0, 3.0])
    before = pool._tree.leaves.copy()  # type: ignore[union-attr]
    with pytest.raises(SpecError, match=name):
        pool.update_priorities(index, priorities)
    np.testing.assert_array_equal(pool._tree.leaves, before)  # type: ignore[union-attr]


def test_priorities_of_a_pool_that_samples_uniformly_are_refused() -> None:
    pool = Pool(pool_size=4)
    add(pool, 0, 4)
    with pytest.raises(UsageError, match="priority_exponent"):
        pool.update_priorities([0], [1.0])


def test_clearing_drops_priorities_too() -> None:
    pool = pool_of(6, pool_size=6)
    set_all(pool, [9.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    pool.clear()
    assert pool._tree is not None
    assert pool._tree.total == 0.0
    add(pool, 6, 8)
    assert set(pool.sample(2)["number"].tolist()) == {6, 7}


# The tree ------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [1, 63, 64, 65, 5000, 2**14 + 1, 2_000_000])
def test_the_tree_finds_any_row(capacity: int) -> None:
    tree = PriorityTree(capacity)
    generator = np.random.default_rng(0)
    rows = np.unique(generator.integers(capacity, size=20))
    tree.set(rows, np.full(len(rows), 0.5))
    assert tree.total == pytest.approx(0.5 * len(rows))
    assert tree.draw(len(rows), generator).tolist() == rows.tolist()
    tree.fill(slice(0, capacity), 0.0)
    tree.set(np.array([capacity - 1]), np.array([1e-9]))
    assert tree.total == pytest.approx(1e-9)
    assert tree.draw(3, generator).tolist() == [capacity - 1] * 3


def test_sums_of_the_tree_do_not_drift() -> None:
    tree = PriorityTree(100_000)
    generator = np.random.default_rng(0)
    for _ in range(200):
        rows = generator.integers(100_000, size=64)
        tree.set(rows, generator.random(64) * 10.0 ** generator.integers(-8, 8))
    assert tree.total == pytest.approx(tree.leaves.sum(), rel=1e-12)
    tree.fill(slice(0, 100_000), 0.0)
    assert tree.total == 0.0
