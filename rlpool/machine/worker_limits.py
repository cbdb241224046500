"""How many worker processes this machine allows."""

from __future__ import annotations

import logging
import os
import platform
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlpool.errors import SpecError
from rlpool.machine.arguments import whole_number
from rlpool.machine.limits import (
    ROOT,
    Bound,
    human,
    n_cores,
    n_tasks,
    resident_bytes,
    shared_memory_bounds,
)

_LOG = logging.getLogger("rlpool")

_MOST_PER_CORE = 2
"""More workers per core than this are worth a warning: one steps while another one waits."""

_TESTED_PROCESSORS = "x86_64", "AMD64"
"""Names of x86-64."""

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


@dataclass(frozen=True)
class Quota:
    """A resource of which every worker takes a share.

    Attributes:
        noun: Its name.
        bound: How much there is.
        each: How much a worker takes.
        spare: How much is needed besides, for any number of workers.
        remedy: How to get enough.
    """

    noun: str
    bound: Bound
    each: int
    spare: int
    remedy: str

    @property
    def room(self) -> int:
        """How many workers fit."""
        return max(0, (self.bound.free - self.spare) // self.each)

    def complaint(self, n_workers: int) -> str:
        """The message if that is too few."""
        who = "1 worker needs" if n_workers == 1 else f"{n_workers} workers need"
        wanted = self.bound.text(n_workers * self.each + self.spare)
        of = "of " if self.noun == "memory" else ""
        return f"{who} at least {wanted} {of}{self.noun}, but only {self.bound}"

    def fix(self, advice: str) -> str:
        """The fix if that is too few.

        Args:
            advice: Which arguments to change.
        """
        fits = f" ({self.room} would fit)" if self.room else ""
        return f"{advice}{fits}, or {self.remedy}"


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


def check_workers(
    n_workers: int, descriptors_each: int, advice: str, memory: tuple[int, int] = (WORKER_BYTES, 0)
) -> None:
    """Refuse more worker processes than descriptors, processes or memory allow.

    More than twice the cores are worth a warning: they help only where environments wait for
    something other than a core. So is a processor on which nothing was tested.

    Args:
        n_workers: Processes to be started.
        descriptors_each: Descriptors that each of them costs this process.
        advice: Which arguments to change, for the message.
        memory: Least bytes of each of them, and of what they share.

    Raises:
        SpecError: Naming what is needed, the limit and the remedy.
    """
    refuse_too_many_workers(n_workers, descriptors_each, advice, memory)
    cores = n_cores()
    if n_workers > _MOST_PER_CORE * cores:
        _LOG.warning(
            "worker processes: %d, cores that this process may use: %d; unless environments "
            'mostly wait, fewer are faster (worker_count("auto") is %d)',
            *(n_workers, cores, worker_count("auto")),
        )
    _warn_of_processor(platform.machine())


@cache  # once per process
def _warn_of_processor(name: str) -> None:
    if name not in _TESTED_PROCESSORS:
        _LOG.warning(
            "rlpool was tested on x86-64, not on %s, which may show writes to shared memory in "
            "another order: compare results with those of n_workers=0",
            name,
        )


def refuse_too_many_workers(
    n_workers: int, descriptors_each: int, advice: str, memory: tuple[int, int]
) -> None:
    """What ``check_workers`` does, without the warning."""
    for quota in worker_quotas(n_workers, descriptors_each, memory):
        if n_workers > quota.room:
            raise SpecError(quota.complaint(n_workers), fix=quota.fix(advice))


def worker_quotas(
    n_workers: int, descriptors_each: int, memory: tuple[int, int], root: Path = ROOT
) -> list[Quota]:
    """What limits the number of workers.

    Args:
        n_workers: How many are wanted, for the remedies.
        descriptors_each: Descriptors that each of them costs this process.
        memory: As for ``check_workers``.
        root: Where ``/proc`` and ``/sys`` are.
    """
    quotas = []
    wanted = n_workers * memory[0] + memory[1]
    for limit in shared_memory_bounds(root):
        elsewhere = f"use a machine or container with {human(wanted)}"
        remedy = "free memory" if wanted <= limit.total else elsewhere
        quotas.append(Quota("memory", limit, *memory, remedy))
    needs = {
        "n": ("file descriptors", descriptors_each, _SPARE_DESCRIPTORS),
        "u": ("processes and threads", _WORKER_TASKS, _SPARE_TASKS),
    }
    for option, (noun, each, spare) in needs.items():
        if (bound := _bound(option, root)) is not None:
            wanted = bound.total - bound.free + n_workers * each + spare
            remedy = f"raise the limit before starting Python: ulimit -{option} {wanted}"
            quotas.append(Quota(noun, bound, each, spare, remedy))
    return quotas


def _bound(option: str, root: Path) -> Bound | None:
    """What an option of ``ulimit`` limits, ``None`` if it does not limit this process."""
    of_user = option == "u"
    limit = resource.getrlimit(resource.RLIMIT_NPROC if of_user else resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY or (of_user and os.getuid() == 0):
        return None
    name = "user may have (RLIMIT_NPROC)" if of_user else "process may open (RLIMIT_NOFILE)"
    used = n_tasks(root) if of_user else n_open_descriptors()
    return Bound(f"this {name}", limit, limit - used, str)


def n_open_descriptors() -> int:
    """Descriptors that this process has open."""
    return len(os.listdir("/dev/fd")) - 1  # one is the listing's own


def refuse_small_limit(max_rss_bytes: int | None, pids: Iterable[int | None]) -> None:
    """Refuse a memory limit that workers exceed before they have done anything.

    Args:
        max_rss_bytes: The limit, ``None`` for none.
        pids: The workers, which are ready.

    Raises:
        SpecError: Naming the limit and what they need.
    """
    if max_rss_bytes is None:
        return
    needed = max(map(resident_bytes, pids), default=0)
    if needed > max_rss_bytes:
        raise SpecError(
            f"max_rss_bytes is {human(max_rss_bytes)}, but a worker that has done "
            f"nothing yet has {human(needed)} of resident memory",
            fix="set max_rss_bytes well above that, which includes the modules it imported",
        )
