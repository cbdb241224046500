"""How many workers there may be."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpool import (
    Agent,
    DictTensor,
    EpisodeBatcher,
    GymEnv,
    ParallelEnvManager,
    SpecError,
    worker_count,
)
from rlpool.machine import worker_limits
from rlpool.machine.limits import Bound
from rlpool.machine.worker_limits import Quota
from rlpool.testing import CountingEnv
from rlpool.workers import warm_start

from support.machines import machine, new_machine, old_machine


@pytest.mark.parametrize(("n_cores", "expected"), [(1, 1), (2, 1), (3, 1), (4, 2), (64, 62)])
def test_auto_leaves_two_cores(
    monkeypatch: pytest.MonkeyPatch, n_cores: int, expected: int
) -> None:
    monkeypatch.setattr(worker_limits, "n_cores", lambda: n_cores)
    assert worker_count("auto") == expected


def test_cores_are_those_that_this_process_may_use(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert worker_limits.n_cores(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, before)
    assert worker_limits.n_cores(tmp_path) == len(before)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 64), ("150000 100000", 2), ("400000 100000", 4), ("1000 100000", 1), ("", 64)],
)
def test_cores_are_those_that_the_container_pays_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    root = new_machine(tmp_path, "/user/job", {"user/cpu.max": quota, "cpu.max": "max 100000"})
    assert worker_limits.n_cores(root) == expected


def test_old_containers_have_a_quota_as_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    files = {"cpu,cpuacct/other/cpu.cfs_quota_us": "250000"}
    files["cpu,cpuacct/other/cpu.cfs_period_us"] = "100000"
    files["cpu,cpuacct/cpu.cfs_quota_us"] = "-1"
    files["cpu,cpuacct/cpu.cfs_period_us"] = "100000"
    assert worker_limits.n_cores(old_machine(tmp_path, "/jobs", "/", files)) == 3


def test_more_workers_than_twice_the_cores_are_worth_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_limits, "n_cores", lambda: 1)
    with EpisodeBatcher(3, 4, AlwaysZero, {}, create_env, {}, n_threads=2, seeds=1) as batcher:
        batcher.execute(2)
        batcher.get()
    assert [r for r in caplog.records if "cores" in r.message] == []
    with EpisodeBatcher(3, 4, AlwaysZero, {}, create_env, {}, n_threads=3, seeds=1) as batcher:
        for _ in range(2):
            batcher.execute(4)
            batcher.get()
    with ParallelEnvManager([CountingEnv] * 3) as manager:
        manager.reset()
    texts = [record.message for record in caplog.records if record.name == "rlpool"]
    texts = [text for text in texts if "cores" in text]
    assert len(texts) == 2
    for text in texts:
        assert text.startswith("worker processes: 3, cores that this process may use: 1;")
        assert text.endswith('(worker_count("auto") gives 1)')


class AlwaysZero(Agent):
    def __call__(self, state: Any, observation: Any, *_: Any) -> Any:
        action = torch.zeros(observation.n_elems(), dtype=torch.int64)
        return DictTensor(), DictTensor({"action": action}), DictTensor()


def create_env(seed: int) -> GymEnv:
    return GymEnv([CountingEnv(length=2)], seed)


@pytest.mark.parametrize("number", [0, -1, True, "many", 1.5, None])
def test_counts_that_are_none_are_refused(number: object) -> None:
    with pytest.raises(SpecError, match="num_workers should be"):
        worker_count(number)  # type: ignore[arg-type]
    assert worker_count(3) == 3


def test_more_workers_than_descriptors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (120, 4096))
    monkeypatch.setattr(worker_limits, "n_open_descriptors", lambda: 48)
    worker_limits.check_workers(10, 4, "use fewer")  # 10 * 4 + 32 are just those that are left
    with pytest.raises(SpecError) as caught:
        worker_limits.check_workers(11, 4, "use fewer")
    text = str(caught.value)
    assert "11 workers need 76 file descriptors, but of the 120 that" in text
    assert "48 are in use" in text
    assert (
        "fix:   use fewer (10 would fit), or raise the limit before starting Python: ulimit -n 128"
    ) in text


def test_more_workers_than_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 3 * worker_limits.WORKER_BYTES
    bounds = [
        Bound("this machine has", 2**40, 2**39, 2**40),
        Bound("the cage has", 2**30, free, 2**30),
    ]
    monkeypatch.setattr(worker_limits, "shared_bounds", lambda root: bounds)
    worker_limits.check_workers(3, 4, "use fewer")
    with pytest.raises(SpecError) as caught:
        worker_limits.check_workers(4, 4, "use fewer")
    what, fix = str(caught.value).splitlines()
    assert what == (
        "4 workers need at least 400 MiB of memory, but of the 1 GiB that the cage has 300 MiB "
        "are free"
    )
    assert fix == "  fix:   use fewer (3 would fit), or free memory"


def test_forked_workers_share_what_the_template_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    free = worker_limits.WORKER_BYTES + 3 * worker_limits.FORKED_WORKER_BYTES
    bounds = [Bound("the cage has", 2**30, free, 2**30)]
    monkeypatch.setattr(worker_limits, "shared_bounds", lambda root: bounds)
    monkeypatch.setattr(warm_start, "why_impossible", lambda: "")
    monkeypatch.setattr(warm_start._templates, "is_up", lambda: False)
    fits = {"spawn": 1, "auto": 4}
    for start_method, most in fits.items():
        memory = warm_start.memory_of(start_method)
        worker_limits.check_workers(most, 3, "use fewer", memory)
        with pytest.raises(SpecError, match=f"{most} would fit"):
            worker_limits.check_workers(most + 1, 3, "use fewer", memory)
    monkeypatch.setattr(warm_start._templates, "is_up", lambda: True)  # and takes its memory
    worker_limits.check_workers(13, 3, "use fewer", warm_start.memory_of("auto"))
    monkeypatch.setattr(warm_start, "why_impossible", lambda: "it has 2 threads")
    assert warm_start.memory_of("auto") == warm_start.memory_of("spawn")


def test_the_remedy_is_one_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_limits.resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(SpecError, match="hard limit, which is 64"):
        worker_limits.check_workers(100, 4, "use fewer")


def test_no_limit_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    infinite = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (infinite, infinite))
    worker_limits.check_workers(1, 10**9, "use fewer")


def user_machine(root: Path, n_threads: dict[int, int]) -> Path:
    """A machine where processes of user 7 have so many threads."""
    status = "Name: x\nUid:\t{uid}\t0\t0\t0\nThreads:\t{threads}"
    files = {
        f"proc/{pid}/status": status.format(uid=7, threads=threads)
        for pid, threads in n_threads.items()
    }
    others = {"proc/9/status": status.format(uid=8, threads=1000), "proc/stat": "x"}
    own = {"proc/self/status": "CapEff:\t0000000000000000"}
    return machine(root, {**files, **others, **own})


def tasks(root: Path) -> list[Quota]:
    quotas = worker_limits.worker_quotas(4, 3, (worker_limits.WORKER_BYTES, 0), root)
    return [quota for quota in quotas if quota.noun == "processes and threads"]


def test_threads_of_this_user_count_against_its_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = user_machine(tmp_path, {5: 3, 6: 4})
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 100))
    monkeypatch.setattr(os, "getuid", lambda: 7)
    (quota,) = tasks(root)
    assert (quota.limit, quota.in_use, quota.room) == (20, 7, (20 - 7 - 2) // 2)
    assert quota.complaint(7) == (
        "7 workers need 16 processes and threads, but of the 20 that this user may have "
        "(RLIMIT_NPROC) 7 are in use"
    )
    assert quota.remedy == "raise the limit before starting Python: ulimit -u 32"
    (root / "proc/self/status").write_text("CapEff:\t0000000001000000\n")
    assert tasks(root) == []


def test_root_may_have_any_number_of_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 100))
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert tasks(user_machine(tmp_path, {})) == []


def test_containers_limit_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    infinite = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (infinite, infinite))
    root = new_machine(tmp_path, "/", {"pids.max": "12", "pids.current": "6"})
    (quota,) = tasks(root)
    assert (quota.limit, quota.in_use, quota.room) == (12, 6, 2)
    assert "pids.max" in quota.complaint(3)
    assert quota.remedy == "let the container have more: --pids-limit=16"


@pytest.mark.parametrize(("free_tasks", "fits"), [(0, 0), (1, 0), (2, 0), (3, 1), (6, 2), (7, 3)])
def test_room_is_what_is_left_without_the_spare_ones(free_tasks: int, fits: int) -> None:
    quota = Quota("processes and threads", "x", 100, 100 - free_tasks, 2, 1, "")
    assert quota.room == fits
    assert not fits or quota.wanted(fits) <= free_tasks
    assert quota.wanted(fits + 1) > free_tasks


def test_no_number_is_offered_where_none_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
    monkeypatch.setattr(worker_limits, "n_open_descriptors", lambda: 30)
    with pytest.raises(SpecError, match="fix:   use fewer, or let the administrator"):
        worker_limits.check_workers(1, 3, "use fewer")
