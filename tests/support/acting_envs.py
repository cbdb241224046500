"""Environments that choose their own actions, with values that can be computed by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from support.envs import NOTHING, Script, follow


class ActingEnv:
    """The state is ``[t, n_resets, action given, number]``, always the same array.

    ``reset`` returns the action ``10 * n_resets``; a step returns the action that it was given
    plus 1, the reward ``0.1 * t``, and is done after ``length`` steps.

    Args:
        length: Steps of an episode.
        number: Identifies the environment.
        script: Additional behaviour, by the number of the reset from 1 and the step (-1: reset).
    """

    def __init__(self, length: int = 10, number: int = 0, script: Script = NOTHING) -> None:
        self.length, self.number, self.script = length, number, script
        self.n_resets = 0
        self.state = np.zeros(4)
        self.closes = ""  # the file that close() makes

    def reset(self) -> tuple[Any, Any]:
        self.t = 0
        self.n_resets += 1
        self.state[:] = 0, self.n_resets, -1, self.number
        return follow(self.script, self.n_resets, -1) or (self.state, 10 * self.n_resets)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any]:
        instead = follow(self.script, self.n_resets, self.t)
        self.t += 1
        self.state[:] = self.t, self.n_resets, action, self.number
        return instead or (action + 1, self.state, 0.1 * self.t, self.t >= self.length)

    def close(self) -> None:
        if self.closes:
            Path(self.closes).touch()

    @staticmethod
    def expected(length: int = 10, n_resets: int = 1, number: int = 0) -> tuple[Any, ...]:
        """Return state, action, next state, reward and done of an episode."""
        steps = np.arange(length + 1)
        actions = 10 * n_resets + steps
        given = np.where(steps > 0, actions - 1, -1)
        states = np.stack([steps, [n_resets] * (length + 1), given, [number] * (length + 1)], 1)
        states = states.astype(float)
        rewards = np.array([0.1 * t for t in range(1, length + 1)], np.float32)
        return states[:-1], actions[1:], states[1:], rewards, steps[1:] == length


class ScriptedEnv:
    """Environment that returns given values.

    Args:
        reset: Result of ``reset``.
        steps: Results of consecutive steps; exceptions are raised.
    """

    def __init__(self, reset: Any, steps: Sequence[Any] = ()) -> None:
        self.result, self.steps = reset, list(steps)
        self.n_resets = 0

    def reset(self) -> Any:
        self.n_resets += 1
        self.left = list(self.steps)
        return _returned(self.result)

    def step(self, action: Any) -> Any:
        return _returned(self.left.pop(0))


def _returned(value: Any) -> Any:
    if isinstance(value, BaseException):
        raise value
    return value


def states(*values: Any) -> ScriptedEnv:
    """Return an environment that goes through these states, with the action 0."""
    is_last = [False] * (len(values) - 2) + [True]
    steps = [(0, value, 0.0, end) for value, end in zip(values[1:], is_last, strict=True)]
    return ScriptedEnv((values[0], 0), steps)


def actions(*values: Any) -> ScriptedEnv:
    """Return an environment that takes these actions, the first one in ``reset``."""
    is_last = [False] * (len(values) - 2) + [True]
    steps = [(value, 0.0, 0.0, end) for value, end in zip(values[1:], is_last, strict=True)]
    return ScriptedEnv((0.0, values[0]), steps)


class NoisyEnv:
    """Environment that draws its states from the process's and Gymnasium's unseeded generators."""

    def reset(self) -> tuple[Any, Any]:
        self.t = 0
        self.observation, _ = gymnasium.make("CartPole-v1").reset()
        return self.draw(), 0

    def step(self, action: Any) -> tuple[Any, Any, Any, Any]:
        self.t += 1
        return action, self.draw(), 0.0, self.t >= 5

    def draw(self) -> list[float]:
        action = float(gymnasium.spaces.Box(0, 1, (), np.float64).sample())
        numbers = [random.random(), np.random.rand(), torch.rand(()).item()]  # noqa: NPY002
        return [*numbers, action, *self.observation.tolist()]


class DuckEnv:
    """Follows Gymnasium's protocol without subclassing; the state is ``[t, action given]``."""

    def __init__(self, length: int = 3) -> None:
        self.length = length
        self.n_resets = 0
        self.action_space = gymnasium.spaces.Discrete(5)

    def reset(self) -> tuple[Any, dict[str, Any]]:
        self.t = 0
        self.n_resets += 1
        return np.array([0.0, -1.0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.array([self.t, float(action)]), 1.0, False, self.t >= self.length, {}


class TypedActingEnv(ActingEnv, gymnasium.Env):  # type: ignore[misc]
    """Chooses its own actions although its type says that it is Gymnasium's."""

    reset = ActingEnv.reset  # type: ignore[assignment]
    step = ActingEnv.step  # type: ignore[assignment]


class Unloadable(ActingEnv):
    """Cannot be unpickled."""

    def __setstate__(self, state: Any) -> None:
        raise ImportError("no module named simulator")
