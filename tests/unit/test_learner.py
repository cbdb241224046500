"""``Learner`` and ``collect_rollouts_parallel``: rollouts with a task each."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
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

from support.agents import GruAgent, InitialStateCounter, NoisyAgent, Recorder, StepCounter
from support.envs import CountingEnv, EchoEnv, FailingEnv, SpacedAncestorEnv, SpaceEnv
from support.meta import (
    AncestorTaskEnv,
    CountingActor,
    LaggingLanes,
    MarkovActor,
    MemoryActor,
    Storage,
    TaskEnv,
    ragged_trials,
)

MEMORY, MARKOV, BOTH = AGENT_ARCHS.Memory, AGENT_ARCHS.Markov, AGENT_ARCHS.Memory_Markov


def lanes(n: int, make: Callable[[], Any] = ragged_trials) -> GymEnv:
    """So many environments side by side."""
    return GymEnv([make() for _ in range(n)])


def learner_of(
    agent: Any, arch: Any = MEMORY, env: Any = None, tasks: Any = None, **arguments: Any
) -> Learner:
    """A learner with a seed and a storage that keeps everything."""
    env = ragged_trials() if env is None else env
    return Learner(agent, Storage(), env, tasks, arch, **{"seed": 5, **arguments})


# What is collected ---------------------------------------------------------------------------


def test_an_episode_is_stored_as_arrays_of_the_whole_rollout() -> None:
    env = VariBadWrapper(TaskEnv(limit=2, bounds=(-1.0, 1.0)), 2)
    learner = learner_of(CountingActor(), MEMORY, env, tasks=[3])
    assert learner.collect_rollouts_parallel(1) == 4
    ((observations, actions, rewards, terminals, following),) = learner.policy_storage.episodes
    assert observations.tolist() == [[0, 3, 0], [1, 3, 0], [2, 3, 1], [1, 3, 0]]
    assert following.tolist() == [[1, 3, 0], [2, 3, 1], [1, 3, 0], [2, 3, 1]]
    # The memory is kept from the first episode to the second.
    assert actions.tolist() == np.float32([[n / 100] * 2 for n in (1, 2, 3, 4)]).tolist()
    exact = [30 + t + 0.25 * 2 * n / 100 for t, n in ((1, 1), (2, 2), (1, 3), (2, 4))]
    assert rewards == pytest.approx(np.array(exact)[:, None], rel=1e-6)
    assert terminals.tolist() == [[False]] * 4  # its time ran out
    assert [a.dtype for a in (observations, actions, rewards)] == [np.float32] * 3
    assert terminals.dtype == bool


def test_samples_are_the_transitions_of_the_rollouts_in_order() -> None:
    env = VariBadWrapper(TaskEnv(limit=2), 1)
    learner = learner_of(MarkovActor(2), MARKOV, env, tasks=[3])
    assert learner.collect_rollouts_parallel(2) == 4
    samples = learner.policy_storage.samples
    assert [s[0].tolist() for s in samples] == [[0, 3], [1, 3]] * 2
    assert [s[4].tolist() for s in samples] == [[1, 3], [2, 3]] * 2
    assert [s[1].shape for s in samples] == [(2,)] * 4
    assert all(float(s[2]) > 30 for s in samples)
    assert [bool(s[3]) for s in samples] == [False] * 4


@pytest.mark.parametrize(
    ("ends", "is_terminal"), [("terminated", True), ("truncated", False), ("both", True)]
)
@pytest.mark.parametrize("arch", list(AGENT_ARCHS))
def test_terminal_is_termination_and_not_truncation(
    ends: str, is_terminal: bool, arch: AGENT_ARCHS
) -> None:
    learner = learner_of(StepCounter(), arch, CountingEnv(3, ends=ends))
    learner.collect_rollouts_parallel(1)
    storage = learner.policy_storage
    if arch is MARKOV:
        terminals = [bool(sample[3]) for sample in storage.samples]
    else:
        terminals = storage.episodes[0][3][:, 0].tolist()
    assert terminals == [False, False, is_terminal]


def test_numbers_are_stored_as_columns() -> None:
    env = SpaceEnv(spaces.Discrete(5), spaces.Discrete(3))
    learner = learner_of(NoisyAgent(), BOTH, env)
    learner.collect_rollouts_parallel(1)
    ((observations, actions, rewards, terminals, following),) = learner.policy_storage.episodes
    for column in (observations, actions, rewards, terminals, following):
        assert column.shape == (3, 1)
    assert observations.dtype == actions.dtype == np.int64


def test_dict_observations_and_actions_are_dicts_of_arrays() -> None:
    observed = spaces.Dict({"image": spaces.Box(0, 255, (2, 2), np.uint8), "n": spaces.Discrete(4)})
    acted = spaces.Dict({"move": spaces.Box(-1, 1, (2,)), "jump": spaces.Discrete(2)})
    for arch in (MARKOV, MEMORY):
        learner = learner_of(None, arch, SpaceEnv(observed, acted))
        learner.collect_rollouts_parallel(1, random_actions=True)
        storage = learner.policy_storage
        rows = storage.samples if arch is MARKOV else storage.episodes
        observation, action = rows[0][0], rows[0][1]
        leading = () if arch is MARKOV else (3,)
        assert observation["image"].shape == (*leading, 2, 2)
        assert observation["image"].dtype == np.uint8
        assert observation["n"].shape == (*leading, 1)
        assert action["move"].shape == (*leading, 2)
        assert action["jump"].shape == (*leading, 1)


def test_a_rollout_longer_than_a_slot_is_whole() -> None:
    learner = learner_of(StepCounter(), MEMORY, CountingEnv(1000))
    assert learner.collect_rollouts_parallel(2) == 2000
    for observations, actions, rewards, terminals, following in learner.policy_storage.episodes:
        assert observations[:, 0].tolist() == list(range(1000))
        assert following[:, 0].tolist() == list(range(1, 1001))
        assert rewards[:, 0].tolist() == list(range(1, 1001))
        assert actions[:, 0].tolist() == list(range(1, 1001))
        assert terminals[:, 0].tolist() == [False] * 999 + [True]


def test_arrays_share_no_memory() -> None:
    learner = learner_of(StepCounter(), MEMORY, CountingEnv(3))
    learner.collect_rollouts_parallel(2)
    arrays = [array for episode in learner.policy_storage.episodes for array in episode]
    for one, other in itertools.combinations(arrays, 2):
        assert not np.shares_memory(one, other)


def test_a_storage_with_other_names_gets_the_columns_in_order() -> None:
    class Other:
        def __init__(self) -> None:
            self.got: list[Any] = []

        def add_episode(self, o: Any, a: Any, r: Any, d: Any, n: Any) -> None:
            self.got.append((o, a, r, d, n))

    storage = Other()
    Learner(StepCounter(), storage, CountingEnv(2), None, MEMORY, seed=0).collect_rollouts_parallel(
        1
    )
    assert storage.got[0][0].tolist() == [[0, 0], [1, 0]]
    assert storage.got[0][4].tolist() == [[1, 0], [2, 0]]


# How many, where -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_rollouts", "n_lanes"), [(0, 3), (1, 3), (2, 3), (7, 3), (9, 3), (5, 1)]
)
def test_each_environment_gets_its_share(n_rollouts: int, n_lanes: int) -> None:
    envs = [TaskEnv(limit=2) for _ in range(n_lanes)]
    parallel = GymEnv([VariBadWrapper(env, 1) for env in envs])
    learner = learner_of(MarkovActor(2), BOTH)
    assert learner.collect_rollouts_parallel(n_rollouts, parallel_env=parallel) == 2 * n_rollouts
    assert len(learner.policy_storage.episodes) == n_rollouts
    assert (learner.n_rollouts_total, learner.n_env_steps_total) == (n_rollouts, 2 * n_rollouts)
    shares = [sum(call[0] == "reset_task" for call in env.calls) for env in envs]
    more, base = n_rollouts % n_lanes, n_rollouts // n_lanes
    assert shares == [base + (lane < more) for lane in range(n_lanes)]
    # Those without a rollout were left alone.
    assert [bool(env.calls) for env in envs] == [share > 0 for share in shares]


def test_one_call_of_the_agent_per_step_serves_all_environments() -> None:
    actor = MarkovActor(2)
    parallel = lanes(4, lambda: VariBadWrapper(TaskEnv(limit=5), 1))
    learner_of(actor, BOTH, batch_rows=1).collect_rollouts_parallel(8, parallel_env=parallel)
    assert actor.n_rows == [4] * 10


def test_rows_without_an_environment_hold_observations_that_are_valid() -> None:
    agent = Recorder(StepCounter())
    learner = learner_of(agent, MEMORY, CountingEnv(3, number=5), batch_rows=4)
    learner.collect_rollouts_parallel(2)
    probe, *calls = agent.calls
    assert probe.observation["frame"].tolist() == [[0, 0]] * 4
    assert all(call.observation["frame"][:, 1].tolist() == [5] * 4 for call in calls)


def test_an_environment_that_is_done_starts_its_next_rollout_at_once() -> None:
    agent = Recorder(StepCounter())
    short, long = CountingEnv(2, number=1), CountingEnv(8, number=2)
    learner = learner_of(agent, MEMORY, batch_rows=2)
    assert learner.collect_rollouts_parallel(8, parallel_env=GymEnv([short, long])) == 40
    # 32 steps of the long ones are what it takes, whatever the short ones do meanwhile; besides
    # them the probe, and where only one of them starts, a call for those that do.
    starts = 1 + 3 + 3
    assert len([c for c in agent.calls if c.state is None]) == starts + 1
    assert len([c for c in agent.calls if c.state is not None]) == 31


def test_rollouts_are_stored_in_order_though_later_ones_end_earlier() -> None:
    envs = [CountingEnv(9, number=1), CountingEnv(1, number=2), CountingEnv(4, number=3)]
    learner = learner_of(StepCounter(), MEMORY)
    learner.collect_rollouts_parallel(9, parallel_env=GymEnv(envs))
    ids = [int(episode[0][0, 1]) for episode in learner.policy_storage.episodes]
    assert ids == [1, 2, 3] * 3


def test_counters_count_every_collection() -> None:
    learner = learner_of(StepCounter(), MEMORY, CountingEnv(3))
    assert learner.collect_rollouts_parallel(2) == 6
    assert learner.collect_rollouts_parallel(3, random_actions=True) == 9
    assert (learner.n_env_steps_total, learner.n_rollouts_total) == (15, 5)


# Tasks and seeds -----------------------------------------------------------------------------


def tasks_of(learner: Learner) -> list[int]:
    return [int(episode[0][0, 1]) for episode in learner.policy_storage.episodes]


def test_tasks_are_drawn_from_train_tasks() -> None:
    learner = learner_of(MarkovActor(2), BOTH, VariBadWrapper(TaskEnv(limit=1), 1), tasks=(2, 4, 5))
    learner.collect_rollouts_parallel(60)
    counts = np.bincount(tasks_of(learner), minlength=7)
    assert counts[[2, 4, 5]].min() >= 10
    assert counts.sum() == counts[[2, 4, 5]].sum()


def test_without_train_tasks_all_tasks_of_the_environment_are_drawn() -> None:
    learner = learner_of(MarkovActor(2), BOTH, VariBadWrapper(TaskEnv(limit=1, n_tasks=4), 1))
    learner.collect_rollouts_parallel(60)
    assert set(tasks_of(learner)) == {0, 1, 2, 3}


class SomeTasks(TaskEnv):
    """Lists tasks that are not the numbers below ``n_tasks``."""

    def get_all_task_idx(self) -> list[int]:
        return [3, 5]


@pytest.mark.parametrize("kind", ["one", "lanes", "parallel"])
def test_the_tasks_that_are_drawn_do_not_depend_on_who_holds_the_environment(kind: str) -> None:
    def make() -> VariBadWrapper:
        return VariBadWrapper(SomeTasks(limit=1), 1)

    env = make() if kind == "one" else GymEnv([make(), make()])
    train_env, parallel_env = (None, env) if kind == "parallel" else (env, None)
    learner = Learner(MarkovActor(2), Storage(), train_env, None, BOTH, seed=5)
    learner.collect_rollouts_parallel(20, parallel_env=parallel_env)
    assert set(tasks_of(learner)) == {3, 5}


@pytest.mark.parametrize("episodes_per_task", [1, 2])
def test_without_train_tasks_environments_without_tasks_get_none(episodes_per_task: int) -> None:
    env = make_env("CartPole-v1", episodes_per_task)
    assert env.n_tasks is None
    learner = Learner(None, Storage(), env, None, BOTH, seed=5)
    assert learner.collect_rollouts_parallel(2, random_actions=True) > 0


def test_a_task_reaches_an_environment_that_is_no_trial() -> None:
    env = TaskEnv(limit=None)
    learner = learner_of(MarkovActor(2), BOTH, gymnasium.wrappers.TimeLimit(env, 1), tasks=[6])
    learner.collect_rollouts_parallel(2)
    assert tasks_of(learner) == [6, 6]


def test_a_task_may_be_any_object() -> None:
    class Named(TaskEnv):
        def reset_task(self, task: Any = None) -> None:
            self.task = task["number"]

    learner = learner_of(
        MarkovActor(2), BOTH, VariBadWrapper(Named(limit=1), 1), tasks=[{"number": 9}]
    )
    learner.collect_rollouts_parallel(2)
    assert tasks_of(learner) == [9, 9]


def test_environments_without_tasks_get_none() -> None:
    env = EchoEnv(2)
    learner = learner_of(StepCounter(), MEMORY, env)
    learner.collect_rollouts_parallel(3)
    assert [options for _, options in env.resets] == [None] * 3


def test_every_rollout_has_a_seed_of_its_own() -> None:
    env = EchoEnv(2)
    learner = learner_of(StepCounter(), MEMORY, env)
    learner.collect_rollouts_parallel(5)
    learner.collect_rollouts_parallel(5)
    assert len({seed for seed, _ in env.resets}) == 10


def test_another_seed_is_another_run_and_none_is_fresh_each_time() -> None:
    def collected(seed: int | None) -> list[list[bytes]]:
        learner = learner_of(MarkovActor(), BOTH, seed=seed)
        learner.collect_rollouts_parallel(4)
        return learner.policy_storage.as_bytes()

    assert collected(1) == collected(1)
    assert collected(1) != collected(2)
    assert collected(None) != collected(None)


def test_an_ancestors_environment_can_be_collected_in() -> None:
    learner = learner_of(MarkovActor(), BOTH, VariBadWrapper(AncestorTaskEnv(), 2), tasks=[4])
    assert learner.collect_rollouts_parallel(2) == 8
    assert learner.policy_storage.episodes[1][0].tolist() == [
        [0, 4, 0],
        [1, 4, 0],
        [2, 4, 1],
        [1, 4, 0],
    ]


def test_environments_without_spaces_can_be_collected_in() -> None:
    env = SpacedAncestorEnv(2)
    env.observation_space = None  # type: ignore[assignment]
    learner = learner_of(StepCounter(), MEMORY, env)
    assert learner.collect_rollouts_parallel(2) == 4
    assert learner.policy_storage.episodes[0][0].tolist() == [[0, 0], [1, 0]]


# One after another or side by side -----------------------------------------------------------


AGENTS: dict[str, tuple[Callable[[], Any], AGENT_ARCHS, bool]] = {
    "markov": (MarkovActor, MARKOV, False),
    "memory_markov": (MarkovActor, BOTH, False),
    "gru": (lambda: MemoryActor("gru"), MEMORY, False),
    "gru cell": (lambda: MemoryActor("cell"), MEMORY, False),
    "lstm": (lambda: MemoryActor("lstm"), MEMORY, False),
    "DictTensor": (lambda: MemoryActor("dict"), MEMORY, False),
    "random": (lambda: None, MEMORY, True),
}


@pytest.mark.parametrize("n_lanes", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("name", AGENTS)
def test_sequential_and_parallel_collection_are_bitwise_the_same(name: str, n_lanes: int) -> None:
    create, arch, is_random = AGENTS[name]

    def collected(parallel_env: Any) -> tuple[list[int], list[list[bytes]]]:
        learner = learner_of(create(), arch)
        steps = [
            learner.collect_rollouts_parallel(n, is_random, parallel_env) for n in (3, 25, 1, 0)
        ]
        assert learner.n_rollouts_total == 29
        return steps, learner.policy_storage.as_bytes()

    assert collected(None) == collected(lanes(n_lanes))


def test_agents_with_noise_are_bitwise_the_same_side_by_side() -> None:
    def trials() -> Any:
        return SpaceEnv(spaces.Box(-1, 1, (2,)), spaces.Discrete(3), length=7)

    def collected(parallel_env: Any) -> list[list[bytes]]:
        learner = learner_of(GruAgent(), MEMORY, trials())
        learner.collect_rollouts_parallel(20, parallel_env=parallel_env)
        return learner.policy_storage.as_bytes()

    assert collected(None) == collected(lanes(4, trials))


@pytest.mark.parametrize("min_ready", [1, 2, 4, 9])
def test_lanes_that_are_ready_first_go_on_without_the_others(min_ready: int) -> None:
    slow = LaggingLanes([ragged_trials() for _ in range(5)], min_ready)
    one, other = learner_of(MemoryActor("lstm")), learner_of(MemoryActor("lstm"))
    for n_rollouts in (3, 17):
        one.collect_rollouts_parallel(n_rollouts)
        other.collect_rollouts_parallel(n_rollouts, parallel_env=slow)
    assert one.policy_storage.as_bytes() == other.policy_storage.as_bytes()
    assert max(slow.n_ready) == min(min_ready, 5)


def test_more_environments_than_rows_make_more_rows() -> None:
    actor = MarkovActor()
    learner = learner_of(actor, BOTH, batch_rows=2)
    learner.collect_rollouts_parallel(6, parallel_env=lanes(3))
    assert set(actor.n_rows) == {3}


def test_a_collection_in_between_changes_nothing_if_it_is_done_by_both() -> None:
    one, other = learner_of(MemoryActor()), learner_of(MemoryActor())
    for n_lanes in (1, 3, 2):
        one.collect_rollouts_parallel(4)
        other.collect_rollouts_parallel(4, parallel_env=lanes(n_lanes))
    assert one.policy_storage.as_bytes() == other.policy_storage.as_bytes()


# Agents --------------------------------------------------------------------------------------


def test_an_agent_gets_what_it_did_and_what_that_earned() -> None:
    actor = MemoryActor()
    learner = learner_of(actor, MEMORY, VariBadWrapper(TaskEnv(limit=2), 2), batch_rows=1)
    learner.collect_rollouts_parallel(1)
    _, actions, rewards, _, _ = learner.policy_storage.episodes[0]
    assert len(actor.calls) == 4
    for step, call in enumerate(actor.calls):
        assert call["action"].tolist() == ([[0, 0]] if not step else [actions[step - 1].tolist()])
        assert call["reward"].tolist() == ([[0]] if not step else [rewards[step - 1].tolist()])
        assert call["obs"].shape == (1, 3)


@pytest.mark.parametrize("kind", ["gru", "cell", "lstm", "dict"])
def test_the_state_lasts_for_a_trial_and_begins_anew_with_the_next(kind: str) -> None:
    actor = MemoryActor(kind)
    learner = learner_of(actor, MEMORY, VariBadWrapper(TaskEnv(limit=3), 2), tasks=[2])
    learner.collect_rollouts_parallel(2)
    first, second = (episode[1] for episode in learner.policy_storage.episodes)
    assert first == pytest.approx(second)  # nothing of the first is left
    # Replayed by hand, from the initial state through both episodes.
    observations, actions, rewards, _, _ = learner.policy_storage.episodes[0]
    action, reward, state = actor.get_initial_info()
    for step in range(6):
        (action, *_), state = actor.act(state, action, reward, torch.tensor(observations[[step]]))
        assert action[0].numpy(force=True) == pytest.approx(actions[step], abs=1e-6)
        reward = torch.tensor(rewards[[step]])


def test_the_initial_reward_is_the_agents_own() -> None:
    actor = MemoryActor()
    start = actor.get_initial_info()
    actor.get_initial_info = lambda: (torch.ones(1, 2), torch.full((1, 1), 7.0), start[2])  # type: ignore[method-assign]
    learner_of(actor, batch_rows=1).collect_rollouts_parallel(1)
    assert actor.calls[0]["action"].tolist() == [[1, 1]]
    assert actor.calls[0]["reward"].tolist() == [[7]]
    assert actor.calls[1]["reward"].tolist() != [[7]]


def test_actions_may_be_one_hot_or_numbers() -> None:
    class OneHot:
        def act(self, obs: Any, deterministic: bool = False) -> Any:
            return torch.nn.functional.one_hot(obs[:, 0].long() % 3, 3).float(), None

    class Number:
        def act(self, obs: Any, deterministic: bool = False) -> Any:
            return obs[:, :1].long() % 3

    for agent in (OneHot(), Number()):
        env = SpaceEnv(spaces.Box(0, 9, (2,)), spaces.Discrete(3), length=12)
        learner = learner_of(agent, BOTH, env)
        learner.collect_rollouts_parallel(1)
        observations, actions, *_ = learner.policy_storage.episodes[0]
        assert actions[:, 0].tolist() == [int(o) % 3 for o in observations[:, 0]]
        assert [int(a) for a in env.actions] == actions[:, 0].tolist()
        assert len(set(actions[:, 0].tolist())) == 3


def test_one_hot_actions_count_from_the_start_of_the_space() -> None:
    class Second:
        def act(self, obs: Any) -> Any:
            return torch.tensor([[0.0, 1.0, 0.0]]).expand(len(obs), 3)

    env = SpaceEnv(spaces.Box(0, 9, (2,)), spaces.Discrete(3, start=5), length=1)
    learner = learner_of(Second(), BOTH, env)
    learner.collect_rollouts_parallel(1)
    assert learner.policy_storage.episodes[0][1].tolist() == [[6]]
    assert env.actions == [6]


def test_a_previous_action_gets_the_dtype_of_the_first() -> None:
    class OneHotMemory:
        def get_initial_info(self) -> Any:
            return torch.zeros(1, 3), 0.0, torch.zeros(1, 1)

        def act(self, prev_internal_state: Any, prev_action: Any, reward: Any, obs: Any) -> Any:
            assert prev_action.dtype == torch.float32
            steps = prev_internal_state + 1
            return torch.nn.functional.one_hot(steps[:, 0].long() % 3, 3), steps

    env = SpaceEnv(spaces.Box(0, 9, (2,)), spaces.Discrete(3), length=4)
    learner = learner_of(OneHotMemory(), MEMORY, env)
    learner.collect_rollouts_parallel(1)
    assert learner.policy_storage.episodes[0][1][:, 0].tolist() == [1, 2, 0, 1]


def test_act_for_a_space_of_several_parts_is_refused() -> None:
    space = spaces.Dict({"move": spaces.Box(-1, 1, (2,)), "jump": spaces.Discrete(2)})
    env = SpaceEnv(spaces.Box(-1, 1, (2,)), space)
    with pytest.raises(SpecError, match=r"act\(\) cannot choose actions of the action space Dict"):
        learner_of(MarkovActor(2), BOTH, env).collect_rollouts_parallel(1)


def test_an_agent_that_makes_its_initial_states_is_never_called_without() -> None:
    learner = learner_of(InitialStateCounter(), MEMORY, CountingEnv(3))
    assert learner.collect_rollouts_parallel(4, parallel_env=lanes(3, CountingEnv)) == 12


def test_random_actions_need_no_agent_and_fill_the_space() -> None:
    space = spaces.Tuple(
        (
            spaces.Box(
                np.float32([-2.0, 0.0, -np.inf, -np.inf]), np.float32([5.0, np.inf, 1.0, np.inf])
            ),
            spaces.Box(0, 3, (2,), np.int64),
            spaces.Discrete(4, start=-1),
            spaces.MultiDiscrete([2, 5]),
            spaces.MultiBinary(3),
        )
    )
    env = SpaceEnv(spaces.Box(-1, 1, (1,)), space, length=400)
    learner = learner_of(None, MEMORY, env)
    learner.collect_rollouts_parallel(1, random_actions=True)
    for got in env.actions:
        assert space.contains(got), got
    actions = learner.policy_storage.episodes[0][1]
    assert set(actions["1"].ravel().tolist()) == {0, 1, 2, 3}
    assert set(actions["2"].ravel().tolist()) == {-1, 0, 1, 2}
    assert set(actions["3"][:, 1].tolist()) == {0, 1, 2, 3, 4}
    assert set(actions["4"].ravel().tolist()) == {0, 1}
    bounded, above, below, free = actions["0"].T
    assert abs(bounded.mean() - 1.5) < 0.3
    assert bounded.min() < -1.8
    assert abs(above.mean() - 1.0) < 0.2
    assert abs(below.mean()) < 0.2
    assert abs(free.mean()) < 0.2
    assert abs(free.std() - 1.0) < 0.15


def test_a_class_of_ones_own_can_borrow_the_function() -> None:
    class Mine:
        collect = collect_rollouts_parallel

        def __init__(self) -> None:
            self.agent, self.policy_storage, self.agent_arch = StepCounter(), Storage(), "memory"
            self.train_env, self.train_tasks = CountingEnv(3), None

    mine = Mine()
    assert mine.collect(4) == 12
    assert mine.n_env_steps_total == 12  # type: ignore[attr-defined]


# Failures ------------------------------------------------------------------------------------


def test_a_failing_environment_says_where_and_what_was_complete_is_kept() -> None:
    envs = [
        CountingEnv(2),
        CountingEnv(3),
        FailingEnv(KeyError("goal"), step=5, length=9, fails_at=0),
    ]
    learner = learner_of(StepCounter(), MEMORY)
    with pytest.raises(EnvError, match=r"KeyError: 'goal'") as caught:
        learner.collect_rollouts_parallel(9, parallel_env=GymEnv(envs))
    where = caught.value.where
    assert (where.worker, where.lane, where.episode, where.step) == (None, 2, 2, 5)
    assert "debug it here" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)
    # By then the first had ended twice and a third time was on its way, the second once.
    lengths = [len(episode[0]) for episode in learner.policy_storage.episodes]
    assert lengths == [2, 3, 2]
    assert (learner.n_rollouts_total, learner.n_env_steps_total) == (3, 7)
    # And it goes on.
    assert learner.collect_rollouts_parallel(2, parallel_env=GymEnv(envs[:2])) == 5


def test_a_failing_reset_says_where() -> None:
    env = FailingEnv(KeyError("goal"), call="reset", fails_at=0)
    with pytest.raises(EnvError, match=r"env.reset raised KeyError"):
        learner_of(StepCounter(), MEMORY, env).collect_rollouts_parallel(1)


def test_an_environment_that_needs_a_task_is_told_where_tasks_come_from() -> None:
    class NeedsTask(CountingEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return super().reset(seed=seed, options={"length": 2 + options["task"]})

    with pytest.raises(EnvError, match=r"fix:   if it needs a task, list them in .* train_tasks"):
        learner_of(StepCounter(), MEMORY, NeedsTask()).collect_rollouts_parallel(1)


def test_a_failing_agent_raises_agent_error() -> None:
    class Broken:
        def act(self, obs: Any, deterministic: bool = False) -> Any:
            raise KeyError("weights")

    with pytest.raises(AgentError, match="KeyError: 'weights'") as caught:
        learner_of(Broken(), BOTH).collect_rollouts_parallel(1)
    assert caught.value.where[:4] == (None, 0, 0, 0)
    assert "debug it here" in str(caught.value)


def test_a_failing_storage_is_not_asked_again() -> None:
    class Full(Storage):
        def add_episode(self, *columns: Any, **named: Any) -> None:
            super().add_episode(*columns, **named)
            if len(self.episodes) == 2:
                raise MemoryError("full")

    storage = Full()
    learner = Learner(StepCounter(), storage, CountingEnv(2), None, MEMORY, seed=0)
    with pytest.raises(MemoryError, match="full"):
        learner.collect_rollouts_parallel(5)
    assert len(storage.episodes) == 2
    assert learner.n_rollouts_total == 1


class _NoInitialInfo:
    def act(self, prev_internal_state: Any, obs: Any) -> None: ...


@pytest.mark.parametrize(
    ("changes", "arguments", "error", "message"),
    [
        ({}, {"num_rollouts": -1}, SpecError, "num_rollouts should be at least 0, got -1"),
        ({}, {"num_rollouts": 1.5}, SpecError, "num_rollouts should be an int, got 1.5"),
        ({}, {"num_rollouts": True}, SpecError, "num_rollouts should be an int, got True"),
        ({"agent_arch": "lstm"}, {}, SpecError, r"agent_arch is 'lstm'\n  fix:   use one of AGENT"),
        ({"agent": object()}, {}, SpecError, r"the agent is a object without act\(\)"),
        ({"agent": MarkovActor()}, {}, UsageError, "takes no prev_internal_state"),
        ({"agent": _NoInitialInfo()}, {}, UsageError, r"there is no get_initial_info\(\)"),
        ({"policy_storage": object()}, {}, SpecError, r"without add_episode\(\)"),
        ({"train_env": None}, {}, UsageError, "no environment to collect in"),
        ({"train_tasks": []}, {}, SpecError, "train_tasks is empty"),
        ({}, {"parallel_env": CountingEnv()}, SpecError, "parallel_env is a CountingEnv, not"),
        ({"batch_rows": 0}, {}, SpecError, "batch_rows should be at least 1, got 0"),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    learner = learner_of(MemoryActor())
    for name, value in changes.items():
        setattr(learner, name, value)
    with pytest.raises(error, match=message):
        learner.collect_rollouts_parallel(**{"num_rollouts": 1, **arguments})
    assert learner.policy_storage is None or not getattr(learner.policy_storage, "episodes", [])


def test_a_task_that_nobody_takes_is_refused() -> None:
    env = VariBadWrapper(gymnasium.wrappers.TimeLimit(CountingEnv(), 3), 2)
    with pytest.raises(EnvError, match=r"has no reset_task\(task\)"):
        learner_of(MarkovActor(3), BOTH, env, tasks=[1]).collect_rollouts_parallel(1)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (torch.zeros(4, 5), r"shape \[4, 5\], of which no dimension is a batch of 1"),
        ((torch.zeros(1, 1, 5), 3), "holds a int, not only tensors"),
    ],
)
def test_a_state_without_a_batch_of_one_is_refused(state: Any, message: str) -> None:
    actor = MemoryActor()
    actor.get_initial_info = lambda: (torch.zeros(1, 2), torch.zeros(1, 1), state)  # type: ignore[method-assign]
    with pytest.raises(AgentError, match=message):
        learner_of(actor).collect_rollouts_parallel(1)


# Learners and agents of the document ---------------------------------------------------------


class Own:
    """A learner of somebody's own, with counters of its own."""

    collect_rollouts_parallel = collect_rollouts_parallel

    def __init__(self, **attributes: Any) -> None:
        self.agent, self.agent_arch, self.seed = StepCounter(), MEMORY, 0
        self.train_env, self.train_tasks = CountingEnv(3), None
        self.policy_storage = Storage()
        vars(self).update(attributes)


def test_counters_of_the_documents_names_count_and_its_goal_stays() -> None:
    learner: Any = Own(_n_env_steps_total=0, _n_rollouts_total=0, n_env_steps_total=6)
    for _ in range(2):
        assert learner._n_env_steps_total < learner.n_env_steps_total
        assert learner.collect_rollouts_parallel(1) == 3
    assert learner._n_env_steps_total == learner.n_env_steps_total == 6
    learner.collect_rollouts_parallel(2)
    assert (learner._n_env_steps_total, learner.n_env_steps_total) == (12, 6)
    assert (learner._n_rollouts_total, learner.n_rollouts_total) == (4, 4)


def test_a_goal_of_as_many_steps_as_the_first_rollout_stays() -> None:
    learner: Any = Own(_n_env_steps_total=0, n_env_steps_total=3)
    learner.collect_rollouts_parallel(2)
    assert (learner._n_env_steps_total, learner.n_env_steps_total) == (6, 3)


def test_a_learner_counts_under_both_names_where_it_has_both() -> None:
    learner: Any = learner_of(StepCounter(), MEMORY, CountingEnv(3))
    learner._n_env_steps_total = learner._n_rollouts_total = 0
    learner.collect_rollouts_parallel(2)
    assert (learner._n_env_steps_total, learner.n_env_steps_total) == (6, 6)
    assert (learner._n_rollouts_total, learner.n_rollouts_total) == (2, 2)


def test_a_counter_that_is_a_property_follows() -> None:
    class Learner(Own):
        @property
        def n_env_steps_total(self) -> int:
            return self._n_env_steps_total  # type: ignore[attr-defined, no-any-return]

    learner: Any = Learner(_n_env_steps_total=0)
    for n in (3, 6):
        learner.collect_rollouts_parallel(1)
        assert (learner._n_env_steps_total, learner.n_env_steps_total) == (n, n)


def handing_on(function: Any) -> Any:
    def outer(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return outer


def by_name_only(function: Any) -> Any:
    def outer(self: Any, **kwargs: Any) -> Any:
        return function(self, **kwargs)

    return outer


DECORATORS = [
    handing_on,
    by_name_only,
    lambda function: functools.wraps(function)(handing_on(function)),
    torch.no_grad(),
]


@pytest.mark.parametrize("decorated", DECORATORS)
@pytest.mark.parametrize("arch", [MARKOV, BOTH])
def test_an_act_that_takes_everything_acts_by_the_observation(decorated: Any, arch: Any) -> None:
    class Actor(MarkovActor):
        act = decorated(MarkovActor.act)

    got = [learner_of(kind(), arch) for kind in (MarkovActor, Actor)]
    for learner in got:
        learner.collect_rollouts_parallel(2)
    assert got[0].policy_storage.as_bytes() == got[1].policy_storage.as_bytes()


@pytest.mark.parametrize("decorated", DECORATORS)
def test_an_act_that_takes_everything_has_a_memory_where_one_is_wanted(decorated: Any) -> None:
    class Actor(MemoryActor):
        act = decorated(MemoryActor.act)

    got = [learner_of(kind(), MEMORY) for kind in (MemoryActor, Actor)]
    for learner in got:
        learner.collect_rollouts_parallel(2)
    assert got[0].policy_storage.as_bytes() == got[1].policy_storage.as_bytes()


def test_an_act_that_takes_everything_is_asked_not_to_be_deterministic() -> None:
    given = []

    class Actor(MarkovActor):
        def act(self, *args: Any, **kwargs: Any) -> Any:
            given.append((len(args), dict(kwargs)))
            return super().act(*args, **kwargs)

    learner_of(Actor(), MARKOV).collect_rollouts_parallel(1)
    assert given[0] == (1, {"deterministic": False})


class NeedyTask(CountingEnv):
    """Undeclared, and cannot be reset without a task."""

    observation_space = None  # type: ignore[assignment]

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return super().reset(options={"id": options["task"]})


def test_an_undeclared_environment_that_needs_a_task_gets_one_at_once() -> None:
    learner = learner_of(StepCounter(), MEMORY, NeedyTask(), tasks=[4])
    learner.collect_rollouts_parallel(1)
    assert learner.policy_storage.episodes[0][0][:, 1].tolist() == [4, 4, 4]
