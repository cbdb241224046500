"""Figures of evaluations, compared with definitions written with loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import Estimate, Evaluation, SpecError, aggregate, compare

RETURNS = [1.0, 4.0, 2.0, 8.0, 5.0, 7.0, 3.0, 6.0]


def evaluation_of(returns: Any, successes: Any = None, seeds: Any = None) -> Evaluation:
    n = len(returns)
    return Evaluation(
        returns=torch.tensor(returns, dtype=torch.float32),
        lengths=torch.arange(1, n + 1),
        successes=None if successes is None else torch.tensor(successes),
        seeds=torch.arange(n) if seeds is None else torch.tensor(seeds),
    )


ONE = evaluation_of(RETURNS)


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


@pytest.mark.parametrize(
    ("returns", "failures", "message"),
    [
        (
            RETURNS,
            "skip",
            "(?s)failures should be a number that is finite, got 'skip'.*\"exclude\"",
        ),
        ([], None, "the evaluation has no episodes"),
    ],
)
def test_what_cannot_be_summarised_is_refused(returns: Any, failures: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        evaluation_of(returns).summary(failures=failures)


def test_paths_are_not_compared() -> None:
    with pytest.raises(SpecError, match=r"(?s)second should be an Evaluation, got 'b.json'.*load"):
        compare(ONE, "b.json")  # type: ignore[arg-type]


def test_seeds_that_repeat_cannot_be_paired() -> None:
    twice = evaluation_of([1.0, 2.0], seeds=[3, 3])
    with pytest.raises(SpecError, match="seed 3 occurs 2 times"):
        compare(twice, twice)


def test_aggregates_follow_their_definitions() -> None:
    generator = np.random.default_rng(0)
    scores = generator.uniform(0, 1.5, (5, 4))
    found = aggregate(scores, thresholds=[0.0, 0.5, 2.0], n_resamples=200)
    flat = sorted(scores.reshape(-1))
    assert found.interquartile_mean.value == pytest.approx(np.mean(flat[5:15]))
    assert found.mean.value == pytest.approx(scores.mean())
    assert found.median.value == pytest.approx(np.median(scores.mean(0)))
    assert found.optimality_gap.value == pytest.approx(1 - np.minimum(scores, 1).mean())
    assert [point.value for point in found.profile] == [1.0, (scores > 0.5).mean(), 0.0]
    for estimate in (found.interquartile_mean, found.mean, found.optimality_gap):
        assert estimate.low < estimate.value < estimate.high


def test_runs_are_drawn_within_their_tasks() -> None:
    # Between tasks everything differs, within them nothing: nothing is left to chance.
    found = aggregate([[0.0, 1.0, 5.0]] * 3, n_resamples=50)
    assert found.mean == Estimate(2.0, 2.0, 2.0)


def test_evaluations_by_task_are_normalised() -> None:
    runs = {"one": [[1.0, 3.0], [3.0, 5.0]], "two": [[10.0, 10.0], [20.0, 30.0]]}
    tasks = {task: [evaluation_of(run) for run in each] for task, each in runs.items()}
    found = aggregate(tasks, normalize={"one": (0, 4), "two": (10, 20)}, n_resamples=50)
    assert found.scores.tolist() == [[0.5, 0.0], [1.0, 1.5]]
    for runs in (tasks["one"], [2.0, 4.0], np.array([2, 4]), [tasks["one"][0], 4.0]):
        assert aggregate(runs, n_resamples=50).scores.tolist() == [[2.0], [4.0]]
    assert math.isnan(aggregate([[1.0, 2.0]]).mean.low)


@pytest.mark.parametrize(
    ("scores", "options", "message"),
    [
        ({"one": [1.0], "two": [1.0, 2.0]}, {}, "numbers of runs by task"),
        (
            [[1.0, float("nan")]],
            {},
            "each run of task 1 should be a number that is finite, got nan",
        ),
        ([[1.0], [2.0]], {"normalize": (3, 3)}, r"the range \[3.0, 3.0\] for the task 0"),
        ([[1.0], [2.0]], {"gamma": "one"}, "gamma should be a number"),
        (ONE, {}, r"(?s)scores should be a list, got Evaluation.*pass \{task: \[evaluation"),
        ({"a": ONE}, {}, r"scores\['a'\] should be a list, got Evaluation"),
        ((each for each in [ONE]), {}, "scores should be a list, got <generator"),
        ("12", {}, "scores should be a list, got '12'"),
        ([[1.0], ONE], {}, r"scores\[1\] should be a list, got Evaluation"),
        ([[1.0, 2.0], [3.0]], {}, r"numbers of runs by task: \{'0': 2, '1': 1\}"),
        ([], {}, "numbers of runs by task"),
        (np.zeros((2, 2, 2)), {}, r"each run of task 0 should be a number.*got \[0.0, 0.0\]"),
        ({"a": [1.0, "x"]}, {}, "each run of task 'a' should be a number that is finite, got 'x'"),
        ({"a": [1.0]}, {"normalize": {"b": (0, 1)}}, r"lacks the task 'a': it has \['b'\]"),
        ([1.0], {"normalize": 5}, "normalize should be a list, got 5"),
        ([1.0], {"normalize": (0,)}, r"the range \[0.0\]"),
        ([1.0], {"normalize": (0, math.inf)}, "number of normalize should be a number that is fin"),
        ([1.0], {"normalize": ((0, 1), (0, 2))}, r"number of normalize .* got \(0, 1\)"),
        ([1.0], {"thresholds": 0.5}, "thresholds should be a list, got 0.5"),
        ([1.0], {"thresholds": [math.nan]}, "each number of thresholds .* got nan"),
        ([1.0], {"n_resamples": 0}, "n_resamples should be an int of at least 1, got 0"),
        ([1.0], {"n_resamples": 1.5}, "n_resamples should be an int"),
    ],
)
def test_scores_that_cannot_be_aggregated_are_refused(
    scores: Any, options: Any, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        aggregate(scores, **options)
