"""The environment that is checked: how to get instances of it, and what its episodes were."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import gymnasium

from rlpool.envs.ancestor_env import modernised
from rlpool.envs.gym_env import GymEnv
from rlpool.envs.vec_env import VecEnv
from rlpool.generators import seeded_generators
from rlpool.record.failures import described
from rlpool.seeding import episode_seeds, root_from, worker_seed
from rlpool.signatures import called_with_seed, takes_keyword
from rlpool.testing.episodes import ActionArrays, Episode, LaneOf, Runnable, run_episode
from rlpool.testing.findings import CannotCheck, Failed, refuse_arguments_of_instance
from rlpool.testing.generators import GeneratorWatch

N_ACTIONS = 64
"""How many actions are sampled; longer episodes repeat them."""

_UNKNOWN = object()


@dataclass
class Opened:
    """One instance.

    Attributes:
        made: What the factory returned.
        runs: Its only environment, or the first of several.
        env: That environment with Gymnasium's interface, ``None`` behind a ``VecEnv`` that is no
            ``GymEnv``.
        vec: The ``VecEnv`` that was made, ``None`` for a single environment.
        action_space: Its action space, ``None`` without.
    """

    made: Any
    runs: Runnable
    env: Any
    vec: VecEnv | None
    action_space: Any


class EnvSubject:
    """An environment, or a function that makes one, and how to check it.

    Args:
        env: A Gymnasium environment, an older one, a ``VecEnv``, an id for ``gymnasium.make``, or
            a function that returns one of them.
        env_args: Arguments of the function.
        options: ``options`` of every reset.
        actions: Actions to take in turns; sampled from the action space by default.
        seed: Root of all seeds.
        n_episodes: How many episodes to look at.
        n_steps: How many steps of each.

    Attributes:
        takes_seed: Whether the function is called with ``seed=``, as batchers do.
        sent_to_workers: What has to be pickled.
    """

    def __init__(
        self,
        env: Any,
        env_args: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        actions: Sequence[Any] | None = None,
        seed: int = 0,
        n_episodes: int = 3,
        n_steps: int = 100,
    ) -> None:
        self.gym_id = env if isinstance(env, str) else ""
        if isinstance(env, str):
            env = functools.partial(gymnasium.make, env)
        self.is_instance = is_environment(env)
        self.factory = None if self.is_instance else env
        self.instance = env if self.is_instance else None
        refuse_arguments_of_instance(self.is_instance, env_args=env_args)
        self.takes_seed = callable(self.factory) and takes_seed(self.factory)
        self.env_args = dict(env_args or {})
        self.options = options
        self.n_steps = n_steps
        self.sent_to_workers: Any = (self.factory, self.env_args)
        self._root = root_from(seed)
        # At least two: checks run others in between.
        self.seeds = episode_seeds(self._root, 0, max(n_episodes, 2))
        self._given_actions = actions
        self._action_space: Any = _UNKNOWN
        self.can_copy, self.why_no_copy = self._try_copy()

    @property
    def name(self) -> str:
        """What reports call it."""
        env = self.instance
        if self.gym_id:
            return self.gym_id
        if env is None:
            function = getattr(self.factory, "func", self.factory)
            name = getattr(function, "__qualname__", type(function).__name__)
            return name if inspect.isclass(function) else f"{name}()"
        return type(getattr(env, "unwrapped", env)).__name__

    @contextmanager
    def opened(self, number: int = 0) -> Iterator[Opened]:
        """An instance that nobody has used, closed afterwards.

        Args:
            number: Instances with different numbers are made as by different workers.

        Raises:
            Failed: If there is none to be had.
        """
        try:
            made = self.make(number)
            opened = _opened(made)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise Failed(f"no environment to check: {described(error)}") from error
        try:
            yield opened
        finally:
            if not self.is_instance or self.can_copy:
                close_quietly(made)

    def make(self, number: int) -> Any:
        """Call the factory as worker ``number`` would, or copy the instance."""
        if self.is_instance:
            return copy.deepcopy(self.instance) if self.can_copy else self.instance
        seed = worker_seed(self._root, number)
        with warnings.catch_warnings(), seeded_generators(seed):
            warnings.simplefilter("ignore")
            return self._called(seed)

    @property
    def episodes(self) -> list[Episode]:
        """Episodes of one instance, one after another.

        Raises:
            CannotCheck: If there are no actions.
        """
        if not self._looked_at[1]:
            self.actions(0)
        return self._looked_at[1]

    @property
    def used_generators(self) -> list[str]:
        """Names of the global generators that ``episodes`` used."""
        return self._looked_at[2]

    @property
    def closed(self) -> Opened:
        """An instance to look at without running it: spaces, signatures."""
        return self._looked_at[0]

    @functools.cached_property
    def _looked_at(self) -> tuple[Opened, list[Episode], list[str]]:
        """One instance serves for all: it may be expensive, such as processes."""
        with self.opened() as env:
            episodes: list[Episode] = []
            self._action_space = copy.deepcopy(env.action_space)
            with seeded_generators(1):
                watch = GeneratorWatch()
                # Without actions there are no episodes, and who asks for actions is told why.
                with contextlib.suppress(CannotCheck):
                    episodes.extend(self.run(env, n) for n in range(len(self.seeds)))
                used = watch.used()
        return env, episodes, used

    def run(self, env: Opened, number: int, n_steps: int | None = None) -> Episode:
        """Run an episode of an instance.

        Args:
            env: The instance.
            number: Which seed and which actions.
            n_steps: How far, as far as usual by default.
        """
        limit = self.n_steps if n_steps is None else n_steps
        actions = self.actions(number)
        return run_episode(env.runs, self.seeds[number], self.options, actions, limit)

    def actions(self, number: int) -> Sequence[Any]:
        """The actions of an episode.

        Raises:
            CannotCheck: If none were given and the environment has no action space.
        """
        if self._given_actions is not None:
            return self._given_actions
        if self._action_space is _UNKNOWN:
            self._looked_at  # noqa: B018  (finds the space)
        if self._action_space is None:
            raise CannotCheck("the environment has no action_space: pass actions=[...]")
        try:
            space = copy.deepcopy(self._action_space)
            space.seed(self.seeds[number])
            return [space.sample() for _ in range(min(N_ACTIONS, self.n_steps))]
        except Exception as error:
            raise CannotCheck(f"action_space gives no samples: {described(error)}") from error

    def _called(self, seed: int) -> Any:
        factory: Any = self.factory
        if not callable(factory):
            raise TypeError(f"{type(factory).__name__} is no environment and cannot be called")
        if self.takes_seed:
            return called_with_seed(factory, seed, self.env_args)
        return factory(**self.env_args)

    def _try_copy(self) -> tuple[bool, str]:
        if not self.is_instance:
            return True, ""
        try:
            copy.deepcopy(self.instance)
        except Exception as error:
            return False, described(error)
        return True, ""


def is_environment(value: Any) -> bool:
    """Whether a value is an environment rather than something that makes one."""
    if inspect.isclass(value):
        return False
    if isinstance(value, gymnasium.Env | VecEnv):
        return True
    return callable(getattr(value, "reset", None)) and callable(getattr(value, "step", None))


def takes_seed(factory: Callable[..., Any]) -> bool:
    """Whether a factory is to be called with ``seed=``, as batchers call ``create_env``.

    Classes of environments are not: their ``seed`` is theirs. Nor are functions that only have
    ``**kwargs``, which may be those of an environment; name ``seed`` if it is wanted.
    """
    function = getattr(factory, "func", factory)
    if inspect.isclass(function) and not issubclass(function, VecEnv):
        return False
    if function is gymnasium.make:
        return False
    return takes_keyword(factory, "seed", otherwise=False)


def close_quietly(made: Any) -> None:
    """Close what a factory made, whatever it says to that."""
    try:
        made.close()
    except KeyboardInterrupt:
        raise
    except BaseException:
        return


def _opened(made: Any) -> Opened:
    if isinstance(made, GymEnv):
        env = made._envs[0]
        return Opened(made, env, env, made, made.action_space)
    if isinstance(made, VecEnv):
        space = getattr(made, "action_space", None)
        if space is None:
            raise TypeError(f"{type(made).__name__} has no action_space")
        return Opened(made, LaneOf(made, 0, ActionArrays(space, None)), None, made, space)
    if not is_environment(made):
        raise TypeError(f"{type(made).__name__} is no environment")
    env = modernised(made)
    return Opened(made, env, env, None, getattr(env, "action_space", None))
