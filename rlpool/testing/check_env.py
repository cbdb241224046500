"""``check_env``: whether an environment does what rlpool relies on.

It runs in the lanes of a ``VecEnv``, as in a batcher, and what rlpool refuses is told in the words
of its errors. Beside ``creation`` and ``picklable`` the checks are

- ``runs``: episodes run without an exception and without a value that rlpool refuses, such as an
  observation of another shape or dtype, a reward that is no number or a flag that is no bool;
- ``observations_fit``: observations are in the space; outside the bounds of a ``Box`` is a warning;
- ``values_are_finite``: no NaN in observations and rewards; infinite ones are a warning;
- ``own_buffers`` *: an observation that was handed out is not changed later;
- ``repeats``: the same seed and the same actions give the same bits, whatever ran in between,
  finished or not, and whatever the state of the global random generators;
- ``fresh_instance_repeats``: so does another instance, made with another ``seed`` of
  ``create_env``, as after a crash; left out, as ``repeats``, for what nothing seeds;
- ``lanes_agree``: so does every lane, beside any other episodes; left out where lanes are reset
  together;
- ``closes``: ``close`` does not raise.

An asterisk marks those that only give warnings.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector import VectorEnv

from rlpool.envs.gym_env import GymEnv, is_environment
from rlpool.envs.vec_env import LaneError, Options, VecEnv
from rlpool.envs.vector_gym_env import as_vec_env
from rlpool.errors import EnvSpecError, SpecError, Where
from rlpool.machine.arguments import takes_keyword, whole_number
from rlpool.memory.storage import Array
from rlpool.record.failures import env_error
from rlpool.record.repeat import repeat_together
from rlpool.record.tape import Tape, action_row
from rlpool.seeding import episode_seeds, seeded_generators, worker_seed
from rlpool.specs import leaves_of, row_specs, structure_of_value
from rlpool.testing.checks import CannotCheck, Checks, Findings, Report, error, warning

_RNG = "let reset(seed=...) restore all state, draw from self.np_random alone, and share nothing"
_OPTIONS = "options to check_env: check_env(env, options={{{}}})"


class Step(NamedTuple):
    """What a reset or a step did.

    Attributes:
        place: Which call, and in which episode.
        row: The lane's row of ``VecEnv.current``.
        returned: What the environment of a ``GymEnv`` returned, ``None`` for other lanes.
        before: The observation in it, pickled at once: the environment may change it.
    """

    place: str
    row: dict[str, Array]
    returned: Any
    before: bytes


class EnvChecks(Checks):
    """Checks of an environment; the arguments are those of ``check_env``."""

    def __init__(
        self, env: Any, env_args: Any, seed: int, options: Options, n_episodes: int, n_steps: int
    ) -> None:
        source = partial(gymnasium.make, env) if isinstance(env, str) else env
        super().__init__(source, env_args, seed, _is_environment(source))
        self.name = env if isinstance(env, str) else self.name
        # The seed of a class means something else, and **kwargs may be those of an environment.
        maker = getattr(source, "func", source)
        is_env = inspect.isclass(maker) and not issubclass(maker, VecEnv)
        self.takes_seed = not is_env and takes_keyword(source, "seed", otherwise=False)
        self.options, self.n_steps = options, whole_number("n_steps", n_steps, 1)
        n_seeds = max(whole_number("n_episodes", n_episodes, 1), 2)
        self.seeds = episode_seeds(self.root, 0, n_seeds)
        self.actions: Sequence[Any] | None = None

    def make(self, number: int = 0) -> Any:
        """Make an environment, or a ``VecEnv`` of several."""
        made = as_vec_env(super().make(number), worker_seed(self.root, number))
        if not _is_environment(made):
            what = f"{self.name} returned {type(made).__name__}, not an environment"
            fix = "return a Gymnasium environment, or GymEnv([...environments...], seed)"
            raise SpecError(what, fix=fix)
        return made

    @contextmanager
    def lanes(self, number: int = 0, n_lanes: int = 1) -> Iterator[VecEnv]:
        """Lanes that nobody has used; ``n_lanes`` if single environments are made."""
        with ExitStack() as stack:
            envs = [stack.enter_context(self.made(number + lane)) for lane in range(n_lanes)]
            yield envs[0] if isinstance(envs[0], VecEnv) else GymEnv(envs)

    def episodes(
        self, vec: VecEnv, seeds: Sequence[int], n_steps: int | None = None
    ) -> list[list[Step]]:
        """Run episodes in the first lanes with the same actions, until one of them ends.

        Args:
            vec: The lanes.
            seeds: Seeds of the episodes.
            n_steps: How far, ``n_steps`` of the checks by default.

        Raises:
            EnvError: If one of them fails.
        """
        if isinstance(vec, GymEnv):
            vec.keeps_results = True
        actions = self._actions(vec, n_steps or self.n_steps)
        vec.declare_actions(row_specs(actions))
        vec.begin_anew()
        options = copy.deepcopy(self.options)
        tapes = {k: Tape(seed, options, chunks=[actions]) for k, seed in enumerate(seeds)}
        episodes: list[list[Step]] = [[] for _ in seeds]
        try:
            for moved in repeat_together(vec, tapes):
                results = vec.results if isinstance(vec, GymEnv) else [None] * len(moved)
                for result, (lane, reached) in zip(results, moved.items(), strict=True):
                    keys = (key for key in vec.current if key not in vec.varying_keys)
                    row = {key: np.array(vec.current[key][lane]) for key in keys}
                    call = f"step {reached.n_steps - 1}" if reached.n_steps else "reset"
                    place = f"{call} of the episode with seed {seeds[lane]}"
                    before = pickle.dumps(result and result[0])
                    episodes[lane].append(Step(place, row, result, before))
                if any(reached.has_ended for reached in moved.values()):
                    break
        except LaneError as failure:
            step, seed = max(len(episodes[0]) - 1, 0), dict(enumerate(seeds)).get(failure.lane)
            where = Where(lane=failure.lane, step=step, seed=seed)
            raise env_error(failure, where, options_as=_OPTIONS) from failure.__cause__
        return episodes

    def _actions(self, vec: VecEnv, n_steps: int) -> dict[str, Array]:
        """The actions of all episodes, ``[n_steps, ...]`` per key."""
        actions = self.actions
        if actions is None:
            space = copy.deepcopy(getattr(vec, "action_space", None))
            if space is None:
                raise CannotCheck("the environment has no action_space: pass actions=[...]")
            space.seed(self.seeds[0])
            actions = [space.sample() for _ in range(n_steps)]
        structure = structure_of_value(actions[0], keep_float64=True, name="action")
        specs = {key: leaf.spec for key, leaf in leaves_of({"action": structure}, "").items()}
        rows = [action_row(structure, specs, actions[t % len(actions)]) for t in range(n_steps)]
        return {key: np.concatenate([row[key] for row in rows]) for key in specs}

    @cached_property
    def steps(self) -> list[Step]:
        """Episodes of one instance, one after another."""
        with self.lanes() as vec, seeded_generators(1):
            self.space = getattr(vec, "observation_space", None)
            return [step for seed in self.seeds for step in self.episodes(vec, [seed])[0]]

    def runs(self) -> Findings:
        """Episodes run without an exception, and return what Gymnasium says."""
        for place, _, returned, _ in self.steps:
            if returned and not isinstance(returned[-1], dict):
                yield warning(f"{place}: info is not a dict", "return a dict, {} for nothing")

    def observations_fit(self) -> Findings:
        """Every observation is in the space."""
        for place, _, returned, _ in self.steps:
            if self.space is None or returned is None:
                raise CannotCheck("there are no observation_space and single environments")
            yield from outside(self.space, f"{place}: the observation", returned[0])

    def values_are_finite(self) -> Findings:
        """No NaN in observations and rewards, no infinite ones."""
        for place, row, _, _ in self.steps:
            for key in [key for key, array in row.items() if array.dtype.kind == "f"]:
                if not np.isfinite(row[key]).all():
                    severity = error if np.isnan(row[key]).any() else warning
                    fix = "find the division or logarithm that it comes from: one spoils a network"
                    yield severity(f"{place}: the {key} is {row[key]!s:.60}", fix)

    def own_buffers(self) -> Findings:
        """An observation that was handed out stays as it was."""
        for place, _, returned, before in self.steps:
            if returned and pickle.dumps(returned[0]) != before:
                fix = "return a copy: rlpool copies observations at once, others may keep them"
                yield warning(f"{place}: the observation was changed later", fix)

    def repeats(self) -> Findings:
        """The same seed and actions give the same bits, whatever ran in between."""
        with self.lanes() as vec:
            _refuse_unseeded(vec, "episode", "request")
            first, other = ([seed] for seed in self.seeds[:2])
            runs = (first,), (other,), (other, max(1, self.n_steps // 3)), (first,)
            one, _, _, again = (self.episodes(vec, *run)[0] for run in runs)
        yield from self._differing(one, again, "the same actions twice")

    def fresh_instance_repeats(self) -> Findings:
        """Another instance gives the same bits, as after a worker was replaced."""
        with self.lanes(1) as vec, seeded_generators(1):
            _refuse_unseeded(vec, "episode", "request")
            other = self.episodes(vec, self.seeds[:1])[0]
        yield from self._differing(self.steps, other, "the same actions in two instances")

    def lanes_agree(self) -> Findings:
        """An episode is the same in every lane, and beside any others."""
        with self.lanes(n_lanes=2) as vec, seeded_generators(1):
            _refuse_unseeded(vec, "episode")
            seeds = [self.seeds[lane % len(self.seeds)] for lane in range(vec.n_lanes)]
            for lane, beside in enumerate(self.episodes(vec, seeds)):
                alone = self.episodes(vec, [seeds[lane]])[0]
                how = f"alone in lane 0, and in lane {lane} beside others"
                yield from self._differing(alone, beside, how)

    def closes(self) -> Findings:
        """``close`` works."""
        with self.made() as made:
            try:
                made.close()
            except (Exception, SystemExit) as reason:
                yield error(f"close() raised {reason!r}", "let close() only free resources")

    def _differing(self, first: Sequence[Step], second: Sequence[Step], how: str) -> Findings:
        """Where two episodes differ."""
        for one, other in zip(first, second, strict=False):
            yield from self.differing(f"{one.place}, {how}", one.row, other.row, _RNG)


def outside(space: Any, what: str, value: Any) -> Findings:
    """Whether a value is not in a space; if only in bounds of numbers, that is a warning."""
    is_nan = isinstance(space, Box) and np.isnan(value).any()  # another check tells
    if not is_nan and not space.contains(value):
        is_choice = isinstance(space, Discrete | MultiBinary | MultiDiscrete)
        fix = "return what the space declares, or declare what is returned"
        yield (error if is_choice else warning)(f"{what} is {value!r:.99}, not in {space}", fix)


def _refuse_unseeded(vec: VecEnv, *enough: str) -> None:
    if vec.seeding not in enough:
        raise CannotCheck(f"nothing is promised: its seeding is {vec.seeding!r}")


def _is_environment(value: Any) -> bool:
    """Whether a value is an environment, or several, rather than a function that makes one."""
    return isinstance(value, VecEnv | VectorEnv) or is_environment(value)


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

    It runs in this process, on instances of its own: an instance that is given is copied. The
    process's global random generators are left as they were. Nothing interrupts an environment
    that hangs: set a time limit for the test. Findings carry the names of their checks, which
    ``help(rlpool.testing.EnvContract)`` lists.

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
    if actions is not None and not len(actions):
        raise SpecError("actions is empty", fix="give at least one action, or None")
    checks = EnvChecks(env, env_args, seed, options, n_episodes, n_steps)
    checks.actions = actions
    found = checks.run(skip)
    if strict and not found.ok:
        raise EnvSpecError(f"check_env: {found}")
    return found


@EnvChecks.contract(check_env)
class EnvContract:
    """Inherit it, implement ``make_env``, and pytest or unittest runs the whole contract.

    ::

        class TestMyEnv(EnvContract):  # for unittest: (EnvContract, unittest.TestCase)
            def make_env(self):
                return MyEnv()

    There is one test per check of ``check_env``, such as ``test_repeats``; a failing one says what
    is wrong and what to do. A check that does not apply is skipped, and warnings are given as
    warnings. To leave out a check, write ``test_closes = None`` in the subclass.

    Attributes:
        seed: Root of all seeds.
        n_episodes: How many episodes to look at; less than 2 means 2.
        n_steps: How many steps of an episode to look at.
        options: ``options`` of every reset.
        actions: Actions to take in turn, instead of samples of the action space.

    Example:
        >>> class TestCounting(EnvContract):
        ...     def make_env(self):
        ...         return CountingEnv()
        >>> TestCounting().test_repeats()
    """

    def make_env(self) -> Any:
        """Make a new environment, or a ``VecEnv`` of several; may take ``seed``."""
        raise NotImplementedError("define make_env(self) in the test class")

    def _checked(self, **settings: Any) -> Report:
        return check_env(self.make_env, **settings)
