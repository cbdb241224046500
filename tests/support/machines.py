"""Fake machines: the files in which a kernel publishes its limits, in a directory."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest


def machine(root: Path, files: dict[str, str]) -> Path:
    """A machine with these files."""
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


def limit_to(monkeypatch: pytest.MonkeyPatch, **limit: int) -> None:
    """Give this process these limits and no others."""
    numbers = {getattr(resource, name): value for name, value in limit.items()}
    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda n: (numbers.get(n, unlimited),) * 2)


def container(root: Path, group: str, files: dict[str, str]) -> Path:
    """A machine with these files in its control groups, and a process in one of them."""
    groups = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    return machine(root, {"proc/self/cgroup": f"1:name=systemd:/\n0::{group}", **groups})
