"""Descriptors that a worker gets when it starts."""

from __future__ import annotations

from multiprocessing.reduction import DupFd
from typing import Any


class Inherited:
    """A descriptor that a child gets when it starts: there, ``detach()`` gives its number.

    Args:
        fd: The descriptor.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_is, (DupFd(self._fd),)


def _as_is(value: Any) -> Any:
    return value
