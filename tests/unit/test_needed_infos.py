"""Environments and agents that cannot begin without the infos of the first request."""

from __future__ import annotations

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
    env_info,
)


@pytest.mark.parametrize("kind", [EpisodeBatcher, Batcher])
@pytest.mark.parametrize(
    "create",
    [
        create_needy,
        partial(create_needy, observes="undeclared"),
        partial(create_needy, observes="undeclared dict"),
        partial(create_needy, needs=(False, True)),
        partial(create_needy, kind=OldNeedyEnv),
    ],
)
def test_what_needs_infos_runs_with_them_and_fails_without(kind: Any, create: Any) -> None:
    run = Runs(create, NeedyAgent, kind=kind)
    with run.batcher:
        for infos in ({}, {"env_info": DictTensor({})}):
            with pytest.raises(EnvError, match="TypeError"):
                run(**infos, agent_info=agent_info())
        with pytest.raises(EnvError, match="ids are not negative") as caught:
            run(env_info=env_info([5, -1]), agent_info=agent_info())
        assert caught.value.where.env_info == {"length": 1, "id": -1}
        with pytest.raises(AgentError, match="TypeError"):
            run(env_info=env_info())
        for _ in range(2):
            run.assert_right(env_info=env_info(), agent_info=agent_info())


@pytest.mark.parametrize("observes", ["box", "undeclared dict"])
def test_by_hand_too_a_reset_with_env_info_follows_one_that_failed(observes: str) -> None:
    env = create_needy(0, observes=observes)
    with pytest.raises(TypeError):
        env.reset()
    observation, _ = env.reset(env_info())
    assert observation["frame"].tolist() == [[0, 5], [0, 6]]
    (observation, _), (_, running) = env.step(DictTensor({"action": torch.tensor([1, 2])}))
    assert observation["frame"].tolist() == [[1, 5], [1, 6]]
    assert observation["last_action"].tolist() == [1, 2]
    assert running.tolist() == [0]


@pytest.mark.parametrize("n_workers", [0, 1])
def test_infos_of_a_reset_that_another_follows_are_not_blamed(n_workers: int) -> None:
    with Batcher(
        4, create_agent=NeedyAgent, create_env=create_needy, n_workers=n_workers
    ) as batcher:
        for ids in ([-1, 6], IDS):
            batcher.reset(agent_info(), env_info(ids))
            batcher.execute()
        assert batcher.get().lengths.tolist() == LENGTHS
