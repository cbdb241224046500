"""Files that appear whole or not at all, and places where there is something else."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def file_at(path: str | os.PathLike[str]) -> Path:
    """The file that a path leads to, through links. There need not be one yet.

    Args:
        path: The path.

    Raises:
        ValueError: If there is something else: to open a pipe would wait for its other end, and a
            file in its place, or in that of a device, would be the end of it.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise ValueError("it is not a file")
    return target


@contextmanager
def replaced(target: Path) -> Iterator[Path]:
    """Where to write a file, which replaces that at ``target`` unless this raises.

    Args:
        target: What ``file_at`` returned.
    """
    unfinished = target.with_name(f".{uuid.uuid4().hex}")
    try:
        yield unfinished
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, target)
    finally:
        with suppress(OSError):
            unfinished.unlink()
