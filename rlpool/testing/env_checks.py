"""The clauses of the contract of an environment, one function each."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import cloudpickle
import gymnasium
from gymnasium.utils import env_checker, passive_env_checker

from rlpool.envs.ancestor_env import AncestorEnv, reset_arguments
from rlpool.envs.gym_env import GymEnv
from rlpool.errors import SpecError
from rlpool.generators import seeded_generators
from rlpool.record.failures import described
from rlpool.specs import structure_of_space
from rlpool.testing.env_repeat_checks import (
    fresh_instance_repeats,
    lanes_agree,
    no_global_generators,
    own_buffers,
    repeats,
)
from rlpool.testing.env_result_checks import (
    flags_are_bools,
    observations_fit,
    rewards_are_numbers,
    runs,
    values_are_finite,
)
from rlpool.testing.env_subject import EnvSubject, Opened, close_quietly
from rlpool.testing.findings import (
    CannotCheck,
    Check,
    Finding,
    error,
    from_spec_error,
    warning,
)

Findings = Iterator[Finding]

# What Gymnasium's checker says about spaces and wrappers that are perfectly usual, and about
# arguments that rlpool does not care about.
_USUAL = (
    "infinity",
    "normalized",
    "unwrapped",
    "`seed` function",
    "return_info",
    "default seed argument",
)


def creation(subject: EnvSubject) -> Findings:
    """It can be made, again and again."""
    if subject.is_instance:
        return
    made = []
    try:
        made = [subject.make(0), subject.make(1)]
    except KeyboardInterrupt:
        raise
    except BaseException as failure:
        yield error(
            "creation",
            f"{subject.name} raised {described(failure)}",
            "call it in this process to debug; arguments go into env_args={...}",
        )
        return
    try:
        subject.closed  # noqa: B018  (whether there is one)
    except CannotCheck as reason:
        yield error(
            "creation",
            f"{subject.name}: {reason}",
            "return a Gymnasium environment, or GymEnv([...environments...], seed)",
        )
        return
    finally:
        for each in made:
            close_quietly(each)
    if made[0] is made[1]:
        yield error(
            "creation",
            f"{subject.name} returned the same object twice",
            "make a new environment in every call: every lane needs its own",
        )


def picklable(subject: EnvSubject) -> Findings:
    """What makes it can be sent to a worker."""
    if subject.is_instance:
        raise CannotCheck("an instance was given: pass the function that makes it")
    try:
        cloudpickle.loads(cloudpickle.dumps(subject.sent_to_workers))
    except Exception as failure:
        yield error(
            "picklable",
            f"{subject.name} or its arguments cannot be pickled: {described(failure)}",
            "create inside the function what it needs, instead of capturing it",
        )


def spaces(subject: EnvSubject) -> Findings:
    """Both spaces are there and have fixed shapes."""
    opened = subject.closed
    if opened.env is None:
        return  # whoever made the VecEnv has read the spaces
    for name, check in (
        ("observation_space", passive_env_checker.check_observation_space),
        ("action_space", passive_env_checker.check_action_space),
    ):
        space = getattr(opened.env, name, None)
        if space is None:
            yield warning(
                "spaces",
                f"there is no {name}",
                f"declare self.{name}: without it shapes come from the first values",
            )
            continue
        try:
            structure_of_space(space, keep_float64=False, name=name)
            complaints = _complaints_of(check, space)
        except SpecError as failure:
            yield from_spec_error("spaces", failure, "wrap the environment")
            continue
        except Exception as failure:
            yield error("spaces", f"{name}: {described(failure)}", f"mend self.{name}")
            continue
        for complaint in complaints:
            yield warning("spaces", complaint, f"mend self.{name}")
    yield from _key_findings(opened)


def _key_findings(opened: Opened) -> Findings:
    """Keys of the observation that rlpool needs itself."""
    if opened.vec is not None:
        return
    try:
        GymEnv([opened.made])
    except SpecError as failure:
        if "is given by" in str(failure) or "both called" in str(failure):
            yield from_spec_error("spaces", failure, "wrap the environment")


def reset_takes_arguments(subject: EnvSubject) -> Findings:
    """``reset`` takes ``seed`` and ``options``."""
    opened = subject.closed
    if opened.env is None:
        raise CannotCheck("only environments of a GymEnv have a reset of their own")
    inner = opened.env
    while isinstance(inner, gymnasium.Wrapper):
        inner = inner.env
    adapted = inner.inner if isinstance(inner, AncestorEnv) else inner
    arguments = reset_arguments(adapted)
    if "seed" not in arguments and not callable(getattr(adapted, "seed", None)):
        yield error(
            "reset_takes_arguments",
            "reset() takes no seed, so that no episode can be repeated",
            "def reset(self, *, seed=None, options=None): super().reset(seed=seed) ...",
        )
    if not arguments & {"options", "env_info", "task"} and not callable(
        getattr(adapted, "reset_task", None)
    ):
        yield warning(
            "reset_takes_arguments",
            "reset() takes no options, so that env_info cannot reach the environment",
            "def reset(self, *, seed=None, options=None): ...",
        )


def closes(subject: EnvSubject) -> Findings:
    """``close`` works, also a second time."""
    if subject.is_instance and not subject.can_copy:
        raise CannotCheck("the instance cannot be copied, and closing it is yours")
    with subject.opened() as opened:
        with seeded_generators(1):
            subject.run(opened, 0, n_steps=1)
        for report, which in ((error, "close()"), (warning, "a second close()")):
            try:
                opened.made.close()
            except KeyboardInterrupt:
                raise
            except BaseException as failure:
                yield report(
                    "closes", f"{which} raised {described(failure)}", "let close() only free things"
                )
                return


def gymnasium_checker(subject: EnvSubject) -> Findings:
    """What Gymnasium's own checker has to say beyond the rest."""
    if not isinstance(subject.closed.env, gymnasium.Env) or isinstance(
        subject.closed.env, AncestorEnv
    ):
        raise CannotCheck("it only knows Gymnasium environments")
    with subject.opened() as opened:
        env = opened.env
        skip = {
            name: True
            for name in ("skip_render_check", "skip_close_check")
            if name in inspect.signature(env_checker.check_env).parameters
        }
        fix = "see gymnasium.utils.env_checker; rlpool works without"
        try:
            with seeded_generators(1):
                complaints = _complaints_of(lambda: env_checker.check_env(env, **skip))
        except KeyboardInterrupt:
            raise
        except BaseException as failure:
            yield warning("gymnasium_checker", described(failure), fix)
            return
        for complaint in dict.fromkeys(complaints):
            yield warning("gymnasium_checker", complaint, fix)


def _complaints_of(check: Any, *arguments: Any) -> list[str]:
    """What one of Gymnasium's checks warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(*arguments)
    texts = [str(each.message).replace("\x1b[33m", "").replace("\x1b[0m", "") for each in caught]
    texts = [text.removeprefix("WARN: ").strip() for text in texts]
    return [text for text in texts if not any(usual in text for usual in _USUAL)]


_RESULTS = (runs, observations_fit, rewards_are_numbers, flags_are_bools, values_are_finite)

ENV_CHECKS: list[Check[EnvSubject]] = [
    Check(function.__name__, function, is_broad=function is gymnasium_checker)
    for function in (
        creation,
        picklable,
        spaces,
        reset_takes_arguments,
        *_RESULTS,
        repeats,
        fresh_instance_repeats,
        no_global_generators,
        own_buffers,
        lanes_agree,
        closes,
        gymnasium_checker,
    )
]
"""All clauses, in the order in which they are checked."""
