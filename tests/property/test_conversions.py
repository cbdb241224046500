"""Numbers of every dtype through every interface arrive unchanged or are refused by name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlpool import Agent, DictTensor, EpisodeBatcher, GymEnv, Pool, SpecError, VectorGymEnv
from rlpool.data.specs import fitted
from rlpool.envs.vec_env import VecEnv

from support.vector_envs import OwnVectorEnv

Dtype = np.dtype[Any]
Door = Callable[[Any], Any]
"""Hands a value over, and returns what is stored of it."""

INTS = [np.dtype(name) for name in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")]
FLOATS = [np.dtype(name) for name in ("f2", "f4", "f8")]
DTYPES = [np.dtype(bool), *INTS, *FLOATS]
NUMBERS = [
    *(0, 1, -1, 2, 127, 128, -129, 255, 256, 300, 2**11 + 1, 2**15, 2**24 + 1, 2**31, 2**32),
    *(2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.5, -0.5, 65504.0, 1e5, 3.4e38, 3.5e38, 1e300, math.inf, -math.inf, math.nan),
]


def values_of(source: Dtype) -> Iterator[Any]:
    """Return numbers of a dtype as its scalars."""
    for number in NUMBERS:
        with np.errstate(all="ignore"):
            try:
                value = np.array(number).astype(source)[()]
                has_it = source.kind == "f" or value.item() == number
            except (OverflowError, ValueError):
                continue
        if has_it:
            yield value


def fits(value: Any, target: Dtype) -> bool:
    """Whether a dtype holds a number, in Python's exact arithmetic."""
    number = value.item()
    if target.kind == "f":
        with np.errstate(over="ignore"):
            stored = np.array(number).astype(target)
        if value.dtype.kind == "f":
            return bool(np.isfinite(stored)) or not math.isfinite(number)
        return math.isfinite(stored) and int(stored) == number
    if not math.isfinite(number) or number != int(number):
        return False
    low, high = (0, 1) if target.kind == "b" else (np.iinfo(target).min, np.iinfo(target).max)
    return int(low) <= int(number) <= int(high)


def is_same_number(stored: Any, value: Any) -> bool:
    """Whether a number equals another one, or is a float that results from rounding it."""
    stored, number = np.asarray(stored), value.item()
    if stored.dtype.kind == value.dtype.kind == "f":
        return np.array_equal(stored, np.array(number).astype(stored.dtype), equal_nan=True)
    return bool(stored.item() == number)


class ShowingEnv(gymnasium.Env[Any, Any]):
    """Environment that returns given values and keeps the action that it gets."""

    def __init__(self, space: Any = None, action_space: Any = None) -> None:
        self.observation_space = space or spaces.Box(0, 1, (1,))
        self.action_space = action_space or spaces.Discrete(2)
        self.shown: Any = np.zeros(self.observation_space.shape, self.observation_space.dtype)
        self.reward: Any = 0.0
        self.info: dict[str, Any] = {}
        self.action: Any = None

    def reset(self, **_: Any) -> Any:
        return self.shown, self.info

    def step(self, action: Any) -> Any:
        self.action = action
        return self.shown, self.reward, True, False, {}


class GivingAgent(Agent):
    """Agent that returns a given action."""

    def __init__(self) -> None:
        self.action: Any = None

    def __call__(self, state: Any, observation: Any, *_: Any) -> Any:
        n = observation.n_elems()
        actions = torch.from_numpy(np.full((n, 1), self.action))
        return DictTensor(), DictTensor({"action": actions}), DictTensor()


def box(dtype: Dtype, shape: tuple[int, ...] = (1,)) -> spaces.Space[Any]:
    if dtype.kind == "b":
        return spaces.Box(0, 1, shape, np.int8)
    limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    return spaces.Box(limits.min, limits.max, shape, dtype.type)


def step_of(env: VecEnv, value: Any) -> Any:
    """Return the trajectory's last action after an action was taken."""
    env.reset()
    action = torch.from_numpy(np.array([[value]], value.dtype))
    (after, _), _ = env.step(DictTensor({"action": action}))
    return after["last_action"][0, 0].numpy()


def function(target: Dtype) -> Door:
    return lambda value: fitted("'frame'", value, target)


def next_state(target: Dtype) -> Door:
    pool = Pool(pool_size=1)

    def add(value: Any) -> Any:
        pool.pool(np.array([0], target), 0, np.array([value]), 0.0, True)
        return pool.transitions()["_frame"][0, 0].numpy()

    return add


def stored_action(target: Dtype) -> Door:
    pool = Pool(pool_size=1)
    pool.pool([0.0], np.array(0, target), [0.0], 0.0, True)

    def add(value: Any) -> Any:
        pool.pool([0.0], np.array(value), [0.0], 0.0, True)
        return pool.transitions()["action"][0].numpy()

    return add


def observation(target: Dtype, keep_float64: bool = False) -> Door:
    env = ShowingEnv(box(target))
    envs = GymEnv([env, ShowingEnv(box(target))], keep_float64=keep_float64)

    def reset(value: Any) -> Any:
        env.shown = np.array([value])
        return envs.reset()[0]["frame"][0, 0].numpy()

    return reset


def kept_observation(target: Dtype) -> Door:
    return observation(target, keep_float64=True)


def info(target: Dtype) -> Door:
    env = ShowingEnv()
    envs = GymEnv([env, ShowingEnv()], info_keys={"frame_info": target})

    def reset(value: Any) -> Any:
        env.info = {"frame_info": value}
        return envs.reset()[0]["frame_info"][0].numpy()

    return reset


def action(target: Dtype) -> Door:
    envs = GymEnv([ShowingEnv(action_space=box(target))])
    return lambda value: step_of(envs, value)


def action_of_a_vector_env(target: Dtype) -> Door:
    vector_env = OwnVectorEnv([lambda: ShowingEnv(action_space=box(target))])
    envs = VectorGymEnv(vector_env, seeding="episode")
    return lambda value: step_of(envs, value)


DOORS = {
    door.__name__: door
    for door in (
        *(function, next_state, stored_action),
        *(observation, kept_observation, info),
        *(action, action_of_a_vector_env),
    )
}
TAKES_ALL = {"function", "info"}
"""Interfaces that accept every representable number; others refuse some dtypes entirely."""


@pytest.mark.parametrize("name", DOORS)
def test_a_number_arrives_unchanged_or_is_refused_by_name(name: str) -> None:
    n_stored, refused = 0, []
    for target in DTYPES:
        door = DOORS[name](target)
        for source in DTYPES:
            for value in values_of(source):
                try:
                    stored = door(value)
                except SpecError as error:
                    refused.append(str(error))
                    assert name not in TAKES_ALL or not fits(value, target), (target, value)
                else:
                    assert is_same_number(stored, value), (target, value, stored)
                    n_stored += 1
    assert n_stored > 200
    assert all("frame" in what or "action" in what for what in refused)


@pytest.mark.parametrize("kind", [GymEnv, Pool])
def test_rewards_are_rounded_to_float32_or_refused(kind: Any) -> None:
    env, refused = ShowingEnv(), []
    envs = GymEnv([env])
    for value in itertools.chain.from_iterable(map(values_of, DTYPES)):
        with np.errstate(over="ignore"):
            wanted = np.float32(value)
        env.reward = value
        pool = Pool(pool_size=1)
        try:
            if kind is Pool:
                pool.pool([0.0], 0, [0.0], value, True)
                stored = pool.transitions()["_reward"][0]
            else:
                envs.reset()
                stored = envs.step(DictTensor({"action": torch.tensor([0])}))[0][0]["reward"][0]
        except SpecError as error:
            refused.append(str(error))
            assert math.isfinite(value) > math.isfinite(wanted), value
        else:
            assert np.array_equal(stored.numpy(), wanted, equal_nan=True)
    assert len(refused) == 2
    assert all("reward' should fit float32, got " in what for what in refused)


def test_the_environment_gets_exactly_the_agents_actions() -> None:
    refused = []
    for target, source in itertools.product([np.dtype("i1"), np.dtype("f4")], DTYPES):
        env, agent = ShowingEnv(action_space=box(target)), GivingAgent()
        agent.action, *others = values_of(source)
        create_env = lambda env=env: GymEnv([env])  # noqa: E731
        make = EpisodeBatcher(2, 1, lambda agent=agent: agent, create_env=create_env, n_threads=0)
        with make as batcher:
            for value in (agent.action, *others):
                agent.action = value
                try:
                    batcher.execute(1)
                    result = batcher.get()
                except SpecError as error:
                    refused.append(str(error))
                    continue
                assert is_same_number(result["_last_action"][0, 0, 0].numpy(), value)
                assert is_same_number(env.action[0], result["action"][0, 0, 0].numpy())
    assert refused
    assert all("action" in what for what in refused)
