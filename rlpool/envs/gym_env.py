"""Gymnasium environments of this process as a batch of lanes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from rlpool.data.specs import (
    Leaf,
    Structure,
    TensorSpec,
    leaves_of,
    narrowed,
    nester,
    structure_of_space,
    structure_of_value,
)
from rlpool.data.storage import NDArray
from rlpool.envs.columns import Columns, Results, checked_count, choices_of
from rlpool.envs.info_keys import InfoKeys, info_specs
from rlpool.envs.legacy import modernised
from rlpool.envs.single_envs import checked_environments, state_keepers
from rlpool.envs.vec_env import Options, VecEnv
from rlpool.errors import SpecError
from rlpool.machine.arguments import whole_number

_SPACES = ("observation_space", "action_space")


class GymEnv(VecEnv):
    """Environments that are stepped one after another in this process.

    All Gymnasium spaces except ``Text``, ``Graph``, ``Sequence`` and ``OneOf`` work for
    observations and actions. A dict observation keeps its keys (nested ones joined with ``/``), any
    other is named ``frame``. Environments of the old ``gym`` interface work too.

    Args:
        envs: The environments, all with the same spaces. This object closes them.
        seed: Root of the seeds of ``reset(env_info)``. A batcher uses its own seeds.
        max_episode_steps: Truncate episodes after this many steps.
        keep_float64: True to store all float64 values as float64, or a list of keys of
            observations. By default they become float32, unless ``info_keys`` declares
            ``np.float64``. All other dtypes are kept.
        info_keys: Keys of ``info`` that become keys of a step, with their dtypes:
            ``{"success": bool, "action_mask": (np.int8, 4), "episode/r": float}``. A value is a
            dtype or ``(dtype, shape)``; ``["success", "cost"]`` means float32 numbers. A slash
            separates the keys of nested dicts. The value of a step is zero if the key is missing
            from its info.

    Attributes:
        observation_space: The environments' observation space, ``None`` without one.
        action_space: Their action space, ``None`` without one.
        action_structure: Structure of an action, ``None`` without an action space.
        native_actions: Shapes and dtypes of the environments' actions, by key.
        results: The environments' return values of the last call, one per lane.

    Raises:
        SpecError: Without environments, for spaces without a fixed shape, for spaces that
            differ, and for ``info_keys`` without a numeric dtype.

    Example:
        >>> env = GymEnv([CountingEnv(length=3), CountingEnv(length=3)], seed=0)
        >>> observation, lanes = env.reset()
        >>> observation["frame"], lanes
        (tensor([[0.],
                [0.]]), tensor([0, 1]))
    """

    def __init__(
        self,
        envs: Sequence[Any],
        seed: int | Sequence[int] | None = None,
        *,
        max_episode_steps: int | None = None,
        keep_float64: bool | Collection[str] = False,
        info_keys: InfoKeys = None,
    ) -> None:
        envs = checked_environments(envs)
        self.step_keys = getattr(envs[0], "step_keys", ())
        self.state_keepers = state_keepers(envs[0])
        checks_actions = getattr(envs[0], "checks_actions", False)
        envs = [modernised(env) for env in envs]
        super().__init__(len(envs), seed)
        if max_episode_steps is not None:
            limit = whole_number("max_episode_steps", max_episode_steps, 1)
            envs = [TimeLimit(env, limit) for env in envs]
        self._envs = envs
        self._keep_float64 = keep_float64
        self._info_specs = dict(info_specs(info_keys, keep_float64=keep_float64))
        with suppress(AttributeError):
            own = self.attribute(0, "step_info_keys")
            if isinstance(own, dict):  # of VariBadWrapper; others may have any such attribute
                self._info_specs |= info_specs(own, keep_float64=keep_float64)
        self._steps: list[Callable[[Any], Any]] = [env.step for env in envs]
        self._open_lanes, self._checked_lanes = set(range(len(envs))), set(range(len(envs)))
        self.results: list[Any] = []
        self.observation_space: Any = getattr(envs[0], _SPACES[0], None)
        self.action_space: Any = getattr(envs[0], _SPACES[1], None)
        (observed, *_), actions = (_structures(envs, name) for name in _SPACES)
        self.is_declared = observed is not None
        if observed is not None:
            self._declare_structure(observed)
        self.action_structure: Structure | None = None
        self.native_actions: dict[str, TensorSpec] = {}
        self._decode: Callable[[Mapping[str, NDArray]], list[Any]] = undeclared_actions
        if (native := actions[0]) is not None:
            self.action_structure = narrowed(native, keep_float64 is True)
            self.action_leaves = leaves_of({"action": self.action_structure}, "")
            self._decode = action_decoder(native)
            leaves = leaves_of({"action": native}, "")
            self.native_actions = {key: leaf.spec for key, leaf in leaves.items()}
            if not checks_actions:
                self._choices = choices_of(actions)

    def wrap(self, wrapper: Callable[[Any], Any]) -> None:
        """Put a wrapper around each environment, outermost; before the first reset."""
        self._envs = [wrapper(env) for env in self._envs]
        self._steps = [env.step for env in self._envs]

    def close(self) -> None:
        """Close all environments, even if some fail to close; raises one of the exceptions."""
        with ExitStack() as all_lanes:
            while self._open_lanes:
                all_lanes.callback(self._envs[self._open_lanes.pop()].close)

    def attribute(self, lane: int, name: str) -> Any:
        """Return an attribute of an environment or of the environments that it wraps."""
        env = self._envs[lane]
        getter = getattr(env, "get_wrapper_attr", None)
        return getter(name) if callable(getter) else getattr(env, name)

    def outermost(self) -> Any:
        """Return the first environment, with its wrappers."""
        return self._envs[0]

    def _reset_lanes(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> None:
        results = []
        for lane, seed, option in zip(lanes, seeds, options, strict=True):
            self.lane_in_use[0] = lane
            own = option and copy.deepcopy(option)  # the environment may modify it
            result = self._envs[lane].reset(seed=seed, options=own)
            if type(result) is not tuple or len(result) != 2:
                checked_count("reset", 2, result, "return (observation, info)")
            results.append(result)
        for lane in self._checked_lanes.intersection(lanes):
            self._drop_checkers(lane)
        observations, infos = zip(*results, strict=True)
        columns = self.columns or self._learned(observations)
        columns.write(lanes, observations)
        if self._infos is not None:
            self._infos.write(lanes, infos)
        self.results = results

    def _step_lanes(self, lanes: Sequence[int], actions: Mapping[str, NDArray]) -> Results:
        results: list[tuple[Any, ...]] = []
        steps, lane_in_use = self._steps, self.lane_in_use
        decoded = self._decode(actions)
        for lane in lanes:
            lane_in_use[0] = lane
            results.append(steps[lane](decoded[lane]))
        try:
            observations, rewards, terminated, truncated, infos = zip(*results, strict=True)
        except (TypeError, ValueError):
            for result in results:
                checked_count("step", 5, result)
            raise
        if self.columns is not None:
            self.columns.write(lanes, observations)
        if self._infos is not None:
            self._infos.write(lanes, infos)
        self.results = results
        return rewards, terminated, truncated

    def _drop_checkers(self, lane: int) -> None:
        """Remove Gymnasium's checkers from an environment once it has stepped.

        After that they only forward calls, which takes a tenth of a step of CartPole.
        """
        env, may_drop = _without_checkers(self._envs[lane])
        if may_drop:
            self._checked_lanes.remove(lane)
            self._envs[lane] = env
            self._steps[lane] = env.step

    def _learned(self, observations: Sequence[Any]) -> Columns:
        """Declare the structure of the first observations."""
        return self._declare_structure(structure_of_value(observations[0], name="observation"))


class GymEnvInf(GymEnv):
    """A ``GymEnv`` whose environments restart automatically.

    At the end of an episode, the lane resets immediately with the same row of ``env_info``.
    ``step`` returns the terminal observation in its first result and the first observation of the
    new episode in its second. In a ``Batcher``, lanes never stop.

    Example:
        >>> env = GymEnvInf([CountingEnv(length=1)], seed=0)
        >>> env.reset()[0]["frame"]
        tensor([[0.]])
        >>> ended, running = env.step(DictTensor({"action": torch.tensor([0])}))
        >>> ended[0]["frame"], running[0]["frame"]
        (tensor([[1.]]), tensor([[0.]]))
    """

    auto_reset = True


def _structures(envs: Sequence[Any], name: str) -> list[Any]:
    """Return each environment's structure of a space, or ``None``; only bounds may differ."""
    spaces = [getattr(env, name, None) for env in envs]
    found = [None if each is None else structure_of_space(each, name=name) for each in spaces]
    for number, structure in enumerate(found):
        if structure != found[0]:
            raise SpecError(
                f"{name} of environment {number} is {spaces[number]}, of environment 0 it is "
                f"{spaces[0]}",
                fix="put only environments with equal spaces into one GymEnv",
            )
    return found


def _without_checkers(env: Any) -> tuple[Any, bool]:
    """Remove the checkers of ``gymnasium.make``; returns also whether these have finished."""
    if not isinstance(env, gymnasium.Wrapper):
        return env, True
    inner, is_checked = _without_checkers(env.env)
    if not is_checked or (type(env) is PassiveEnvChecker and not env.checked_step):
        return env, False
    if type(env) in (PassiveEnvChecker, OrderEnforcing):
        return inner, True
    env.env = inner
    return env, True


def action_decoder(structure: Structure) -> Callable[[Mapping[str, NDArray]], list[Any]]:
    """Compile a function from action arrays ``[B, ...]`` to a list of one action per lane.

    Actions are NumPy arrays and scalars of the space's dtypes, as in Gymnasium's vector
    environments. They are copies: an environment may keep its action, and the agent may reuse its
    tensor.
    """
    if isinstance(structure, Leaf):
        return _splitter("action", structure)
    splitters = [_splitter(*pair) for pair in leaves_of({"action": structure}, "").items()]
    nest = nester(structure)

    def decode(actions: Mapping[str, NDArray]) -> list[Any]:
        parts = (split(actions) for split in splitters)
        return [nest(row) for row in zip(*parts, strict=True)]

    return decode


def _splitter(key: str, leaf: Leaf) -> Callable[[Mapping[str, NDArray]], list[Any]]:
    dtype = leaf.native
    if leaf.is_scalar or leaf.spec.shape:
        return lambda actions: list(np.array(actions[key], dtype))
    return lambda actions: [np.asarray(value) for value in np.array(actions[key], dtype)]


def undeclared_actions(actions: Mapping[str, NDArray]) -> list[Any]:
    """Return the actions for environments without an action space: Python numbers or arrays."""
    array = np.array(actions["action"])
    return array.tolist() if array.ndim == 1 else list(array)
