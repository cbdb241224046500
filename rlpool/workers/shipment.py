"""Bytes that travel to a process that starts, however many they are."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import DupFd
from typing import Any

from rlpool.memory.storage import Memory

_LARGE_BYTES = 2**14
"""What surely fits into the pipe through which a new process gets its arguments. With more,
starting the process would take until it has imported everything and reads on."""


class Shipment:
    """Bytes that arrive as ``bytes`` in every process that is started with this as an argument.

    Many are put into shared memory, once for all processes, which costs a descriptor until
    ``close``.

    Args:
        payload: The bytes.
    """

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._memory: Memory | None = None
        if len(payload) > _LARGE_BYTES:
            self._payload = b""
            self._memory = Memory.shared(len(payload), "rlpool-setup")
            self._memory.root()[:] = memoryview(payload)

    def __reduce__(self) -> tuple[Callable[..., bytes], tuple[Any, ...]]:
        if self._memory is None:
            return bytes, (self._payload,)
        return _received, (DupFd(self._memory.fd), self._memory.n_bytes)

    def close(self) -> None:
        """Give the memory up: no further process will be started with this."""
        if self._memory is not None:
            self._memory.close_fd()


def arrived(functions: Any) -> bytes:
    """What a shipment has become on its way.

    Raises:
        TypeError: If it has not travelled.
    """
    if not isinstance(functions, bytes):
        raise TypeError(f"{type(functions).__name__} has not travelled to another process")
    return functions


def _received(sent: Any, n_bytes: int) -> bytes:
    payload: bytes = Memory.attach(sent.detach(), n_bytes).root().tobytes()
    return payload
