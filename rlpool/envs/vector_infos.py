"""What a vector environment of Gymnasium puts into its infos."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv, VectorWrapper

from rlpool.data.specs import TensorSpec
from rlpool.envs.columns import as_array
from rlpool.envs.envpool_lanes import EnvPoolLanes
from rlpool.envs.gym_env import some_action
from rlpool.envs.info_keys import InfoKeys, InfoLearner, batch_of, wanted_infos
from rlpool.errors import SpecError, described
from rlpool.seeding import Seeding

_OBJECTS = np.dtype(object)
_PLAIN = {float: np.dtype(float), int: np.dtype(int), bool: np.dtype(bool)}


def info_specs_of(
    env: VectorEnv[Any, Any, Any], info_keys: InfoKeys, *, keep_float64: bool
) -> dict[str, TensorSpec]:
    """Specs of the infos' keys that are asked for.

    What is not declared is looked for by a reset, and by a step if the reset does not show it;
    afterwards all lanes need a reset.

    Args:
        env: The vector environment, wrapped or not.
        info_keys: See ``GymEnv``.
        keep_float64: Store float64 as it is, otherwise as float32.

    Raises:
        SpecError: For a key that was not shown; it names those that were.
    """
    wanted = wanted_infos(info_keys, keep_float64=keep_float64)
    if wanted:
        keep_infos_apart(env)
    learner = InfoLearner(wanted, keep_float64=keep_float64)
    why_no_step = ""
    if not learner.has_all:
        try:
            infos = env.reset(seed=0)[1]
            learner.look_at_batch(infos)
            if isinstance(env.unwrapped, EnvPoolLanes):
                why_no_step = "EnvPool's infos always have the same keys"
            elif not learner.has_all:
                learner.look_at_batch(env.step(_unmasked_action(env, infos))[4])
        except SpecError:
            raise
        except Exception as error:
            raise SpecError(
                f"the infos of {env} are unknown, since reset(seed=0) or the step after it raised "
                f"{described(error)}",
                fix="declare the dtypes of info_keys, such as "
                f"info_keys={{{learner.unknown[0]!r}: np.float32}}",
            ) from error
    return learner.specs(why_no_step)


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


def _unmasked_action(env: VectorEnv[Any, Any, Any], infos: Any) -> Any:
    """Actions for all lanes, none of them masked by an ``action_mask`` in the infos."""
    action, space = some_action(env.action_space), env.single_action_space
    mask = batch_of(infos, "action_mask")[0] if isinstance(infos, Mapping) else None
    if mask is None or type(space) is not Discrete:
        return action
    return (np.asarray(mask).argmax(axis=1) + space.start).astype(action.dtype)


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
