"""Runs episodes of environments, keeps everything they return, and compares episodes bit by bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from rlpool.envs.vec_env import LaneError, Options, VecEnv
from rlpool.record.failures import described
from rlpool.specs import flattener, leaves_of, structure_of_space, structure_of_value


@dataclass
class Step:
    """What one call returned.

    Attributes:
        observation: A copy, made at once.
        handed_out: The observation itself, which the environment may have changed since.
        reward: ``None`` for a reset.
        terminated: ``None`` for a reset.
        truncated: ``None`` for a reset.
        info: As returned.
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
        seed: Of its reset.
        steps: The reset and every step.
        failure: What went wrong, empty if nothing did.
        is_over: Whether it came to its end.
    """

    seed: int
    steps: list[Step] = field(default_factory=list)
    failure: str = ""
    is_over: bool = False


class Runnable(Protocol):
    """One environment, however it is stepped."""

    def reset(self, *, seed: int | None, options: Options) -> Any:
        """Start an episode: ``(observation, info)``."""

    def step(self, action: Any) -> Any:
        """Make a step: the five values."""


class LaneOf:
    """One lane of a ``VecEnv`` as an environment.

    Args:
        env: The environments.
        lane: Number of the lane.
        actions: From actions to arrays.
    """

    def __init__(self, env: VecEnv, lane: int, actions: ActionArrays) -> None:
        self._env, self._lane, self._actions = env, lane, actions

    def reset(self, *, seed: int | None, options: Options) -> Any:
        """Reset the lane."""
        self._env.reset_lanes([self._lane], [seed or 0], [options])
        self._actions.declare(self._env)
        return observation_of(self._env, self._lane), {}

    def step(self, action: Any) -> Any:
        """Step the lane."""
        arrays = self._actions.of([action] * self._env.n_lanes)
        self._env.step_lanes([self._lane], arrays)
        return result_of(self._env, self._lane)


class ActionArrays:
    """Actions of a space as arrays by key ``[B, ...]``, as ``VecEnv.step_lanes`` takes them.

    Args:
        space: The action space, ``None`` if there is none.
        example: An action, which says what actions are where there is no space.
    """

    def __init__(self, space: Any, example: Any) -> None:
        if space is None:
            structure = structure_of_value(example, keep_float64=False, name="action")
        else:
            structure = structure_of_space(space, keep_float64=False, name="action_space")
        self._leaves = leaves_of({"action": structure}, "")
        self._flatten = flattener(structure, "action")

    def declare(self, env: VecEnv) -> None:
        """Make ``last_action`` of an environment known."""
        env.declare_actions({key: leaf.spec for key, leaf in self._leaves.items()})

    def of(self, actions: Sequence[Any]) -> dict[str, Any]:
        """Put one action per lane into arrays."""
        columns = zip(*(self._flatten(action) for action in actions), strict=True)
        return {
            key: np.stack([np.asarray(value, leaf.spec.dtype) for value in column])
            for (key, leaf), column in zip(self._leaves.items(), columns, strict=True)
        }


def observation_of(env: VecEnv, lane: int) -> dict[str, Any]:
    """A copy of a lane's observation by key."""
    keys = env.columns.arrays if env.columns is not None else {}
    return {key: np.array(env.current[key][lane]) for key in keys}


def result_of(env: VecEnv, lane: int) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
    """What a lane's last step gave, as Gymnasium has it."""
    current = env.current
    flags = bool(current["terminated"][lane]), bool(current["truncated"][lane])
    return observation_of(env, lane), current["reward"][lane].copy(), *flags, {}


def run_episode(
    env: Runnable, seed: int, options: Options, actions: Sequence[Any], n_steps: int
) -> Episode:
    """Run an episode to its end or to ``n_steps`` steps, whatever happens.

    Args:
        env: The environment.
        seed: Of the reset.
        options: Of the reset.
        actions: Taken in turns, each as a copy.
        n_steps: How far to run.
    """
    episode = Episode(seed)
    call = "reset"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = env.reset(seed=seed, options=copy.deepcopy(options))
            if not isinstance(result, tuple) or len(result) != 2:
                episode.failure = f"reset() returned {_shortly(result)}, not (observation, info)"
                return episode
            episode.steps.append(Step(copy.deepcopy(result[0]), *result[:1], info=result[1]))
            for t in range(n_steps):
                call = f"step {t}"
                result = env.step(copy.deepcopy(actions[t % len(actions)]))
                if not isinstance(result, tuple) or len(result) != 5:
                    got = _shortly(result)
                    episode.failure = (
                        f"step() returned {got}, not (observation, reward, terminated, truncated, "
                        "info)"
                    )
                    return episode
                episode.steps.append(Step(copy.deepcopy(result[0]), *result))
                if any(flag is not None and _is_true(flag) for flag in result[2:4]):
                    episode.is_over = True
                    break
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        cause = error.__cause__ if isinstance(error, LaneError) and error.__cause__ else error
        episode.failure = f"{call} raised {described(cause)} (episode seed {seed})"
    return episode


def run_together(
    env: VecEnv, seeds: Sequence[int], options: Options, actions: Sequence[Any], n_steps: int
) -> list[Episode]:
    """Run one episode per lane at the same time.

    Args:
        env: The environments.
        seeds: One per lane.
        options: Of each reset.
        actions: Taken in turns by every lane.
        n_steps: How far to run.

    Raises:
        LaneError: If an environment fails.
    """
    arrays = ActionArrays(getattr(env, "action_space", None), actions[0])
    episodes = [Episode(seed) for seed in seeds]
    live = list(range(env.n_lanes))
    env.reset_lanes(live, seeds, [copy.deepcopy(options) for _ in seeds])
    arrays.declare(env)
    for lane in live:
        observation = observation_of(env, lane)
        episodes[lane].steps.append(Step(observation, observation))
    for t in range(n_steps):
        if not live:
            break
        ended = env.step_lanes(live, arrays.of([actions[t % len(actions)]] * env.n_lanes))
        for lane in live:
            result = result_of(env, lane)
            episodes[lane].steps.append(Step(result[0], *result))
        live = [lane for lane in live if lane not in ended]
    return episodes


def difference(first: Episode, second: Episode) -> str:
    """Where two episodes differ, in a few words; empty if they are bitwise the same."""
    for t, (one, other) in enumerate(zip(first.steps, second.steps, strict=False)):
        where = "reset" if t == 0 else f"step {t - 1}"
        for name in ("observation", "reward", "terminated", "truncated"):
            if bits(getattr(one, name)) != bits(getattr(other, name)):
                values = f"{_shortly(getattr(one, name))} and {_shortly(getattr(other, name))}"
                return f"the {name} of {where} is {values}"
    if len(first.steps) != len(second.steps):
        return f"one has {len(first.steps) - 1} steps, the other {len(second.steps) - 1}"
    if first.failure != second.failure:
        return f"one fails ({first.failure or second.failure}), the other does not"
    return ""


def place(t: int) -> str:
    """What the ``t``-th result of an episode came from."""
    return f"step {t - 1}" if t else "reset"


def bits(value: Any) -> Any:
    """A value in a form in which equality means the same structure, dtypes, shapes and bits."""
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


def arrays_in(value: Any) -> list[Any]:
    """The arrays in a nested value."""
    if isinstance(value, Mapping):
        return [array for inner in value.values() for array in arrays_in(inner)]
    if isinstance(value, tuple | list):
        return [array for inner in value for array in arrays_in(inner)]
    if isinstance(value, torch.Tensor):
        return [value.detach().cpu().numpy()]
    return [value] if isinstance(value, np.ndarray) else []


def _is_true(flag: Any) -> bool:
    return bool(np.any(flag))


def _shortly(value: Any) -> str:
    """A value in at most 60 characters, even if it cannot be turned into text."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."
