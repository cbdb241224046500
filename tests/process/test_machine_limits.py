"""Limits are reported before they are hit, failed starts are explained, nothing is left behind."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from typing import Any

import pytest
from process.watching import n_descriptors, worker_pids

from rlpool import (
    EpisodeBatcher,
    ParallelEnvManager,
    Pool,
    RlpoolError,
    SpecError,
    UsageError,
    WorkerStartupError,
)

from support.acting_envs import ActingEnv
from support.agents import StepCounter
from support.envs import CountingEnv, create_counting

pytestmark = pytest.mark.timeout(240)


def episode_batcher(n_workers: int, env_args: Any = None) -> EpisodeBatcher:
    return EpisodeBatcher(4, 8, StepCounter, {}, create_counting, env_args or {}, n_workers)


OWNERS: list[tuple[Callable[[int], Any], str]] = [
    (episode_batcher, "lower n_workers (2"),
    (lambda n: ParallelEnvManager([CountingEnv] * n), "use fewer workers"),
    (lambda n: Pool([ActingEnv() for _ in range(n)], n, 1000).store(), "lower n_workers (2"),
]
"""How each kind of owner of so many workers is made, and what it advises if they are too many."""


def refused(kind: type[RlpoolError], make: Callable[[], Any]) -> tuple[str, str]:
    """Return the error and its fix, and check that nothing is left behind."""
    before = n_descriptors(), worker_pids()
    with pytest.raises(kind) as caught:
        make()
    assert (n_descriptors(), worker_pids()) == before
    what, fix = str(caught.value).splitlines()
    return what, fix.removeprefix("  fix:   ")


# Limits ---------------------------------------------------------------------------------------


def test_descriptors_are_checked_before_any_worker_starts() -> None:
    resource_tracker.ensure_running()  # whose descriptor stays open
    limit = n_descriptors() + 32 + 2 * 3 + 1
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        for make, advice in OWNERS:
            what, fix = refused(SpecError, lambda make=make: make(30))
            assert "file descriptors" in what
            assert fix.startswith(advice)
            assert "ulimit -n" in fix
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_process_that_the_system_refuses_to_start_is_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some limits cannot be known beforehand, such as the user's other processes."""
    before, start = worker_pids(), SpawnProcess.start
    numbers = iter([True, False])

    def start_one(process: SpawnProcess) -> None:
        if not next(numbers):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        start(process)

    monkeypatch.setattr(SpawnProcess, "start", start_one)
    with pytest.raises(WorkerStartupError) as caught:
        episode_batcher(2)
    assert "Resource temporarily unavailable" in caught.value.what
    assert "ulimit -u" in caught.value.fix
    assert worker_pids() == before


# The guard ------------------------------------------------------------------------------------


UNGUARDED = """
from rlpool import *
from support.agents import StepCounter
from support.envs import create_counting
print("imported", flush=True)
EpisodeBatcher(4, 8, StepCounter, {}, create_counting, {}, n_threads=2)
"""


def test_a_missing_main_guard_raises_one_error_and_leaves_no_process(
    as_main: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="__main__"):
        as_main(UNGUARDED)
    out, err = capfd.readouterr()
    assert err == ""
    assert 2 <= out.count("imported") <= 3  # here, and in workers


# Pickling -------------------------------------------------------------------------------------


def test_the_unpicklable_object_is_named() -> None:
    lock = threading.Lock()
    for path, make in {
        "env_args['lock']": lambda: episode_batcher(2, env_args={"lock": lock}),
        "env_fns[1].<closure 'lock'>": lambda: ParallelEnvManager([CountingEnv, lambda: lock]),
    }.items():
        assert f"{path} is a _thread.lock" in refused(WorkerStartupError, make)[0]
