"""How many worker processes this machine allows."""

from __future__ import annotations

import logging
import math
import operator
import os
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpool.errors import SpecError
from rlpool.machine.cgroups import ROOT, cpu_limits, read_text, task_limits
from rlpool.machine.limits import human, resident_bytes, shared_bounds

_LOG = logging.getLogger("rlpool")

_MOST_PER_CORE = 2
"""More workers than so many per core are worth a warning: one steps while one waits."""

WORKER_BYTES = 100 * 2**20
"""Private memory of a process that has imported torch and holds nothing else, at the least: of a
spawned worker, and of the template from which workers are forked."""

FORKED_WORKER_BYTES = 10 * 2**20
"""Private memory of a worker that was forked from one, at the least."""

WORKER_DESCRIPTORS = 3
"""A worker's pipe, and two that multiprocessing keeps to notice its end and ours."""

_WORKER_TASKS = 2
"""A worker's main thread and the one that watches its parent; libraries may add one per core."""

_SPARE_DESCRIPTORS = 32
"""What starting a process and sending memory need for a moment, and what the caller may open
besides."""

_SPARE_TASKS = 2
"""The process by which multiprocessing keeps track of what to clean up, and the template."""

_CAPABILITIES = (21, 24)
"""CAP_SYS_ADMIN, CAP_SYS_RESOURCE: who has one of them may start any number of processes."""


@dataclass(frozen=True)
class Quota:
    """Something of which every worker takes a part.

    Attributes:
        noun: What it is.
        of_limit: Whose limit, after "of the <limit> that".
        limit: How much there may be.
        in_use: How much of it is taken.
        each: How much a worker takes.
        spare: How much is needed whatever the number of workers.
        remedy: How to raise the limit.
    """

    noun: str
    of_limit: str
    limit: int
    in_use: int
    each: int
    spare: int
    remedy: str

    @property
    def room(self) -> int:
        """How many workers it is enough for."""
        return max(0, (self.limit - self.in_use - self.spare) // self.each)

    def wanted(self, n_workers: int) -> int:
        """How much so many workers take."""
        return n_workers * self.each + self.spare

    def complaint(self, n_workers: int) -> str:
        """What to say if it is not enough."""
        wanted = self.wanted(n_workers)
        who = "1 worker needs" if n_workers == 1 else f"{n_workers} workers need"
        if self.noun == "memory":
            return (
                f"{who} at least {human(wanted)} of memory, but of the "
                f"{human(self.limit)} that {self.of_limit} {human(self.limit - self.in_use)} "
                "are free"
            )
        return (
            f"{who} {wanted} {self.noun}, but of the {self.limit} that "
            f"{self.of_limit} {self.in_use} are in use"
        )


def worker_count(num_workers: int | str) -> int:
    """A number of worker processes from what the user wrote.

    Args:
        num_workers: A number from 1, or ``"auto"`` for all cores that this process may use but
            two, one of which is for the policy; at least 1.

    Raises:
        SpecError: If it is neither.
    """
    if num_workers == "auto":
        return max(1, n_cores() - 2)
    try:
        number = operator.index(num_workers)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        number = 0
    if number < 1 or isinstance(num_workers, bool):
        raise SpecError(f"num_workers should be 'auto' or an int from 1, got {num_workers!r}")
    return number


def n_cores(root: Path = ROOT) -> int:
    """Cores that this process may use, by its affinity and the quotas of its control groups.

    Args:
        root: Where ``/proc`` and ``/sys`` lie.
    """
    if hasattr(os, "sched_getaffinity"):
        n_own = len(os.sched_getaffinity(0))
    else:
        n_own = os.cpu_count() or 1
    return max(1, min([n_own, *map(math.ceil, cpu_limits(root))]))


def check_workers(
    n_workers: int, descriptors_each: int, advice: str, memory: tuple[int, int] = (WORKER_BYTES, 0)
) -> None:
    """Refuse more worker processes than descriptors, processes or memory allow.

    More than twice the cores are worth a warning in the log: they are of use only where
    environments wait for something else than a core.

    Args:
        n_workers: Processes to be started.
        descriptors_each: Descriptors that one of them costs this process.
        advice: Which arguments to change, for the message.
        memory: Bytes of each of them and of all together besides, at the least.

    Raises:
        SpecError: Naming what is wanted, the limit and the remedy.
    """
    for quota in worker_quotas(n_workers, descriptors_each, memory):
        if n_workers > quota.room:
            fits = f" ({quota.room} would fit)" if quota.room else ""
            raise SpecError(quota.complaint(n_workers), fix=f"{advice}{fits}, or {quota.remedy}")
    usable = n_cores()
    if n_workers > _MOST_PER_CORE * usable:
        _LOG.warning(
            "worker processes: %d, cores that this process may use: %d; unless environments "
            'mostly wait, fewer are faster (worker_count("auto") gives %d)',
            n_workers,
            usable,
            worker_count("auto"),
        )


def worker_quotas(
    n_workers: int, descriptors_each: int, memory: tuple[int, int], root: Path = ROOT
) -> list[Quota]:
    """What bounds the number of workers.

    Args:
        n_workers: How many there are to be, for the remedies.
        descriptors_each: Descriptors that one of them costs this process.
        memory: As for ``check_workers``.
        root: Where ``/proc`` and ``/sys`` lie.
    """
    return [
        *_descriptor_quotas(n_workers, descriptors_each),
        *_task_quotas(n_workers, root),
        *_memory_quotas(*memory, root),
    ]


def _descriptor_quotas(n_workers: int, each: int) -> Iterator[Quota]:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    in_use = n_open_descriptors()
    wanted = n_workers * each + _SPARE_DESCRIPTORS + in_use
    yield Quota(
        "file descriptors",
        "this process may open (RLIMIT_NOFILE)",
        limit,
        in_use,
        each,
        _SPARE_DESCRIPTORS,
        how_to_raise("n", wanted, most),
    )


def _task_quotas(n_workers: int, root: Path) -> Iterator[Quota]:
    noun, wanted = "processes and threads", n_workers * _WORKER_TASKS + _SPARE_TASKS
    limit, most = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit != resource.RLIM_INFINITY and not _is_exempt(root):
        in_use = _n_tasks(root)
        remedy = how_to_raise("u", wanted + in_use, most)
        whose = "this user may have (RLIMIT_NPROC)"
        yield Quota(noun, whose, limit, in_use, _WORKER_TASKS, _SPARE_TASKS, remedy)
    for group in task_limits(root):
        whose = f"the control group of this process allows ({group.file})"
        remedy = f"let the container have more: --pids-limit={wanted + group.used}"
        yield Quota(noun, whose, group.limit, group.used, _WORKER_TASKS, _SPARE_TASKS, remedy)


def _memory_quotas(each: int, once: int, root: Path) -> Iterator[Quota]:
    for bound in shared_bounds(root):
        in_use = bound.total - bound.free
        yield Quota("memory", bound.name, bound.total, in_use, each, once, "free memory")


def n_open_descriptors() -> int:
    """Descriptors that this process has open."""
    for directory in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(directory)) - 1  # one is the listing's own
        except OSError:
            continue
    return 64


def _is_exempt(root: Path) -> bool:
    """Whether the number of processes of this process's user is not limited."""
    mask = int(_field(read_text(root / "proc/self/status"), "CapEff", "0"), 16)
    return os.getuid() == 0 or any(mask >> bit & 1 for bit in _CAPABILITIES)


def _n_tasks(root: Path) -> int:
    """Threads of all processes of this process's user, as far as they can be seen."""
    user = str(os.getuid())
    n_tasks = 0
    for directory in (root / "proc").glob("[0-9]*"):
        status = read_text(directory / "status")
        if status and _field(status, "Uid", "") == user:
            n_tasks += int(_field(status, "Threads", "1"))
    return n_tasks


def _field(status: str, name: str, otherwise: str) -> str:
    """The first word of a line of a ``status`` file."""
    for line in status.splitlines():
        if line.startswith(f"{name}:"):
            return line.split()[1]
    return otherwise


def how_to_raise(option: str, number: int, most: Any) -> str:
    """How to get a limit of so many: the next power of two, if that is allowed."""
    if 0 <= most < number:
        return f"let the administrator raise the hard limit, which is {most}"
    power = 1 << (number - 1).bit_length()
    return (
        "raise the limit before starting Python: "
        f"ulimit -{option} {number if 0 <= most < power else power}"
    )


def refuse_small_limit(max_rss_bytes: int | None, pids: Iterable[int | None]) -> None:
    """Refuse a limit for workers' memory that they exceed before they have done anything.

    Args:
        max_rss_bytes: The limit, ``None`` for none.
        pids: The workers, which have just got ready.

    Raises:
        SpecError: Naming the limit and what they need.
    """
    if max_rss_bytes is None:
        return
    needed = max(map(resident_bytes, pids), default=0)
    if needed > max_rss_bytes:
        raise SpecError(
            f"max_rss_bytes is {human(max_rss_bytes)}, but a worker that has done nothing yet "
            f"has {human(needed)} of resident memory",
            fix="set max_rss_bytes well above that, the modules it imported included",
        )
