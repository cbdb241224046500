"""How many worker processes this machine allows."""

from __future__ import annotations

import operator
import os
import resource
from typing import Any

from rlpool.errors import SpecError, compose
from rlpool.limits import free_bytes, human

WORKER_BYTES = 100 * 2**20
"""Private memory of a worker that has imported torch and holds nothing else, at the least."""

_SPARE_DESCRIPTORS = 16
"""What starting a process needs for a moment, and what the caller may open besides."""


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
    except TypeError:
        number = 0
    if number < 1 or isinstance(num_workers, bool):
        raise SpecError(f"num_workers should be 'auto' or an int from 1, got {num_workers!r}")
    return number


def n_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_workers(n_workers: int, descriptors_each: int, advice: str) -> None:
    """Refuse more worker processes than descriptors or memory allow.

    Args:
        n_workers: Processes to be started.
        descriptors_each: Descriptors that one of them costs this process.
        advice: Which arguments to change, for the message.

    Raises:
        SpecError: Naming what is wanted, the limit and the remedy.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_open = _n_open_descriptors()
    wanted = n_workers * descriptors_each + _SPARE_DESCRIPTORS
    if limit != resource.RLIM_INFINITY and wanted > limit - n_open:
        raise SpecError(
            compose(
                f"{n_workers} workers need {wanted} file descriptors, but of the {limit} that "
                f"this process may open {n_open} are in use",
                fix=f"{advice}, or {_how_to_raise(wanted + n_open, most)}",
            )
        )
    n_bytes = n_workers * WORKER_BYTES
    if n_bytes > free_bytes():
        raise SpecError(
            compose(
                f"{n_workers} workers need at least {human(n_bytes)} of memory, "
                f"but {human(free_bytes())} are free",
                fix=f"{advice}, or free memory",
            )
        )


def _n_open_descriptors() -> int:
    for directory in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(directory)) - 1  # one is the listing's own
        except OSError:
            continue
    return 64


def _how_to_raise(n_descriptors: int, most: Any) -> str:
    """How to get a limit of so many: the next power of two, if that is allowed."""
    if 0 <= most < n_descriptors:
        return f"let the administrator raise the hard limit, which is {most}"
    power = 1 << (n_descriptors - 1).bit_length()
    return (
        "raise the limit before starting Python: "
        f"ulimit -n {n_descriptors if 0 <= most < power else power}"
    )
