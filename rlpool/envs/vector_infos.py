"""What a vector environment of Gymnasium puts into its infos."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv, VectorWrapper

from rlpool.envs.columns import as_array
from rlpool.errors import SpecError
from rlpool.seeding import Seeding

_OBJECTS = np.dtype(object)
_PLAIN = {float: np.dtype(float), int: np.dtype(int), bool: np.dtype(bool)}


def keep_infos_apart(env: VectorEnv[Any, Any, Any]) -> None:
    """Let a vector environment keep what every lane tells in its infos.

    Gymnasium writes it into an array in the form of the first lane: beside 0, 0.25 becomes 0. Where
    a lane tells something of another dtype or shape, the array becomes one of objects.
    """
    base: Any = env.unwrapped
    if "_add_info" in vars(base):
        return
    add = base._add_info

    def add_info(infos: dict[str, Any], info: dict[str, Any], lane: int) -> dict[str, Any]:
        for key, value in info.items():
            array = infos.get(key)
            if not isinstance(array, np.ndarray) or array.dtype is _OBJECTS:
                continue
            if array.dtype is _PLAIN.get(type(value)) and array.ndim == 1:
                continue
            told = as_array(value)
            if (told.dtype, told.shape) != (array.dtype, array.shape[1:]):
                infos[key] = objects = np.full(len(array), None, object)
                for other in np.flatnonzero(infos[f"_{key}"]):
                    objects[other] = array[other]
        together: dict[str, Any] = add(infos, info, lane)
        return together

    base._add_info = add_info


def statistics_keys(env: VectorEnv[Any, Any, Any]) -> set[str]:
    """Keys that wrappers such as Gymnasium's ``RecordEpisodeStatistics`` add to the infos.

    Where lanes restart within a step, these belong to the episodes that ended, although they are
    not in ``final_info``.
    """
    keys = set()
    while isinstance(env, VectorWrapper):
        key = getattr(env, "_stats_key", None)
        if isinstance(key, str):
            keys.add(key)
        env = env.env
    return keys


def refuse_wrong_statistics(
    env: VectorEnv[Any, Any, Any], keys: Iterable[str], seeding: Seeding
) -> None:
    """Refuse statistics of a wrapper that does not see which lanes are reset.

    Gymnasium's ``SyncVectorEnv`` and ``AsyncVectorEnv`` take the mask of a reset out of the
    options, so that a wrapper around them begins anew with all lanes.

    Raises:
        SpecError: If one of the keys is such a wrapper's.
    """
    if seeding != "episode" or not isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv):
        return
    wrong = {key for key in keys if key.partition("/")[0] in statistics_keys(env)}
    if wrong:
        raise SpecError(
            f"info {min(wrong)!r} is counted by a wrapper around a vector environment, which "
            "forgets the statistics of all lanes when one is reset",
            fix="wrap the single environments: gymnasium.make_vec(..., "
            'vectorization_mode="sync", wrappers=[gymnasium.wrappers.RecordEpisodeStatistics])',
        )
