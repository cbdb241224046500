"""Limits of memory, cores, descriptors and processes, and what is said before they are hit."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from rlpool import (
    Batcher,
    EpisodeBatcher,
    MonoThreadEpisodeBatcher,
    SpecError,
    worker_count,
)
from rlpool.machine import limits, worker_limits
from rlpool.machine.limits import (
    Bound,
    check_size,
    human,
    memory_bounds,
    n_cores,
    own_bounds,
    shared_bounds,
)
from rlpool.machine.worker_limits import WORKER_BYTES, Quota, check_workers, worker_quotas
from rlpool.memory.storage import Memory
from rlpool.workers import process_start

from support.agents import StepCounter
from support.envs import create_counting
from support.machines import container, machine

MEMINFO = "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  400 kB"
INFINITE = resource.RLIM_INFINITY
ADVICE = "lower n_slots to {}".format


def limit_to(monkeypatch: pytest.MonkeyPatch, **limit: int) -> None:
    """Give this process these limits and no others."""
    numbers = {getattr(resource, name): value for name, value in limit.items()}
    monkeypatch.setattr(resource, "getrlimit", lambda n: (numbers.get(n, INFINITE),) * 2)


def bound_to(monkeypatch: pytest.MonkeyPatch, *bounds: Bound) -> None:
    monkeypatch.setattr(limits, "memory_bounds", lambda **_: list(bounds))


# Memory ---------------------------------------------------------------------------------------


def test_machine_and_containers_limit_memory(tmp_path: Path) -> None:
    root = container(
        tmp_path,
        "/user/job/step",
        {
            "user/job/step/memory.max": "max",
            "user/job/step/memory.current": "900",
            "user/job/memory.max": "5000",
            "user/job/memory.current": "3000",
            "user/job/memory.stat": "anon 1000\ninactive_file 700\nactive_file 200\nslab 9",
            "user/memory.max": "4000",
            "user/memory.current": "6000",
        },
    )
    machine(root, {"proc/meminfo": MEMINFO})
    found = {
        b.name.rpartition("cgroup/")[2]: (b.total, b.free, b.most) for b in shared_bounds(root)
    }
    assert found == {
        "this machine has": (1024000, 409600, 1024000),
        "user/job/memory.max)": (5000, 5000 - (3000 - 700 - 200 // 2), 5000),
        "user/memory.max)": (4000, 0, 4000),
    }


@pytest.mark.parametrize("group", ["/", "/../elsewhere", "/path/on/the/host"])
def test_in_a_container_the_topmost_group_counts(tmp_path: Path, group: str) -> None:
    root = container(tmp_path, group, {"memory.max": "4096", "memory.current": "96"})
    machine(root, {"sys/fs/elsewhere/memory.max": "12"})
    assert [bound.free for bound in shared_bounds(root)[1:]] == [4000]


def test_mapped_memory_counts_against_address_space(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = machine(tmp_path, {"proc/self/status": "Name: x\nVmSize:  3 kB\nVmData:  2 kB"})
    limit_to(monkeypatch, RLIMIT_AS=10240, RLIMIT_DATA=4096)
    shared = Bound("RLIMIT_AS allows (ulimit -v)", 10240, 7168, 7168)
    private = Bound("RLIMIT_DATA allows (ulimit -d)", 4096, 2048, 2048)
    assert own_bounds(private=False, root=root) == [shared]
    assert own_bounds(private=True, root=root) == [shared, private]
    assert memory_bounds(private=True, root=root)[1:] == [shared, private]
    limit_to(monkeypatch)
    assert own_bounds(private=True, root=root) == []


def test_memory_that_is_not_free_is_warned_of_or_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = Bound("the group has", 2000, 500, 2000)
    bound_to(monkeypatch, group, Bound("this machine has", 900, 600, 900))
    check_size({"a": 400, "b": 100}, ADVICE)
    assert not caplog.records
    check_size({"a": 801, "b": 99}, ADVICE, "the block")
    assert caplog.text.endswith(
        "the block may take up to 900 B (a 801 B, b 99 B), but only 500 B of the 1.95 KiB that "
        "the group has are free: lower n_slots to 500 if memory runs out\n"
    )
    with pytest.raises(SpecError) as caught:
        check_size({"a": 1, "b": 900}, ADVICE, "the block")
    assert str(caught.value) == (
        "the block would need 901 B (b 900 B, a 1 B), but only 600 B of the 900 B that this "
        "machine has are free\n  fix:   lower n_slots to 500"
    )
    with pytest.raises(SpecError, match=r"\(key_99 9.86 KiB, .*, key_92 .* KiB, \.\.\.\)"):
        check_size({f"key_{n}": n * 102 for n in range(100)}, ADVICE)


def test_sizes_are_readable() -> None:
    sizes = (0, 1023, 1024, 1536, 1023 << 20, 3 << 30, 5000 << 40)
    texts = ["0 B", "1023 B", "1 KiB", "1.5 KiB", "1023 MiB", "3 GiB", "5000 TiB"]
    assert [human(size) for size in sizes] == texts


# Blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "arguments", "advice"),
    [
        (EpisodeBatcher, {"n_slots": 64, "n_threads": 0}, "lower n_slots or n_timesteps, by"),
        (Batcher, {"n_threads": 0}, "lower n_timesteps, by"),
        (MonoThreadEpisodeBatcher, {}, "use fewer environments, by"),
    ],
)
def test_batchers_refuse_before_they_allocate(
    monkeypatch: pytest.MonkeyPatch, kind: Any, arguments: dict[str, int], advice: str
) -> None:
    bound_to(monkeypatch, Bound("this machine has", 102_400, 102_400, 102_400))
    monkeypatch.setattr(MonoThreadEpisodeBatcher, "_N_TIMESTEPS", 10_000)
    monkeypatch.setattr(Memory, "local", lambda *_: pytest.fail("allocated"))
    if arguments:
        arguments = {**arguments, "n_timesteps": 5000}
    with pytest.raises(SpecError, match=rf"frame(.|\n)*of the 100 KiB(.|\n)*{advice}"):
        kind(create_agent=StepCounter, create_env=create_counting, seeds=0, **arguments)


# Workers --------------------------------------------------------------------------------------


def test_worker_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_count(3) == 3
    for cores, expected in {1: 1, 2: 1, 3: 1, 4: 2, 64: 62}.items():
        monkeypatch.setattr(worker_limits, "n_cores", lambda n=cores: n)
        assert worker_count("auto") == expected
    for wrong in (0, True, "many", 1.5, None):
        with pytest.raises(SpecError, match="num_workers should be"):
            worker_count(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 64), ("150000 100000", 2), ("400000 100000", 4), ("1000 100000", 1), ("", 64)],
)
def test_cores_are_those_of_affinity_and_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    root = container(tmp_path, "/user/job", {"user/cpu.max": quota, "cpu.max": "max 100000"})
    assert n_cores(root) == expected


def test_more_workers_than_twice_the_cores_are_worth_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_limits, "n_cores", lambda: 1)
    check_workers(2, 3, "use fewer")
    assert not caplog.records
    check_workers(3, 3, "use fewer")
    (text,) = caplog.messages
    assert text.startswith("worker processes: 3, cores that this process may use: 1;")


def test_more_workers_than_descriptors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (120, 4096))
    monkeypatch.setattr(worker_limits, "n_open_descriptors", lambda: 48)
    check_workers(10, 4, "use fewer")  # 10 * 4 + 32 are exactly what is left
    with pytest.raises(SpecError) as caught:
        check_workers(11, 4, "use fewer")
    assert str(caught.value) == (
        "11 workers need at least 76 file descriptors, but only 72 of the 120 that this process "
        "may open (RLIMIT_NOFILE) are free\n  fix:   use fewer (10 would fit), or raise the limit "
        "before starting Python: ulimit -n 124"
    )
    limit_to(monkeypatch)
    check_workers(1, 10**9, "use fewer")


def test_more_workers_than_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cage = Bound("the cage has", 2**30, 3 * WORKER_BYTES, 2**30)
    machine = Bound("this machine has", 2**40, 2**39, 2**40)
    monkeypatch.setattr(worker_limits, "shared_bounds", lambda root: [machine, cage])
    check_workers(3, 4, "use fewer")
    with pytest.raises(SpecError) as caught:
        check_workers(4, 4, "use fewer")
    assert str(caught.value) == (
        "4 workers need at least 400 MiB of memory, but only 300 MiB of the 1 GiB that the cage "
        "has are free\n  fix:   use fewer (3 would fit), or free memory"
    )


def test_forked_workers_share_what_the_template_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    free = WORKER_BYTES + 3 * worker_limits.FORKED_WORKER_BYTES
    bounds = [Bound("the cage has", 2**30, free, 2**30)]
    monkeypatch.setattr(worker_limits, "shared_bounds", lambda root: bounds)
    monkeypatch.setattr(process_start, "why_impossible", lambda: "")
    monkeypatch.setattr(process_start._templates, "is_up", lambda: False)
    for start_method, most in {"spawn": 1, "auto": 4}.items():
        memory = process_start.memory_of(start_method)
        check_workers(most, 3, "use fewer", memory)
        with pytest.raises(SpecError, match=f"{most} would fit"):
            check_workers(most + 1, 3, "use fewer", memory)


def quotas_of_tasks(root: Path) -> list[Quota]:
    quotas = worker_quotas(4, 3, (WORKER_BYTES, 0), root)
    return [quota for quota in quotas if quota.noun == "processes and threads"]


def test_threads_of_this_user_count_against_its_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    status = "Name: x\nUid:\t{}\t0\t0\t0\nThreads:\t{}"
    files = {"5": status.format(7, 3), "6": status.format(7, 4), "9": status.format(8, 1000)}
    root = machine(tmp_path, {f"proc/{pid}/status": text for pid, text in files.items()})
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 100))
    monkeypatch.setattr(os, "getuid", lambda: 7)
    (quota,) = quotas_of_tasks(root)
    assert quota.room == (20 - 7 - 2) // 2
    assert quota.complaint(7) == (
        "7 workers need at least 16 processes and threads, but only 13 of the 20 that this user "
        "may have (RLIMIT_NPROC) are free"
    )
    assert quota.remedy == "raise the limit before starting Python: ulimit -u 17"
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert quotas_of_tasks(root) == []
