"""Environments in processes give what environments in this process give."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from gymnasium.spaces import Discrete

from rlpool import (
    DictTensor,
    EpisodeBatcher,
    ParallelEnvManager,
    SpecError,
    UsageError,
    WorkerStartupError,
)

from support.agents import StepCounter, Vandal
from support.envs import (
    CountingEnv,
    EchoEnv,
    assert_same_tensors,
    counting_trajectories,
)
from support.faults import KINDS
from support.fragile import FragileEnv
from support.parallel import (
    SleepyEnv,
    TaskEnv,
    create_manager,
    create_serial,
    no_actions,
    open_manager,
)
from support.variants import variants

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(60)]

OpenManager = Callable[..., ParallelEnvManager]


@pytest.fixture
def manager_of() -> Iterator[OpenManager]:
    """A function that opens managers, which are closed afterwards."""
    managers: list[ParallelEnvManager] = []

    def open_one(make_env: Callable[[], Any], n_lanes: int = 2, **options: Any) -> Any:
        managers.append(open_manager(make_env, n_lanes, **options))
        return managers[-1]

    yield open_one
    for manager in managers:
        manager.close()


def _shared(make_env: Callable[[], Any], n_lanes: int, **options: Any) -> Any:
    @pytest.fixture(scope="module")
    def shared() -> Iterator[ParallelEnvManager]:
        with open_manager(make_env, n_lanes, **options) as manager:
            yield manager

    return shared


sleepy = _shared(SleepyEnv, 3)
in_pairs = _shared(SleepyEnv, 3, envs_per_worker=2)
tasked = _shared(TaskEnv, 2)
echoing = _shared(EchoEnv, 2)


def ask(manager: ParallelEnvManager, lane: int, *request: Any) -> Any:
    """Ask one environment through its remote; returns what it answers."""
    manager.remotes[lane].send(request)
    return manager.remotes[lane].recv()[1]


# The rollout loop runs over it ----------------------------------------------------------------


@pytest.mark.parametrize("min_ready", variants([1], [None]))
def test_an_agent_may_change_what_it_sees_while_workers_write(
    min_ready: int | None, tmp_path: Path
) -> None:
    """A worker that dies repeats its episodes, and compares what they show with what was shown."""

    def collected(spares: bool, create_env: Any, **env_args: Any) -> Any:
        options: dict[str, Any] = {
            "n_threads": 0,
            "seeds": 1,
            "env_args": {"n_lanes": 3} | env_args,
        }
        lengths, faults = 2 + torch.arange(20) % 7, torch.zeros(20, dtype=torch.int64)
        faults[[4, 11]] = KINDS.index("sigkill")
        env_info = {"length": lengths, "fault": faults, "fault_step": 1}
        with EpisodeBatcher(16, 24, partial(Vandal, spares), {}, create_env, **options) as batcher:
            batcher.execute(20, {"gain": torch.arange(20)}, env_info)
            return batcher.get()

    make_fragile = partial(FragileEnv, str(tmp_path))
    got = collected(False, create_manager, make_env=make_fragile, min_ready=min_ready)
    expected = collected(True, create_serial, make_env=FragileEnv)
    assert len(list(tmp_path.iterdir())) == 2
    assert_same_tensors(got, dict(expected.items()))


@pytest.mark.promise("I1")
def test_the_loop_goes_on_without_slow_lanes_and_results_stay_in_order() -> None:
    # In each round another lane is slow: in step, three slow episodes would take 1.2 s.
    sleep_ms = torch.tensor([[100, 0, 0], [0, 100, 0], [0, 0, 100]]).flatten()
    info = DictTensor({"id": torch.arange(9), "length": torch.full((9,), 4), "sleep_ms": sleep_ms})
    env_args = {"make_env": SleepyEnv, "n_lanes": 3, "min_ready": 1}
    with EpisodeBatcher(
        4, 9, StepCounter, {}, create_manager, env_args, n_threads=0, seeds=1
    ) as batcher:
        start = time.monotonic()
        batcher.execute(9, env_info=info)
        assert_same_tensors(batcher.get(), counting_trajectories([4] * 9, list(range(9))))
        assert time.monotonic() - start < 1.2


# By hand --------------------------------------------------------------------------------------


def test_step_lanes_steps_only_those_lanes(in_pairs: ParallelEnvManager) -> None:
    manager = in_pairs
    manager.reset_lanes(range(3), [0] * 3, [{"id": lane, "length": 3} for lane in range(3)])
    actions = no_actions(manager)
    assert manager.step_lanes([1, 2], actions) == []
    assert manager.step_lanes(range(3), actions) == []
    assert manager.step_lanes([1], actions) == [1]
    assert manager.current["frame"].tolist() == [[1, 0], [3, 1], [2, 2]]
    assert manager.current["reward"].tolist() == [1, 103, 202]
    assert manager.current["done"].tolist() == [False, True, False]
    assert manager.step_lanes([0, 2], actions) == [2]  # that lane 1 ended is not reported again


def test_a_time_limit_truncates(manager_of: OpenManager) -> None:
    manager = manager_of(partial(CountingEnv, 10**6), 1, max_episode_steps=2)
    manager.reset()
    assert manager.step_lanes([0], no_actions(manager)) == []
    assert manager.step_lanes([0], no_actions(manager)) == [0]
    assert manager.current["truncated"].all()
    assert not manager.current["terminated"].any()
    ask(manager, 0, "reset", None)
    for is_last in (False, True):
        _, _, done, info = ask(manager, 0, "step", 0)
        assert (done, info) == (is_last, {"TimeLimit.truncated": True} if is_last else {})


def test_environments_step_at_the_same_time_and_waiting_costs_no_processor_time(
    sleepy: ParallelEnvManager,
) -> None:
    manager = sleepy
    manager.reset_lanes(range(3), [0] * 3, [{"sleep_ms": 0}] * 3)
    manager.step_lanes(range(3), no_actions(manager))  # what is done for the first time costs some
    manager.reset_lanes(range(3), [0] * 3, [{"sleep_ms": 250}] * 3)
    processes = [psutil.Process(), *(psutil.Process(worker.pid) for worker in manager.workers)]

    def cpu_s() -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in processes]

    start, before = time.monotonic(), cpu_s()
    manager.step_lanes(range(3), no_actions(manager))
    for remote in manager.remotes:
        remote.send(("step", 0))
    for remote in manager.remotes:
        assert remote.recv()[0] == "transition"
    passed_s = time.monotonic() - start
    assert 0.5 <= passed_s < 1.25  # one by one it would be 1.5 s
    for after, spent in zip(cpu_s(), before, strict=True):
        assert (after - spent) / passed_s < 0.2  # to poll would cost all of it


def test_workers_that_wait_for_the_caller_cost_no_processor_time(
    in_pairs: ParallelEnvManager,
) -> None:
    manager = in_pairs
    manager.reset_lanes(range(3), [0] * 3, [None] * 3)
    manager.step_lanes(range(3), no_actions(manager))
    processes = [psutil.Process(worker.pid) for worker in manager.workers]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(0.6)  # as long as the caller learns
    for process, spent in zip(processes, before, strict=True):
        # Time that was spent before may be counted late.
        assert sum(process.cpu_times()[:2]) - spent < 0.15


def test_no_step_is_lost_however_long_either_side_takes(manager_of: OpenManager) -> None:
    """Pauses of all lengths around the moment when a side that has waited falls asleep."""
    manager = manager_of(SleepyEnv, timeout=2, on_worker_failure="raise")
    rng = np.random.default_rng(0)
    for _ in range(10):
        sleep_ms = rng.uniform(0, 0.8, 2).tolist()
        manager.reset_lanes([0, 1], [0, 0], [{"sleep_ms": ms, "length": 99} for ms in sleep_ms])
        time.sleep(0.03)  # long enough for a worker to be sound asleep
        for step in range(1, 16):
            until_s = time.perf_counter() + rng.uniform(0, 0.0008)
            while time.perf_counter() < until_s:
                pass
            manager.step_lanes([0, 1], no_actions(manager))
            assert manager.current["frame"][:, 0].tolist() == [step, step]


@pytest.mark.parametrize("lanes", [[1, 0], [0, 0], [3], []], ids=str)
def test_lanes_and_actions_that_do_not_exist_are_refused(
    in_pairs: ParallelEnvManager, lanes: list[int]
) -> None:
    manager = in_pairs
    manager.reset()
    with pytest.raises(SpecError, match="lanes"):
        manager.step_lanes(lanes, no_actions(manager))
    with pytest.raises(SpecError, match="lanes"):
        manager.reset_lanes(lanes, [0] * len(lanes), [None] * len(lanes))
    for seed in (2**63, None):
        with pytest.raises(SpecError, match="seeds of 1 lanes"):
            manager.reset_lanes([0], [seed], [None])  # type: ignore[list-item]
    for actions in ({"action": np.zeros((3, 2), np.int64)}, {"else": np.zeros(3, np.int64)}):
        with pytest.raises(SpecError, match="'action'"):
            manager.step_lanes([0], actions)
    assert manager.step_lanes([0], no_actions(manager)) == []


def test_step_some_does_not_wait_for_slow_lanes(sleepy: ParallelEnvManager) -> None:
    manager = sleepy
    slow = {"sleep_ms": 700, "length": 9}
    manager.reset_lanes(range(3), [0] * 3, [{"length": 9}, slow, {"length": 9}])
    actions = no_actions(manager)
    assert sorted(manager.step_some(2, [0, 1, 2], actions)) == [0, 2]
    for _ in range(3):
        assert manager.step_some(2, [0, 2], actions) == [0, 2]
    for call in (
        lambda: manager.step_some(1, [1], actions),
        lambda: manager.step_lanes([0, 1], actions),
        lambda: manager.remotes[1].send(("step", 0)),
    ):
        with pytest.raises(UsageError, match="lane 1 is stepping already"):
            call()
    assert manager.step_some(0) == []
    assert manager.step_some(5) == [1]  # all that are stepping, though fewer than asked for
    assert manager.step_some(5) == []
    assert manager.current["frame"].tolist() == [[4, 0], [1, 0], [4, 0]]


def test_a_lane_steps_while_another_one_of_its_worker_does(in_pairs: ParallelEnvManager) -> None:
    manager = in_pairs
    options = [{"sleep_ms": 50, "id": lane} for lane in range(3)]
    manager.reset_lanes(range(3), [0] * 3, options)
    assert manager.step_some(0, [0], no_actions(manager)) == []
    assert manager.step_some(2, [1], no_actions(manager)) == [0, 1]
    assert manager.step_some(0, [0], no_actions(manager)) == []
    manager.step_lanes([1, 2], no_actions(manager))
    assert manager.step_some(1) == [0]
    assert manager.current["frame"].tolist() == [[2, 0], [2, 1], [1, 2]]


def test_a_reset_gives_up_the_step_of_a_lane(in_pairs: ParallelEnvManager) -> None:
    manager = in_pairs
    options = [{"sleep_ms": 50, "id": lane} for lane in range(3)]
    manager.reset_lanes(range(3), [0] * 3, options)
    assert manager.step_some(0, [0, 1, 2], no_actions(manager)) == []
    manager.reset_lanes([1], [0], [{"id": 5}])
    assert manager.step_some(2) == [0, 2]
    assert manager.current["frame"].tolist() == [[1, 0], [0, 5], [1, 2]]


# Remotes --------------------------------------------------------------------------------------


def test_remotes_speak_the_whole_protocol(
    tasked: ParallelEnvManager, echoing: ParallelEnvManager
) -> None:
    manager = tasked
    assert (manager.num_envs, len(manager.workers), len(manager.remotes)) == (2, 2, 2)
    assert (manager.n_tasks, manager.horizon_bamdp) == (7, 3)
    assert manager.observation_space == TaskEnv.observation_space
    assert manager.action_space == TaskEnv.action_space
    for task, remote in enumerate(manager.remotes):
        remote.send(("reset", {"task": task}))
    for task, remote in enumerate(manager.remotes):
        kind, observation = remote.recv()
        assert (kind, observation.tolist()) == ("obs", [0, task])
    action, remote = np.array([0.5, -0.5]), manager.remotes[1]
    for step, request in enumerate((action, {"action": action}, torch.from_numpy(action)), 1):
        remote.send(("step", request))
        kind, (observation, reward, done, info) = remote.recv()
        assert (kind, observation.tolist(), reward) == ("transition", [step, 1], float(step))
        assert (done, info) == (step == 3, {"t": step})
        assert type(done) is bool
    assert ask(manager, 1, "get_attr", {"attr": "last_action"}).tolist() == [0.5, -0.5]
    assert ask(manager, 1, "get_attr", {"attr": "pid"}) == manager.workers[1].pid
    assert ask(manager, 1, "reset", None).tolist() == [0, -1]
    assert manager.current["frame"].tolist() == [[0, 0], [0, -1]]
    # A task is an argument of reset, if it has one, else an option.
    manager.reset_lanes([0, 1], [5, 6], [{"task": 4, "other": 1}, {"task": 2}])
    assert manager.current["frame"].tolist() == [[0, 4], [0, 2]]
    assert ask(manager, 0, "get_attr", {"attr": "given_options"}) == {"other": 1}
    assert ask(echoing, 0, "reset", {"task": 9, "options": {"id": 2}})["id"] == 2
    assert ask(echoing, 0, "get_attr", {"attr": "resets"})[-1][1] == {"id": 2, "task": 9}


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (("fly", None), "a request is one of reset, step"),
        ("reset", "a request is"),
        (("reset", 3), "'task'"),
        (("reset", {"goal": 3}), "'task'"),
        (("get_attr", "t"), "'attr'"),
        (("get_attr", {"attr": 3}), "should be a str"),
        (("seed", {"seed": -1}), "a seed should be"),
        (("seed", None), "'seed'"),
        (("reset", {"task": [0, (n for n in ())]}), r"'task'\]\[1\] is a generator"),
    ],
)
def test_requests_that_are_none_are_refused(
    tasked: ParallelEnvManager, request_: Any, text: str
) -> None:
    with pytest.raises(SpecError, match=text):
        tasked.remotes[0].send(request_)
    assert ask(tasked, 0, "reset", None) is not None


def test_one_request_has_one_reply(sleepy: ParallelEnvManager) -> None:
    manager = sleepy
    remote = manager.remotes[0]
    with pytest.raises(UsageError, match="nothing to receive"):
        remote.recv()
    assert not remote.poll()
    remote.send(("reset", {"options": {"sleep_ms": 200}}))
    for call in (lambda: remote.send(("step", 0)), manager.reset):
        with pytest.raises(UsageError, match="without an answer"):
            call()
    assert remote.recv()[0] == "obs"
    remote.send(("step", 0))
    assert not remote.poll()
    with pytest.raises(UsageError, match="without an answer"):
        manager.step_lanes([0, 1, 2], no_actions(manager))
    while not remote.poll(1.0):
        pass
    assert remote.recv()[0] == "transition"


class CheckedEnv(CountingEnv):
    """Shows whether another function than Gymnasium's checks its actions."""

    @property
    def checks_cheaply(self) -> bool:
        return hasattr(Discrete.contains, "__wrapped__")


def test_workers_check_actions_the_cheap_way(manager_of: OpenManager) -> None:
    manager = manager_of(partial(CheckedEnv, 3))
    assert ask(manager, 0, "get_attr", {"attr": "checks_cheaply"})
    assert not hasattr(Discrete.contains, "__wrapped__")  # only there


def test_a_closed_remote_is_refused_and_the_others_go_on(manager_of: OpenManager) -> None:
    manager = manager_of(CountingEnv, 3, envs_per_worker=2)
    manager.reset()
    manager.remotes[2].send(("close", None))  # the last of its worker, which ends
    manager.workers[1].join(5)
    assert [worker.is_alive() for worker in manager.workers] == [True, False]
    with pytest.raises(UsageError, match="environment 2 was closed"):
        manager.remotes[2].send(("reset", None))
    with pytest.raises(UsageError, match="environment 2 was closed"):
        manager.step_lanes([0, 1, 2], no_actions(manager))
    assert manager.step_lanes([0, 1], no_actions(manager)) == []
    manager.remotes[0].send(("close", None))
    assert not manager.closed
    manager.remotes[1].send(("close", None))
    assert manager.closed
    assert not any(worker.is_alive() for worker in manager.workers)


class NoActionSpaceEnv(CountingEnv):
    action_space = None


class NoObservationSpaceEnv(CountingEnv):
    observation_space = None


@pytest.mark.parametrize(
    ("make_env", "space"),
    [(NoActionSpaceEnv, "action_space"), (NoObservationSpaceEnv, "observation_space")],
)
def test_environments_have_to_declare_their_spaces(make_env: Any, space: str) -> None:
    with pytest.raises(WorkerStartupError, match=f"without {space}") as caught:
        ParallelEnvManager([make_env])
    assert f"attribute {space}" in caught.value.fix
