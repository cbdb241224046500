"""A simulated processor that reorders stores, in this process and workers that preload this."""

from __future__ import annotations

import fcntl
from typing import Any

from rlpool.batch import plans
from rlpool.data import allocation
from rlpool.manager import channel
from rlpool.testing import CountingEnv
from rlpool.workers import wake

for module in (allocation, channel, plans, wake):
    module.HAS_ORDERED_STORES = False

locks: list[int] = []
"""What this process did with locks, one entry each."""

_lockf = fcntl.lockf


def _noted(fd: int, operation: int) -> None:
    locks.append(operation)
    _lockf(fd, operation)


fcntl.lockf = _noted


class LockingEnv(CountingEnv):
    """Environment that reports how often its process has locked or unlocked a file."""

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, *rest, _ = super().step(action)
        return observation, *rest, {"locks": len(locks)}
