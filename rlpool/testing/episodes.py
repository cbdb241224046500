"""Makes instances of the environment that is checked, runs episodes, compares them bit by bit."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.vector import VectorEnv

from rlpool.envs.gym_env import GymEnv, is_environment
from rlpool.envs.legacy import modernised
from rlpool.envs.vec_env import Options, VecEnv
from rlpool.envs.vector_gym_env import as_vec_env
from rlpool.errors import SpecError
from rlpool.machine.arguments import takes_keyword, whole_number
from rlpool.seeding import episode_seeds, generator_states, seeded_generators, worker_seed
from rlpool.specs import flattener, leaves_of, row_specs, structure_of_value
from rlpool.testing.report import CannotCheck, Failed, Subject, user_code

_N_ACTIONS = 64  # that are sampled; longer episodes repeat them
_COMPARED = ("observation", "reward", "terminated", "truncated")
_OF_STEPS = (*_COMPARED, "info")


class Step(NamedTuple):
    """What one call returned.

    Attributes:
        observation: A copy, made at once.
        handed_out: The observation itself, which the environment may have changed since.
    """

    observation: Any
    handed_out: Any
    reward: Any = None
    terminated: Any = None
    truncated: Any = None
    info: Any = None


@dataclass
class Episode:
    """An episode, or its beginning.

    Attributes:
        seed: Seed of its reset.
        steps: What the reset and each step returned.
        failure: What went wrong, ``None`` if nothing did.
    """

    seed: int
    steps: list[Step] = field(default_factory=list)
    failure: Failed | None = None

    def add(self, observation: Any, **others: Any) -> None:
        """Note what a call returned."""
        self.steps.append(Step(copy.deepcopy(observation), observation, **others))

    def unless_failed(self) -> Episode:
        """The episode itself; raises ``Failed`` if something went wrong."""
        if self.failure is not None:
            raise self.failure
        return self


class Lane:
    """One lane of a ``VecEnv`` with Gymnasium's interface; observations are dicts of arrays.

    Args:
        vec: The environments.
        number: Which lane.
        others: The lanes whose episodes run beside this one's; those that step together take the
            action of the first that is called, and the calls of the others return what they got.
    """

    def __init__(self, vec: VecEnv, number: int = 0, others: Sequence[Lane] = ()) -> None:
        self.vec, self.number = vec, number
        self._others = others if vec.steps_all_lanes else ()
        self._is_running = False
        self._result: tuple[Any, ...] | None = None  # of a step that another lane's call made

    def reset(self, *, seed: int, options: Options) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reset the lane, and all of them where one cannot be reset alone."""
        self.vec.begin_anew()
        self.vec.reset_lanes([self.number], [seed], [options])
        self._is_running, self._result = True, None
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, ...]:
        """Step the lane."""
        if self._result is None:
            together = [lane for lane in self._others if lane._is_running] or [self]
            self._step([lane.number for lane in together], action)
            for lane in together:
                lane._result = lane._results()
                lane._is_running = not any(lane._result[2:4])
        result, self._result = self._result, None
        return result or ()

    def _step(self, lanes: Sequence[int], action: Any) -> None:
        structure = structure_of_value(action, keep_float64=True, name="action")
        keys, values = leaves_of({"action": structure}, ""), flattener(structure, "action")(action)
        n_lanes = self.vec.n_lanes
        rows = {k: np.stack([np.asarray(v)] * n_lanes) for k, v in zip(keys, values, strict=True)}
        self.vec.declare_actions(row_specs(rows))
        self.vec.step_lanes(lanes, rows)

    def _results(self) -> tuple[Any, ...]:
        return self._observation(), *(self.vec.current[k][self.number] for k in _COMPARED[1:]), {}

    def _observation(self) -> dict[str, Any]:
        keys = self.vec.columns.arrays if self.vec.columns is not None else ()
        return {key: np.array(self.vec.current[key][self.number]) for key in keys}


def lanes_of(vec: VecEnv) -> list[Lane]:
    """All lanes of a ``VecEnv``, for episodes that run at the same time."""
    lanes: list[Lane] = []
    lanes.extend(Lane(vec, number, lanes) for number in range(vec.n_lanes))
    return lanes


class Instance(NamedTuple):
    """One instance of what is checked.

    Attributes:
        made: What the function returned.
        env: ``made`` with Gymnasium's interface; of a ``GymEnv`` its first environment, of any
            other ``VecEnv`` its first lane.
    """

    made: Any
    env: Any

    @property
    def vec(self) -> VecEnv | None:
        """``made`` if it is a ``VecEnv``."""
        return self.made if isinstance(self.made, VecEnv) else None


class EnvSubject(Subject):
    """An environment, or a function that makes one, and how to run it.

    Args:
        env: A Gymnasium environment or vector environment, an older one, a ``VecEnv``, an id for
            ``gymnasium.make``, or a function that returns one of them.
        env_args: Arguments of the function.
        options: ``options`` of every reset.
        actions: Actions to take in turn; sampled from the action space by default.
        seed: Root of all seeds.
        n_episodes: How many episodes to look at, at least 2: checks run others in between.
        n_steps: How many steps of each.

    Attributes:
        used_generators: Names of the global generators that ``episodes`` used.
    """

    kind = "env"

    def __init__(
        self,
        env: Any,
        env_args: Mapping[str, Any] | None = None,
        options: Options = None,
        actions: Sequence[Any] | None = None,
        seed: int = 0,
        n_episodes: int = 3,
        n_steps: int = 100,
    ) -> None:
        whole_number("n_episodes", n_episodes, 1)
        whole_number("n_steps", n_steps, 1)
        if actions is not None and not len(actions):
            raise SpecError("actions is empty", fix="give at least one action, or None")
        source = functools.partial(gymnasium.make, env) if isinstance(env, str) else env
        super().__init__(source, env_args, seed, _is_environment(source), _takes_seed(source))
        self.name = env if isinstance(env, str) else self.name
        self.options, self.given_actions, self.n_steps = options, actions, n_steps
        self.seeds = episode_seeds(self.root, 0, max(n_episodes, 2))
        self.used_generators = ""

    @contextmanager
    def opened(self, number: int = 0) -> Iterator[Instance]:
        """An instance that nobody has used, closed afterwards unless it is the user's own.

        Args:
            number: Instances with different numbers are made as by different workers.
        """
        with user_code(self.name):
            made = as_vec_env(self.make(number), worker_seed(self.root, number))
        if not _is_environment(made):
            raise Failed(
                f"{self.name} returned {type(made).__name__}, not an environment",
                "return a Gymnasium environment, or GymEnv([...environments...], seed)",
            )
        try:
            if isinstance(made, GymEnv):
                yield Instance(made, made._envs[0])
            else:
                yield Instance(made, Lane(made) if isinstance(made, VecEnv) else modernised(made))
        finally:
            if not self.why_no_copy:
                with suppress(Failed), user_code("close()"):
                    made.close()

    @functools.cached_property
    def closed(self) -> Instance:
        """An instance to look at without running it: spaces, signatures."""
        with self.opened() as instance:
            return instance

    @functools.cached_property
    def two(self) -> tuple[Any, Any]:
        """Two that were made and closed."""
        with self.opened(1) as second:
            return self.closed.made, second.made

    @functools.cached_property
    def episodes(self) -> list[Episode]:
        """Episodes of one instance, one after another.

        Raises:
            CannotCheck: If there are no actions.
        """
        with self.opened() as instance, seeded_generators(1):
            before = bits(generator_states())
            episodes = [self.run(instance, number) for number in range(len(self.seeds))]
            names = ("random", "numpy.random", "torch")
            states = zip(names, before, bits(generator_states()), strict=True)
            self.used_generators = ", ".join(name for name, old, new in states if old != new)
        return episodes

    def run(self, instance: Instance, number: int, n_steps: int | None = None) -> Episode:
        """Run an episode to its end or to ``n_steps`` steps, whatever happens.

        Args:
            instance: The instance.
            number: Which seed and which actions.
            n_steps: How far, ``n_steps`` of the subject by default.
        """
        return self.run_together([instance.env], [self.seeds[number]], number, n_steps)[0]

    def run_together(
        self, envs: Sequence[Any], seeds: Sequence[int], number: int = 0, n_steps: int | None = None
    ) -> list[Episode]:
        """Run an episode in each of some environments, in turns, with the same actions."""
        episodes = [Episode(seed) for seed in seeds]
        actions = self.actions(number)
        limit = self.n_steps if n_steps is None else n_steps
        running = [
            _calls(env, episode, self.options, actions, limit)
            for env, episode in zip(envs, episodes, strict=True)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in zip_longest(*running):
                pass
        return episodes

    def actions(self, number: int) -> Sequence[Any]:
        """The actions of an episode.

        Raises:
            CannotCheck: If none were given and the environment has no action space.
        """
        if self.given_actions is not None:
            return self.given_actions
        space = copy.deepcopy(getattr(self.closed.made, "action_space", None))
        if space is None:
            raise CannotCheck("the environment has no action_space: pass actions=[...]")
        with user_code("action_space.sample()"):
            space.seed(self.seeds[number])
            return [space.sample() for _ in range(min(_N_ACTIONS, self.n_steps))]


def _calls(
    env: Any, episode: Episode, options: Options, actions: Sequence[Any], n_steps: int
) -> Iterator[None]:
    """Run an episode, one call per iteration; what goes wrong is the episode's failure."""
    try:
        with user_code(lambda: place(len(episode.steps))):
            result = env.reset(seed=episode.seed, options=copy.deepcopy(options))
            if not isinstance(result, tuple) or len(result) != 2:
                raise Failed(f"reset() returned {shortly(result)}, not (observation, info)")
            episode.add(result[0], info=result[1])
            yield
            for t in range(n_steps):
                result = env.step(copy.deepcopy(actions[t % len(actions)]))
                if not isinstance(result, tuple) or len(result) != 5:
                    raise Failed(f"step() returned {shortly(result)}, not ({', '.join(_OF_STEPS)})")
                episode.add(**dict(zip(_OF_STEPS, result, strict=True)))
                if any(np.any(flag) for flag in result[2:4] if flag is not None):
                    return
                yield
    except Failed as failure:
        episode.failure = failure


def difference(first: Episode, second: Episode) -> str:
    """Where two episodes differ, in a few words; empty if they are bitwise the same."""
    for t, (one, other) in enumerate(zip(first.steps, second.steps, strict=False)):
        for name in _COMPARED:
            a, b = getattr(one, name), getattr(other, name)
            if bits(a) != bits(b):
                return f"the {name} of {place(t)} is {shortly(a)} and {shortly(b)}"
    if len(first.steps) != len(second.steps):
        return f"one has {len(first.steps) - 1} steps, the other {len(second.steps) - 1}"
    return ""


def place(t: int) -> str:
    """Which call returned the ``t``-th result of an episode."""
    return f"step {t - 1}" if t else "reset"


def bits(value: Any) -> Any:
    """A form of a value that is equal if structure, dtypes, shapes and bits are."""
    if isinstance(value, Mapping):
        return {key: bits(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [bits(inner) for inner in value]
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    return repr(value) if array.dtype == object else (array.dtype.str, array.shape, array.tobytes())


def shortly(value: Any) -> str:
    """A value in at most 60 characters, even if it cannot be turned into text."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def _is_environment(value: Any) -> bool:
    """Whether a value is an environment, or several, rather than a function that makes one."""
    return isinstance(value, VecEnv | VectorEnv) or is_environment(value)


def _takes_seed(function: Any) -> bool:
    """Whether a function is to be called with ``seed=``, as batchers call ``create_env``.

    Classes of environments are not: their ``seed`` means something else. Nor are functions that
    merely have ``**kwargs``, which may be those of an environment; name ``seed`` if it is wanted.
    """
    inner = getattr(function, "func", function)
    is_env = inspect.isclass(inner) and not issubclass(inner, VecEnv)
    return not is_env and takes_keyword(function, "seed", otherwise=False)
