"""``check_env``: whether an environment keeps what rlpool builds on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlpool.errors import EnvSpecError, SpecError
from rlpool.generators import seeded_generators
from rlpool.testing.env_checks import ENV_CHECKS
from rlpool.testing.env_subject import EnvSubject
from rlpool.testing.findings import Report, refuse_no_mapping, run_checks


def check_env(
    env: Any,
    env_args: Mapping[str, Any] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    actions: Sequence[Any] | None = None,
    seed: int = 0,
    n_episodes: int = 3,
    n_steps: int = 100,
    skip: Collection[str] = (),
    strict: bool = True,
) -> Report:
    """Check an environment for what rlpool needs, and report all problems at once.

    It runs in this process, on instances of its own: an instance that is given is copied, unless
    it cannot be. It waits as long as the environment takes; against an environment that hangs, set
    a time limit for the test. The process's global random generators are left as they were.

    The checks, by the name that findings carry (those of warnings only with an asterisk):

    - ``creation``: the function gives a new environment in each call.
    - ``picklable``: the function can be sent to a worker.
    - ``spaces``: spaces are there, have a fixed shape, and make sense to Gymnasium.
    - ``reset_takes_arguments``: ``reset`` takes ``seed``, and ``options``.
    - ``runs``: ``reset`` and ``step`` do not raise, and return two and five values.
    - ``observations_fit``: keys, shapes, dtypes and bounds are those of the space.
    - ``rewards_are_numbers``, ``flags_are_bools``, ``values_are_finite``.
    - ``repeats``: one seed and the same actions give the same bits, with other episodes, finished
      or not, in between, and whatever the state of the global random generators.
    - ``fresh_instance_repeats``: so they do in another instance, made with another ``seed`` of
      ``create_env``. It is what running an episode again after a crash needs.
    - ``no_global_generators`` *: nothing is drawn from ``random``, ``numpy.random`` or ``torch``.
    - ``own_buffers`` *: an observation that was handed out is not changed later.
    - ``lanes_agree``: an episode has the same bits in every lane and beside any other episodes.
    - ``closes``: ``close`` does not raise.
    - ``gymnasium_checker`` *: what ``gymnasium.utils.env_checker`` finds beyond that.

    Args:
        env: What ``create_env`` of a batcher is, a function that makes a single environment, an
            environment, or an id for ``gymnasium.make``. Functions are to be preferred: an
            instance cannot tell whether what makes it can be sent to a worker.
        env_args: Arguments of the function.
        options: ``options`` of every reset, like a row of ``env_info``.
        actions: Actions to take in turns, instead of samples of the action space.
        seed: Root of all seeds.
        n_episodes: How many episodes to look at; less than 2 mean 2.
        n_steps: How many steps of an episode to look at.
        skip: Names of checks to leave out.
        strict: Whether to raise where there are errors. Warnings never raise; they are in the
            report, and go to the logger ``rlpool``.

    Returns:
        The report: ``findings``, each with ``check``, ``severity``, ``what`` and ``fix``; it is
        true if none is an error, and ``print(report)`` shows everything.

    Raises:
        EnvSpecError: If ``strict`` and there are errors, with all of them.
        SpecError: For arguments that make no sense.

    Example:
        >>> from rlpool.testing import CountingEnv
        >>> check_env(CountingEnv).ok
        True
    """
    refuse_no_mapping(env_args=env_args, options=options)
    _refuse_less_than_1(n_episodes=n_episodes, n_steps=n_steps)
    if actions is not None and not len(actions):
        raise SpecError("actions is empty", fix="give at least one action, or None")
    subject = EnvSubject(env, env_args, options, actions, seed, n_episodes, n_steps)
    with seeded_generators(0):
        report = run_checks(subject, subject.name, ENV_CHECKS, skip)
    if strict and not report.ok:
        raise EnvSpecError(f"check_env: {report}")
    return report


def _refuse_less_than_1(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise SpecError(f"{name} is {number}", fix=f"{name} should be at least 1")
