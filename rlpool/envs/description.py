"""Descriptions of environments in JSON types, recorded with evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import wrappers
from gymnasium.vector import VectorWrapper

from rlpool.envs.vec_env import VecEnv

_ONLOOKERS = (
    wrappers.OrderEnforcing,
    wrappers.PassiveEnvChecker,
    wrappers.RecordEpisodeStatistics,
    wrappers.RecordVideo,
)
"""Wrappers that do not affect episodes."""

INDIFFERENT = frozenset(("n_envs", "n_lanes", "num_envs", "render_mode"))
"""Arguments of environments that do not affect episodes."""


def described(env: VecEnv) -> dict[str, Any]:
    """Describe environments by class, specification, wrappers and seeding, where known."""
    if env.description is not None:
        return dict(env.description)
    one = env.outermost()
    found: dict[str, Any] = {"seeding": env.seeding, "wrappers": [], "info_keys": env.info_keys}
    with suppress(AttributeError):
        limit = one.spec.max_episode_steps
        kwargs = plain(one.spec.kwargs)
        found["spec"] = {"id": one.spec.id, "max_episode_steps": limit, "kwargs": kwargs}
    while isinstance(one, gymnasium.Wrapper | VectorWrapper):
        if not isinstance(one, _ONLOOKERS):
            found["wrappers"].append(
                [type(one).__qualname__, plain(vars(one).get("_saved_kwargs"))]
            )
        one = one.env
    found["class"] = type(one).__qualname__
    return found


def plain(value: Any) -> Any:
    """Convert an argument to JSON types: functions, classes and other objects by name."""
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        names = sorted(value, key=str)
        return {str(name): plain(value[name]) for name in names if name not in INDIFFERENT}
    if isinstance(value, list | tuple | range):
        return [plain(part) for part in value]
    if value is None or isinstance(value, str | int | float):
        return value
    # Without the module, whose name depends on how the program is started.
    return str(getattr(value, "__qualname__", type(value).__qualname__))
