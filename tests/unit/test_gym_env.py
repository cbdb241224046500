"""GymEnv: every space, the ancestor's reset and step, automatic restarts, real environments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ale_py
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlpool import (
    DictTensor,
    EnvSpecError,
    EpisodeBatcher,
    GymEnv,
    GymEnvInf,
    SpecError,
    UsageError,
    VecEnv,
    WorkerStartupError,
)

from support.agents import FunctionAgent
from support.envs import CountingEnv, EchoEnv, SelfishCountingEnv, SpaceEnv, ValueEnv

gymnasium.register_envs(ale_py)

FLAGS = ["terminated", "truncated", "done", "initial_state"]


def action(*values: Any) -> DictTensor:
    return DictTensor({"action": torch.tensor(values)})


def flat(space: Any, value: Any, key: str) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    """A value by the keys that it must get, written down without the library."""
    if isinstance(space, spaces.Dict):
        parts = {}
        for name, inner in space.items():
            parts.update(flat(inner, value[name], f"{key}/{name}" if key else name))
        return parts
    if isinstance(space, spaces.Tuple):
        parts = {}
        for number, inner in enumerate(space):
            parts.update(flat(inner, value[number], f"{key}/{number}"))
        return parts
    array = np.asarray(value, np.int64 if isinstance(space, spaces.Discrete) else space.dtype)
    return {key: array.astype(np.float32) if array.dtype == np.float64 else array}


def flat_observation(space: Any, value: Any) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    return flat(space, value, "" if isinstance(space, spaces.Dict) else "frame")


SPACES = {
    "box": spaces.Box(-1, 1, (3,), np.float32),
    "box float64": spaces.Box(-1, 1, (2, 2), np.float64),
    "box float16": spaces.Box(-1, 1, (2,), np.float16),
    "box scalar": spaces.Box(-1, 1, (), np.float32),
    "box scalar float64": spaces.Box(-1, 1, (), np.float64),
    "box uint8 image": spaces.Box(0, 255, (8, 6, 3), np.uint8),
    "box int32": spaces.Box(-9, 9, (2,), np.int32),
    "box int64": spaces.Box(-9, 9, (2,), np.int64),
    "box unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "discrete": spaces.Discrete(5),
    "discrete with start": spaces.Discrete(5, start=-7),
    "multidiscrete": spaces.MultiDiscrete([3, 4, 5]),
    "multidiscrete 2-d": spaces.MultiDiscrete([[3, 4], [5, 6]]),
    "multibinary": spaces.MultiBinary(4),
    "multibinary 2-d": spaces.MultiBinary([2, 3]),
    "tuple": spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)]),
    "dict": spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(0, 255, (2, 2), np.uint8)),
    "nested": spaces.Dict(
        x=spaces.Tuple([spaces.Dict(y=spaces.MultiBinary(2)), spaces.Discrete(3, start=1)]),
        z=spaces.Dict(w=spaces.Dict(v=spaces.Box(-1, 1, (), np.float64))),
    ),
}

every_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)


# Spaces of observations


@every_space
def test_reset_and_step_give_observations_of_every_space(space: Any) -> None:
    envs = [SpaceEnv(space, spaces.Discrete(2), length=3) for _ in range(3)]
    env = GymEnv(envs, seed=1)
    observations = [env.reset()[0]]
    for _ in range(3):
        (observation, _), _ = env.step(action(0, 0, 0))
        observations.append(observation)
    for t, observation in enumerate(observations):
        for lane, inner in enumerate(envs):
            for key, expected in flat_observation(space, inner.observations[t]).items():
                got = observation[key][lane].numpy()
                assert got.dtype == expected.dtype, key
                assert got.shape == expected.shape, key
                assert got.tolist() == expected.tolist(), key


@every_space
def test_a_batcher_stores_observations_of_every_space(space: Any) -> None:
    envs = [SpaceEnv(space, spaces.Discrete(2), length=4) for _ in range(2)]
    with batcher_of(envs, lambda n: torch.zeros(n, dtype=torch.int64)) as batcher:
        batcher.execute(2)
        trajectories = batcher.get()
    assert trajectories.lengths.tolist() == [4, 4]
    for row, inner in enumerate(envs):
        for t in range(4):
            now = flat_observation(space, inner.observations[t])
            after = flat_observation(space, inner.observations[t + 1])
            for key in now:
                assert trajectories[key][row, t].numpy().dtype == now[key].dtype
                assert trajectories[key][row, t].tolist() == now[key].tolist()
                assert trajectories[f"_{key}"][row, t].tolist() == after[key].tolist()


@contextmanager
def batcher_of(envs: list[Any], act: Any, **arguments: Any) -> Iterator[EpisodeBatcher]:
    """A batcher in this process whose agent's output is ``act(n)``."""

    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        output = act(observation.n_elems())
        output = output if isinstance(output, dict) else {"action": output}
        return DictTensor({}), DictTensor(output), DictTensor({})

    with EpisodeBatcher(
        n_timesteps=3,
        n_slots=8,
        create_agent=lambda: FunctionAgent(agent),
        create_env=lambda seed: GymEnv(envs, seed, **arguments),
        n_threads=0,
        seeds=1,
    ) as batcher:
        yield batcher


def collect(envs: list[Any], act: Any) -> Any:
    """One episode."""
    with batcher_of(envs, act) as batcher:
        batcher.execute(1)
        return batcher.get()


def test_float64_can_be_kept() -> None:
    space = spaces.Dict(x=spaces.Box(-1, 1, (2,), np.float64))
    inner = SpaceEnv(space, spaces.Discrete(2))
    env = GymEnv([inner], seed=0, keep_float64=True)
    observation, _ = env.reset()
    assert observation["x"].dtype == torch.float64
    assert observation["x"][0].tolist() == inner.observations[0]["x"].tolist()


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(4),
        spaces.Graph(spaces.Box(-1, 1), None),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Dict(ok=spaces.Discrete(2), bad=spaces.Text(4)),
    ],
    ids=["Text", "Graph", "Sequence", "nested"],
)
@pytest.mark.parametrize("which", ["observation_space", "action_space"])
def test_spaces_without_tensors_are_refused(space: Any, which: str) -> None:
    pair = {"observation_space": spaces.Discrete(2), "action_space": spaces.Discrete(2)}
    with pytest.raises(SpecError, match=rf"{which}.*(Text|Graph|Sequence)"):
        GymEnv([SpaceEnv(**{**pair, which: space})], seed=0)


# Spaces of actions


@every_space
def test_step_hands_actions_of_every_space_to_the_environment(space: Any) -> None:
    envs = [SpaceEnv(spaces.Discrete(2), space) for _ in range(3)]
    env = GymEnv(envs, seed=1)
    env.reset()
    space.seed(3)
    samples = [space.sample() for _ in envs]
    (observation, _), _ = env.step(DictTensor(batch_of(space, samples)))
    check_actions(space, envs, samples)
    for key, expected in batch_of(space, samples).items():
        stored = observation[f"last_{key}"]
        assert stored.tolist() == expected.to(stored.dtype).tolist()


@every_space
def test_a_batcher_hands_actions_of_every_space_to_the_environment(space: Any) -> None:
    envs = [SpaceEnv(spaces.Discrete(2), space, length=2) for _ in range(3)]
    space.seed(4)
    samples = [space.sample() for _ in envs]
    with batcher_of(envs, lambda n: batch_of(space, samples)) as batcher:
        batcher.execute(3)
        trajectories = batcher.get()
    check_actions(space, envs, samples)
    for key, expected in batch_of(space, samples).items():
        last = trajectories[f"last_{key}"]
        assert not last[:, 0].any()
        assert last[:, 1].tolist() == expected.to(last.dtype).tolist()
        assert trajectories[key][:, 0].tolist() == expected.tolist()
        assert trajectories[f"_last_{key}"].tolist() == trajectories[key].to(last.dtype).tolist()


def batch_of(space: Any, samples: list[Any]) -> dict[str, torch.Tensor]:
    """Actions as an agent gives them."""
    rows = [flat(space, sample, "action") for sample in samples]
    return {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}


def check_actions(space: Any, envs: list[SpaceEnv], samples: list[Any]) -> None:
    """Every environment got its action, as the space wants it: its types, its dtypes."""
    for env, sample in zip(envs, samples, strict=True):
        for given in env.actions:
            assert same_kind(space, given)
            assert space.contains(given)
            expected = flat(space, sample, "action")
            for key, part in flat(space, given, "action").items():
                assert part.tolist() == expected[key].tolist()


def same_kind(space: Any, value: Any) -> bool:
    if isinstance(space, spaces.Dict):
        return isinstance(value, dict) and all(same_kind(s, value[k]) for k, s in space.items())
    if isinstance(space, spaces.Tuple):
        return isinstance(value, tuple) and all(map(same_kind, space, value))
    if isinstance(space, spaces.Discrete):
        return isinstance(value, int | np.integer)
    return isinstance(value, np.ndarray) and value.dtype == space.dtype


def test_actions_are_copies_that_the_environment_may_keep() -> None:
    inner = SpaceEnv(spaces.Discrete(2), spaces.Box(-1, 1, (2,), np.float32))
    env = GymEnv([inner], seed=0)
    env.reset()
    tensor = torch.ones(1, 2)
    env.step(DictTensor({"action": tensor}))
    tensor.zero_()
    env.step(DictTensor({"action": tensor}))
    assert inner.actions[0].tolist() == [1.0, 1.0]
    inner.actions[0][:] = 7
    assert tensor.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(2, 3),
        torch.zeros(2, 2, dtype=torch.int64),
        torch.zeros(2),
        torch.zeros(2, 2, 1),
    ],
    ids=["size", "kind", "rank", "more rank"],
)
def test_actions_that_do_not_fit_the_space_are_refused(wrong: torch.Tensor) -> None:
    envs = [SpaceEnv(spaces.Discrete(2), spaces.Box(-1, 1, (2,), np.float32)) for _ in range(2)]
    with pytest.raises(SpecError, match="action"):
        collect(envs, lambda n: wrong)


def test_an_action_for_each_part_of_a_nested_space_is_wanted() -> None:
    space = spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)])
    envs = [SpaceEnv(spaces.Discrete(2), space) for _ in range(2)]
    with pytest.raises(SpecError, match="action/1"):
        collect(envs, lambda n: {"action/0": torch.zeros(n, dtype=torch.int64)})


# What environments hand out


def test_observations_that_are_updated_in_place_are_copied() -> None:
    env = GymEnv([SelfishCountingEnv(), SelfishCountingEnv()], seed=0)
    first, _ = env.reset()
    (second, _), _ = env.step(action(0, 0))
    assert first["frame"].tolist() == [[0, 0], [0, 0]]
    assert second["frame"].tolist() == [[1, 0], [1, 0]]


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (spaces.Box(-9, 9, (2,), np.float32), np.zeros(3, np.float32)),
        (spaces.Box(-9, 9, (2,), np.float32), np.zeros((1, 2), np.float32)),
        (spaces.Box(-9, 9, (2,), np.float32), np.float32(1)),
        (spaces.Box(-9, 9, (2,), np.float32), np.zeros(2, np.int64)),
        (spaces.Box(-9, 9, (2,), np.int32), np.zeros(2, np.float32)),
        (spaces.Box(0, 255, (2,), np.uint8), np.zeros(2, np.float32)),
        (spaces.Box(0, 255, (2,), np.uint8), np.zeros(2, np.int64)),
        (spaces.Box(-(2**31), 2**31 - 1, (2,), np.int32), np.array([2**40, 0])),
        (spaces.Discrete(5), 1.5),
        (spaces.Discrete(5), np.zeros(2, np.int64)),
        (spaces.Dict(a=spaces.Discrete(5)), {"b": 1}),
        (spaces.Tuple([spaces.Discrete(5)]), (1, 2)),
        (spaces.Box(-9, 9, (2,), np.float32), None),
        (spaces.Box(-9, 9, (2,), np.float32), "ab"),
    ],
)
@pytest.mark.parametrize("n_envs", [1, 3])
def test_observations_that_do_not_fit_are_refused(space: Any, value: Any, n_envs: int) -> None:
    good = {"a": 0} if isinstance(space, spaces.Dict) else space.sample()
    envs = [ValueEnv([good], space) for _ in range(n_envs)]
    envs[-1].values.append(value)
    env = GymEnv(envs, seed=0)
    env.reset()
    with pytest.raises(SpecError):
        env.step(action(*[0] * n_envs))


@pytest.mark.parametrize(
    ("space", "value", "stored"),
    [
        (spaces.Box(-9, 9, (2,), np.float32), np.array([1.5, 2.5]), [1.5, 2.5]),
        (spaces.Box(-9, 9, (2,), np.float32), [1, 2], [1.0, 2.0]),
        (spaces.Box(-9, 9, (2,), np.float32), (1.0, 2.0), [1.0, 2.0]),
        (spaces.Box(-9, 9, (), np.float32), 1.5, 1.5),
        (spaces.Box(-9, 9, (), np.float32), 1, 1.0),
        (spaces.Box(-9, 9, (2,), np.float32), torch.tensor([1.0, 2.0]), [1.0, 2.0]),
        (spaces.Box(-9, 9, (2,), np.int32), np.array([1, 2]), [1, 2]),
        (spaces.Box(0, 255, (2,), np.uint8), [1, 255], [1, 255]),
        (spaces.Discrete(5), np.int32(3), 3),
        (spaces.Discrete(5), True, 1),
        (spaces.Discrete(5), np.array(4), 4),
        (spaces.MultiBinary(2), np.array([True, False]), [1, 0]),
    ],
)
@pytest.mark.parametrize("n_envs", [1, 3])
def test_observations_of_a_related_type_are_converted(
    space: Any, value: Any, stored: Any, n_envs: int
) -> None:
    env = GymEnv([ValueEnv([value], space) for _ in range(n_envs)], seed=0)
    observation, _ = env.reset()
    assert observation["frame"].tolist() == [stored] * n_envs
    (observation, _), _ = env.step(action(*[0] * n_envs))
    assert observation["frame"].tolist() == [stored] * n_envs
    assert observation["frame"].numpy().dtype == (space.dtype or np.int64)


def test_a_bad_observation_is_reported_by_lane_and_key() -> None:
    space = spaces.Box(-9, 9, (2,), np.float32)
    good, bad = np.zeros(2, np.float32), np.zeros(3, np.float32)
    envs = [ValueEnv([good, good], space), ValueEnv([good, bad], space)]
    with batcher_of(envs, lambda n: torch.zeros(n, dtype=torch.int64)) as batcher:
        batcher.execute(2)
        with pytest.raises(EnvSpecError, match=r"'frame' should have shape \[2\], got \[3\]") as e:
            batcher.get()
    assert (e.value.where.lane, e.value.where.episode, e.value.where.step) == (1, 1, 0)


@pytest.mark.parametrize("key", ["reward", "done", "terminated", "initial_state", "last_action"])
def test_an_observation_key_that_the_library_uses_is_refused(key: str) -> None:
    space = spaces.Dict({key: spaces.Box(-9, 9, (1,)), "x": spaces.Box(-9, 9, (1,))})
    envs = [SpaceEnv(space, spaces.Discrete(2))]
    with pytest.raises(SpecError, match=key):
        GymEnv(envs, seed=0).reset()
    with pytest.raises((SpecError, WorkerStartupError), match=key):
        collect(envs, lambda n: torch.zeros(n, dtype=torch.int64))


def test_two_parts_of_an_observation_with_one_key_are_refused() -> None:
    box = spaces.Box(-9, 9, (1,))
    space = spaces.Dict({"a/b": box, "a": spaces.Dict(b=box)})
    with pytest.raises(SpecError, match="a/b"):
        GymEnv([SpaceEnv(space, spaces.Discrete(2))], seed=0)


@pytest.mark.parametrize("n_envs", [1, 2])
@pytest.mark.parametrize(
    "reward", [2, 2.5, np.float64(2.5), np.float32(2.5), np.int64(2), True, np.array(2.5)]
)
def test_rewards_of_every_numeric_type_become_float32(reward: Any, n_envs: int) -> None:
    class Env(CountingEnv):
        def step(self, action: Any) -> Any:
            observation, _, terminated, truncated, info = super().step(action)
            return observation, reward, terminated, truncated, info

    env = GymEnv([Env() for _ in range(n_envs)], seed=0)
    env.reset()
    (observation, _), _ = env.step(action(*[0] * n_envs))
    assert observation["reward"].dtype == torch.float32
    assert observation["reward"].tolist() == [float(reward)] * n_envs


@pytest.mark.parametrize("n_envs", [1, 2])
@pytest.mark.parametrize("reward", [None, "a", [1.0, 2.0], {}])
def test_rewards_that_are_no_numbers_are_refused(reward: Any, n_envs: int) -> None:
    class Env(CountingEnv):
        def step(self, action: Any) -> Any:
            observation, _, terminated, truncated, info = super().step(action)
            return observation, reward, terminated, truncated, info

    env = GymEnv([Env() for _ in range(n_envs)], seed=0)
    env.reset()
    with pytest.raises(SpecError, match="reward"):
        env.step(action(*[0] * n_envs))


class StepEnv(CountingEnv):
    """Returns some values instead of its own from the second step on."""

    def __init__(self, values: dict[str, Any] | None = None, at: int = 1) -> None:
        super().__init__(length=9)
        self.values, self.n_ok = values or {}, at

    def step(self, action: Any) -> Any:
        names = ("observation", "reward", "terminated", "truncated", "info")
        result = dict(zip(names, super().step(action), strict=True))
        self.n_ok -= 1
        return tuple({**result, **(self.values if self.n_ok < 0 else {})}.values())


WRONG_FLAGS = [float("nan"), None, "yes", "", 0.5, 2, -1, [], [False], [True], (), {}]
WRONG_FLAGS += [np.array([False]), np.array([True]), np.array([False, True]), np.zeros(0), object()]
WRONG_FLAGS += [torch.tensor([False]), torch.tensor(float("nan")), np.float32("nan"), 1j]
WRONG_REWARDS = [
    1e39,
    -1e39,
    np.float64(1e300),
    10**39,
    10**400,
    np.array(1e39),
    None,
    "a",
    [1.0],
    1j,
]
WRONG_STEPS = [
    *(("terminated", flag) for flag in WRONG_FLAGS),
    *(("truncated", flag) for flag in WRONG_FLAGS),
    *(("reward", reward) for reward in WRONG_REWARDS),
]


@pytest.mark.parametrize(("name", "value"), WRONG_STEPS, ids=str)
def test_a_flag_or_reward_that_is_none_is_refused_with_lane_and_step(name: str, value: Any) -> None:
    env = GymEnv([CountingEnv(length=9), StepEnv({name: value}), CountingEnv(length=9)], seed=0)
    env.reset()
    env.step(action(0, 0, 0))
    with pytest.raises(EnvSpecError, match=f"'{name}' should be") as caught:
        env.step(action(0, 0, 0))
    assert (caught.value.where.lane, caught.value.where.step) == (1, 1)
    env.reset()


@pytest.mark.parametrize(
    ("name", "value"), [("terminated", float("nan")), ("truncated", None), ("reward", 1e39)]
)
def test_a_batcher_refuses_such_a_step_with_lane_and_step(name: str, value: Any) -> None:
    def act(state: Any, observation: DictTensor, *_: Any) -> Any:
        actions = torch.zeros(observation.n_elems(), dtype=torch.int64)
        return DictTensor(), DictTensor({"action": actions}), DictTensor()

    def create_env(seed: int) -> GymEnv:
        return GymEnv([CountingEnv(length=9), StepEnv({name: value})], seed)

    with EpisodeBatcher(
        n_timesteps=9,
        n_slots=4,
        create_agent=lambda: FunctionAgent(act),
        create_env=create_env,
        n_threads=0,
        seeds=0,
    ) as batcher:
        batcher.execute(2)
        with pytest.raises(EnvSpecError, match=f"'{name}' should be") as caught:
            batcher.get()
    assert (caught.value.where.lane, caught.value.where.step) == (1, 1)


@pytest.mark.parametrize(
    "flag", [1, 0, 1.0, np.True_, np.array(False), torch.tensor(True)], ids=str
)
def test_flags_may_be_of_every_type_that_says_true_or_false(flag: Any) -> None:
    env = GymEnv([CountingEnv(length=9), StepEnv({"terminated": flag, "truncated": flag})], seed=0)
    env.reset()
    env.step(action(0, 0))
    (observation, _), (_, running) = env.step(action(0, 0))
    assert observation["terminated"].tolist() == [False, bool(flag)]
    assert running.tolist() == [0, 1][: 2 - bool(flag)]


@pytest.mark.parametrize(
    "rewards",
    [[float("inf"), 1.0], [float("nan"), 3e38], [3.4e38, -3.4e38], [10**20, 1.0], [10**20, 3]],
)
def test_rewards_that_are_not_finite_or_just_fit_are_kept(rewards: list[float]) -> None:
    env = GymEnv([StepEnv({"reward": reward}, at=0) for reward in rewards], seed=0)
    env.reset()
    (observation, _), _ = env.step(action(0, 0))
    np.testing.assert_array_equal(observation["reward"], np.array(rewards, np.float32))


@pytest.mark.parametrize("done", [float("nan"), None, [True], 0.5])
def test_an_older_environment_whose_done_is_neither_true_nor_false_is_refused(done: Any) -> None:
    class Env:
        observation_space = spaces.Box(0, 1, (1,))
        action_space = spaces.Discrete(2)

        def reset(self) -> Any:
            return np.zeros(1, np.float32)

        def step(self, action: Any) -> Any:
            return np.zeros(1, np.float32), 0.0, done, {}

    env = GymEnv([Env()], seed=0)
    env.reset()
    with pytest.raises(EnvSpecError, match="should be True or False"):
        env.step(action(0))


@pytest.mark.parametrize("result", [(1, 2, 3), None, (1, 2, 3, 4, 5, 6)])
def test_a_step_without_five_values_is_refused(result: Any) -> None:
    class Env(CountingEnv):
        def step(self, action: Any) -> Any:
            return result

    env = GymEnv([Env()], seed=0)
    env.reset()
    with pytest.raises((SpecError, ValueError, TypeError)):
        env.step(action(0))


# The ancestor's interface


def test_reset_gives_all_lanes_and_their_numbers() -> None:
    env = GymEnv([CountingEnv(number=n) for n in (4, 5, 6)], seed=0)
    observation, running = env.reset()
    assert isinstance(env, VecEnv)
    assert env.n_envs() == 3
    assert running.dtype == torch.int64
    assert running.tolist() == [0, 1, 2]
    assert observation["frame"].tolist() == [[0, 4], [0, 5], [0, 6]]
    assert observation["reward"].tolist() == [0, 0, 0]
    assert observation["initial_state"].tolist() == [True] * 3
    for key in ("terminated", "truncated", "done"):
        assert observation[key].tolist() == [False] * 3
    assert observation["last_action"].tolist() == [0, 0, 0]
    assert observation["last_action"].dtype == torch.int64


def test_steps_shrink_to_the_running_lanes() -> None:
    env = GymEnv([CountingEnv(length=n, number=n) for n in (2, 1, 3)], seed=0)
    env.reset()
    (observation, ran), (after, running) = env.step(action(7, 8, 9))
    assert ran.tolist() == [0, 1, 2]
    assert running.tolist() == [0, 2]
    assert observation["frame"].tolist() == [[1, 2], [1, 1], [1, 3]]
    assert observation["reward"].tolist() == [201, 101, 301]
    assert observation["done"].tolist() == [False, True, False]
    assert observation["terminated"].tolist() == [False, True, False]
    assert observation["initial_state"].tolist() == [False] * 3
    assert observation["last_action"].tolist() == [7, 8, 9]
    assert after["frame"].tolist() == [[1, 2], [1, 3]]
    assert after["last_action"].tolist() == [7, 9]

    (observation, ran), (after, running) = env.step(action(10, 11))
    assert ran.tolist() == [0, 2]
    assert running.tolist() == [2]
    assert observation["frame"].tolist() == [[2, 2], [2, 3]]
    assert observation["last_action"].tolist() == [10, 11]

    (observation, ran), (after, running) = env.step(action(12))
    assert ran.tolist() == [2]
    assert running.tolist() == []
    assert running.dtype == torch.int64
    assert observation["done"].tolist() == [True]
    assert after["frame"].shape == (0, 2)
    with pytest.raises(UsageError, match="reset"):
        env.step(action())


def test_reset_restarts_lanes_that_run_and_lanes_that_ended() -> None:
    env = GymEnv([CountingEnv(length=1), CountingEnv(length=9)], seed=0)
    env.reset()
    env.step(action(1, 1))
    observation, running = env.reset()
    assert running.tolist() == [0, 1]
    assert observation["frame"].tolist() == [[0, 0], [0, 0]]
    assert observation["done"].tolist() == [False, False]
    assert observation["last_action"].tolist() == [0, 0]
    assert observation["initial_state"].tolist() == [True, True]


def test_step_before_reset_is_refused() -> None:
    with pytest.raises(UsageError, match="reset"):
        GymEnv([CountingEnv()], seed=0).step(action(0))


def test_results_are_copies() -> None:
    env = GymEnv([CountingEnv()], seed=0)
    first, running = env.reset()
    first["frame"].fill_(99)
    first["initial_state"].fill_(False)
    running.fill_(5)
    (observation, ran), (after, _) = env.step(action(1))
    assert ran.tolist() == [0]
    assert observation["frame"].tolist() == [[1, 0]]
    observation["frame"].fill_(99)
    assert after["frame"].tolist() == [[1, 0]]


@pytest.mark.parametrize("ends", CountingEnv.ENDS)
def test_termination_and_truncation_are_told_apart(ends: str) -> None:
    env = GymEnv([CountingEnv(length=1, ends=ends)], seed=0)
    env.reset()
    (observation, _), (_, running) = env.step(action(0))
    assert observation["terminated"].item() is (ends in ("terminated", "both"))
    assert observation["truncated"].item() is (ends in ("truncated", "both"))
    assert observation["done"].item() is True
    assert running.tolist() == []


def test_env_info_reaches_every_environment_as_options() -> None:
    envs = [EchoEnv(), EchoEnv()]
    env = GymEnv(envs, seed=0)
    env.reset(DictTensor({"id": torch.tensor([3, 4]), "goal": torch.tensor([[1.5], [2.5]])}))
    assert [e.resets[0][1] for e in envs] == [{"id": 3, "goal": [1.5]}, {"id": 4, "goal": [2.5]}]
    kinds = {type(value) for e in envs for value in e.resets[0][1].values()}
    assert kinds == {int, list}


@pytest.mark.parametrize("info", [None, DictTensor({})])
def test_without_env_info_there_are_no_options(info: DictTensor | None) -> None:
    inner = EchoEnv()
    env = GymEnv([inner], seed=0)
    env.reset(info)
    assert inner.resets[0][1] is None


def test_env_info_is_that_of_the_last_reset() -> None:
    inner = EchoEnv()
    env = GymEnv([inner], seed=0)
    env.reset(DictTensor({"id": torch.tensor([3])}))
    env.reset()
    assert [options for _, options in inner.resets] == [{"id": 3}, None]


def test_env_info_of_another_size_is_refused() -> None:
    env = GymEnv([CountingEnv(), CountingEnv()], seed=0)
    with pytest.raises(SpecError, match="3 rows, 2 were expected"):
        env.reset(DictTensor({"id": torch.arange(3)}))


def test_seeds_differ_between_lanes_and_resets_and_repeat_with_the_same_seed() -> None:
    def seeds(seed: Any) -> list[int]:
        env = GymEnv([EchoEnv() for _ in range(3)], seed)
        return [s for _ in range(3) for s in env.reset()[0]["seed"].tolist()]

    assert len(set(seeds(5))) == 9
    assert seeds(5) == seeds(5)
    assert not set(seeds(5)) & set(seeds(6))
    assert not set(seeds([5])) & set(seeds(5))
    assert min(seeds(None)) >= 0


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (DictTensor({"move": torch.zeros(2, dtype=torch.int64)}), "action"),
        (DictTensor({"action": torch.zeros(3, dtype=torch.int64)}), "rows?|row"),
        (DictTensor({}), "action"),
        (DictTensor({"action": torch.zeros(2, 1, dtype=torch.int64)}), "action"),
    ],
    ids=["key", "rows", "empty", "shape"],
)
def test_policy_outputs_that_do_not_fit_are_refused(output: DictTensor, text: str) -> None:
    env = GymEnv([CountingEnv(), CountingEnv()], seed=0)
    env.reset()
    with pytest.raises(SpecError, match=text):
        env.step(output)


def test_other_outputs_beside_the_action_are_ignored() -> None:
    env = GymEnv([CountingEnv()], seed=0)
    env.reset()
    output = DictTensor({"action": torch.tensor([4]), "value": torch.zeros(1, 3)})
    (observation, _), _ = env.step(output)
    assert observation["last_action"].tolist() == [4]


def test_an_exception_of_the_environment_comes_out_as_it_is() -> None:
    class Env(CountingEnv):
        def step(self, action: Any) -> Any:
            raise KeyError("goal")

    env = GymEnv([Env()], seed=0)
    env.reset()
    with pytest.raises(KeyError, match="goal"):
        env.step(action(0))


def test_close_closes_every_environment() -> None:
    envs = [CountingEnv(), CountingEnv()]
    GymEnv(envs, seed=0).close()
    assert all(env.is_closed for env in envs)


def test_spaces_are_those_of_the_environments() -> None:
    env = GymEnv([CountingEnv()], seed=0)
    assert env.observation_space == CountingEnv.observation_space
    assert env.action_space == CountingEnv.action_space


def test_no_environments_are_refused() -> None:
    with pytest.raises(SpecError, match="no environments"):
        GymEnv([], seed=0)


@pytest.mark.parametrize("which", ["observation_space", "action_space"])
def test_environments_that_differ_are_refused(which: str) -> None:
    pair: dict[str, Any] = dict.fromkeys(("observation_space", "action_space"), spaces.Discrete(2))
    other = SpaceEnv(**{**pair, which: spaces.Box(-1, 1, (2,))})
    with pytest.raises(SpecError, match=f"{which} of environment 1"):
        GymEnv([SpaceEnv(**pair), other], seed=0)


def test_environments_may_differ_in_their_bounds() -> None:
    envs = [SpaceEnv(spaces.Box(-n, n, (2,)), spaces.Discrete(n)) for n in (2, 3)]
    assert GymEnv(envs, seed=0).n_envs() == 2


# Time limits


def test_a_time_limit_truncates() -> None:
    env = GymEnv([CountingEnv(length=9), CountingEnv(length=2)], seed=0, max_episode_steps=3)
    env.reset()
    env.step(action(0, 0))
    (observation, _), _ = env.step(action(0, 0))
    assert observation["terminated"].tolist() == [False, True]
    (observation, ran), (_, running) = env.step(action(0))
    assert ran.tolist() == [0]
    assert observation["truncated"].tolist() == [True]
    assert observation["terminated"].tolist() == [False]
    assert running.tolist() == []


def test_a_time_limit_counts_anew_after_a_reset() -> None:
    env = GymEnv([CountingEnv(length=9)], seed=0, max_episode_steps=2)
    for _ in range(2):
        env.reset()
        (observation, _), _ = env.step(action(0))
        assert not observation["done"].item()
        (observation, _), _ = env.step(action(0))
        assert observation["truncated"].item()


@pytest.mark.parametrize("limit", [0, -1])
def test_a_time_limit_below_one_is_refused(limit: int) -> None:
    with pytest.raises(SpecError, match="max_episode_steps"):
        GymEnv([CountingEnv()], seed=0, max_episode_steps=limit)


# Wrappers: whatever becomes of them inside, the episodes are theirs


class Halved(gymnasium.wrappers.TimeLimit):
    """A time limit with a mind of its own."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward / 2, terminated, truncated, info


def made(max_episode_steps: int | None = 4, **arguments: Any) -> Any:
    """``CountingEnv`` as ``gymnasium.make`` wraps it."""
    spec = gymnasium.envs.registration.EnvSpec(
        "Counting-v0", "support.envs:CountingEnv", max_episode_steps=max_episode_steps
    )
    return gymnasium.make(spec, **arguments)


W = gymnasium.wrappers
WRAPPED: dict[str, Any] = {
    "made": made,
    "made without checker": lambda: made(disable_env_checker=True),
    "made without limit": lambda: made(None),
    "limit alone": lambda: W.TimeLimit(CountingEnv(), 4),
    "limit inside": lambda: W.TransformReward(made(), lambda reward: reward + 1),
    "limit outside": lambda: W.TimeLimit(W.TransformReward(CountingEnv(), lambda r: r + 1), 4),
    "short limit inside": lambda: W.TimeLimit(W.TimeLimit(CountingEnv(), 3), 5),
    "short limit outside": lambda: W.TimeLimit(W.TimeLimit(CountingEnv(), 5), 3),
    "limit on made": lambda: W.TimeLimit(made(), 2),
    "limit of one": lambda: W.TimeLimit(made(), 1),
    "statistics": lambda: W.RecordEpisodeStatistics(made()),
    "time in the observation": lambda: W.TimeAwareObservation(made()),
    "delayed observation": lambda: W.DelayObservation(made(), 2),
    "subclass of a limit": lambda: Halved(CountingEnv(), 4),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_environments_do_what_they_do_on_their_own(name: str) -> None:
    for lengths in ([9], [2], [9, 9], [9, 2, 4, 3, 9], [1, 4]):
        check_against_itself(WRAPPED[name], lengths)


def check_against_itself(make: Any, lengths: list[int]) -> None:
    """Lanes in a ``GymEnvInf`` do what the same environments do alone."""
    n_lanes = len(lengths)
    env = GymEnvInf([make() for _ in lengths], seed=0)
    alone = [make() for _ in lengths]
    info = DictTensor({"length": torch.tensor(lengths), "id": torch.arange(n_lanes)})
    for n_steps in (17, 3, 25):
        current, _ = env.reset(info)
        expected = [alone[lane].reset(options=info.slice(lane)) for lane in range(n_lanes)]
        for _ in range(n_steps):
            assert current["frame"].tolist() == [frame.tolist() for frame, _ in expected]
            (ended, _), (current, _) = env.step(DictTensor({"action": torch.arange(n_lanes)}))
            for lane, inner in enumerate(alone):
                frame, reward, terminated, truncated, _ = inner.step(lane)
                assert ended["frame"][lane].tolist() == frame.tolist()
                assert ended["reward"][lane].item() == reward
                assert ended["terminated"][lane].item() == terminated
                assert ended["truncated"][lane].item() == truncated
                assert ended["done"][lane].item() == (terminated or truncated)
                expected[lane] = (frame, {})
                if terminated or truncated:
                    expected[lane] = inner.reset(options=info.slice(lane))


@pytest.mark.parametrize("limits", [[3], [3, 3], [2, 5], [4, 1, 3]], ids=str)
def test_lanes_may_have_different_time_limits(limits: list[int]) -> None:
    envs = [W.TimeLimit(CountingEnv(length=99), limit) for limit in limits]
    env = GymEnvInf(envs, seed=0)
    env.reset()
    for t in range(1, 40):
        (ended, _), _ = env.step(DictTensor({"action": torch.zeros(len(limits)).long()}))
        assert ended["truncated"].tolist() == [t % limit == 0 for limit in limits]
        assert not ended["terminated"].any()


@pytest.mark.parametrize("n_envs", [1, 2, 3])
def test_time_limits_hold_in_every_episode_of_a_batcher(n_envs: int) -> None:
    lengths = [9, 9, 9, 2, 9, 1, 4, 9, 9, 3]
    envs = [made() for _ in range(n_envs)]
    with batcher_of(envs, lambda n: torch.zeros(n, dtype=torch.int64)) as batcher:
        for _ in range(2):
            batcher.execute(10, env_info=DictTensor({"length": torch.tensor(lengths)}))
            trajectories = batcher.get()
            assert trajectories.lengths.tolist() == [min(length, 4) for length in lengths]
            assert trajectories["_truncated"].any(1).tolist() == [n >= 4 for n in lengths]
            assert trajectories["_terminated"].any(1).tolist() == [n <= 4 for n in lengths]


def test_wrapped_environments_are_closed_through_their_wrappers() -> None:
    closed = []

    class Noting(gymnasium.Wrapper[Any, Any, Any, Any]):
        def close(self) -> None:
            closed.append(1)
            super().close()

    inner = CountingEnv()
    env = GymEnv([Noting(W.OrderEnforcing(Noting(W.TimeLimit(inner, 3))))], seed=0)
    env.reset()
    env.step(action(0))
    env.close()
    assert closed == [1, 1]
    assert inner.is_closed


def test_every_wrapper_of_the_users_sees_every_call() -> None:
    seen: list[Any] = []

    class Noting(gymnasium.Wrapper[Any, Any, Any, Any]):
        def reset(self, **arguments: Any) -> Any:
            seen.append("reset")
            return super().reset(**arguments)

        def step(self, action: Any) -> Any:
            seen.append(action)
            return super().step(action)

    env = GymEnvInf([Noting(W.TimeLimit(Noting(made(None)), 2))], seed=0)
    env.reset()
    for number in range(5):
        env.step(action(number))
    expected = ["reset", 0, 1, "reset", 2, 3, "reset", 4]
    assert seen == [item for item in expected for _ in range(2)]


# Automatic restarts


def test_a_lane_restarts_at_once_and_the_terminal_values_are_kept() -> None:
    env = GymEnvInf([CountingEnv(length=2, number=1), CountingEnv(length=3, number=2)], seed=0)
    env.reset()
    env.step(action(5, 6))
    (observation, ran), (after, running) = env.step(action(7, 8))
    assert ran.tolist() == running.tolist() == [0, 1]
    assert observation["frame"].tolist() == [[2, 1], [2, 2]]
    assert observation["reward"].tolist() == [102, 202]
    assert observation["done"].tolist() == [True, False]
    assert observation["terminated"].tolist() == [True, False]
    assert observation["initial_state"].tolist() == [False, False]
    assert observation["last_action"].tolist() == [7, 8]
    assert after["frame"].tolist() == [[0, 1], [2, 2]]
    assert after["reward"].tolist() == [0, 202]
    assert after["done"].tolist() == [False, False]
    assert after["terminated"].tolist() == [False, False]
    assert after["initial_state"].tolist() == [True, False]
    assert after["last_action"].tolist() == [0, 8]
    (observation, _), _ = env.step(action(9, 9))
    assert observation["frame"].tolist() == [[1, 1], [3, 2]]
    assert observation["initial_state"].tolist() == [False, False]
    assert observation["done"].tolist() == [False, True]


def test_automatic_restarts_keep_env_info_and_draw_new_seeds() -> None:
    envs = [EchoEnv(length=1), EchoEnv(length=2)]
    env = GymEnvInf(envs, seed=0)
    env.reset(DictTensor({"id": torch.tensor([3, 4])}))
    for _ in range(4):
        env.step(action(0, 0))
    assert [options for _, options in envs[0].resets] == [{"id": 3}] * 5
    assert [options for _, options in envs[1].resets] == [{"id": 4}] * 3
    seeds = [seed for inner in envs for seed, _ in inner.resets]
    assert len(set(seeds)) == 8


def test_automatic_restarts_repeat_with_the_same_seed() -> None:
    def seeds(lengths: list[int]) -> list[list[int | None]]:
        envs = [EchoEnv(length=length) for length in lengths]
        env = GymEnvInf(envs, seed=3)
        env.reset()
        for _ in range(6):
            env.step(action(0, 0))
        return [[seed for seed, _ in inner.resets] for inner in envs]

    assert seeds([2, 3]) == seeds([2, 3])
    assert seeds([2, 1])[0] == seeds([2, 3])[0]


# Real environments: what was collected is what the environment does on its own


REAL = {
    "CartPole-v1": {"frame": ("float32", (4,))},
    "FrozenLake-v1": {"frame": ("int64", ())},
    "Pendulum-v1": {"frame": ("float32", (3,))},
    "Blackjack-v1": {
        "frame/0": ("int64", ()),
        "frame/1": ("int64", ()),
        "frame/2": ("int64", ()),
    },
    "HalfCheetah-v5": {"frame": ("float32", (17,))},
    "ALE/Breakout-v5": {"frame": ("uint8", (210, 160, 3))},
}


def random_actions(space: Any) -> Any:
    """An agent's function that draws actions of a space from the noise."""

    def act(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        noise = observation["noise"]
        if isinstance(space, spaces.Discrete):
            actions = (noise[:, 0] * int(space.n)).long() + int(space.start)
        else:
            actions = torch.from_numpy(space.low) + noise * torch.from_numpy(space.high - space.low)
        return DictTensor({}), DictTensor({"action": actions}), DictTensor({})

    return act


@pytest.mark.parametrize("name", REAL)
def test_episodes_of_real_environments_can_be_replayed_by_hand(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo leaves a log where it runs
    space = gymnasium.make(name).action_space
    n_noise = 1 if isinstance(space, spaces.Discrete) else int(np.prod(space.shape))
    with EpisodeBatcher(
        n_timesteps=8,
        n_slots=3,
        create_agent=lambda: FunctionAgent(random_actions(space), n_noise),
        create_env=lambda seed: GymEnv(
            [gymnasium.make(name) for _ in range(2)], seed, max_episode_steps=20
        ),
        n_threads=0,
        seeds=7,
    ) as batcher:
        batcher.execute(4)
        trajectories = batcher.get()
    env = gymnasium.make(name)
    for row in (one.shorten() for one in trajectories.unfold()):
        length = int(row.lengths[0])
        assert 1 <= length <= 20
        observation, _ = env.reset(seed=int(row.info["seed"][0]))
        for t in range(length):
            check_observation(REAL[name], env.observation_space, row, "", t, observation)
            action = row["action"][0, t].numpy()
            given = action.item() if action.ndim == 0 else action
            observation, reward, terminated, truncated, _ = env.step(given)
            check_observation(REAL[name], env.observation_space, row, "_", t, observation)
            assert row["_reward"][0, t].item() == np.float32(reward)
            assert row["_terminated"][0, t].item() == bool(terminated)
            assert row["_truncated"][0, t].item() == (bool(truncated) or t == 19)
        assert row["_done"][0].tolist() == [False] * (length - 1) + [True]
    env.close()


def check_observation(
    specs: dict[str, tuple[str, tuple[int, ...]]],
    space: Any,
    row: Any,
    prefix: str,
    t: int,
    observation: Any,
) -> None:
    expected = flat_observation(space, observation)
    assert set(expected) == set(specs)
    for key, (dtype, shape) in specs.items():
        stored = row[prefix + key][0, t].numpy()
        assert (str(stored.dtype), stored.shape) == (dtype, shape)
        assert np.array_equal(stored, expected[key])


def test_no_old_gym_is_imported() -> None:
    assert "gym" not in sys.modules
