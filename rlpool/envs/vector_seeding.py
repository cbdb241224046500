"""Finds out how the episodes of a Gymnasium vector environment can be seeded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from torch.utils import _pytree as pytree

from rlpool.data.storage import NDArray
from rlpool.envs.atari_lanes import resets_atari_lanes
from rlpool.envs.columns import as_array
from rlpool.envs.envpool_lanes import EnvPoolLanes
from rlpool.envs.gymnasium_vector import autoreset_mode
from rlpool.errors import SpecError, described
from rlpool.seeding import SEEDINGS, Seeding

_N_STEPS = 8  # looked at after each reset, where lanes restart by themselves

Rows = list[NDArray]
"""The parts of an observation, or of what a step returned: arrays ``[n_lanes, ...]``."""


def detected_seeding(env: VectorEnv[Any, Any, Any]) -> Seeding:
    """Find out what can be seeded; afterwards all lanes need a reset.

    Gymnasium's ``SyncVectorEnv`` and ``AsyncVectorEnv``, ale-py's ``AtariVectorEnv`` and EnvPool
    are known. Others are reset and stepped a few times, with the same seeds.

    Args:
        env: The vector environment, wrapped or not.

    Raises:
        SpecError: If it cannot be reset with a seed and without options, so that nothing shows.
    """
    if isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv) or resets_atari_lanes(env):
        return "episode"
    if isinstance(env.unwrapped, EnvPoolLanes):
        return "stream"
    if autoreset_mode(env) is AutoresetMode.DISABLED and _attempt(_lanes_repeat, env):
        return "episode"
    try:
        return "request" if _all_repeat(env) else "stream"
    except Exception as error:
        raise SpecError(
            f"{env} cannot be reset with reset(seed=0): {described(error)}",
            fix=f"say how it can be seeded: VectorGymEnv(..., seeding=...), one of {SEEDINGS}",
        ) from error


def _attempt(question: Callable[[Any], bool], env: VectorEnv[Any, Any, Any]) -> bool:
    """The answer to a question; False if asking it raises."""
    try:
        return question(env)
    except Exception:
        return False


def _lanes_repeat(env: Any) -> bool:
    """Whether the reset of one lane leaves the others alone, and repeats that lane's episode."""
    n_lanes, action = env.num_envs, some_action(env.action_space)
    seeds = list(range(n_lanes))
    started = _parts(env.reset(seed=seeds)[0])
    stepped = _parts(env.step(action)[:4])
    others = _parts(env.reset(seed=[seed + n_lanes for seed in seeds])[0])
    mask = np.arange(n_lanes) == 0
    restarted = _parts(env.reset(seed=seeds, options={"reset_mask": mask})[0])
    repeated = restarted + _parts(env.step(action)[:4])
    is_alone = _same(restarted, others, 1, n_lanes)
    return is_alone and _same(repeated, started + stepped, 0, 1)


def _all_repeat(env: VectorEnv[Any, Any, Any]) -> bool:
    """Whether the same seed for all lanes gives the same steps again."""
    n_steps = 1 if autoreset_mode(env) is AutoresetMode.DISABLED else _N_STEPS
    runs = []
    for _ in range(2):
        run = _parts(env.reset(seed=0)[0])
        for _ in range(n_steps):
            run += _parts(env.step(some_action(env.action_space))[:4])
        runs.append(run)
    first, second = runs
    return _same(first, second, 0, env.num_envs)


def _parts(value: Any) -> Rows:
    """Copies of all arrays in a nested value."""
    return [np.array(as_array(leaf)) for leaf in pytree.tree_leaves(value)]


def _same(first: Rows, second: Rows, start: int, stop: int) -> bool:
    """Whether lanes ``start`` to ``stop`` have the same bits."""
    pairs = zip(first, second, strict=True)
    return all(one[start:stop].tobytes() == two[start:stop].tobytes() for one, two in pairs)


def some_action(space: Any) -> Any:
    """An action, always the same."""
    space = copy.deepcopy(space)
    space.seed(0)
    return space.sample()
