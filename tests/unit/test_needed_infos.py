"""Environments and agents that cannot begin without the infos of the first request."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlpool import (
    AgentError,
    Batcher,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    GymEnv,
    SpecError,
)
from rlpool.envs.vec_env import VecEnv
from rlpool.loop.rollout import Rollout

from support.agents import ConstantAgent, StepCounter
from support.envs import CountingEnv, assert_same_tensors, counting_trajectories
from support.needy import (
    GrowingEnv,
    NeedyAgent,
    OldNeedyEnv,
    create_needy,
    create_partly_needy,
)

OBSERVES = ["box", "dict", "undeclared", "undeclared dict"]
each_kind = pytest.mark.parametrize("observes", OBSERVES)
each_action = pytest.mark.parametrize("acts", [True, False])
LENGTHS, IDS = [2, 1], [5, 6]


def env_info(ids: list[int] = IDS) -> DictTensor:
    return DictTensor({"length": torch.tensor(LENGTHS), "id": torch.tensor(ids)})


def agent_info() -> DictTensor:
    return DictTensor({"gain": torch.ones(2)})


class Runs:
    """Both kinds of batcher by one call."""

    def __init__(self, kind: Any, create_env: Any, create_agent: Any = StepCounter) -> None:
        self.batcher = kind(
            4, 8, create_agent=create_agent, create_env=create_env, n_threads=0, seeds=0
        )

    def __call__(self, **infos: Any) -> Any:
        if isinstance(self.batcher, Batcher):
            self.batcher.reset(**infos)
            self.batcher.execute()
        else:
            self.batcher.execute(2, **infos)
        return self.batcher.get()

    def assert_right(self, **infos: Any) -> None:
        assert_same_tensors(self(**infos), counting_trajectories(LENGTHS, IDS))


MakeRuns = Callable[..., Runs]


@pytest.fixture(params=[EpisodeBatcher, Batcher])
def runs(request: pytest.FixtureRequest) -> Any:
    made: list[Runs] = []

    def make(*arguments: Any) -> Runs:
        made.append(Runs(request.param, *arguments))
        return made[-1]

    yield make
    for each in made:
        each.batcher.close()


@each_kind
@each_action
@pytest.mark.parametrize("create", [create_needy, create_partly_needy])
def test_an_environment_that_needs_env_info_runs_with_it(
    runs: MakeRuns, observes: str, acts: bool, create: Any
) -> None:
    run = runs(partial(create, observes=observes, acts=acts))
    run.assert_right(env_info=env_info())
    run.assert_right(env_info=env_info())


def test_an_old_environment_that_needs_env_info_runs_with_it(runs: MakeRuns) -> None:
    runs(partial(create_needy, kind=OldNeedyEnv)).assert_right(env_info=env_info())


@each_kind
@each_action
@pytest.mark.parametrize("needs", [True, False])
def test_an_agent_that_needs_agent_info_runs_with_it(
    runs: MakeRuns, observes: str, acts: bool, needs: bool
) -> None:
    create = partial(create_needy, observes=observes, acts=acts, needs=needs)
    runs(create, NeedyAgent).assert_right(env_info=env_info(), agent_info=agent_info())


def test_what_an_undeclared_environment_shows_with_the_infos_counts(runs: MakeRuns) -> None:
    run = runs(partial(create_needy, kind=GrowingEnv), NeedyAgent)
    run.assert_right(env_info=env_info(), agent_info=agent_info())


@each_kind
def test_wrong_infos_are_an_error_after_which_right_ones_work(
    runs: MakeRuns, observes: str
) -> None:
    run = runs(partial(create_needy, observes=observes))
    for _ in range(2):
        with pytest.raises(EnvError, match="AssertionError: ids are not negative") as caught:
            run(env_info=env_info([-1, 6]))
        assert caught.value.where.env_info == {"length": 2, "id": -1}
        assert "pass env_info" not in str(caught.value)
    run.assert_right(env_info=env_info())


@each_kind
def test_a_request_without_env_info_says_that_it_is_needed(runs: MakeRuns, observes: str) -> None:
    run = runs(partial(create_needy, observes=observes))
    for infos in ({}, {"env_info": DictTensor({})}):
        with pytest.raises(EnvError, match=r"env\.reset raised TypeError") as caught:
            run(**infos)
        assert "pass env_info={" in caught.value.fix
    run.assert_right(env_info=env_info())


def test_a_request_without_agent_info_says_that_it_may_be_needed(runs: MakeRuns) -> None:
    run = runs(create_needy, NeedyAgent)
    with pytest.raises(AgentError, match="TypeError") as caught:
        run(env_info=env_info())
    assert "pass agent_info={" in caught.value.fix
    run.assert_right(env_info=env_info(), agent_info=agent_info())


# What a failed probe leaves -------------------------------------------------------------------


def state_of(env: VecEnv) -> Any:
    leaves = env.columns and dict(env.columns.leaves)
    return list(env.current), leaves, env.action_leaves


@each_kind
@each_action
@pytest.mark.parametrize("create", [create_needy, create_partly_needy])
def test_a_failed_probe_leaves_environments_as_if_they_had_not_been_asked(
    observes: str, acts: bool, create: Any
) -> None:
    env = create(0, observes=observes, acts=acts)
    before = state_of(env)
    probe = Rollout(StepCounter(), env).probe
    with pytest.raises(EnvError):
        probe(3, [None, None], None)
    assert state_of(env) == before
    probe(3, [{"id": 1}, {"id": 2}], None)
    assert {*env.current} >= {"frame", "last_action"}


@each_kind
@each_action
def test_so_does_one_that_fails_in_the_agent(observes: str, acts: bool) -> None:
    env = create_needy(0, observes=observes, acts=acts, needs=False)
    before = state_of(env)
    rollout = Rollout(NeedyAgent(), env)
    with pytest.raises(AgentError):
        rollout.probe(3, [None, None], None)
    assert state_of(env) == before
    rollout.probe(3, [None, None], {"gain": np.ones(2)})
    assert {*env.current} >= {"frame", "last_action"}


# By hand ---------------------------------------------------------------------------------------


@each_kind
@each_action
def test_by_hand_too_a_reset_with_env_info_follows_one_that_failed(
    observes: str, acts: bool
) -> None:
    env = create_needy(0, observes=observes, acts=acts)
    with pytest.raises(TypeError):
        env.reset()
    observation, running = env.reset(env_info())
    assert observation["frame"].tolist() == [[0, 5], [0, 6]]
    (observation, _), (_, running) = env.step(DictTensor({"action": torch.tensor([1, 2])}))
    assert observation["frame"].tolist() == [[1, 5], [1, 6]]
    assert observation["last_action"].tolist() == [1, 2]
    assert running.tolist() == [0]


# Observations of wrappers that declare no space ---------------------------------------------------


class Narrower(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Shows less than it says, as wrappers of the former gym could by ``None`` for a space."""

    def __init__(self, env: Any, shows: Any = list) -> None:
        super().__init__(env)
        self.observation_space = None  # type: ignore[assignment]
        self.shows = shows

    def observation(self, observation: Any) -> Any:
        return self.shows(observation[1:])


def in_dict(values: Any) -> Any:
    return {"id": values}


@pytest.mark.parametrize(("shows", "key"), [(list, "frame"), (np.array, "frame"), (in_dict, "id")])
@pytest.mark.parametrize("is_limited", [False, True])
def test_a_wrapper_without_a_space_of_its_own_may_show_something_else(
    runs: MakeRuns, shows: Any, key: str, is_limited: bool
) -> None:
    def create_env(seed: int) -> GymEnv:
        envs: list[Any] = [Narrower(CountingEnv(), shows) for _ in range(2)]
        if is_limited:
            envs = [gymnasium.wrappers.TimeLimit(env, 100) for env in envs]
        return GymEnv(envs, seed)

    trajectories = runs(create_env, partial(ConstantAgent, 1))(env_info=env_info())
    assert trajectories[key].tolist() == [[[5], [5]], [[6], [0]]]
    assert trajectories[key].dtype == torch.float32
    env = create_env(0)
    observation, _ = env.reset(env_info())
    assert {*observation} & {"frame", "id"} == {key}
    (observation, _), _ = env.step(DictTensor({"action": torch.tensor([1, 1])}))
    assert observation[key].tolist() == [[5], [6]]


def test_a_wrapper_with_a_space_has_to_keep_to_it() -> None:
    wrapper = Narrower(CountingEnv())
    wrapper.observation_space = spaces.Box(-1, 1, (3,), np.float32)
    with pytest.raises(SpecError, match=r"'frame' should have shape \[3\], got \[1\]"):
        GymEnv([wrapper], seed=0).reset()


def test_observations_of_such_wrappers_have_to_agree() -> None:
    env = GymEnv([Narrower(CountingEnv()), Narrower(CountingEnv(), lambda shown: [*shown, 1])])
    with pytest.raises(SpecError, match=r"'frame' should have shape \[1\], got \[2\]"):
        env.reset()
