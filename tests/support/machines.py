"""Fake machines: the files in which a kernel publishes its limits, and full disks."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest


def machine(root: Path, files: dict[str, str]) -> Path:
    """Return a machine with these files."""
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


def limit_descriptors(monkeypatch: pytest.MonkeyPatch, most: int = 2**20) -> None:
    """Limit the number of descriptors of this process."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (most, most))


def limit_disk(monkeypatch: pytest.MonkeyPatch, is_full: Callable[[int, int], bool]) -> None:
    """Refuse disk space if a function of the first byte and the number of bytes says so."""
    reserve = os.posix_fallocate

    def give(fd: int, start: int, n_bytes: int) -> None:
        if is_full(start, n_bytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(fd, start, n_bytes)

    monkeypatch.setattr(os, "posix_fallocate", give)


def container(root: Path, group: str, files: dict[str, str]) -> Path:
    """Return a machine with these files in its control groups, and a process in one of them."""
    groups = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    return machine(root, {"proc/self/cgroup": f"1:name=systemd:/\n0::{group}", **groups})
