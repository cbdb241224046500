"""Batchers begin and end: closed, dropped, in threads, from scripts and notebooks."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.util
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from process.watching import Script, Struck, is_running, wait_until, worker_pids

from rlpool import (
    EpisodeBatcher,
    UsageError,
    WorkerDiedError,
    WorkerTimeoutError,
)

from support.faults import create_agent, create_env, faults_at

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left"),
    pytest.mark.timeout(120),
    pytest.mark.promise("I6"),
]

RunScript = Callable[..., Script]

CLOSE_S = 7.0
"""close() takes less than this even if a worker has to be killed."""


def open_batcher(n_threads: int = 1, n_slots: int = 8, **options: Any) -> EpisodeBatcher:
    env_args = options.pop("env_args", {})
    return EpisodeBatcher(
        4, n_slots, create_agent, {}, create_env, env_args, n_threads=n_threads, seeds=1, **options
    )


def begin(batcher: EpisodeBatcher, first: int) -> None:
    batcher.execute(3, env_info={"id": [first, first + 1, first + 2]})


def check(batcher: EpisodeBatcher, first: int) -> None:
    assert batcher.get()["frame"][:, :, 0].tolist() == [[first + i] * 3 for i in range(3)]


def collect(batcher: EpisodeBatcher, first: int) -> None:
    for number in range(first, first + 20):
        begin(batcher, number)
        check(batcher, number)


# The batcher ends -----------------------------------------------------------------------------


@pytest.mark.promise("I4")
@pytest.mark.usefixtures("short_patience")
def test_close_waits_neither_for_a_long_step_nor_for_what_is_queued(struck: Struck) -> None:
    before = worker_pids()
    batcher = open_batcher(2, env_args={"struck_at": struck.path})
    batcher.execute(4, env_info=faults_at(4, 1, "hang", 1, length=5000, sleep_ms=2))
    for _ in range(12):
        batcher.reexecute()
    wait_until(lambda: struck.is_there)
    start_s = time.monotonic()
    batcher.close()
    assert time.monotonic() - start_s < CLOSE_S
    assert worker_pids() == before
    batcher.close()
    for call in (batcher.get, lambda: batcher.execute(1)):
        with pytest.raises(UsageError, match="closed"):
            call()


@pytest.mark.promise("I5")
def test_a_batcher_that_is_dropped_or_left_by_an_exception_ends_its_workers() -> None:
    before = worker_pids()
    batcher = open_batcher()
    batcher.execute(2)
    assert worker_pids() > before
    gc.disable()  # it does not take the garbage collector
    try:
        del batcher
        assert worker_pids() == before
    finally:
        gc.enable()
    with pytest.raises(ZeroDivisionError), open_batcher():
        raise ZeroDivisionError
    assert worker_pids() == before


# Several batchers, threads --------------------------------------------------------------------


def test_batchers_do_not_disturb_each_other_and_leave_ctrl_c_to_the_caller() -> None:
    before = worker_pids()
    with open_batcher() as first:
        (worker,) = worker_pids() - before
        with open_batcher(2, on_worker_failure="raise") as second:
            for number in range(5):
                begin(first, number)
                begin(second, 100 + number)
                check(second, 100 + number)
                check(first, number)
            begin(first, 7)
            second.execute(4, env_info=faults_at(4, 1, "sigkill", 1))
            with pytest.raises(WorkerDiedError):
                second.get()
        check(first, 7)
        os.kill(worker, signal.SIGINT)
        collect(first, 1)
        assert worker_pids() == before | {worker}


def test_batchers_of_several_threads_and_one_that_outlives_its_own() -> None:
    def whole_life(number: int) -> None:
        with open_batcher(2) as batcher:
            collect(batcher, 100 * number)

    opened: list[EpisodeBatcher] = []
    thread = threading.Thread(target=lambda: opened.append(open_batcher()))
    thread.start()
    thread.join()
    with opened[0] as handed_on, ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(whole_life, number) for number in range(3)]
        threads.submit(collect, handed_on, 7).result()
        collect(handed_on, 50)
        for future in futures:
            future.result()


# How a script may look ------------------------------------------------------------------------

NOTEBOOK = '''
import code, multiprocessing, os, sys
from process.watching import worker_pids

CELL = """
import functools, torch
from rlpool import Agent, DictTensor, EpisodeBatcher, GymEnv
from support.faults import FaultyEnv
class Env(FaultyEnv):
    pass
class Mine(Agent):
    def __call__(self, state, observation, agent_info=None, history=None):
        action = torch.full((observation.n_elems(),), NUMBER)
        return DictTensor({}), DictTensor({"action": action}), DictTensor({})
def create_env(cls, seed):
    return GymEnv([cls(), cls()], seed)
batcher = EpisodeBatcher(
    n_timesteps=4, n_slots=8, create_agent=lambda: Mine(), n_threads=2, seeds=1,
    create_env=functools.partial(create_env, Env),
)
batcher.execute(5)
result = batcher.get()
print(result["action"].unique().tolist(), result.lengths.tolist())
"""

def main():
    multiprocessing.set_start_method("forkserver")
    # Like a notebook's kernel: one namespace, __main__ without a file, errors are shown and kept.
    vars(sys.modules["__main__"]).pop("__file__", None)
    shell = code.InteractiveInterpreter(sys.modules["__main__"].__dict__)
    sys.stderr = open(os.devnull, "w")
    def run(source):
        shell.runcode(compile(source, "<cell>", "exec"))
    run("NUMBER = 1")
    run(CELL)
    first = worker_pids()
    run("NUMBER = 2")
    run(CELL)
    second = worker_pids()
    print(len(first), len(second), len(first & second))
    run("batcher.execute(2)\\n1 / 0")
    run("print(batcher.get().lengths.tolist())")

if __name__ == "__main__":
    main()
'''


def test_a_notebook_cell_with_classes_of_its_own_may_be_run_again(run_script: RunScript) -> None:
    script = run_script(NOTEBOOK, through_stdin=True)
    script.finish()
    assert script.stdout.splitlines() == [
        "[1] [3, 3, 3, 3, 3]",
        "[2] [3, 3, 3, 3, 3]",
        "2 2 0",
        "[3, 3]",
    ]
    assert (script.returncode, script.left_after(CLOSE_S)) == (0, [])


def test_an_error_about_a_hang_has_the_stacks_of_the_worker() -> None:
    with open_batcher(timeout=0.5, on_worker_failure="raise") as batcher:
        batcher.execute(3, env_info=faults_at(3, 1, "hold_the_lock", 1))
        with pytest.raises(WorkerTimeoutError) as caught:
            batcher.get()
    stacks = caught.value.traceback_text
    assert stacks.index(" in _strike\n") < stacks.index(" in step\n")
    assert stacks in str(caught.value.__cause__)


def test_progress_raises_what_get_would_when_nothing_will_be_finished_any_more() -> None:
    with open_batcher(timeout=0.5, on_worker_failure="raise") as batcher:
        batcher.execute(3, env_info=faults_at(3, 1, "hang", 1))
        with pytest.raises(WorkerTimeoutError):
            wait_until(lambda: batcher.progress == (3, 3))


kept: list[EpisodeBatcher] = []


def lengths_in_a_daemon() -> list[int]:
    assert multiprocessing.current_process().daemon
    kept.append(open_batcher(2))  # it is not closed
    kept[0].execute(3)
    return kept[0].get().lengths.tolist()


@pytest.mark.slow
def test_a_daemonic_process_may_have_workers_which_end_with_it() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(lengths_in_a_daemon) == [3, 3, 3]
        pids = worker_pids()
        assert len(pids) >= 3
    wait_until(lambda: not any(map(is_running, pids)), CLOSE_S)
