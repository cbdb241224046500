"""Limits of control groups, read from made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpool.machine.cgroups import GroupLimit, memory_limits, task_limits

from support.machines import V2_MOUNT, machine, new_machine, old_machine


def test_version_two_counts_the_group_and_those_above_it(tmp_path: Path) -> None:
    root = new_machine(
        tmp_path,
        "/user/job/step",
        {
            "user/job/step/memory.max": "max",
            "user/job/step/memory.current": "900",
            "user/job/memory.max": "5000",
            "user/job/memory.current": "3000",
            "user/job/memory.stat": "anon 1000\ninactive_file 700\nactive_file 200\nslab 9",
            "user/memory.max": "4000",
            "user/memory.current": "1000",
        },
    )
    groups = root / "sys/fs/cgroup"
    assert memory_limits(root) == [
        GroupLimit(groups / "user/job/memory.max", 5000, 3000 - 700 - 200 // 2),
        GroupLimit(groups / "user/memory.max", 4000, 1000),
    ]


def test_in_a_namespace_of_its_own_the_group_is_the_root(tmp_path: Path) -> None:
    root = new_machine(tmp_path, "/", {"memory.max": "4096", "memory.current": "96"})
    assert memory_limits(root) == [GroupLimit(root / "sys/fs/cgroup/memory.max", 4096, 96)]


@pytest.mark.parametrize("group", ["/../elsewhere", "/not/mounted/here"])
def test_a_group_that_is_not_visible_counts_as_the_mounted_one(tmp_path: Path, group: str) -> None:
    root = new_machine(tmp_path, group, {"memory.max": "4096", "memory.current": "96"})
    machine(root, {"sys/fs/elsewhere/memory.max": "12"})
    assert [limit.limit for limit in memory_limits(root)] == [4096]


def test_version_one_counts_the_group_and_those_above_it(tmp_path: Path) -> None:
    root = old_machine(
        tmp_path,
        "/jobs/mine",
        "/",
        {
            "memory/jobs/mine/memory.limit_in_bytes": "5000",
            "memory/jobs/mine/memory.usage_in_bytes": "3000",
            "memory/jobs/mine/memory.stat": "inactive_file 1\ntotal_inactive_file 700",
            "memory/jobs/memory.limit_in_bytes": "7000",
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "pids/jobs/mine/pids.max": "40",
            "pids/jobs/mine/pids.current": "8",
            "pids/jobs/pids.max": "max",
        },
    )
    groups = root / "sys/fs/cgroup"
    assert memory_limits(root) == [
        GroupLimit(groups / "memory/jobs/mine/memory.limit_in_bytes", 5000, 2300),
        GroupLimit(groups / "memory/jobs/memory.limit_in_bytes", 7000, 0),
    ]
    assert task_limits(root) == [GroupLimit(groups / "pids/jobs/mine/pids.max", 40, 8)]


def test_a_container_that_sees_its_group_under_the_hosts_name(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": "5000",
        "memory/memory.usage_in_bytes": "1000",
        "memory/inner/memory.limit_in_bytes": "4000",
    }
    root = old_machine(tmp_path, "/docker/4b60/inner", "/docker/4b60", files)
    assert [(group.limit, group.used) for group in memory_limits(root)] == [(4000, 0), (5000, 1000)]


def test_version_two_limits_processes(tmp_path: Path) -> None:
    root = new_machine(tmp_path, "/a", {"a/pids.max": "12", "a/pids.current": "3"})
    assert task_limits(root) == [GroupLimit(root / "sys/fs/cgroup/a/pids.max", 12, 3)]


def test_a_mount_may_have_a_space_in_its_name(tmp_path: Path) -> None:
    mount = V2_MOUNT.replace("/sys/fs/cgroup", "/my\\040groups")
    of_process = {"proc/self/cgroup": "0::/", "proc/self/mountinfo": mount}
    root = machine(tmp_path, {**of_process, "my groups/memory.max": "77"})
    assert [limit.limit for limit in memory_limits(root)] == [77]


def test_a_machine_without_groups_has_no_such_limits(tmp_path: Path) -> None:
    assert memory_limits(tmp_path) == []
    assert task_limits(tmp_path) == []
    machine(tmp_path, {"proc/self/cgroup": "nonsense\n::", "proc/self/mountinfo": "nonsense"})
    assert memory_limits(tmp_path) == []


def test_page_cache_is_never_counted_twice(tmp_path: Path) -> None:
    files = {"memory.max": "100", "memory.current": "10", "memory.stat": "inactive_file 30"}
    assert [limit.used for limit in memory_limits(new_machine(tmp_path, "/", files))] == [0]
