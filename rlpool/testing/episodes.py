"""Makes instances of the environment that is checked, runs episodes, compares them bit by bit."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch

from rlpool.envs.gym_env import GymEnv
from rlpool.envs.legacy import modernised
from rlpool.envs.vec_env import Options, VecEnv
from rlpool.machine.arguments import takes_keyword
from rlpool.seeding import episode_seeds, generator_states, seeded_generators
from rlpool.specs import (
    flattener,
    leaves_of,
    row_specs,
    structure_of_space,
    structure_of_value,
)
from rlpool.testing.report import CannotCheck, Failed, Subject, user_code

N_ACTIONS = 64
"""How many actions are sampled; longer episodes repeat them."""

_OF_STEPS = ("observation", "reward", "terminated", "truncated", "info")


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


class Episode:
    """An episode, or its beginning.

    Attributes:
        seed: Seed of its reset.
        steps: What the reset and each step returned.
        failure: What went wrong, ``None`` if nothing did.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.steps: list[Step] = []
        self.failure: Failed | None = None

    def add(self, observation: Any, *others: Any, **named: Any) -> None:
        """Note what a call returned."""
        self.steps.append(Step(copy.deepcopy(observation), observation, *others, **named))

    def unless_failed(self) -> Episode:
        """The episode itself; raises ``Failed`` if something went wrong."""
        if self.failure is not None:
            raise self.failure
        return self


class Instance:
    """One instance of what is checked.

    Args:
        made: What the function returned.

    Attributes:
        vec: ``made`` if it is a ``VecEnv``, else ``None``.
        env: The only environment, or the first of a ``GymEnv``, with Gymnasium's interface;
            ``None`` behind any other ``VecEnv``.
        action_space: Its action space, ``None`` if there is none.
    """

    def __init__(self, made: Any) -> None:
        self.made = made
        self.vec = made if isinstance(made, VecEnv) else None
        self.env = modernised(made) if self.vec is None else None
        if isinstance(made, GymEnv):
            self.env = made._envs[0]
        self.action_space = getattr(made, "action_space", None)


class EnvSubject(Subject):
    """An environment, or a function that makes one, and how to run it.

    Args:
        env: A Gymnasium environment, an older one, a ``VecEnv``, an id for ``gymnasium.make``, or
            a function that returns one of them.
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
        self.gym_id = env if isinstance(env, str) else ""
        source = functools.partial(gymnasium.make, env) if self.gym_id else env
        super().__init__(source, env_args, seed, is_environment(source), _takes_seed(source))
        self.options, self.given_actions, self.n_steps = options, actions, n_steps
        self.seeds = episode_seeds(self.root, 0, max(n_episodes, 2))
        self.used_generators = ""

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.gym_id or super().name

    @contextmanager
    def opened(self, number: int = 0) -> Iterator[Instance]:
        """An instance that nobody has used, closed afterwards unless it is the user's own.

        Args:
            number: Instances with different numbers are made as by different workers.
        """
        made = self.make(number)
        if not is_environment(made):
            raise Failed(
                f"{self.name} returned {type(made).__name__}, not an environment",
                "return a Gymnasium environment, or GymEnv([...environments...], seed)",
            )
        try:
            yield Instance(made)
        finally:
            if not self.why_no_copy:
                with suppress(Failed), user_code("close()"):
                    made.close()

    @functools.cached_property
    def two(self) -> tuple[Any, Any]:
        """Two that were made and closed."""
        with self.opened(0) as first, self.opened(1) as second:
            return first.made, second.made

    @functools.cached_property
    def closed(self) -> Instance:
        """An instance to look at without running it: spaces, signatures."""
        return Instance(self.two[0])

    @functools.cached_property
    def episodes(self) -> list[Episode]:
        """Episodes of one instance, one after another.

        Raises:
            CannotCheck: If there are no actions.
        """
        with self.opened() as instance, seeded_generators(1):
            before = bits(generator_states())
            episodes = [self.run(instance, number) for number in range(len(self.seeds))]
            states = zip(before, bits(generator_states()), strict=True)
        names = ("random", "numpy.random", "torch")
        changed = (a != b for a, b in states)
        self.used_generators = ", ".join(n for n, c in zip(names, changed, strict=True) if c)
        return episodes

    def run(self, instance: Instance, number: int, n_steps: int | None = None) -> Episode:
        """Run an episode to its end or to ``n_steps`` steps, whatever happens.

        Args:
            instance: The instance.
            number: Which seed and which actions.
            n_steps: How far, ``n_steps`` of the subject by default.
        """
        limit = self.n_steps if n_steps is None else n_steps
        arguments = (self.options, self.actions(number), limit)
        if instance.env is None:
            return run_lanes(instance.made, {0: self.seeds[number]}, *arguments)[0]
        episode = Episode(self.seeds[number])
        with _noting_failures([episode]):
            _run(instance.env, episode, *arguments)
        return episode

    def actions(self, number: int) -> Sequence[Any]:
        """The actions of an episode.

        Raises:
            CannotCheck: If none were given and the environment has no action space.
        """
        if self.given_actions is not None:
            return self.given_actions
        space = copy.deepcopy(self.closed.action_space)
        if space is None:
            raise CannotCheck("the environment has no action_space: pass actions=[...]")
        with user_code("action_space.sample()"):
            space.seed(self.seeds[number])
            return [space.sample() for _ in range(min(N_ACTIONS, self.n_steps))]


def _run(
    env: Any, episode: Episode, options: Options, actions: Sequence[Any], n_steps: int
) -> None:
    """Run one environment."""
    result = env.reset(seed=episode.seed, options=copy.deepcopy(options))
    if not isinstance(result, tuple) or len(result) != 2:
        raise Failed(f"reset() returned {shortly(result)}, not (observation, info)")
    episode.add(result[0], info=result[1])
    for t in range(n_steps):
        result = env.step(copy.deepcopy(actions[t % len(actions)]))
        if not isinstance(result, tuple) or len(result) != 5:
            raise Failed(f"step() returned {shortly(result)}, not ({', '.join(_OF_STEPS)})")
        episode.add(*result)
        if any(np.any(flag) for flag in result[2:4] if flag is not None):
            return


def run_lanes(
    vec: VecEnv, seeds: Mapping[int, int], options: Options, actions: Sequence[Any], n_steps: int
) -> dict[int, Episode]:
    """Run one episode in each of some lanes at the same time.

    Args:
        vec: The environments.
        seeds: Lane to seed, lanes ascending.
        options: Options of each reset.
        actions: Taken in turn by every lane.
        n_steps: How far to run.

    Returns:
        Lane to episode. An exception is the failure of all of them.
    """
    episodes = {lane: Episode(seed) for lane, seed in seeds.items()}
    live = list(seeds)

    def note(*names: str) -> None:
        keys = vec.columns.arrays if vec.columns is not None else ()
        for lane in live:
            observation = {key: np.array(vec.current[key][lane]) for key in keys}
            results = {name: vec.current[name][lane].copy() for name in names}
            episodes[lane].add(observation, **results, info={})

    with _noting_failures(episodes.values()):
        arrays = action_arrays(getattr(vec, "action_space", None), actions)
        vec.reset_lanes(live, list(seeds.values()), [copy.deepcopy(options) for _ in live])
        vec.declare_actions(row_specs(arrays))
        note()
        for t in range(n_steps):
            rows = np.full(vec.n_lanes, t % len(actions))
            ended = vec.step_lanes(live, {key: array[rows] for key, array in arrays.items()})
            note("reward", "terminated", "truncated")
            live = [lane for lane in live if lane not in ended]
            if not live:
                break
    return episodes


@contextmanager
def _noting_failures(episodes: Collection[Episode]) -> Iterator[None]:
    """What goes wrong, in the call after the last one noted, is the failure of all episodes."""

    def where() -> str:
        return place(max(len(episode.steps) for episode in episodes))

    try:
        with warnings.catch_warnings(), user_code(where):
            warnings.simplefilter("ignore")
            yield
    except Failed as failure:
        for episode in episodes:
            episode.failure = failure


def action_arrays(space: Any, actions: Sequence[Any]) -> dict[str, Any]:
    """Actions as arrays ``[B, ...]`` by key, as ``VecEnv.step_lanes`` takes them.

    Args:
        space: The action space; without one, the first action says what actions are.
        actions: B actions.
    """
    if space is None:
        structure = structure_of_value(actions[0], keep_float64=False, name="action")
    else:
        structure = structure_of_space(space, keep_float64=False, name="action_space")
    columns = zip(*map(flattener(structure, "action"), actions), strict=True)
    leaves = leaves_of({"action": structure}, "")
    return {
        key: np.stack([np.asarray(value, leaf.spec.dtype) for value in column])
        for (key, leaf), column in zip(leaves.items(), columns, strict=True)
    }


def difference(first: Episode, second: Episode) -> str:
    """Where two episodes differ, in a few words; empty if they are bitwise the same."""
    for t, (one, other) in enumerate(zip(first.steps, second.steps, strict=False)):
        for name in _OF_STEPS[:4]:
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
    if array.dtype == object:
        return repr(value)
    return array.dtype.str, array.shape, array.tobytes()


def shortly(value: Any) -> str:
    """A value in at most 60 characters, even if it cannot be turned into text."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def is_environment(value: Any) -> bool:
    """Whether a value is an environment, or several, rather than something that makes one."""
    has_methods = callable(getattr(value, "reset", None)) and callable(getattr(value, "step", None))
    return has_methods and not inspect.isclass(value)


def _takes_seed(function: Any) -> bool:
    """Whether a function is to be called with ``seed=``, as batchers call ``create_env``.

    Classes of environments are not: their ``seed`` is their own. Nor are functions that merely
    have ``**kwargs``, which may be those of an environment; name ``seed`` if it is wanted.
    """
    inner = getattr(function, "func", function)
    is_env = inspect.isclass(inner) and not issubclass(inner, VecEnv)
    return not is_env and takes_keyword(function, "seed", otherwise=False)
