"""rlpool's child processes of this process."""

from __future__ import annotations

import contextlib

import psutil

_STAY = ("multiprocessing.resource_tracker", "rlpool-template", "rlpool.workers.template")


def workers() -> list[psutil.Process]:
    """Return child processes, except the tracker and the template, which live until the end."""
    return [p for p in psutil.Process().children(recursive=True) if not _stays(p)]


def _stays(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(name in part for part in process.cmdline() for name in _STAY)
    return False
