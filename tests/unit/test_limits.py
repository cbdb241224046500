"""Limits of memory, cores and descriptors, and the reports before they are hit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlpool import Batcher, EpisodeBatcher, MonoThreadEpisodeBatcher, SpecError, worker_count
from rlpool.data.storage import Memory
from rlpool.machine import limits
from rlpool.machine.limits import check_size, check_workers
from rlpool.machine.platform import Bound, human, memory_bounds, n_cores

from support.agents import StepCounter
from support.envs import create_counting
from support.machines import container, limit_descriptors, machine

MEMINFO = "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  400 kB"
ADVICE = "lower n_slots to {}".format


def bound_to(monkeypatch: pytest.MonkeyPatch, *bounds: Bound) -> None:
    monkeypatch.setattr(limits, "memory_bounds", lambda *_: list(bounds))


# Memory ---------------------------------------------------------------------------------------


def test_machine_and_container_limit_memory(tmp_path: Path) -> None:
    files = {
        "user/job/step/memory.max": "max",
        "user/job/step/memory.current": "900",
        "user/job/memory.max": "5000",
        "user/job/memory.current": "3000",
        "user/job/memory.stat": "anon 1000\ninactive_file 700\nactive_file 200\nslab 9",
        "user/memory.max": "4000",
        "user/memory.current": "6000",
    }
    root = machine(container(tmp_path, "/user/job/step", files), {"proc/meminfo": MEMINFO})
    found = {b.name.rpartition("cgroup/")[2]: (b.total, b.free) for b in memory_bounds(root)}
    assert found == {
        "this machine has": (1024000, 409600),
        "user/job/memory.max)": (5000, 5000 - (3000 - 700 - 200 // 2)),
        "user/memory.max)": (4000, 0),
    }


@pytest.mark.parametrize("group", ["/", "/../elsewhere"])
def test_the_topmost_control_group_of_a_container_counts(tmp_path: Path, group: str) -> None:
    root = container(tmp_path, group, {"memory.max": "4096", "memory.current": "96"})
    machine(root, {"sys/fs/elsewhere/memory.max": "12"})
    assert [bound.free for bound in memory_bounds(root)[1:]] == [4000]


def test_insufficient_memory_is_warned_about_or_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bound_to(monkeypatch, Bound("the group has", 2000, 500), Bound("this machine has", 900, 600))
    check_size({"a": 400, "b": 100}, ADVICE)
    assert not caplog.records
    check_size({"a": 801, "b": 99}, ADVICE, "the block")
    (text,) = caplog.messages
    assert "the block may take up to 900 B" in text
    assert "lower n_slots to 500" in text
    with pytest.raises(SpecError, match=r"lower n_slots to 500$"):
        check_size({"a": 1, "b": 900}, ADVICE)
    assert (human(1023), human(1536), human(5000 << 40)) == ("1023 B", "1.5 KiB", "5000 TiB")


@pytest.mark.linux
def test_batchers_refuse_before_they_allocate(monkeypatch: pytest.MonkeyPatch) -> None:
    bound_to(monkeypatch, Bound("this machine has", 102_400, 102_400))
    monkeypatch.setattr(MonoThreadEpisodeBatcher, "_N_TIMESTEPS", 10_000)
    monkeypatch.setattr(Memory, "local", lambda *_: pytest.fail("allocated"))
    make: Any = {"create_agent": StepCounter, "create_env": create_counting, "seeds": 0}
    for named, call in (
        ("n_slots", lambda: EpisodeBatcher(5000, 64, n_workers=0, **make)),
        ("n_timesteps", lambda: Batcher(5000, n_workers=0, **make)),
        ("fewer environments", lambda: MonoThreadEpisodeBatcher(**make)),
    ):
        with pytest.raises(SpecError, match=named):
            call()


# Workers --------------------------------------------------------------------------------------


@pytest.mark.linux
@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 64), ("150000 100000", 2), ("1000 100000", 1), ("", 64)],
)
def test_the_number_of_cores_respects_affinity_and_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    root = container(tmp_path, "/user/job", {"user/cpu.max": quota, "cpu.max": "max 100000"})
    assert n_cores(root) == expected
    monkeypatch.setattr(limits, "n_cores", lambda: n_cores(root))
    assert (worker_count("auto"), worker_count(3)) == (max(1, expected - 2), 3)
    with pytest.raises(SpecError, match="n_workers"):
        worker_count("many")  # type: ignore[arg-type]


@pytest.mark.linux
def test_more_workers_than_twice_the_cores_cause_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "n_cores", lambda: 1)
    check_workers(2, 3, "use fewer")
    assert not caplog.records
    for _ in range(2):  # not once per batcher
        check_workers(3, 3, "use fewer")
    assert len(caplog.messages) == 1


@pytest.mark.linux
def test_workers_beyond_the_descriptor_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "n_open_descriptors", lambda: 48)
    limit_descriptors(monkeypatch, 120)
    check_workers(10, 4, "use fewer")  # exactly the number left
    with pytest.raises(SpecError, match="8 would fit"):
        check_workers(10, 5, "use fewer")
