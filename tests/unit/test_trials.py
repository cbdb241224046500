"""``VariBadWrapper``: several episodes on one task as one."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from rlpool import SpecError, UsageError, VariBadWrapper

from support.envs import CountingEnv, ValueEnv
from support.meta import AncestorTaskEnv, RaggedTaskEnv, TaskEnv

ZERO = np.zeros(2, np.float32)


def run(env: Any, **reset: Any) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """The first observation and the results of all steps of a trial."""
    observation, _ = env.reset(**reset)
    results = [env.step(ZERO)]
    while not (results[-1][2] or results[-1][3]):
        assert len(results) < env.horizon_bamdp
        results.append(env.step(ZERO))
    return observation.tolist(), results


def test_a_trial_is_so_many_episodes_on_one_task() -> None:
    env = VariBadWrapper(TaskEnv(limit=3), 2)
    first, results = run(env, task=4)
    assert env.horizon_bamdp == 6
    assert first == [0, 4, 0]
    # The last observation of each episode has the flag; what follows it is the next episode's.
    assert [r[0].tolist() for r in results] == [
        [1, 4, 0],
        [2, 4, 0],
        [3, 4, 1],
        [1, 4, 0],
        [2, 4, 0],
        [3, 4, 1],
    ]
    assert [r[4]["done_mdp"] for r in results] == [False, False, True, False, False, True]
    assert [(r[2], r[3]) for r in results] == [(False, False)] * 5 + [(False, True)]
    assert results[2][4]["start_state"].tolist() == [0, 4, 0]
    assert [i for i, r in enumerate(results) if "start_state" in r[4]] == [2]
    # Actions of 0 are in the middle of [-2, 4], which is 1 on both dimensions.
    assert [r[1] for r in results] == [40 + t + 0.5 for t in (1, 2, 3, 1, 2, 3)]


@pytest.mark.parametrize(
    ("length", "limit", "ends"),
    [(2, 3, (True, False)), (9, 3, (False, True)), (3, 3, (True, True))],
)
def test_a_trial_ends_the_way_its_last_episode_ends(
    length: int, limit: int, ends: tuple[bool, bool]
) -> None:
    _, results = run(VariBadWrapper(TaskEnv(length=length, limit=limit), 3), task=0)
    assert [(r[2], r[3]) for r in results[:-1]] == [(False, False)] * (3 * min(length, limit) - 1)
    assert results[-1][2:4] == ends


def test_one_episode_per_task_changes_no_observation() -> None:
    env = VariBadWrapper(TaskEnv(limit=2), 1)
    first, results = run(env, task=1)
    assert env.observation_space == env.unwrapped.observation_space
    assert first == [0, 1]
    assert [r[0].tolist() for r in results] == [[1, 1], [2, 1]]
    assert "start_state" not in results[-1][4]


@pytest.mark.parametrize("episodes", [1, 2])
def test_an_oracle_sees_the_task_before_the_flag(episodes: int) -> None:
    env = VariBadWrapper(TaskEnv(limit=2), episodes, oracle=True)
    first, results = run(env, task=3)
    flag = [0] if episodes > 1 else []
    assert first == [0, 3, 3, -3, *flag]
    assert results[1][0].tolist() == [2, 3, 3, -3, *([1] if flag else [])]
    for observation in (np.array(first, np.float32), *(r[0] for r in results)):
        assert env.observation_space.contains(observation)


def test_counters_of_a_trial() -> None:
    env = VariBadWrapper(TaskEnv(limit=2), 2)
    assert env.done_mdp
    env.reset(task=0)
    seen = []
    for _ in range(4):
        env.step(ZERO)
        seen.append((env.step_count_bamdp, env.episode_count, env.done_mdp))
    assert seen == [(1, 0, False), (2, 1, True), (3, 1, False), (4, 2, True)]
    env.reset(task=0)
    assert (env.step_count_bamdp, env.episode_count, env.done_mdp) == (0, 0, False)


def test_actions_are_clipped_and_scaled() -> None:
    env = VariBadWrapper(TaskEnv(bounds=(-2.0, 4.0)), 1)
    assert env.action_space == spaces.Box(-1.0, 1.0, (2,), np.float32)
    env.reset(task=0)
    for action in ([-1.0, 1.0], [0.0, 0.5], [-7.0, 7.0]):
        env.step(np.array(action, np.float32))
    got = env.unwrapped.actions
    assert [a.tolist() for a in got] == [[-2, 4], [1, 2.5], [-2, 4]]
    assert all(a.dtype == np.float32 for a in got)


def test_scaled_actions_never_leave_the_space() -> None:
    inner = TaskEnv(limit=1000)
    inner.action_space = spaces.Box(-0.1, 0.3, (2,), np.float64)  # -0.1 + 2 * 0.2 > 0.3
    env = VariBadWrapper(inner, 1)
    env.reset(task=0)
    for action in np.random.default_rng(0).uniform(-1.5, 1.5, (200, 2)):
        env.step(action)
    assert all(inner.action_space.contains(action) for action in inner.actions)


def test_actions_of_whole_numbers_are_rounded() -> None:
    inner = TaskEnv()
    inner.action_space = spaces.Box(0, 10, (2,), np.int64)
    env = VariBadWrapper(inner, 1)
    assert env.action_space.dtype == np.float32
    env.reset(task=0)
    env.step(np.array([-1.0, 0.31]))
    assert inner.actions[0].tolist() == [0, 7]
    assert inner.actions[0].dtype == np.int64


def test_discrete_actions_pass_unchanged() -> None:
    env = VariBadWrapper(gymnasium.wrappers.TimeLimit(CountingEnv(length=9), 3), 2)
    env.reset()
    assert env.action_space == CountingEnv.action_space
    assert env.step(5)[0].tolist() == [1, 0, 0]
    assert env.n_tasks is None


def test_the_task_comes_as_an_argument_or_an_option() -> None:
    env = VariBadWrapper(TaskEnv(), 2)
    assert env.reset(options={"task": 5})[0].tolist() == [0, 5, 0]
    assert env.reset(options={"task": 5}, task=2)[0].tolist() == [0, 2, 0]


def test_other_options_reach_every_reset_of_the_trial() -> None:
    env = VariBadWrapper(TaskEnv(limit=1), 2)
    run(env, options={"task": 5, "wind": 3})
    resets = [call for call in env.unwrapped.calls if call[0] == "reset"]
    assert resets == [("reset", None, {"wind": 3})] * 2


def test_a_seed_determines_the_task_and_all_that_follows() -> None:
    def trial(seed: int) -> list[Any]:
        env = VariBadWrapper(RaggedTaskEnv(limit=6, noise=1.0), 3)
        env.reset(seed=99)  # what came before does not matter
        first, results = run(env, seed=seed)
        return [first, *(r[0].tolist() for r in results)]

    assert trial(1) == trial(1)
    assert trial(1) != trial(2)
    assert len({trial(seed)[0][1] for seed in range(40)}) == 7  # every task is drawn


def test_without_a_seed_the_next_trial_differs() -> None:
    env = VariBadWrapper(RaggedTaskEnv(limit=6, noise=1.0), 3)
    env.reset(seed=1)
    first = env.reset()[0].tolist()
    assert env.reset()[0].tolist() != first
    assert env.unwrapped.calls.count(("reset", 1, None)) == 1


def test_an_ancestors_environment_works() -> None:
    inner = AncestorTaskEnv()
    env = VariBadWrapper(inner, 2, oracle=True)
    first, results = run(env, task=3, seed=7)
    assert (env.horizon_bamdp, env.n_tasks) == (4, 5)
    assert inner.seeds == [7]
    assert first == [0, 3, 3, 0]
    assert [r[0].tolist() for r in results] == [
        [1, 3, 3, 0],
        [2, 3, 3, 1],
        [1, 3, 3, 0],
        [2, 3, 3, 1],
    ]
    # It has no way to say that its time ran out: its limit is kept for it.
    assert results[-1][2:4] == (False, True)
    assert env.observation_space.dtype == np.float64


@pytest.mark.parametrize("where", ["outside", "inside", "spec"])
def test_the_time_limit_is_found(where: str) -> None:
    inner: Any = TaskEnv(limit=None)
    if where == "outside":
        inner = gymnasium.wrappers.TimeLimit(inner, 4)
    elif where == "inside":
        inner._max_episode_steps = 4
    else:
        inner.spec = gymnasium.envs.registration.EnvSpec("Task-v0", max_episode_steps=4)
    assert VariBadWrapper(inner, 5).horizon_bamdp == 20


def test_the_smaller_of_two_limits_counts() -> None:
    env = VariBadWrapper(gymnasium.wrappers.TimeLimit(TaskEnv(limit=9), 2), 2)
    _, results = run(env, task=0)
    assert (env.horizon_bamdp, len(results)) == (4, 4)


def test_what_the_environment_knows_about_tasks_can_be_asked_for() -> None:
    env = VariBadWrapper(gymnasium.wrappers.OrderEnforcing(TaskEnv()), 2)
    env.reset_task(4)
    assert env.n_tasks == 7
    assert env.get_all_task_idx() == list(range(7))
    assert env.get_current_task().tolist() == [4, -4]


@pytest.mark.filterwarnings("ignore:.*different from the unwrapped version:UserWarning")
@pytest.mark.filterwarnings("ignore:.*Box observation space m.*imum value is:UserWarning")
def test_gymnasiums_checker_is_content() -> None:
    check_env(VariBadWrapper(RaggedTaskEnv(limit=6, noise=1.0), 2), skip_render_check=True)


def test_a_task_for_an_environment_without_tasks_is_refused() -> None:
    env = VariBadWrapper(gymnasium.wrappers.TimeLimit(CountingEnv(), 3), 2)
    with pytest.raises(UsageError, match=r"has no reset_task\(task\)"):
        env.reset(task=1)


def test_stepping_before_reset_and_after_the_end_is_refused() -> None:
    env = VariBadWrapper(TaskEnv(limit=1), 1)
    with pytest.raises(UsageError, match=r"call reset\(\) first"):
        env.step(ZERO)
    run(env, task=0)
    with pytest.raises(UsageError, match=r"call reset\(\) first"):
        env.step(ZERO)


def test_an_action_of_another_shape_is_refused() -> None:
    env = VariBadWrapper(TaskEnv(), 1)
    env.reset(task=0)
    with pytest.raises(SpecError, match=r"shape \[2\], got \[\]"):
        env.step(0.5)


@pytest.mark.parametrize(
    ("env", "episodes", "oracle", "message"),
    [
        pytest.param(TaskEnv(), 0, False, "episodes_per_task should be at least 1", id="none"),
        pytest.param(TaskEnv(), 1.5, False, "episodes_per_task should be", id="half a one"),
        pytest.param(TaskEnv(limit=None), 2, False, "no time limit", id="no limit"),
        pytest.param(TaskEnv(bounds=(-np.inf, 1.0)), 2, False, "cannot be scaled", id="unbounded"),
        pytest.param(
            gymnasium.wrappers.TimeLimit(ValueEnv([0], spaces.Discrete(3)), 3),
            2,
            False,
            "can only be appended to vectors",
            id="no vector",
        ),
        pytest.param(
            gymnasium.wrappers.TimeLimit(CountingEnv(), 3), 1, True, "no tasks to tell", id="oracle"
        ),
    ],
)
def test_what_cannot_be_wrapped_is_refused(
    env: Any, episodes: Any, oracle: bool, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        VariBadWrapper(env, episodes, oracle)
