"""GymEnv: every space, conversions, manual reset and step, wrappers, real environments."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import ale_py
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlpool import DictTensor, EnvError, EpisodeBatcher, GymEnv, GymEnvInf, UsageError, replay
from rlpool.envs.columns import as_array

from support.agents import ConstantAgent, FunctionAgent
from support.by_hand import Episode, ObservedEnv, assert_same, played, stored
from support.envs import CountingEnv, SpaceEnv, ValueEnv, small_discrete
from support.scripted import leaves

gymnasium.register_envs(ale_py)
W = gymnasium.wrappers
BIT = spaces.Discrete(2)


def action(*values: Any) -> DictTensor:
    return DictTensor({"action": torch.tensor(values)})


# ``property/test_against_loops`` covers other spaces.
SPACES: dict[str, Any] = {
    "box float16": spaces.Box(-1, 1, (2, 2), np.float16),
    "box scalar": spaces.Box(-1, 1, (), np.float32),
    "box without elements": spaces.Box(-1, 1, (3, 0), np.float32),
    "box int64": spaces.Box(-9, 9, (2,), np.int64),
    "multidiscrete 2-d": spaces.MultiDiscrete([[3, 4], [5, 6]]),
    "tuple": spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float64)]),
}
MADE = {name: partial(SpaceEnv, space, space, 4) for name, space in SPACES.items()}
MADE["discrete int8"] = partial(SpaceEnv, small_discrete(5, start=1), BIT, 4)
REAL = ("CartPole-v1", "Blackjack-v1", "HalfCheetah-v5", "ALE/Breakout-v5")
MADE |= {name: partial(gymnasium.make, name) for name in REAL}


@pytest.mark.parametrize("name", MADE)
def test_episodes_match_a_hand_written_loop(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo leaves a log in its working directory
    *envs, alone = (copy.deepcopy(MADE[name])() for _ in range(3))
    alone.action_space.seed(3)
    parts = leaves(alone.action_space, "action")
    output = {key: torch.from_numpy(stored(part.sample(), False)) for key, part in parts}

    def act(state: Any, observation: DictTensor, *_: Any) -> Any:
        rows = observation.n_elems()
        return None, DictTensor({k: torch.stack([v] * rows) for k, v in output.items()}), None

    def create_env(seed: int) -> GymEnv:
        return GymEnv(envs, seed, max_episode_steps=20)

    agent = FunctionAgent(act)
    with EpisodeBatcher(3, 8, lambda: agent, {}, create_env, n_workers=0, seeds=1) as batcher:
        batcher.execute(2)
        got = batcher.get()
    env, rows = ObservedEnv(alone, limit=20), []
    for row, seed in enumerate(got.info["seed"].tolist()):
        rows.append(played(Episode(agent, row, 2, None, env.reset(seed, None)), env, None))
    assert_same(got, rows, {key: value.numpy() for key, value in got.info.items()})
    for inner in envs if name in SPACES else ():
        assert all(map(inner.action_space.contains, inner.actions))


def test_actions_are_copies_that_the_environment_may_keep() -> None:
    inner = SpaceEnv(BIT, spaces.Box(-1, 1, (2,), np.float32))
    env = GymEnv([inner], seed=0)
    env.reset()
    array = np.ones((1, 2), np.float32)
    env.step_lanes([0], {"action": array})
    array[:] = 0
    assert inner.actions[0].tolist() == [1.0, 1.0]
    inner.actions[0][:] = 7
    assert array.tolist() == [[0.0, 0.0]]


def test_spaces_may_differ_only_in_bounds_and_float64_can_be_kept() -> None:
    envs = [SpaceEnv(spaces.Box(-n, n, (2,), np.float64), spaces.Discrete(n)) for n in (2, 3)]
    observation, _ = GymEnv(envs, seed=0, keep_float64=True).reset()
    assert observation["frame"].dtype == torch.float64
    assert observation["frame"].tolist() == [env.observations[0].tolist() for env in envs]


# Conversions


F32, I32, U8 = (spaces.Box(0, 99, (2,), dtype) for dtype in (np.float32, np.int32, np.uint8))
CONVERTED: list[tuple[Any, Any, Any]] = [
    (F32, np.array([1.5, 2.5]), [1.5, 2.5]),
    (F32, [1, 2], [1.0, 2.0]),
    (F32, torch.tensor([1.0, 2.0], requires_grad=True), [1.0, 2.0]),
    (spaces.Box(-9, 9, (), np.float32), 1, 1.0),
    (I32, np.array([1, 2]), [1, 2]),
    (U8, [1, 255], [1, 255]),
    (spaces.Discrete(5), np.int32(3), 3),
    (spaces.Discrete(5), np.array(4), 4),
    (spaces.MultiBinary(2), np.array([True, False]), [1, 0]),
]


@pytest.mark.parametrize(("space", "value", "expected"), CONVERTED)
def test_observations_of_related_types_are_converted(space: Any, value: Any, expected: Any) -> None:
    env = GymEnv([ValueEnv([value], space) for _ in range(3)], seed=0)
    first, _ = env.reset()
    (second, _), _ = env.step(action(0, 0, 0))
    for observation in (first, second):
        assert observation["frame"].tolist() == [expected] * 3
        assert observation["frame"].numpy().dtype == (space.dtype or np.int64)


def stepped(**columns: list[Any]) -> DictTensor:
    """Return the values of lanes whose steps return these, one per lane."""

    zeros = dict.fromkeys(("reward", "terminated", "truncated"), 0)
    envs = []
    for row in zip(*columns.values(), strict=True):
        result = np.zeros(2), *{**zeros, **dict(zip(columns, row, strict=True))}.values(), {}
        envs.append(CountingEnv(script={0: lambda result=result: result}))
    env = GymEnv(envs, seed=0)
    env.reset()
    return env.step(action(*[0] * len(envs)))[0][0]


REWARDS: list[Any] = [2, True, np.float64(2.5), np.array(2.5), 10**20, torch.tensor(0.5), [2.5]]
REWARDS += [np.array([2.5]), torch.ones(1, 1, requires_grad=True)]
PAIRS = [float("inf"), 1.0], [float("nan"), 3e38], [3.4e38, -3.4e38]
FLAGS = [1, 0, 1.0, np.True_, np.array(False), torch.tensor(True), [False], np.array([True])]


def test_rewards_and_flags_of_every_numeric_type_are_converted() -> None:
    for rewards in (REWARDS, *([each] for each in REWARDS), *PAIRS):
        got = stepped(reward=rewards)["reward"]
        assert got.dtype == torch.float32
        expected = [as_array(reward).item() for reward in rewards]
        np.testing.assert_array_equal(got, np.array(expected, "f4"))
    for flags in (FLAGS, *([each] for each in FLAGS)):
        expected = [bool(np.asarray(flag)) for flag in flags]
        got_both = stepped(terminated=flags, truncated=flags)
        for key in ("terminated", "truncated", "done"):
            assert got_both[key].tolist() == expected


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (2.5, {"frame": ("float32", 2.5)}),
        ((1, np.uint8(2)), {"frame/0": ("int64", 1), "frame/1": ("uint8", 2)}),
        ({"b": {"c": [0.5]}}, {"b/c": ("float32", [0.5])}),
    ],
)
def test_undeclared_observations_are_specified_by_the_first_one(first: Any, expected: Any) -> None:
    env = GymEnv([ValueEnv([first]) for _ in range(2)], seed=0)
    env.reset()
    (observation, _), _ = env.step(action(0, 0))
    for key, (dtype, value) in expected.items():
        assert str(observation[key].numpy().dtype) == dtype
        assert observation[key].tolist() == [value, value]


@pytest.mark.parametrize("given", [3, 1.5, [1.5, 2.5]])
def test_actions_arrive_as_numbers_or_arrays_without_an_action_space(given: Any) -> None:
    env = SpaceEnv(BIT, None)
    lanes = GymEnv([env], seed=0)
    lanes.reset()
    (observation, _), _ = lanes.step(action(given))
    (got,) = env.actions
    assert type(got) is (np.ndarray if isinstance(given, list) else type(given))
    assert np.asarray(got).tolist() == given
    assert observation["last_action"].tolist() == [given]


# Manual reset and step


class PoppingEnv(CountingEnv):
    """Environment that pops its settings from the options and from nested values."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return super().reset(seed=seed, options={"id": options.pop("id").pop(), "length": 1})


def test_an_environment_may_change_its_options_and_the_episode_keeps_them() -> None:
    fails = {(3, 0): lambda: 1 / 0}
    inner, given = PoppingEnv(script=fails), {"id": [2, 3]}
    env = GymEnvInf([PoppingEnv()], seed=0)
    env.reset({"id": [[2, 3]]})
    _, (after, _) = env.step(action(0))  # which resets it
    assert after["frame"].tolist() == [[0, 3]]
    create_env = lambda seed: GymEnv([inner], seed)  # noqa: E731
    with EpisodeBatcher(9, 1, ConstantAgent, {}, create_env, n_workers=0) as batcher:
        batcher.execute(1, env_info={"id": [[2, 3]]})
        with pytest.raises(EnvError) as caught:
            batcher.get()
    assert (caught.value.where.env_info, caught.value.options) == (given, given)
    with pytest.raises(ZeroDivisionError):
        replay(inner, caught.value)


def rows_of(observed: tuple[DictTensor, torch.Tensor]) -> dict[int, Any]:
    """Return each lane's values; the tensors are overwritten, as they are copies."""
    observation, lanes = observed
    columns = {key: tensor.tolist() for key, tensor in observation.items()}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    found = dict(zip(lanes.tolist(), rows, strict=True))
    for tensor in (*observation.values(), lanes):
        tensor.fill_(1)
    return found


def made(max_episode_steps: int | None) -> Any:
    """Return ``CountingEnv`` as wrapped by ``gymnasium.make``."""
    spec = gymnasium.envs.registration.EnvSpec(
        "Counting-v0", "support.envs:CountingEnv", max_episode_steps=max_episode_steps
    )
    return gymnasium.make(spec)


@pytest.mark.parametrize("kind", [GymEnv, GymEnvInf])
def test_lanes_behave_like_their_environments_alone(kind: type[GymEnv]) -> None:
    lengths = [9, 2, 4, 3, 9]
    lanes = kind([W.TimeAwareObservation(made(length - 1)) for length in lengths], seed=0)
    alone = [ObservedEnv(W.TimeAwareObservation(made(length - 1))) for length in lengths]
    info = DictTensor({"length": torch.tensor(lengths), "id": torch.arange(len(lengths))})

    def listed(values: dict[str, Any]) -> dict[str, Any]:
        return {key: value.tolist() for key, value in values.items()}

    def reset(lane: int) -> dict[str, Any]:
        return listed(alone[lane].reset(0, {"length": lengths[lane], "id": lane}))

    for _ in range(2):
        current = rows_of(lanes.reset(info))
        assert current == {lane: reset(lane) for lane in range(len(lengths))}
        for t in range(17):
            if not current:
                with pytest.raises(UsageError, match="reset"):
                    lanes.step(action())
                break
            expected = {k: listed(alone[k].step({"action": np.int64(t + k)})) for k in current}
            result, current = map(rows_of, lanes.step(action(*(t + lane for lane in current))))
            assert result == expected
            over = [lane for lane, row in expected.items() if row["done"]]
            again = {lane: reset(lane) for lane in over} if kind is GymEnvInf else {}
            continuing = {lane: row for lane, row in expected.items() if lane not in over}
            assert current == continuing | again


class Noting(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that records every call."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.seen: list[Any] = []

    def reset(self, **arguments: Any) -> Any:
        self.seen.append("reset")
        return super().reset(**arguments)

    def step(self, action: Any) -> Any:
        self.seen.append(action)
        return super().step(action)

    def close(self) -> None:
        self.seen.append("close")
        super().close()


def test_every_user_wrapper_sees_every_call_and_is_closed_once() -> None:
    inner = made(None)
    wrapper = Noting(W.TimeLimit(Noting(inner), 2))
    env = GymEnvInf([wrapper], seed=0)
    env.reset()
    for number in range(5):
        env.step(action(number))
    env.close()
    env.close()
    expected = ["reset", 0, 1, "reset", 2, 3, "reset", 4, "close"]
    assert wrapper.seen == wrapper.env.env.seen == expected
    assert inner.unwrapped.is_closed


def test_all_environments_are_closed_even_if_some_fail_to_close() -> None:
    closed: list[int] = []

    def close(number: int) -> None:
        closed.append(number)
        if number > 0:
            raise OSError(f"no answer from {number}")

    envs = [CountingEnv() for _ in range(4)]
    for inner, number in zip(envs, (0, 1, 2, 0), strict=True):
        inner.close = partial(close, number)
    env = GymEnv(envs, seed=0)
    with pytest.raises(OSError, match="no answer from 1"):
        env.close()
    env.close()
    assert closed == [0, 2, 1, 0]
