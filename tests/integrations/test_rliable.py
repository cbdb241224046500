"""``aggregate`` beside rliable, on the same matrix of scores.

rliable needs pandas before version 3, and so an environment of its own: see ``.ci/run``.
"""

from __future__ import annotations

import numpy as np
import pytest

from rlpool import aggregate

rliable_library = pytest.importorskip("rliable.library", reason="needs rliable")
rliable_metrics = pytest.importorskip("rliable.metrics", reason="needs rliable")

SCORES = np.random.default_rng(3).gamma(2.0, 0.4, (5, 8))
METRICS = {
    "mean": "aggregate_mean",
    "median": "aggregate_median",
    "interquartile_mean": "aggregate_iqm",
    "optimality_gap": "aggregate_optimality_gap",
}


@pytest.mark.parametrize("ours", METRICS)
def test_figures_and_intervals_are_those_of_rliable(ours: str) -> None:
    metric = getattr(rliable_metrics, METRICS[ours])
    points, intervals = rliable_library.get_interval_estimates(
        {"agent": SCORES}, lambda scores: np.array([metric(scores)]), reps=20_000
    )
    found = getattr(aggregate(SCORES, n_resamples=20_000, thresholds=[0.5]), ours)
    assert found.value == pytest.approx(points["agent"][0], rel=1e-12)
    # Both are drawn at random: the ends agree as far as 20,000 resamples tell them.
    width = found.high - found.low
    low, high = intervals["agent"][:, 0]
    assert found.low == pytest.approx(low, abs=0.03 * width)
    assert found.high == pytest.approx(high, abs=0.03 * width)


def test_the_performance_profile_is_that_of_rliable() -> None:
    thresholds = np.linspace(0, 2, 9)
    profiles, bands = rliable_library.create_performance_profile(
        {"agent": SCORES}, thresholds, reps=4_000
    )
    found = aggregate(SCORES, thresholds=thresholds, n_resamples=4_000).profile
    assert [point.value for point in found] == pytest.approx(profiles["agent"].tolist())
    for point, low, high in zip(found, *bands["agent"], strict=True):
        assert point.low == pytest.approx(low, abs=0.03)
        assert point.high == pytest.approx(high, abs=0.03)
