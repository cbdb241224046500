"""How much memory and how many cores there are, and what does not fit into the memory.

The limits of control groups are those of version 2.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rlpool.errors import SpecError
from rlpool.machine.interrupts import InterruptsHeld

_LOG = logging.getLogger("rlpool")

ROOT = Path("/")
"""Where ``/proc`` and ``/sys`` are; another directory stands for another machine."""

_LARGEST_KEYS = 8
"""A message names the largest keys; an observation may have hundreds."""

FILE_SIZE_REMEDY = "raise the limit before starting Python: ulimit -f unlimited"

Advice = Callable[[int], str]
"""Which arguments to lower so that a number of bytes is enough."""


def human(n_bytes: int) -> str:
    """A size for messages, such as ``"1.5 GiB"``."""
    size, units = float(n_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if size >= 1000 else f"{size:.3g} {units[0]}"


@dataclass(frozen=True)
class Bound:
    """A limit that workers or memory may hit.

    Attributes:
        name: Who sets it, after "the 8 GiB that".
        total: The limit.
        free: How much of it is left; for memory, without swapping.
        text: Formats an amount.
    """

    name: str
    total: int
    free: int
    text: Callable[[int], str] = human

    def __str__(self) -> str:
        return f"{self.text(self.free)} of the {self.text(self.total)} that {self.name} are free"


def shared_memory_bounds(root: Path = ROOT) -> list[Bound]:
    """What limits all processes together: the machine, and the container around this process."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total = _kilobytes(root / "proc/meminfo", "MemTotal", total)
    available = _kilobytes(root / "proc/meminfo", "MemAvailable", total)
    bounds = [Bound("this machine has", total, min(available, total))]
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


def address_space_bounds(root: Path = ROOT) -> list[Bound]:
    """What ``ulimit -v`` leaves to this process; empty without that limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return []
    left = max(0, limit - _kilobytes(root / "proc/self/status", "VmSize", 0))
    return [Bound("RLIMIT_AS leaves to this process (ulimit -v)", left, left)]


def file_size_limit() -> int | None:
    """The largest file that this process may make, ``None`` for any; shared memory is a file."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def check_file_size(n_bytes: int, what: str = "shared memory") -> None:
    """Refuse a file, or shared memory, that is larger than this process may make.

    Args:
        n_bytes: Its size.
        what: What it is, for the message.

    Raises:
        SpecError: Naming the limit and the remedy.
    """
    limit = file_size_limit()
    if limit is not None and n_bytes > limit:
        allowed = f"the limit of files is {human(limit)} (RLIMIT_FSIZE)"
        raise SpecError(f"{what} of {human(n_bytes)}: {allowed}", fix=FILE_SIZE_REMEDY)


def memory_bounds(root: Path = ROOT) -> list[Bound]:
    """Everything that limits the memory of this process; at least the machine does."""
    return shared_memory_bounds(root) + address_space_bounds(root)


def machine_bytes() -> int:
    """Memory that this process may use at most."""
    return min(bound.total for bound in memory_bounds())


def n_cores(root: Path = ROOT) -> int:
    """Cores that this process may use, by its affinity and the quotas of its control groups."""
    has_affinity = hasattr(os, "sched_getaffinity")
    n = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
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
    warning = size_warning(bytes_of_key, advice, what)
    if warning is not None:
        _LOG.warning("%s: %s if memory runs out", *warning)


def size_warning(
    bytes_of_key: Mapping[str, int], advice: Advice, what: str, root: Path = ROOT
) -> tuple[str, str] | None:
    """What ``check_size`` warns of, and what to do about it; ``None`` if the memory is free."""
    total = sum(bytes_of_key.values())
    bounds = memory_bounds(root)
    least, smallest = min(bounds, key=lambda b: b.free), min(bounds, key=lambda b: b.total)
    if total <= least.free:
        return None
    takes = f"{human(total)} ({_by_key(bytes_of_key)})"
    if total > smallest.total:
        raise SpecError(f"{what} would need {takes}, but only {smallest}", fix=advice(least.free))
    return f"{what} may take up to {takes}, but only {least}", advice(least.free)


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


def resident_bytes(pid: int | str | None = "self") -> int:
    """Resident memory of a process without shared blocks; 0 if it is unknown.

    Args:
        pid: The process, by default this one.
    """
    file = Path(f"/proc/{pid}/status")
    return _kilobytes(file, "RssAnon", 0) + _kilobytes(file, "RssFile", 0)


def private_bytes(pid: int) -> int:
    """Memory of a process that no other has, such as its template; 0 if it is unknown."""
    file = Path(f"/proc/{pid}/smaps_rollup")
    return _kilobytes(file, "Private_Clean", 0) + _kilobytes(file, "Private_Dirty", 0)


def has_ended(pid: int) -> bool:
    """Whether a process is no more, or waits for its parent to notice its end."""
    fields = stat_fields(pid)
    return not fields or fields[0] in "ZX"


def n_tasks(root: Path = ROOT) -> int:
    """Threads of all visible processes of this user."""
    files = [directory / "status" for directory in (root / "proc").glob("[0-9]*")]
    own = [file for file in files if _field(file, "Uid") == str(os.getuid())]
    return sum(int(_field(file, "Threads") or 1) for file in own)


def _kilobytes(file: Path, name: str, otherwise: int) -> int:
    """A size that a file of the kernel gives in kilobytes, in bytes."""
    kilobytes = _field(file, name)
    return int(kilobytes) * 1024 if kilobytes else otherwise


def _field(file: Path, name: str) -> str:
    """The first word after a name in a file of the kernel; ``""`` if it is not there."""
    for words in map(str.split, _read(file).splitlines()):
        if len(words) > 1 and words[0].rstrip(":") == name:
            return words[1]
    return ""


def _read(file: Path) -> str:
    """The text of a file of the kernel; ``""`` if it cannot be read."""
    with InterruptsHeld():  # a handler's errors, such as TimeoutError, would look like the file's
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
