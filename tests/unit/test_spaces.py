"""Actions outside their space, float64 observations, and the cheaper checks in workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.spaces import Discrete, MultiDiscrete

from rlpool import DictTensor, GymEnv, ParallelEnvManager, VectorGymEnv
from rlpool.envs.vec_env import LaneError
from rlpool.workers.logs import SAID
from rlpool.workers.worker_process import install_fast_checks

from support.envs import SpaceEnv, ValueEnv, small_discrete
from support.vector_envs import OwnVectorEnv

KINDS: dict[str, Any] = {
    "gym": lambda makers, **options: GymEnv([make() for make in makers], 0, **options),
    "vector": lambda makers, **options: VectorGymEnv(
        OwnVectorEnv(makers, "Disabled"), 0, seeding="episode", **options
    ),
    "manager": lambda makers, **options: ParallelEnvManager(
        makers, seed=0, envs_per_worker=3, **options
    ),
}
each_kind = pytest.mark.parametrize("kind", KINDS)

ACTED = {
    "start": Discrete(2, start=5),
    "small": small_discrete(3),
    "many": MultiDiscrete([2, 3]),
    "bits": spaces.MultiBinary(2),
}
GOOD: dict[str, Any] = {"start": 6, "small": 2, "many": [1, 2], "bits": [0, 1]}
OUTSIDE: list[tuple[str, Any, str, str]] = [
    ("start", 0, "0, outside 5 to 6", "add `start`"),
    ("start", 7, "7, outside 5 to 6", "return actions of the space"),
    ("small", 258, "258, outside 0 to 2", "return actions"),
    ("small", -1, "-1, outside 0 to 2", "return actions"),
    ("many", [2, 0], "[2, 0], outside", "return actions"),
    ("bits", [0, -1], "[0, -1], outside [0, 0]", "return"),
]


@each_kind
def test_actions_outside_the_space_are_refused_with_lane_value_and_bounds(kind: str) -> None:
    env = KINDS[kind]([lambda: SpaceEnv(Discrete(2), spaces.Dict(ACTED), length=9)] * 3)
    for key, bad, named, fix in OUTSIDE[: 1 if kind == "manager" else None]:
        env.reset_all_next()
        env.reset_lanes([0, 1, 2], [0] * 3, [None] * 3)
        actions = {f"action/{name}": np.array([value] * 3) for name, value in GOOD.items()}
        actions[f"action/{key}"][0] = bad
        env.step_lanes([1, 2], actions)  # the first lane does not step
        actions[f"action/{key}"][2] = bad
        with pytest.raises(LaneError) as caught:
            env.step_lanes([1, 2], actions)
        error: Any = caught.value if kind == "manager" else caught.value.__cause__
        assert caught.value.lane == 2
        assert f"'action/{key}' is {named}" in str(error)
        assert fix in error.fix
    env.close()


@each_kind
def test_values_that_float32_cannot_distinguish_are_warned_about_once(
    kind: str, caplog: Any
) -> None:
    box = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    still = DictTensor({"action": torch.zeros(2, dtype=torch.int64)})
    for keep, values, n_warnings in (
        (False, [1.7e9 + 0.02 * t for t in range(9)], 1),
        (False, [t - t // 3 + 1e-9 * (t % 3) for t in range(1, 10)], 0),  # most are distinct
        (False, [1.0 + 1e-15 * t for t in range(9)], 0),  # rounding
        (["time"], [1.7e9 + 0.02 * t for t in range(9)], 0),
    ):
        caplog.clear()
        SAID.clear()
        # Each lane returns the values, and as ``place`` others that float32 can distinguish.
        pairs = [(np.array([value]), np.array([t * 1e-9])) for t, value in enumerate(values)]
        shown = [dict(zip(("time", "place"), pair, strict=True)) for pair in pairs]
        make = partial(ValueEnv, shown, spaces.Dict(time=box, place=box), 9)
        env = KINDS[kind]([make] * 2, keep_float64=keep)
        env.reset()
        for value in values[1:]:
            (observation, _), _ = env.step(still)
            assert observation["time"][1].item() == (value if keep else np.float32(value))
        env.close()
        assert (observation["time"].dtype == torch.float64) == bool(keep)
        assert observation["place"].dtype == torch.float32
        texts = [text for text in caplog.messages if "keep_float64=['time']" in text]
        assert len(texts) == n_warnings == len(caplog.messages)


@pytest.fixture
def originals() -> Iterator[dict[Any, Any]]:
    kept: dict[Any, Any] = {kind: kind.contains for kind in (Discrete, MultiDiscrete)}
    yield kept
    for kind, contains in kept.items():
        kind.contains = contains


def test_the_cheaper_checks_in_workers_agree_with_gymnasium(originals: dict[Any, Any]) -> None:
    install_fast_checks()
    kinds = np.int64, np.int32, np.uint8, np.float32, int, bool
    numbers = [kind(value) for kind in kinds for value in range(8)]
    every_pair = itertools.product((np.int64, np.int32, np.float32), range(-6, 6), range(-6, 6))
    pairs = [np.array(pair, kind) for kind, *pair in every_pair]
    for values, space in (
        (numbers, Discrete(6)),
        (numbers, Discrete(4, start=-2)),
        (pairs, MultiDiscrete([2, 3])),
        (pairs, MultiDiscrete([2, 3], np.int32)),
        (pairs, MultiDiscrete([2**63 - 1, 5], start=[-5, -2])),
    ):
        for value in (*values, [values[0]], np.array([values[0]])):
            expected = originals[type(space)](space, value)
            assert space.contains(value) is expected, (space, value)
    for extreme in (np.iinfo(np.int64).min, np.iinfo(np.int64).max):
        assert not MultiDiscrete([2, 3], start=[-1, 1]).contains(np.array([0, extreme]))
