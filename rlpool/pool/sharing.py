"""What a pool's writer and its readers in other processes agree on.

Readers look at what does not change meanwhile, as ``rlpool.memory.versions`` says.

Whenever the writer dies, ``oldest`` and ``next`` of each sub-pool enclose whole transitions: it
first gives up what it will write over, then writes, then says that it is there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from rlpool.errors import UsageError
from rlpool.memory.storage import Array, Memory
from rlpool.memory.versions import Version

_T = TypeVar("_T")


class Sync:
    """Numbers that the writer changes and readers look at.

    Args:
        memory: What ``Sync.make`` made.
        n_rings: Sub-pools.

    Attributes:
        memory: Where the numbers are.
        numbers: int64 ``[n_rings, 2]``: ``oldest`` and ``next`` of each sub-pool.
    """

    def __init__(self, memory: Memory, n_rings: int) -> None:
        self.memory = memory
        self._fd = None if memory.kind == "local" else memory.fd
        self._writer_pid = os.getpid()
        table: Array = memory.root().view(np.int64).reshape(n_rings + 1, 2)
        self.numbers = table[:-1]
        self._version = Version(table[-1].data, self._fd)

    @classmethod
    def make(cls, storage: str, n_rings: int) -> Sync:
        """Numbers for a new pool."""
        n_bytes = (n_rings + 1) * 2 * np.dtype(np.int64).itemsize
        local = storage == "local"
        return cls(Memory.local(n_bytes) if local else Memory.shared(n_bytes), n_rings)

    @property
    def is_writer(self) -> bool:
        """Whether this process may write: the one that made it, if others see the memory too."""
        return self._fd is None or os.getpid() == self._writer_pid

    def refuse_others(self) -> None:
        """Refuse to go on in a process that was forked from the writer's.

        Raises:
            UsageError: There.
        """
        if not self.is_writer:
            raise UsageError(
                "a pool is filled by the process that made it, and this is another one",
                fix="send trajectories to that process, or make a pool of your own here",
            )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Change rows and numbers within this.

        Raises:
            UsageError: In a process that was forked from the writer's.
        """
        self.refuse_others()
        with self._version.changing():
            yield

    def read(self, look: Callable[[], _T]) -> _T:
        """The result of looking at rows and numbers, none of which changed meanwhile.

        Args:
            look: Called once or more.
        """
        return self._version.read(look)
