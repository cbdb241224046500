"""Environments in processes that cannot begin without the infos of the first request."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from process.watching import worker_pids

from rlpool import AgentError, DictTensor, EnvError, ParallelEnvManager, replay

from support.needy import (
    Needy,
    NeedyAgent,
    NeedyEnv,
    Runs,
    agent_info,
    create_manager,
    create_needy,
    env_info,
)


@pytest.mark.parametrize(("create", "n_workers"), [(create_needy, 1), (create_manager, 0)])
def test_wrong_infos_then_right_ones(create: Any, n_workers: int) -> None:
    run = Runs(
        partial(create, observes="undeclared dict" if n_workers else "box"), NeedyAgent, n_workers
    )
    with run.batcher:
        with pytest.raises(EnvError, match="TypeError"):
            run(agent_info=agent_info())
        with pytest.raises(EnvError, match="ids are not negative"):
            run(env_info=env_info([5, -1]), agent_info=agent_info())
        with pytest.raises(AgentError, match="TypeError"):
            run(env_info=env_info())
        for _ in range(2):
            run.assert_right(env_info=env_info(), agent_info=agent_info())


class DyingEnv(NeedyEnv):
    """Its process dies in the first reset that has options."""

    def __init__(self, path: str, needs: bool = True) -> None:
        super().__init__("undeclared", needs)
        self.path = path

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if options and not os.path.exists(self.path):
            with open(self.path, "w"):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reset(seed=seed, options=options)


def test_a_worker_that_dies_while_it_looks_at_the_infos_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "died"
    run = Runs(partial(create_needy, kind=DyingEnv, path=str(path)), n_threads=1)
    with run.batcher:
        with pytest.raises(EnvError):
            run()
        (pid,) = worker_pids()
        os.kill(pid, signal.SIGKILL)  # before it sees any
        run.assert_right(env_info=env_info())
    assert path.exists()


def test_by_hand_a_manager_can_be_reset_with_infos_after_it_failed_without() -> None:
    makers = [Needy(needs=needs) for needs in (True, False)]
    with ParallelEnvManager(makers, seed=0, max_restarts=1) as manager:
        for _ in range(2):
            with pytest.raises(EnvError, match="TypeError"):
                manager.reset()
        manager.remotes[0].send(("reset", None))
        assert manager.remotes[0].recv()[0] == "error"
        with pytest.raises(EnvError, match="ids are not negative") as caught:
            manager.reset(env_info([-4, 6]))
        with pytest.raises(AssertionError, match="ids are not negative"):
            replay(makers[0], caught.value)
        observation, _ = manager.reset(env_info())
        assert observation["frame"].tolist() == [[0, 5], [0, 6]]
        # What is known now is told to a successor; nothing before has cost a restart.
        os.kill(manager.workers[0].pid or 0, signal.SIGKILL)
        action = DictTensor({"action": torch.tensor([1, 2])})
        (observation, _), (_, running) = manager.step(action)
        assert observation["frame"].tolist() == [[1, 5], [1, 6]]
        assert observation["last_action"].tolist() == [1, 2]
        assert running.tolist() == [0]
