"""Figures with uncertainty, and plots, of one evaluation or of two on the same seeds.

Requires SciPy and matplotlib (extra ``evaluation``). Bootstraps are seeded, so figures are
reproducible.

References:
    Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    McNemar, "Note on the sampling error of the difference between correlated proportions", 1947.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlpool.data.storage import NDArray
from rlpool.errors import SpecError
from rlpool.machine.arguments import real_number
from rlpool.machine.imports import import_extra

if TYPE_CHECKING:
    from rlpool.evaluation.result import Evaluation

_LEVEL = 0.95
_BOOTSTRAP = {"n_resamples": 9_999, "batch": 500, "vectorized": True, "confidence_level": _LEVEL}


class Estimate(NamedTuple):
    """A figure with its 95 % interval.

    Attributes:
        value: The figure.
        low: Lower end of the interval, NaN if there are too few values.
        high: Upper end.

    Example:
        >>> print(Estimate(3.25, 2.0, 4.5))
        3.25 [2, 4.5]
    """

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"

    def __str__(self) -> str:
        return f"{self:.4g}"


class Summary(NamedTuple):
    """Figures of one evaluation, from ``Evaluation.summary``.

    Attributes:
        n_episodes: Number of episodes that count.
        n_failed: Number of episodes that failed for good, whether or not they count.
        mean: Mean return with its bootstrap interval (BCa).
        median: Median return.
        interquartile_mean: Mean of the middle half of the returns.
        std: Standard deviation over episodes (with n - 1); NaN for a single one.
        mean_length: Mean number of steps.
        success_rate: Rate of successes with Wilson's interval, ``None`` if the environments do not
            report successes.

    Example:
        >>> lengths = {"length": [2, 3, 4, 5]}
        >>> print(evaluate(create_agent(), create_env, 4, env_info=lengths).summary().mean_length)
        3.5
    """

    n_episodes: int
    n_failed: int
    mean: Estimate
    median: float
    interquartile_mean: float
    std: float
    mean_length: float
    success_rate: Estimate | None

    def __str__(self) -> str:
        return _table(self)


class Comparison(NamedTuple):
    """Paired comparison of two evaluations on the same seeds, from ``compare``.

    Attributes:
        n_pairs: Number of pairs of episodes with the same seed.
        n_unpaired: Number of episodes without a partner, which do not count.
        difference: Mean of the first one's returns minus the second one's.
        probability_of_improvement: Share of pairs in which the first one has the higher return;
            ties count half.
        success_difference: The first one's success rate minus the second one's, ``None`` if either
            does not have successes.
        mcnemar_p: p-value of McNemar's exact test of equal success rates.

    Example:
        >>> one, other = (evaluate(create_agent(), create_env, n_episodes=4) for _ in range(2))
        >>> compare(one, other).n_pairs
        4
    """

    n_pairs: int
    n_unpaired: int
    difference: Estimate
    probability_of_improvement: Estimate
    success_difference: float | None
    mcnemar_p: float | None

    def __str__(self) -> str:
        return _table(self)


def _table(figures: Summary | Comparison) -> str:
    """Format one line per known figure."""
    known = {name: value for name, value in figures._asdict().items() if value is not None}
    lines = [f"{name.replace('_', ' '):<26} {value:.6g}" for name, value in known.items()]
    return "\n".join([*lines, "(in brackets: intervals of 95 %)"])


def summary_of(evaluation: Evaluation, failures: str | float | None) -> Summary:
    """Compute ``Evaluation.summary``."""
    stats = import_extra("scipy.stats", "evaluation")
    returns, counts = returns_of(evaluation, failures)
    rate = None
    if evaluation.successes is not None:
        n_successes = int(evaluation.successes.numpy()[counts].sum())
        test = stats.binomtest(n_successes, len(returns))
        bounds = test.proportion_ci(_LEVEL, method="wilson")
        rate = Estimate(float(test.statistic), float(bounds.low), float(bounds.high))
    return Summary(
        n_episodes=len(returns),
        n_failed=evaluation.n_failed,
        mean=_interval(returns, "BCa"),
        median=float(np.median(returns)),
        interquartile_mean=float(stats.trim_mean(returns, 0.25)),
        std=float(returns.std(ddof=1)) if len(returns) > 1 else float("nan"),
        mean_length=float(evaluation.lengths.numpy()[counts].mean()),
        success_rate=rate,
    )


def returns_of(evaluation: Evaluation, failures: str | float | None) -> tuple[NDArray, NDArray]:
    """Return the float64 returns that count, and a bool mask of their episodes ``[n_episodes]``.

    Args:
        evaluation: The evaluation.
        failures: As for ``Evaluation.summary``.

    Raises:
        SpecError: If it is not an evaluation, ``failures`` is missing although episodes failed for
            good, all are excluded, or a return is not finite.
    """
    check_is_evaluation(evaluation)
    returns = evaluation.returns.double().numpy().copy()
    counts = np.ones(len(returns), bool)
    if failures is not None and failures != "exclude":
        fix = 'pass "exclude", or the return that failed episodes get'
        failures = real_number("failures", failures, "that is finite", fix=fix)
    if evaluation.n_failed and evaluation.failed is not None:
        failed = evaluation.failed.numpy()
        if failures is None:
            rows = np.flatnonzero(failed)
            why = evaluation.entries[rows[0]]["error"] if evaluation.entries else "unknown"
            raise SpecError(
                f"{len(rows)} of {len(returns)} episodes failed for good, the first is episode "
                f"{rows[0]}: {why.splitlines()[0]}",
                fix='decide how they count: failures="exclude", or failures=0.0 for a return of 0',
            )
        if failures == "exclude":
            counts = ~failed
        else:
            returns[failed] = failures
    if not counts.any():
        fix = "evaluate some, or pass a number as failures if all have failed"
        raise SpecError("the evaluation has no episodes that count", fix=fix)
    for episode in np.flatnonzero(counts & ~np.isfinite(returns)):
        message = f"the return of episode {episode} is {returns[episode]}"
        raise SpecError(message, fix="fix the environment's rewards: figures need finite returns")
    return returns[counts], counts


def compare(
    first: Evaluation, second: Evaluation, *, failures: str | float | None = None
) -> Comparison:
    """Compare two evaluations on the seeds that both have.

    Pairs share the seed of their environment, so that the start, the goal and anything else that
    the seed determines are the same in both. Needs the extra ``evaluation``.

    Args:
        first: An evaluation.
        second: Another one of the same environment, with the same ``seeds`` or ``episode_seeds``.
        failures: As for ``Evaluation.summary``; "exclude" drops the whole pair.

    Returns:
        Figures of the pairs.

    Raises:
        SpecError: If an argument is not an evaluation, the evaluations do not share a seed or have
            different environments or infos, or ``failures`` is missing although episodes failed.

    Example:
        >>> one, other = (evaluate(create_agent(), create_env, n_episodes=4) for _ in range(2))
        >>> compare(one, other).difference
        Estimate(value=0.0, low=0.0, high=0.0)
    """
    stats = import_extra("scipy.stats", "evaluation")
    pairs, n_unpaired = _pairs(first, second, failures)
    returns = pairs[:, :, 0]
    differences = returns[:, 0] - returns[:, 1]
    better = (np.sign(differences) + 1) / 2
    success, p_value = None, None
    if first.successes is not None and second.successes is not None:
        one, other = pairs[:, 0, 1] > 0, pairs[:, 1, 1] > 0
        only_first, only_second = int((one & ~other).sum()), int((other & ~one).sum())
        n_differing = only_first + only_second
        success = float(one.mean() - other.mean())
        p_value = stats.binomtest(only_first, n_differing).pvalue if n_differing else 1.0
    return Comparison(
        n_pairs=len(pairs),
        n_unpaired=n_unpaired,
        difference=_interval(differences, "BCa"),
        probability_of_improvement=_interval(better, "percentile"),
        success_difference=success,
        mcnemar_p=None if p_value is None else float(p_value),
    )


def check_is_evaluation(value: Any) -> None:
    """Refuse anything that is not an evaluation, such as its path."""
    if not hasattr(value, "returns"):
        fix = "pass a result of evaluate, or Evaluation.load(path)"
        raise SpecError(f"{value!r:.60} is not an Evaluation", fix=fix)


def differences(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> list[str]:
    """List the differences of two JSON objects, with both values."""
    found: list[str] = []
    for key in sorted(one.keys() | other.keys()):
        first, second = one.get(key), other.get(key)
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            found += differences(first, second, f"{prefix}{key}.")
        elif json.dumps(first) != json.dumps(second):  # NaN equals itself here
            found.append(f"{prefix}{key}: {first!r:.80} and {second!r:.80}")
    return found


def _interval(values: NDArray, method: str) -> Estimate:
    """Return the mean of values with its bootstrap interval."""
    value = float(values.mean())
    if len(values) < 2:
        return Estimate(value, float("nan"), float("nan"))
    if np.ptp(values) == 0:
        return Estimate(value, value, value)
    generator = np.random.default_rng(0)
    found = import_extra("scipy.stats", "evaluation").bootstrap(
        (values,), np.mean, method=method, random_state=generator, **_BOOTSTRAP
    )
    bounds = found.confidence_interval
    return Estimate(value, float(bounds.low), float(bounds.high))


def _pairs(
    first: Evaluation, second: Evaluation, failures: str | float | None
) -> tuple[NDArray, int]:
    """Pair episodes by seed: return and success ``[n, 2, 2]``, and the number of unpaired ones."""
    rows: list[dict[int, tuple[float, bool]]] = []
    for each in (first, second):
        returns, counts = returns_of(each, failures)
        seeds = each.seeds.numpy()[counts].tolist()
        if len(set(seeds)) < len(seeds):
            raise SpecError("seeds occur twice in one evaluation", fix="use each seed once")
        successes = counts if each.successes is None else each.successes.numpy()
        rows.append(dict(zip(seeds, zip(returns, successes[counts], strict=True), strict=True)))
    names = "environment", "env_args", "max_steps"
    one, other = ({name: e.protocol.get(name) for name in names} for e in (first, second))
    if differs := differences(one, other):
        message = f"the evaluations are of different environments: {'; '.join(differs[:3])}"
        raise SpecError(message, fix="compare policies on the same environment")
    pairs = [(row, rows[1][seed]) for seed, row in rows[0].items() if seed in rows[1]]
    if not pairs:
        fix = "evaluate both with the same seeds or episode_seeds"
        raise SpecError("the evaluations do not share a seed", fix=fix)
    return np.array(pairs, np.float64), len(rows[0]) + len(rows[1]) - 2 * len(pairs)


def plot(
    *evaluations: Evaluation,
    names: Sequence[str] | None = None,
    failures: str | float | None = None,
) -> Any:
    """Draw returns with mean and interval and, for two evaluations, the paired differences.

    Needs the extra ``evaluation``.

    Args:
        *evaluations: One or more.
        names: Their labels, by default their numbers.
        failures: As for ``Evaluation.summary``.

    Returns:
        A figure of matplotlib: ``plot(a, b).savefig("both.png")``.

    Raises:
        SpecError: If there is nothing to draw, and for two evaluations as in ``compare``.

    Example:
        >>> evaluation = evaluate(create_agent(), create_env, n_episodes=4)
        >>> plot(evaluation).savefig("evaluation.png")
    """
    if not evaluations:
        raise SpecError("there is nothing to plot", fix="pass evaluations: plot(a, b)")
    names = [str(number) for number in range(len(evaluations))] if names is None else list(names)
    if len(names) != len(evaluations):
        message = f"names has {len(names)} entries for {len(evaluations)} evaluations"
        raise SpecError(message, fix="give one name for each")
    are_paired = len(evaluations) == 2
    drawn = [(name, returns_of(e, failures)[0]) for name, e in zip(names, evaluations, strict=True)]
    figure = import_extra("matplotlib.figure", "evaluation").Figure(layout="constrained")
    figure.set_size_inches(10 if are_paired else 6, 4)
    axes = figure.subplots(1, 1 + are_paired, squeeze=False)[0]
    _draw(axes[0], drawn)
    axes[0].set(ylabel="return", title="returns, mean and 95 % interval")
    if are_paired:
        pairs, _ = _pairs(evaluations[0], evaluations[1], failures)
        _draw(axes[1], [(f"{names[0]} - {names[1]}", pairs[:, 0, 0] - pairs[:, 1, 0])])
        axes[1].axhline(0.0, color="gray", linewidth=1)
        axes[1].set(ylabel="difference of returns", title="pairs with the same seed")
    return figure


def _draw(axes: Any, columns: Sequence[tuple[str, NDArray]]) -> None:
    """Draw values in columns, each with its mean and interval."""
    for number, (_, values) in enumerate(columns):
        mean = _interval(values, "BCa")
        spread = number + np.linspace(-0.2, 0.2, len(values))
        axes.scatter(spread, np.sort(values), s=6, alpha=0.5)
        bars = np.nan_to_num([[mean.value - mean.low], [mean.high - mean.value]])
        axes.errorbar([number], [mean.value], bars, fmt="o", capsize=8, color="black")
    axes.set_xticks(range(len(columns)), [name for name, _ in columns])
