"""Environments in processes that cannot begin without the infos of the first request."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from process.watching import worker_pids

from rlpool import AgentError, Batcher, DictTensor, EnvError, ParallelEnvManager, replay

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

MakeRuns = Callable[..., Runs]


def action(*values: int) -> DictTensor:
    return DictTensor({"action": torch.tensor(values)})


@pytest.fixture
def runs() -> Iterator[MakeRuns]:
    made: list[Runs] = []

    def make(*arguments: Any, **named: Any) -> Runs:
        made.append(Runs(*arguments, **named))
        return made[-1]

    yield make
    for each in made:
        each.batcher.close()


@pytest.mark.parametrize("kind", ["worker", "manager"])
def test_wrong_infos_then_right_ones(runs: MakeRuns, kind: str) -> None:
    if kind == "worker":
        run = runs(partial(create_needy, observes="undeclared dict"), NeedyAgent, 1)
    else:
        run = runs(create_manager, NeedyAgent, kind=Batcher)
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

    def __init__(self, path: str, is_undeclared: bool) -> None:
        super().__init__("undeclared" if is_undeclared else "box")
        self.path = path

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if options and not os.path.exists(self.path):
            with open(self.path, "w"):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("create", [create_needy, create_manager])
def test_a_worker_that_dies_while_it_looks_at_the_infos_is_replaced(
    runs: MakeRuns, tmp_path: Any, create: Any
) -> None:
    path = str(tmp_path / "died")
    is_undeclared = create is create_needy
    create = partial(create, kind=DyingEnv, path=path, is_undeclared=is_undeclared)
    run = runs(create, n_threads=int(is_undeclared))
    if is_undeclared:
        with pytest.raises(EnvError):
            run()
        (pid,) = worker_pids()
        os.kill(pid, signal.SIGKILL)  # before it sees any
    run.assert_right(env_info=env_info())
    assert os.path.exists(path)


def test_by_hand_a_manager_can_be_reset_with_infos_after_it_failed_without() -> None:
    makers = [Needy(needs=needs) for needs in (True, False)]
    with ParallelEnvManager(makers, seed=0, max_restarts=1) as manager:
        for _ in range(2):
            with pytest.raises(EnvError, match="TypeError"):
                manager.reset()
        with pytest.raises(EnvError, match="ids are not negative") as caught:
            manager.reset(env_info([-4, 6]))
        with pytest.raises(AssertionError, match="ids are not negative"):
            replay(makers[0], caught.value)
        observation, _ = manager.reset(env_info())
        assert observation["frame"].tolist() == [[0, 5], [0, 6]]
        (observation, _), (_, running) = manager.step(action(1, 2))
        assert observation["frame"].tolist() == [[1, 5], [1, 6]]
        assert observation["last_action"].tolist() == [1, 2]
        assert running.tolist() == [0]
        # What is known now is told to a successor; nothing before has cost a restart.
        os.kill(manager.workers[0].pid or 0, signal.SIGKILL)
        (observation, _), _ = manager.step(action(3))
        assert observation["frame"].tolist() == [[2, 5]]


def test_a_remote_is_reset_with_options_after_it_failed_without() -> None:
    with ParallelEnvManager([Needy()] * 2, seed=0) as manager:
        remote = manager.remotes[1]
        remote.send(("reset", None))
        kind, text = remote.recv()
        assert kind == "error"
        assert "TypeError" in text
        remote.send(("reset", {"options": {"id": 4}}))
        assert remote.recv()[1].tolist() == [0, 4]
        os.kill(manager.workers[1].pid or 0, signal.SIGKILL)
        remote.send(("step", 1))
        kind, (observation, reward, done, _) = remote.recv()
        assert (observation.tolist(), reward, done) == ([1, 4], 401.0, False)
        assert manager.reset(env_info())[0]["frame"].tolist() == [[0, 5], [0, 6]]
