"""``check_env``: whether an environment does what rlpool relies on.

It runs in the lanes of a ``VecEnv``, as in a batcher, and what rlpool refuses is told in the words
of its errors. Beside ``picklable`` the checks are

- ``runs``: episodes run without an exception and without a value that rlpool refuses, such as an
  observation of another shape or dtype, a reward that is no number or a flag that is no bool;
- ``observations_fit``: observations are in the space; outside the bounds of a ``Box`` is a warning;
- ``values_are_finite``: no NaN in observations and rewards; infinite ones are a warning;
- ``repeats``: the same seed and the same actions give the same bits, whatever ran in between,
  and whatever the state of the global random generators;
- ``fresh_instance_repeats``: so does another instance, made with another ``seed`` of
  ``create_env``, as after a crash, in each of its lanes, beside any other episodes. Lanes that are
  reset together are not compared, and what nothing seeds is not looked at.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector import VectorEnv

from rlpool.data.specs import leaves_of, row_specs, structure_of_space
from rlpool.data.storage import NDArray
from rlpool.envs.gym_env import GymEnv
from rlpool.envs.single_envs import is_environment, refuse_no_environment
from rlpool.envs.vec_env import LaneError, Options, VecEnv
from rlpool.envs.vector_gym_env import as_vec_env
from rlpool.errors import EnvSpecError, Where
from rlpool.machine.arguments import names_arguments, takes_keyword, whole_number
from rlpool.machine.generators import seeded_generators
from rlpool.record.failures import env_error
from rlpool.record.tape import action_row
from rlpool.seeding import episode_seeds, worker_seed
from rlpool.testing.checks import CannotCheck, Checks, Findings, Report

_CHOICES = (Discrete, MultiBinary, MultiDiscrete)  # spaces without bounds
_RNG = "let reset(seed=...) restore all state, draw from self.np_random alone, and share nothing"


class Step(NamedTuple):
    """What a reset or a step did.

    Attributes:
        place: Which call, and in which episode.
        row: The lane's row of ``VecEnv.current``.
        returned: What the environment of a ``GymEnv`` returned, ``None`` for other lanes.
    """

    place: str
    row: dict[str, NDArray]
    returned: Any


class EnvChecks(Checks):
    """Checks of an environment; the arguments are those of ``check_env``."""

    refusal = EnvSpecError

    def __init__(self, env: Any, env_args: Any, seed: int, options: Options, n_steps: int) -> None:
        source = partial(gymnasium.make, env) if isinstance(env, str) else env
        is_instance = isinstance(source, VecEnv | VectorEnv) or is_environment(source)
        super().__init__(source, env_args, seed, is_instance)
        self.name = env if isinstance(env, str) else self.name
        # The seed of a class means something else, and **kwargs may be those of an environment.
        is_env = inspect.isclass(self.maker) and not issubclass(self.maker, VecEnv)
        self.takes_seed = not is_env and takes_keyword(source, "seed", otherwise=False)
        self.options, self.n_steps = options, whole_number("n_steps", n_steps, 1)
        self.seeds = episode_seeds(self.root, 0, 3)  # what an episode spoils shows in the next

    def make(self, number: int = 0) -> Any:
        """Make an environment, or a ``VecEnv`` of several."""
        made = as_vec_env(super().make(number), worker_seed(self.root, number))
        if not isinstance(made, VecEnv):
            fix = "return a Gymnasium environment, or GymEnv([...environments...], seed)"
            refuse_no_environment(f"{self.name} returned", made, fix)
        return made

    def lanes(self, number: int = 0, n_lanes: int = 1) -> VecEnv:
        """Lanes that nobody has used; ``n_lanes`` if single environments are made."""
        envs = [self.make(number + lane) for lane in range(n_lanes)]
        return envs[0] if isinstance(envs[0], VecEnv) else GymEnv(envs)

    def episodes(self, vec: VecEnv, seeds: Sequence[int]) -> list[list[Step]]:
        """Run episodes in the first lanes with the same actions, until one of them ends.

        Args:
            vec: The lanes.
            seeds: Seeds of the episodes.

        Raises:
            EnvError: If one of them fails.
        """
        if isinstance(vec, GymEnv):
            vec.keeps_results = True
        actions = self._actions(vec)
        vec.declare_actions(row_specs(actions[0]))
        vec.begin_anew()
        lanes, episodes = range(len(seeds)), [list[Step]() for _ in seeds]
        try:
            vec.reset_lanes(lanes, seeds, [copy.deepcopy(self.options) for _ in seeds])
            ended: Sequence[int] = ()
            for number, action in enumerate([*actions, None]):
                place = f"step {number - 1}" if number else "reset"
                keys = vec.current.keys()
                for lane, seed in enumerate(seeds):
                    row = {key: np.array(vec.current[key][lane]) for key in keys}
                    returned = vec.results[lane] if isinstance(vec, GymEnv) else None
                    done = Step(f"{place} of the episode with seed {seed}", row, returned)
                    episodes[lane].append(done)
                if ended or action is None:
                    break
                batch = {key: np.repeat(array, vec.n_lanes, 0) for key, array in action.items()}
                ended = vec.step_lanes(lanes, batch)
        except LaneError as failure:
            which = dict(enumerate(seeds)).get(failure.lane)
            where = Where(lane=failure.lane, step=max(len(episodes[0]) - 1, 0), seed=which)
            raise env_error(failure, where) from failure.__cause__
        return episodes

    def _actions(self, vec: VecEnv) -> list[dict[str, NDArray]]:
        """The action of each step of all episodes, ``[1, ...]`` per key."""
        space = copy.deepcopy(getattr(vec, "action_space", None))
        if space is None:
            raise CannotCheck("the environment has no action_space: let it have one")
        space.seed(self.seeds[0])
        structure = structure_of_space(space, keep_float64=True, name="action")
        specs = {key: leaf.spec for key, leaf in leaves_of({"action": structure}, "").items()}
        return [action_row(structure, specs, space.sample()) for _ in range(self.n_steps)]

    @cached_property
    def steps(self) -> list[Step]:
        """Episodes of one instance, one after another."""
        with seeded_generators(1):
            vec = self.lanes()
            self.space = getattr(vec, "observation_space", None)
            return [step for seed in self.seeds for step in self.episodes(vec, [seed])[0]]

    def runs(self) -> Findings:
        """Episodes run without an exception, and return what Gymnasium says."""
        for place, _, returned in self.steps:
            if returned and not isinstance(returned[-1], dict):
                yield "warning", f"{place}: info is not a dict", "return a dict, {} for nothing"

    def observations_fit(self) -> Findings:
        """Every observation is in the space."""
        for place, _, returned in self.steps:
            if self.space is None or returned is None:
                raise CannotCheck("there are no observation_space and single environments")
            yield from outside(self.space, f"{place}: the observation", returned[0])

    def values_are_finite(self) -> Findings:
        """No NaN in observations and rewards, no infinite ones."""
        for place, row, _ in self.steps:
            for key, array in row.items():
                if array.dtype.kind == "f" and not np.isfinite(array).all():
                    severity = "error" if np.isnan(array).any() else "warning"
                    fix = "find the division or logarithm that it comes from: one spoils a network"
                    yield severity, f"{place}: the {key} is {array!s:.60}", fix

    def repeats(self) -> Findings:
        """The same seed and actions give the same bits, whatever ran in between."""
        vec = self.lanes()
        _refuse_unseeded(vec)
        one, _, again = (self.episodes(vec, [self.seeds[n]])[0] for n in (0, 1, 0))
        yield from self._differing(one, again, "the same actions twice")

    def fresh_instance_repeats(self) -> Findings:
        """So does another instance, as after a crash, in each of its lanes, beside others."""
        with seeded_generators(1):
            vec = self.lanes(1, n_lanes=2)
            _refuse_unseeded(vec)
            n_lanes = vec.n_lanes if vec.seeding == "episode" else 1
            seeds = episode_seeds(self.root, 0, n_lanes)
            together = self.episodes(vec, seeds)
        vec = self.lanes()
        for lane, seed in enumerate(seeds):
            how = f"alone, and in lane {lane} of another instance"
            yield from self._differing(self.episodes(vec, [seed])[0], together[lane], how)

    def _differing(self, first: Sequence[Step], second: Sequence[Step], how: str) -> Findings:
        """Where two episodes differ."""
        for one, other in zip(first, second, strict=False):
            yield from self.differing(f"{one.place}, {how}", one.row, other.row, _RNG)


def outside(space: Any, what: str, value: Any) -> Findings:
    """Whether a value is not in a space; if only in bounds of numbers, that is a warning."""
    if not space.contains(value):
        fix = "return what the space declares, or declare what is returned"
        severity = "error" if isinstance(space, _CHOICES) else "warning"
        yield severity, f"{what} is {value!r:.99}, not in {space}", fix


def _refuse_unseeded(vec: VecEnv) -> None:
    if vec.seeding not in ("episode", "request"):
        raise CannotCheck(f"nothing is promised: its seeding is {vec.seeding!r}")


@names_arguments
def check_env(
    env: Any,
    env_args: Mapping[str, Any] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
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
        seed: Root of all seeds.
        n_steps: How many steps of an episode to look at.
        skip: Names of checks to leave out.
        strict: Whether to raise if there are errors. What is only doubtful is given as a
            ``UserWarning``, and is in the report.

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
    return EnvChecks(env, env_args, seed, options, n_steps).run(skip, strict=strict)


@EnvChecks.contract(check_env)
class EnvContract:
    """Inherit it, implement ``make_env``, and pytest or unittest runs the whole contract.

    ::

        class TestMyEnv(EnvContract):  # for unittest: (EnvContract, unittest.TestCase)
            def make_env(self):
                return MyEnv()

    There is one test per check of ``check_env``, such as ``test_repeats``; a failing one says what
    is wrong and what to do. A check that does not apply is skipped, and warnings are given as
    warnings. To leave out a check, write ``test_values_are_finite = None`` in the subclass.

    Attributes:
        seed: Root of all seeds.
        n_steps: How many steps of an episode to look at.
        options: ``options`` of every reset.

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
