"""EnvPool, which steps environments in threads of C++, as a vector environment of Gymnasium."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from torch.utils import _pytree as pytree

from rlpool.errors import SpecError
from rlpool.memory.storage import Array


def is_envpool(value: Any) -> bool:
    """Whether this is what ``envpool.make`` returns."""
    return callable(getattr(value, "async_reset", None))


def is_asynchronous(value: Any) -> bool:
    """Whether this is an EnvPool that steps some of its environments at a time."""
    return is_envpool(value) and value.config["batch_size"] < value.config["num_envs"]


class EnvPoolLanes(VectorEnv[Any, Any, Any]):
    """EnvPool with the interface of a vector environment, results in the order of lanes.

    Args:
        pool: What ``envpool.make(..., env_type="gymnasium")`` returns.

    Attributes:
        has_infos: Whether to hand on infos.

    Raises:
        SpecError: For anything else, and for actions that are not one array.
    """

    has_infos = False

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        if not is_envpool(pool):
            raise SpecError(
                f"{pool!r:.60} is not an EnvPool",
                fix='pass what envpool.make(..., env_type="gymnasium") returns',
            )
        arrays = {k: v for k, v in pool.spec.action_array_spec.items() if "env_id" not in k}
        if list(arrays) != ["action"]:
            raise SpecError(f"its actions have the parts {list(arrays)}, not one array")
        self._dtype = arrays["action"].dtype
        self.num_envs = pool.config["num_envs"]
        self._n_batches = self.num_envs // pool.config["batch_size"]
        self._all = np.arange(self.num_envs, dtype=np.int32)
        self.single_observation_space = pool.single_observation_space
        self.single_action_space = pool.single_action_space
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Reset all; the seed is ignored."""
        if options:
            raise SpecError(f"EnvPool takes no options, got {options}", fix="leave out env_info")
        self._pool.async_reset()
        parts = [self.receive() for _ in range(self._n_batches)]
        order = np.argsort(np.concatenate([lanes for lanes, *_ in parts]))
        shown = [(observation, infos) for _, observation, *_, infos in parts]
        leaves = [pytree.tree_leaves(each) for each in shown]
        joined = [np.concatenate(each)[order] for each in zip(*leaves, strict=True)]
        observation, infos = pytree.tree_unflatten(joined, pytree.tree_structure(shown[0]))
        return observation, infos

    def step(self, actions: Any) -> Any:
        """Step all."""
        self.send(actions, self._all)
        return self.receive()[1:]

    def send(self, actions: Any, lanes: Sequence[int] | Array) -> None:
        """Start steps of lanes."""
        self._pool.send(np.asarray(actions, self._dtype), np.asarray(lanes, np.int32))

    def receive(self) -> tuple[Any, ...]:
        """Wait for a batch; returns lanes, ascending, their results and infos."""
        *results, infos = self._pool.recv()
        lanes = infos["env_id"]
        # Those of players may have another number of rows.
        results.append(_without_players(infos) if self.has_infos else {})
        if np.array_equal(lanes, self._all):  # as they are if it waits for all
            return lanes, *results
        order = np.argsort(lanes)
        ordered = pytree.tree_map(lambda values: np.asarray(values)[order], tuple(results))
        return lanes[order], *ordered

    def close(self, **kwargs: Any) -> None:
        """Close it."""
        self._pool.close()


def _without_players(infos: dict[str, Any]) -> dict[str, Any]:
    return {key: values for key, values in infos.items() if key != "players"}
