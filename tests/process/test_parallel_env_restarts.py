"""Workers with environments that die, hang or grow are replaced, and nobody sees it in the data."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from process.watching import is_running, n_descriptors, wait_until

from rlpool import (
    DictTensor,
    EnvError,
    EpisodeBatcher,
    GymEnv,
    ParallelEnvManager,
    UsageError,
    WorkerDiedError,
    WorkerTimeoutError,
)

from support.agents import StepCounter
from support.faults import ENDINGS, FaultyEnv
from support.fragile import (
    ChancyEnv,
    FragileEnv,
    LeakingEnv,
    UndeclaredEnv,
    assert_same_rows,
    failing,
    played,
)
from support.parallel import create_manager, create_serial, no_actions, open_manager

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(240)]


@pytest.fixture
def fragile(tmp_path: Path) -> Callable[..., Any]:
    """A function that makes a ``FragileEnv`` whose faults strike once."""
    (tmp_path / "marks").mkdir()
    return partial(FragileEnv, str(tmp_path / "marks"))


def pids(manager: ParallelEnvManager) -> list[int]:
    return [worker.pid or 0 for worker in manager.workers]


def kill(manager: ParallelEnvManager, worker: int, number: int = signal.SIGKILL) -> None:
    """Kill a worker, and wait until it is dead."""
    os.kill(pids(manager)[worker], number)
    if number == signal.SIGKILL:
        wait_until(lambda: not manager.workers[worker].is_alive())


def undisturbed(options: dict[int, dict[str, int]], n_lanes: int = 3, **how: Any) -> Any:
    return played(GymEnv([FragileEnv() for _ in range(n_lanes)], 1), options, **how)


# Deaths and hangs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "step"),
    [("sigkill", 2), ("sigkill", -1), ("os_exit", 0), ("segfault", 1), ("hang", 1)],
)
def test_a_failure_in_the_middle_of_episodes_is_not_seen(
    fragile: Callable[..., Any], kind: str, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    options = {1: failing(kind, step), 2: {"length": 9}, 4: failing(kind, step)}
    timeout = 0.5 if kind == "hang" else 60.0
    with open_manager(fragile, 3, envs_per_worker=2, timeout=timeout) as manager:
        before = pids(manager)
        with caplog.at_level(logging.WARNING, "rlpool"):
            assert_same_rows(played(manager, options), undisturbed(options))
        assert pids(manager)[0] != before[0]
        assert all(worker.is_alive() for worker in manager.workers)
        last = pids(manager)
    assert not any(worker.is_alive() for worker in manager.workers)
    assert pids(manager) == last
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    how = {"hang": "made no progress", "os_exit": "died (exit code 17)"}.get(kind, "died (SIG")
    assert texts[0].startswith(f"worker 0 {how}")
    assert "lane 1" in texts[0]
    assert "restart 1 of 16" in texts[0]


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda s: s.name)
def test_workers_that_are_hit_from_outside_are_replaced(number: int) -> None:
    with open_manager(FragileEnv, 3, envs_per_worker=2, timeout=0.5) as manager:
        first = pids(manager)

        def hit(step: int) -> None:
            if step in (0, 5):
                kill(manager, step % 2, number)

        assert_same_rows(played(manager, {}, before_step=hit), undisturbed({}))
        assert not set(first) & set(pids(manager))


def test_episodes_begun_ahead_are_begun_again() -> None:
    options = {"make_env": FragileEnv, "n_lanes": 4}
    results = []
    for create in (create_serial, create_manager):
        with EpisodeBatcher(6, 16, StepCounter, {}, create, options, n_threads=0, seeds=3) as one:
            for _ in range(2):
                one.execute(24)
                if create is create_manager:
                    for child in psutil.Process().children()[-2:]:
                        child.kill()
                result = one.get()
                assert result is not None
                results.append(result)
    for mine, theirs in zip(results[2:], results[:2], strict=True):
        assert mine.lengths.tolist() == theirs.lengths.tolist()
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


def test_an_episode_begun_ahead_is_forgotten_with_its_worker() -> None:
    with open_manager(FragileEnv, 2, envs_per_worker=2) as manager:
        serial = GymEnv([FragileEnv(), FragileEnv()], 1)
        actions = {"action": np.array([3, 4])}
        manager.announce_episodes([0, 1, 2, 3], {})
        for env in (manager, serial):
            env.reset_lanes([0, 1], [0, 1], [None, None])
            assert [env.step_lanes([0, 1], actions) for _ in range(3)] == [[], [], [0]]
        kill(manager, 0)
        for env in (manager, serial):
            assert env.step_lanes([1], actions) == [1]
            env.reset_lanes([0], [2], [None])
            env.step_lanes([0], actions)
        assert manager.current["frame"].tobytes() == serial.current["frame"].tobytes()


def test_the_others_go_on_while_a_worker_is_replaced(fragile: Callable[..., Any]) -> None:
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
        assert n_steps > 20  # a process takes much longer to start
        serial.step_lanes([0], no_actions(manager))
        assert manager.current["frame"][0].tobytes() == serial.current["frame"][0].tobytes()


def test_polling_without_waiting_notices_a_death(fragile: Callable[..., Any]) -> None:
    with open_manager(fragile, 1) as manager:
        manager.reset_lanes([0], [7], [failing("sigkill", 0)])
        manager.step_some(0, [0], no_actions(manager))
        wait_until(lambda: manager.step_some(0) == [0])
        assert manager.current["frame"][0, 0] == 1


def test_environments_without_an_action_space_are_continued_as_well(tmp_path: Path) -> None:
    options = {0: failing("sigkill", 2)}
    serial = played(GymEnv([UndeclaredEnv() for _ in range(2)], 1), options)
    with open_manager(partial(UndeclaredEnv, str(tmp_path)), 2) as manager:
        assert_same_rows(played(manager, options), serial)


def test_a_death_in_the_constructor_is_tried_again_and_then_reported(tmp_path: Path) -> None:
    with pytest.raises(WorkerDiedError, match="3 times before it was ready") as caught:
        open_manager(partial(os._exit, 17), 1)
    assert [error.exitcode for error in caught.value.history] == [17] * 3  # type: ignore[attr-defined]


def test_restarts_leave_nothing_behind(fragile: Callable[..., Any]) -> None:
    with open_manager(FragileEnv, 1) as manager:
        manager.reset_lanes([0], [1], [{"length": 10**6}])
        manager.step_lanes([0], no_actions(manager))
        before = n_descriptors()
        for _ in range(3):
            kill(manager, 0)
            manager.step_lanes([0], no_actions(manager))
        assert n_descriptors() == before
    gc.collect()


# The budget -----------------------------------------------------------------------------------


def test_an_exhausted_budget_is_an_error_with_the_history(fragile: Callable[..., Any]) -> None:
    poison = failing("sigkill", 1)
    with open_manager(partial(fragile, 99), 2, max_restarts=2) as manager:
        manager.reset_lanes([0, 1], [4, 5], [None, poison])
        manager.step_lanes([0, 1], no_actions(manager))
        with pytest.raises(WorkerDiedError, match="max_restarts") as caught:
            manager.step_lanes([0, 1], no_actions(manager))
        error = pickle.loads(pickle.dumps(caught.value))
        assert error.where == (1, 1, None, 1, 5, poison)
        assert (error.exitcode, error.signal_name) == (-9, "SIGKILL")
        assert "after 2 restarts" in str(error)
        assert [type(failure) for failure in error.history] == [WorkerDiedError] * 3
        assert [failure.where for failure in error.history] == [error.where] * 3
        with pytest.raises(WorkerDiedError):
            manager.reset()


def test_a_hang_counts_like_a_death(fragile: Callable[..., Any]) -> None:
    with open_manager(fragile, 1, max_restarts=0, timeout=0.5) as manager:
        manager.reset_lanes([0], [4], [failing("hang", 0)])
        with pytest.raises(WorkerDiedError, match=r"no progress for 0\.5 s") as caught:
            manager.step_lanes([0], no_actions(manager))
        assert [type(failure) for failure in caught.value.history] == [WorkerTimeoutError]


# Environments that raise ----------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "step"), [("raise", 2), ("raise", -1), ("wrong_flag", 1)])
def test_environments_that_raise_are_replaced_if_that_is_wanted(
    tmp_path: Path, fragile: Callable[..., Any], kind: str, step: int
) -> None:
    options = {1: failing(kind, step), 3: failing(kind, step)}
    with open_manager(fragile, 3, envs_per_worker=2, on_env_error="restart") as manager:
        before = pids(manager)
        assert_same_rows(played(manager, options), undisturbed(options))
        if kind == "raise":
            assert pids(manager)[0] != before[0]


@pytest.mark.parametrize("step", [0, -1], ids=["step", "reset"])
def test_an_environment_that_raises_and_takes_its_worker_down_is_one_failure(
    fragile: Callable[..., Any], step: int, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        open_manager(fragile, 2, on_env_error="restart", timeout=30.0) as manager,
        caplog.at_level(logging.WARNING, "rlpool"),
    ):
        first = pids(manager)
        if step < 0:  # as an order, then as a remote's request
            manager.reset_lanes([0], [1], [failing("raise_and_die", -1)])
            manager.remotes[1].send(("reset", {"seed": 2, "options": failing("raise_and_die", -1)}))
            wait_until(lambda: not is_running(first[1]))
            assert manager.remotes[1].recv()[0] == "obs"
        else:
            manager.reset_lanes([0, 1], [1, 2], [failing("raise_and_die", step)] * 2)
            for lane in (0, 1):
                assert manager.step_some(0, [lane], no_actions(manager)) == []
                wait_until(lambda lane=lane: not is_running(first[lane]))
                assert manager.step_some(1) == [lane]
        second = pids(manager)
        assert not set(first) & set(second)
        for _ in range(3):
            manager.reset_lanes([0, 1], [3, 4], [None, None])
            manager.step_lanes([0, 1], no_actions(manager))
        assert pids(manager) == second
    assert len(caplog.records) == 2
    assert "restart 2 of 16" in caplog.records[1].getMessage()


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("ending", ENDINGS)
def test_an_environment_that_raises_and_then_fails_to_close_is_one_failure(
    fragile: Callable[..., Any], ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_env = partial(fragile, close_fault=ending)
    with (
        open_manager(make_env, 1, on_env_error="restart", max_restarts=1, timeout=None) as manager,
        caplog.at_level(logging.WARNING, "rlpool"),
    ):
        manager.reset_lanes([0], [1], [failing("raise", 1)])
        for _ in range(3):
            manager.step_lanes([0], no_actions(manager))
    assert len(caplog.records) == 1


def test_too_many_that_raise_are_an_error_with_the_history(fragile: Callable[..., Any]) -> None:
    with open_manager(partial(fragile, 99), 2, on_env_error="restart", max_restarts=1) as manager:
        manager.reset_lanes([0, 1], [4, 5], [failing("raise", 0), None])
        ready = manager.step_some(0, [1], no_actions(manager))  # it may be ready at once
        assert ready + manager.step_some(1) == [1]
        with pytest.raises(WorkerDiedError, match="KeyError: 'struck'") as caught:
            manager.step_some(1, [0], no_actions(manager))
        assert [type(failure) for failure in caught.value.history] == [EnvError] * 2
        assert caught.value.history[0].where[:4] == (0, 0, None, 0)
        assert "in strike" in str(caught.value.__cause__)


def test_by_default_environments_that_raise_are_reported(fragile: Callable[..., Any]) -> None:
    with open_manager(fragile, 1) as manager:
        before = pids(manager)
        manager.reset_lanes([0], [4], [failing("raise", 0)])
        with pytest.raises(EnvError, match="KeyError: 'struck'"):
            manager.step_lanes([0], no_actions(manager))
        assert pids(manager) == before


# What cannot be repeated ----------------------------------------------------------------------


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


# Remotes --------------------------------------------------------------------------------------


def talk(manager: ParallelEnvManager, before: Callable[[int], None]) -> list[Any]:
    """Many requests to two remotes, and what they answer."""
    script: list[tuple[int, Any]] = [
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
    answers = []
    for number, (lane, request) in enumerate(script):
        before(number)
        manager.remotes[lane].send(request)
        kind, answer = manager.remotes[lane].recv()
        answers.append((kind, repr(answer)))
    return answers


@pytest.mark.parametrize("when", [3, 6, 9, 11])
def test_remotes_get_the_same_answers(when: int) -> None:
    with open_manager(FragileEnv, 2, envs_per_worker=2) as manager:
        expected = talk(manager, lambda number: None)
    with open_manager(FragileEnv, 2, envs_per_worker=2) as manager:
        assert (
            talk(manager, lambda number: kill(manager, 0) if number == when else None) == expected
        )


def test_a_request_in_the_middle_of_which_a_worker_dies_is_sent_again(
    fragile: Callable[..., Any],
) -> None:
    with open_manager(fragile, 2, envs_per_worker=2, on_env_error="restart") as manager:
        one, other = manager.remotes
        other.send(("reset", {"seed": 3}))
        other.recv()
        for kind in ("sigkill", "raise"):
            one.send(("reset", {"seed": 7, "options": failing(kind, 1)}))
            one.recv()
            one.send(("step", 1))
            assert one.recv()[1][0][0] == 1
            one.send(("step", 1))
            other.send(("step", 2))
            assert one.recv()[1][0][0] == 2
            assert other.recv()[0] == "transition"
            (Path(fragile.args[0]) / "7.1.0").unlink()  # type: ignore[attr-defined]
        other.send(("get_attr", {"attr": "total"}))
        assert other.recv() == ("attr", 4)
        other.send(("close", None))
        kill(manager, 0)
        manager.reset_lanes([0], [1], [None])
        with pytest.raises(UsageError, match="closed"):
            other.send(("reset", None))


# Recycling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["restart", "raise"])
@pytest.mark.parametrize("envs_per_worker", [1, 2])
def test_workers_are_replaced_after_so_many_episodes(
    tmp_path: Path, envs_per_worker: int, policy: str
) -> None:
    make_env = partial(FragileEnv, noted_in=str(tmp_path))
    options = {seed: {"length": 2} for seed in range(9)} | {1: {"length": 5}}
    with open_manager(
        make_env,
        2,
        envs_per_worker=envs_per_worker,
        max_episodes_per_worker=3,
        max_restarts=0,
        on_worker_failure=policy,
    ) as manager:
        expected = undisturbed(options, 2, n_steps=8)
        assert_same_rows(played(manager, options, n_steps=8), expected)
    counts = [len(path.read_text().split()) for path in tmp_path.iterdir()]
    n_repeated = envs_per_worker - 1  # the other lane's, where that is in the middle of one
    assert 3 <= max(counts) <= 3 + n_repeated
    assert len(counts) > 2 / envs_per_worker


def test_a_batchers_workers_run_so_many_episodes_and_begin_no_more(tmp_path: Path) -> None:
    results = []
    args = {"make_env": partial(FragileEnv, noted_in=str(tmp_path)), "n_lanes": 2}
    limited = partial(create_manager, max_episodes_per_worker=4)
    for create, make_env in ((create_serial, FragileEnv), (limited, args["make_env"])):
        with EpisodeBatcher(
            9, 16, StepCounter, {}, create, {**args, "make_env": make_env}, n_threads=0, seeds=3
        ) as batcher:
            batcher.execute(12)
            result = batcher.get()
            assert result is not None
            results.append(result)
    assert all(torch.equal(results[1][key], results[0][key]) for key in results[0])
    counts = sorted(len(path.read_text().split()) for path in tmp_path.iterdir())
    assert max(counts) == 4
    assert sum(counts) == 12 + 2  # the batcher resets every lane once, to see what a step is


def test_a_leaking_environment_stays_bounded() -> None:
    def rss() -> int:
        return psutil.Process(manager.workers[0].pid).memory_info().rss

    with open_manager(LeakingEnv, 1) as manager:
        limit = rss() + 3 * 2**24
    with open_manager(LeakingEnv, 1, max_rss_bytes=limit) as manager:
        serial = GymEnv([FragileEnv()], 1)
        first, most = pids(manager), 0
        for episode in range(9):
            time.sleep(0.11)  # it is not looked at more often
            for env in (manager, serial):
                env.reset_lanes([0], [episode], [None])
                env.step_lanes([0], {"action": np.array([episode])})
            assert manager.current["frame"].tobytes() == serial.current["frame"].tobytes()
            most = max(most, rss())
        assert pids(manager) != first
        assert most < limit + 3 * 2**24


def test_remotes_are_recycled_as_well() -> None:
    with open_manager(FragileEnv, 1, max_episodes_per_worker=2) as manager:
        remote = manager.remotes[0]
        counts, seeds = [], []
        for _ in range(5):
            for request in (("reset", None), ("get_attr", {"attr": "n_resets"})):
                remote.send(request)
                answer = remote.recv()[1]
            counts.append(answer)
            remote.send(("get_attr", {"attr": "seed"}))
            seeds.append(remote.recv()[1])
        assert counts == [1, 2, 1, 2, 1]
    with open_manager(FragileEnv, 1) as manager:
        expected = []
        for _ in range(5):
            for request in (("reset", None), ("get_attr", {"attr": "seed"})):
                manager.remotes[0].send(request)
                answer = manager.remotes[0].recv()[1]
            expected.append(answer)
    assert seeds == expected


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("ending", ENDINGS)
def test_whatever_a_worn_worker_does_while_it_closes_it_is_replaced_soon_and_without_a_failure(
    ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_env = partial(FaultyEnv, close_fault=ending)
    with open_manager(
        make_env, 2, envs_per_worker=2, max_episodes_per_worker=2, max_restarts=0, timeout=None
    ) as manager:
        before = pids(manager)
        with caplog.at_level(logging.WARNING, "rlpool"):
            for _ in range(2):
                manager.reset()
                manager.step(DictTensor({"action": torch.zeros(2, dtype=torch.int64)}))
        assert not caplog.records
        assert pids(manager) != before


def test_a_batcher_over_a_manager_sees_no_failure(fragile: Callable[..., Any]) -> None:
    info = DictTensor(
        {
            "fault": torch.tensor(
                [failing("sigkill", 0)["fault"] if r in (2, 7) else 0 for r in range(12)]
            ),
            "fault_step": torch.full((12,), 1),
        }
    )
    results = []
    for create, make_env in ((create_serial, FragileEnv), (create_manager, fragile)):
        env_args = {"make_env": make_env, "n_lanes": 3}
        with EpisodeBatcher(
            4, 12, StepCounter, {}, create, env_args, n_threads=0, seeds=3
        ) as batcher:
            batcher.execute(12, env_info=info)
            result = batcher.get()
            assert result is not None
            results.append(result)
    assert results[0].lengths.tolist() == results[1].lengths.tolist()
    assert all(torch.equal(results[1][key], results[0][key]) for key in results[0])
