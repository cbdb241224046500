"""How much memory there is, and what does not fit into it."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlpool.errors import SpecError
from rlpool.machine.cgroups import ROOT, memory_limits, read_text

_LOG = logging.getLogger("rlpool")

_LARGEST_KEYS = 8
"""Keys that a message names; of an observation with hundreds, the largest ones matter."""


@dataclass(frozen=True)
class Bound:
    """Something that bounds how much memory can be had.

    Attributes:
        name: What it is, after "the 8 GiB that".
        total: Bytes in all.
        free: Bytes of it that can be had now, without swapping.
        most: Bytes that can be had at the very most, whatever else is given up.
    """

    name: str
    total: int
    free: int
    most: int

    def __str__(self) -> str:
        return f"of the {human(self.total)} that {self.name} {human(self.free)} are free"


def shared_bounds(root: Path = ROOT) -> list[Bound]:
    """What bounds all processes together: the machine, and the container around this process."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total = _kilobytes(root / "proc/meminfo", "MemTotal", total)
    available = _kilobytes(root / "proc/meminfo", "MemAvailable", total)
    bounds = [Bound("this machine has", total, min(available, total), total)]
    for group in memory_limits(root):
        free = max(0, group.limit - group.used)
        name = f"the control group of this process allows ({group.file})"
        bounds.append(Bound(name, group.limit, free, group.limit))
    return bounds


def own_bounds(*, private: bool, root: Path = ROOT) -> list[Bound]:
    """What bounds this process alone.

    Args:
        private: Whether the memory is for this process only, not shared.
        root: Where ``/proc`` lies.
    """
    limits = [("RLIMIT_AS allows (ulimit -v)", resource.RLIMIT_AS, "VmSize")]
    if private:
        limits.append(("RLIMIT_DATA allows (ulimit -d)", resource.RLIMIT_DATA, "VmData"))
    bounds = []
    for name, number, used in limits:
        limit = resource.getrlimit(number)[0]
        if limit != resource.RLIM_INFINITY:
            free = max(0, limit - _kilobytes(root / "proc/self/status", used, 0))
            bounds.append(Bound(name, limit, free, free))
    return bounds


def memory_bounds(*, private: bool = False, root: Path = ROOT) -> list[Bound]:
    """Everything that bounds memory of this process; at least the machine does.

    Args:
        private: Whether the memory is for this process only, not shared.
        root: Where ``/proc`` and ``/sys`` lie.
    """
    return shared_bounds(root) + own_bounds(private=private, root=root)


def machine_bytes() -> int:
    """Memory that this machine, or the container around this process, has in all."""
    return min(bound.most for bound in memory_bounds())


def free_bytes() -> int:
    """Memory that can be had without swapping, as the kernel estimates it."""
    return min(bound.free for bound in memory_bounds())


Advice = Callable[[int], str]
"""Which arguments to lower so that so many bytes are enough."""


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


def resident_bytes(pid: int | str | None = "self") -> int:
    """Memory of a process that is in RAM, shared blocks left out; 0 if the system does not tell.

    Args:
        pid: The process, this one by default.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    sizes = [line.split() for line in lines if line.startswith(("RssAnon:", "RssFile:"))]
    return sum(int(size) for _, size, _ in sizes) * 1024


def check_size(
    bytes_of_key: Mapping[str, int],
    advice: Advice,
    what: str = "the slots",
    *,
    private: bool = False,
) -> None:
    """Refuse memory that cannot be had, before it is allocated; warn if it is not free now.

    Args:
        bytes_of_key: Bytes per key.
        advice: Which arguments to lower so that so many bytes are enough, for the message.
        what: What the memory holds, for the message.
        private: Whether it is for this process only.

    Raises:
        SpecError: If it is larger than the machine's or the container's memory, naming bytes per
            key, in all, and free.
    """
    shortage = size_warning(bytes_of_key, advice, what, private=private)
    if shortage is not None:
        _LOG.warning("%s: %s if memory runs out", *shortage)


def size_warning(
    bytes_of_key: Mapping[str, int],
    advice: Advice,
    what: str,
    *,
    private: bool = False,
    root: Path = ROOT,
) -> tuple[str, str] | None:
    """What to say about memory that is not free now, and what to do; ``None`` if it is free.

    Args:
        bytes_of_key: As for ``check_size``.
        advice: As for ``check_size``.
        what: As for ``check_size``.
        private: As for ``check_size``.
        root: Where ``/proc`` and ``/sys`` lie.

    Raises:
        SpecError: As ``check_size``.
    """
    total = sum(bytes_of_key.values())
    bounds = memory_bounds(private=private, root=root)
    most, free = min(bounds, key=lambda b: b.most), min(bounds, key=lambda b: b.free)
    if total <= free.free:
        return None
    takes = f"{human(total)} ({_by_key(bytes_of_key)})"
    if total > most.most:
        raise SpecError(f"{what} would need {takes}, but {most}", fix=advice(free.free))
    return f"{what} may take up to {takes}, but {free}", advice(free.free)


def _by_key(bytes_of_key: Mapping[str, int]) -> str:
    """Bytes per key, the largest first."""
    ordered = sorted(bytes_of_key.items(), key=lambda item: -item[1])
    parts = [f"{key} {human(n_bytes)}" for key, n_bytes in ordered[:_LARGEST_KEYS]]
    others = ordered[_LARGEST_KEYS:]
    if others:
        parts.append(f"{len(others)} smaller ones {human(sum(n for _, n in others))}")
    return ", ".join(parts)


def _kilobytes(file: Path, name: str, otherwise: int) -> int:
    """A size that a file of the kernel's gives in kilobytes, in bytes."""
    for line in read_text(file).splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return otherwise


def human(n_bytes: int) -> str:
    """A size for messages, such as ``"1.5 GiB"``."""
    size, units = float(n_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if size >= 1000 else f"{size:.3g} {units[0]}"
