"""How many cores and descriptors there are and how much memory, and what needs more.

The limits of control groups are those of version 2.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from rlpool.errors import SpecError
from rlpool.machine.arguments import whole_number

_LOG = logging.getLogger("rlpool")

_ONCE = {"once": ""}
"""Of a warning that a program needs only once, as the machine is the same for all batchers."""

ROOT = Path("/")
"""Where ``/proc`` and ``/sys`` are; another directory stands for another machine."""

_LARGEST_KEYS = 8
"""A message names the largest keys; an observation may have hundreds."""

_MOST_PER_CORE = 2
"""More workers per core than this are worth a warning: one steps while another one waits."""

WORKER_DESCRIPTORS = 3
"""A worker's pipe, and two by which multiprocessing notices its end and ours."""

_SPARE_DESCRIPTORS = 32
"""What starting a process and sending memory need for a moment, and what the caller may open."""

Advice = Callable[[int], str]
"""Which arguments to lower so that a number of bytes is enough."""


def human(n_bytes: int) -> str:
    """A size for messages, such as ``"1.5 GiB"``."""
    size, units = float(n_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if size >= 1000 else f"{size:.3g} {units[0]}"


class Bound(NamedTuple):
    """A limit of memory: who sets it, how much there is, and how much is free without swapping."""

    name: str
    total: int
    free: int

    def __str__(self) -> str:
        return f"{human(self.free)} of the {human(self.total)} that {self.name} are free"


def memory_bounds(root: Path = ROOT) -> list[Bound]:
    """What limits memory: the machine, and the containers around this process."""
    file = root / "proc/meminfo"
    total, free = _kilobytes(file, "MemTotal"), _kilobytes(file, "MemAvailable")
    bounds = [Bound("this machine has", total, free)]
    for group in _control_groups(root):
        limit = _read(group / "memory.max").strip()
        if not limit.isdecimal():  # "max", or no such file
            continue
        used = int(_read(group / "memory.current") or 0)
        # The kernel's own estimate, MemAvailable, counts half of the active page cache as free.
        used -= int(_field(group / "memory.stat", "inactive_file") or 0)
        used -= int(_field(group / "memory.stat", "active_file") or 0) // 2
        name = f"the control group of this process allows ({group / 'memory.max'})"
        bounds.append(Bound(name, int(limit), max(0, int(limit) - max(0, used))))
    return bounds


def n_cores(root: Path = ROOT) -> int:
    """Cores that this process may use, by its affinity and the quotas of its control groups."""
    n = len(os.sched_getaffinity(0))
    for group in _control_groups(root):
        quota, _, period = _read(group / "cpu.max").strip().partition(" ")
        if quota.isdecimal():  # else "max", or no such file
            n = min(n, -(-int(quota) // int(period)))
    return max(1, n)


def check_size(bytes_of_key: Mapping[str, int], advice: Advice, what: str = "the slots") -> None:
    """Refuse memory that cannot be allocated, before it is; warn if it is not free now.

    Args:
        bytes_of_key: Bytes per key.
        advice: Which arguments to lower, for the message.
        what: What the memory holds, for the message.

    Raises:
        SpecError: If it is larger than the memory of the machine or the container, naming bytes
            per key, in all, and free.
    """
    total, bounds = sum(bytes_of_key.values()), memory_bounds()
    least, smallest = min(bounds, key=lambda b: b.free), min(bounds, key=lambda b: b.total)
    takes = f"{human(total)} ({_by_key(bytes_of_key)})"
    if total > smallest.total:
        raise SpecError(f"{what} would need {takes}, but only {smallest}", fix=advice(least.free))
    if total > least.free:
        text = "%s may take up to %s, but only %s: %s if memory runs out"
        _LOG.warning(text, what, takes, least, advice(least.free), extra=_ONCE)


def stat_fields(pid: int | str | None) -> list[str]:
    """What the kernel says of a process, its state first; empty if there is no such process."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def process_activity(pid: int | None) -> int:
    """CPU time and page faults of a process: a number that grows while it does anything.

    Returns:
        At least 1; 0 where the system does not provide it.
    """
    fields = stat_fields(pid)
    # Minor and major faults, user and system time.
    return 1 + sum(int(fields[n]) for n in (7, 9, 11, 12)) if fields else 0


def resident_bytes(pid: int) -> int:
    """Resident memory of a process without shared blocks; 0 if it is unknown."""
    file = Path(f"/proc/{pid}/status")
    return _kilobytes(file, "RssAnon") + _kilobytes(file, "RssFile")


def n_oom_kills() -> int:
    """Processes that the kernel has killed for want of memory since its start; 0 if unknown."""
    return int(_field(ROOT / "proc/vmstat", "oom_kill") or 0)


def has_ended(pid: int) -> bool:
    """Whether a process has ended, or waits for its parent to notice its end."""
    fields = stat_fields(pid)
    return not fields or fields[0] in "ZX"


def _kilobytes(file: Path, name: str) -> int:
    """A size that a file of the kernel gives in kilobytes, in bytes; 0 if it is not there."""
    return int(_field(file, name) or 0) * 1024


def _field(file: Path, name: str) -> str:
    """The first word after a name in a file of the kernel; ``""`` if it is not there."""
    for words in map(str.split, _read(file).splitlines()):
        if len(words) > 1 and words[0].rstrip(":") == name:
            return words[1]
    return ""


def _read(file: Path) -> str:
    """The text of a file of the kernel; ``""`` if it cannot be read."""
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _control_groups(root: Path) -> Iterator[Path]:
    """Directories of this process's control group and of those above it.

    A container sees its own group as the topmost directory; the path may be the host's, which does
    not exist here.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, _, path = line.partition("::")
        if hierarchy == "0":
            own = PurePosixPath("" if ".." in path else path.lstrip("/"))
            for directory in (own, *own.parents):
                yield root / "sys/fs/cgroup" / directory


def _by_key(bytes_of_key: Mapping[str, int]) -> str:
    """Bytes per key, the largest first."""
    ordered = sorted(bytes_of_key.items(), key=lambda item: -item[1])
    parts = [f"{key} {human(n_bytes)}" for key, n_bytes in ordered[:_LARGEST_KEYS]]
    return ", ".join(parts + ["..."] * (len(ordered) > _LARGEST_KEYS))


# Workers ------------------------------------------------------------------------------------------


def worker_count(n_workers: int | str) -> int:
    """Turn ``n_workers`` into a number of worker processes.

    Args:
        n_workers: A number from 1, or ``"auto"`` for all cores that this process may use but
            two, one of which is for the policy; at least 1.

    Raises:
        SpecError: If it is neither.

    Example:
        >>> worker_count(3)
        3
        >>> worker_count("auto") >= 1
        True
    """
    if n_workers == "auto":
        return max(1, n_cores() - 2)
    return whole_number("n_workers", n_workers, 1, fix="or pass 'auto'")


def check_workers(n_workers: int, descriptors_each: int, advice: str) -> None:
    """Refuse more worker processes than descriptors allow.

    More than twice the cores are worth a warning: they help only where environments wait for
    something other than a core.

    Args:
        n_workers: Processes to be started.
        descriptors_each: Descriptors that each of them costs this process.
        advice: Which arguments to change, for the message.

    Raises:
        SpecError: Naming what is needed, what is left, and the remedy.
    """
    n_needed, n_free = n_workers * descriptors_each, n_free_descriptors()
    if n_needed > n_free:
        raise SpecError(
            f"{n_workers} workers need {n_needed} file descriptors, but only {n_free} are free",
            fix=f"{advice} ({n_free // descriptors_each} would fit), or raise the limit before "
            "starting Python: ulimit -n",
        )
    if n_workers > _MOST_PER_CORE * n_cores():
        _LOG.warning(
            "worker processes: %d, cores that this process may use: %d; unless environments "
            'mostly wait, fewer are faster (worker_count("auto") is %d)',
            *(n_workers, n_cores(), worker_count("auto")),
            extra=_ONCE,
        )


def n_free_descriptors() -> int:
    """Descriptors that this process may open for workers."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(0, limit - n_open_descriptors() - _SPARE_DESCRIPTORS)


def n_open_descriptors() -> int:
    """Descriptors that this process has open."""
    return len(os.listdir("/dev/fd")) - 1  # one is the listing's own
