"""Environments with observations that can be computed by hand, and environments of every kind.

All are classes at module level, so that worker processes can unpickle them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlpool import GymEnv, GymEnvInf

COUNTING_SPACE = spaces.Box(-np.inf, np.inf, (2,), np.float32)
MANY = 1_000_000


def small_discrete(n: int, start: int = 0) -> spaces.Discrete:
    """Return a ``Discrete`` of int8, which the constructor supports from Gymnasium 1.2 on."""
    space = spaces.Discrete(n, start=start)
    space.dtype, space.start = np.dtype(np.int8), np.int8(start)
    space.n = np.int8(n)
    return space


Script = Mapping[Any, Callable[[], Any]]
"""``{(episode, step): function}``, or ``{step: function}``: what to do then, -1 in a reset.

What a function returns, if it is anything, is returned in place of the environment's own.
"""

NOTHING: Script = {}

FIRST_STATE = 10
"""What ``support.agents.StepCounter`` counts from: not 0, which is what padding is."""


def follow(script: Script, episode: int, step: int) -> Any:
    """Run a script's entry and return the result that replaces the environment's, if any."""
    return (script.get((episode, step)) or script.get(step) or (lambda: None))()


class CountingEnv(gymnasium.Env[Any, Any]):
    """The observation is ``[step, id]``, the reward of a step ``100 * id + step``.

    The options ``length``, ``id`` and ``ends`` of a reset override the arguments, ``ends`` as the
    number of one of ``ENDS``.

    Args:
        length: Steps of an episode.
        number: The id, if not in the options.
        ends: How an episode ends, one of ``ENDS``.
        script: Additional behaviour, by the id of an episode and its step.
    """

    ENDS = ("terminated", "truncated", "both")

    observation_space = COUNTING_SPACE
    action_space = spaces.Discrete(MANY)

    def __init__(
        self, length: int = 3, number: int = 0, ends: str = "terminated", script: Script = NOTHING
    ) -> None:
        self.default = {"length": length, "id": number, "ends": self.ENDS.index(ends)}
        self.t, self.script = 0, script
        self.is_closed = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        given = {**self.default, **(options or {})}
        self.length, self.number = int(given["length"]), int(given["id"])
        self.ends = self.ENDS[int(given["ends"])]
        self.t = 0
        return follow(self.script, self.number, -1) or (self.observation(), {})

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        instead = follow(self.script, self.number, self.t)
        self.t += 1
        is_over = self.t >= self.length
        terminated = is_over and self.ends in ("terminated", "both")
        truncated = is_over and self.ends in ("truncated", "both")
        reward = 100.0 * self.number + self.t
        return instead or (self.observation(), reward, terminated, truncated, {})

    def observation(self) -> Any:
        return np.array([self.t, self.number], np.float32)

    def close(self) -> None:
        self.is_closed = True


class EchoEnv(CountingEnv):
    """Environment whose observation contains the arguments of its reset.

    Its keys, all int64 scalars: ``step``, ``id``, ``seed`` (-1 without), ``n_resets`` (of this
    environment, 1 in the first episode), ``has_options``, ``last`` (the action).
    """

    KEYS = ("step", "id", "seed", "n_resets", "has_options", "last")

    observation_space = spaces.Dict(
        {key: spaces.Box(-(2**63), 2**63 - 1, (), np.int64) for key in KEYS}
    )

    def __init__(self, length: int = 3, number: int = 0, ends: str = "terminated") -> None:
        super().__init__(length, number, ends)
        self.n_resets = 0
        self.resets: list[tuple[int | None, Any]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.n_resets += 1
        self.resets.append((seed, None if options is None else dict(options)))
        self.seed_given = -1 if seed is None else seed
        self.has_options = options is not None
        self.last = -1
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.last = action
        return super().step(action)

    def observation(self) -> Any:
        values = (self.t, self.number, self.seed_given, self.n_resets, self.has_options, self.last)
        return {k: np.array(v, np.int64) for k, v in zip(self.KEYS, values, strict=True)}


class SpaceEnv(gymnasium.Env[Any, Any]):
    """Samples its observations from any space, and keeps them and the actions that it gets.

    Args:
        observation_space: Any space.
        action_space: Any space.
        length: Steps of an episode.
    """

    def __init__(self, observation_space: Any, action_space: Any, length: int = 3) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.length = length
        self.observations: list[Any] = []
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(None if seed is None else seed % 2**32)
        self.t = 0
        self.observations, self.actions = [], []
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        self.actions.append(action)
        return self.observe(), 1.0, self.t >= self.length, False, {}

    def observe(self) -> Any:
        self.observations.append(self.observation_space.sample())
        return self.observations[-1]


class ValueEnv(CountingEnv):
    """Environment that observes given values; the space may be missing.

    Args:
        values: One value per step; the last one is repeated.
        space: The observation space, or ``None``.
    """

    observation_space = None  # type: ignore[assignment]

    def __init__(self, values: Sequence[Any], space: Any = None, length: int = 3) -> None:
        super().__init__(length)
        self.values = list(values)
        if space is not None:
            self.observation_space = space

    def observation(self) -> Any:
        return self.values[min(self.t, len(self.values) - 1)]


class LegacyCountingEnv:
    """``CountingEnv`` written for the old gym, without spaces.

    ``seed()``, ``reset()`` that returns the observation alone, ``step`` with four results.
    """

    def __init__(self, length: int = 3, number: int = 0, is_limited: bool = False) -> None:
        self.length, self.number, self.is_limited = length, number, is_limited
        self.seeds: list[int] = []
        self.is_closed = False
        self.t = -1

    def seed(self, seed: int | None = None) -> list[Any]:
        self.seeds.append(-1 if seed is None else seed)
        return [seed]

    def reset(self) -> Any:
        self.t = 0
        return CountingEnv.observation(self)

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        self.t += 1
        done = self.t >= self.length
        info = {"TimeLimit.truncated": True} if done and self.is_limited else {}
        return CountingEnv.observation(self), 100.0 * self.number + self.t, done, info

    def close(self) -> None:
        self.is_closed = True


class SpacedLegacyEnv(LegacyCountingEnv):
    """An old-gym environment that declares its spaces."""

    observation_space = COUNTING_SPACE
    action_space = spaces.Discrete(MANY)


class LegacyInfoEnv(LegacyCountingEnv):
    """An old-gym environment whose ``reset`` takes ``env_info``."""

    def __init__(self, length: int = 3, number: int = 0) -> None:
        super().__init__(length, number)
        self.infos: list[Any] = []

    def reset(self, env_info: Any = None) -> Any:  # type: ignore[override]
        self.infos.append(env_info)
        info = env_info or {}
        self.length = int(info.get("length", self.length))
        self.number = int(info.get("id", self.number))
        return super().reset()


class LegacyWrapper:
    """A wrapper in the style of the old gym: passes its arguments on, expects four results."""

    def __init__(self, env: Any, max_episode_steps: int | None = None) -> None:
        self.env = env
        self.limit = max_episode_steps
        self.n_steps = 0

    def seed(self, seed: int | None = None) -> Any:
        return self.env.seed(seed)

    def reset(self, **arguments: Any) -> Any:
        self.n_steps = 0
        return self.env.reset(**arguments)

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        observation, reward, done, info = self.env.step(action)
        self.n_steps += 1
        if self.limit is not None and self.n_steps >= self.limit:
            info["TimeLimit.truncated"] = not done
            done = True
        return observation, reward, done, info

    def close(self) -> None:
        self.env.close()


class InfoEnv(CountingEnv):
    """Environment whose ``reset`` takes ``env_info`` in addition to Gymnasium's arguments."""

    def __init__(self, length: int = 3) -> None:
        super().__init__(length)
        self.infos: list[Any] = []

    def reset(self, *, seed: Any = None, options: Any = None, env_info: Any = None) -> Any:
        self.infos.append(env_info)
        return super().reset(seed=seed, options=env_info)


# Functions for create_env --------------------------------------------------------------------


def create_counting(seed: int, n_envs: int = 2, restarts: bool = False, **arguments: Any) -> GymEnv:
    """``CountingEnv`` lanes."""
    kind = GymEnvInf if restarts else GymEnv
    return kind([CountingEnv(**arguments) for _ in range(n_envs)], seed)


# Expected results ----------------------------------------------------------------------------


def counting_trajectories(
    lengths: Sequence[int], ids: Sequence[int], ends: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """Return every key of the trajectories of a ``StepCounter`` on ``CountingEnv``, step by step.

    Args:
        lengths: Length of each episode.
        ids: Id of each episode.
        ends: How each ends, ``"terminated"`` by default.
    """
    t = torch.arange(max(lengths)).expand(len(lengths), -1)
    length, number = (torch.tensor(list(values))[:, None] for values in (lengths, ids))
    is_step, is_last = t < length, t == length - 1
    of_episode = ends or ["terminated"] * len(lengths)

    def ended(*kinds: str) -> Tensor:
        return is_last & torch.tensor([end in (*kinds, "both") for end in of_episode])[:, None]

    def shown(t: Tensor) -> dict[str, Tensor]:
        values = {
            "frame": torch.stack([t, number.expand_as(t)], -1).float(),
            "reward": (100.0 * number + t) * (t > 0),
            "last_action": t,
            "steps": FIRST_STATE + t,
        }
        return {k: v * is_step[(..., *[None] * (v.ndim - 2))] for k, v in values.items()}

    never = torch.zeros_like(is_step)
    flags = {"terminated": never, "truncated": never, "done": never}
    after = {"terminated": ended("terminated"), "truncated": ended("truncated"), "done": is_last}
    before = {**shown(t), **flags, "initial_state": (t == 0) & is_step}
    after = {**shown(t + 1), **after, "initial_state": never}
    action = {"action": (t + 1) * is_step}
    return {**before, **action, **{f"_{key}": tensor for key, tensor in after.items()}}


def assert_same_tensors(got: Any, expected: Any) -> None:
    """Check that keys, dtypes, shapes and values agree exactly."""
    assert set(got.keys()) == set(expected)
    for key, tensor in expected.items():
        assert got[key].dtype == tensor.dtype, key
        assert got[key].tolist() == tensor.tolist(), key
