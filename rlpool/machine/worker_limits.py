"""How many worker processes this machine allows."""

from __future__ import annotations

import logging
import math
import os
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from rlpool.errors import SpecError
from rlpool.machine.cgroups import ROOT, cpu_limits
from rlpool.machine.limits import Bound, human, resident_bytes, shared_bounds, status_field

_LOG = logging.getLogger("rlpool")

_MOST_PER_CORE = 2
"""More workers per core than this are worth a warning: one steps while another one waits."""

WORKER_BYTES = 100 * 2**20
"""Least private memory of a process that has imported torch and holds nothing else: of a spawned
worker, and of the template from which workers are forked."""

FORKED_WORKER_BYTES = 10 * 2**20
"""Least private memory of a worker that was forked from the template."""

WORKER_DESCRIPTORS = 3
"""A worker's pipe, and two by which multiprocessing notices its end and ours."""

_SPARE_DESCRIPTORS = 32
"""What starting a process and sending memory need for a moment, and what the caller may open."""

_WORKER_TASKS = 2
"""A worker's main thread and the one that watches its parent; libraries may add one per core."""

_SPARE_TASKS = 2
"""The resource tracker of multiprocessing, and the template."""

_CAPABILITIES = (21, 24)
"""CAP_SYS_ADMIN, CAP_SYS_RESOURCE: with either, a user may start any number of processes."""


@dataclass(frozen=True)
class Quota:
    """Something of which every worker takes a part.

    Attributes:
        noun: What it is.
        bound: How much there is.
        each: How much a worker takes.
        spare: How much is needed whatever the number of workers.
        remedy: How to get more.
    """

    noun: str
    bound: Bound
    each: int
    spare: int
    remedy: str

    @property
    def room(self) -> int:
        """How many workers it is enough for."""
        return max(0, (self.bound.free - self.spare) // self.each)

    def complaint(self, n_workers: int) -> str:
        """What to say if it is not enough."""
        who = "1 worker needs" if n_workers == 1 else f"{n_workers} workers need"
        wanted = self.bound.text(n_workers * self.each + self.spare)
        of = "of " if self.noun == "memory" else ""
        return f"{who} at least {wanted} {of}{self.noun}, but only {self.bound}"


def worker_count(num_workers: int | str) -> int:
    """Turn ``num_workers`` into a number of worker processes.

    Args:
        num_workers: A number from 1, or ``"auto"`` for all cores that this process may use but
            two, one of which is for the policy; at least 1.

    Raises:
        SpecError: If it is neither.
    """
    if num_workers == "auto":
        return max(1, n_cores() - 2)
    number: Any = num_workers
    if type(number) is bool or not isinstance(number, Integral) or int(number) < 1:
        raise SpecError(f"num_workers should be 'auto' or an int from 1, got {number!r}")
    return int(number)


def n_cores(root: Path = ROOT) -> int:
    """Cores that this process may use, by its affinity and the quotas of its control groups.

    Args:
        root: Where ``/proc`` and ``/sys`` are.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    n_own = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min([n_own, *map(math.ceil, cpu_limits(root))]))


def check_workers(
    n_workers: int, descriptors_each: int, advice: str, memory: tuple[int, int] = (WORKER_BYTES, 0)
) -> None:
    """Refuse more worker processes than descriptors, processes or memory allow.

    More than twice the cores are worth a warning: they help only where environments wait for
    something other than a core.

    Args:
        n_workers: Processes to be started.
        descriptors_each: Descriptors that each of them costs this process.
        advice: Which arguments to change, for the message.
        memory: Least bytes of each of them, and of all together besides.

    Raises:
        SpecError: Naming what is needed, the limit and the remedy.
    """
    for quota in worker_quotas(n_workers, descriptors_each, memory):
        if n_workers > quota.room:
            fits = f" ({quota.room} would fit)" if quota.room else ""
            raise SpecError(quota.complaint(n_workers), fix=f"{advice}{fits}, or {quota.remedy}")
    cores = n_cores()
    if n_workers > _MOST_PER_CORE * cores:
        _LOG.warning(
            "worker processes: %d, cores that this process may use: %d; unless environments "
            'mostly wait, fewer are faster (worker_count("auto") is %d)',
            *(n_workers, cores, worker_count("auto")),
        )


def worker_quotas(
    n_workers: int,
    descriptors_each: int,
    memory: tuple[int, int],
    root: Path = ROOT,
    more_descriptors: int = 0,
) -> list[Quota]:
    """What limits the number of workers.

    Args:
        n_workers: How many there are to be, for the remedies.
        descriptors_each: Descriptors that each of them costs this process.
        memory: As for ``check_workers``.
        root: Where ``/proc`` and ``/sys`` are.
        more_descriptors: What else is going to be opened.
    """
    spare = _SPARE_DESCRIPTORS + more_descriptors
    quotas = [*_descriptors(n_workers, descriptors_each, spare), *_processes(n_workers, root)]
    return quotas + [Quota("memory", b, *memory, "free memory") for b in shared_bounds(root)]


def _descriptors(n_workers: int, each: int, spare: int) -> Iterator[Quota]:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY:
        in_use = n_open_descriptors()
        remedy = _how_to_raise("n", in_use + n_workers * each + spare, most)
        bound = Bound("this process may open (RLIMIT_NOFILE)", limit, limit - in_use, limit, str)
        yield Quota("file descriptors", bound, each, spare, remedy)


def _processes(n_workers: int, root: Path) -> Iterator[Quota]:
    limit, most = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit != resource.RLIM_INFINITY and not _is_exempt(root):
        in_use = _n_tasks(root)
        remedy = _how_to_raise("u", in_use + n_workers * _WORKER_TASKS + _SPARE_TASKS, most)
        bound = Bound("this user may have (RLIMIT_NPROC)", limit, limit - in_use, limit, str)
        yield Quota("processes and threads", bound, _WORKER_TASKS, _SPARE_TASKS, remedy)


def n_open_descriptors() -> int:
    """Descriptors that this process has open."""
    try:
        return len(os.listdir("/dev/fd")) - 1  # one is the listing's own
    except OSError:
        return 64


def _is_exempt(root: Path) -> bool:
    """Whether the number of processes of this process's user is not limited."""
    mask = int(status_field(root / "proc/self/status", "CapEff", "0"), 16)
    return os.getuid() == 0 or any(mask >> bit & 1 for bit in _CAPABILITIES)


def _n_tasks(root: Path) -> int:
    """Threads of all processes of this process's user, as far as they can be seen."""
    files = [directory / "status" for directory in (root / "proc").glob("[0-9]*")]
    own = [file for file in files if status_field(file, "Uid", "") == str(os.getuid())]
    return sum(int(status_field(file, "Threads", "1")) for file in own)


def _how_to_raise(option: str, number: int, most: int) -> str:
    """How to raise a limit of ``ulimit`` to a number.

    Args:
        option: The option of ``ulimit``.
        number: The number.
        most: The hard limit, negative if there is none.
    """
    if 0 <= most < number:
        return f"let the administrator raise the hard limit, which is {most}"
    return f"raise the limit before starting Python: ulimit -{option} {number}"


def refuse_small_limit(max_rss_bytes: int | None, pids: Iterable[int | None]) -> None:
    """Refuse a memory limit for workers that they exceed before they have done anything.

    Args:
        max_rss_bytes: The limit, ``None`` for none.
        pids: The workers, which are ready.

    Raises:
        SpecError: Naming the limit and what they need.
    """
    needed = 0 if max_rss_bytes is None else max(map(resident_bytes, pids), default=0)
    if max_rss_bytes is not None and needed > max_rss_bytes:
        raise SpecError(
            f"max_rss_bytes is {human(max_rss_bytes)}, but a worker that has done nothing yet "
            f"has {human(needed)} of resident memory",
            fix="set max_rss_bytes well above that, which includes the modules it imported",
        )
