"""Figures of evaluations, compared with definitions written with loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import Estimate, Evaluation, compare, plot

RETURNS = [1.0, 4.0, 2.0, 8.0, 5.0, 7.0, 3.0, 6.0]


def evaluation_of(returns: Any, successes: Any = None, seeds: Any = None) -> Evaluation:
    n = len(returns)
    return Evaluation(
        returns=torch.tensor(returns, dtype=torch.float32),
        lengths=torch.arange(1, n + 1),
        successes=None if successes is None else torch.tensor(successes),
        seeds=torch.arange(n) if seeds is None else torch.tensor(seeds),
    )


def test_a_summary_has_the_figures_by_their_definitions() -> None:
    summary = evaluation_of(RETURNS, [True] * 6 + [False] * 2).summary()
    assert summary.n_episodes == 8
    assert summary.mean.value == 4.5
    assert summary.mean.low < 4.5 < summary.mean.high
    assert summary.median == 4.5
    assert summary.interquartile_mean == np.mean(sorted(RETURNS)[2:6])
    assert summary.std == pytest.approx(math.sqrt(sum((r - 4.5) ** 2 for r in RETURNS) / 7))
    assert summary.mean_length == 4.5
    # Wilson's interval of 6 of 8, by its formula.
    z, p, n = 1.959964, 0.75, 8
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    width = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    assert summary.success_rate == pytest.approx((0.75, centre - width, centre + width))
    assert summary == evaluation_of(RETURNS, [True] * 6 + [False] * 2).summary()  # seeded
    low, high = summary.success_rate[1:]
    assert f"success rate               0.75 [{low:.6g}, {high:.6g}]" in str(summary).splitlines()


@pytest.mark.parametrize("n", [1, 2, 5])
def test_few_or_equal_returns_have_honest_intervals(n: int) -> None:
    summary = evaluation_of([3.0] * n, [True] * n).summary()
    assert summary.mean.value == summary.median == summary.interquartile_mean == 3.0
    assert math.isnan(summary.mean.low) == (n == 1)
    assert math.isnan(summary.std) == (n == 1)
    assert summary.success_rate is not None
    assert summary.success_rate.high == 1.0
    assert evaluation_of([1.0]).summary().success_rate is None
    assert "success" not in str(evaluation_of([1.0]).summary())


def test_pairs_are_those_of_the_same_seed() -> None:
    first = evaluation_of([1.0, 5.0, 3.0, 9.0], [True, True, False, True], [4, 7, 2, 1])
    second = evaluation_of([2.0, 1.0, 3.0, 0.0], [False, True, False, True], [2, 7, 4, 99])
    found = compare(first, second)
    # Seeds 4, 7 and 2: 1 - 3, 5 - 1, 3 - 2.
    assert (found.n_pairs, found.n_unpaired) == (3, 2)
    assert found.difference.value == 1.0
    assert found.probability_of_improvement.value == pytest.approx(2 / 3)
    assert found.success_difference == pytest.approx(1 / 3)
    assert found.mcnemar_p == 1.0  # one pair differs


def test_mcnemar_counts_pairs_that_differ() -> None:
    wins = evaluation_of([1.0] * 10, [True] * 10)
    losses = evaluation_of([0.0] * 10, [False] * 8 + [True] * 2)
    assert compare(wins, losses).mcnemar_p == pytest.approx(2 / 2**8)
    assert compare(wins, wins).mcnemar_p == 1.0
    assert compare(wins, wins).probability_of_improvement.value == 0.5
    assert compare(wins, wins).difference == Estimate(0.0, 0.0, 0.0)


def test_a_plot_has_all_returns_and_the_paired_differences() -> None:
    one, other = evaluation_of(RETURNS), evaluation_of([0.0] * 8)
    (axes,) = plot(one).axes
    (points,) = axes.collections[:1]
    assert sorted(points.get_offsets()[:, 1]) == sorted(RETURNS)
    assert len(plot(one, other, one).axes) == 1
    left, right = plot(one, other, names=["a", "b"]).axes
    assert [label.get_text() for label in left.get_xticklabels()] == ["a", "b"]
    assert right.get_xticklabels()[0].get_text() == "a - b"
    assert sorted(right.collections[0].get_offsets()[:, 1]) == sorted(RETURNS)
