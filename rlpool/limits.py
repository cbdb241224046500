"""How much memory there is, and what does not fit into it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rlpool.errors import SpecError, compose


def machine_bytes() -> int:
    """Memory that this machine, or the container around this process, has in all."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_container_limits()])


def free_bytes() -> int:
    """Memory that can be had without swapping, as the kernel estimates it."""
    try:
        text = Path("/proc/meminfo").read_text()
        kilobytes = next(line for line in text.splitlines() if line.startswith("MemAvailable"))
        available = int(kilobytes.split()[1]) * 1024
    except (OSError, StopIteration):
        available = machine_bytes()
    return min([available, *_container_limits()])


def _container_limits() -> list[int]:
    limits = []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return limits


def process_activity(pid: int | None) -> int:
    """A number that grows while a process does anything at all: its CPU time and page faults.

    Returns:
        At least 1; 0 where the system does not tell.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    minor_faults, major_faults, user, system = (int(fields[n]) for n in (7, 9, 11, 12))
    return 1 + minor_faults + major_faults + user + system


def resident_bytes(pid: int | None) -> int:
    """Memory of a process that is in RAM, shared pages included; 0 if the system does not tell."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def check_size(bytes_of_key: Mapping[str, int], advice: str, what: str = "the slots") -> bool:
    """Refuse a block that the machine cannot hold.

    Args:
        bytes_of_key: Bytes per key.
        advice: Which arguments to lower, for the message.
        what: What the block holds, for the message.

    Returns:
        True if the block fits into what is free now, False if it fits only into the machine.

    Raises:
        SpecError: If it is larger than the machine's or the container's memory.
    """
    total = sum(bytes_of_key.values())
    if total > machine_bytes():
        largest = sorted(bytes_of_key.items(), key=lambda item: -item[1])[:5]
        keys = ", ".join(f"{key} {human(n_bytes)}" for key, n_bytes in largest)
        raise SpecError(
            compose(
                f"{what} would need {human(total)} ({keys}), "
                f"but there are {human(machine_bytes())} in all",
                fix=advice,
            )
        )
    return total <= free_bytes()


def human(n_bytes: int) -> str:
    """A size for messages, such as ``"1.5 GiB"``."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
