"""Figures of many runs on many tasks, with their uncertainty.

Reference:
    Agarwal et al., "Deep reinforcement learning at the edge of the statistical precipice",
    NeurIPS 2021: interquartile mean, optimality gap, performance profile, stratified bootstrap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlpool.data.storage import NDArray
from rlpool.envs.columns import as_array
from rlpool.errors import SpecError
from rlpool.evaluation.figures import N_RESAMPLES, Estimate, interval, returns_of, scipy_stats
from rlpool.evaluation.result import Evaluation
from rlpool.machine.arguments import real_number, whole_number

_FORMS = "pass {task: [evaluation, ...]}, the list of one task's runs, or a matrix [runs, tasks]"


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

    scores: NDArray
    mean: Estimate
    median: Estimate
    interquartile_mean: Estimate
    optimality_gap: Estimate
    thresholds: NDArray
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


def aggregate(
    scores: Any,
    *,
    normalize: Any = None,
    gamma: float = 1.0,
    thresholds: Sequence[float] | NDArray | None = None,
    failures: str | float | None = None,
    n_resamples: int = N_RESAMPLES,
) -> Aggregate:
    """Figures over training seeds and tasks, with stratified bootstrap intervals.

    Runs are resampled within each task. Needs the extra ``evaluation``.

    Args:
        scores: A mapping of tasks to lists of their runs, the list of the runs of a single task, or
            a matrix ``[runs, tasks]``. A run is an evaluation, whose score is its mean return, or a
            score.
        normalize: ``(low, high)``, or a mapping of tasks to that: what has the scores 0 and 1, such
            as a random policy and a person. By default scores stay as they are.
        gamma: The score that the optimality gap is measured from.
        thresholds: Of the performance profile; 101 from the lowest to the highest score by default.
        failures: See ``Evaluation.summary``.
        n_resamples: How many resamples the intervals are made of.

    Returns:
        The figures. With a single run per task the intervals are NaN.

    Raises:
        SpecError: For tasks with different numbers of runs, what is no finite number, and ranges
            that are missing or have no extent.

    Reference:
        Agarwal et al. 2021, as in rliable.

    Example:
        >>> figures = aggregate([[0.2, 0.4], [0.6, 0.8], [0.3, 0.9], [0.5, 0.5]])
        >>> round(figures.interquartile_mean.value, 3), round(figures.optimality_gap.value, 3)
        (0.5, 0.475)
    """
    stats = scipy_stats()
    n_resamples = whole_number("n_resamples", n_resamples, 1)
    matrix = _matrix_of(scores, normalize, failures)
    gamma = real_number("gamma", gamma, "that is finite")
    columns = tuple(matrix.T)

    def of_all(statistic: Callable[..., Any]) -> Estimate:
        def joined(*samples: NDArray, axis: int = -1) -> Any:
            return statistic(np.stack(samples, -2))

        return interval(columns, joined, "percentile", n_resamples)

    def flattened(drawn: NDArray) -> NDArray:
        return drawn.reshape(*drawn.shape[:-2], -1)

    if thresholds is None:
        thresholds = np.linspace(matrix.min(), matrix.max(), 101)
    taus = np.array(_numbers("thresholds", thresholds, "pass a list of scores"), np.float64)
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


def _matrix_of(scores: Any, normalize: Any, failures: str | float | None) -> NDArray:
    """Scores ``[runs, tasks]``, normalised."""
    tasks = _runs_by_task(scores)
    sizes = {str(task): len(runs) for task, runs in tasks.items()}
    if not sizes or not all(sizes.values()) or len(set(sizes.values())) > 1:
        what = f"numbers of runs by task: {sizes}"
        raise SpecError(what, fix="give every task as many runs, at least one")
    columns = [[_score(task, run, failures) for run in runs] for task, runs in tasks.items()]
    matrix: NDArray = np.array(columns, np.float64).T
    for column, task in enumerate(tasks if normalize is not None else ()):
        low, high = _range_of(task, normalize)
        matrix[:, column] = (matrix[:, column] - low) / (high - low)
    return matrix


def _runs_by_task(scores: Any) -> dict[Any, list[Any]]:
    """The runs of each task; tasks of a matrix have the numbers of their columns."""
    if isinstance(scores, Mapping):
        return {task: _items(f"scores[{task!r}]", runs, _FORMS) for task, runs in scores.items()}
    rows = [_listed(row) for row in _items("scores", scores, _FORMS)]
    if not any(isinstance(row, Sequence) for row in rows):
        return {0: rows}
    matrix = [_items(f"scores[{number}]", row, _FORMS) for number, row in enumerate(rows)]
    columns = range(max(map(len, matrix)))
    return {column: [row[column] for row in matrix if column < len(row)] for column in columns}


def _score(task: Any, run: Any, failures: str | float | None) -> float:
    if isinstance(run, Evaluation):
        run = returns_of(run, failures)[0].mean()
    elif isinstance(run, bool | np.bool_):  # whether it succeeded
        run = int(run)
    fix = "pass evaluations or numbers; leave out runs that diverged, and say so"
    return real_number(f"the score of each run of task {task!r}", run, "that is finite", fix=fix)


def _range_of(task: Any, normalize: Any) -> list[float]:
    """What has the scores 0 and 1 in a task."""
    if isinstance(normalize, Mapping):
        if task not in normalize:
            what = f"normalize lacks the task {task!r}: it has {list(normalize)}"
            raise SpecError(what, fix="name the range of every task")
        normalize = normalize[task]
    fix = "pass (low, high) with low < high, or a mapping of tasks to that"
    ends = _numbers("normalize", normalize, fix)
    if len(ends) != 2 or not ends[0] < ends[1]:
        raise SpecError(f"normalize has the range {ends} for the task {task!r}", fix=fix)
    return ends


def _numbers(name: str, values: Any, fix: str) -> list[float]:
    each = f"each number of {name}"
    return [
        real_number(each, value, "that is finite", fix=fix) for value in _items(name, values, fix)
    ]


def _items(name: str, values: Any, fix: str) -> list[Any]:
    """What is in a sequence, or the rows of an array."""
    values = _listed(values)
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise SpecError(f"{name} should be a list, got {values!r:.60}", fix=fix)
    return list(values)


def _listed(values: Any) -> Any:
    """An array as lists; anything else as it is."""
    return as_array(values).tolist() if hasattr(values, "__array__") else values
