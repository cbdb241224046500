"""``python -m rlpool doctor``: what this machine offers to workers, one line per check.

It changes nothing and uses little: it starts the template of workers, if possible, and a worker
process that resets one environment.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import cloudpickle
import gymnasium
import numpy as np
import torch

from rlpool.errors import RlpoolError, SpecError
from rlpool.machine.imports import refuse_during_import
from rlpool.machine.limits import (
    ROOT,
    WORKER_DESCRIPTORS,
    memory_bounds,
    n_cores,
    n_free_descriptors,
    worker_count,
)
from rlpool.manager.parallel_env import ParallelEnvManager
from rlpool.workers.process_start import why_spawned

OK, WARN, FAIL = "ok", "warn", "FAIL"

_TIMEOUT_S = 120.0
"""A worker without progress for this long counts as hanging."""


class Check(NamedTuple):
    """What was checked, and what was found.

    Attributes:
        name: What was checked.
        status: ``"ok"``, ``"warn"``, or ``"FAIL"`` if workers would fail or be refused.
        what: What was found.
        fix: What to do about it, ``""`` if nothing.
    """

    name: str
    status: str
    what: str
    fix: str = ""


def examine(n_workers: int, root: Path = ROOT) -> Iterator[Check]:
    """Check what this machine offers to so many workers.

    Args:
        n_workers: How many are wanted.
        root: Where ``/proc`` and ``/sys`` are; another directory stands for another machine.
    """
    refuse_during_import()
    python = f"Python {platform.python_version()} on {platform.platform()}"
    packages = [sys.modules["rlpool"], torch, np, gymnasium, cloudpickle]
    found = [f"{package.__name__} {package.__version__}" for package in packages]
    yield Check("versions", OK, ", ".join([python, *found]))

    what = f"{n_cores()} of {os.cpu_count() or 1} may be used, for {n_workers} workers"
    fix = "workers beyond the number of cores help only environments that wait"
    has_enough = n_workers <= n_cores()
    yield Check("cores", OK, what) if has_enough else Check("cores", WARN, what, fix)

    if why := why_spawned():
        what = f"workers are spawned, not forked from a template: {why}"
        fix = "it only costs time and memory; docs/start_methods.md says what a template needs"
        yield Check("start method", WARN, what, fix)
    else:
        what = "workers are forked from a template, which has proved that this is safe"
        yield Check("start method", OK, what)

    yield Check("memory", OK, str(min(memory_bounds(root), key=lambda bound: bound.free)))
    n_free = n_free_descriptors()
    room = n_free // WORKER_DESCRIPTORS
    what = f"{n_free} are free: room for {room} workers, {n_workers} wanted"
    fix = "use fewer workers, or raise the limit before starting Python: ulimit -n"
    enough = Check("file descriptors", OK, what)
    yield enough if n_workers <= room else Check("file descriptors", FAIL, what, fix)
    yield _worker()


def _worker() -> Check:
    """Whether a worker process starts and shares its memory, and how long that takes."""
    start_s, env_fns = time.monotonic(), [partial(gymnasium.make, "CartPole-v1")]
    try:
        with ParallelEnvManager(env_fns, timeout=_TIMEOUT_S) as env:
            env.reset()
    except (RlpoolError, OSError, RuntimeError) as error:
        what, _, fix = str(error).partition("\n  fix: ")
        return Check("worker process", FAIL, what or type(error).__name__, fix.strip())
    what = f"started, reset an environment and ended after {time.monotonic() - start_s:.1f} s"
    return Check("worker process", OK, what)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m rlpool doctor``; returns the exit code, 1 if a check failed.

    Args:
        arguments: What follows ``doctor``, by default that of this process.
    """
    text = "print what this machine offers to workers, and which limit would be hit"
    parser = argparse.ArgumentParser(prog="python -m rlpool doctor", description=text)
    help_text = "worker processes (default: all cores but two)"
    parser.add_argument("--n-workers", type=int, default="auto", metavar="N", help=help_text)
    options = parser.parse_args(arguments)
    try:
        checks = [*examine(worker_count(options.n_workers))]
    except SpecError as error:
        parser.exit(2, f"python -m rlpool doctor: {error.what}\n")
    width = max(len(check.name) for check in checks)
    for check in checks:
        sys.stdout.write(f"{check.status:<4}  {check.name:<{width}}  {check.what}\n")
        if check.fix:
            sys.stdout.write(f"{'':<{width + 8}}fix: {check.fix}\n")
    return 1 if any(check.status == FAIL for check in checks) else 0
