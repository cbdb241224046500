"""Batchers start and end: closed, dropped, in a thread, in a notebook."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from types import ModuleType
from typing import Any

import pytest
from process.watching import Struck, wait_until, worker_pids

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
def test_close_waits_neither_for_a_long_step_nor_for_queued_requests(struck: Struck) -> None:
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


# Several batchers, a thread --------------------------------------------------------------------


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


def test_a_batcher_outlives_the_thread_that_opened_it() -> None:
    opened: list[EpisodeBatcher] = []
    thread = threading.Thread(target=lambda: opened.append(open_batcher()))
    thread.start()
    thread.join()
    with opened[0]:
        collect(opened[0], 7)


# In a notebook --------------------------------------------------------------------------------

CELL = """
import torch
from rlpool import Agent, DictTensor, EpisodeBatcher, GymEnv
from support.faults import FaultyEnv
class Env(FaultyEnv):
    pass
class Mine(Agent):
    def __call__(self, state, observation, agent_info=None, history=None):
        action = torch.full((observation.n_elems(),), NUMBER)
        return DictTensor({}), DictTensor({"action": action}), DictTensor({})
batcher = EpisodeBatcher(4, 8, lambda: Mine(), {}, lambda seed: GymEnv([Env(), Env()], seed), {}, 2)
batcher.execute(5)
"""


def test_a_notebook_cell_with_classes_of_its_own_may_be_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = worker_pids()
    notebook = ModuleType("__main__")  # which has no file
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    for number in (1, 2):
        vars(notebook)["NUMBER"] = number
        exec(compile(CELL, "<cell>", "exec"), vars(notebook))
        result = vars(notebook)["batcher"].get()
        assert (result["action"][:, :3] == number).all()
        assert result.lengths.tolist() == [3] * 5
        assert len(worker_pids() - before) == 2  # those of the previous batcher have ended
    vars(notebook).clear()
    assert worker_pids() == before


def test_progress_raises_the_same_error_as_get_with_the_stacks_of_a_hung_worker() -> None:
    with open_batcher(timeout=0.5, on_worker_failure="raise") as batcher:
        batcher.execute(3, env_info=faults_at(3, 1, "hold_the_lock", 1))
        with pytest.raises(WorkerTimeoutError) as caught:
            wait_until(lambda: batcher.progress == (3, 3))
    stacks = caught.value.traceback_text
    assert stacks.index(" in strike\n") < stacks.index(" in step\n")
    assert stacks in str(caught.value.__cause__)
