"""The name of a process in ``ps`` and ``top``."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from pathlib import Path

_MAX_COMM_BYTES = 15
_ARG_START = 45  # of the fields behind the name in /proc/self/stat


def set_title(title: str) -> None:
    """Let this process be called something else, where that is possible.

    Args:
        title: ASCII. Of the short name, which the kernel cuts off, the last part is kept: it is
            what tells workers apart.
    """
    if not sys.platform.startswith("linux"):
        return
    words = title.encode()
    head, _, tail = words.rpartition(b"-")
    short = words
    if len(words) > _MAX_COMM_BYTES:
        short = head[: _MAX_COMM_BYTES - 1 - len(tail)] + b"-" + tail
    with suppress(OSError, ValueError, IndexError):  # nothing depends on it
        Path("/proc/self/comm").write_bytes(short)
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_START + 1])
        if 0 < start < end:
            # The command line lies in this process's own memory, from where the kernel shows it.
            # It shows the part before the first zero if the last byte is none.
            ctypes.memset(start, 0, end - start)
            ctypes.memmove(start, words, min(len(words), end - start - 2))
            ctypes.memset(end - 1, 1, 1)
