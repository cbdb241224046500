"""Environments and agents that cannot begin without the infos of the first request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from rlpool import AgentError, Batcher, DictTensor, EnvError, EpisodeBatcher

from support.needy import (
    IDS,
    LENGTHS,
    NeedyAgent,
    OldNeedyEnv,
    Runs,
    agent_info,
    create_needy,
    create_partly_needy,
    env_info,
)

each_kind = pytest.mark.parametrize("observes", ["box", "undeclared", "undeclared dict"])
each_action = pytest.mark.parametrize("acts", [True, False])
MakeRuns = Callable[..., Runs]


@pytest.fixture(params=[EpisodeBatcher, Batcher])
def runs(request: pytest.FixtureRequest) -> Iterator[MakeRuns]:
    made: list[Runs] = []

    def make(*arguments: Any) -> Runs:
        made.append(Runs(*arguments, kind=request.param))
        return made[-1]

    yield make
    for each in made:
        each.batcher.close()


@each_kind
@pytest.mark.parametrize("create", [create_needy, create_partly_needy])
def test_an_environment_that_needs_env_info_runs_with_it_and_fails_without(
    runs: MakeRuns, observes: str, create: Any
) -> None:
    run = runs(partial(create, observes=observes, acts=False))
    for infos in ({}, {"env_info": DictTensor({})}):
        with pytest.raises(EnvError, match=r"env\.reset raised TypeError"):
            run(**infos)
    if create is create_needy:
        with pytest.raises(EnvError, match="AssertionError: ids are not negative") as caught:
            run(env_info=env_info([-1, 6]))
        assert caught.value.where.env_info == {"length": 2, "id": -1}
    for _ in range(2):
        run.assert_right(env_info=env_info())


@pytest.mark.parametrize(
    "create",
    [
        partial(create_needy, observes="box", acts=False),
        partial(create_needy, observes="undeclared", needs=False),
        partial(create_needy, kind=OldNeedyEnv),
    ],
)
def test_an_agent_that_needs_agent_info_runs_with_it_and_fails_without(
    runs: MakeRuns, create: Any
) -> None:
    run = runs(create, NeedyAgent)
    with pytest.raises(AgentError, match="TypeError"):
        run(env_info=env_info())
    run.assert_right(env_info=env_info(), agent_info=agent_info())


@each_kind
@each_action
def test_by_hand_too_a_reset_with_env_info_follows_one_that_failed(
    observes: str, acts: bool
) -> None:
    env = create_needy(0, observes=observes, acts=acts)
    with pytest.raises(TypeError):
        env.reset()
    observation, _ = env.reset(env_info())
    assert observation["frame"].tolist() == [[0, 5], [0, 6]]
    (observation, _), (_, running) = env.step(DictTensor({"action": torch.tensor([1, 2])}))
    assert observation["frame"].tolist() == [[1, 5], [1, 6]]
    assert observation["last_action"].tolist() == [1, 2]
    assert running.tolist() == [0]


@pytest.mark.parametrize("n_threads", [0, 1])
def test_infos_of_a_reset_that_another_follows_are_not_blamed(n_threads: int) -> None:
    with Batcher(
        4, create_agent=NeedyAgent, create_env=create_needy, n_threads=n_threads
    ) as batcher:
        for ids in ([-1, 6], IDS):
            batcher.reset(agent_info(), env_info(ids))
            batcher.execute()
        assert batcher.get().lengths.tolist() == LENGTHS
