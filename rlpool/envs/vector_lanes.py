"""Gymnasium's side of a ``VectorGymEnv``: spaces, actions, columns, and how it fails and ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from gymnasium.vector import VectorEnv

from rlpool.data.specs import leaves_of, nester, structure_of_space
from rlpool.data.storage import NDArray
from rlpool.envs.envpool_lanes import EnvPoolLanes, is_envpool
from rlpool.envs.gymnasium_vector import failed_process, kill
from rlpool.envs.info_keys import InfoKeys, info_specs
from rlpool.envs.vec_env import VecEnv
from rlpool.envs.vector_infos import keep_infos_apart
from rlpool.envs.vector_results import final_observations
from rlpool.errors import SpecError, UsageError


class VectorLanes(VecEnv):
    """Lanes of a vector environment, before anything is said of when they are reset.

    Args:
        vector_env: The vector environment, or an EnvPool.
        seed: Root of the seeds of ``reset(env_info)``.
        keep_float64: Store float64 as it is.
        info_keys: Keys of infos that are asked for.
    """

    steps_all_lanes = True
    _repeats = False  # whether lanes without an episode repeat one

    def __init__(
        self,
        vector_env: VectorEnv[Any, Any, Any],
        seed: int | Sequence[int] | None,
        *,
        keep_float64: bool,
        info_keys: InfoKeys,
    ) -> None:
        _refuse_others(vector_env)
        if is_envpool(vector_env):
            vector_env = EnvPoolLanes(vector_env)
        if isinstance(vector_env, EnvPoolLanes):
            vector_env.has_infos = info_keys is not None
        super().__init__(vector_env.num_envs, seed)
        self._keep_float64, self._is_broken = keep_float64, False
        self.vector_env: Any = vector_env
        self._base: Any = vector_env.unwrapped
        self.observation_space = vector_env.single_observation_space
        self.action_space = vector_env.single_action_space
        observed = structure_of_space(
            self.observation_space, keep_float64=keep_float64, name="single_observation_space"
        )
        self._info_specs = info_specs(info_keys, keep_float64=keep_float64)
        if info_keys:
            keep_infos_apart(vector_env)
        self._observations = self._declare_structure(observed)
        stored, native = (
            structure_of_space(self.action_space, keep_float64=wide, name="single_action_space")
            for wide in (keep_float64, True)
        )
        self._action_leaves = leaves_of({"action": stored}, "")
        self._native_actions = leaves_of({"action": native}, "")
        self._action_dtypes = {key: leaf.spec.dtype for key, leaf in self._native_actions.items()}
        self._nest_action = nester(native)

    def close(self) -> None:
        """Close the vector environment."""
        if self._is_broken:
            kill(self.vector_env)
        else:
            self.vector_env.close()

    def _batch(self, rows: Any, actions: Mapping[str, NDArray]) -> Any:
        """The actions of all lanes, as the vector environment takes them: copies."""
        parts = [np.array(actions[k], leaf.spec.dtype) for k, leaf in self._native_actions.items()]
        idle = None
        if not isinstance(rows, slice):
            idle = np.ones(self.n_lanes, bool)
            idle[rows] = False
            for array in parts:
                array[idle] = array[rows[0]]  # their own row may hold anything
        if self._repeats:
            self._act_idle(parts, idle)
        return self._nest_action(parts)

    def _act_idle(self, parts: Sequence[NDArray], idle: NDArray | None) -> None:
        """Change the actions of lanes without an episode, where these repeat one."""

    def _write(self, lanes: Sequence[int], observation: Any, infos: Any) -> None:
        """Write what a call has returned about lanes."""
        self._observations.write_batch(lanes, observation)
        if self._infos is not None:
            self._infos.write_batch(lanes, infos)

    def _write_final(self, ended: Sequence[int], infos: Any) -> None:
        """Write the last observations and infos of lanes that have restarted within the step."""
        if not ended:
            return
        final, is_list = final_observations(infos, ended)
        if is_list:
            self._observations.write(ended, [final[lane] for lane in ended])
        else:
            self._observations.write_batch(ended, final)
        if self._infos is not None:
            self._infos.write_final(ended, infos)

    def _fail(self, call: str, error: BaseException) -> NoReturn:
        failed, error = failed_process(self._base, error)
        if failed is not None:
            self.lane_in_use[0] = failed
            if self._is_broken:
                error = UsageError(
                    "a process of this AsyncVectorEnv has failed and ended",
                    fix='let new workers replace those that failed: on_env_error="restart"; or '
                    "make a new batcher",
                )
            self._is_broken = True
        super()._fail(call, error)


def _refuse_others(value: Any) -> None:
    if not isinstance(value, VectorEnv):
        raise SpecError(
            f"VectorGymEnv got {value!r:.60}, not a gymnasium.vector.VectorEnv",
            fix="pass what gymnasium.make_vec returns; single environments go into a GymEnv",
        )
