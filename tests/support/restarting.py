"""Environments behind ``ParallelVectorEnv``: what they show depends on all that they did before.

And a comparison of what two vector environments return.
"""

from __future__ import annotations

import copy
import pickle
import string
import threading
import time
import zlib
from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

IMAGE = spaces.Box(0, 255, (40, 40, 3), np.uint8)


class WordSpace(spaces.Space[Any]):
    """A space that nobody but this file knows."""

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return f"word {self.np_random.integers(10)}"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WordSpace)

    def __hash__(self) -> int:
        return 0


SPACES: dict[str, spaces.Space[Any]] = {
    "float64": spaces.Box(-1.0, 1.0, (3,), np.float64),
    "float16": spaces.Box(-1.0, 1.0, (2, 2), np.float16),
    "no dimension": spaces.Box(-1.0, 1.0, (), np.float32),
    "image": IMAGE,
    "discrete": spaces.Discrete(5, start=-2),
    "multi discrete": spaces.MultiDiscrete([3, 4]),
    "bits": spaces.MultiBinary(4),
    "nested": spaces.Dict(
        {
            "far": spaces.Tuple((spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,), np.float64))),
            "a": spaces.Dict({"b": spaces.MultiBinary(2)}),
        }
    ),
    "keys that collide": spaces.Dict(
        {"a/b": spaces.Discrete(2), "a": spaces.Dict({"b": spaces.Discrete(3)})}
    ),
    "text": spaces.Text(6, charset=string.ascii_letters),  # a set has another order per process
    "graph": spaces.Graph(spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(3)),
    "sequence": spaces.Sequence(spaces.Discrete(4)),
    "custom": WordSpace(),
    "custom in a dict": spaces.Dict({"x": WordSpace(), "y": spaces.Discrete(2)}),
}


class RestlessEnv(gymnasium.Env[Any, Any]):
    """Short episodes; all it draws comes from one generator, which only a seed begins anew.

    Infos hold the number of all steps since a reset that was asked for, and much else.

    Args:
        observations, actions: Names of ``SPACES``.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"]}

    def __init__(self, observations: str = "float64", actions: str = "discrete") -> None:
        self.observation_space = copy.deepcopy(SPACES[observations])
        self.action_space = copy.deepcopy(SPACES[actions])
        self.render_mode = "ansi"
        self.bonus = 0.0
        self.n_steps = 0

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=arguments.get("seed"))
        options = arguments.get("options")
        if arguments and not (options or {}).get(
            "keeps"
        ):  # not by an automatic restart: what follows may not depend on what was before
            self.n_steps = 0
        return self._observation(), self._info({"options": str(options)} if options else {})

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        told = zlib.crc32(pickle.dumps(_plain(action))) / 2**32
        reward = self.np_random.random() + told + self.bonus + 1e-12 * self.n_steps
        ends = self.np_random.random(2) < 0.2
        return self._observation(), reward, bool(ends[0]), bool(ends[1]), self._info({})

    def _observation(self) -> Any:
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()

    def _info(self, info: dict[str, Any]) -> dict[str, Any]:
        kinds: dict[str, Any] = {
            "n_steps": self.n_steps,
            "vector": np.full(3, self.np_random.random()),
            "nested": {"score": np.float64(self.np_random.random()), "is_good": True},
            "name": f"step {self.n_steps}",
            "long": "x" * 5000,
        }
        chosen = self.np_random.random(len(kinds)) < 0.3
        return {**info, **{k: v for (k, v), c in zip(kinds.items(), chosen, strict=True) if c}}

    def render(self) -> Any:
        return f"after {self.n_steps} steps"

    def count(self, number: int) -> None:
        self.n_steps += number

    def add(self, number: int, *, name: str = "sum") -> tuple[str, int]:
        return name, self.n_steps + number


def _plain(value: Any) -> Any:
    """A value without arrays, whose pickles tell how they were made."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in sorted(value.items())}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return np.asarray(value).tolist()


def assert_same_bits(ours: Any, theirs: Any, where: str = "") -> None:
    """Assert that two results of vector environments have the same types, dtypes and bits."""
    if isinstance(theirs, np.ndarray) and theirs.dtype != object:
        assert isinstance(ours, np.ndarray), where
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        assert ours.tobytes() == theirs.tobytes(), where
    elif isinstance(theirs, Mapping):
        assert list(ours) == list(theirs), where
        for key in theirs:
            assert_same_bits(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(theirs, tuple | list | np.ndarray):
        assert (type(ours), len(ours)) == (type(theirs), len(theirs)), where
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same_bits(one, other, f"{where}[{number}]")
    else:
        assert (type(ours), ours) == (type(theirs), theirs), where


class FlaggedEnv(gymnasium.Env[Any, Any]):
    """Each step returns the same flags.

    Args:
        flags: Terminated and truncated.
        has_lock: Whether the infos of a reset hold what cannot be pickled.
    """

    observation_space, action_space = spaces.Box(-1.0, 1.0, (1,)), spaces.Discrete(2)

    def __init__(self, flags: tuple[Any, Any], has_lock: bool = False) -> None:
        self.flags, self.has_lock = flags, has_lock

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        info = {"file": {"lock": threading.Lock()}} if self.has_lock else {}
        return np.zeros(1, np.float32), info

    def step(self, action: Any) -> tuple[Any, float, Any, Any, dict[str, Any]]:
        return np.ones(1, np.float32), 0.0, *self.flags, {}


class TimedEnv(RestlessEnv):
    """Its infos tell the time, which no repetition gives again."""

    def _info(self, info: dict[str, Any]) -> dict[str, Any]:
        return {"now": time.perf_counter()}


class BrittleEnv(RestlessEnv):
    """Raises for the action 2, and in resets with the option ``"breaks"``."""

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        if (arguments.get("options") or {}).get("breaks"):
            raise KeyError("goal")
        return super().reset(**arguments)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if action == 2:
            raise KeyError("door")
        return super().step(action)


class NarrowEnv(RestlessEnv):
    """A ``RestlessEnv`` with other bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(-0.5, 0.5, (3,), np.float64)


class SpacelessEnv(gymnasium.Env[Any, Any]):
    """Declares no spaces."""

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        return 0, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return 0, 0.0, False, False, {}
