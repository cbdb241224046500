"""Workers whose environments die, hang or grow are replaced, and nobody sees it in the data."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from process.watching import n_descriptors, wait_until

from rlpool import (
    EnvError,
    EpisodeBatcher,
    GymEnv,
    ParallelEnvManager,
    UsageError,
    Where,
    WorkerDiedError,
)

from support.agents import StepCounter
from support.envs import assert_same_tensors
from support.fragile import (
    ChancyEnv,
    FragileEnv,
    assert_same_rows,
    failing,
    played,
)
from support.parallel import create_manager, create_serial, no_actions, open_manager
from support.variants import variants

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left"),
    pytest.mark.timeout(60),
    pytest.mark.promise("I3"),
]

MakeFragile = Callable[..., Any]
INFO_KEYS = {"t": int}


@pytest.fixture
def fragile(tmp_path: Path) -> MakeFragile:
    """A function that makes a ``FragileEnv`` whose faults strike once."""
    return partial(FragileEnv, str(tmp_path))


def pids(manager: ParallelEnvManager) -> list[int]:
    return [worker.pid or 0 for worker in manager.workers]


def kill(manager: ParallelEnvManager, worker: int, number: int = signal.SIGKILL) -> None:
    """Kill a worker, and wait until it is dead."""
    os.kill(pids(manager)[worker], number)
    if number == signal.SIGKILL:
        wait_until(lambda: not manager.workers[worker].is_alive())


def ask(manager: ParallelEnvManager, lane: int, *request: Any) -> Any:
    """Ask one environment through its remote; returns what it answers."""
    manager.remotes[lane].send(request)
    return manager.remotes[lane].recv()


# Deaths and hangs -----------------------------------------------------------------------------


@pytest.mark.usefixtures("short_patience")
def test_workers_that_are_hit_from_outside_are_replaced() -> None:
    hits = {0: (0, signal.SIGKILL), 5: (1, signal.SIGSTOP), 8: (1, signal.SIGKILL)}
    options = {"envs_per_worker": 2, "timeout": 0.5, "info_keys": INFO_KEYS}
    with open_manager(FragileEnv, 3, **options) as manager:
        first, before = pids(manager), n_descriptors()

        def hit(step: int) -> None:
            if step in hits:
                kill(manager, *hits[step])

        undisturbed = GymEnv([FragileEnv() for _ in range(3)], 1, info_keys=INFO_KEYS)
        assert_same_rows(played(manager, before_step=hit), played(undisturbed))
        assert not set(first) & set(pids(manager))
        assert n_descriptors() == before


@pytest.mark.promise("I4")
def test_the_others_go_on_while_a_worker_is_replaced(fragile: MakeFragile) -> None:
    with open_manager(fragile, 2) as manager:
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
        assert n_steps > 3  # a process takes much longer to start
        serial.step_lanes([0], no_actions(manager))
        assert manager.current["frame"][0].tobytes() == serial.current["frame"][0].tobytes()


def test_polling_without_waiting_notices_a_death(fragile: MakeFragile) -> None:
    with open_manager(fragile, 1) as manager:
        manager.reset_lanes([0], [7], [failing("sigkill", 0)])
        manager.step_some(0, [0], no_actions(manager))
        wait_until(lambda: manager.step_some(0) == [0])
        assert manager.current["frame"][0, 0] == 1


def test_environments_that_are_not_reproducible_are_not_continued() -> None:
    with open_manager(ChancyEnv, 3, envs_per_worker=2) as manager:
        manager.reset_lanes([0, 1, 2], [5, 6, 7], [{"length": 99}] * 3)
        manager.step_lanes([0, 1, 2], no_actions(manager))
        seen = manager.current["frame"].copy()
        kill(manager, 0)
        with pytest.raises(EnvError, match="not deterministic given its seed") as caught:
            manager.step_lanes([0, 1, 2], no_actions(manager))
        assert caught.value.where[:2] == (0, 0)
        assert manager.current["frame"][:2].tobytes() == seen[:2].tobytes()
        assert manager.current["frame"][2].tobytes() != seen[2].tobytes()  # has made its step
        with pytest.raises(UsageError, match="reset it"):
            manager.step_lanes([0], no_actions(manager))
        kill(manager, 1)
        manager.reset_lanes([0, 1], [5, 6], [{"length": 99}] * 2)
        manager.step_lanes([0, 1], no_actions(manager))
        with pytest.raises(EnvError, match="not deterministic given its seed"):
            manager.step_lanes([2], no_actions(manager))  # it died while it had nothing to do


# The budget -----------------------------------------------------------------------------------


def test_an_exhausted_budget_is_an_error_with_the_history(fragile: MakeFragile) -> None:
    poison = failing("sigkill", 1)
    limits = {"max_restarts": 2, "max_episode_restarts": None}
    with open_manager(partial(fragile, 99), 2, on_env_error="restart", **limits) as manager:
        manager.reset_lanes([0, 1], [4, 5], [None, poison])
        manager.step_lanes([0, 1], no_actions(manager))
        ready = manager.step_some(0, [0], no_actions(manager))  # it may be ready at once
        assert ready + manager.step_some(1) == [0]
        with pytest.raises(WorkerDiedError, match="max_restarts") as caught:
            manager.step_some(1, [1], no_actions(manager))
        assert caught.value.where == Where(1, 1, None, None, 1, 5, poison)
        assert [failure.where for failure in caught.value.history] == [caught.value.where] * 3
        with pytest.raises(WorkerDiedError):
            manager.reset()


# Remotes --------------------------------------------------------------------------------------

REQUESTS: list[tuple[int, Any]] = [
    (0, ("reset", None)),
    (1, ("seed", {"seed": 11})),
    (1, ("reset", {"options": {"length": 9}})),
    (0, ("step", 3)),
    (1, ("step", {"action": 4})),
    (1, ("get_attr", {"attr": "total"})),
    (1, ("step", 5)),
    (0, ("reset", None)),
    (0, ("step", 6)),
    (0, ("get_attr", {"attr": "seed"})),
    (1, ("reset", None)),
    (1, ("get_attr", {"attr": "seed"})),
]


@pytest.mark.promise("I2")
def test_remotes_get_the_same_answers() -> None:
    answers: list[list[str]] = []
    for kills in ((), (3, 9)):
        with open_manager(FragileEnv, 2, envs_per_worker=2) as manager:
            answers.append([])
            for number, (lane, request) in enumerate(REQUESTS):
                if number in kills:
                    kill(manager, 0)
                answers[-1].append(repr(ask(manager, lane, *request)))
    assert answers[0] == answers[1]


def test_a_request_in_the_middle_of_which_a_worker_dies_is_sent_again(
    tmp_path: Path, fragile: MakeFragile
) -> None:
    with open_manager(fragile, 2, envs_per_worker=2, on_env_error="restart") as manager:
        one, other = manager.remotes
        ask(manager, 1, "reset", {"seed": 3})
        for kind in ("sigkill", "raise"):
            ask(manager, 0, "reset", {"seed": 7, "options": failing(kind, 1)})
            assert ask(manager, 0, "step", 1)[1][0][0] == 1
            one.send(("step", 1))
            other.send(("step", 2))
            assert one.recv()[1][0][0] == 2
            assert other.recv()[0] == "transition"
            (tmp_path / "7.1.0").unlink()
        assert ask(manager, 1, "get_attr", {"attr": "total"}) == ("attr", 4)
        other.send(("close", None))
        kill(manager, 0)
        manager.reset_lanes([0], [1], [None])
        with pytest.raises(UsageError, match="closed"):
            other.send(("reset", None))


# Recycling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("envs_per_worker", variants([2], [1]))
def test_workers_are_replaced_after_so_many_episodes(tmp_path: Path, envs_per_worker: int) -> None:
    make_env = partial(FragileEnv, noted_in=str(tmp_path))
    limits = {"max_episodes_per_worker": 4, "max_restarts": 0, "on_worker_failure": "raise"}
    processes = {"make_env": make_env, "envs_per_worker": envs_per_worker, **limits}
    results: list[Any] = []
    for create, env_args in (
        (create_serial, {"make_env": FragileEnv}),
        (create_manager, processes),
    ):
        with EpisodeBatcher(
            9, 16, StepCounter, {}, create, {**env_args, "n_lanes": 2}, n_threads=0, seeds=3
        ) as batcher:
            batcher.execute(12)
            results.append(batcher.get())
    assert_same_tensors(results[1], dict(results[0].items()))
    counts = [len(path.read_text().split()) for path in tmp_path.iterdir()]
    n_repeated = envs_per_worker - 1  # the other lane's, where that is in the middle of one
    assert 4 <= max(counts) <= 4 + n_repeated
    if envs_per_worker == 1:
        assert sum(counts) == 12 + 2  # the batcher resets every lane once, to see what a step is
