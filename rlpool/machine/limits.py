"""Checks of memory, cores and descriptors: errors and warnings before they run out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from rlpool.errors import SpecError
from rlpool.machine.arguments import whole_number
from rlpool.machine.platform import (
    human,
    max_descriptors,
    memory_bounds,
    n_cores,
    n_open_descriptors,
)

_LOG = logging.getLogger("rlpool")

_ONCE = {"once": ""}
"""For warnings that a program needs only once, since the machine is the same for all batchers."""

_LARGEST_KEYS = 8
"""A message names the largest keys; an observation may have hundreds."""

_MOST_PER_CORE = 2
"""More workers per core than this are worth a warning: one steps while another one waits."""

WORKER_DESCRIPTORS = 3
"""A worker's pipe, and two with which multiprocessing detects its end and ours."""

_SPARE_DESCRIPTORS = 32
"""For starting a process and sending memory, and for files that the caller opens."""

Advice = Callable[[int], str]
"""Returns the arguments to lower so that a number of bytes is enough."""


def check_size(bytes_of_key: Mapping[str, int], advice: Advice, name: str = "the slots") -> None:
    """Refuse memory that can never be allocated; warn if it is not free now.

    Args:
        bytes_of_key: Bytes per key.
        advice: Returns the arguments to lower, for the message.
        name: Contents of the memory, for the message.

    Raises:
        SpecError: If it exceeds the memory of the machine or the container; names bytes per
            key, total, and free.
    """
    total, bounds = sum(bytes_of_key.values()), memory_bounds()
    least, smallest = min(bounds, key=lambda b: b.free), min(bounds, key=lambda b: b.total)
    takes = f"{human(total)} ({_by_key(bytes_of_key)})"
    if total > smallest.total:
        raise SpecError(f"{name} would need {takes}, but only {smallest}", fix=advice(least.free))
    if total > least.free:
        text = "%s may take up to %s, but only %s: %s if memory runs out"
        _LOG.warning(text, name, takes, least, advice(least.free), extra=_ONCE)


def _by_key(bytes_of_key: Mapping[str, int]) -> str:
    """Format bytes per key, the largest first."""
    ordered = sorted(bytes_of_key.items(), key=lambda item: -item[1])
    parts = [f"{key} {human(n_bytes)}" for key, n_bytes in ordered[:_LARGEST_KEYS]]
    return ", ".join(parts + ["..."] * (len(ordered) > _LARGEST_KEYS))


# Workers ------------------------------------------------------------------------------------------


def worker_count(n_workers: int | str) -> int:
    """Turn ``n_workers`` into a number of worker processes.

    Args:
        n_workers: A number from 1, or ``"auto"`` for the cores that this process may use minus
            two, one of them for the policy; at least 1.

    Raises:
        SpecError: For any other value.

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

    Warns about more workers than twice the cores: they help only if environments wait for
    something other than a core.

    Args:
        n_workers: Processes to be started.
        descriptors_each: Descriptors that each of them costs this process.
        advice: Arguments to change, for the message.

    Raises:
        SpecError: Names needed and free descriptors, and a fix.
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
    """Return the number of descriptors that this process may still open for workers."""
    return max(0, max_descriptors() - n_open_descriptors() - _SPARE_DESCRIPTORS)
