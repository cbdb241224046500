"""A list of Gymnasium environments as a batch of lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from rlpool.envs.columns import Results
from rlpool.envs.legacy import modernised
from rlpool.envs.vec_env import Options, VecEnv
from rlpool.errors import SpecError
from rlpool.machine.arguments import names_arguments, whole_number
from rlpool.memory.storage import Array
from rlpool.specs import (
    Leaf,
    Structure,
    TensorSpec,
    leaves_of,
    nester,
    structure_of_space,
    structure_of_value,
)

_NO_LIMIT = 2**62  # steps
_SPACES = ("observation_space", "action_space")


class GymEnv(VecEnv):
    """Environments stepped one after another in the process that holds them.

    Every Gymnasium space works for observations and actions, except ``Text``, ``Graph``,
    ``Sequence`` and ``OneOf``. A dict observation keeps its keys (nested ones joined with
    ``/``), any other is ``frame``. Environments written for the old ``gym`` interface work too.

    Args:
        envs: The environments, all of one kind. They belong to this object from now on.
        seed: Root of the seeds that ``reset(env_info)`` gives to the environments. A batcher
            brings its own seeds.
        max_episode_steps: Truncate episodes after so many steps.
        keep_float64: Store float64 as it is. By default it becomes float32; every other dtype
            is kept.

    Attributes:
        observation_space, action_space: Those of the environments, ``None`` without one.
        action_structure: How an action falls into keys, ``None`` without an action space.
        is_declared: Whether a space says what observations look like.
        keeps_results: Whether ``results`` is filled.
        results: What the environments returned from the last call, one entry per lane that it
            was for.

    Raises:
        SpecError: For no environments, spaces that have no tensors, or spaces that differ.
    """

    @names_arguments
    def __init__(
        self,
        envs: Sequence[Any],
        seed: int | Sequence[int] | None = None,
        *,
        max_episode_steps: int | None = None,
        keep_float64: bool = False,
    ) -> None:
        envs = [modernised(env) for env in _checked_environments(envs)]
        super().__init__(len(envs), seed)
        if max_episode_steps is not None:
            limit = whole_number("max_episode_steps", max_episode_steps, 1)
            envs = [TimeLimit(env, limit) for env in envs]
        self._envs = envs
        self._keep_float64 = keep_float64
        self._steps: list[Callable[[Any], Any]] = [env.step for env in envs]
        self._resets: list[Callable[..., Any]] = [env.reset for env in envs]
        self._wrapped_lanes = set(range(len(envs)))  # still called through all their wrappers
        self._open_lanes = set(range(len(envs)))
        self._elapsed = np.zeros(len(envs), np.int64)  # steps of each lane's episode
        self._limits = np.full(len(envs), _NO_LIMIT)  # of the lanes whose time limit is kept here
        self._until_limit = _NO_LIMIT  # lower bound of the steps before a lane reaches its limit
        self.keeps_results = False
        self.results: list[Any] = []
        self.observation_space, self.action_space = (_common_space(envs, name) for name in _SPACES)
        self.is_declared = self.observation_space is not None and not _may_differ(envs[0])
        if self.is_declared:
            self._declare_structure(self._structure("observation_space"))
        self.action_structure: Structure | None = None
        self._decode: Callable[[Mapping[str, Array]], list[Any]] = undeclared_actions
        if self.action_space is not None:
            self.action_structure = self._structure("action_space")
            self._action_leaves = leaves_of({"action": self.action_structure}, "")
            self._decode = action_decoder(self.action_space)

    @property
    def shown_structure(self) -> Structure | None:
        """How an observation falls into keys, ``None`` as long as that is not known."""
        return self._columns.structure if self._columns is not None else None

    def declare_observations(self, structure: Structure) -> None:
        """Adopt what observations of others of the same kind look like."""
        self._declare_structure(structure)

    def forget(self) -> None:
        """Return to the state before the first reset, see ``VecEnv.forget``."""
        super().forget()
        if not self.is_declared:
            self._forget_columns()

    def close(self) -> None:
        """Close all environments."""
        for lane in range(self.n_lanes):
            self.close_lane(lane)

    def close_lane(self, lane: int) -> None:
        """Close one environment, once."""
        if lane in self._open_lanes:
            self._open_lanes.remove(lane)
            self._envs[lane].close()

    def attribute(self, lane: int, name: str) -> Any:
        """An attribute of an environment or, where that lacks it, of what it wraps."""
        env = self._envs[lane]
        getter = getattr(env, "get_wrapper_attr", None)
        return getter(name) if callable(getter) else getattr(env, name)

    def native_action_specs(self) -> dict[str, TensorSpec] | None:
        """Keys of the actions with the dtypes that the environments take."""
        structure = _native(self.action_space, "action_space")
        if structure is None:
            return None
        return {key: leaf.spec for key, leaf in leaves_of({"action": structure}, "").items()}

    def _structure(self, name: str) -> Structure:
        space = getattr(self, name)
        return structure_of_space(space, keep_float64=self._keep_float64, name=name)

    def _reset_lanes(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> None:
        results = []
        try:
            for lane, seed, option in zip(lanes, seeds, options, strict=True):
                self.lane_in_use[0] = lane
                result = self._resets[lane](seed=seed, options=option)
                if type(result) is not tuple or len(result) != 2:
                    self._adapt(lane)
                    result = result, {}
                results.append(result)
                self._elapsed[lane] = 0
                self._until_limit = min(self._until_limit, int(self._limits[lane]))
            if self._wrapped_lanes:
                self._unwrap(lanes)
            observations = [observation for observation, _ in results]
            if self._columns is None:
                self._learn(lanes, observations)
            else:
                self._columns.write(lanes, observations)
        except BaseException as error:
            self._fail("reset", error)
        if self.keeps_results:
            self.results = results

    def _step_lanes(self, lanes: Sequence[int], actions: Mapping[str, Array]) -> Results:
        results: list[tuple[Any, ...]] = []
        steps, lane_in_use = self._steps, self.lane_in_use
        try:
            decoded = self._decode(actions)
            for lane in lanes:
                lane_in_use[0] = lane
                results.append(steps[lane](decoded[lane]))
            observations, rewards, terminated, truncated, _ = zip(*results, strict=True)
            if self._columns is not None:
                self._columns.write(lanes, observations)
        except BaseException as error:
            self._fail("step", _explained(results) or error)
        if self.keeps_results:
            self.results = results
        if len(lanes) == self.n_lanes:
            self._elapsed += 1
        else:
            self._elapsed[list(lanes)] += 1
        self._until_limit -= 1
        if self._until_limit > 0:
            return rewards, terminated, truncated
        return rewards, terminated, self._with_limits(lanes, truncated)

    def _adapt(self, lane: int) -> None:
        """Take an environment for one of the old gym, as its ``reset`` returned no pair."""
        env = self._envs[lane] = modernised(self._envs[lane], returns_pair=False)
        self._steps[lane], self._resets[lane] = env.step, env.reset

    def _unwrap(self, lanes: Sequence[int]) -> None:
        """Do the work of the wrappers of ``gymnasium.make`` here, when its checkers have passed.

        ``PassiveEnvChecker`` checks the first reset and steps and then only passes calls on, as
        ``OrderEnforcing`` does after the first reset; ``TimeLimit`` counts. Passing every call
        through three wrappers is a fifth of a CartPole step.
        """
        for lane in self._wrapped_lanes.intersection(lanes):
            if not all(map(_has_passed, _layers(self._envs[lane]))):
                continue
            self._wrapped_lanes.remove(lane)
            self._envs[lane] = env = _without_checkers(self._envs[lane])
            if type(env) is TimeLimit:
                self._limits[lane] = env._max_episode_steps
                self._until_limit = 1
                env = env.env
            self._steps[lane], self._resets[lane] = env.step, env.reset

    def _with_limits(self, lanes: Sequence[int], truncated: Sequence[Any]) -> Sequence[Any]:
        """The flags of a step, with those of the lanes that reached their limit."""
        left = self._limits - self._elapsed
        self._until_limit = max(1, int(left[left > 0].min(initial=_NO_LIMIT)))
        return [
            bool(left[lane] <= 0) or was_truncated
            for lane, was_truncated in zip(lanes, truncated, strict=True)
        ]

    def _learn(self, lanes: Sequence[int], observations: Sequence[Any]) -> None:
        """Declare what the first observations look like, and write them.

        A wrapper without a space of its own may keep to that of what it wraps.
        """
        if self.observation_space is not None:
            try:
                columns = self._declare_structure(self._structure("observation_space"))
                return columns.write(lanes, observations)
            except SpecError:
                pass
        structure = structure_of_value(
            observations[0], keep_float64=self._keep_float64, name="observation"
        )
        self._declare_structure(structure).write(lanes, observations)


class GymEnvInf(GymEnv):
    """A ``GymEnv`` whose environments restart on their own.

    At the end of an episode a lane resets at once, with the same row of ``env_info``. With
    ``step``, the terminal observation is in the first result, the first observation of the new
    episode in the second. In a ``Batcher``, lanes never end.
    """

    auto_reset = True


# Spaces and wrappers -------------------------------------------------------------------------


def _common_space(envs: Sequence[Any], name: str) -> Any:
    """The space that all environments have, bounds aside; ``None`` without one."""
    first, *others = (getattr(env, name, None) for env in envs)
    for number, space in enumerate(others, 1):
        if _native(first, name) != _native(space, name):
            raise SpecError(
                f"{name} of environment {number} is {space}, that of environment 0 is {first}",
                fix="put only environments with equal spaces into one GymEnv",
            )
    return first


def _native(space: Any, name: str) -> Structure | None:
    """How a space falls into keys, with the dtypes that environments use."""
    return None if space is None else structure_of_space(space, keep_float64=True, name=name)


def _layers(env: Any) -> Iterator[Any]:
    """The wrappers around an environment, from the outermost on."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env


def _may_differ(env: Any) -> bool:
    """Whether a wrapper changes observations and declares no space of its own.

    The space that it seems to have is that of what it wraps, which it may keep to or not.
    """
    without_space = takewhile(lambda layer: layer._observation_space is None, _layers(env))
    return any(isinstance(layer, gymnasium.ObservationWrapper) for layer in without_space)


def _has_passed(wrapper: Any) -> bool:
    """Whether a checker has nothing left to check."""
    checks = ("checked_reset", "checked_step", "checked_data_reuse")
    return type(wrapper) is not PassiveEnvChecker or all(
        getattr(wrapper, name, True) for name in checks
    )


def _without_checkers(env: Any) -> Any:
    """The environment without its checkers; wrappers around them are linked to what is inside."""
    if not isinstance(env, gymnasium.Wrapper):
        return env
    inner = _without_checkers(env.env)
    if type(env) in (PassiveEnvChecker, OrderEnforcing):
        return inner
    env.env = inner
    return env


def _explained(results: Sequence[Any]) -> SpecError | None:
    """The error for a step that did not return five values, if that is what happened."""
    for result in results:
        if not isinstance(result, tuple) or len(result) != 5:
            got = len(result) if isinstance(result, tuple) else type(result).__name__
            return SpecError(f"step() should return five values, got {got}")
    return None


def all_tasks(attribute: Callable[[str], Any]) -> list[Any] | None:
    """The tasks that an environment knows.

    Args:
        attribute: Gives an attribute of the environment, ``None`` if it lacks it.

    Returns:
        What its ``get_all_task_idx()`` lists, or the numbers below its ``n_tasks``; ``None`` if it
        has neither.
    """
    listing = attribute("get_all_task_idx")
    tasks = listing() if callable(listing) else None
    if tasks is not None:
        return list(tasks)
    n_tasks = attribute("n_tasks")
    return None if n_tasks is None else list(range(int(n_tasks)))


# What GymEnv is given --------------------------------------------------------------------------


def _checked_environments(envs: Any) -> list[Any]:
    """The environments of a list; refuses anything else, and what is not an environment."""
    if isinstance(envs, str) or not isinstance(envs, Iterable) or is_environment(envs):
        raise SpecError(
            f"GymEnv got {_named(envs)}, not a list of environments",
            fix="pass a list: GymEnv([env], seed)",
        )
    checked = list(envs)
    if not checked:
        raise SpecError("GymEnv got no environments", fix="pass at least one")
    for number, env in enumerate(checked):
        if not is_environment(env):
            raise SpecError(
                f"environment {number} of a GymEnv is {_named(env)}, not an environment",
                fix=how_to_make_one(env),
            )
    return checked


def is_environment(value: Any) -> bool:
    """Whether a value is one environment, of whatever protocol, and can be a lane."""
    has_methods = callable(getattr(value, "reset", None)) and callable(getattr(value, "step", None))
    return has_methods and not isinstance(value, type) and not _is_batch(value)


def _is_batch(value: Any) -> bool:
    """Whether a value holds several environments."""
    if isinstance(value, VecEnv | gymnasium.vector.VectorEnv):
        return True
    # Those of other libraries, such as Stable-Baselines3; not their classes.
    return isinstance(getattr(value, "num_envs", None), int) and hasattr(value, "step_async")


def how_to_make_one(value: Any) -> str:
    """What to do where an environment was expected, and this came."""
    if _is_batch(value):
        return "pass the environments one by one: GymEnv([make() for _ in range(n)], seed)"
    if isinstance(value, str):
        return f"make it: GymEnv([gymnasium.make({value!r})], seed)"
    if callable(value):
        return "call it: GymEnv([make() for make in functions], seed)"
    return "pass objects with reset() and step(), such as gymnasium.make('CartPole-v1')"


def _named(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return type(value).__name__ if hasattr(value, "step") else f"{value!r:.60}"


# Actions ---------------------------------------------------------------------------------------


def action_decoder(space: Any) -> Callable[[Mapping[str, Array]], list[Any]]:
    """Compile the way from action arrays ``[B, ...]`` to one action per lane.

    Actions are NumPy arrays and scalars of the space's dtypes, as from Gymnasium's own vector
    environments.
    """
    structure = structure_of_space(space, keep_float64=True, name="action_space")
    if isinstance(structure, Leaf):
        return _splitter("action", structure)
    splitters = [_splitter(*item) for item in leaves_of({"action": structure}, "").items()]
    nest = nester(structure)

    def decode(actions: Mapping[str, Array]) -> list[Any]:
        parts = [split(actions) for split in splitters]
        return [nest(row) for row in zip(*parts, strict=True)]

    return decode


def _splitter(key: str, leaf: Leaf) -> Callable[[Mapping[str, Array]], list[Any]]:
    # Arrays are copied: environments may keep their action, and the agent may reuse its tensor.
    dtype = leaf.spec.dtype
    if leaf.is_scalar or leaf.spec.shape:
        return lambda actions: list(np.array(actions[key], dtype))
    return lambda actions: [np.asarray(value) for value in np.array(actions[key], dtype)]


def undeclared_actions(actions: Mapping[str, Array]) -> list[Any]:
    """Actions for environments without an action space: Python numbers, or arrays."""
    array = np.array(actions["action"])
    return array.tolist() if array.ndim == 1 else list(array)
