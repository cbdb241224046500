"""Environments and agents that cannot start without the infos of the first request."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from process.watching import worker_pids

from rlpool import (
    AgentError,
    Batcher,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    ParallelEnvManager,
)

from support.needy import (
    IDS,
    LENGTHS,
    Needy,
    NeedyAgent,
    NeedyEnv,
    OldNeedyEnv,
    Runs,
    agent_info,
    create_manager,
    create_needy,
    env_info,
)


@pytest.mark.parametrize(
    ("create", "n_workers", "kind"),
    [
        (create_needy, 0, EpisodeBatcher),
        (create_needy, 0, Batcher),
        (partial(create_needy, observes="undeclared"), 0, EpisodeBatcher),
        (partial(create_needy, observes="undeclared dict"), 1, EpisodeBatcher),
        (partial(create_needy, needs=(False, True)), 0, Batcher),
        (partial(create_needy, kind=OldNeedyEnv), 0, EpisodeBatcher),
        (create_manager, 0, EpisodeBatcher),
    ],
)
def test_environments_and_agents_that_need_infos_run_with_them_and_fail_without(
    create: Any, n_workers: int, kind: Any
) -> None:
    run = Runs(create, NeedyAgent, n_workers, kind)
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


@pytest.mark.parametrize("n_workers", [0, 1])
def test_infos_of_a_reset_followed_by_another_are_not_blamed(n_workers: int) -> None:
    with Batcher(
        4, create_agent=NeedyAgent, create_env=create_needy, n_workers=n_workers
    ) as batcher:
        for ids in ([-1, 6], IDS):
            batcher.reset(agent_info(), env_info(ids))
            batcher.execute()
        assert batcher.get().lengths.tolist() == LENGTHS


class DyingEnv(NeedyEnv):
    """Environment whose process dies in the first reset with options."""

    def __init__(self, path: str, needs: bool = True) -> None:
        super().__init__("undeclared", needs)
        self.path = path

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if options and not os.path.exists(self.path):
            with open(self.path, "w"):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reset(seed=seed, options=options)


def test_a_worker_that_dies_while_probing_the_infos_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "died"
    run = Runs(partial(create_needy, kind=DyingEnv, path=str(path)), n_threads=1)
    with run.batcher:
        with pytest.raises(EnvError):
            run()
        (pid,) = worker_pids()
        os.kill(pid, signal.SIGKILL)  # before it sees any
        run.assert_right(env_info=env_info())
    assert path.exists()


@pytest.mark.parametrize("over_manager", [False, True])
def test_reset_with_env_info_works_after_a_failed_reset(over_manager: bool) -> None:
    make = Needy(needs=True)
    if over_manager:
        env: Any = ParallelEnvManager([make, Needy(needs=False)], seed=0, max_restarts=1)
    else:
        env = create_needy(0, observes="undeclared dict")
    for _ in range(2):
        with pytest.raises(EnvError if over_manager else TypeError, match="subscriptable"):
            env.reset()
    if over_manager:
        with pytest.raises(EnvError, match="ids are not negative"):
            env.reset(env_info([-4, 6]))
    observation, _ = env.reset(env_info())
    assert observation["frame"].tolist() == [[0, 5], [0, 6]]
    if over_manager:  # a successor gets what is known by now
        os.kill(env.workers[0].pid, signal.SIGKILL)
    (observation, _), (_, running) = env.step(DictTensor({"action": torch.tensor([1, 2])}))
    assert observation["frame"].tolist() == [[1, 5], [1, 6]]
    assert observation["last_action"].tolist() == [1, 2]
    assert running.tolist() == [0]
    env.close()
