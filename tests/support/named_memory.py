"""Files in ``/dev/shm``, which all programs of a machine share."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from support.staying import started

FOLDER = Path("/dev/shm")


def names() -> set[str]:
    """Files that are there, but for those that another program has open, whose they are.

    A machine may do something else while tests run: Ray and others put files there.
    """
    # Semaphores of multiprocessing come and go with other programs; rlpool makes none.
    found = {name for name in os.listdir(FOLDER) if not name.startswith("sem.mp-")}
    if found:
        own = {os.getpid(), *(process.pid for process in started())}
        for process in Path("/proc").glob("[0-9]*"):
            if int(process.name) not in own:
                found -= _open_in(process)
    return {name for name in found if (FOLDER / name).exists()}  # others delete theirs meanwhile


def _open_in(process: Path) -> set[str]:
    """What a process has mapped or open there."""
    text = ""
    with contextlib.suppress(OSError):  # it has ended, or is somebody else's
        text = (process / "maps").read_text()
        text += "".join(f"{os.readlink(fd)}\n" for fd in (process / "fd").iterdir())
    return set(re.findall(rf"{FOLDER}/(\S+)", text))
