"""Environments in processes give the same results as environments in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from process.watching import Script

from rlpool import (
    ParallelEnvManager,
    SpecError,
    UsageError,
    WorkerStartupError,
)

from support.envs import (
    CountingEnv,
    EchoEnv,
)
from support.parallel import (
    SleepyEnv,
    TaskEnv,
    no_actions,
    open_manager,
)

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def sleepy() -> Iterator[ParallelEnvManager]:
    with open_manager(SleepyEnv, 3) as manager:
        yield manager


@pytest.fixture(scope="module")
def tasked() -> Iterator[ParallelEnvManager]:
    with open_manager(TaskEnv, 2) as manager:
        yield manager


def ask(manager: ParallelEnvManager, lane: int, *request: Any) -> Any:
    """Ask one environment through its remote and return its answer."""
    manager.remotes[lane].send(request)
    return manager.remotes[lane].recv()[1]


UNORDERED = """
import torch
import rlpool
from rlpool.batch.dispatch import Dispatcher, Done
from support.agents import ConstantAgent
from support.envs import create_counting
from support.unordered import LockingEnv, locks

ended = set()
on_message = Dispatcher.on_message


def note(self, worker, message):
    ended.update({worker} if isinstance(message, Done) else ())
    on_message(self, worker, message)


if __name__ == "__main__":
    rlpool.preload("support.unordered")
    array = rlpool.Array((1,), "int64", full_size=2, storage="shared")
    with rlpool.ParallelEnvManager([LockingEnv] * 2, info_keys=["locks"]) as env:
        env.reset()
        before, there = len(locks), [0, 0]
        for step in range(1, 6):
            (after, _), _ = env.step(rlpool.DictTensor({"action": torch.zeros(2).long()}))
            assert after["reward"].tolist() == [step, step]
            here, before = len(locks) - before, len(locks)
            last, there = there, after["locks"].tolist()
            # Where steps are posted, and looked for; and once more at the end.
            assert here >= 4, here
            assert min(now - then for now, then in zip(there, last)) >= 4, (last, there)
        assert array[0] == 0 and len(locks) > before
    array.close()
    assert array.shape == (1,)
    Dispatcher.on_message = note
    args = 20, 8, ConstantAgent, {}, create_counting
    with rlpool.EpisodeBatcher(*args, n_workers=2) as batcher:
        batcher.execute(8)
        assert len(batcher.get()) == 8
    assert ended == {0, 1}  # the state of the other worker is not read from memory
"""


def test_data_is_handed_over_by_the_kernel_on_weakly_ordered_processors(
    run_script: Callable[..., Script],
) -> None:
    script = run_script(UNORDERED)
    script.finish()
    assert script.returncode == 0, script.stderr


# By hand --------------------------------------------------------------------------------------


def test_remotes_report_a_time_limit_as_gymnasium_does() -> None:
    with open_manager(partial(CountingEnv, 10**6), 1, max_episode_steps=2) as manager:
        ask(manager, 0, "reset", None)
        for is_last in (False, True):
            _, _, done, info = ask(manager, 0, "step", 0)
            assert (done, info) == (is_last, {"TimeLimit.truncated": True} if is_last else {})


def test_environments_step_in_parallel_and_waiting_uses_no_cpu_time(
    sleepy: ParallelEnvManager,
) -> None:
    manager = sleepy
    manager.reset_lanes(range(3), [0] * 3, [{"sleep_ms": 0}] * 3)
    manager.step_lanes(range(3), no_actions(manager))  # first-time work costs some
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
    assert 0.5 <= passed_s < 1.25  # sequentially it would take 1.5 s
    time.sleep(0.3)  # the workers wait while the caller learns
    for after, spent in zip(cpu_s(), before, strict=True):
        assert (after - spent) / passed_s < 0.2  # polling would use all of it


def test_step_some_does_not_wait_for_slow_lanes(sleepy: ParallelEnvManager) -> None:
    manager, actions = sleepy, no_actions(sleepy)
    slow = {"sleep_ms": 300, "length": 9}
    manager.reset_lanes(range(3), [0] * 3, [{}, slow, {}])
    for lanes in ([0, 1, 2], [0, 2]):
        assert sorted(manager.step_some(2, lanes, actions)) == [0, 2]
    for call in (
        lambda: manager.step_some(1, [1], actions),
        lambda: manager.step_lanes([0, 1], actions),
        lambda: manager.remotes[1].send(("step", 0)),
    ):
        with pytest.raises(UsageError, match="lane 1 "):
            call()
    assert manager.step_some(0) == []
    assert manager.step_some(5) == [1]  # all that are stepping, though fewer than requested
    assert manager.step_some(5) == []
    assert manager.current["frame"].tolist() == [[2, 0], [1, 0], [2, 0]]


def test_lanes_of_one_worker_step_and_are_reset_one_by_one() -> None:
    manager = open_manager(SleepyEnv, 3, envs_per_worker=2)
    actions = no_actions(manager)
    manager.reset_lanes(range(3), [0] * 3, [{"sleep_ms": 50, "id": lane} for lane in range(3)])
    assert manager.step_some(0, [0], actions) == []
    assert manager.step_some(2, [1], actions) == [0, 1]  # while its worker steps another lane
    assert manager.step_some(0, [0, 1, 2], actions) == []
    manager.reset_lanes([1], [0], [{"id": 5}])  # which discards its step
    assert manager.step_some(2) == [0, 2]
    assert manager.current["frame"].tolist() == [[2, 0], [0, 5], [1, 2]]
    assert manager.step_lanes([0], actions) == [0]
    assert manager.step_lanes([1], actions) == []  # the end of lane 0 is not reported again
    assert manager.current["done"].tolist() == [True, False, False]
    manager.close()


# Remotes --------------------------------------------------------------------------------------


def test_remotes_implement_the_whole_protocol(tasked: ParallelEnvManager) -> None:
    manager = tasked
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
    # A task is an argument of reset if it accepts one, else an option.
    manager.reset_lanes([0, 1], [5, 6], [{"task": 4, "other": 1}, {"task": 2}])
    assert manager.current["frame"].tolist() == [[0, 4], [0, 2]]
    assert ask(manager, 0, "get_attr", {"attr": "given_options"}) == {"other": 1}
    with open_manager(EchoEnv, 1) as echoing:
        assert ask(echoing, 0, "reset", {"task": 9, "options": {"id": 2}})["id"] == 2
        assert ask(echoing, 0, "get_attr", {"attr": "resets"})[-1][1] == {"id": 2, "task": 9}


def test_each_request_has_one_reply(sleepy: ParallelEnvManager) -> None:
    manager, remote = sleepy, sleepy.remotes[0]
    with pytest.raises(UsageError, match="nothing to receive"):
        remote.recv()
    remote.send(("reset", {"options": {"sleep_ms": 200}}))
    assert remote.recv()[0] == "obs"
    remote.send(("step", 0))
    assert not remote.poll()
    for call in (
        lambda: remote.send(("step", 0)),
        lambda: manager.step_lanes([0, 1, 2], no_actions(manager)),
        manager.reset,
    ):
        with pytest.raises(UsageError, match="without an answer"):
            call()
    while not remote.poll(1.0):
        pass
    assert remote.recv()[0] == "transition"


def test_calls_of_a_closed_remote_are_refused_and_the_others_continue() -> None:
    with open_manager(CountingEnv, 3, envs_per_worker=2) as manager:
        manager.reset()
        manager.remotes[2].send(("close", None))  # the last of its worker, which ends
        manager.workers[1].join(5)
        assert [worker.is_alive() for worker in manager.workers] == [True, False]
        for call in (
            lambda: manager.remotes[2].send(("reset", None)),
            lambda: manager.step_lanes([0, 1, 2], no_actions(manager)),
        ):
            with pytest.raises(UsageError, match="environment 2 was closed"):
                call()
        assert manager.step_lanes([0, 1], no_actions(manager)) == []
        for remote in manager.remotes[:2]:
            assert not manager.closed
            remote.send(("close", None))
        assert manager.closed
        assert not any(worker.is_alive() for worker in manager.workers)


# Refusals -------------------------------------------------------------------------------------

ONE = {"action": np.zeros((2, 2), np.float32)}
REFUSED: list[tuple[Callable[[ParallelEnvManager], Any], str]] = [
    (lambda m: m.step_lanes([1, 0], ONE), "lanes"),
    (lambda m: m.reset_lanes([], [], []), "lanes"),
    (lambda m: m.reset_lanes([0], [None], [None]), "seeds"),  # type: ignore[list-item]
    (lambda m: m.step_lanes([0], {"action": np.zeros((2, 3), np.float32)}), "'action'"),
    (lambda m: m.step_lanes([0], {"else": ONE["action"]}), "'action'"),
    (lambda m: m.remotes[0].send(("fly", None)), "request"),
    (lambda m: m.remotes[0].send(("reset", {"task": [0, (n for n in ())]})), "'task'"),
    (lambda m: m.remotes[0].send(("get_attr", {"attr": 3})), "str"),
    (lambda m: m.remotes[0].send(("seed", {"seed": -1})), "seed"),
]


def test_invalid_calls_are_refused_and_change_nothing(tasked: ParallelEnvManager) -> None:
    tasked.reset()
    for call, named in REFUSED:
        with pytest.raises(SpecError, match=named):
            call(tasked)
    assert tasked.step_lanes([0, 1], no_actions(tasked)) == []
    assert ask(tasked, 0, "reset", None) is not None


class NoSpacesEnv(CountingEnv):
    action_space = None


def test_environments_must_declare_their_spaces() -> None:
    with pytest.raises(WorkerStartupError, match="action_space"):
        ParallelEnvManager([NoSpacesEnv])
