"""Brings environments to where those of another process were, by repeating what they did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlpool.envs.columns import converted
from rlpool.envs.gym_env import GymEnv
from rlpool.envs.vec_env import LaneError
from rlpool.manager.arena import Arena
from rlpool.manager.episode_log import Reached, RemoteStep
from rlpool.memory.storage import Array
from rlpool.record.failures import described
from rlpool.specs import flattener

LOST = (
    "the environment could not be brought back to where it was when its process ended or was "
    "replaced: {}"
)
LOST_FIX = (
    "reset the lane; an environment can only be continued in another process if its seed, options "
    "and actions determine what it does"
)


class Restorer:
    """Repeats episodes in environments that were just made.

    Args:
        env: The environments, their results in memory of their own.
        arena: What the predecessor left.
        advance: To be called after every step.
    """

    def __init__(self, env: GymEnv, arena: Arena, advance: Callable[[], None]) -> None:
        self._env = env
        self._arena = arena
        self._advance = advance

    def restore(self, lane: int, reached: Reached, *, is_unfinished: bool, is_torn: bool) -> str:
        """Repeat a lane's episode.

        Args:
            lane: The lane.
            reached: What was done.
            is_unfinished: Whether the lane was in the middle of a step.
            is_torn: Whether observations of that step had been written.

        Returns:
            Why it cannot go on from here, empty if it can.
        """
        if reached.why_lost:
            return reached.why_lost
        try:
            self._repeat(lane, reached)
        except LaneError as error:
            return f"there, its {error.call} raised {described(error.__cause__ or error)}"
        arena, columns = self._arena, self._env.columns
        if not is_unfinished and arena.elapsed[lane] != reached.n_steps:
            return f"{reached.n_steps} steps are known, it had made {arena.elapsed[lane]}"
        if columns is None or is_torn:
            return ""
        for key, array in arena.observation.items():
            if array[lane].tobytes() != columns.arrays[key][lane].tobytes():
                return (
                    f"after reset(seed={reached.seed}) and the same {reached.n_steps} actions, "
                    f"its observation {key!r} is another one: it is not deterministic given its "
                    "seed"
                )
        return ""

    def _repeat(self, lane: int, reached: Reached) -> None:
        env = self._env
        env.reset_lanes([lane], [reached.seed], [reached.options])
        self._advance()
        for part in reached.steps:
            if isinstance(part, RemoteStep):
                env.step_lanes([lane], with_action(env, lane, part.action, {}))
                self._advance()
                continue
            actions = batch_like({key: values[0] for key, values in part.items()}, env.n_lanes)
            for row in range(len(next(iter(part.values())))):
                for key, values in part.items():
                    actions[key][lane] = values[row]
                env.step_lanes([lane], actions)
                self._advance()

    def copy_to_arena(self, lanes: list[int]) -> None:
        """Put what some lanes have reached where the caller sees it."""
        env, arena = self._env, self._arena
        if env.columns is not None:
            for key, array in arena.observation.items():
                array[lanes] = env.columns.arrays[key][lanes]
        arena.reward[lanes] = env.current["reward"][lanes]
        arena.flags[:, lanes] = env.flags[:, lanes]


def batch_like(action: Mapping[str, Array], n_lanes: int) -> dict[str, Array]:
    """Zeros for the actions of all lanes, of the kind of a given one."""
    return {key: np.zeros((n_lanes, *np.shape(v)), v.dtype) for key, v in action.items()}


def with_action(
    env: GymEnv, lane: int, action: Any, arrays: Mapping[str, Array]
) -> Mapping[str, Array]:
    """Actions of all lanes, that of one lane given as its environment takes it.

    Args:
        env: The environments.
        lane: The lane.
        action: Its action, nested as the environment takes it.
        arrays: Where to put it, ``[n_lanes, ...]`` per key; new arrays if empty or if the
            environments declare no action space.
    """
    if env.action_structure is None:
        value = np.asarray(action)
        batch = np.zeros((env.n_lanes, *value.shape), value.dtype)
        batch[lane] = value
        return {"action": batch}
    specs = env.native_action_specs() or {}
    arrays = arrays or {k: np.zeros((env.n_lanes, *s.shape), s.dtype) for k, s in specs.items()}
    values = flattener(env.action_structure, "action")(action)
    for (key, spec), value in zip(specs.items(), values, strict=True):
        arrays[key][lane] = converted(value, spec, key)
    return arrays
