"""Environments of two protocols as the only lane of the step loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlpool import AgentError, AgentSpecError, Batcher, DictTensor, EnvSpecError
from rlpool.envs.one_env import OneEnv
from rlpool.pool.runner import ActionChooser

from support.acting_envs import (
    ActingEnv,
    DuckEnv,
    ScriptedEnv,
    TypedActingEnv,
    actions,
    states,
)
from support.envs import CountingEnv, LegacyCountingEnv, SpaceEnv


class Transitions(NamedTuple):
    """An episode as arrays, or as dicts of arrays by part name."""

    state: Any
    action: Any
    next_state: Any
    reward: Any
    done: Any
    truncated: Any


def episodes_of(env: Any, policy: Any = None, n: int = 1, **options: Any) -> list[Transitions]:
    """Collect episodes by the step loop in this process."""
    made = OneEnv(env, **options)
    episodes = []
    with Batcher(
        4,
        create_env=lambda seed: made,
        create_agent=lambda: ActionChooser(made, policy),
        n_workers=0,
        seeds=0,
    ) as batcher:
        for _ in range(n):
            batcher.reset()
            windows = []
            while not batcher.all_stopped:
                batcher.execute()
                windows.append(batcher.get().flatten())
            episodes.append(transitions(DictTensor.cat(windows)))
    return episodes


def transitions(steps: DictTensor) -> Transitions:
    def part(name: str) -> Any:
        found = {k: t.numpy() for k, t in steps.items() if k.partition("/")[0] == name}
        return found.get(name, {k.removeprefix(f"{name}/"): a for k, a in found.items()})

    names = ("state", "_last_action", "_state", "_reward", "_done", "_truncated")
    return Transitions(*map(part, names))


def episode_of(env: Any, policy: Any = None) -> Transitions:
    (episode,) = episodes_of(env, policy)
    return episode


def assert_same(episode: Any, expected: Any) -> None:
    for array, wanted in zip(episode, expected, strict=False):
        assert array.dtype == wanted.dtype
        np.testing.assert_array_equal(array, wanted)


# The pool's own protocol


def test_the_environment_gets_its_own_action_object_and_a_copy_is_stored() -> None:
    class Env(ActingEnv):
        def reset(self) -> tuple[Any, Any]:
            self.action = np.zeros(2)
            return super().reset()[0], self.action

        def step(self, action: Any) -> tuple[Any, Any, Any, Any]:
            assert action is self.action
            self.action += 1
            return self.action, *super().step(0)[1:]

    np.testing.assert_array_equal(episode_of(Env(3)).action, [[1, 1], [2, 2], [3, 3]])
    # The action of a reset is not stored and may be anything.
    np.testing.assert_array_equal(episode_of(actions(None, 0.5, 1.5)).action, [0.5, 1.5])


VALUES: list[list[Any]] = [
    [np.array([k, k / 3]) for k in range(3)],
    [np.full((2, 3), k, np.uint8) for k in range(3)],
    [1, 2, 3],
    [[(k, 1.0), [k, 2.0]] for k in range(3)],
    [np.zeros((0, 2))] * 3,
]


@pytest.mark.parametrize("values", VALUES)
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


def test_nested_values_become_one_array_per_part() -> None:
    values = [{"image": np.full((2, 2), k, np.uint8), "pose": ([k, 0.5], k)} for k in range(3)]
    episode = episode_of(states(*values))
    assert episode.state.keys() == {"image", "pose/0", "pose/1"}
    expected = [np.full((2, 2), k, np.uint8) for k in range(2)], [[0, 0.5], [1, 0.5]], [0, 1]
    assert_same(episode.state.values(), map(np.array, expected))
    assert episode.next_state["pose/1"].tolist() == [1, 2]
    episode = episode_of(actions(*[(np.zeros(3) + k, k) for k in range(3)]))
    assert episode.action["1"].tolist() == [1, 2]
    assert episode.action["0"].shape == (2, 3)


# Invalid input

ZEROS = np.zeros(4)


def after_reset(*steps: Any) -> ScriptedEnv:
    return ScriptedEnv((ZEROS, 0), list(steps))


def broken() -> CountingEnv:
    env = CountingEnv()
    env.step = lambda action: (0, 1, 2)  # type: ignore[method-assign, assignment, return-value]
    return env


def without_actions() -> DuckEnv:
    env = DuckEnv()
    del env.action_space
    return env


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: episode_of(ScriptedEnv(ZEROS)), EnvSpecError, "env.reset"),
    (lambda: episode_of(LegacyCountingEnv()), EnvSpecError, "env.reset"),
    (lambda: episode_of(after_reset((0, ZEROS, 0.0, False), (0, 1))), EnvSpecError, "step 1"),
    (lambda: episode_of(broken()), EnvSpecError, "env.step"),
    (lambda: episode_of(states(ZEROS, ZEROS, np.zeros(5))), EnvSpecError, "'state'"),
    (lambda: episode_of(states({"a": 1}, {"b": 1})), EnvSpecError, "state/b"),
    (lambda: episode_of(states(1, 1, 1.5)), EnvSpecError, "'state'"),
    (lambda: episode_of(actions(0, 0, [0, 1])), EnvSpecError, "'action'"),
    (lambda: episode_of(after_reset((0, ZEROS, 0.0, None))), EnvSpecError, "'done'"),
    (lambda: episode_of(after_reset((0, ZEROS, 1e39, False))), EnvSpecError, "'reward'"),
    (lambda: episode_of(without_actions()), AgentSpecError, "action_space"),
    (lambda: episode_of(CountingEnv(), lambda state: [1, 2]), AgentSpecError, "action"),
    (lambda: episode_of(CountingEnv(), lambda state: 1 / 0), AgentError, "ZeroDivisionError"),
]


def test_invalid_input_is_refused() -> None:
    for call, error, named in REFUSED:
        with pytest.raises(error, match=named):
            call()


# Gymnasium's protocol


def test_an_environment_that_behaves_like_gymnasium_is_treated_as_such() -> None:
    env = DuckEnv()
    for episode in episodes_of(env, n=2):
        assert episode.state[:, 0].tolist() == [0, 1, 2]
        assert episode.next_state[:, 1].tolist() == episode.action.tolist()
        assert episode.action.dtype == np.int64
        assert episode.done.tolist() == [False, False, True]
    assert env.n_resets == 2


def test_a_gymnasium_env_subclass_may_choose_its_own_actions() -> None:
    assert_same(episode_of(TypedActingEnv(4)), ActingEnv.expected(4))


# Policies

NESTED = spaces.Dict(
    a=spaces.Box(-1, 1, (2,), np.float32), b=spaces.Tuple((spaces.Discrete(3),) * 2)
)


def test_a_policy_uses_the_environments_own_states_and_actions() -> None:
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
    ],
)
def test_a_policys_actions_are_converted_to_the_form_of_the_space(
    space: Any, action: Any, dtype: Any
) -> None:
    env = SpaceEnv(spaces.Discrete(2), space)
    episode = episode_of(env, policy=lambda state: action)
    assert episode.action.dtype == dtype
    for stored, given in zip(episode.action, env.actions, strict=True):
        assert space.contains(given)
        np.testing.assert_array_equal(stored, np.asarray(action))
        np.testing.assert_array_equal(given, np.asarray(action))


def test_a_policy_may_choose_any_number_without_an_action_space() -> None:
    assert episode_of(without_actions(), lambda state: 2.5).action.tolist() == [2.5] * 3


# Seeds


def test_sampled_actions_depend_on_the_seed_independently_of_the_environments_noise() -> None:
    class Env(SpaceEnv):
        def observe(self) -> Any:
            return self.np_random.random(3).astype(np.float32)

    def sampled(first_seed: int) -> list[Any]:
        env = Env(spaces.Box(0, 1, (3,)), spaces.Box(0, 1, (3,)))
        episodes = episodes_of(env, n=2, first_seed=first_seed)
        assert not any(np.isin(episode.action, episode.state).any() for episode in episodes)
        return [episode.action.tolist() for episode in episodes]

    assert sampled(3) == sampled(3)
    assert sampled(3)[0] != sampled(3)[1]
    assert sampled(3) != sampled(4)
