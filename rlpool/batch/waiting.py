"""Waits for several batchers at once."""

from __future__ import annotations

import time
from collections.abc import Iterable
from multiprocessing import connection
from typing import Any, TypeVar

from rlpool.batch.batcher_base import BatcherBase
from rlpool.errors import SpecError, UsageError
from rlpool.machine.arguments import checked_wait

BatcherT = TypeVar("BatcherT", bound=BatcherBase)


def wait(batchers: Iterable[BatcherT], timeout: float | None = None) -> list[BatcherT]:
    """Wait until at least one of several batchers has a result.

    The process sleeps in one call of the operating system, for the workers of all of them, on
    this machine and others. A batcher with ``n_workers=0`` that has something pending is there at
    once, since it runs only in calls like ``get``.

    Args:
        batchers: Batchers of any class.
        timeout: Seconds to wait at most; ``None`` for no limit, 0 to look only.

    Returns:
        Those whose ``get`` would return a result, or raise an error, at once, in the order given;
        none after ``timeout``.

    Raises:
        SpecError: If something is no batcher, one stands alone, or ``timeout`` no number from 0 on.
        UsageError: If nothing is pending in any of them, or one is closed.

    Example:
        >>> with (
        ...     EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0) as one,
        ...     EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0) as other,
        ... ):
        ...     other.execute(2)
        ...     rlpool.wait([one, other], timeout=10) == [other]
        True
    """
    timeout = checked_wait(timeout)
    until_s = None if timeout is None else time.monotonic() + timeout
    try:
        batchers = list(batchers)
    except TypeError:
        what = f"{batchers!r:.60} is no list of batchers"
        raise SpecError(what, fix="pass a list: wait([batcher])") from None
    for batcher in batchers:
        instance: Any = batcher
        if not isinstance(instance, BatcherBase):
            raise SpecError(f"{instance!r:.60} is no batcher", fix="pass a list of batchers")
    while True:
        ready = [batcher for batcher in batchers if batcher.has_outcome()]
        waiting = [batcher for batcher in batchers if batcher.n_pending]
        if not ready and not waiting:
            raise UsageError("nothing is pending in any batcher", fix="call execute() before")
        left_s = None if until_s is None else until_s - time.monotonic()
        if ready or (left_s is not None and left_s <= 0.0):
            return ready
        patience = [batcher.patience_s for batcher in waiting]
        descriptors = [batcher.fileno() for batcher in waiting]
        connection.wait(descriptors, min(patience if left_s is None else [*patience, left_s]))
