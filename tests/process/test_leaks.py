"""Resources are released, results stay valid, and the caller's process state is unchanged."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from process.watching import Struck, n_descriptors, shared_files, worker_pids

from rlpool import Batcher, EnvError, EpisodeBatcher, TemporalDictTensor

from support import named_memory
from support.faults import create_agent, create_env, faults_at

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left"),
    pytest.mark.timeout(280),
    pytest.mark.promise("I5"),
]


def open_batcher(
    n_threads: int = 1, n_timesteps: int = 4, n_slots: int = 8, **arguments: Any
) -> EpisodeBatcher:
    policy = {"on_worker_failure": arguments.pop("on_worker_failure", "raise")}
    return EpisodeBatcher(
        n_timesteps, n_slots, create_agent, {}, create_env, arguments, n_threads, 1, **policy
    )


@pytest.fixture(scope="module", autouse=True)
def opened_once() -> None:
    """Open everything that stays open after first use: a template, a tracker, libraries' files."""
    with open_batcher() as batcher:
        run(batcher, 1)


def run(batcher: EpisodeBatcher, n_episodes: int, identity: int = 0) -> TemporalDictTensor:
    batcher.execute(n_episodes, env_info={"id": identity})
    return batcher.get()


def fail(batcher: EpisodeBatcher) -> None:
    batcher.execute(4, env_info=faults_at(4, 1, "raise", 1))
    with pytest.raises(EnvError):
        batcher.get()


def n_blocks_mapped() -> int:
    """Count the mappings of anonymous shared memory in this process."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:")


def held() -> dict[str, float]:
    """Return the resources that this process holds."""
    this_process = psutil.Process()
    return {
        "shared mappings": n_blocks_mapped(),
        "descriptors": n_descriptors(),
        "processes": len(this_process.children(recursive=True)),
        "threads": this_process.num_threads(),
        "mib": this_process.memory_info().rss / 2**20,
    }


# Descriptors, processes, memory ---------------------------------------------------------------


def test_many_batchers_do_not_leak(struck: Struck) -> None:
    seen, in_dev_shm = [], named_memory.names()
    for number in range(6):
        # It succeeds and fails, and is closed or dropped; its successor fails to start.
        batcher = open_batcher(1, 50, 100, on_worker_failure="restart")
        for _ in range(3):
            batcher.update(number)
            run(batcher, 10)
        fail(batcher)
        batcher.execute(10)
        assert named_memory.names() <= in_dev_shm  # which may be small, in containers
        if number % 3 != 1:
            batcher.close()
        del batcher
        with pytest.raises(RuntimeError):
            open_batcher(fault=("raise", "os_exit")[number % 2])
        seen.append(held())
    first, last = seen[1], seen[-1]
    assert last.pop("mib") < first.pop("mib") + 8
    assert last == first


def test_a_worker_costs_at_most_three_descriptors_and_a_batcher_a_few() -> None:
    gc.collect()  # reference cycles of other tests
    before, others = n_descriptors(), worker_pids()
    with open_batcher(2, on_worker_failure="restart") as batcher:
        assert n_descriptors() - before <= 3 * 2 + 3
        worker = psutil.Process(min(worker_pids() - others))
        run(batcher, 4)
        n_in_worker = worker.num_fds()
        kept = []
        for number in range(30):
            batcher.update(number)
            kept.append(run(batcher, 4, number))
            fail(batcher)
        # Successors would map these as well; at most 16 of them are blocks:
        assert n_descriptors() - before <= 3 * 2 + 22
        assert worker.num_fds() == n_in_worker
    assert n_descriptors() == before


@pytest.mark.promise("I8")
def test_memory_stays_flat_over_many_requests() -> None:
    others = worker_pids()
    with open_batcher(n_timesteps=100, n_slots=64) as batcher:
        processes = [psutil.Process(), psutil.Process(*(worker_pids() - others))]
        for number in range(100):
            if number == 40:
                before = [process.memory_info().rss for process in processes]
                blocks = n_blocks_mapped()
            if number % 8 == 0:
                fail(batcher)
            batcher.update(number)
            run(batcher, 8, number)
        after = [process.memory_info().rss for process in processes]
        assert n_blocks_mapped() <= blocks + 1
    grown = [b - a for a, b in zip(before, after, strict=True)]
    assert max(grown) < 0.5 * 2**20, grown  # 9 KiB per request


@pytest.mark.promise("I8")
def test_more_episodes_than_slots_fit_into_bounded_shared_memory() -> None:
    with open_batcher(n_timesteps=100, n_slots=4) as batcher:
        run(batcher, 4)
        before = n_blocks_mapped()
        kept = run(batcher, 200, 7)
        assert (kept["frame"][:, :, 0] == 7).all()
        assert kept.lengths.tolist() == [3] * 200
        assert n_blocks_mapped() <= before + 1


# Results --------------------------------------------------------------------------------------


@pytest.mark.promise("I7")
def test_memory_is_reused_once_every_part_of_its_result_is_dropped() -> None:
    others = worker_pids()
    with open_batcher(n_timesteps=8, n_slots=8) as batcher:
        (worker,) = worker_pids() - others
        kept, addresses = [], set()
        for number in range(30):
            result = run(batcher, 8, number)
            addresses.add(result["frame"].data_ptr())
            if number % 10 == 3:
                kept.append(result["frame"].numpy()[2:3, :2, 0])
            del result
        assert [part.tolist() for part in kept] == [[[number] * 2] for number in (3, 13, 23)]
        assert len(kept) < len(addresses) <= len(kept) + 4  # the others shared a few blocks
        before = n_blocks_mapped()
        results = [run(batcher, 4, number) for number in range(20)]
        assert n_blocks_mapped() >= before + 14
        infos = [result.info for result in results]  # which do not keep the rest
        del results, kept
        run(batcher, 4)
        assert n_blocks_mapped() <= before
        assert len(shared_files(worker)) <= before + 2  # the worker has unmapped the rest
        assert all(info["seed"].shape == (4,) for info in infos)


@pytest.mark.promise("I7")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # for its os.fork()
def test_a_result_in_a_forked_child_is_not_overwritten() -> None:
    with open_batcher() as batcher:
        result = run(batcher, 8, 1)
        before = result["frame"].clone()
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(writer)
            os.read(reader, 1)  # until the parent has closed its end
            os._exit(int(torch.equal(result["frame"], before)))
        del result
        for number in (2, 3, 4):
            run(batcher, 8, number)
        os.close(reader)
        os.close(writer)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        # The memory is not kept either.
        assert len({run(batcher, 8)["frame"].data_ptr() for _ in range(20)}) <= 3


# The caller -----------------------------------------------------------------------------------


@pytest.mark.promise("I6")
def test_the_caller_does_not_create_environments(tmp_path: Path) -> None:
    others = worker_pids()
    with open_batcher(2, created_in=str(tmp_path), n_lanes=2) as batcher:
        run(batcher, 4)
        assert {int(path.name) for path in tmp_path.iterdir()} == worker_pids() - others


def state_of_this_process() -> dict[str, Any]:
    name, keys, *position = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": (name, keys.tolist(), *position),
        "random": random.getstate(),
        "threads": (torch.get_num_threads(), threading.active_count()),
        "modes": (torch.is_grad_enabled(), torch.get_default_dtype()),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "handlers": [signal.getsignal(number) for number in signal.valid_signals()],
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "environment": (dict(os.environ), os.getcwd(), list(sys.path), list(warnings.filters)),
        "excepthook": sys.excepthook,
        "logging": (list(logging.getLogger().handlers), logging.getLogger().level),
        "main": sys.modules["__main__"],
    }


@pytest.mark.promise("I6")
@pytest.mark.parametrize("n_threads", [0, 1])
def test_the_callers_process_state_is_unchanged(n_threads: int) -> None:
    before = state_of_this_process()
    arguments = 4, 8, create_agent, {}, create_env, {"n_lanes": 2}, n_threads
    with EpisodeBatcher(*arguments) as batcher, Batcher(*arguments) as windows:
        assert state_of_this_process() == before
        batcher.update(1)
        run(batcher, 9)
        fail(batcher)
        windows.reset()
        windows.execute()
        windows.get()
        assert state_of_this_process() == before
    assert state_of_this_process() == before
