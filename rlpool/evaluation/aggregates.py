"""Figures of many runs on many tasks, with their uncertainty.

Reference:
    Agarwal et al., "Deep reinforcement learning at the edge of the statistical precipice",
    NeurIPS 2021: interquartile mean, optimality gap, performance profile, stratified bootstrap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlpool.errors import SpecError
from rlpool.evaluation.figures import N_RESAMPLES, Estimate, interval, returns_of, scipy_stats
from rlpool.machine.arguments import names_arguments, real_number
from rlpool.memory.storage import Array


class Aggregate(NamedTuple):
    """Figures over runs and tasks, see ``aggregate``.

    Attributes:
        scores: float64 ``[runs, tasks]``, normalised.
        mean: Mean score.
        median: Median over tasks of the mean over runs.
        interquartile_mean: Mean of the middle half of all scores.
        optimality_gap: By how much scores fall short of ``gamma`` on average.
        thresholds: float64 ``[n]``.
        profile: Per threshold, the share of scores above it.

    Example:
        >>> aggregate([[0.2, 0.4], [0.6, 0.8]], thresholds=[0.5]).profile[0].value
        0.5
    """

    scores: Array
    mean: Estimate
    median: Estimate
    interquartile_mean: Estimate
    optimality_gap: Estimate
    thresholds: Array
    profile: tuple[Estimate, ...]

    def __str__(self) -> str:
        n_runs, n_tasks = self.scores.shape
        return "\n".join(
            [
                f"runs × tasks         {n_runs} × {n_tasks}, intervals of 95 %",
                f"interquartile mean   {self.interquartile_mean}",
                f"mean                 {self.mean}",
                f"median               {self.median}",
                f"optimality gap       {self.optimality_gap}",
            ]
        )


@names_arguments
def aggregate(
    scores: Any,
    *,
    normalize: Any = None,
    gamma: float = 1.0,
    thresholds: Sequence[float] | Array | None = None,
    failures: str | float | None = None,
    n_resamples: int = N_RESAMPLES,
) -> Aggregate:
    """Figures over training seeds and tasks, with stratified bootstrap intervals.

    Runs are resampled within each task. Needs the extra ``evaluation``.

    Args:
        scores: A mapping of tasks to the evaluations of their runs, a list of the evaluations of
            the runs of one task, or a matrix ``[runs, tasks]``. The score of an evaluation is its
            mean return.
        normalize: ``(low, high)``, or a mapping of tasks to that: what has the scores 0 and 1, such
            as a random policy and a person. By default scores stay as they are.
        gamma: The score that the optimality gap is measured from.
        thresholds: Of the performance profile; 101 from the lowest to the highest score by default.
        failures: See ``Evaluation.summary``.
        n_resamples: How many resamples the intervals are made of.

    Returns:
        The figures. With a single run per task the intervals are NaN.

    Raises:
        SpecError: For tasks with different numbers of runs, scores that are no numbers, or ranges
            without an extent.

    Reference:
        Agarwal et al. 2021, as in rliable.

    Example:
        >>> figures = aggregate([[0.2, 0.4], [0.6, 0.8], [0.3, 0.9], [0.5, 0.5]])
        >>> round(figures.interquartile_mean.value, 3), round(figures.optimality_gap.value, 3)
        (0.5, 0.475)
    """
    stats = scipy_stats()
    matrix = _matrix_of(scores, normalize, failures)
    gamma = real_number("gamma", gamma, "that is finite")
    columns = tuple(matrix.T)

    def of_all(statistic: Callable[..., Any]) -> Estimate:
        def joined(*samples: Array, axis: int = -1) -> Any:
            return statistic(np.stack(samples, -2))

        return interval(columns, joined, "percentile", n_resamples)

    def flattened(drawn: Array) -> Array:
        return drawn.reshape(*drawn.shape[:-2], -1)

    if thresholds is None:
        thresholds = np.linspace(matrix.min(), matrix.max(), 101)
    taus = np.asarray(thresholds, np.float64)
    return Aggregate(
        scores=matrix,
        mean=of_all(lambda drawn: drawn.mean(-1).mean(-1)),
        median=of_all(lambda drawn: np.median(drawn.mean(-1), -1)),
        interquartile_mean=of_all(lambda drawn: stats.trim_mean(flattened(drawn), 0.25, axis=-1)),
        optimality_gap=of_all(lambda drawn: gamma - np.minimum(flattened(drawn), gamma).mean(-1)),
        thresholds=taus,
        profile=tuple(
            of_all(lambda drawn, tau=tau: (flattened(drawn) > tau).mean(-1)) for tau in taus
        ),
    )


def _matrix_of(scores: Any, normalize: Any, failures: str | float | None) -> Array:
    """Scores ``[runs, tasks]``, normalised."""
    tasks: list[Any] = [0]
    if isinstance(scores, Mapping):
        tasks, scores = list(scores), list(scores.values())
        columns = [[_score(run, failures) for run in runs] for runs in scores]
    elif isinstance(scores, list | tuple) and scores and hasattr(scores[0], "returns"):
        columns = [[_score(run, failures) for run in scores]]
    else:
        columns = np.atleast_2d(np.asarray(scores, np.float64)).T.tolist()
        tasks = list(range(len(columns)))
    sizes = {str(task): len(column) for task, column in zip(tasks, columns, strict=True)}
    if not sizes or not all(sizes.values()) or len(set(sizes.values())) > 1:
        what = f"numbers of runs by task: {sizes}"
        raise SpecError(what, fix="give every task as many runs, at least one")
    matrix: Array = np.array(columns, np.float64).T
    if not np.isfinite(matrix).all():
        raise SpecError("scores are not finite", fix="leave out runs that diverged, and say so")
    for column, task in enumerate(tasks if normalize is not None else ()):
        low, high = normalize[task] if isinstance(normalize, Mapping) else normalize
        if not high > low:
            what = f"normalize has the range {low} to {high}"
            raise SpecError(what, fix="pass (low, high) with low < high")
        matrix[:, column] = (matrix[:, column] - low) / (high - low)
    return matrix


def _score(run: Any, failures: str | float | None) -> float:
    if isinstance(run, int | float | np.number):
        return float(run)
    return float(returns_of(run, failures)[0].mean())
