"""Limits of the container around this process: its control groups, version 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from rlpool.machine.interrupts import InterruptsHeld

ROOT = Path("/")
"""Where ``/proc`` and ``/sys`` are; another directory stands for another machine."""


def memory_limits(root: Path = ROOT) -> Iterator[tuple[Path, int, int]]:
    """``(file, limit, used)`` in bytes for every group around this process with a memory limit."""
    for group in _groups(root):
        limit = read_text(group / "memory.max").strip()
        if limit.isdecimal():  # else "max", or no such file
            used = int(read_text(group / "memory.current") or 0)
            stat = dict(line.split() for line in read_text(group / "memory.stat").splitlines())
            # The kernel's own estimate, MemAvailable, counts half of the active page cache as free.
            cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0)) // 2
            yield group / "memory.max", int(limit), max(0, used - cached)


def cpu_limits(root: Path = ROOT) -> Iterator[float]:
    """Number of cores whose time each group around this process may use."""
    for group in _groups(root):
        quota, _, period = read_text(group / "cpu.max").strip().partition(" ")
        if quota.isdecimal():  # else "max", or no such file
            yield int(quota) / int(period)


def read_text(file: Path) -> str:
    """A file of the kernel; ``""`` where there is none."""
    with InterruptsHeld():  # a handler's errors, such as TimeoutError, would look like the file's
        try:
            return file.read_text()
        except (OSError, UnicodeDecodeError):
            return ""


def _groups(root: Path) -> Iterator[Path]:
    """Directories of this process's control group and of those above it.

    A container sees its own group as the topmost directory, possibly under the host's path, which
    then does not exist here.
    """
    for line in read_text(root / "proc/self/cgroup").splitlines():
        hierarchy, _, path = line.partition("::")
        if hierarchy == "0":
            own = PurePosixPath("" if ".." in path else path.lstrip("/"))
            for directory in (own, *own.parents):
                yield root / "sys/fs/cgroup" / directory
