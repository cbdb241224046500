"""What the container around this process allows: the limits of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rlpool.machine.interrupts import InterruptsHeld

ROOT = Path("/")
"""Where ``/proc`` and ``/sys`` lie; another directory stands for another machine."""

_NO_LIMIT = 2**60
"""Version 1 says so many bytes or more, rounded to pages, where there is no limit."""


@dataclass(frozen=True)
class GroupLimit:
    """A limit of a control group.

    Attributes:
        file: The file that holds it.
        limit: The limit.
        used: What the group uses of it. For memory without what the kernel can take back.
    """

    file: Path
    limit: int
    used: int


def memory_limits(root: Path = ROOT) -> list[GroupLimit]:
    """Limits on memory, of this process's group and of all groups that it lies in."""
    found = []
    for directory, version in _directories("memory", root):
        new = version == 2
        file = directory / ("memory.max" if new else "memory.limit_in_bytes")
        limit = _number(file)
        if limit is None or limit >= _NO_LIMIT:
            continue
        used = _number(directory / ("memory.current" if new else "memory.usage_in_bytes")) or 0
        cached = _cached_bytes(directory / "memory.stat", "" if new else "total_")
        found.append(GroupLimit(file, limit, max(0, used - cached)))
    return found


def task_limits(root: Path = ROOT) -> list[GroupLimit]:
    """Limits on processes and threads, of this process's group and of all that it lies in."""
    found = []
    for directory, _ in _directories("pids", root):
        limit = _number(directory / "pids.max")
        if limit is not None:
            used = _number(directory / "pids.current") or 0
            found.append(GroupLimit(directory / "pids.max", limit, used))
    return found


def cpu_limits(root: Path = ROOT) -> list[float]:
    """Cores' worth of time that this process's group and all that it lies in may use."""
    found = []
    for directory, version in _directories("cpu", root):
        if version == 2:
            quota, _, period = read_text(directory / "cpu.max").strip().partition(" ")
        else:
            quota = read_text(directory / "cpu.cfs_quota_us").strip()
            period = read_text(directory / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal() and int(period):  # "max" or -1 is no limit
            found.append(int(quota) / int(period))
    return found


def read_text(file: Path) -> str:
    """A file of the kernel's, ``""`` where there is none."""
    with InterruptsHeld():  # whose errors, such as TimeoutError, would be taken for the file's
        try:
            return file.read_text()
        except (OSError, UnicodeDecodeError):
            return ""


def _number(file: Path) -> int | None:
    """A number; ``None`` if there is none, or ``max``."""
    try:
        return int(read_text(file))
    except ValueError:
        return None


def _cached_bytes(file: Path, prefix: str) -> int:
    """Page cache that makes way for processes: the inactive part, and half of the active one."""
    lines = (line.split() for line in read_text(file).splitlines())
    numbers = {words[0]: int(words[1]) for words in lines if len(words) == 2}
    inactive = numbers.get(f"{prefix}inactive_file", 0)
    # The kernel's own estimate, MemAvailable, counts on at least half of all page cache, too.
    return inactive + numbers.get(f"{prefix}active_file", 0) // 2


def _directories(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """Directories of this process's group and of those above it, with the version of each."""
    mounts = list(_mounts(root))
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        is_new = number == "0" and not controllers
        if not is_new and controller not in controllers.split(","):
            continue
        for kind, options, mounted_group, directory in mounts:
            if kind != ("cgroup2" if is_new else "cgroup"):
                continue
            if is_new or controller in options:
                inside = _within(group, mounted_group)
                own = root / directory.lstrip("/")
                for name in (inside, *inside.parents):
                    yield own / name, 2 if is_new else 1
                break


def _within(group: str, mounted_group: str) -> PurePosixPath:
    """A group's path below what is mounted; the mounted group itself if it is not below it.

    In a container the mount may show a part of the tree, and the path be that of the host.
    """
    try:
        inside = PurePosixPath(group).relative_to(mounted_group)
    except ValueError:
        return PurePosixPath()
    return PurePosixPath() if ".." in inside.parts else inside


def _mounts(root: Path) -> Iterator[tuple[str, list[str], str, str]]:
    """Mounted trees of groups: kind, controllers, the group that is mounted, where."""
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) > 4 and kind[0] in ("cgroup", "cgroup2"):
            directory = fields[4].replace("\\040", " ")
            yield kind[0], kind[-1].split(","), fields[3], directory
