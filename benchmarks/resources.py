"""Processes of rlpool that this process has."""

from __future__ import annotations

import contextlib

import psutil

_STAY = ("multiprocessing.resource_tracker", "rlpool-template", "rlpool.workers.template")


def workers() -> list[psutil.Process]:
    """Processes that this one has, but for the tracker and the template, which live as long."""
    return [p for p in psutil.Process().children(recursive=True) if not _stays(p)]


def _stays(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(name in part for part in process.cmdline() for name in _STAY)
    return False
