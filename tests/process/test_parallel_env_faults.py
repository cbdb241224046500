"""Whatever fails in an environment in a process: the right error, soon, and nothing left behind."""

from __future__ import annotations

import gc
import os
import pickle
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from process.watching import Script, Struck, is_running, n_descriptors, wait_until, worker_pids

from rlpool import (
    DictTensor,
    EnvError,
    EnvSpecError,
    EpisodeBatcher,
    ParallelEnvManager,
    SpecError,
    UsageError,
    WorkerDiedError,
    WorkerStartupError,
    WorkerTimeoutError,
)

from support.agents import StepCounter
from support.envs import CountingEnv
from support.faults import EXIT_CODE, FaultyEnv, code, faults_at, strike
from support.parallel import WideEnv, create_manager, make_raising, no_actions, open_manager
from support.programs import run_as_main

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(240)]

TIMEOUT_S = 0.5
"""What hangs so long, hangs."""

REPORT_S = 2.0
"""A fault surfaces within this time."""

CLOSE_S = 7.0
"""close() takes less than this even if a worker has to be killed."""

REPORTED = {"on_worker_failure": "raise"}
"""Failures of workers are errors; what replaces workers is tested elsewhere."""

RAISES = ("raise", "unpicklable", "unprintable", "sys_exit")
WRONG = ("wrong_shape", "wrong_dtype", "wrong_reward", "wrong_flag", "huge_reward", "nan_flag")
DEATHS = {
    "os_exit": (EXIT_CODE, None),
    "sigkill": (-signal.SIGKILL, "SIGKILL"),
    "segfault": (-signal.SIGSEGV, "SIGSEGV"),
    "fork_and_sigkill": (-signal.SIGKILL, "SIGKILL"),
}


@pytest.fixture(scope="module")
def faulty() -> Iterator[ParallelEnvManager]:
    """Three environments in two workers, which survive what is done to them."""
    with open_manager(FaultyEnv, 3, envs_per_worker=2) as manager:
        yield manager


def fault(kind: str, step: int, **options: int) -> dict[str, int]:
    return {"fault": code(kind), "fault_step": step, "id": 7, "length": 9, **options}


def run(manager: ParallelEnvManager, lanes: list[int], seeds: list[int], options: Any) -> None:
    """Reset and make three steps, one of which fails."""
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


# Faults after which the manager goes on -------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "step"),
    [(kind, 1) for kind in (*RAISES, *WRONG)] + [(kind, -1) for kind in (*RAISES, *WRONG[:2])],
)
def test_a_failing_environment_raises_env_error_and_the_manager_goes_on(
    faulty: ParallelEnvManager, kind: str, step: int
) -> None:
    options = fault(kind, step)
    with pytest.raises(EnvError) as caught:
        run(faulty, [0, 1, 2], [3, 4, 5], [None, options, None])
    error = caught.value
    assert error.where.worker == 0
    assert (error.where.lane, error.where.step, error.where.seed) == (1, max(step, 0), 4)
    assert error.where.env_info == options
    assert isinstance(error, EnvSpecError) == (kind in WRONG)
    assert "env.step" in str(error) or step == -1
    if kind in RAISES:
        assert "in strike" in str(error.__cause__)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.where) == (str(error), error.where)
    assert isinstance(again, EnvSpecError) == (kind in WRONG)
    if step >= 0:
        # The lane of the other worker has made its steps.
        assert faulty.current["frame"][2].tolist() == [0, step + 1]
        assert faulty.step_lanes([2], no_actions(faulty)) == [2]
    for stale in (0, 1):
        with pytest.raises(UsageError, match=f"lane {stale} cannot go on"):
            faulty.step_lanes([stale, 2], no_actions(faulty))
    assert_works(faulty)


def test_two_workers_may_fail_in_one_step(faulty: ParallelEnvManager) -> None:
    for step in (0, 2):
        with pytest.raises(EnvError) as caught:
            run(faulty, [1, 2], [3, 4], [fault("raise", step), fault("unpicklable", step)])
        assert caught.value.where.lane == 1
        with pytest.raises(UsageError, match="lane 2 cannot go on"):
            faulty.step_lanes([2], no_actions(faulty))
        faulty.reset_lanes([2], [9], [fault("raise", 1)])
        faulty.step_lanes([2], no_actions(faulty))
        # Not the failure that nobody was told of:
        with pytest.raises(EnvError, match="KeyError") as caught:
            faulty.step_lanes([2], no_actions(faulty))
        assert caught.value.where[1:5] == (2, None, 1, 9)
    assert_works(faulty)


def test_a_failure_of_one_lane_is_told_beside_the_steps_of_others(
    faulty: ParallelEnvManager,
) -> None:
    faulty.reset_lanes([0, 2], [1, 2], [{"length": 9}, fault("raise", 0)])
    actions = no_actions(faulty)
    told: list[Any] = []
    lanes = [0, 2]
    while len(told) < 2:
        try:
            told += faulty.step_some(1, lanes, actions)
        except EnvError as error:
            told.append(error.where)
        lanes = []
    assert sorted(told, key=str)[0] == 0
    assert sorted(told, key=str)[1].lane == 2
    assert_works(faulty)


def test_remotes_answer_with_the_error(faulty: ParallelEnvManager) -> None:
    remote = faulty.remotes[1]
    remote.send(("reset", {"options": fault("raise", 0)}))
    assert remote.recv()[0] == "obs"
    for request, text in (
        (("step", 0), "KeyError: 'struck'"),
        (("step", 1.5), "'action' should have dtype int64"),
        (("step", {"other": 1}), "Error"),
        (("get_attr", {"attr": "missing"}), "missing"),
        (("get_attr", {"attr": "_error"}), "Error"),
        (("reset", {"options": fault("unpicklable", -1)}), "UnpicklableError"),
    ):
        remote.send(request)
        kind, answer = remote.recv()
        assert kind == "error"
        assert text in answer
    assert_works(faulty)


def test_the_callers_methods_raise_where_the_environment_fails(
    faulty: ParallelEnvManager,
) -> None:
    with pytest.raises(EnvError, match="struck"):
        faulty.reset(faults_at(3, 1, "raise", -1))
    faulty.reset(faults_at(3, 2, "raise", 0))
    with pytest.raises(EnvError, match="struck") as caught:
        faulty.step(DictTensor({"action": torch.zeros(3, dtype=torch.int64)}))
    assert caught.value.where.lane == 2
    assert_works(faulty)


def test_an_interrupted_step_is_waited_for_and_forgotten(faulty: ParallelEnvManager) -> None:
    def interrupt(*_: Any) -> None:
        raise InterruptedError

    faulty.reset_lanes([0, 2], [1, 2], [{"sleep_ms": 300, "length": 9}, fault("raise", 0)])
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(InterruptedError):
            faulty.step_lanes([0, 2], no_actions(faulty))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert faulty.step_lanes([0], no_actions(faulty)) == []
    assert faulty.current["frame"][0].tolist() == [0, 2]
    assert_works(faulty)


def test_a_batcher_over_a_manager_tells_the_episode_and_goes_on() -> None:
    env_args = {"make_env": FaultyEnv, "n_lanes": 3, "envs_per_worker": 2, **REPORTED}
    with EpisodeBatcher(
        4, 8, StepCounter, {}, create_manager, env_args, n_threads=0, seeds=1
    ) as batcher:
        batcher.execute(8, env_info=faults_at(8, 5, "raise", 2))
        with pytest.raises(EnvError, match="struck") as caught:
            batcher.get()
        where = caught.value.where
        assert (where.worker, where.lane, where.episode, where.step) == (1, 2, 5, 2)
        batcher.execute(8, env_info=DictTensor({"id": torch.arange(8)}))
        result = batcher.get()
        assert result is not None
        assert result["frame"][:, 1].tolist() == [[row, 1] for row in range(8)]
        batcher.execute(8, env_info=faults_at(8, 3, "sigkill", 1))
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            batcher.get()


# Faults after which it does not ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "step"),
    [("os_exit", 1), ("sigkill", -1), ("sigkill", 1), ("segfault", 1), ("fork_and_sigkill", 0)],
)
def test_a_death_raises_worker_died_error(struck: Struck, kind: str, step: int) -> None:
    options = fault(kind, step)
    with open_manager(partial(FaultyEnv, struck.path), 1, **REPORTED) as manager:
        with pytest.raises(WorkerDiedError) as caught:
            run(manager, [0], [4], [options])
        assert struck.seconds_ago < REPORT_S
        assert (caught.value.exitcode, caught.value.signal_name) == DEATHS[kind]
        assert caught.value.where == (0, 0, None, max(step, 0), 4, options)
        with pytest.raises(WorkerDiedError):
            manager.reset()
        with pytest.raises(WorkerDiedError):
            manager.remotes[0].send(("reset", None))
        start = time.monotonic()
        manager.close()
        assert time.monotonic() - start < CLOSE_S
    if kind == "fork_and_sigkill":
        os.kill(int(Path(f"{struck.path}.child").read_text()), signal.SIGKILL)


def test_a_death_while_nothing_runs_is_noticed() -> None:
    with open_manager(CountingEnv, 1, **REPORTED) as manager:
        manager.reset()
        os.kill(manager.workers[0].pid or 0, signal.SIGKILL)
        wait_until(lambda: not manager.workers[0].is_alive())
        start = time.monotonic()
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            manager.step_lanes([0], no_actions(manager))
        assert time.monotonic() - start < REPORT_S


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize(
    ("kind", "way"),
    [("hold_the_lock", "lanes"), ("hang", "lanes"), ("hang", "some"), ("hang", "remote")],
)
def test_a_hang_raises_worker_timeout_error(struck: Struck, kind: str, way: str) -> None:
    with open_manager(partial(FaultyEnv, struck.path), 1, timeout=TIMEOUT_S, **REPORTED) as manager:
        manager.reset_lanes([0], [4], [fault(kind, 1)])
        manager.step_lanes([0], no_actions(manager))
        ways: dict[str, Callable[[], Any]] = {
            "lanes": lambda: manager.step_lanes([0], no_actions(manager)),
            "some": lambda: manager.step_some(1, [0], no_actions(manager)),
            "remote": manager.remotes[0].recv,
        }
        if way == "remote":
            manager.remotes[0].send(("step", 0))
        with pytest.raises(WorkerTimeoutError, match=r"no progress for 0\.5 s") as caught:
            ways[way]()
        assert struck.seconds_ago < TIMEOUT_S + REPORT_S
        assert caught.value.where[1:5] == (0, None, 1, 4)


def test_many_slow_lanes_are_no_hang() -> None:
    with open_manager(FaultyEnv, 6, envs_per_worker=6, timeout=TIMEOUT_S) as manager:
        manager.reset_lanes(range(6), [1] * 6, [{"sleep_ms": 150}] * 6)
        manager.step_lanes(range(6), no_actions(manager))
        assert manager.current["frame"][:, 1].tolist() == [1] * 6


# Starting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_env", "error", "text"),
    [
        (make_raising, WorkerStartupError, r"env_fns\[1\] raised KeyError: 'struck'"),
        (partial(strike, "os_exit"), WorkerDiedError, "exit code 17"),
        (partial(list, ()), WorkerStartupError, r"env_fns\[1\] returned list"),
        (WideEnv, WorkerStartupError, "observation_space of environment 1"),
    ],
)
def test_an_environment_that_cannot_be_made_is_reported(
    make_env: Callable[[], Any], error: type[Exception], text: str
) -> None:
    before = n_descriptors()
    with pytest.raises(error, match=text):
        ParallelEnvManager([CountingEnv, make_env], envs_per_worker=2)
    gc.collect()
    assert n_descriptors() <= before + 2  # the tracker of multiprocessing


def test_workers_that_disagree_are_refused() -> None:
    with pytest.raises(SpecError, match="observation_space of environment 1"):
        ParallelEnvManager([CountingEnv, WideEnv])


def test_what_cannot_be_pickled_is_refused() -> None:
    generator = (number for number in range(3))
    with pytest.raises(WorkerStartupError, match=r"env_fns\[0\].<closure 'gen"):
        ParallelEnvManager([lambda: generator])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([],), "env_fns"),
        ((CountingEnv,), "env_fns"),
        (([CountingEnv, 3],), r"env_fns\[1\] is 3"),
    ],
)
def test_env_fns_that_are_none_are_refused(arguments: tuple[Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        ParallelEnvManager(*arguments)


@pytest.mark.parametrize(
    "options",
    [
        {"envs_per_worker": 0},
        {"timeout": 0},
        {"timeout": "1"},
        {"min_ready": 0},
        {"max_episode_steps": 0},
        {"on_worker_failure": "retry"},
        {"max_restarts": -1},
        {"on_env_error": None},
        {"max_episodes_per_worker": 0},
        {"max_rss_bytes": 2**20},  # less than any worker needs
    ],
    ids=str,
)
def test_numbers_that_do_not_fit_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(options))):
        ParallelEnvManager([CountingEnv], **options)


def test_more_workers_than_descriptors_are_refused_before_any_starts() -> None:
    before, limit = worker_pids(), n_descriptors() + 50
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with pytest.raises(SpecError) as caught:
            ParallelEnvManager([CountingEnv] * 40)
        assert worker_pids() == before
        with ParallelEnvManager([CountingEnv] * 40, envs_per_worker=40) as manager:
            assert len(manager.workers) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    what, fix = str(caught.value).splitlines()
    assert re.match(f"40 workers need at least 192 file descriptors, .* of the {limit} that", what)
    assert re.search(r"envs_per_worker.*ulimit -n \d+", fix)


# The end --------------------------------------------------------------------------------------


def test_after_close_every_call_is_refused() -> None:
    before = n_descriptors()
    manager = open_manager(CountingEnv, 2, envs_per_worker=2)
    # A worker's, the manager's (done, progress, arena), the tracker's:
    assert n_descriptors() <= before + 4 + 3 + 2
    manager.reset()
    actions = no_actions(manager)
    manager.close()
    manager.close()
    assert manager.closed
    assert [worker.is_alive() for worker in manager.workers] == [False]
    assert n_descriptors() <= before + 2
    for call in (
        manager.reset,
        lambda: manager.step(DictTensor({"action": torch.zeros(2, dtype=torch.int64)})),
        lambda: manager.reset_lanes([0], [1], [None]),
        lambda: manager.step_lanes([0, 1], actions),
        lambda: manager.step_some(1),
        lambda: manager.announce_episodes([1], {}),
        lambda: manager.remotes[0].send(("reset", None)),
        lambda: manager.remotes[0].recv(),
        lambda: manager.remotes[0].poll(),
    ):
        with pytest.raises(UsageError, match="closed"):
            call()
    with pytest.raises(UsageError, match="copied or pickled"):
        pickle.dumps(manager)


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
    assert kept.tolist() == [[0, 0]]  # what was handed out stays


def test_close_does_not_wait_for_a_long_step(struck: Struck) -> None:
    manager = open_manager(partial(FaultyEnv, struck.path), 1)
    manager.reset_lanes([0], [4], [fault("hang", 0)])
    manager.step_some(0, [0], no_actions(manager))
    wait_until(lambda: struck.is_there)
    start = time.monotonic()
    manager.close()
    assert time.monotonic() - start < CLOSE_S


RUNNING = """
import os, signal, sys
import numpy as np
from functools import partial
from rlpool import ParallelEnvManager
from support.faults import FaultyEnv, code

def main(struck, kind):
    manager = ParallelEnvManager([partial(FaultyEnv, struck)])
    manager.reset_lanes([0], [1], [{"fault": code(kind), "fault_step": 0}])
    print("ready", flush=True)
    if kind == "none":
        return
    manager.step_lanes([0], {"action": np.zeros(1, np.int64)})

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def test_a_script_that_forgets_close_ends_by_itself(
    run_script: Callable[..., Script], struck: Struck
) -> None:
    script = run_script(RUNNING, struck.path, "none")
    script.finish()
    assert not script.left_after(0.5)
    assert (script.stdout, script.stderr, script.returncode) == ("ready\n", "", 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda s: s.name)
def test_no_worker_outlives_its_caller(
    run_script: Callable[..., Script], struck: Struck, number: signal.Signals
) -> None:
    script = run_script(RUNNING, struck.path, "hang")
    script.wait_for_line("ready")
    wait_until(lambda: struck.is_there)
    script.note_family()
    assert len(script.family) >= 2
    script.signal(number, group=number == signal.SIGINT)
    script.finish()
    assert not script.left_after(3.0)
    assert script.stderr.count("Traceback") == (number == signal.SIGINT)


UNGUARDED = """
from rlpool import ParallelEnvManager
from support.envs import CountingEnv
ParallelEnvManager([CountingEnv])
"""


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    with pytest.raises(UsageError, match="__main__"):
        run_as_main(script)
