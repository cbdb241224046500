"""Environments of two protocols as the only lane of the step loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlpool import AgentError, AgentSpecError, Batcher, DictTensor, EnvError, EnvSpecError
from rlpool.envs.one_env import OneEnv
from rlpool.pool.runner import ActionChooser

from support.acting_envs import (
    ActingEnv,
    DuckEnv,
    OldDuckEnv,
    ScriptedEnv,
    TypedActingEnv,
    actions,
    states,
)
from support.envs import COUNTING_SPACE, AncestorCountingEnv, CountingEnv, SpaceEnv, ValueEnv


class Transitions(NamedTuple):
    """An episode as arrays, or as dicts of arrays by the names of their parts."""

    state: Any
    action: Any
    next_state: Any
    reward: Any
    done: Any
    truncated: Any


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
        create_agent=lambda: ActionChooser(made, policy),
        n_threads=0,
        seeds=seed,
    )

    def run() -> Transitions:
        batcher.reset()
        windows = []
        while not batcher.all_stopped:
            batcher.execute()
            window = batcher.get()
            assert window is not None
            windows.append(window.flatten())
        steps = DictTensor.cat(windows)

        def part(name: str) -> Any:
            found = {k: t.numpy() for k, t in steps.items() if k.partition("/")[0] == name}
            return found.get(name, {k.removeprefix(f"{name}/"): a for k, a in found.items()})

        names = ("state", "_last_action", "_state", "_reward", "_done", "_truncated")
        return Transitions(*map(part, names))

    with batcher:
        yield run


def episode_of(env: Any, policy: Any = None, **options: Any) -> Transitions:
    with episodes_of(env, policy, **options) as run:
        return run()


def assert_same(episode: Any, expected: Any) -> None:
    for array, wanted in zip(episode, expected, strict=False):
        assert array.dtype == wanted.dtype
        np.testing.assert_array_equal(array, wanted)


# The pool's own protocol


def test_the_very_action_object_goes_back_to_the_environment_and_is_copied() -> None:
    class Env(ActingEnv):
        def reset(self) -> tuple[Any, Any]:
            self.action = np.zeros(2)
            return super().reset()[0], self.action

        def step(self, action: Any) -> tuple[Any, Any, Any, Any]:
            assert action is self.action
            self.action += 1
            return self.action, *super().step(0)[1:]

    np.testing.assert_array_equal(episode_of(Env(3)).action, [[1, 1], [2, 2], [3, 3]])
    # That of a reset is not stored and may be anything.
    np.testing.assert_array_equal(episode_of(actions(None, 0.5, 1.5)).action, [0.5, 1.5])


VALUES = {
    "float64": [np.array([k, k / 3]) for k in range(3)],
    "uint8": [np.full((2, 3), k, np.uint8) for k in range(3)],
    "uint16": [np.array([k], np.uint16) for k in range(3)],
    "bool": [np.array([k > 1, True]) for k in range(3)],
    "an int": [1, 2, 3],
    "a tuple": [(k, k + 1) for k in range(3)],
    "nested lists": [[[k, 1.0], [k, 2.0]] for k in range(3)],
    "no elements": [np.zeros((0, 2))] * 3,
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_states_and_actions_keep_shape_and_dtype(values: Any) -> None:
    episode = episode_of(states(*values))
    assert_same((episode.state, episode.next_state), (np.array(values[:2]), np.array(values[1:])))
    assert_same((episode_of(actions(*values)).action,), (np.array(values[1:]),))


def test_tensors_are_stored_as_arrays_and_rewards_as_float32() -> None:
    values = [torch.full((2,), float(k), requires_grad=True) for k in range(3)]
    steps = [(torch.tensor(k), values[k], torch.tensor(0.5), torch.tensor(k == 2)) for k in (1, 2)]
    expected = np.float32([[0, 0], [1, 1]]), np.array([1, 2]), np.float32([[1, 1], [2, 2]])
    expected += np.float32([0.5, 0.5]), np.array([False, True])
    assert_same(episode_of(ScriptedEnv((values[0], None), steps)), expected)
    env = ScriptedEnv((0.0, 0), [(0, 0.0, 1, False), (0, 0.0, 1 / 3, False), (0, 0.0, True, True)])
    assert episode_of(env).reward.tolist() == [1.0, np.float32(1 / 3), 1.0]


def test_values_of_several_parts_become_one_array_per_part() -> None:
    values = [{"image": np.full((2, 2), k, np.uint8), "pose": ([k, 0.5], k)} for k in range(3)]
    episode = episode_of(states(*values))
    assert {key: (a.shape, a.dtype.name) for key, a in episode.state.items()} == {
        "image": ((2, 2, 2), "uint8"),
        "pose/0": ((2, 2), "float64"),
        "pose/1": ((2,), "int64"),
    }
    assert episode.next_state["pose/1"].tolist() == [1, 2]
    assert episode.state["pose/1"].tolist() == [0, 1]
    episode = episode_of(actions(*[(np.zeros(3) + k, k) for k in range(3)]))
    assert episode.action["1"].tolist() == [1, 2]
    assert episode.action["0"].shape == (2, 3)


def test_dtypes_hold_ints_and_floats() -> None:
    episode = episode_of(states([0, 0], [0.5, 1.0], [1, 1], np.array([2, 2], np.int32)))
    assert_same((episode.state,), (np.array([[0, 0], [0.5, 1], [1, 1]]),))
    assert episode.next_state[-1].tolist() == [2, 2]


# What does not fit

DONE = (0, np.zeros(4), 0.0, True)
GOOD = (0, np.zeros(4), 0.0, False)


def refused(env: Any, policy: Any = None, kind: type[Exception] = EnvSpecError) -> str:
    with episodes_of(env, policy) as run, pytest.raises(kind) as caught:
        run()
    return str(caught.value)


def after_reset(*steps: Any) -> ScriptedEnv:
    return ScriptedEnv((np.zeros(4), 0), list(steps))


def gymnasium_but_for_its_step() -> CountingEnv:
    env = CountingEnv()
    env.step = lambda action: (0, 1, 2)  # type: ignore[method-assign, assignment, return-value]
    return env


BOTH = "(state, action) from reset()", "(observation, info)"
FOUR = "(action, next_state, reward, done)", "got 2"


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (ScriptedEnv(np.zeros(4), [DONE]), ("env.reset", "ndarray", *BOTH)),
        (ScriptedEnv((np.zeros(4), 0, {}), [DONE]), ("env.reset", "got 3", *BOTH)),
        (AncestorCountingEnv(), ("env.reset", "ndarray", *BOTH)),
        (after_reset((0, 1)), ("env.step", "step 0", *FOUR)),
        (after_reset(GOOD, (0, 1)), ("env.step", "step 1", *FOUR)),
        (gymnasium_but_for_its_step(), ("env.step", "five values", "got 3")),
        (ValueEnv([np.zeros(3)], COUNTING_SPACE), ("env.reset", "state", "[2]", "[3]")),
        (states(np.zeros(4), np.zeros(5)), ("state", "[4]", "[5]")),
        (states(np.zeros(4), np.zeros(4), np.zeros(5)), ("state", "[4]", "[5]")),
        (states({"a": 1}, {"b": 1}), ("state/a", "state/b")),
        (states((1, [1, 2]), [1, 2]), ("state", "structure")),
        (states(1, 1, 1.5), ("state", "int64", "float64")),
        (states("up", "down"), ("state", "str")),
        (actions(0, 0, [0, 1]), ("action", "[2]", "[]")),
        (actions(0, "left"), ("action", "str")),
        (after_reset((*GOOD[:3], None)), ("done", "None")),
        (after_reset((*GOOD[:2], 1e39, False)), ("reward", "1e+39", "lane 0, row 0")),
    ],
)
def test_what_does_not_fit_is_refused(env: Any, words: tuple[str, ...]) -> None:
    message = refused(env)
    assert all(word in message for word in words), message


def test_a_first_reset_that_fails_is_told_and_may_be_repeated() -> None:
    env = ScriptedEnv(KeyError("goal"), [DONE])
    with episodes_of(env) as run:
        with pytest.raises(EnvError, match="raised KeyError: 'goal'"):
            run()
        env.result = (np.zeros(4), 0)
        assert run().done.tolist() == [True]


# Gymnasium's protocol


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


# Policies

NESTED = spaces.Dict(
    a=spaces.Box(-1, 1, (2,), np.float32), b=spaces.Tuple((spaces.Discrete(3),) * 2)
)


def test_a_policy_gets_states_and_gives_actions_as_the_environment_has_them() -> None:
    seen = []
    env = SpaceEnv(NESTED, NESTED)
    episode = episode_of(env, policy=lambda state: seen.append(state) or state)
    assert len(seen) == 3
    for t, (state, observation) in enumerate(zip(seen, env.observations, strict=False)):
        assert NESTED.contains(state)
        assert NESTED.contains(env.actions[t])
        np.testing.assert_array_equal(state["a"], observation["a"])
        assert state["b"] == observation["b"] == env.actions[t]["b"]
        assert episode.action["b/1"][t] == state["b"][1]


@pytest.mark.parametrize(
    ("space", "action", "dtype"),
    [
        (spaces.Discrete(4), torch.tensor(2), np.int64),
        (spaces.Box(-1, 1, (2,), np.float32), [0.5, 0.25], np.float32),
        (spaces.MultiDiscrete([3, 3]), np.array([1, 2]), np.int64),
    ],
)
def test_actions_of_a_policy_take_the_form_of_the_space(
    space: Any, action: Any, dtype: Any
) -> None:
    env = SpaceEnv(spaces.Discrete(2), space)
    episode = episode_of(env, policy=lambda state: action)
    assert episode.action.dtype == dtype
    for stored, given in zip(episode.action, env.actions, strict=True):
        assert space.contains(given)
        np.testing.assert_array_equal(stored, np.asarray(action))
        np.testing.assert_array_equal(given, np.asarray(action))


def test_policies_that_do_not_fit_are_refused() -> None:
    for action in ([1, 2], 0.5, None):
        assert "action" in refused(CountingEnv(), lambda state, it=action: it, AgentSpecError)
    assert "ZeroDivisionError" in refused(CountingEnv(), lambda state: 1 / 0, AgentError)
    env = DuckEnv()
    del env.action_space
    message = refused(env, kind=AgentSpecError)
    assert "action_space" in message
    assert "policy" in message
    assert episode_of(env, policy=lambda state: 2.5).action.tolist() == [2.5] * 3


# Seeds


def test_sampled_actions_follow_the_seed_but_are_not_the_noise_of_the_environment() -> None:
    class Env(SpaceEnv):
        def observe(self) -> Any:
            return self.np_random.random(3).astype(np.float32)

    def sampled(first_seed: int) -> list[Any]:
        env = Env(spaces.Box(0, 1, (3,)), spaces.Box(0, 1, (3,)))
        with episodes_of(env, first_seed=first_seed) as run:
            episodes = [run() for _ in range(2)]
        assert not any(np.isin(episode.action, episode.state).any() for episode in episodes)
        return [episode.action.tolist() for episode in episodes]

    assert sampled(3) == sampled(3)
    assert sampled(3)[0] != sampled(3)[1]
    assert sampled(3) != sampled(4)
