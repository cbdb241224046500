"""GymEnv: every space, what is refused, reset and step, wrappers, real environments."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ale_py
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlpool import (
    AgentError,
    DictTensor,
    EnvError,
    EnvSpecError,
    EpisodeBatcher,
    GymEnv,
    GymEnvInf,
    SpecError,
    UsageError,
    replay,
)
from rlpool.envs.columns import as_array

from support.agents import ConstantAgent, FunctionAgent
from support.envs import (
    CountingEnv,
    EchoEnv,
    SpaceEnv,
    ValueEnv,
)

gymnasium.register_envs(ale_py)
W = gymnasium.wrappers
BIT = spaces.Discrete(2)


def action(*values: Any) -> DictTensor:
    return DictTensor({"action": torch.tensor(values)})


def zeros(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int64)


def collect(envs: list[Any], n_episodes: int = 1, act: Any = zeros) -> Any:
    """Episodes of an agent in this process, whose output is ``act(n)``."""

    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        output = act(observation.n_elems())
        output = output if isinstance(output, dict) else {"action": output}
        return DictTensor({}), DictTensor(output), DictTensor({})

    with EpisodeBatcher(
        3,
        8,
        create_agent=lambda: FunctionAgent(agent),
        create_env=lambda seed: GymEnv(envs, seed, max_episode_steps=20),
        n_threads=0,
        seeds=1,
    ) as batcher:
        batcher.execute(n_episodes)
        return batcher.get()


# Spaces


def flat(space: Any, value: Any, key: str) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    """A value by the keys that it must get, written down without the library."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        items = space.items() if isinstance(space, spaces.Dict) else enumerate(space)
        parts = {}
        for name, inner in items:
            parts.update(flat(inner, value[name], f"{key}/{name}" if key else str(name)))
        return parts
    array = np.asarray(value, np.int64 if isinstance(space, spaces.Discrete) else space.dtype)
    return {key: array.astype(np.float32) if array.dtype == np.float64 else array}


def flat_observation(space: Any, value: Any) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    return flat(space, value, "" if isinstance(space, spaces.Dict) else "frame")


SPACES = {
    "box float64": spaces.Box(-1, 1, (2, 2), np.float64),
    "box float16": spaces.Box(-1, 1, (2,), np.float16),
    "box scalar": spaces.Box(-1, 1, (), np.float32),
    "box without elements": spaces.Box(-1, 1, (3, 0), np.float32),
    "box uint8 image": spaces.Box(0, 255, (8, 6, 3), np.uint8),
    "box int64": spaces.Box(-9, 9, (2,), np.int64),
    "discrete with start": spaces.Discrete(5, start=-7),
    "discrete int8": spaces.Discrete(5, start=1, dtype=np.int8),
    "multidiscrete 2-d": spaces.MultiDiscrete([[3, 4], [5, 6]]),
    "multibinary": spaces.MultiBinary(4),
    "tuple": spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)]),
    "nested": spaces.Dict(
        x=spaces.Tuple([spaces.Dict(y=spaces.MultiBinary(2)), spaces.Discrete(3, start=1)]),
        z=spaces.Dict(w=spaces.Dict(v=spaces.Box(-1, 1, (), np.float64))),
    ),
}

every_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)


@every_space
def test_observations_of_every_space_arrive(space: Any) -> None:
    envs = [SpaceEnv(space, BIT, length=4) for _ in range(3)]
    trajectories = collect(envs, 3)
    assert trajectories.lengths.tolist() == [4, 4, 4]
    for lane, inner in enumerate(envs):
        rows = [flat_observation(space, observation) for observation in inner.observations]
        for t in range(4):
            for key, value in rows[t].items():
                got = trajectories[key][lane, t].numpy()
                assert (got.dtype, got.tolist()) == (value.dtype, value.tolist())
                assert trajectories[f"_{key}"][lane, t].tolist() == rows[t + 1][key].tolist()


def batch_of(space: Any, samples: list[Any]) -> dict[str, torch.Tensor]:
    """Actions as an agent gives them."""
    rows = [flat(space, sample, "action") for sample in samples]
    return {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}


def same_kind(space: Any, value: Any) -> bool:
    if isinstance(space, spaces.Dict):
        return isinstance(value, dict) and all(same_kind(s, value[k]) for k, s in space.items())
    if isinstance(space, spaces.Tuple):
        return isinstance(value, tuple) and all(map(same_kind, space, value))
    if isinstance(space, spaces.Discrete):
        return isinstance(value, int | np.integer)
    return isinstance(value, np.ndarray) and value.dtype == space.dtype


@every_space
def test_actions_of_every_space_reach_the_environments_in_its_types(space: Any) -> None:
    envs = [SpaceEnv(BIT, space, length=2) for _ in range(3)]
    space.seed(3)
    samples = [space.sample() for _ in envs]
    batch = batch_of(space, samples)
    trajectories = collect(envs, 3, lambda n: batch)
    for inner, sample in zip(envs, samples, strict=True):
        for one in inner.actions:
            assert same_kind(space, one)
            assert space.contains(one)
            for key, part in flat(space, one, "action").items():
                assert part.tolist() == flat(space, sample, "action")[key].tolist()
    for key, expected in batch.items():
        last = trajectories[f"last_{key}"]
        assert not last[:, 0].any()
        assert last[:, 1].tolist() == expected.to(last.dtype).tolist()
        assert trajectories[f"_last_{key}"].tolist() == trajectories[key].to(last.dtype).tolist()


def test_actions_are_copies_that_the_environment_may_keep() -> None:
    inner = SpaceEnv(BIT, spaces.Box(-1, 1, (2,), np.float32))
    env = GymEnv([inner], seed=0)
    env.reset()
    array = np.ones((1, 2), np.float32)
    env.step_lanes([0], {"action": array})
    array[:] = 0
    env.step_lanes([0], {"action": array})
    assert inner.actions[0].tolist() == [1.0, 1.0]
    inner.actions[1][:] = 7
    assert array.tolist() == [[0.0, 0.0]]


# What does not fit


@pytest.mark.parametrize("which", ["observation_space", "action_space"])
def test_spaces_without_tensors_and_spaces_that_differ_are_refused(which: str) -> None:
    pair: dict[str, Any] = {"observation_space": BIT, "action_space": BIT}
    with pytest.raises(SpecError, match=rf"{which} is a Text space"):
        GymEnv([SpaceEnv(**{**pair, which: spaces.Text(4)})], seed=0)
    other = SpaceEnv(**{**pair, which: spaces.Box(-1, 1, (2,))})
    with pytest.raises(SpecError, match=f"{which} of environment 1"):
        GymEnv([SpaceEnv(**pair), other], seed=0)
    envs = [SpaceEnv(spaces.Box(-n, n, (2,), np.float64), spaces.Discrete(n)) for n in (2, 3)]
    observation, _ = GymEnv(envs, seed=0, keep_float64=True).reset()  # bounds may differ
    assert observation["frame"].dtype == torch.float64
    assert observation["frame"].tolist() == [env.observations[0].tolist() for env in envs]


F32, I32, U8 = (spaces.Box(0, 99, (2,), dtype) for dtype in (np.float32, np.int32, np.uint8))
POINT = spaces.Box(-9, 9, (), np.float32)
FIVE = spaces.Discrete(5)
REFUSED: list[tuple[Any, Any, str]] = [
    (F32, np.zeros(3, np.float32), r"'frame' should have shape \[2\], got \[3\]"),
    (F32, np.zeros(2, np.int64), "'frame' should have dtype float32, got int64"),
    (F32, ["a", "b"], "'frame' should have dtype"),
    (I32, np.zeros(2, np.float32), "'frame' should have dtype int32, got float32"),
    (I32, np.array([2**40, 0]), "'frame' should fit int32, got 1099511627776"),
    (U8, [1, 256], "'frame' should fit uint8, got 256"),
    (U8, np.zeros(2, np.float32), r"dtype uint8, got float32(.|\n)*return \.astype\(np\.uint8\)"),
    (F32, torch.zeros(2, dtype=torch.bfloat16), r"'frame'(.|\n)*return tensor.float\(\)"),
    (FIVE, 1.5, "'frame' should have dtype int64, got float64"),
    (spaces.Dict(a=FIVE), {"b": 1}, r"the keys \['a'\], got \['b'\]"),
    (spaces.Dict(a=FIVE), {"a": 0, "b": 1}, r"got \['a', 'b'\](.|\n)*leave out \['b'\]"),
    (spaces.Tuple([FIVE]), (1, 2), "tuple of 1 parts, got 2"),
]
CONVERTED: list[tuple[Any, Any, Any]] = [
    (F32, np.array([1.5, 2.5]), [1.5, 2.5]),
    (F32, [1, 2], [1.0, 2.0]),
    (F32, torch.tensor([1.0, 2.0], requires_grad=True), [1.0, 2.0]),
    (POINT, 1, 1.0),
    (I32, np.array([1, 2]), [1, 2]),
    (U8, [1, 255], [1, 255]),
    (FIVE, np.int32(3), 3),
    (FIVE, np.array(4), 4),
    (spaces.MultiBinary(2), np.array([True, False]), [1, 0]),
]


@pytest.mark.parametrize(("space", "value", "words"), REFUSED)
def test_observations_that_do_not_fit_are_refused_with_lane_key_and_both_sides(
    space: Any, value: Any, words: str
) -> None:
    good = {"a": 0} if isinstance(space, spaces.Dict) else space.sample()
    envs = [ValueEnv([good], space) for _ in range(3)]
    envs[-1].values.append(value)
    env = GymEnv(envs, seed=0)
    env.reset()
    with pytest.raises(EnvSpecError, match=words) as caught:
        env.step(action(0, 0, 0))
    assert caught.value.where.lane == 2


@pytest.mark.parametrize(("space", "value", "stored"), CONVERTED)
def test_observations_of_a_related_type_are_converted(space: Any, value: Any, stored: Any) -> None:
    env = GymEnv([ValueEnv([value], space) for _ in range(3)], seed=0)
    first, _ = env.reset()
    (second, _), _ = env.step(action(0, 0, 0))
    for observation in (first, second):
        assert observation["frame"].tolist() == [stored] * 3
        assert observation["frame"].numpy().dtype == (space.dtype or np.int64)


@pytest.mark.parametrize("key", ["reward", "done", "initial_state", "last_action", "a/b"])
def test_an_observation_key_that_is_used_twice_is_refused(key: str) -> None:
    box = spaces.Box(-9, 9, (1,))
    space = spaces.Dict({key: box, "a": spaces.Dict(b=box)})
    with pytest.raises(SpecError, match=key):
        GymEnv([SpaceEnv(space, BIT)], seed=0)


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


WRONG_FLAGS = [float("nan"), None, "", 0.5, 2, [False, True], np.array([True] * 2), np.zeros(0), 1j]
WRONG_REWARDS = [1e39, np.float64(-1e300), 10**400, np.array(1e39), None, "a", [1.0, 2.0], 1j]
WRONG_STEPS: list[Any] = [("truncated", None), *(("terminated", flag) for flag in WRONG_FLAGS)]
WRONG_STEPS += [("reward", reward) for reward in WRONG_REWARDS]


@pytest.mark.parametrize(("name", "value"), WRONG_STEPS, ids=lambda value: str(value)[:20])
def test_a_flag_or_reward_that_is_none_is_refused_with_lane(name: str, value: Any) -> None:
    env = GymEnv([CountingEnv(length=9), StepEnv({name: value}), CountingEnv(length=9)], seed=0)
    env.reset()
    env.step(action(0, 0, 0))
    with pytest.raises(EnvSpecError, match=f"'{name}' should (be|fit)") as caught:
        env.step(action(0, 0, 0))
    assert caught.value.where.lane == 1
    env.reset()


INF = float("inf")
REWARDS: list[Any] = [[value] for value in (2, True, np.float64(2.5), np.int64(2), np.array(2.5))]
REWARDS += [
    [torch.tensor(0.5), 2],
    [INF, 1.0],
    [float("nan"), 3e38],
    [3.4e38, -3.4e38],
    [10**20, 3],
    [np.array([2.5])],
    [[2.5], torch.ones(1, 1, requires_grad=True), 1.0],
]


@pytest.mark.parametrize("rewards", REWARDS, ids=str)
def test_rewards_of_every_numeric_type_become_float32_if_they_fit_or_are_infinite(
    rewards: list[Any],
) -> None:
    env = GymEnv([StepEnv({"reward": reward}, at=0) for reward in rewards], seed=0)
    env.reset()
    (observation, _), _ = env.step(action(*[0] * len(rewards)))
    assert observation["reward"].dtype == torch.float32
    expected = [as_array(reward).item() for reward in rewards]
    np.testing.assert_array_equal(observation["reward"], np.array(expected, "f4"))


FLAGS: list[Any] = [1, 0, 1.0, np.True_, np.array(False), torch.tensor(True)]
FLAGS += [[False], np.array([True]), torch.tensor([[False]])]


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_may_be_of_every_type_that_says_true_or_false(flag: Any) -> None:
    flags = {"terminated": flag, "truncated": flag}
    env = GymEnv([CountingEnv(length=9), StepEnv(flags, at=0)], seed=0)
    env.reset()
    (observation, _), (_, running) = env.step(action(0, 0))
    for key in (*flags, "done"):
        assert observation[key].tolist() == [False, bool(np.asarray(flag))]
    assert running.tolist() == [0, 1][: 2 - bool(np.asarray(flag))]


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        (torch.rand(2, 3), r"logits\.argmax\(-1\), or sample_categorical"),
        (torch.rand(2), r"logits\.argmax\(-1\), or sample_categorical"),
        (zeros(2)[:, None], r"action\.squeeze\(-1\)$"),
        (torch.ones(2, 1), r"action\.squeeze\(-1\)\.long\(\)"),
        (zeros(2)[:, None, None], "return actions of the action space's shape"),
    ],
)
def test_actions_of_another_shape_or_kind_are_met_with_what_to_write(given: Any, fix: str) -> None:
    with pytest.raises(AgentError, match=fix):
        collect([CountingEnv(), CountingEnv()], 2, lambda n: given)
    env = GymEnv([CountingEnv(), CountingEnv()], seed=0)
    env.reset()
    if given.ndim > 1:  # whole floats are taken by hand
        with pytest.raises(SpecError, match=fix):
            env.step(DictTensor({"action": given}))


WRONG_OUTPUTS = [
    *(DictTensor(), DictTensor({"move": zeros(2)})),
    *(DictTensor({"action": zeros(3)}), {"action": torch.zeros(2, 1).long()}),
    *(None, 3, [0, 1], zeros(2), {"action": [0, 1]}),
]


@pytest.mark.parametrize("output", WRONG_OUTPUTS)
def test_policy_outputs_that_do_not_fit_are_refused(output: Any) -> None:
    env = GymEnv([CountingEnv(), CountingEnv()], seed=0)
    env.reset()
    words = r"the keys \['action'\], got|shape \[2\].*got|policy_output is|key 'action' is list"
    with pytest.raises(SpecError, match=words):
        env.step(output)


@pytest.mark.parametrize(
    ("step", "kind", "words"),
    [
        (lambda action: {}["goal"], KeyError, "goal"),  # comes out as it is
        (lambda action: (1, 2, 3), EnvSpecError, "should return five values, got 3"),
        (lambda action: (1, 2, 3, {}), EnvSpecError, r"got 4(.|\n)*five values, or.*gym\.make\("),
        (lambda action: None, EnvSpecError, "should return five values, got NoneType"),
    ],
)
def test_what_a_step_raises_or_lacks_comes_out(step: Any, kind: Any, words: str) -> None:
    env = CountingEnv()
    env.step = step  # type: ignore[method-assign]
    lanes = GymEnv([env], seed=0)
    with pytest.raises(UsageError, match="reset"):
        lanes.step(action(0))
    lanes.reset()
    with pytest.raises(kind, match=words):
        lanes.step(action(0))


NOT_ENVIRONMENTS: list[Any] = ["CartPole-v1", CountingEnv, None, GymEnv([CountingEnv()])]
NOT_ENVIRONMENTS += [gymnasium.vector.SyncVectorEnv([CountingEnv])]


@pytest.mark.parametrize("wrong", NOT_ENVIRONMENTS, ids=lambda value: str(value)[:20])
def test_what_is_not_a_list_of_environments_is_refused_with_advice(wrong: Any) -> None:
    for given in (wrong, [CountingEnv(), wrong], [], CountingEnv()):
        message = "not a list of environments|environment 1 of a GymEnv is|got no environments"
        with pytest.raises(SpecError, match=message):
            GymEnv(given, seed=0)
    with pytest.raises(SpecError, match="max_episode_steps"):
        GymEnv([CountingEnv()], seed=0, max_episode_steps=0)


# Reset and step by hand


def test_env_info_reaches_every_environment_as_options_until_the_next_reset() -> None:
    envs = [EchoEnv(length=1), EchoEnv(length=1)]
    env = GymEnvInf(envs, seed=0)
    env.reset({"id": torch.tensor([3, 4]), "goal": torch.tensor([[1.5], [2.5]])})
    env.step(action(0, 0))
    env.reset()
    env.reset(DictTensor({}))
    for inner, number, goal in zip(envs, (3, 4), ([1.5], [2.5]), strict=True):
        given = {"id": number, "goal": goal}
        assert [options for _, options in inner.resets] == [given, given, None, None]
        assert {type(value) for value in inner.resets[0][1].values()} == {int, list}
    with pytest.raises(SpecError, match="3 rows, 2 were expected"):
        env.reset(DictTensor({"id": torch.arange(3)}))


class PoppingEnv(CountingEnv):
    """Takes its settings out of the options, and out of what is in them."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.got = copy.deepcopy(options)
        length = options.pop("length").pop()
        return super().reset(seed=seed, options={"length": length})

    def step(self, action: Any) -> Any:
        if self.length == 3:
            raise KeyError("goal")
        return super().step(action)


def test_an_environment_may_change_its_options_and_the_episode_keeps_them() -> None:
    inner = PoppingEnv()
    env = GymEnvInf([inner], seed=0)
    env.reset({"length": [[5, 1]]})
    env.step(action(0))  # which resets it
    assert inner.got == {"length": [5, 1]}
    create_env = lambda seed: GymEnv([PoppingEnv()], seed)  # noqa: E731
    with EpisodeBatcher(9, 1, ConstantAgent, {}, create_env, n_workers=0) as batcher:
        batcher.execute(1, env_info={"length": [[2, 3]]})
        with pytest.raises(EnvError) as caught:
            batcher.get()
    given = {"length": [2, 3]}
    assert (caught.value.where.env_info, caught.value.options) == (given, given)
    with pytest.raises(KeyError, match="goal"):
        replay(PoppingEnv(), caught.value)


# Time limits and wrappers


class Noting(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Notes every call."""

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


def made(max_episode_steps: int | None = 4, **arguments: Any) -> Any:
    """``CountingEnv`` as ``gymnasium.make`` wraps it."""
    spec = gymnasium.envs.registration.EnvSpec(
        "Counting-v0", "support.envs:CountingEnv", max_episode_steps=max_episode_steps
    )
    return gymnasium.make(spec, **arguments)


WRAPPED: dict[str, Any] = {  # of the length of an episode
    "made": lambda _: made(),
    "limit inside": lambda _: W.TransformReward(made(), lambda reward: reward + 1),
    "limits that differ": lambda length: W.TimeLimit(CountingEnv(), length - 1),
    "time in the observation": lambda _: W.TimeAwareObservation(made()),
}


Row = dict[str, Any]
FIRST = {"reward": 0, "terminated": False, "truncated": False, "done": False, "last_action": 0}


def rows_of(observed: tuple[DictTensor, torch.Tensor]) -> dict[int, Row]:
    """What each lane shows; the tensors are overwritten, as they are copies."""
    observation, lanes = observed
    columns = {key: tensor.tolist() for key, tensor in observation.items()}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    found = dict(zip(lanes.tolist(), rows, strict=True))
    for tensor in (*observation.values(), lanes):
        tensor.fill_(1)
    return found


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("kind", [GymEnv, GymEnvInf])
def test_lanes_do_what_their_environments_do_on_their_own(kind: type[GymEnv], name: str) -> None:
    lengths = [9, 2, 4, 3, 9]
    env, alone = (list(map(WRAPPED[name], lengths)) for _ in range(2))
    lanes, n_lanes = kind(env, seed=0), len(lengths)
    info = DictTensor({"length": torch.tensor(lengths), "id": torch.arange(n_lanes)})

    def reset(lane: int) -> Row:
        frame = alone[lane].reset(options=info.slice(lane))[0].tolist()
        return {**FIRST, "frame": frame, "initial_state": True}

    for n_steps in (17, 3, 25):
        current = rows_of(lanes.reset(info))
        assert current == {lane: reset(lane) for lane in range(n_lanes)}
        for action_of_step in range(n_steps if kind is GymEnvInf else 9):
            actions = [action_of_step + lane for lane in current]
            if not current:
                with pytest.raises(UsageError, match="reset"):
                    lanes.step(action())
                break
            expected: dict[int, Row] = {}
            for lane, given in zip(current, actions, strict=True):
                frame, reward, terminated, truncated, _ = alone[lane].step(given)
                done = terminated or truncated
                row = {"frame": frame.tolist(), "reward": reward, "last_action": given}
                flags = {"terminated": terminated, "truncated": truncated, "done": done}
                expected[lane] = {**row, **flags, "initial_state": False}
            result, current = map(rows_of, lanes.step(action(*actions)))
            assert result == expected
            going_on = {lane: row for lane, row in expected.items() if not row["done"]}
            if kind is GymEnvInf:
                going_on |= {lane: reset(lane) for lane, row in expected.items() if row["done"]}
            assert current == going_on


def test_lanes_that_do_not_step_stay_as_they_are() -> None:
    env = GymEnv([CountingEnv(number=n) for n in (4, 5)], seed=0)
    assert (env.n_envs(), env.action_space) == (2, CountingEnv.action_space)
    env.reset()
    env.step_lanes([1], {"action": np.array([7, 8])})
    found = {key: env.current[key].tolist() for key in ("frame", "initial_state", "last_action")}
    expected = {"frame": [[0, 4], [1, 5]], "initial_state": [True, False], "last_action": [0, 8]}
    assert found == expected


def test_every_wrapper_of_the_users_sees_every_call_and_is_closed_once() -> None:
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


def test_all_environments_are_closed_although_some_fail_to_close() -> None:
    closed: list[int] = []

    class Env(CountingEnv):
        def close(self) -> None:
            closed.append(self.default["id"])
            if self.default["id"] > 0:
                raise OSError(f"no answer from {self.default['id']}")

    env = GymEnv([Env(number=n) for n in (0, 1, 2, 0)], seed=0)
    with pytest.raises(OSError, match="no answer from 1"):
        env.close()
    env.close()
    assert closed == [0, 2, 1, 0]


# Wrappers


class Narrower(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Shows less than the space of what it wraps says."""

    def observation(self, observation: Any) -> Any:
        return observation[1:]


def test_a_wrapper_that_changes_observations_has_to_declare_its_space() -> None:
    wrapper = Narrower(CountingEnv(number=5))
    with pytest.raises(SpecError, match=r"'frame' should have shape \[2\], got \[1\]"):
        GymEnv([wrapper], seed=0).reset()
    wrapper.observation_space = spaces.Box(0, 9, (1,), np.float32)
    assert collect([wrapper], 1)["frame"].tolist() == [[[5]] * 3]


# Environments without spaces


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (2.5, {"frame": ("float32", 2.5)}),
        ([1, 2], {"frame": ("int64", [1, 2])}),
        ((1, np.uint8(2)), {"frame/0": ("int64", 1), "frame/1": ("uint8", 2)}),
        ({"a": 1, "b": {"c": [0.5]}}, {"a": ("int64", 1), "b/c": ("float32", [0.5])}),
    ],
)
def test_undeclared_observations_are_described_by_the_first(first: Any, expected: Any) -> None:
    env = GymEnv([ValueEnv([first, first, "other"]) for _ in range(2)], seed=0)
    env.reset()
    (observation, _), _ = env.step(action(0, 0))
    for key, (dtype, value) in expected.items():
        assert str(observation[key].numpy().dtype) == dtype
        assert observation[key].tolist() == [value, value]
    with pytest.raises(SpecError, match="should"):
        env.step(action(0, 0))


@pytest.mark.parametrize("given", [3, 1.5, [1.5, 2.5]])
def test_without_an_action_space_actions_arrive_as_numbers_or_arrays(given: Any) -> None:
    env = SpaceEnv(BIT, None)  # type: ignore[arg-type]
    lanes = GymEnv([env], seed=0)
    lanes.reset()
    (observation, _), _ = lanes.step(action(given))
    (got,) = env.actions
    assert type(got) is (np.ndarray if isinstance(given, list) else type(given))
    assert np.asarray(got).tolist() == given
    assert observation["last_action"].tolist() == [given]


# Real environments: what was collected is what the environment does on its own


@pytest.mark.parametrize(
    "name", ["CartPole-v1", "Pendulum-v1", "Blackjack-v1", "HalfCheetah-v5", "ALE/Breakout-v5"]
)
def test_episodes_of_real_environments_can_be_replayed_by_hand(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo leaves a log where it runs
    env = gymnasium.make(name)
    sample = env.action_space.sample()
    batch = batch_of(env.action_space, [sample] * 2)
    trajectories = collect([gymnasium.make(name) for _ in range(2)], 2, lambda n: batch)
    for row in (one.shorten() for one in trajectories.unfold()):
        observation, _ = env.reset(seed=int(row.info["seed"][0]))
        for t in range(int(row.lengths[0])):
            found = {"": observation}
            observation, reward, terminated, *_ = env.step(sample)
            found["_"] = observation
            for prefix, shown in found.items():
                for key, value in flat_observation(env.observation_space, shown).items():
                    stored = row[prefix + key][0, t].numpy()
                    assert stored.dtype == value.dtype
                    np.testing.assert_array_equal(stored, value)
            assert row["_reward"][0, t] == np.float32(reward)  # type: ignore[arg-type]
            assert row["_terminated"][0, t] == terminated
        assert t == 19 or terminated
    env.close()


def test_no_old_gym_is_imported() -> None:
    assert "gym" not in sys.modules


class HalfRewards(GymEnv):
    """A subclass that changes what a step returns."""

    def _step_lanes(self, lanes: Sequence[int], actions: Mapping[str, Any]) -> Any:
        rewards, *flags = super()._step_lanes(lanes, actions)
        return [reward / 2 for reward in rewards], *flags


def test_a_subclass_may_change_what_a_step_returns() -> None:
    rewards = []
    for kind in (GymEnv, HalfRewards):
        env = kind([CountingEnv() for _ in range(2)], seed=0)
        env.reset()
        (stepped, _), _ = env.step(DictTensor({"action": torch.zeros(2, dtype=torch.int64)}))
        rewards.append(stepped["reward"])
    assert rewards[0].all()
    assert torch.equal(rewards[1], rewards[0] / 2)
