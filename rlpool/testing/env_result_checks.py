"""Clauses about what ``reset`` and ``step`` of an environment return."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rlpool.envs.columns import converted
from rlpool.envs.vec_env import LaneError
from rlpool.errors import SpecError
from rlpool.record.failures import reset_advice
from rlpool.specs import DEFAULT_OBSERVATION_KEY, flattener, leaves_of, structure_of_space
from rlpool.testing.env_subject import EnvSubject
from rlpool.testing.episodes import Step, arrays_in, place
from rlpool.testing.findings import CannotCheck, Finding, error, warning
from rlpool.testing.misfits import misfits

Findings = Iterator[Finding]


def runs(subject: EnvSubject) -> Findings:
    """Episodes run without an exception, and give what Gymnasium says."""
    for episode in subject.episodes:
        if episode.failure:
            what = episode.failure
            fix = (
                "reset() returns (observation, info), step() returns (observation, reward, "
                "terminated, truncated, info); neither raises"
            )
            if episode.failure.startswith("reset raised"):
                other = _failure_without_seed(subject)
                if other is None:
                    what = f"reset(seed={episode.seed}) refused the seed: {what}"
                    fix = "take every int from 0 to 2**31 - 1, as super().reset(seed=seed) does"
                elif "env_info" in reset_advice(other, subject.options):
                    fix = 'if it needs options, pass them: check_env(env, options={"task": ...})'
            yield error("runs", what, fix)
            return
    for episode in subject.episodes:
        if any(not isinstance(step.info, dict) for step in episode.steps):
            yield warning("runs", "info is no dict", "return a dict as info, {} for nothing")
            return


def _failure_without_seed(subject: EnvSubject) -> BaseException | None:
    """What a reset raises that gets no seed."""
    with subject.opened() as opened:
        try:
            opened.runs.reset(seed=None, options=subject.options)
        except KeyboardInterrupt:
            raise
        except BaseException as failure:
            cause = failure.__cause__ if isinstance(failure, LaneError) else None
            return cause or failure
    return None


def observations_fit(subject: EnvSubject) -> Findings:
    """Every observation is in the space: keys, shape, dtype, bounds."""
    opened = subject.closed
    space = getattr(opened.env, "observation_space", None)
    if opened.env is None:
        raise CannotCheck("a VecEnv that is no GymEnv converts observations itself")
    if space is None:
        raise CannotCheck("there is no observation_space")
    try:
        structure = structure_of_space(space, keep_float64=False, name="observation_space")
    except SpecError:
        raise CannotCheck("the observation_space is not supported") from None
    leaves = leaves_of(structure, DEFAULT_OBSERVATION_KEY)
    flatten = flattener(structure, "observation")
    told: set[str] = set()
    for where, step in _steps(subject):
        found = list(misfits(space, step.observation, "observation"))
        if not found:
            try:
                for (key, leaf), value in zip(
                    leaves.items(), flatten(step.observation), strict=True
                ):
                    converted(value, leaf.spec, key)
            except (SpecError, ValueError, TypeError) as failure:
                found.append(("observation", str(failure)))
        for path, what in found:
            if path not in told:
                told.add(path)
                yield error(
                    "observations_fit",
                    f"{where}: {what}",
                    "return what observation_space declares, or declare what is returned",
                )


def rewards_are_numbers(subject: EnvSubject) -> Findings:
    """Every reward is one number."""
    for where, step in _steps(subject, with_resets=False):
        try:
            array = np.array(step.reward)
        except ValueError:
            array = np.empty(0)
        if array.ndim or array.dtype.kind not in "fiub":
            yield error(
                "rewards_are_numbers",
                f"{where}: the reward is {step.reward!r}",
                "return one number, such as float(reward)",
            )
            return


def flags_are_bools(subject: EnvSubject) -> Findings:
    """``terminated`` and ``truncated`` are True or False."""
    for name in ("terminated", "truncated"):
        for where, step in _steps(subject, with_resets=False):
            flag = getattr(step, name)
            if not isinstance(flag, bool | np.bool_):
                yield error(
                    "flags_are_bools",
                    f"{where}: {name} is {flag!r}, a {type(flag).__name__}",
                    f"return bool({name})",
                )
                break


def values_are_finite(subject: EnvSubject) -> Findings:
    """No NaN in observations and rewards, no infinite reward."""
    told: set[str] = set()
    for where, step in _steps(subject):
        for name, value in (("observation", step.observation), ("reward", step.reward)):
            if name not in told and _has(np.isnan, value):
                told.add(name)
                yield error(
                    "values_are_finite",
                    f"{where}: the {name} is NaN, or has NaN in it",
                    "one NaN spoils the parameters of a network: find the division or the "
                    "logarithm that it comes from",
                )
        if "infinity" not in told and _has(np.isinf, step.reward):
            told.add("infinity")
            yield warning(
                "values_are_finite", f"{where}: the reward is infinite", "bound the reward"
            )


def _steps(subject: EnvSubject, with_resets: bool = True) -> Iterator[tuple[str, Step]]:
    """Everything that episodes returned, and where."""
    for number, episode in enumerate(subject.episodes):
        for t, step in enumerate(episode.steps):
            if t or with_resets:
                yield f"episode {number}, {place(t)}", step


def _has(test: Any, value: Any) -> bool:
    arrays = arrays_in(value)
    if not arrays and isinstance(value, float | np.floating):
        arrays = [np.asarray(value)]
    return any(array.dtype.kind == "f" and bool(test(array).any()) for array in arrays)
