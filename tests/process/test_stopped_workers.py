"""Workers that do not read do not block any call."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from process.watching import wait_until

from rlpool import DictTensor, EpisodeBatcher, ParallelEnvManager

from support.faults import create_agent, create_env
from support.parallel import TaskEnv

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left", "short_patience"),
    pytest.mark.timeout(120),
    pytest.mark.promise("I4"),
]

AT_ONCE_S = 3.0
"""What takes milliseconds, on a busy machine; to wait for a stopped worker would take for ever."""

CLOSE_S = 5.0

REPLY_BYTES = 2**24


class LargeEnv(TaskEnv):
    """``TaskEnv`` with an attribute too large for a pipe; leaves a file when closed."""

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
    """Stop a process during this context."""
    assert pid is not None
    process = psutil.Process(pid)
    process.suspend()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def open_manager(**options: Any) -> ParallelEnvManager:
    return ParallelEnvManager([LargeEnv] * 2, seed=1, **options)


LARGE_REQUEST = "reset", {"options": {"words": "x" * 2**20}}
GET_LARGE = "get_attr", {"attr": "large"}


def test_messages_to_a_stopped_worker_wait_and_arrive_when_it_resumes() -> None:
    with open_manager() as manager:
        first, second = manager.remotes
        with stopped(manager.workers[0].pid):
            with within(AT_ONCE_S):
                first.send(LARGE_REQUEST)
                assert not first.poll()
            with within(AT_ONCE_S):
                second.send(LARGE_REQUEST)
                assert second.recv()[0] == "obs"
                second.send(GET_LARGE)
                assert second.recv()[1].tolist() == list(range(REPLY_BYTES // 8))
        assert first.recv()[0] == "obs"
        first.send(("get_attr", {"attr": "given_options"}))
        assert first.recv() == ("attr", LARGE_REQUEST[1]["options"])
        manager.reset_lanes([0, 1], [0, 1], [{"task": 0}, {"task": 1}])
        assert manager.current["frame"].tolist() == [[0.0, 0.0], [0.0, 1.0]]
        with stopped(manager.workers[0].pid):
            first.send(LARGE_REQUEST)
            with within(CLOSE_S):
                manager.close()


@pytest.mark.promise("I1")
def test_requests_to_a_stopped_worker_keep_their_order_and_their_policy() -> None:
    arguments = create_agent, {}, create_env, {}, 1, 1
    with EpisodeBatcher(4, 50_000, *arguments) as batcher:
        batcher.execute(3)
        batcher.get()
        with stopped(batcher.stats().workers[0].pid):
            for version in range(1, 7):
                batcher.update(version)
                ids = torch.arange(5) + 100 * version
                batcher.execute(5, env_info=DictTensor({"id": ids}))
                assert batcher.get(blocking=False) is None
        for version in range(1, 7):
            result = batcher.get()
            assert result is not None
            assert result["frame"][:, 0, 0].tolist() == [100 * version + i for i in range(5)]
            assert result["version"].unique().tolist() == [version]
