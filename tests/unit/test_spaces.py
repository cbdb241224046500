"""Actions outside of their space and float64 observations, for every kind of environments."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlpool import DictTensor, GymEnv, ParallelEnvManager, VectorGymEnv
from rlpool.envs.vec_env import LaneError
from rlpool.workers.logs import SAID

from support.envs import SpaceEnv, ValueEnv
from support.vector_envs import OwnVectorEnv

BIT = spaces.Discrete(2)

OUTSIDE: list[Any] = [
    (spaces.Discrete(2, start=5), 6, 0, "is 0, outside of 5 to 6", "begins at 5: add `start`"),
    (spaces.Discrete(2, start=5), 5, 7, "is 7, outside of 5 to 6", "return actions of the space"),
    (spaces.Discrete(3, dtype=np.int8), 2, 258, "is 258, outside of 0 to 2", "return actions"),
    (spaces.Discrete(3), 0, -1, "is -1, outside of 0 to 2", "return actions of the space"),
    (spaces.MultiDiscrete([2, 3]), [1, 2], [2, 0], r"is \[2, 0\], outside", "return actions"),
    (spaces.MultiBinary(2), [0, 1], [0, -1], r"is \[0, -1\], outside of \[0, 0\]", "return"),
]


KINDS = {
    "gym": lambda make: GymEnv([make() for _ in range(4)]),
    "vector": lambda make: VectorGymEnv(OwnVectorEnv([make] * 4, "Disabled"), seeding="episode"),
    "manager": lambda make: ParallelEnvManager([make] * 4, envs_per_worker=4),
}


REFUSED_ACTIONS = [(kind, *case) for kind in ("gym", "vector") for case in OUTSIDE]


@pytest.mark.parametrize(
    ("kind", "space", "good", "bad", "words", "fix"), [*REFUSED_ACTIONS, ("manager", *OUTSIDE[0])]
)
def test_actions_outside_of_the_space_are_refused_with_lane_value_and_bounds(
    kind: str, space: Any, good: Any, bad: Any, words: str, fix: str
) -> None:
    nested = spaces.Dict(a=spaces.Tuple([space]))
    env = KINDS[kind](lambda: SpaceEnv(BIT, copy.deepcopy(nested), length=9))
    env.reset_all_next()
    env.reset_lanes([0, 1, 2, 3], [0] * 4, [None] * 4)
    actions = np.array([bad, good, good, good])  # the first lane does not step
    env.step_lanes([1, 2, 3], {"action/a/0": actions})
    actions[2] = bad
    with pytest.raises(LaneError) as caught:
        env.step_lanes([1, 2, 3], {"action/a/0": actions})
    env.close()
    error: Any = caught.value if kind == "manager" else caught.value.__cause__
    assert caught.value.lane == 2
    assert re.search(f"'action/a/0' {words}", str(error))
    assert fix in error.fix


def clocks(kind: str, keep_float64: Any, *values: float) -> Any:
    """Lanes that show the same values as ``time``, and as ``place`` what float32 tells apart."""
    box = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    shown = [{"time": np.array([v]), "place": np.array([t * 1e-9])} for t, v in enumerate(values)]
    make = lambda: ValueEnv(shown, spaces.Dict(time=box, place=box), length=9)  # noqa: E731
    if kind == "gym":
        return GymEnv([make(), make()], seed=0, keep_float64=keep_float64)
    if kind == "vector":
        vector = OwnVectorEnv([make] * 2, "Disabled")
        return VectorGymEnv(vector, 0, seeding="episode", keep_float64=keep_float64)
    return ParallelEnvManager([make] * 2, seed=0, keep_float64=keep_float64)


@pytest.mark.parametrize("kind", ["gym", "vector", "manager"])
def test_values_that_float32_does_not_tell_apart_are_warned_of_once(kind: str, caplog: Any) -> None:
    still = DictTensor({"action": torch.zeros(2, dtype=torch.int64)})
    for keep, values, n_warnings in (
        (False, [1.7e9 + 0.02 * t for t in range(9)], 1),
        (False, [2.0**24 + t for t in range(9)], 1),
        (False, [t - t // 3 + 1e-9 * (t % 3) for t in range(1, 10)], 0),  # most are told apart
        (False, [1.0 + 1e-15 * t for t in range(9)], 0),  # rounding
        (["time"], [1.7e9 + 0.02 * t for t in range(9)], 0),
    ):
        caplog.clear()
        SAID.clear()
        env = clocks(kind, keep, *values)
        env.reset()
        for value in values[1:]:
            (observation, _), _ = env.step(still)
            assert observation["time"][1].item() == (value if keep else np.float32(value))
        env.close()
        assert (observation["time"].dtype == torch.float64) == bool(keep)
        assert observation["place"].dtype == torch.float32
        texts = [text for text in caplog.messages if "keep_float64=['time']" in text]
        assert len(texts) == n_warnings == len(caplog.messages)
