"""Environments that choose their own actions, every value of which can be worked out by hand."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from support.faults import strike


class ActingEnv:
    """The state is ``[t, n_resets, action given, number]``, always the same array.

    ``reset`` returns the action ``10 * n_resets``; a step returns the action that it was given
    plus 1, the reward ``0.1 * t``, and is done after ``length`` steps.

    Args:
        length: Steps of an episode.
        number: Identifies the environment.
    """

    def __init__(self, length: int = 10, number: int = 0) -> None:
        self.length, self.number = length, number
        self.n_resets = 0
        self.state = np.zeros(4)
        self.closes = ""  # the file that close() makes

    def reset(self) -> tuple[Any, Any]:
        self.t = 0
        self.n_resets += 1
        self.state[:] = 0, self.n_resets, -1, self.number
        return self.state, 10 * self.n_resets

    def step(self, action: Any) -> tuple[Any, Any, Any, Any]:
        self.t += 1
        self.state[:] = self.t, self.n_resets, action, self.number
        return action + 1, self.state, 0.1 * self.t, self.t >= self.length

    def close(self) -> None:
        if self.closes:
            Path(self.closes).touch()

    @staticmethod
    def expected(length: int = 10, n_resets: int = 1, number: int = 0) -> tuple[Any, ...]:
        """State, action, next state, reward, done of an episode."""
        steps = np.arange(length + 1)
        actions = 10 * n_resets + steps
        given = np.where(steps > 0, actions - 1, -1)
        states = np.stack([steps, [n_resets] * (length + 1), given, [number] * (length + 1)], 1)
        states = states.astype(float)
        rewards = np.array([0.1 * t for t in range(1, length + 1)], np.float32)
        return states[:-1], actions[1:], states[1:], rewards, steps[1:] == length


class ScriptedEnv:
    """Returns what it is told to.

    Args:
        reset: What ``reset`` returns.
        steps: What the steps return, one after the other; exceptions are raised.
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
    """An environment that goes through these states, with the action 0."""
    is_last = [False] * (len(values) - 2) + [True]
    steps = [(0, value, 0.0, end) for value, end in zip(values[1:], is_last, strict=True)]
    return ScriptedEnv((values[0], 0), steps)


def actions(*values: Any) -> ScriptedEnv:
    """An environment that takes these actions, the first of them in ``reset``."""
    is_last = [False] * (len(values) - 2) + [True]
    steps = [(value, 0.0, 0.0, end) for value, end in zip(values[1:], is_last, strict=True)]
    return ScriptedEnv((0.0, values[0]), steps)


class NoisyEnv:
    """Its states are drawn from the generators of the process."""

    def __init__(self, length: int = 5) -> None:
        self.length = length

    def reset(self) -> tuple[Any, Any]:
        self.t = 0
        return self.draw(), 0

    def step(self, action: Any) -> tuple[Any, Any, Any, Any]:
        self.t += 1
        return action, self.draw(), 0.0, self.t >= self.length

    def draw(self) -> list[float]:
        return [random.random(), np.random.rand(), torch.rand(()).item()]  # noqa: NPY002


class WrappingEnv(NoisyEnv):
    """Also draws from Gymnasium's own generators, which are unseeded."""

    def __init__(self, length: int = 5) -> None:
        super().__init__(length)
        self.inner = gymnasium.make("CartPole-v1")

    def reset(self) -> tuple[Any, Any]:
        self.observation, _ = self.inner.reset()
        return super().reset()

    def draw(self) -> list[float]:
        action_space = gymnasium.spaces.Box(0, 1, (), np.float64)
        return [*super().draw(), float(action_space.sample()), *self.observation.tolist()]


class DuckEnv:
    """Follows Gymnasium's protocol without saying so; the state is ``[t, action given]``."""

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


class FailingEnv(ActingEnv):
    """Fails in one of its episodes.

    Args:
        kind: One of ``support.faults.KINDS``, or ``"go_on"``: the episode has no end.
        step: The step that fails, 0 for ``reset``.
        episode: The episode, counted from 1.
    """

    def __init__(self, kind: str, step: int = 3, episode: int = 1, length: int = 5) -> None:
        super().__init__(length)
        self.kind, self.fault = kind, (episode, step)

    def reset(self) -> tuple[Any, Any]:
        result = super().reset()
        self.strike()
        return result

    def step(self, action: Any) -> tuple[Any, Any, Any, Any]:
        result = super().step(action)
        self.strike()
        is_endless = self.kind == "go_on" and self.n_resets == self.fault[0]
        return *result[:3], result[3] and not is_endless

    def strike(self) -> None:
        if (self.n_resets, self.t) == self.fault and self.kind != "go_on":
            strike(self.kind)


class PidEnv(ActingEnv):
    """Its action is the number of its process."""

    def step(self, action: Any) -> tuple[Any, Any, Any, Any]:
        _, *rest = super().step(0)
        return os.getpid(), *rest


class Unloadable(ActingEnv):
    """Cannot be unpickled."""

    def __setstate__(self, state: Any) -> None:
        raise ImportError("no module named simulator")
