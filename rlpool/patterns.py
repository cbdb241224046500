"""Small functions that examples and tests run in another process."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any


def write_to_piped_array(pipe: Connection[Any, Any]) -> None:
    """Receive an ``Array`` and write 42 into all its elements.

    Args:
        pipe: The end of a pipe whose other end sends one array, or any view of one.

    Example:
        >>> import multiprocessing
        >>> here, there = multiprocessing.Pipe()
        >>> process = multiprocessing.Process(target=write_to_piped_array, args=(there,))
    """
    array = pipe.recv()
    array[...] = 42
