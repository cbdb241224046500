"""EnvPool, which steps environments in threads of C++, as a vector environment of Gymnasium."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from torch.utils import _pytree as pytree

from rlpool.errors import SpecError


def is_envpool(value: Any) -> bool:
    """Whether this is what ``envpool.make`` returns."""
    return callable(getattr(value, "async_reset", None))


class EnvPoolLanes(VectorEnv[Any, Any, Any]):
    """EnvPool with the interface of a vector environment, results in the order of lanes.

    Args:
        pool: What ``envpool.make(..., env_type="gymnasium")`` returns.

    Attributes:
        has_infos: Whether to hand on infos.

    Raises:
        SpecError: For anything else, for actions that are not one array, and for a pool that steps
            some of its environments at a time.
    """

    has_infos = False

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        if not is_envpool(pool):
            raise SpecError(
                f"{pool!r:.60} is not an EnvPool",
                fix='pass what envpool.make(..., env_type="gymnasium") returns',
            )
        n_lanes, batch_size = pool.config["num_envs"], pool.config["batch_size"]
        if batch_size < n_lanes:
            raise SpecError(
                f"the EnvPool steps batch_size={batch_size} of its num_envs={n_lanes} environments "
                "at a time, and here all of them step together: which ones are ready first depends "
                "on timing, so no data could be reproduced",
                fix=f"leave out batch_size, or set batch_size={n_lanes}",
            )
        arrays = {k: v for k, v in pool.spec.action_array_spec.items() if "env_id" not in k}
        if list(arrays) != ["action"]:
            raise SpecError(f"its actions have the parts {list(arrays)}, not one array")
        self._dtype = arrays["action"].dtype
        self.num_envs = n_lanes
        self._all = np.arange(self.num_envs, dtype=np.int32)
        self.single_observation_space = pool.single_observation_space
        self.single_action_space = pool.single_action_space
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Reset all; the seed is ignored."""
        if options:
            raise SpecError(f"EnvPool takes no options, got {options}", fix="leave out env_info")
        self._pool.async_reset()
        observation, *_, infos = self._receive()
        return observation, infos

    def step(self, actions: Any) -> Any:
        """Step all."""
        self._pool.send(np.asarray(actions, self._dtype), self._all)
        return self._receive()

    def _receive(self) -> tuple[Any, ...]:
        """Wait for all; returns their results and infos, in the order of lanes."""
        *results, infos = self._pool.recv()
        lanes = infos["env_id"]
        # Those of players may have another number of rows.
        results.append(_without_players(infos) if self.has_infos else {})
        if np.array_equal(lanes, self._all):
            return tuple(results)
        order = np.argsort(lanes)
        return tuple(pytree.tree_map(lambda values: np.asarray(values)[order], results))

    def close(self, **kwargs: Any) -> None:
        """Close it."""
        self._pool.close()


def _without_players(infos: dict[str, Any]) -> dict[str, Any]:
    return {key: values for key, values in infos.items() if key != "players"}
