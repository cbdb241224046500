"""``check_env``: whether an environment does what rlpool relies on.

Each check is a generator function below; they run in the order of ``ENV_CHECKS``. An asterisk marks
those that only give warnings:

- ``creation``: the function makes a new environment in each call.
- ``picklable``: the function can be sent to a worker.
- ``spaces``: the spaces exist, have a fixed shape, and make sense to Gymnasium.
- ``reset_takes_arguments``: ``reset`` takes ``seed`` and ``options``.
- ``runs``: ``reset`` and ``step`` do not raise, and return two and five values.
- ``observations_fit``: keys, shapes, dtypes and bounds are those of the space.
- ``rewards_are_numbers``, ``flags_are_bools``, ``values_are_finite``.
- ``seeding``: a vector environment can be seeded as its ``VectorGymEnv`` says.
- ``repeats``: the same seed and the same actions give the same bits, whatever ran in between,
  finished or not, and whatever the state of the global random generators.
- ``fresh_instance_repeats``: so does another instance, made with another ``seed`` of
  ``create_env``. Running an episode again after a crash needs that. Both are left out for vector
  environments that nothing seeds, ``lanes_agree`` also for those whose lanes are reset together.
- ``no_global_generators`` *: nothing is drawn from ``random``, ``numpy.random`` or ``torch``.
- ``own_buffers`` *: an observation that was handed out is not changed later.
- ``lanes_agree``: an episode has the same bits in every lane and beside any other episodes.
- ``closes``: ``close`` does not raise.
- ``gymnasium_checker`` *: what else ``gymnasium.utils.env_checker`` finds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces as gym_spaces
from gymnasium.utils import env_checker, passive_env_checker
from torch.utils import _pytree as pytree

from rlpool.envs.columns import checked_results, converted
from rlpool.envs.gym_env import GymEnv
from rlpool.envs.legacy import LegacyEnv, reset_arguments
from rlpool.envs.vec_env import VecEnv
from rlpool.envs.vector_gym_env import VectorGymEnv
from rlpool.envs.vector_seeding import detected_seeding
from rlpool.errors import EnvSpecError, SpecError
from rlpool.record.failures import described, reset_advice
from rlpool.seeding import SEEDINGS, Seeding, seeded_generators
from rlpool.specs import flattener, leaves_of, structure_of_space
from rlpool.testing import report
from rlpool.testing.episodes import EnvSubject, Lane, bits, difference, lanes_of, place, shortly
from rlpool.testing.report import CannotCheck, Failed, Finding, error, user_code, warning

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
_RESET = "def reset(self, *, seed=None, options=None): super().reset(seed=seed) ..."
_RESULTS = (
    "reset() returns (observation, info), step() returns (observation, reward, terminated, "
    "truncated, info); neither raises"
)
_RNG_FIX = "draw from self.np_random, which super().reset(seed=seed) seeds, and from nothing else"


def spaces(subject: EnvSubject) -> Findings:
    """Both spaces are declared and have fixed shapes."""
    made, env = subject.closed
    if isinstance(env, Lane):
        return  # the VecEnv has read the spaces
    for name in ("observation_space", "action_space"):
        space = getattr(env, name, None)
        if space is None:
            fix = f"declare self.{name}: without it, shapes come from the first values"
            yield warning(f"there is no {name}", fix)
            continue
        check = getattr(passive_env_checker, f"check_{name}")
        complaints, failure = _complaints_of(check, space)
        yield from (warning(text, f"correct self.{name}") for text in complaints)
        if failure:
            yield error(f"{name}: {failure}", f"correct self.{name}")
    try:
        _ = made if isinstance(made, GymEnv) else GymEnv([made])
    except SpecError as refusal:
        yield error(refusal.what, refusal.fix or "wrap the environment")


def reset_takes_arguments(subject: EnvSubject) -> Findings:
    """``reset`` takes ``seed`` and ``options``."""
    inner = _single_env(subject)
    while isinstance(inner, gymnasium.Wrapper | LegacyEnv):
        inner = inner.inner if isinstance(inner, LegacyEnv) else inner.env
    arguments = reset_arguments(inner)
    if "seed" not in arguments and not callable(getattr(inner, "seed", None)):
        yield error("reset() takes no seed, so that no episode can be repeated", _RESET)
    has_task = callable(getattr(inner, "reset_task", None))
    if not has_task and not arguments.keys() & {"options", "env_info", "task"}:
        yield warning("reset() takes no options, so that env_info does not reach it", _RESET)


def runs(subject: EnvSubject) -> Findings:
    """Episodes run without an exception, and return what Gymnasium says."""
    for episode in subject.episodes:
        if failure := episode.failure:
            fix = _RESULTS
            if not episode.steps and failure.__cause__ is not None:
                fix = reset_advice(failure.__cause__, subject.options) or fix
                if "env_info" in fix:
                    fix = 'if it needs options, pass them: check_env(env, options={"task": ...})'
            yield error(f"{failure} (episode seed {episode.seed})", fix)
            return
    for where, _ in _first(subject, "info", lambda info: not isinstance(info, dict)):
        yield warning(f"{where}: info is not a dict", "return a dict as info, {} for nothing")


def observations_fit(subject: EnvSubject) -> Findings:
    """Every observation is in the space: keys, shape, dtype, bounds."""
    space = getattr(_single_env(subject), "observation_space", None)
    if space is None:
        raise CannotCheck("there is no observation_space")
    reported: set[str] = set()  # the first word of a finding is the key
    for where, step in _steps(subject):
        for found in misfits(space, step.observation, "observation"):
            if (key := found.what.split()[0]) not in reported:
                reported.add(key)
                yield error(f"{where}: {found.what}", found.fix)


def misfits(space: Any, value: Any, name: str) -> Findings:
    """Which parts of a value are not in a space; outside the bounds of a ``Box`` is a warning."""
    fix = f"return what {name}_space declares, or declare what is returned"
    structure = structure_of_space(space, keep_float64=True, name=name)
    try:
        parts = flattener(structure, name)(value)
    except SpecError as refusal:
        yield error(str(refusal), fix)
        return
    leaves = leaves_of({name: structure}, "")
    for (key, leaf), inner, part in zip(leaves.items(), _leaf_spaces(space), parts, strict=True):
        try:
            array = converted(part, leaf.spec, key)
        except SpecError as refusal:
            yield error(str(refusal), fix)
            continue
        stored = part if isinstance(part, np.ndarray | np.generic) else array
        if not _has(np.isnan, array) and not inner.contains(stored):
            bounds = f" from {array.min()} to {array.max()}" if array.size else ""
            given = f"{stored.dtype}{list(stored.shape)}"
            what = f"{key!r} is {given}{bounds}, which is not in {inner}"
            yield warning(what, fix) if isinstance(inner, gym_spaces.Box) else error(what, fix)


def _leaf_spaces(space: Any) -> list[Any]:
    """The spaces within a space, in the order of ``flattener``."""
    if not isinstance(space, gym_spaces.Dict | gym_spaces.Tuple):
        return [space]
    inner = space.spaces.values() if isinstance(space, gym_spaces.Dict) else space.spaces
    return [leaf for part in inner for leaf in _leaf_spaces(part)]


def rewards_are_numbers(subject: EnvSubject) -> Findings:
    """Every reward is one number that float32 holds."""
    for where, step in _steps(subject, with_resets=False):
        try:
            checked_results([0], ([step.reward], [False], [False]))
        except SpecError as refusal:
            fix = refusal.fix or "return one number, such as float(reward)"
            yield error(f"{where}: {refusal.what}", fix)
            return


def flags_are_bools(subject: EnvSubject) -> Findings:
    """``terminated`` and ``truncated`` are True or False."""
    for name in ("terminated", "truncated"):
        for where, flag in _first(subject, name, lambda it: not isinstance(it, bool | np.bool_)):
            what = f"{where}: {name} is {shortly(flag)}, of type {type(flag).__name__}"
            yield error(what, f"return bool({name})")


def values_are_finite(subject: EnvSubject) -> Findings:
    """No NaN in observations and rewards, no infinite reward."""
    for name in ("observation", "reward"):
        for where, _ in _first(subject, name, partial(_has, np.isnan)):
            fix = "find the division or logarithm that it comes from: one NaN spoils a network"
            yield error(f"{where}: the {name} is NaN, or contains NaN", fix)
    for where, _ in _first(subject, "reward", partial(_has, np.isinf)):
        yield warning(f"{where}: the reward is infinite", "bound the reward")


def seeding(subject: EnvSubject) -> Findings:
    """A vector environment can be seeded as its ``VectorGymEnv`` says."""
    with subject.opened() as instance:
        if not isinstance(instance.vec, VectorGymEnv):
            return  # nothing is said
        claimed, found = instance.vec.seeding, detected_seeding(instance.vec.vector_env)
        if SEEDINGS.index(claimed) < SEEDINGS.index(found):
            yield error(
                f"VectorGymEnv has seeding={claimed!r}, but its resets show only {found!r}",
                "leave out the argument; or let reset() seed what it says: single lanes, by "
                'seed=[...] and options={"reset_mask": ...}, for "episode"',
            )


def repeats(subject: EnvSubject) -> Findings:
    """The same seed and actions give the same bits, whatever ran in between."""
    _refuse_unseeded(subject, "episode", "request")
    with subject.opened() as instance:
        with seeded_generators(1):
            first = subject.run(instance, 0).unless_failed()
            subject.run(instance, 1)
            subject.run(instance, 1, n_steps=max(1, subject.n_steps // 3))
        with seeded_generators(2):
            what = difference(first, subject.run(instance, 0).unless_failed())
    if what:
        what = f"reset(seed={first.seed}) and the same actions twice, others in between: {what}"
        yield error(what, f"let reset() restore everything; {_RNG_FIX}")


def fresh_instance_repeats(subject: EnvSubject) -> Findings:
    """Another instance gives the same bits, as after a worker was replaced."""
    _refuse_no_copy(subject)
    _refuse_unseeded(subject, "episode", "request")
    first = subject.episodes[0].unless_failed()
    with subject.opened(1) as instance, seeded_generators(1):
        what = difference(first, subject.run(instance, 0))
    if what:
        what = f"reset(seed={first.seed}) and the same actions in two instances: {what}"
        yield error(what, "let episodes depend on reset(seed, options) and the actions alone")


def no_global_generators(subject: EnvSubject) -> Findings:
    """Nothing is drawn from generators that the whole process shares."""
    if subject.episodes and subject.used_generators:
        names = subject.used_generators
        yield warning(f"episodes use the global random generators of {names}", _RNG_FIX)


def own_buffers(subject: EnvSubject) -> Findings:
    """An observation that was handed out stays as it was."""
    for where, step in _steps(subject):
        if bits(step.observation) != bits(step.handed_out):
            fix = "return a copy: rlpool copies observations at once, others may keep them"
            yield warning(f"{where}: the observation was changed later", fix)
            return


def lanes_agree(subject: EnvSubject) -> Findings:
    """An episode is the same in every lane of a ``GymEnv``, and beside any others."""
    _refuse_no_copy(subject)
    _refuse_unseeded(subject, "episode")
    with subject.opened(0) as first, subject.opened(1) as second, seeded_generators(1):
        vec = first.vec or GymEnv([first.made, second.made])
        lanes = lanes_of(vec)
        seeds = [subject.seeds[number % len(subject.seeds)] for number in range(vec.n_lanes)]
        for number, episode in enumerate(subject.run_together(lanes, seeds)):
            alone = subject.run_together([Lane(vec)], [episode.seed])[0]
            if what := difference(alone, episode.unless_failed()):
                what = f"an episode alone in lane 0, and in lane {number} beside others: {what}"
                yield error(what, "let environments be alike and share nothing that changes")
                return


def closes(subject: EnvSubject) -> Findings:
    """``close`` works, also a second time."""
    _refuse_no_copy(subject)
    with subject.opened() as instance, seeded_generators(1):
        subject.run(instance, 0, n_steps=1)
        for severity, which in ((error, "close()"), (warning, "a second close()")):
            try:
                with user_code(which):
                    instance.made.close()
            except Failed as failure:
                yield severity(str(failure), "let close() only free resources")
                return


def gymnasium_checker(subject: EnvSubject) -> Findings:
    """Gymnasium's own checker finds nothing else."""
    if subject.findings:
        raise CannotCheck("it would repeat the findings above")
    env = _single_env(subject)
    if not isinstance(env, gymnasium.Env) or isinstance(env, LegacyEnv):
        raise CannotCheck("it only knows Gymnasium environments")
    check = partial(env_checker.check_env, skip_render_check=True, skip_close_check=True)
    with subject.opened() as instance, seeded_generators(1):
        complaints, failure = _complaints_of(check, instance.env)
    for text in dict.fromkeys([*complaints, failure] if failure else complaints):
        yield warning(text, "see gymnasium.utils.env_checker; rlpool works without it")


ENV_CHECKS: tuple[report.Check, ...] = (
    report.creation,
    report.picklable,
    spaces,
    reset_takes_arguments,
    runs,
    observations_fit,
    rewards_are_numbers,
    flags_are_bools,
    values_are_finite,
    seeding,
    repeats,
    fresh_instance_repeats,
    no_global_generators,
    own_buffers,
    lanes_agree,
    closes,
    gymnasium_checker,
)
"""All checks, in their order."""


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
) -> report.Report:
    """Check an environment for what rlpool needs, and report all problems at once.

    It runs in this process, on instances of its own: an instance that is given is copied, unless
    it cannot be. The process's global random generators are left as they were. Nothing interrupts
    an environment that hangs: set a time limit for the test. Findings carry the names of their
    checks, which ``help(rlpool.testing.EnvContract)`` lists.

    Args:
        env: What ``create_env`` of a batcher is, a function that makes a single environment, an
            environment, or an id for ``gymnasium.make``. Prefer functions: an instance cannot
            tell whether what makes it can be sent to a worker.
        env_args: Arguments of the function.
        options: ``options`` of every reset, like a row of ``env_info``.
        actions: Actions to take in turn, instead of samples of the action space.
        seed: Root of all seeds.
        n_episodes: How many episodes to look at; less than 2 means 2.
        n_steps: How many steps of an episode to look at.
        skip: Names of checks to leave out.
        strict: Whether to raise if there are errors. Warnings never raise; they are in the
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
    subject = EnvSubject(env, env_args, options, actions, seed, n_episodes, n_steps)
    found = report.run_checks(subject, ENV_CHECKS, skip)
    if strict and not found.ok:
        raise EnvSpecError(f"check_env: {found}")
    return found


def _single_env(subject: EnvSubject) -> Any:
    env = subject.closed.env
    if isinstance(env, Lane):
        raise CannotCheck("only a GymEnv has single environments to look at")
    return env


def _refuse_no_copy(subject: EnvSubject) -> None:
    if why := subject.why_no_copy:
        raise CannotCheck(f"the instance cannot be copied ({why}): pass what makes it")


def _refuse_unseeded(subject: EnvSubject, *enough: Seeding) -> None:
    made = subject.closed.made
    if isinstance(made, VecEnv) and made.seeding not in enough:
        raise CannotCheck(f"nothing is promised: its seeding is {made.seeding!r}")


def _steps(subject: EnvSubject, *, with_resets: bool = True) -> Iterator[tuple[str, Any]]:
    """What every call in every episode returned, and where."""
    for number, episode in enumerate(subject.episodes):
        for t, step in enumerate(episode.steps):
            if t or with_resets:
                yield f"episode {number}, {place(t)}", step


def _first(subject: EnvSubject, name: str, is_wrong: Callable[[Any], bool]) -> list[Any]:
    """Where the first wrong value of that name is, and the value, if there is one."""
    for where, step in _steps(subject, with_resets=name in ("observation", "info")):
        if is_wrong(value := getattr(step, name)):
            return [(where, value)]
    return []


def _has(test: Callable[[Any], Any], value: Any) -> bool:
    """Whether a test holds for one of the floats in a nested value."""
    arrays = (np.asarray(leaf) for leaf in pytree.tree_leaves(value))
    return any(array.dtype.kind == "f" and bool(test(array).any()) for array in arrays)


def _complaints_of(check: Callable[[Any], Any], checked: Any) -> tuple[list[str], str]:
    """What one of Gymnasium's checks warns about, and what it raises, if it does."""
    failure = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check(checked)
        except Exception as reason:
            failure = described(reason)
    texts = [str(each.message).replace("\x1b[33m", "").replace("\x1b[0m", "") for each in caught]
    texts = [text.removeprefix("WARN: ").strip() for text in texts]
    return [text for text in texts if not any(usual in text for usual in _USUAL)], failure
