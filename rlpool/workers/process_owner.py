"""Base class of batchers, pools and managers as owners of worker processes."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import NoReturn, TypeVar

from rlpool.errors import UsageError

_Self = TypeVar("_Self", bound="ProcessOwner")


class ProcessOwner(ABC):
    """Ends its processes when it is closed or dropped, or at the end of a ``with`` statement.

    It cannot be copied or pickled, since there would be two owners.
    """

    @abstractmethod
    def close(self) -> None:
        """End the processes within a few seconds. Can be repeated."""

    @abstractmethod
    def _has_processes(self) -> bool:
        """Whether there may be processes to end, even if the constructor failed half-way."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._has_processes():
            self.close()

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            f"a {type(self).__name__} owns processes and cannot be copied or pickled",
            fix="make another one with the same arguments",
        )


def refuse_forked_copy(owner_pid: int) -> None:
    """Refuse to use workers in a process that was forked from their owner.

    Args:
        owner_pid: The process that started the workers.

    Raises:
        UsageError: If it is a different process.
    """
    if os.getpid() != owner_pid:
        raise UsageError(
            f"this process ({os.getpid()}) was forked from process {owner_pid}, which owns the "
            "workers",
            fix="use the object in the process that made it, and make another one here",
        )
