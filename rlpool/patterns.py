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
        >>> from rlpool.patterns import write_to_piped_array
        >>> here, there = multiprocessing.Pipe()
        >>> array = Array((3,), "int64", storage="shared")
        >>> here.send(array)
        >>> write_to_piped_array(there)  # or multiprocessing.Process(target=..., args=(there,))
        >>> array
        Array([42,42,42], storage=shared, dtype=int64, padding=0)
    """
    array = pipe.recv()
    array[...] = 42
