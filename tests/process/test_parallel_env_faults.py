"""Failures in a manager's environments, in addition to ``test_fault_matrix``.

The effect on other lanes, the answers of remotes, and the workers that are replaced.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from process.watching import is_running, n_descriptors, wait_until

from rlpool import (
    EnvError,
    GymEnv,
    ParallelEnvManager,
    SpecError,
    UsageError,
    Where,
    WorkerDiedError,
    WorkerStartupError,
)

from support.envs import CountingEnv
from support.faults import FaultyEnv
from support.fragile import ChancyEnv, FragileEnv, assert_same_rows, failing, played
from support.parallel import WideEnv, create_serial, no_actions, open_manager

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left"),
    pytest.mark.timeout(60),
    pytest.mark.promise("I3"),
]


@pytest.fixture(scope="module")
def faulty() -> Iterator[ParallelEnvManager]:
    """Return a manager of three environments in two workers that survives faults."""
    with open_manager(FaultyEnv, 3, envs_per_worker=2) as manager:
        yield manager


def run(manager: ParallelEnvManager, lanes: list[int], seeds: list[int], options: Any) -> None:
    """Reset and make three steps, one of them failing."""
    manager.reset_lanes(lanes, seeds, options)
    for _ in range(3):
        manager.step_lanes(lanes, no_actions(manager))


def assert_works(manager: ParallelEnvManager) -> None:
    lanes = list(range(manager.num_envs))
    manager.reset_lanes(lanes, [1] * len(lanes), [{"id": lane} for lane in lanes])
    for step in range(1, 3):
        assert manager.step_lanes(lanes, no_actions(manager)) == []
        assert manager.current["frame"].tolist() == [[lane, step] for lane in lanes]
    assert manager.step_lanes(lanes, no_actions(manager)) == lanes


# Faults that the manager survives --------------------------------------------------------------


def test_lanes_of_a_failed_worker_are_reset_before_the_others_continue(
    faulty: ParallelEnvManager,
) -> None:
    options = failing("raise", 1, id=7, length=9)
    with pytest.raises(EnvError) as caught:
        run(faulty, [0, 1, 2], [3, 4, 5], [None, options, None])
    assert caught.value.where == Where(0, 1, None, None, 1, 4, options)
    # The lane of the other worker has completed its steps.
    assert faulty.current["frame"][2].tolist() == [0, 2]
    assert faulty.step_lanes([2], no_actions(faulty)) == [2]
    for stale in (0, 1):
        with pytest.raises(UsageError, match=f"lane {stale} cannot step"):
            faulty.step_lanes([stale, 2], no_actions(faulty))
    assert_works(faulty)


def test_two_workers_may_fail_in_one_step(faulty: ParallelEnvManager) -> None:
    with pytest.raises(EnvError) as caught:
        run(faulty, [1, 2], [3, 4], [failing("raise", 0), failing("unpicklable", 0)])
    assert caught.value.where.lane == 1
    # The next error is not the earlier, unreported one:
    with pytest.raises(EnvError, match="KeyError") as caught:
        run(faulty, [2], [9], [failing("raise", 1)])
    assert caught.value.where[1:6] == (2, None, None, 1, 9)
    assert_works(faulty)


def test_a_lanes_failure_is_reported_alongside_the_steps_of_the_others(
    faulty: ParallelEnvManager,
) -> None:
    faulty.reset_lanes([0, 2], [1, 2], [{"length": 9}, failing("raise", 0)])
    reported: list[Any] = []
    lanes = [0, 2]
    while len(reported) < 2:
        try:
            reported += faulty.step_some(1, lanes, no_actions(faulty))
        except EnvError as error:
            reported.append(f"lane {error.where.lane} failed")
        lanes = []
    assert sorted(reported, key=str) == [0, "lane 2 failed"]
    assert_works(faulty)


def test_remotes_answer_with_the_error(faulty: ParallelEnvManager) -> None:
    remote = faulty.remotes[1]
    remote.send(("reset", {"options": failing("raise", 0)}))
    assert remote.recv()[0] == "obs"
    for request, text in (
        (("step", 0), "KeyError: 'struck'"),
        (("get_attr", {"attr": "missing"}), "missing"),
        (("get_attr", {"attr": "_error"}), "Error"),
        (("reset", {"options": failing("unpicklable", -1)}), "UnpicklableError"),
    ):
        remote.send(request)
        kind, answer = remote.recv()
        assert kind == "error"
        assert text in answer
    with pytest.raises(UsageError, match="reset it"):
        remote.send(("step", 0))
    assert_works(faulty)


# Workers that are replaced --------------------------------------------------------------------


def kill(manager: ParallelEnvManager, number: int) -> None:
    """Kill a worker, and wait until it is dead."""
    manager.workers[number].kill()
    wait_until(lambda: not manager.workers[number].is_alive())


@pytest.mark.promise("I4")
def test_other_workers_continue_while_one_is_replaced(tmp_path: Path) -> None:
    with open_manager(partial(FragileEnv, str(tmp_path)), 2) as manager:
        serial = GymEnv([FragileEnv(), FragileEnv()], 1)
        options = [failing("sigkill", 1, length=9), {"length": 10**6}]
        for env in (manager, serial):
            env.reset_lanes([0, 1], [7, 8], options)
            env.step_lanes([0, 1], no_actions(manager))
        ready = manager.step_some(1, [0, 1], no_actions(manager))
        n_steps = 0
        while 0 not in ready:
            ready = manager.step_some(1, ready, no_actions(manager))
            n_steps += 1
        assert n_steps > 3  # starting a process takes much longer
        serial.step_lanes([0], no_actions(manager))
        assert manager.current["frame"][0].tobytes() == serial.current["frame"][0].tobytes()


def test_polling_without_waiting_detects_a_death(tmp_path: Path) -> None:
    with open_manager(partial(FragileEnv, str(tmp_path)), 1) as manager:
        manager.reset_lanes([0], [7], [failing("sigkill", 0)])
        manager.step_some(0, [0], no_actions(manager))
        wait_until(lambda: manager.step_some(0) == [0])
        assert manager.current["frame"][0, 0] == 1


def test_episodes_of_nonreproducible_environments_are_not_continued() -> None:
    with open_manager(ChancyEnv, 3, envs_per_worker=2) as manager:
        manager.reset_lanes([0, 1, 2], [5, 6, 7], [{"length": 99}] * 3)
        manager.step_lanes([0, 1, 2], no_actions(manager))
        seen = manager.current["frame"].copy()
        kill(manager, 0)
        with pytest.raises(EnvError, match="not deterministic given its seed") as caught:
            manager.step_lanes([0, 1, 2], no_actions(manager))
        assert caught.value.where[:2] == (0, 0)
        assert manager.current["frame"][:2].tobytes() == seen[:2].tobytes()
        assert manager.current["frame"][2].tobytes() != seen[2].tobytes()  # has completed its step
        with pytest.raises(UsageError, match="reset it"):
            manager.step_lanes([0], no_actions(manager))


def test_a_request_is_sent_again_if_its_worker_dies(tmp_path: Path) -> None:
    make_env = partial(FragileEnv, str(tmp_path))
    with open_manager(make_env, 2, envs_per_worker=2, on_env_error="restart") as manager:
        one, other = manager.remotes
        other.send(("reset", {"seed": 3}))
        other.recv()
        for seed, kind in enumerate(("sigkill", "raise")):
            one.send(("reset", {"seed": seed, "options": failing(kind, 0)}))
            one.recv()
            one.send(("step", 1))
            other.send(("step", 2))
            assert one.recv()[1][0][0] == 1
            assert other.recv()[0] == "transition"
        other.send(("get_attr", {"attr": "total"}))
        assert other.recv() == ("attr", 4)


def test_workers_are_replaced_after_a_given_number_of_episodes() -> None:
    limits = {"max_episodes_per_worker": 2, "max_restarts": 0, "on_worker_failure": "raise"}
    pids: list[int | None] = []  # the last lane's worker; its episodes have five steps
    with open_manager(FragileEnv, 3, envs_per_worker=2, **limits) as manager:
        got = played(manager, before_step=lambda _: pids.append(manager.workers[1].pid))
    assert_same_rows(got, played(create_serial(1, FragileEnv, 3)))
    assert [pid == pids[0] for pid in pids] == [True] * 10 + [False] * 5


def test_a_caller_waiting_only_for_other_workers_detects_a_death() -> None:
    with open_manager(CountingEnv, 2, on_worker_failure="raise") as manager:
        manager.reset_lanes([0, 1], [0, 0], [{"length": 10**6}] * 2)
        pid = manager.workers[1].pid
        os.kill(pid, signal.SIGKILL)
        manager.workers[1].join(5)  # a zombie's threads may still be ending

        def step_often() -> None:
            for _ in range(110):
                manager.step_lanes([0], no_actions(manager))

        with pytest.raises(WorkerDiedError, match="worker 1 died"):
            step_often()


# Starting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_env", "envs_per_worker", "error", "names"),
    [
        (WideEnv, 2, WorkerStartupError, "observation_space of environment 1"),
        (WideEnv, 1, SpecError, "spaces of environment"),
        ((lambda g: lambda: g)(iter(())), 1, WorkerStartupError, "iterator"),
        (3, 1, SpecError, "functions"),
    ],
)
def test_an_environment_that_cannot_be_created_is_reported(
    make_env: Any, envs_per_worker: int, error: type[Exception], names: str
) -> None:
    before = n_descriptors()
    with pytest.raises(error, match=names):
        ParallelEnvManager([CountingEnv, make_env], envs_per_worker=envs_per_worker)
    gc.collect()
    assert n_descriptors() <= before + 2  # the tracker of multiprocessing


def killed(lane: int) -> CountingEnv:
    """Create an environment; the second call ends its process."""
    if lane == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return CountingEnv()


def test_a_constructor_that_ends_its_process_is_named() -> None:
    env_fns = [partial(killed, lane) for lane in range(2)]
    with pytest.raises(WorkerDiedError) as caught:
        ParallelEnvManager(env_fns, envs_per_worker=2, on_worker_failure="raise")
    assert (caught.value.where.worker, caught.value.where.lane) == (0, 1)


@pytest.mark.parametrize(
    "options",
    [
        *({"env_fns": []}, {"env_fns": CountingEnv}, {"envs_per_worker": 0}, {"timeout": 0}),
        *({"min_ready": 0}, {"max_episode_steps": 0}, {"on_worker_failure": "retry"}),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(options))):
        ParallelEnvManager(**{"env_fns": [CountingEnv], **options})


# The end --------------------------------------------------------------------------------------


@pytest.mark.promise("I5")
def test_every_call_after_close_is_refused() -> None:
    before = n_descriptors()
    manager = open_manager(CountingEnv, 2, envs_per_worker=2)
    manager.reset()
    actions = no_actions(manager)
    manager.close()
    manager.close()
    assert manager.closed
    assert n_descriptors() <= before + 2  # the tracker of multiprocessing
    for call in (
        manager.reset,
        lambda: manager.step_lanes([0, 1], actions),
        lambda: manager.step_some(1),
        lambda: manager.remotes[0].send(("reset", None)),
        lambda: manager.remotes[0].recv(),
        lambda: manager.remotes[0].poll(),
    ):
        with pytest.raises(UsageError, match="closed"):
            call()


@pytest.mark.promise("I5")
def test_a_dropped_manager_ends_its_workers() -> None:
    manager = open_manager(CountingEnv, 1)
    manager.reset()
    kept = manager.current["frame"]
    pid = manager.workers[0].pid or 0
    gc.disable()  # it does not take the garbage collector
    try:
        del manager
        assert not is_running(pid)
    finally:
        gc.enable()
    assert kept.tolist() == [[0, 0]]  # results handed out earlier stay valid
