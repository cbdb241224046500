"""Environments of two protocols as the only lane of the step loop."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.wrappers import TimeLimit

from rlpool import AgentError, AgentSpecError, Batcher, EnvError, EnvSpecError
from rlpool.envs.one_env import OneEnv
from rlpool.pool.acting import ActionChooser
from rlpool.pool.transitions import EpisodeParts, Transitions

from support.acting_envs import (
    ActingEnv,
    DuckEnv,
    NoisyEnv,
    OldDuckEnv,
    ResetSeededEnv,
    ScriptedEnv,
    SeededEnv,
    TypedActingEnv,
    actions,
    states,
)
from support.envs import AncestorCountingEnv, CountingEnv, SpaceEnv

EpisodeOf = Callable[[], Transitions]


@contextmanager
def episodes_of(
    env: Any, policy: Any = None, n_timesteps: int = 4, seed: int = 0, **options: Any
) -> Iterator[EpisodeOf]:
    """A function that runs one episode through the step loop, in this process."""
    made = OneEnv(env, **options)
    batcher = Batcher(
        n_timesteps,
        create_env=lambda seed: made,
        create_agent=lambda: ActionChooser(made, policy, options.get("dtypes")),
        n_threads=0,
        seeds=seed,
    )

    def run() -> Transitions:
        batcher.reset()
        parts = EpisodeParts()
        while not batcher.all_stopped:
            batcher.execute()
            window = batcher.get()
            assert window is not None
            parts.add(window, 0, is_last=bool(window["_done"].any()))
        return parts.joined()

    with batcher:
        yield run


def episode_of(env: Any, policy: Any = None, **options: Any) -> Transitions:
    with episodes_of(env, policy, **options) as run:
        return run()


def assert_same(episode: Any, expected: Any) -> None:
    for array, wanted in zip(episode, expected, strict=False):
        assert array.dtype == wanted.dtype
        np.testing.assert_array_equal(array, wanted)


# The pool's own protocol ------------------------------------------------------------------------


@pytest.mark.parametrize("n_timesteps", [1, 3, 10, 64])
@pytest.mark.parametrize("length", [1, 2, 10])
def test_an_episode_is_what_the_environment_did(length: int, n_timesteps: int) -> None:
    with episodes_of(ActingEnv(length, number=7), n_timesteps=n_timesteps) as run:
        for n_resets in (1, 2, 3):
            episode = run()
            assert_same(episode, ActingEnv.expected(length, n_resets, number=7))
            assert not episode.truncated.any()


def test_an_environment_sees_one_reset_and_its_own_actions_per_episode() -> None:
    env = ActingEnv(3)
    with episodes_of(env) as run:
        run()
        assert env.calls == ["reset", 10, 11, 12]
        run()
        assert env.calls == ["reset", 10, 11, 12, "reset", 20, 21, 22]


def test_the_very_action_object_goes_back_to_the_environment() -> None:
    given = []

    class Env(ActingEnv):
        def step(self, action: Any) -> tuple[Any, Any, Any, Any]:
            given.append(action)
            return mine[len(given)], *super().step(0)[1:]

        def reset(self) -> tuple[Any, Any]:
            return super().reset()[0], mine[0]

    mine = [np.array([k, k + 0.5]) for k in range(4)]
    episode = episode_of(Env(3))
    assert all(a is b for a, b in zip(given, mine, strict=False))
    np.testing.assert_array_equal(episode.action, mine[1:])


def test_the_action_of_a_reset_may_be_anything() -> None:
    episode = episode_of(actions(None, 0.5, 1.5))
    np.testing.assert_array_equal(episode.action, [0.5, 1.5])


def test_an_action_array_that_is_updated_in_place_is_copied() -> None:
    class Env(ActingEnv):
        def reset(self) -> tuple[Any, Any]:
            self.action = np.zeros(2)
            return super().reset()[0], self.action

        def step(self, action: Any) -> tuple[Any, Any, Any, Any]:
            assert action is self.action
            self.action += 1
            return self.action, *super().step(0)[1:]

    np.testing.assert_array_equal(episode_of(Env(3)).action, [[1, 1], [2, 2], [3, 3]])


VALUES = {
    "float64": [np.array([k, k / 3]) for k in range(3)],
    "float32": [np.array([k, k / 3], np.float32) for k in range(3)],
    "float16": [np.array([[k]], np.float16) for k in range(3)],
    "uint8": [np.full((2, 3), k, np.uint8) for k in range(3)],
    "uint16": [np.array([k], np.uint16) for k in range(3)],
    "int32": [np.array([k], np.int32) for k in range(3)],
    "bool": [np.array([k > 1, True]) for k in range(3)],
    "a float": [0.1, 0.2, 0.3],
    "an int": [1, 2, 3],
    "a NumPy number": [np.float32(0.1), np.float32(0.2), np.float32(0.3)],
    "a list": [[k, k / 3] for k in range(3)],
    "a tuple": [(k, k + 1) for k in range(3)],
    "nested lists": [[[k, 1.0], [k, 2.0]] for k in range(3)],
    "no elements": [np.zeros((0, 2))] * 3,
}


@pytest.mark.parametrize("kind", VALUES)
def test_states_keep_shape_and_dtype(kind: str) -> None:
    values = VALUES[kind]
    episode = episode_of(states(*values))
    assert_same((episode.state, episode.next_state), (np.array(values[:2]), np.array(values[1:])))


@pytest.mark.parametrize("kind", VALUES)
def test_actions_keep_shape_and_dtype(kind: str) -> None:
    values = VALUES[kind]
    assert_same((episode_of(actions(*values)).action,), (np.array(values[1:]),))


def test_tensors_are_stored_as_arrays() -> None:
    values = [torch.full((2,), float(k), requires_grad=True) for k in range(3)]
    steps = [
        (torch.tensor(k), v, torch.tensor(0.5), torch.tensor(k == 2)) for k, v in enumerate(values)
    ]
    episode = episode_of(ScriptedEnv((values[0], None), steps[1:]))
    assert_same(
        episode,
        (
            np.array([[0, 0], [1, 1]], np.float32),
            np.array([1, 2]),
            np.array([[1, 1], [2, 2]], np.float32),
            np.array([0.5, 0.5], np.float32),
            np.array([False, True]),
        ),
    )


def test_states_of_several_parts_become_one_array_per_part() -> None:
    values = [{"image": np.full((2, 2), k, np.uint8), "pose": ([k, 0.5], k)} for k in range(3)]
    episode = episode_of(states(*values))
    assert {key: (a.shape, a.dtype.name) for key, a in episode.state.items()} == {
        "image": ((2, 2, 2), "uint8"),
        "pose/0": ((2, 2), "float64"),
        "pose/1": ((2,), "int64"),
    }
    assert episode.next_state["pose/1"].tolist() == [1, 2]
    assert episode.state["pose/1"].tolist() == [0, 1]


def test_actions_of_several_parts_become_one_array_per_part() -> None:
    values = [(np.zeros(3) + k, k) for k in range(3)]
    episode = episode_of(actions(*values))
    assert episode.action["1"].tolist() == [1, 2]
    assert episode.action["0"].shape == (2, 3)


def test_ints_at_first_and_floats_then_are_floats() -> None:
    episode = episode_of(states([0, 0], [0.5, 1.0], [1, 1], np.array([2, 2], np.int32)))
    assert_same((episode.state,), (np.array([[0, 0], [0.5, 1], [1, 1]]),))
    assert episode.next_state[-1].tolist() == [2, 2]


def test_rewards_are_float32() -> None:
    env = ScriptedEnv((0.0, 0), [(0, 0.0, 1, False), (0, 0.0, 1 / 3, False), (0, 0.0, True, True)])
    assert episode_of(env).reward.dtype == np.float32
    assert episode_of(env).reward.tolist() == [1.0, np.float32(1 / 3), 1.0]


def test_dtypes_can_be_chosen() -> None:
    dtypes = {"state": np.dtype(np.float64), "action": np.dtype(np.float64)}
    episode = episode_of(states(*VALUES["int32"]), dtypes=dtypes)
    assert_same((episode.state, episode.action), (np.array([[0.0], [1.0]]), np.zeros(2)))


# What does not fit ------------------------------------------------------------------------------

DONE = (0, np.zeros(4), 0.0, True)
GOOD = (0, np.zeros(4), 0.0, False)


def refused(
    env: Any, policy: Any = None, kind: type[Exception] = EnvSpecError, **options: Any
) -> str:
    with episodes_of(env, policy, **options) as run, pytest.raises(kind) as caught:
        run()
    return str(caught.value)


@pytest.mark.parametrize(
    ("result", "named"),
    [
        (np.zeros(4), "ndarray of shape [4]"),
        (None, "NoneType"),
        ((np.zeros(4), 0, {}), "a tuple of 3"),
        ([np.zeros(4), 0], "list"),
    ],
)
def test_a_reset_of_neither_protocol_is_refused_with_both(result: Any, named: str) -> None:
    message = refused(ScriptedEnv(result, [DONE]))
    assert named in message
    assert "(state, action) from reset()" in message
    assert "(observation, info)" in message
    assert "env.reset" in message


@pytest.mark.parametrize("steps", [[(0, 1)], [GOOD, (0, 1)]])
def test_a_step_that_does_not_return_four_values_is_refused(steps: list[Any]) -> None:
    message = refused(ScriptedEnv((np.zeros(4), 0), steps))
    assert "(action, next_state, reward, done)" in message
    assert "a tuple of 2" in message
    assert f"step {len(steps) - 1}" in message


def test_a_gymnasium_reset_with_another_step_is_refused() -> None:
    env = DuckEnv()
    env.step = lambda action: (0, 1, 2)  # type: ignore[method-assign, assignment, return-value]
    assert "(0, 1, 2)" not in (message := refused(gymnasium_like(env)))
    assert "five values" in message
    assert "a tuple of 3" in message


def gymnasium_like(env: Any) -> Any:
    """The environment with a ``reset`` that takes all that Gymnasium's takes."""

    class Env(CountingEnv):
        observation_space = spaces.Box(-9, 9, (2,), np.float64)
        action_space = env.action_space

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return env.reset()

        def step(self, action: Any) -> Any:
            return env.step(action)

    return Env()


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (states(np.zeros(4), np.zeros(5)), ("state", "[4]", "[5]")),
        (states(np.zeros(4), np.zeros(4), np.zeros(5)), ("state", "[4]", "[5]")),
        (states({"a": 1}, {"b": 1}), ("state", "'a'", "'b'")),
        (states({"a": 1}, {"a": 1}, {"b": 1}), ("state", "'a'", "'b'")),
        (states((1, [1, 2]), [1, 2]), ("state", "structure")),
        (states(1, 1, 1.5), ("state", "int64", "float64")),
        (states("up", "down"), ("state", "str")),
        (states(None, None), ("state", "NoneType")),
        (actions(0, 0, [0, 1]), ("action", "[2]", "[]")),
        (actions(0, "left"), ("action", "str")),
        (ScriptedEnv((0.0, 0), [(0, 0.0, 0.0, "no")]), ("done", "'no'")),
        (ScriptedEnv((0.0, 0), [(0, 0.0, 0.0, [False])]), ("done", "[False]")),
        (ScriptedEnv((0.0, 0), [(0, 0.0, 0.0, float("nan"))]), ("done", "nan")),
        (ScriptedEnv((0.0, 0), [(0, 0.0, 0.0, None)]), ("done", "None")),
        (ScriptedEnv((0.0, 0), [(0, 0.0, 0.0, 0.5)]), ("done", "0.5")),
        (ScriptedEnv((0.0, 0), [(0, 0.0, 1e39, False)]), ("reward", "1e+39", "lane 0, episode 0")),
        (ScriptedEnv((0.0, 0), [(0, 0.0, None, False)]), ("reward", "None")),
        (ScriptedEnv((0.0, 0), [(0, 0.0, [1.0], False)]), ("reward", "[1.0]")),
    ],
)
def test_values_that_do_not_fit_are_refused(env: Any, words: tuple[str, ...]) -> None:
    message = refused(env)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("step", [0, 1, 2])
def test_an_exception_says_where(step: int) -> None:
    env = ScriptedEnv((0.0, 0), [(0, 0.0, 0.0, False)] * step + [KeyError("goal")])
    message = refused(env, kind=EnvError)
    assert "env.step raised KeyError: 'goal'" in message
    assert f"step {step}," in message


def test_a_first_reset_that_fails_is_told_once_and_called_once() -> None:
    env = ScriptedEnv(KeyError("goal"), [DONE])
    with episodes_of(env) as run:
        with pytest.raises(EnvError, match=re.escape("env.reset raised KeyError: 'goal'")):
            run()
        assert env.n_resets == 1
        env.result = (np.zeros(4), 0)
        assert run().done.tolist() == [True]
        assert env.n_resets == 2


# Which protocol it is ---------------------------------------------------------------------------


def test_a_gymnasium_environment_is_known_by_its_type() -> None:
    episode = episode_of(
        CountingEnv(length=3, ends="truncated"), policy=lambda state: int(state[0])
    )
    assert episode.state[:, 0].tolist() == [0, 1, 2]
    assert episode.next_state[:, 0].tolist() == [1, 2, 3]
    assert episode.action.tolist() == [0, 1, 2]
    assert episode.reward.tolist() == [1, 2, 3]
    assert episode.done.tolist() == episode.truncated.tolist() == [False, False, True]


@pytest.mark.parametrize("kind", [DuckEnv, OldDuckEnv])
def test_an_environment_that_behaves_like_gymnasiums_is_one(kind: type[DuckEnv]) -> None:
    env = kind()
    with episodes_of(env) as run:
        for _ in range(2):
            episode = run()
            assert episode.state[:, 0].tolist() == [0, 1, 2]
            assert episode.next_state[:, 1].tolist() == episode.action.tolist()
            assert episode.action.dtype == np.int64
            assert episode.done.tolist() == [False, False, True]
    assert env.n_resets == 2


def test_an_environment_of_gymnasiums_type_may_choose_its_own_actions() -> None:
    assert_same(episode_of(TypedActingEnv(4)), ActingEnv.expected(4))


def test_a_termination_is_no_truncation() -> None:
    episode = episode_of(CountingEnv(length=2))
    assert episode.done.tolist() == [False, True]
    assert episode.truncated.tolist() == [False, False]


def test_an_environment_without_spaces_needs_a_policy() -> None:
    env = DuckEnv()
    del env.action_space
    message = refused(env, kind=AgentSpecError)
    assert "action_space" in message
    assert "policy" in message
    assert episode_of(env, policy=lambda state: 2.5).action.tolist() == [2.5] * 3


def test_an_old_environment_without_spaces_is_refused() -> None:
    assert "neither protocol" in refused(AncestorCountingEnv())


# Policies -----------------------------------------------------------------------------------------

NESTED = spaces.Dict(
    a=spaces.Box(-1, 1, (2,), np.float32), b=spaces.Tuple((spaces.Discrete(3),) * 2)
)


def test_a_policy_gets_states_as_the_environment_hands_them_out() -> None:
    seen = []
    env = SpaceEnv(NESTED, spaces.Discrete(2))
    episode_of(env, policy=lambda state: seen.append(state) or 0)
    assert len(seen) == 3
    for state, observation in zip(seen, env.observations[:3], strict=True):
        assert NESTED.contains(state)
        np.testing.assert_array_equal(state["a"], observation["a"])
        assert state["b"] == observation["b"]


def test_states_that_a_policy_keeps_do_not_change() -> None:
    seen = []
    episode_of(CountingEnv(3), policy=lambda state: seen.append(state) or 0)
    assert [state[0] for state in seen] == [0, 1, 2]


@pytest.mark.parametrize(
    ("space", "action", "dtype"),
    [
        (spaces.Discrete(4), 2, np.int64),
        (spaces.Discrete(4), torch.tensor(2), np.int64),
        (spaces.Discrete(4), np.int32(2), np.int64),
        (spaces.Box(-1, 1, (2,), np.float32), [0.5, 0.25], np.float32),
        (spaces.Box(-1, 1, (2,), np.float64), torch.tensor([0.5, 0.25]), np.float64),
        (spaces.MultiDiscrete([3, 3]), np.array([1, 2]), np.int64),
    ],
)
def test_actions_of_a_policy_take_the_form_of_the_space(
    space: Any, action: Any, dtype: Any
) -> None:
    env = SpaceEnv(spaces.Discrete(2), space)
    episode = episode_of(env, policy=lambda state: action)
    assert episode.action.dtype == dtype
    assert all(space.contains(given) for given in env.actions)
    assert len(env.actions) == 3
    for stored, given in zip(episode.action, env.actions, strict=True):
        np.testing.assert_array_equal(stored, np.asarray(action))
        np.testing.assert_array_equal(given, np.asarray(action))


def test_nested_actions_reach_the_environment() -> None:
    env = SpaceEnv(spaces.Discrete(2), NESTED)
    episode = episode_of(env)
    assert all(NESTED.contains(action) for action in env.actions)
    assert episode.action["b/1"].tolist() == [action["b"][1] for action in env.actions]


@pytest.mark.parametrize("action", [[1, 2], 0.5, None])
def test_actions_that_do_not_fit_the_space_are_refused(action: Any) -> None:
    assert "action" in refused(CountingEnv(), lambda state: action, AgentSpecError)


def test_an_exception_of_the_policy_is_told_as_such() -> None:
    assert "ZeroDivisionError" in refused(CountingEnv(), lambda state: 1 / 0, AgentError)


# Seeds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SeededEnv, ResetSeededEnv])
def test_seeds_reach_environments_that_take_them(kind: type[SeededEnv]) -> None:
    def data(first_seed: int, seed: int) -> list[Any]:
        with episodes_of(kind(), first_seed=first_seed, seed=seed) as run:
            return [run().state.tolist() for _ in range(2)]

    assert data(3, 0) == data(3, 0)
    assert data(3, 0)[0] != data(3, 0)[1]
    assert data(3, 0)[0] != data(4, 0)[0]
    assert data(3, 0)[1] != data(3, 1)[1]


def test_the_first_episode_has_the_first_seed() -> None:
    env = ResetSeededEnv()
    episode_of(env, first_seed=1234)
    assert env.seeds == [1234]


@pytest.mark.parametrize("kind", [SeededEnv, ResetSeededEnv])
def test_every_episode_has_a_seed_of_its_own_below_2_to_the_31(kind: type[SeededEnv]) -> None:
    env = kind()
    with episodes_of(env, first_seed=2**31 - 5) as run:
        for _ in range(8):
            run()
    assert env.seeds[0] == 2**31 - 5
    assert len(set(env.seeds)) == 8
    assert all(0 <= seed < 2**31 for seed in env.seeds)


def test_sampled_actions_follow_the_seed_of_the_episode() -> None:
    def sampled(first_seed: int) -> list[Any]:
        env = SpaceEnv(spaces.Discrete(2), spaces.Box(0, 1, (3,)))
        with episodes_of(env, first_seed=first_seed) as run:
            return [run().action.tolist() for _ in range(2)]

    assert sampled(3) == sampled(3)
    assert sampled(3)[0] != sampled(3)[1]
    assert sampled(3) != sampled(4)


def test_sampled_actions_are_not_the_noise_of_the_environment() -> None:
    class Env(SpaceEnv):
        def observe(self) -> Any:
            return self.np_random.random(3).astype(np.float32)

    env = Env(spaces.Box(0, 1, (3,)), spaces.Box(0, 1, (3,)))
    episode = episode_of(env, first_seed=3)
    assert not np.isin(episode.action, episode.state).any()


def test_the_generators_of_the_process_are_seeded_with_each_episode_where_they_may_be() -> None:
    def data() -> list[Any]:
        with episodes_of(NoisyEnv(), first_seed=5, owns_process=True) as run:
            return [run().state.tolist() for _ in range(2)]

    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        first = data()
        random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
        assert data() == first
        assert first[0] != first[1]
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])  # noqa: NPY002
        torch.set_rng_state(kept[2])


def test_the_generators_of_the_caller_are_left_alone() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    episode_of(ActingEnv(), first_seed=5)
    episode_of(CountingEnv(), first_seed=5)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def test_an_environment_is_closed_if_it_can_be() -> None:
    env = CountingEnv()
    episode_of(env)
    assert env.is_closed


class _OldEnv(gymnasium.Env[Any, Any]):
    """Old, without spaces, with a default of its own for ``env_info``; draws by former names."""

    def seed(self, seed: Any = None) -> None:
        self.np_random, _ = seeding.np_random(seed)

    def reset(self, env_info: Any = {"id": 8}) -> Any:  # type: ignore[override]  # noqa: B006
        self.state = {"id": env_info["id"], "x": self.np_random.rand()}  # type: ignore[attr-defined]
        return self.state

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:  # type: ignore[override]
        return self.state, float(action), action == 2, {}


@pytest.mark.parametrize("limit", [None, 2])
def test_an_old_environment_without_spaces_runs_if_it_is_a_gymnasium_env(limit: Any) -> None:
    env = _OldEnv() if limit is None else TimeLimit(_OldEnv(), limit)
    steps = iter(range(10))
    episode = episode_of(env, lambda state: next(steps))
    assert episode.reward.tolist() == [0, 1, 2][:limit]
    assert episode.state["id"].tolist() == [8, 8, 8][:limit]
    assert len(set(episode.state["x"].tolist())) == 1
