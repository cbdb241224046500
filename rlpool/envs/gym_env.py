"""A list of Gymnasium environments as a batch of lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from rlpool.arguments import names_arguments
from rlpool.envs.ancestor_env import modernised
from rlpool.envs.columns import BadValue, Columns
from rlpool.envs.make_wrappers import have_passed, without_checkers, without_time_limit
from rlpool.envs.vec_env import LaneError, Options, VecEnv
from rlpool.errors import SpecError
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
        envs = _checked_environments(envs)
        super().__init__(len(envs), seed)
        self._keep_float64 = keep_float64
        self._envs = [modernised(env) for env in envs]
        if max_episode_steps is not None:
            self._envs = [_limited(env, max_episode_steps) for env in self._envs]
        self.observation_space = getattr(self._envs[0], "observation_space", None)
        self.action_space = getattr(self._envs[0], "action_space", None)
        self._refuse_differences()
        self._steps: list[Callable[[Any], Any]] = [env.step for env in self._envs]
        self._resets: list[Callable[..., Any]] = [env.reset for env in self._envs]
        self._wrapped_lanes = set(range(len(envs)))  # still called through all their wrappers
        self._closed_lanes: set[int] = set()
        self._elapsed = np.zeros(len(envs), np.int64)  # steps of each lane's episode
        self._limits = np.full(len(envs), _NO_LIMIT)  # of the lanes whose time limit is kept here
        self._until_limit = _NO_LIMIT  # lower bound of the steps before a lane reaches its limit
        self.is_declared = self.observation_space is not None and not _may_differ(self._envs[0])
        # Whether the columns are surely those of the observations; else these show what they are.
        self._is_sure = self.is_declared
        self._declare_space()
        self.keeps_results = False
        self.results: list[Any] = []
        self.action_structure: Structure | None = None
        self._action_leaves: dict[str, Leaf] | None = None
        self._decode: Callable[[Mapping[str, Array]], list[Any]] = undeclared_actions
        if self.action_space is not None:
            structure = self._structure(self.action_space, "action_space")
            self.action_structure = structure
            self._action_leaves = leaves_of({"action": structure}, "")
            self._decode = action_decoder(structure, self._action_leaves, self._action_dtypes())

    @property
    def columns(self) -> Columns | None:
        """The observations' columns, ``None`` before the first reset of undeclared spaces."""
        return self._columns

    @property
    def action_leaves(self) -> dict[str, Leaf] | None:
        """Keys of the actions, ``None`` if the environments declare no action space."""
        return self._action_leaves

    @property
    def shown_structure(self) -> Structure | None:
        """How an observation falls into keys, ``None`` as long as that is not known."""
        return self._columns.structure if self._columns is not None and self._is_sure else None

    def declare_observations(self, structure: Structure) -> None:
        """Take what observations look like from others of the same kind."""
        self._declare_structure(structure)
        self._is_sure = True

    def forget(self) -> None:
        """Be as before the first reset, see ``VecEnv.forget``."""
        super().forget()
        self._forget_columns()
        self._is_sure = self.is_declared
        self._declare_space()

    def close(self) -> None:
        """Close all environments."""
        for lane in range(self.n_lanes):
            self.close_lane(lane)

    def close_lane(self, lane: int) -> None:
        """Close one environment, once."""
        if lane not in self._closed_lanes:
            self._closed_lanes.add(lane)
            self._envs[lane].close()

    def attribute(self, lane: int, name: str) -> Any:
        """An attribute of an environment or, where that lacks it, of what it wraps."""
        env = self._envs[lane]
        getter = getattr(env, "get_wrapper_attr", None)
        return getter(name) if callable(getter) else getattr(env, name)

    def share_elapsed(self, elapsed: Array) -> None:
        """Count the steps of each lane's episode in another array, int64 ``[n_lanes]``."""
        elapsed[:] = self._elapsed
        self._elapsed = elapsed

    def native_action_specs(self) -> dict[str, TensorSpec] | None:
        """Keys of the actions with the dtypes that the environments take."""
        if self._action_leaves is None:
            return None
        return {
            key: TensorSpec(leaf.spec.shape, dtype)
            for (key, leaf), dtype in zip(
                self._action_leaves.items(), self._action_dtypes(), strict=True
            )
        }

    def _reset_lanes(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> None:
        observations = []
        infos = []
        lane = lanes[0]
        try:
            for lane, seed, option in zip(lanes, seeds, options, strict=True):
                self.lane_in_use[0] = lane
                result = self._resets[lane](seed=seed, options=option)
                if type(result) is not tuple or len(result) != 2:
                    result = self._adapted(lane, result)
                observation, info = result
                observations.append(observation)
                infos.append(info)
                self._elapsed[lane] = 0
                self._until_limit = min(self._until_limit, int(self._limits[lane]))
            if self._wrapped_lanes:
                self._unwrap(lanes)
                self._until_limit = 1  # look which limits there are now
            self._write_reset(lanes, observations)
            if self.keeps_results:
                self.results = list(zip(observations, infos, strict=True))
        except BadValue as error:
            raise LaneError(error.lane, "reset") from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise LaneError(lane, "reset") from error

    def _step_lanes(
        self, lanes: Sequence[int], actions: Mapping[str, Array]
    ) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        results: list[tuple[Any, ...]] = []
        steps, lane_in_use = self._steps, self.lane_in_use
        lane = lanes[0]
        try:
            decoded = self._decode(actions)
            for lane in lanes:
                lane_in_use[0] = lane
                results.append(steps[lane](decoded[lane]))
            if self.keeps_results:
                self.results = results
            observations, rewards, terminated, cut, _ = zip(*results, strict=True)
            if self._columns is not None:
                self._columns.write(lanes, observations)
        except BadValue as error:
            raise LaneError(error.lane, "step") from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise LaneError(lane, "step") from (_explained(results) or error)
        if len(lanes) == self.n_lanes:
            self._elapsed += 1
        else:
            self._elapsed[list(lanes)] += 1
        truncated: Sequence[Any] = cut
        self._until_limit -= 1
        if self._until_limit <= 0:
            truncated = self._truncated(lanes, cut)
        return rewards, terminated, truncated

    def _adapted(self, lane: int, observation: Any) -> tuple[Any, dict[str, Any]]:
        """Take an environment for one of the former gym, as its ``reset`` returned no pair."""
        env = self._envs[lane] = modernised(self._envs[lane], is_former=True)
        self._steps[lane], self._resets[lane] = env.step, env.reset
        return observation, {}

    def _unwrap(self, lanes: Sequence[int]) -> None:
        """Take over from the wrappers of lanes whose checkers have passed."""
        for lane in self._wrapped_lanes.intersection(lanes):
            if have_passed(self._envs[lane]):
                self._wrapped_lanes.remove(lane)
                self._envs[lane] = without_checkers(self._envs[lane])
                env, limit = without_time_limit(self._envs[lane])
                self._steps[lane], self._resets[lane] = env.step, env.reset
                if limit is not None:
                    self._limits[lane] = limit

    def _truncated(self, lanes: Sequence[int], truncated: Sequence[Any]) -> Sequence[Any]:
        """The flags of a step, with those of the lanes that reached their limit."""
        left = self._limits - self._elapsed
        self._until_limit = max(1, int(left[left > 0].min(initial=_NO_LIMIT)))
        return [
            bool(left[lane] <= 0) or was_truncated
            for lane, was_truncated in zip(lanes, truncated, strict=True)
        ]

    def _write_reset(self, lanes: Sequence[int], observations: Sequence[Any]) -> None:
        """Write the observations of a reset; the first ones tell what no space does."""
        if self._columns is not None:
            try:
                self._columns.write(lanes, observations)
            except BadValue:
                if self._is_sure:
                    raise
                self._forget_columns()
        self._is_sure = True
        if self._columns is None:
            structure = structure_of_value(
                observations[0], keep_float64=self._keep_float64, name="observation"
            )
            self._declare_structure(structure).write(lanes, observations)

    def _declare_space(self) -> None:
        if self.observation_space is not None:
            self._declare_structure(self._structure(self.observation_space, "observation_space"))

    def _structure(self, space: Any, name: str) -> Structure:
        return structure_of_space(space, keep_float64=self._keep_float64, name=name)

    def _action_dtypes(self) -> list[np.dtype[Any]]:
        # What the environments take, which is float64 where float32 is stored.
        structure = structure_of_space(self.action_space, keep_float64=True, name="action_space")
        return [leaf.spec.dtype for leaf in leaves_of({"action": structure}, "").values()]

    def _refuse_differences(self) -> None:
        for number, env in enumerate(self._envs):
            for name in ("observation_space", "action_space"):
                first, space = getattr(self, name), getattr(env, name, None)
                if _shapes(first, name) != _shapes(space, name):
                    raise SpecError(
                        f"{name} of environment {number} is {space}, "
                        f"that of environment 0 is {first}",
                        fix="put only environments with equal spaces into one GymEnv",
                    )


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


class GymEnvInf(GymEnv):
    """A ``GymEnv`` whose environments restart on their own.

    At the end of an episode a lane resets at once, with the same row of ``env_info``. With
    ``step``, the terminal observation is in the first result, the first observation of the new
    episode in the second. In a ``Batcher``, lanes never end.
    """

    auto_reset = True


def _explained(results: Sequence[Any]) -> SpecError | None:
    """The error for a step that did not return five values, if that is what happened."""
    for result in results:
        if not isinstance(result, tuple) or len(result) != 5:
            got = len(result) if isinstance(result, tuple) else type(result).__name__
            return SpecError(f"step() should return five values, got {got}")
    return None


def _may_differ(env: Any) -> bool:
    """Whether a wrapper changes observations and says of no space of its own.

    The space that it seems to have is that of what it wraps, which it may keep to or not.
    """
    while isinstance(env, gymnasium.Wrapper) and env._observation_space is None:
        if isinstance(env, gymnasium.ObservationWrapper):
            return True
        env = env.env
    return False


def _checked_environments(envs: Any) -> list[Any]:
    """The environments of a list; refuses anything else, and what is no environment."""
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
    return has_methods and not isinstance(value, type) and not is_batch(value)


def is_batch(value: Any) -> bool:
    """Whether a value holds several environments."""
    if isinstance(value, VecEnv | gymnasium.vector.VectorEnv):
        return True
    # Those of other libraries, such as Stable-Baselines3; not their classes.
    return isinstance(getattr(value, "num_envs", None), int) and hasattr(value, "step_async")


def how_to_make_one(value: Any) -> str:
    """What to do where an environment was expected, and this came."""
    if is_batch(value):
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


def _limited(env: Any, max_episode_steps: int) -> Any:
    if max_episode_steps < 1:
        raise SpecError(f"max_episode_steps should be at least 1, got {max_episode_steps}")
    return gymnasium.wrappers.TimeLimit(env, max_episode_steps)


def _shapes(space: Any, name: str) -> Structure | None:
    """What must agree between environments: kinds, shapes and dtypes, not bounds."""
    return None if space is None else structure_of_space(space, keep_float64=True, name=name)


def action_decoder(
    structure: Structure, leaves: Mapping[str, Leaf], dtypes: Sequence[np.dtype[Any]]
) -> Callable[[Mapping[str, Array]], list[Any]]:
    """Compile the way from action arrays ``[B, ...]`` to one action per lane.

    Actions are NumPy arrays and scalars, as from Gymnasium's own vector environments.
    """

    # Arrays are copied: environments may keep their action, and the agent may reuse its tensor.
    def split(array: Array, leaf: Leaf, dtype: np.dtype[Any]) -> list[Any]:
        values = list(np.array(array, dtype))
        if leaf.is_scalar or leaf.spec.shape:
            return values
        return [np.asarray(value) for value in values]  # a Box without dimensions

    parts = [(key, leaf, dtype) for (key, leaf), dtype in zip(leaves.items(), dtypes, strict=True)]
    if isinstance(structure, Leaf):
        key, leaf, dtype = parts[0]
        if leaf.is_scalar or leaf.spec.shape:
            return lambda actions: list(np.array(actions[key], dtype))
        return lambda actions: split(actions[key], leaf, dtype)
    nest = nester(structure)

    def decode(actions: Mapping[str, Array]) -> list[Any]:
        columns = [split(actions[key], leaf, dtype) for key, leaf, dtype in parts]
        return [nest(row) for row in zip(*columns, strict=True)]

    return decode


def undeclared_actions(actions: Mapping[str, Array]) -> list[Any]:
    """Actions for environments without an action space: Python numbers, or arrays."""
    array = np.array(actions["action"])
    return array.tolist() if array.ndim == 1 else list(array)
