"""The name of a process in ``ps`` and ``top``."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

from rlpool.machine.limits import stat_fields

_MAX_COMM_BYTES = 15
_ARG_START = 45  # in /proc/self/stat, counted from the field after the name


def set_title(title: str) -> None:
    """Rename this process, where that is possible.

    Args:
        title: ASCII. The kernel keeps 15 bytes as the short name: the end of the title stays whole,
            as it tells workers apart.
    """
    words = title.encode()
    head, _, tail = words.rpartition(b"-")
    short = head[: _MAX_COMM_BYTES - 1 - len(tail)] + b"-" + tail
    with suppress(OSError, ValueError, IndexError):  # not Linux, or not allowed
        Path("/proc/self/comm").write_bytes(short)
        start, end = map(int, stat_fields("self")[_ARG_START : _ARG_START + 2])
        if 0 < start < end:
            # The command line is read from this process's memory. It is shown up to its first zero
            # if its last byte is not zero.
            ctypes.memset(start, 0, end - start)
            ctypes.memmove(start, words, min(len(words), end - start - 2))
            ctypes.memset(end - 1, 1, 1)
