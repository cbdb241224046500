"""``VariBadWrapper``, several episodes on one task as one, and ``make_env``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import OrderEnforcing, TimeLimit
from hypothesis import given
from hypothesis import strategies as st

from rlpool import (
    SpecError,
    UsageError,
    VariBadWrapper,
    WorkerStartupError,
    make_env,
    make_parallel_env,
)

from support.envs import CountingEnv, ValueEnv
from support.meta import DRAWING, DrawnTaskEnv, OldGymEnv, RaggedTaskEnv, TaskEnv, TaskFirstEnv

ZERO = np.zeros(2, np.float32)


def run(env: Any, **reset: Any) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """Return the first observation and the results of all steps of a trial."""
    observation, _ = env.reset(**reset)
    results = [env.step(ZERO)]
    while not (results[-1][2] or results[-1][3]):
        assert len(results) < env.horizon_bamdp
        results.append(env.step(ZERO))
    return observation.tolist(), results


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.booleans())
def test_a_trial_is_several_episodes_on_one_task(
    length: int, limit: int, n_episodes: int, oracle: bool, show_start: bool
) -> None:
    def observed(t: int, flag: bool) -> list[float]:
        described = [task, -task] if oracle else []
        return [t, task, *described, *([flag] if n_episodes > 1 else [])]

    env = VariBadWrapper(TaskEnv(length, limit), n_episodes, oracle, show_start=show_start)
    assert (env.horizon_bamdp, env.done_mdp) == (n_episodes * limit, True)
    n_steps = min(length, limit)
    for task in (4, 2):  # nothing is kept from an earlier trial
        first, results = run(env, task=task)
        assert first == observed(0, False)
        assert len(results) == n_episodes * n_steps
        for number, (observation, reward, *flags, info) in enumerate(results, 1):
            t = (number - 1) % n_steps + 1
            is_end, is_last = t == n_steps, number == len(results)
            begins = is_end and not is_last
            # The last observation of an episode has the flag; the next one starts a new episode.
            shown = observed(0, False) if begins and show_start else observed(t, is_end)
            assert observation.tolist() == shown
            assert env.observation_space.contains(observation)
            # Actions of 0 are in the middle of [-2, 4], which is 1 on both dimensions.
            assert reward == 10 * task + t + 0.5
            assert flags == [is_last and length <= limit, is_last and limit <= length]
            added = {"start_state": observed(0, False)} if begins else {}
            if begins and show_start:
                added["final_obs"] = observed(t, True)
            assert info.pop("done_mdp") == is_end
            assert {key: value.tolist() for key, value in info.items()} == added
        assert (env.step_count_bamdp, env.episode_count) == (len(results), n_episodes)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (spaces.Box(-2.0, 4.0, (2,), np.float32), [[-2, 4], [1, 2.5], [-2, 4]]),
        (spaces.Box(-0.1, 0.3, (2,), np.float64), None),  # -0.1 + 2 * 0.2 > 0.3
        (spaces.Box(0, 10, (2,), np.int64), [[0, 10], [5, 8], [0, 10]]),  # rounded
    ],
)
def test_actions_are_clipped_and_scaled_to_the_space(space: spaces.Box, expected: Any) -> None:
    inner = TaskEnv(limit=1000)
    inner.action_space = space
    env = VariBadWrapper(inner, 1)
    assert (env.action_space.low.min(), env.action_space.high.max()) == (-1.0, 1.0)
    env.reset(task=0)
    for action in ([-1.0, 1.0], [0.0, 0.5], [-7.0, 7.0]):
        env.step(np.array(action, np.float32))
    assert expected is None or [a.tolist() for a in inner.actions] == expected
    for action in np.random.default_rng(0).uniform(-1.5, 1.5, (200, 2)):
        env.step(action)
    assert all(space.contains(action) for action in inner.actions)


class TakingEnv(TaskEnv):
    """Environment that pops its settings from the options."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        result = super().reset(seed=seed, options=copy.deepcopy(options))
        del options["wind"]
        return result


def test_the_task_is_an_argument_or_option_and_every_episode_gets_the_other_options() -> None:
    env = VariBadWrapper(TakingEnv(length=2), 3)
    assert env.reset(options={"task": 5, "wind": 3}, task=2)[0].tolist() == [0, 2, 0]
    env.unwrapped.calls.clear()
    first, results = run(env, options={"task": 5, "wind": 3})
    assert first == [0, 5, 0]
    assert [result[2:4] for result in results] == [(False, False)] * 5 + [(True, False)]
    resets = [call for call in env.unwrapped.calls if call[0] == "reset"]
    assert resets == [("reset", None, {"wind": 3})] * 3


def rows_of(env: Any, **reset: Any) -> list[Any]:
    """Return the observations of a trial, from the first to the last."""
    first, results = run(env, **reset)
    return [first, *(r[0].tolist() for r in results)]


@pytest.mark.parametrize("make", DRAWING)
def test_a_trial_depends_on_nothing_but_its_seed_and_task(make: Callable[[], Any]) -> None:
    for task in (5, None):
        fresh, env = VariBadWrapper(make(), 2), VariBadWrapper(make(), 2)
        expected = rows_of(fresh, seed=3, task=task)
        calls = [call[0] for call in fresh.get_wrapper_attr("calls")]
        assert calls == ["reset_task", "reset", "reset"]
        for before in (4, None, 1):
            assert rows_of(env, seed=8, task=before) != expected
            assert rows_of(env, seed=3, task=task) == expected


def test_reset_does_not_repeat_the_draws_of_a_task() -> None:
    env = VariBadWrapper(DrawnTaskEnv(), 2)
    env.reset(seed=3)
    assert env.unwrapped.task != 10 * sum(np.random.default_rng(3).random(4))


def test_an_oracle_sees_a_task_that_is_assigned_later() -> None:
    env = VariBadWrapper(TaskFirstEnv(), 2, oracle=True)
    assert env.reset(seed=1, task=4)[0][1:].tolist() == [4, 4, -4, 0]


def test_a_legacy_environment_works() -> None:
    env = VariBadWrapper(OldGymEnv(TaskEnv(limit=None), 2), 2, oracle=True)
    first, results = run(env, task=3, seed=7)
    assert (env.horizon_bamdp, env.n_tasks) == (4, 7)
    expected = [[t, 3, 3, -3, flag] for t, flag in ((0, 0), (1, 0), (2, 1), (1, 0), (2, 1))]
    assert [first, *(r[0].tolist() for r in results)] == expected
    # It cannot report truncation itself, so the wrapper enforces its limit.
    assert results[-1][2:4] == (False, True)


@pytest.mark.parametrize(
    ("inner_limit", "outer_limit", "attributes"),
    [
        (9, 4, {}),
        (None, None, {"_max_episode_steps": 4}),
    ],
)
def test_the_smallest_time_limit_is_found(
    inner_limit: Any, outer_limit: Any, attributes: dict[str, Any]
) -> None:
    inner: Any = TaskEnv(limit=inner_limit)
    vars(inner).update(attributes)
    env = VariBadWrapper(TimeLimit(inner, outer_limit) if outer_limit else inner, 2)
    assert (env.horizon_bamdp, len(run(env, task=0)[1])) == (8, 8)


def test_the_environments_task_attributes_are_accessible() -> None:
    env = VariBadWrapper(OrderEnforcing(TaskEnv()), 2)
    env.reset_task(4)
    assert (env.n_tasks, env.get_all_task_idx()) == (7, list(range(7)))
    assert env.get_current_task().tolist() == [4, -4]
    taskless = make_env("CartPole-v1", 2)
    assert taskless.action_space == spaces.Discrete(2)
    assert (taskless.n_tasks, taskless.get_all_task_idx()) == (None, None)


# make_env and make_parallel_env ----------------------------------------------------------------


def test_ids_classes_and_functions_make_environments() -> None:
    env = make_env("support.meta:Ragged-v0", 3, limit=5, noise=1.0)
    assert isinstance(env.unwrapped, RaggedTaskEnv)
    assert (env.horizon_bamdp, env.unwrapped.noise) == (15, 1.0)
    assert make_env("CartPole-v1", 2).horizon_bamdp == 1000
    assert make_env("CartPole-v1", 2, max_episode_steps=7).horizon_bamdp == 14
    assert make_env(TaskEnv, 2, oracle=True, limit=4).observation_space.shape == (5,)


@pytest.mark.parametrize("make", [RaggedTaskEnv, DRAWING[-1]])
def test_the_seed_determines_environment_and_action_space(make: Callable[[], Any]) -> None:
    def beginning(seed: int | None) -> list[Any]:
        env = make_env(make, 2, seed)
        return [env.reset()[0].tolist(), env.action_space.sample().tolist()]

    assert beginning(3) == beginning(3)
    assert beginning(3) != beginning(4)
    assert beginning(2**62 + 1) != beginning(2**62 + 3)
    assert beginning(None) != beginning(None)


# Refusals ----------------------------------------------------------------------------------------


def stepped(*actions: Any) -> Callable[[], Any]:
    def use() -> None:
        env = VariBadWrapper(TaskEnv(limit=1), 1)
        if actions:
            env.reset(task=0)
        for action in actions or [ZERO]:
            env.step(action)

    return use


def wraps(env: Any, episodes: Any = 2, oracle: bool = False) -> Callable[[], Any]:
    return lambda: VariBadWrapper(env, episodes, oracle)


IMAGES = TimeLimit(ValueEnv([0], spaces.Discrete(3)), 3)
TASKLESS = TimeLimit(CountingEnv(), 3)

REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (stepped(), UsageError, "reset"),
    (stepped(ZERO, ZERO), UsageError, "reset"),
    (stepped(0.5), SpecError, "action"),
    (lambda: VariBadWrapper(TASKLESS, 1).reset(task=1), UsageError, "reset_task"),
    (wraps(TaskEnv(), episodes=0), SpecError, "episodes_per_task"),
    (wraps(TaskEnv(limit=None)), SpecError, "time limit"),
    (wraps(TaskEnv(bounds=(-np.inf, 1.0))), SpecError, "bounds"),
    (wraps(IMAGES), SpecError, "vectors"),
    (wraps(TASKLESS, 1, oracle=True), SpecError, "oracle"),
    (wraps(TaskEnv), SpecError, "VariBadWrapper got"),
    (lambda: make_env(None, 2), SpecError, "env_id"),
    (lambda: make_env(TaskEnv(), 2), SpecError, "env_id"),
    (lambda: make_env(TaskEnv, 2, seed=-1), SpecError, "seed"),
    (lambda: make_parallel_env(lambda: 3, 2, 1), WorkerStartupError, "env_id returned"),
    (lambda: make_parallel_env(TaskEnv, 2, "all"), SpecError, "n_workers"),
]


@pytest.mark.parametrize(("call", "error", "named"), REFUSED)
def test_invalid_input_is_named(
    call: Callable[[], Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        call()
