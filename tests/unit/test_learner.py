"""``Learner`` and ``collect_rollouts_parallel``: rollouts with a task each."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlpool import (
    AGENT_ARCHS,
    AgentError,
    EnvError,
    GymEnv,
    Learner,
    SpecError,
    UsageError,
    VariBadWrapper,
    collect_rollouts_parallel,
    make_env,
)

from support.agents import StepCounter
from support.envs import CountingEnv, SpaceEnv
from support.meta import (
    CountingActor,
    MarkovActor,
    MemoryActor,
    Storage,
    TaskEnv,
    ragged_trials,
)

MEMORY, MARKOV, BOTH = AGENT_ARCHS.Memory, AGENT_ARCHS.Markov, AGENT_ARCHS.Memory_Markov
BOX = spaces.Box(-1.0, 1.0, (2,))


def lanes(n: int, make: Any = ragged_trials) -> GymEnv:
    """Return this many environments in parallel."""
    return GymEnv([make() for _ in range(n)])


def learner_of(
    agent: Any, arch: Any = MEMORY, env: Any = None, tasks: Any = None, **arguments: Any
) -> Learner:
    """Return a learner with a seed and a storage that keeps everything."""
    env = ragged_trials() if env is None else env
    return Learner(agent, Storage(), env, tasks, arch, **{"seed": 5, **arguments})


def episodes(learner: Learner, n_rollouts: int = 1, **arguments: Any) -> list[Any]:
    """Return the content of the storage after this many rollouts."""
    learner.collect_rollouts_parallel(n_rollouts, **arguments)
    return list(learner.policy_storage.episodes)


def tasks_of(learner: Learner, n_rollouts: int) -> list[int]:
    return [int(columns[0][0, 1]) for columns in episodes(learner, n_rollouts)]


# Collected data ------------------------------------------------------------------------------


def test_stored_arrays_do_not_share_memory() -> None:
    for one, other in itertools.combinations(episodes(learner_of(CountingActor()))[0], 2):
        assert not np.shares_memory(one, other)


def test_transitions_end_with_their_own_final_observation_under_autoreset() -> None:
    limit, n_lanes = 64, 3  # the second episode ends where a slot does

    def stored(show_start: bool) -> Any:
        make = functools.partial(make_env, TaskEnv, 3, show_start=show_start, limit=limit)
        return episodes(learner_of(CountingActor(), env=lanes(n_lanes, make), tasks=[2, 5]), 4)

    for expected, shown in zip(stored(False), stored(True), strict=True):
        starts = [0, limit, 2 * limit]
        assert (shown[0][starts, 0] == 0).all()
        assert (shown[0][:, 2] == 0).all()
        rest = np.setdiff1d(np.arange(3 * limit), starts)
        assert np.array_equal(shown[0][rest], expected[0][rest])
        for one, other in zip(shown[1:], expected[1:], strict=True):
            assert np.array_equal(one, other)


def test_dict_observations_and_actions_are_dicts_of_arrays_with_numbers_as_columns() -> None:
    observed = spaces.Dict({"image": spaces.Box(0, 255, (2, 2), np.uint8), "n": spaces.Discrete(4)})
    acted = spaces.Dict({"move": BOX, "jump": spaces.Discrete(2)})
    for arch, leading in ((MARKOV, ()), (MEMORY, (3,))):
        learner = learner_of(None, arch, SpaceEnv(observed, acted))
        learner.collect_rollouts_parallel(1, random_actions=True)
        storage = learner.policy_storage
        observation, action, *_ = (storage.samples or storage.episodes)[0]
        parts = {**observation, **action}
        shapes = {"image": (2, 2), "n": (1,), "move": (2,), "jump": (1,)}
        assert {key: part.shape for key, part in parts.items()} == {
            key: leading + shape for key, shape in shapes.items()
        }
        assert observation["image"].dtype == np.uint8


# Counts --------------------------------------------------------------------------------------


def test_one_call_of_the_agent_per_step_serves_all_environments() -> None:
    actor = MarkovActor(2)
    parallel = lanes(4, lambda: VariBadWrapper(TaskEnv(limit=5), 1))
    learner_of(actor, BOTH, batch_rows=1).collect_rollouts_parallel(8, parallel_env=parallel)
    assert actor.n_rows == [4] * 10


@pytest.mark.parametrize("prefix", ["", "_"])
def test_steps_and_rollouts_are_counted_if_the_learner_has_counters(prefix: str) -> None:
    """A learner as in the document, with a goal, and one without counters."""
    mine = SimpleNamespace(
        agent=StepCounter(), policy_storage=Storage(), agent_arch="memory", train_env=CountingEnv(3)
    )
    if prefix:
        vars(mine).update(_n_env_steps_total=0, _n_rollouts_total=0, n_env_steps_total=6)
    assert collect_rollouts_parallel(mine, 2) == 6
    assert collect_rollouts_parallel(mine, 1, random_actions=True) == 3
    assert vars(mine)[f"{prefix}n_env_steps_total"] == 9
    assert vars(mine)[f"{prefix}n_rollouts_total"] == 3
    assert mine.n_env_steps_total == (6 if prefix else 9)


# Tasks and seeds -----------------------------------------------------------------------------


class SomeTasks(TaskEnv):
    """Environment whose tasks are not the numbers below ``n_tasks``."""

    def get_all_task_idx(self) -> list[int]:
        return [3, 5]


def test_tasks_are_drawn_from_the_environment_without_train_tasks() -> None:
    env = VariBadWrapper(SomeTasks(limit=1), 1)
    assert set(tasks_of(learner_of(MarkovActor(2), BOTH, env), 40)) == {3, 5}


def test_a_task_may_be_any_object_and_reaches_an_environment_without_trials() -> None:
    class Named(TaskEnv):
        def reset_task(self, task: Any = None) -> None:
            self.calls.append(task)
            self.task = task["number"]

    env = gymnasium.wrappers.TimeLimit(Named(limit=None), 1)
    learner = learner_of(MarkovActor(2), BOTH, env, tasks=[{"number": 9}])
    assert (tasks_of(learner, 2), tasks_of(learner, 1)) == ([9, 9], [9, 9, 9])
    assert env.unwrapped.calls.count({"number": 9}) == 3


class NeedsTask(CountingEnv):
    """Environment that cannot be reset without a task, even for probing."""

    observation_space = None  # type: ignore[assignment]

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return super().reset(options={"id": options["task"]})


def test_an_environment_that_needs_a_task_gets_one_immediately_or_raises() -> None:
    learner = learner_of(StepCounter(), MEMORY, NeedsTask(), tasks=[4])
    assert tasks_of(learner, 1) == [4]
    learner.train_tasks = None
    with pytest.raises(EnvError, match="NoneType"):
        learner.collect_rollouts_parallel(1)


# Sequential or parallel ----------------------------------------------------------------------


def test_random_actions_are_the_same_in_parallel_and_in_sequence() -> None:
    learners = [learner_of(None) for _ in range(3)]
    for n_rollouts in (3, 20, 0, 1):
        for learner, env in zip(learners, [None, lanes(3), lanes(16)], strict=True):
            learner.collect_rollouts_parallel(n_rollouts, True, parallel_env=env)
    one, *others = [learner.policy_storage.as_bytes() for learner in learners]
    assert len(one) == 24
    assert others == [one, one]


# Agents --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lstm", "dict"])
def test_an_agents_memory_lasts_for_one_trial_and_is_reset_for_the_next(kind: str) -> None:
    actor = MemoryActor(kind)
    actor.initial = torch.ones(1, 2), torch.full((1, 1), 7.0), actor.initial[2]
    env = VariBadWrapper(TaskEnv(limit=3), 2)
    first, second = episodes(learner_of(actor, MEMORY, env, [2], batch_rows=1), 2)
    assert first[1] == pytest.approx(second[1])  # nothing of the first is kept
    # Replayed by hand, from the initial state through both episodes.
    observations, actions, rewards, *_ = map(torch.from_numpy, first)
    action, reward, state = actor.initial
    for step, call in enumerate(actor.calls[:6]):
        torch.testing.assert_close(call, (action, reward, observations[[step]]))
        _, state = actor.act(state, action, reward, observations[[step]])
        action, reward = actions[[step]], rewards[[step]]
    (chosen, *_), _ = actor.act(state, action, reward, observations[[5]])
    assert len(actor.calls) == 12 + 7
    assert chosen.shape == (1, 2)


class OneHotMemory:
    """Actor whose action is its call count modulo 3, one-hot as integers ``[B, 3]``."""

    def get_initial_info(self) -> Any:
        return torch.zeros(1, 3), 0.0, torch.zeros(1, 1)

    def act(self, prev_internal_state: Any, prev_action: Any, reward: Any, obs: Any) -> Any:
        assert prev_action.dtype == torch.float32  # that of the first one
        steps = prev_internal_state + 1
        return torch.nn.functional.one_hot(steps[:, 0].long() % 3, 3), steps


class Numbers:
    def act(self, obs: Any) -> Any:
        return obs[:, :1].long() % 3 + 5


@pytest.mark.parametrize(("agent", "arch"), [(OneHotMemory(), MEMORY), (Numbers(), BOTH)])
def test_discrete_actions_may_be_one_hot_or_numbers(agent: Any, arch: AGENT_ARCHS) -> None:
    env = SpaceEnv(spaces.Box(0, 9, (2,)), spaces.Discrete(3, start=5), length=12)
    actions = episodes(learner_of(agent, arch, env))[0][1]
    assert [int(action) for action in env.actions] == actions[:, 0].tolist()
    assert set(env.actions) == {5, 6, 7}
    if arch is MEMORY:
        assert actions[:4, 0].tolist() == [6, 7, 5, 6]


def test_random_actions_need_no_agent_and_fill_the_space() -> None:
    low, high = np.float32([-2.0, 0.0, -np.inf]), np.float32([5.0, np.inf, np.inf])
    space = spaces.Tuple(
        (spaces.Box(low, high), spaces.Discrete(4, start=-1), spaces.MultiDiscrete([2, 5]))
    )
    env = SpaceEnv(BOX, space, length=400)
    before = space.np_random.bit_generator.state
    actions = episodes(learner_of(None, MEMORY, env), random_actions=True)[0][1]
    assert space.np_random.bit_generator.state == before
    assert all(space.contains(action) for action in env.actions)
    assert set(actions["1"].ravel().tolist()) == {-1, 0, 1, 2}
    assert set(actions["2"][:, 1].tolist()) == {0, 1, 2, 3, 4}
    assert actions["0"].mean(0) == pytest.approx([1.5, 1.0, 0.0], abs=0.3)
    assert actions["0"].std(0) == pytest.approx([7 / 12**0.5, 1.0, 1.0], abs=0.3)


# Failures ------------------------------------------------------------------------------------


class NoInitialInfo:
    def act(self, prev_internal_state: Any, obs: Any) -> None: ...


TWO_PARTS = SpaceEnv(BOX, spaces.Dict({"move": BOX, "jump": spaces.Discrete(2)}))
FAILING = MemoryActor()
FAILING.act = lambda **arguments: 1 / 0
REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    ("num_rollouts", -1, SpecError, "num_rollouts"),
    ("parallel_env", CountingEnv(), SpecError, "parallel_env"),
    ("agent", NoInitialInfo(), UsageError, "get_initial_info"),
    ("agent", object(), SpecError, "agent"),
    ("agent", FAILING, AgentError, "ZeroDivisionError"),
    ("agent", MarkovActor(), UsageError, "prev_internal_state"),
    ("agent_arch", "lstm", SpecError, "agent_arch"),
    ("policy_storage", object(), SpecError, "add_episode"),
    ("train_env", None, UsageError, "environment"),
    ("train_env", TWO_PARTS, SpecError, "action space"),
    ("train_tasks", [], SpecError, "train_tasks"),
    ("batch_rows", 0, SpecError, "batch_rows"),
]


@pytest.mark.parametrize(("name", "value", "error", "named"), REFUSED)
def test_invalid_input_is_refused_by_name(
    name: str, value: Any, error: type[Exception], named: str
) -> None:
    learner, arguments = learner_of(MemoryActor()), {"num_rollouts": 1}
    if name in ("num_rollouts", "parallel_env"):
        arguments[name] = value
    else:
        setattr(learner, name, value)
    with pytest.raises(error, match=named):
        learner.collect_rollouts_parallel(**arguments)
    assert not getattr(learner.policy_storage, "episodes", [])
