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

from rlpool import (
    AgentError,
    Batcher,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    ParallelEnvManager,
    replay_crash,
)

from support.agents import StepCounter
from support.envs import CountingEnv, assert_same_tensors, counting_trajectories
from support.needy import (
    GrowingEnv,
    Needy,
    NeedyAgent,
    NeedyEnv,
    OldNeedyEnv,
    create_manager,
    create_needy,
    create_partly_needy,
)

LENGTHS, IDS = [2, 1], [5, 6]
OBSERVES = ["box", "undeclared dict"]


def env_info(ids: list[int] = IDS) -> DictTensor:
    return DictTensor({"length": torch.tensor(LENGTHS), "id": torch.tensor(ids)})


def agent_info() -> DictTensor:
    return DictTensor({"gain": torch.ones(2)})


class Runs:
    """Both kinds of batcher by one call."""

    def __init__(self, kind: Any, create_env: Any, create_agent: Any, n_threads: int) -> None:
        self.batcher = kind(
            4,
            8,
            create_agent=create_agent,
            create_env=create_env,
            n_threads=n_threads,
            seeds=[0] * n_threads or 0,
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


@pytest.fixture
def runs() -> Iterator[MakeRuns]:
    made: list[Runs] = []

    def make(
        create_env: Any, create_agent: Any = StepCounter, n_threads: int = 1, kind: Any = None
    ) -> Runs:
        made.append(Runs(kind or EpisodeBatcher, create_env, create_agent, n_threads))
        return made[-1]

    yield make
    for each in made:
        each.batcher.close()


PLACES = [
    pytest.param(create_needy, 1, id="a worker"),
    pytest.param(create_manager, 0, id="a manager"),
]
each_place = pytest.mark.parametrize(("create", "n_threads"), PLACES)


@each_place
@pytest.mark.parametrize("kind", [EpisodeBatcher, Batcher])
@pytest.mark.parametrize("observes", OBSERVES)
def test_wrong_infos_then_right_ones(
    runs: MakeRuns, create: Any, n_threads: int, kind: Any, observes: str
) -> None:
    run = runs(partial(create, observes=observes), NeedyAgent, n_threads, kind)
    with pytest.raises(EnvError, match="TypeError") as caught:
        run(agent_info=agent_info())
    assert "pass env_info={" in caught.value.fix
    with pytest.raises(EnvError, match="ids are not negative"):
        run(env_info=env_info([5, -1]), agent_info=agent_info())
    with pytest.raises(AgentError, match="TypeError") as failed:
        run(env_info=env_info())
    assert "pass agent_info={" in failed.value.fix
    for _ in range(2):
        run.assert_right(env_info=env_info(), agent_info=agent_info())


def test_lanes_of_several_workers_agree_on_what_the_first_request_shows(runs: MakeRuns) -> None:
    create = partial(create_partly_needy, observes="undeclared")
    run = runs(create, NeedyAgent, n_threads=2)
    run.assert_right(env_info=env_info(), agent_info=agent_info())


@pytest.mark.parametrize("kind", [GrowingEnv, OldNeedyEnv])
def test_a_manager_shows_what_its_environments_show_with_the_infos(
    runs: MakeRuns, kind: Any
) -> None:
    def create(seed: int) -> ParallelEnvManager:
        return ParallelEnvManager([kind] * 2, seed=seed)

    run = runs(create, NeedyAgent, n_threads=0)
    run.assert_right(env_info=env_info(), agent_info=agent_info())


@pytest.mark.parametrize("is_failed", [False, True])
def test_a_worker_that_dies_before_the_infos_come_is_replaced(
    runs: MakeRuns, is_failed: bool
) -> None:
    run = runs(partial(create_needy, observes="undeclared"))
    if is_failed:
        with pytest.raises(EnvError):
            run()
    (pid,) = worker_pids()
    os.kill(pid, signal.SIGKILL)
    run.assert_right(env_info=env_info())


class DyingEnv(NeedyEnv):
    """Its process dies in the first reset that has options."""

    def __init__(self, path: str) -> None:
        super().__init__("undeclared")
        self.path = path

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if options and not os.path.exists(self.path):
            with open(self.path, "w"):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reset(seed=seed, options=options)


@each_place
def test_a_worker_that_dies_while_it_looks_at_the_infos_is_replaced(
    runs: MakeRuns, tmp_path: Any, create: Any, n_threads: int
) -> None:
    path = str(tmp_path / "died")
    run = runs(partial(create, kind=DyingEnv, path=path), n_threads=n_threads)
    run.assert_right(env_info=env_info())
    assert os.path.exists(path)


# By hand ---------------------------------------------------------------------------------------


def action(*values: int) -> DictTensor:
    return DictTensor({"action": torch.tensor(values)})


@pytest.mark.parametrize("acts", [True, False])
def test_by_hand_a_manager_can_be_reset_with_infos_after_it_failed_without(acts: bool) -> None:
    env_fns = [Needy(observes="undeclared", acts=acts, needs=needs) for needs in (True, True)]
    with ParallelEnvManager(env_fns, seed=0) as manager:
        for _ in range(2):
            with pytest.raises(EnvError, match="TypeError"):
                manager.reset()
        observation, _ = manager.reset(env_info())
        assert observation["frame"].tolist() == [[0, 5], [0, 6]]
        (observation, _), (_, running) = manager.step(action(1, 2))
        assert observation["frame"].tolist() == [[1, 5], [1, 6]]
        assert observation["last_action"].tolist() == [1, 2]
        assert running.tolist() == [0]
        # What is known now is told to a successor.
        os.kill(manager.workers[0].pid or 0, signal.SIGKILL)
        (observation, _), _ = manager.step(action(3))
        assert observation["frame"].tolist() == [[2, 5]]


def test_environments_that_need_infos_may_stand_beside_others() -> None:
    env_fns = [Needy(observes="undeclared", needs=needs) for needs in (True, False, True)]
    with ParallelEnvManager(env_fns, seed=0, envs_per_worker=1) as manager:
        with pytest.raises(EnvError, match="TypeError"):
            manager.reset()
        info = DictTensor({"id": torch.tensor([5, 6, 7])})
        observation, _ = manager.reset(info)
        assert observation["frame"].tolist() == [[0, 5], [0, 6], [0, 7]]


def test_a_remote_is_reset_with_options_after_it_failed_without() -> None:
    with ParallelEnvManager([Needy(observes="undeclared")] * 2, seed=0) as manager:
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
        observation = manager.reset(env_info())[0]
        assert observation["frame"].tolist() == [[0, 5], [0, 6]]


def test_the_capsule_of_a_first_reset_can_be_replayed(tmp_path: Any) -> None:
    make = Needy(observes="undeclared")
    with (
        ParallelEnvManager([make], seed=0, crash_dir=tmp_path) as manager,
        pytest.raises(EnvError, match="ids are not negative") as caught,
    ):
        manager.reset(DictTensor({"id": torch.tensor([-4])}))
    with pytest.raises(AssertionError, match="ids are not negative"):
        replay_crash(caught.value, make)


class DefaultEnv(CountingEnv):
    """Its own default applies where there are no options."""

    def reset(self, env_info: Any = {"id": 8}) -> Any:  # type: ignore[override]  # noqa: B006
        return super().reset(options={"id": env_info["id"]})


def test_in_processes_too_an_environments_own_default_applies(runs: MakeRuns) -> None:
    def create(seed: int, n_envs: int = 2) -> ParallelEnvManager:
        return ParallelEnvManager([DefaultEnv] * n_envs, seed=seed, auto_reset=True)

    run = runs(partial(create_needy, kind=DefaultEnv))
    assert run()["frame"][:, 0].tolist() == [[0, 8], [0, 8]]
    with create(0, 1) as manager:
        assert manager.reset()[0]["frame"].tolist() == [[0, 8]]
        for _ in range(3):
            _, (after, _) = manager.step(action(0))
        assert after["frame"].tolist() == [[0, 8]]
        assert after["initial_state"].tolist() == [True]
        manager.remotes[0].send(("reset", None))
        assert manager.remotes[0].recv()[1].tolist() == [0, 8]
    over = runs(create, n_threads=0)  # whose later episodes are begun ahead
    over.batcher.execute(6)
    assert over.batcher.get()["frame"][:, 0].tolist() == [[0, 8]] * 6


class SometimesNeedyEnv(CountingEnv):
    """Declares no observation space; may need its options."""

    def __init__(self, needs: bool) -> None:
        super().__init__(length=2)
        self.needs = needs
        self.observation_space: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.needs and not options:
            raise ValueError("no options")
        return super().reset(seed=seed, options=options)


def test_environments_that_need_infos_beside_one_that_does_not_cost_no_restart() -> None:
    makers = [partial(SometimesNeedyEnv, number != 1) for number in range(3)]
    with ParallelEnvManager(makers, max_restarts=0) as manager:
        observation, running = manager.reset({"length": [2, 2, 2], "id": [4, 5, 6]})
        assert observation["frame"].shape == (3, *observation["frame"].shape[1:])
        (stepped, _), _ = manager.step(DictTensor({"action": torch.zeros(3, dtype=torch.int64)}))
        assert running.tolist() == [0, 1, 2]
        assert stepped["reward"].tolist() == [401.0, 501.0, 601.0]
