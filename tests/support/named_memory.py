"""Files in ``/dev/shm``, which all programs of a machine share."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from support.staying import started

FOLDER = Path("/dev/shm")


def names() -> set[str]:
    """Return existing files, except those that another program has open.

    Other programs, such as Ray, may create files while tests run.
    """
    # Other programs create and delete semaphores of multiprocessing; rlpool does not.
    found = {name for name in os.listdir(FOLDER) if not name.startswith("sem.mp-")}
    if found:
        own = {os.getpid(), *(process.pid for process in started())}
        for process in Path("/proc").glob("[0-9]*"):
            if int(process.name) not in own:
                found -= _open_in(process)
    return {name for name in found if (FOLDER / name).exists()}  # others may be deleted meanwhile


def _open_in(process: Path) -> set[str]:
    """Return the files that a process has mapped or open."""
    text = ""
    with contextlib.suppress(OSError):  # it has ended, or belongs to another user
        text = (process / "maps").read_text()
        text += "".join(f"{os.readlink(fd)}\n" for fd in (process / "fd").iterdir())
    return set(re.findall(rf"{FOLDER}/(\S+)", text))
