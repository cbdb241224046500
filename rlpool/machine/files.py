"""Files that appear whole or not at all, and places where there is something else."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlpool.errors import SpecError


def checked_target(argument: str, path: Any) -> Path:
    """The file that an argument names, through links, which is to be written.

    Args:
        argument: Its name.
        path: Its value.

    Raises:
        SpecError: If no file can be written there, or there is something else: to open a pipe would
            wait for its other end, and a file in its place would be the end of it.
    """
    what = f"{argument}={path!r} cannot be written: "
    try:
        target = Path(os.path.realpath(path))
    except (TypeError, ValueError) as error:
        raise SpecError(f"{what}{error}", fix="pass a path") from None
    if target.exists() and not target.is_file():
        raise SpecError(f"{what}it is not a file", fix="choose another path")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        why = "there is no such folder, or this process may not write there"
        raise SpecError(f"{what}{why}", fix="choose another path")
    return target


@contextmanager
def replaced(target: Path) -> Iterator[Path]:
    """Where to write a file, which replaces that at ``target`` unless this raises.

    Args:
        target: What ``checked_target`` returned.
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
