"""Workers that read nothing, or stop in the middle of what they write: nobody waits for them."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from process.watching import wait_until

from rlpool import DictTensor, EpisodeBatcher, ParallelEnvManager, WorkerTimeoutError

from support.faults import FaultyEnv, create_agent, create_env, faults_at
from support.parallel import TaskEnv

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(120)]

AT_ONCE_S = 0.5
"""What takes milliseconds, on a machine that others use as well."""

CLOSE_S = 3.0

REPLY_BYTES = 2**24


class LargeEnv(TaskEnv):
    """A ``TaskEnv`` with an attribute that no pipe holds."""

    def __init__(self) -> None:
        super().__init__()
        self.large = np.arange(REPLY_BYTES // 8)


@contextlib.contextmanager
def within(limit_s: float) -> Iterator[None]:
    start_s = time.monotonic()
    yield
    took_s = time.monotonic() - start_s
    assert took_s < limit_s, f"took {took_s:.1f} s"


@contextlib.contextmanager
def stopped(pid: int | None) -> Iterator[None]:
    """Let a process be stopped for a while."""
    assert pid is not None
    process = psutil.Process(pid)
    process.suspend()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def open_manager(kind: type = LargeEnv, n_lanes: int = 2, **options: Any) -> ParallelEnvManager:
    return ParallelEnvManager([kind] * n_lanes, seed=1, **options)


def open_batcher(n_slots: int = 8, n_threads: int = 2, **options: Any) -> EpisodeBatcher:
    return EpisodeBatcher(
        4, n_slots, create_agent, {}, create_env, {}, n_threads=n_threads, seeds=1, **options
    )


def large_request() -> tuple[str, Any]:
    return "reset", {"options": {"words": "x" * 2**20}}


def pid_of(batcher: EpisodeBatcher) -> int:
    """Its first worker's process."""
    told = re.search(r"worker 0 \(pid (\d+)\)", batcher.dump_stacks(file=None))
    assert told is not None
    return int(told[1])


# What the caller sends --------------------------------------------------------------------------


@pytest.mark.usefixtures("short_patience")
def test_announcing_many_episodes_to_a_stopped_worker_returns_at_once() -> None:
    manager = open_manager()
    with stopped(manager.workers[0].pid):
        with within(AT_ONCE_S):
            manager.announce_episodes(range(200_000), {"task": np.arange(200_000)})
        with within(CLOSE_S):
            manager.close()


@pytest.mark.usefixtures("short_patience")
def test_a_large_request_of_a_remote_to_a_stopped_worker_returns_at_once() -> None:
    manager = open_manager()
    with stopped(manager.workers[0].pid):
        with within(AT_ONCE_S):
            manager.remotes[0].send(large_request())
            assert not manager.remotes[0].poll()
        with within(AT_ONCE_S):
            manager.remotes[1].send(large_request())
            assert manager.remotes[1].recv()[0] == "obs"
        with within(CLOSE_S):
            manager.close()


def test_what_a_stopped_worker_was_sent_arrives_when_it_goes_on() -> None:
    with open_manager() as manager:
        remote = manager.remotes[0]
        with stopped(manager.workers[0].pid):
            manager.announce_episodes(range(100_000), {"task": np.arange(100_000)})
            remote.send(large_request())
        assert remote.recv()[0] == "obs"
        remote.send(("get_attr", {"attr": "given_options"}))
        assert remote.recv() == ("attr", large_request()[1]["options"])
        manager.reset_lanes([0, 1], [0, 1], [{"task": 0}, {"task": 1}])
        assert manager.current["frame"].tolist() == [[0.0, 0.0], [0.0, 1.0]]


def test_replies_that_nobody_reads_do_not_keep_large_requests_from_being_sent() -> None:
    with open_manager(envs_per_worker=2) as manager:
        for _ in range(2):
            manager.remotes[0].send(("get_attr", {"attr": "large"}))
            with within(AT_ONCE_S):
                manager.remotes[1].send(large_request())
            assert len(manager.remotes[0].recv()[1]) == REPLY_BYTES // 8
            assert manager.remotes[1].recv()[0] == "obs"


@pytest.mark.usefixtures("short_patience")
def test_many_slots_for_a_stopped_worker_are_sent_at_once() -> None:
    batcher = open_batcher(n_slots=200_000)
    batcher.execute(3)
    batcher.get()
    with stopped(pid_of(batcher)):
        with within(4 * AT_ONCE_S):  # making 200,000 slots takes its time
            batcher.update(5)
            batcher.execute(150_000)
            batcher.execute(40_000)
            assert batcher.get(blocking=False) is None
            assert batcher.progress[1] == 150_000
        with within(CLOSE_S):
            batcher.close()


def test_requests_to_a_stopped_worker_keep_their_order_and_their_policy() -> None:
    with open_batcher(n_slots=50_000, n_threads=1) as batcher:
        batcher.execute(3)
        batcher.get()
        with stopped(pid_of(batcher)):
            for version in range(1, 7):
                batcher.update(version)
                ids = torch.arange(5) + 100 * version
                batcher.execute(5, env_info=DictTensor({"id": ids}))
                assert batcher.get(blocking=False) is None
        for version in range(1, 7):
            result = batcher.get()
            assert result["frame"][:, 0, 0].tolist() == [100 * version + i for i in range(5)]
            assert result["version"].unique().tolist() == [version]


# What workers send ------------------------------------------------------------------------------


def stop_in_the_middle_of_a_reply(manager: ParallelEnvManager) -> psutil.Process:
    """Let the worker of lane 0 fill its pipe, and stop it."""
    manager.remotes[0].send(("get_attr", {"attr": "large"}))
    process = psutil.Process(manager.workers[0].pid)
    waits_in = f"/proc/{process.pid}/wchan"

    def is_writing() -> bool:
        with open(waits_in) as file:
            return "sock" in file.read()

    wait_until(is_writing)
    process.suspend()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
    return process


def test_polling_for_half_a_reply_returns_at_once_and_the_rest_is_received() -> None:
    with open_manager() as manager:
        process = stop_in_the_middle_of_a_reply(manager)
        with within(AT_ONCE_S):
            for _ in range(3):
                assert not manager.remotes[0].poll()
            manager.remotes[1].send(("reset", None))
            assert manager.remotes[1].recv()[0] == "obs"
        process.resume()
        assert manager.remotes[0].recv()[1].tolist() == list(range(REPLY_BYTES // 8))


@pytest.mark.usefixtures("short_patience")
def test_half_a_reply_is_not_waited_for_longer_than_the_timeout() -> None:
    manager = open_manager(timeout=1.0, on_worker_failure="raise")
    stop_in_the_middle_of_a_reply(manager)
    with within(4.0), pytest.raises(WorkerTimeoutError):
        manager.remotes[0].recv()
    with within(CLOSE_S):
        manager.close()


def test_a_worker_that_stops_in_half_a_reply_is_replaced() -> None:
    with open_manager(timeout=1.0) as manager:
        stop_in_the_middle_of_a_reply(manager)
        assert len(manager.remotes[0].recv()[1]) == REPLY_BYTES // 8


def test_close_does_not_wait_for_half_a_reply() -> None:
    manager = open_manager()
    stop_in_the_middle_of_a_reply(manager)
    with within(CLOSE_S):
        manager.close()


# The end ----------------------------------------------------------------------------------------


class ClosingEnv(LargeEnv):
    """Leaves a file when it is closed."""

    def close(self) -> None:
        if self.given_options != "never reset":
            Path(self.given_options["note"]).touch()


def test_a_worker_that_writes_what_nobody_reads_closes_its_environments(tmp_path: Path) -> None:
    note = tmp_path / "closed"
    manager = open_manager(ClosingEnv)
    manager.remotes[0].send(("reset", {"options": {"note": str(note)}}))
    manager.remotes[0].recv()
    manager.remotes[0].send(("get_attr", {"attr": "large"}))
    with within(1.0):
        manager.close()
    assert note.exists()


@pytest.mark.usefixtures("short_patience")
def test_close_does_not_wait_for_workers_that_are_stopped() -> None:
    batcher, manager = open_batcher(), open_manager(FaultyEnv, 4)
    batcher.execute(4, env_info=faults_at(4, 1, "hang", 2))
    with stopped(manager.workers[1].pid), stopped(manager.workers[3].pid), stopped(pid_of(batcher)):
        for each in (batcher, manager):
            with within(CLOSE_S):
                each.close()
