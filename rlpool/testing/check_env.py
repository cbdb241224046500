"""``check_env``: checks that an environment meets rlpool's requirements.

The environment runs in the lanes of a ``VecEnv``, as in a batcher. ``Checks`` is shared with
``check_agent``: a check is a generator method, and its first problem is reported.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector import VectorEnv

from rlpool.data.specs import leaves_of, row_specs, structure_of_space
from rlpool.data.storage import NDArray
from rlpool.envs.gym_env import GymEnv
from rlpool.envs.single_envs import check_is_env, is_environment
from rlpool.envs.vec_env import LaneError, Options, VecEnv
from rlpool.envs.vector_gym_env import as_vec_env
from rlpool.errors import (
    EnvSpecError,
    RlpoolError,
    SpecError,
    Where,
    compose,
    described,
)
from rlpool.machine.arguments import takes_keyword, whole_number
from rlpool.machine.own_state import OwnState
from rlpool.record.failures import env_error
from rlpool.record.repeat import repeat_together
from rlpool.record.tape import Tape, action_row, joined
from rlpool.seeding import episode_seeds, root_from, worker_seed

_CHOICES = (Discrete, MultiBinary, MultiDiscrete)  # spaces without bounds
_RNG = "let reset(seed=...) restore all state, draw from self.np_random alone, and share nothing"

Problems = Generator[tuple[bool, str, str], None, None]
"""Problems found by a check: whether it is an error or a warning, its description, and the fix."""


class Checks:
    """Makes the object to check, and runs its checks.

    Args:
        source: A function that makes the object, or an instance to copy.
        arguments: Arguments of the function.
        seed: Root of all seeds.
        is_instance: Whether ``source`` is an instance.

    Attributes:
        maker: The function, without the arguments of a ``partial``.
        name: Its name in errors.
        made: The objects made by ``make``, which ``close`` closes.
    """

    takes_seed = False  # whether the function is called with ``seed=``
    refusal: type[RlpoolError]  # raised for errors

    def __init__(self, source: Any, arguments: Any, seed: int, is_instance: bool) -> None:
        fits = not arguments if is_instance else isinstance(arguments, Mapping | None)
        if not fits or not (is_instance or callable(source)):
            got = f"got {source!r:.60} with the arguments (env_args, agent_args) {arguments!r:.60}"
            raise SpecError(got, fix="pass a function with a dict of arguments, or an instance")
        self.maker = getattr(source, "func", source)
        self.name: str = getattr(self.maker, "__qualname__", type(source).__name__)
        self.source = partial(copy.deepcopy, source) if is_instance else source
        self.arguments, self.root = dict(arguments or {}), root_from(seed)
        self.made: list[Any] = []

    def run(self, *checks: Callable[[], Problems]) -> None:
        """Run all checks up to one that raises: the others would probably raise the same.

        Raises:
            RlpoolError: If there are errors, listing the first one of each check.
        """
        errors, doubts = list[str](), list[str]()
        for check in checks:
            try:
                with warnings.catch_warnings(), OwnState(0).in_use():
                    warnings.simplefilter("ignore")
                    problem = next(check(), None)
            except (Exception, SystemExit) as reason:
                is_own = isinstance(reason, RlpoolError)
                message = str(reason) if is_own else f"{self.name} raised {described(reason)}"
                errors.append(f"{check.__name__}: {message}")
                break
            finally:
                self.close()
            if problem:
                is_error, message, fix = problem
                text = compose(f"{check.__name__}: {message}", fix=fix)
                (errors if is_error else doubts).append(text)
        if errors:
            raise self.refusal("\n".join([f"{self.name}: {len(errors)} errors", *errors, *doubts]))
        for doubt in doubts:
            warnings.warn(f"{self.name}: {doubt}", UserWarning, stacklevel=3)

    def make(self, number: int = 0) -> Any:
        """Call the function as worker ``number`` would; ``close`` closes the result."""
        seed = worker_seed(self.root, number)
        with OwnState(seed).in_use():
            own = {"seed": seed} if self.takes_seed else {}
            self.made.append(self.source(**{**own, **self.arguments}))
        return self.made[-1]

    def close(self) -> None:
        """Close all objects that were made."""
        while self.made:
            with suppress(Exception, SystemExit):
                self.made.pop().close()


def differing(how: str, one: Mapping[str, Any], other: Mapping[str, Any], fix: str) -> Problems:
    """Report arrays or tensors of the same name that differ bitwise; ``how`` describes the pair."""
    for key in sorted(one.keys() | other.keys()):
        values = one.get(key), other.get(key)
        first, second = map(np.asarray, values)
        is_alike = (first.dtype, first.shape) == (second.dtype, second.shape)
        if not is_alike or first.tobytes() != second.tobytes():
            texts = (" ".join(repr(value).split())[:60] for value in values)
            yield True, f"{how}: {key!r} is {' and '.join(texts)}", fix


class Step(NamedTuple):
    """The result of a reset or a step.

    Attributes:
        place: Description of the call and its episode.
        row: The lane's row of ``VecEnv.current``.
        returned: Return value of the environment in a ``GymEnv``, ``None`` for other lanes.
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
        # The seed of a class has another meaning, and **kwargs may belong to an environment.
        is_env = inspect.isclass(self.maker) and not issubclass(self.maker, VecEnv)
        self.takes_seed = not is_env and takes_keyword(source, "seed", otherwise=False)
        self.options, self.n_steps = options, whole_number("n_steps", n_steps, 1)
        self.seeds = episode_seeds(self.root, 0, 3)  # leftovers of an episode show in the next

    def make(self, number: int = 0) -> Any:
        """Make an environment, or a ``VecEnv`` of several."""
        made = as_vec_env(super().make(number), worker_seed(self.root, number))
        if not isinstance(made, VecEnv):
            fix = "return a Gymnasium environment, or GymEnv([...environments...], seed)"
            check_is_env(f"{self.name} returned", made, fix)
        return made

    def lanes(self, number: int = 0, n_lanes: int = 1) -> VecEnv:
        """Make new lanes: ``n_lanes`` of them if the function makes single environments."""
        envs = [self.make(number + lane) for lane in range(n_lanes)]
        return envs[0] if isinstance(envs[0], VecEnv) else GymEnv(envs)

    def episodes(self, vec: VecEnv, seeds: Sequence[int]) -> list[list[Step]]:
        """Run episodes in the first lanes with the same actions, until one of them ends.

        Args:
            vec: The lanes.
            seeds: Seeds of the episodes.

        Raises:
            EnvError: If a lane fails.
        """
        space = copy.deepcopy(getattr(vec, "action_space", None))
        if space is None:
            fix = "define one, from which actions are sampled"
            raise SpecError("it has no action_space", fix=fix)
        space.seed(self.seeds[0])
        structure = structure_of_space(space, name="action")
        specs = {key: leaf.spec for key, leaf in leaves_of({"action": structure}, "").items()}
        rows = [action_row(structure, specs, space.sample()) for _ in range(self.n_steps)]
        columns, options = joined(rows), copy.deepcopy(self.options)
        vec.declare_actions(row_specs(columns))
        vec.reset_all_next()
        tapes = {lane: Tape(seed, options, chunks=[columns]) for lane, seed in enumerate(seeds)}
        episodes = [list[Step]() for _ in seeds]
        try:
            for number, reached in enumerate(repeat_together(vec, tapes)):
                place = f"step {number - 1}" if number else "reset"
                for lane, seed in enumerate(seeds):
                    row = {key: np.array(array[lane]) for key, array in vec.current.items()}
                    returned = vec.results[lane] if isinstance(vec, GymEnv) else None
                    done = Step(f"{place} of the episode with seed {seed}", row, returned)
                    episodes[lane].append(done)
                if any(each.has_ended for each in reached.values()):
                    break
        except LaneError as failure:
            which = dict(enumerate(seeds)).get(failure.lane)
            where = Where(lane=failure.lane, step=max(len(episodes[0]) - 1, 0), seed=which)
            raise env_error(failure, where) from failure.__cause__
        return episodes

    @cached_property
    def steps(self) -> list[Step]:
        """Steps of successive episodes of one instance."""
        with OwnState(1).in_use():
            vec = self.lanes()
            self.space = getattr(vec, "observation_space", None)
            return [step for seed in self.seeds for step in self.episodes(vec, [seed])[0]]

    def runs(self) -> Problems:
        """Episodes run without an exception, and return values as Gymnasium defines them."""
        for place, _, returned in self.steps:
            if returned and not isinstance(returned[-1], dict):
                yield False, f"{place}: info is not a dict", "return a dict, {} for nothing"

    def observations_fit(self) -> Problems:
        """All observations are in the space."""
        for place, _, returned in self.steps:
            if self.space is None or returned is None or self.space.contains(returned[0]):
                continue
            message = f"{place}: the observation is {returned[0]!r:.99}, not in {self.space}"
            fix = "make the observations match the space, or change the space"
            yield isinstance(self.space, _CHOICES), message, fix

    def values_are_finite(self) -> Problems:
        """Observations and rewards are not NaN or infinite."""
        for place, row, _ in self.steps:
            for key, array in row.items():
                if array.dtype.kind == "f" and not np.isfinite(array).all():
                    is_error = bool(np.isnan(array).any())
                    fix = "find the division or logarithm at fault: one NaN ruins a network"
                    yield is_error, f"{place}: the {key} is {array!s:.60}", fix

    def repeats(self) -> Problems:
        """The same seed and actions give the same bits, regardless of episodes in between."""
        vec = self.lanes()
        for name, fix in vec.state_keepers.items():
            yield True, f"{name} carries state from one episode to the next", fix
        order = 0, 1, *[0] * 10  # some environments change after a few episodes
        one, _, *others = (self.episodes(vec, [self.seeds[n]])[0] for n in order)
        for again in others:
            yield from self._differing(one, again, "the same actions again")

    def starts_vary(self) -> Problems:
        """Initial observations differ between lanes and episodes."""
        vec = self.lanes(1, n_lanes=2)
        seeds = episode_seeds(self.root, 9, vec.n_lanes if vec.seeding == "episode" else 1)
        begun = [episode[0] for episode in self.episodes(vec, seeds)]
        begun += [step for step in self.steps if step.place.startswith("reset")]
        if len({pickle.dumps(step.row) for step in begun}) == 1:
            fix = "draw the start from self.np_random, unless it is meant to be fixed"
            yield False, "all lanes and episodes begin alike, regardless of their seeds", fix

    def fresh_instance_repeats(self) -> Problems:
        """Another instance, as after a crash, gives the same bits in each lane while others run."""
        with OwnState(1).in_use():
            vec = self.lanes(1, n_lanes=2)
            n_lanes = vec.n_lanes if vec.seeding == "episode" else 1
            seeds = episode_seeds(self.root, 0, n_lanes)
            together = self.episodes(vec, seeds)
        vec = self.lanes()
        for lane, seed in enumerate(seeds):
            how = f"alone, and in lane {lane} of another instance"
            yield from self._differing(self.episodes(vec, [seed])[0], together[lane], how)

    def _differing(self, first: Sequence[Step], second: Sequence[Step], how: str) -> Problems:
        """Report the first difference of two episodes."""
        for one, other in zip(first, second, strict=False):
            yield from differing(f"{one.place}, {how}", one.row, other.row, _RNG)


def check_env(
    env: Any,
    env_args: Mapping[str, Any] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    n_steps: int = 100,
) -> None:
    """Check an environment against rlpool's requirements, and report all problems at once.

    It reports the first problem of each kind:

    - an exception, or an invalid value, such as an observation of another shape or dtype, a reward
      that is not a number or a flag that is neither true nor false;
    - an observation outside its space (a warning if it is outside the bounds of a ``Box``), and
      NaN in observations and rewards (a warning for infinite values);
    - different bits from the same seed and the same actions: in the same instance after other
      episodes, or in another instance and lane, as after a crash. Lanes that are reset together
      are compared as far as they can be seeded;
    - as a warning, identical starts of all lanes and episodes, which may be intended.

    The check runs in this process, on its own instances: an instance that is passed is copied. The
    process's global random generators are restored. An environment that hangs is not interrupted:
    set a time limit for the test. Warnings are ``UserWarning``.

    Args:
        env: A ``create_env`` function as for a batcher, a function that makes a single environment,
            an environment, or an id for ``gymnasium.make``. Prefer functions: with an instance, it
            cannot be checked that the function can be sent to a worker.
        env_args: Arguments of the function.
        options: ``options`` of every reset, like a row of ``env_info``.
        seed: Root of all seeds.
        n_steps: Number of steps of an episode to check.

    Raises:
        EnvSpecError: Listing all errors.
        SpecError: For invalid arguments.

    Example:
        >>> from rlpool.testing import CountingEnv
        >>> check_env(CountingEnv)
    """
    checks = EnvChecks(env, env_args, seed, options, n_steps)
    fit = checks.runs, checks.observations_fit, checks.values_are_finite
    checks.run(*fit, checks.repeats, checks.fresh_instance_repeats, checks.starts_vary)
