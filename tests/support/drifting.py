"""A small deterministic environment with observations and actions of every kind."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

_OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "vector": spaces.Box(-10, 10, (3,), np.float32),
    "double": spaces.Box(-10, 10, (3,), np.float64),
    "number": spaces.Discrete(9),
    "image": spaces.Box(0, 255, (36, 40, 3), np.uint8),
    "dict": spaces.Dict(
        {
            "place": spaces.Box(-10, 10, (2,), np.float32),
            "number": spaces.Discrete(9),
        }
    ),
    "nested": spaces.Dict(
        {
            "pair": spaces.Tuple((spaces.Box(-10, 10, (2,), np.float32), spaces.Discrete(9))),
            "picture": spaces.Box(0, 255, (32, 33), np.uint8),
        }
    ),
}

_ACTIONS: dict[str, spaces.Space[Any]] = {
    "box": spaces.Box(np.float32([-1, -2]), np.float32([2, 2])),
    "discrete": spaces.Discrete(3),
    "many": spaces.MultiDiscrete([3, 2]),
    "bits": spaces.MultiBinary(3),
}


class Drift(gymnasium.Env[Any, Any]):
    """Actions change a position; an episode terminates at distance two from the start.

    Episodes are determined by the start and the actions. A reset takes the start from its
    options.

    Args:
        observation: Kind of observations.
        action: Kind of actions.
        limit: Steps after which an episode is truncated.
    """

    def __init__(
        self,
        observation: str = "vector",
        action: str = "box",
        limit: int = 7,
    ) -> None:
        self.kind = observation
        self.observation_space = _OBSERVATIONS[observation]
        self.action_space = _ACTIONS[action]
        self.limit = limit

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.t = 0.0, 0
        if options:
            self.place = float(options["start"])
        return self._observation(), self._info(0.0)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        move = float(np.sum(np.asarray(action, np.float64)) - 0.4)
        self.place = float(np.clip(self.place + 0.5 * move, -9, 9))
        terminated = abs(self.place) >= 2
        truncated = self.t >= self.limit
        return self._observation(), self.place + 0.25, terminated, truncated, self._info(move)

    def _info(self, move: float) -> dict[str, Any]:
        return {"cost": np.float32(move), "score": {"total": self.t, "both": np.full(2, self.t)}}

    def _observation(self) -> Any:
        number = min(self.t, 8)
        place = np.array([self.place, self.t / 3], np.float32)
        if self.kind == "number":
            return number
        if self.kind == "dict":
            return {"place": place, "number": number}
        brightness = int(abs(self.place) * 20) % 256
        if self.kind == "image":
            image = np.full((36, 40, 3), brightness, np.uint8)
            image[self.t, :, 0] = np.arange(40)
            return image
        if self.kind == "nested":
            picture = np.full((32, 33), brightness, np.uint8)
            picture[self.t] = np.arange(33)
            return {"pair": (place, number), "picture": picture}
        dtype = np.float64 if self.kind == "double" else np.float32
        return np.array([self.place, self.t / 3, 1 / 3], dtype)
