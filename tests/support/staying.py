"""Processes that live as long as the one that started them."""

from __future__ import annotations

import psutil

_NAMES = ("multiprocessing.resource_tracker", "rlpool-template", "rlpool.workers.template")


def stays(process: psutil.Process) -> bool:
    """Whether a child is the tracker of ``multiprocessing`` or the template of workers."""
    try:
        return any(name in part for part in process.cmdline() for name in _NAMES)
    except psutil.Error:
        return False
