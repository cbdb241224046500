"""Files that appear whole or not at all, and places where there is something else."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlpool.errors import SpecError


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


def checked_target(argument: str, path: Any) -> Path:
    """The file that an argument names, which is to be written.

    Args:
        argument: Its name.
        path: Its value.

    Raises:
        SpecError: If no file can be written there.
    """
    try:
        target = file_at(path)
    except (TypeError, ValueError) as error:
        what = f"{argument}={path!r} cannot be written: {error}"
        raise SpecError(what, fix="choose another path") from None
    folder = target.parent
    if not folder.is_dir():
        what = f"{argument}={str(path)!r} is in a folder that does not exist: {str(folder)!r}"
        raise SpecError(what, fix=f"create it with os.makedirs({str(folder)!r}), or choose another")
    if not os.access(target if target.exists() else folder, os.W_OK):
        what = f"{argument}={str(path)!r} cannot be written: this process may not write there"
        raise SpecError(what, fix="choose another path")
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
