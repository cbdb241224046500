"""``python -m rlpool doctor``: check this machine's limits for workers, one line per check.

It changes nothing and uses few resources: it starts the workers' template, if possible, and a
worker process that resets one environment.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import gymnasium
import numpy as np
import torch

from rlpool.data.dict_tensor import DictTensor
from rlpool.errors import RlpoolError, SpecError
from rlpool.machine.imports import refuse_during_import
from rlpool.machine.limits import WORKER_DESCRIPTORS, n_free_descriptors, worker_count
from rlpool.machine.platform import HAS_ORDERED_STORES, IS_LINUX, ROOT, memory_bounds, n_cores
from rlpool.manager.parallel_env import ParallelEnvManager
from rlpool.workers.process_start import why_spawned

OK, WARN, FAIL = "ok", "warn", "FAIL"

_N_NUMBERS = 1024
"""Size of an action and an observation, large enough for many cache lines."""

_TIMEOUT_S = 120.0
"""A worker without progress for this long counts as hung."""


class Check(NamedTuple):
    """The result of a check.

    Attributes:
        name: Name of the check.
        status: ``"ok"``, ``"warn"``, or ``"FAIL"`` if workers would fail or be refused.
        what: The finding.
        fix: What to do about it, ``""`` if nothing.
    """

    name: str
    status: str
    what: str
    fix: str = ""


def examine(n_workers: int, root: Path = ROOT) -> Iterator[Check]:
    """Check this machine's limits for a number of workers.

    Args:
        n_workers: Number of workers wanted.
        root: Directory of ``/proc`` and ``/sys``; tests use another one to simulate a machine.
    """
    refuse_during_import()
    python = f"Python {platform.python_version()} on {platform.platform()}"
    packages = [sys.modules["rlpool"], torch, np, gymnasium, cloudpickle]
    found = [f"{package.__name__} {package.__version__}" for package in packages]
    yield Check("versions", OK, ", ".join([python, *found]))

    message = f"{n_cores()} of {os.cpu_count() or 1} may be used, for {n_workers} workers"
    fix = "workers beyond the number of cores help only environments that wait"
    has_enough = n_workers <= n_cores()
    yield Check("cores", OK, message) if has_enough else Check("cores", WARN, message, fix)

    if not IS_LINUX:
        fix = "n_workers=0 gives the same bits in one process"
        yield Check("worker processes", WARN, "they need Linux", fix)
        return
    if not HAS_ORDERED_STORES:
        fix = "python -m rlpool doctor --hand-overs 60; please report its verdict"
        yield Check("processor", WARN, f"{platform.machine()} has not been tested yet", fix)
    if why := why_spawned():
        message = f"workers are spawned, not forked from a template: {why}"
        fix = "it only costs time and memory; docs/processes.md explains the template"
        yield Check("start method", WARN, message, fix)
    else:
        message = "workers are forked from a template, which was checked to be safe"
        yield Check("start method", OK, message)

    yield Check("memory", OK, str(min(memory_bounds(root), key=lambda bound: bound.free)))
    n_free = n_free_descriptors()
    room = n_free // WORKER_DESCRIPTORS
    message = f"{n_free} are free: room for {room} workers, {n_workers} wanted"
    fix = "use fewer workers, or raise the limit before starting Python: ulimit -n"
    enough = Check("file descriptors", OK, message)
    yield enough if n_workers <= room else Check("file descriptors", FAIL, message, fix)
    yield _tried("worker process", _start_worker)


def _tried(name: str, check: Callable[..., Check], *arguments: float) -> Check:
    """Return the result of a check that starts workers; it fails if it raises."""
    try:
        return check(*arguments)
    except (RlpoolError, OSError, RuntimeError) as error:
        message, _, fix = str(error).partition("\n  fix: ")
        return Check(name, FAIL, message or type(error).__name__, fix.strip())


def _start_worker() -> Check:
    """Start a worker process, which shares memory, and measure the time."""
    start_s, env_fns = time.monotonic(), [partial(gymnasium.make, "CartPole-v1")]
    with ParallelEnvManager(env_fns, timeout=_TIMEOUT_S) as env:
        env.reset()
    message = f"started, reset an environment and ended after {time.monotonic() - start_s:.1f} s"
    return Check("worker process", OK, message)


class _EchoEnv(gymnasium.Env[Any, Any]):
    """Returns the last action, with its minimum as reward, so that partly stale data shows."""

    observation_space = action_space = gymnasium.spaces.Box(0.0, np.inf, (_N_NUMBERS,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        return np.zeros(_N_NUMBERS, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Any]:
        return action, float(action.min()), False, False, {}


def hand_overs(seconds: float) -> Check:
    """Pass actions and observations between processes, and count wrong ones.

    Args:
        seconds: Duration.
    """
    n_steps = n_wrong = 0
    with ParallelEnvManager([_EchoEnv] * 4, envs_per_worker=2, timeout=_TIMEOUT_S) as env:
        env.reset()
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            n_steps += 1
            action = torch.full((4, _N_NUMBERS), float(n_steps))
            (after, _), _ = env.step(DictTensor({"action": action}))
            n_wrong += int((after["frame"] != n_steps).any() or (after["reward"] != n_steps).any())
    message = f"{n_wrong} of {n_steps} steps of 4 environments in 2 workers on {platform.machine()}"
    message += " returned an action other than the last one"
    return Check("hand-overs", FAIL if n_wrong else OK, message, "report it" if n_wrong else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m rlpool doctor``; returns the exit code, 1 if a check failed.

    Args:
        arguments: Arguments after ``doctor``, by default those of this process.
    """
    text = "print this machine's limits for workers, and which of them would be hit"
    parser = argparse.ArgumentParser(prog="python -m rlpool doctor", description=text)
    default, help_text = worker_count("auto"), "worker processes (default: all cores but two)"
    parser.add_argument("--n-workers", type=int, default=default, metavar="N", help=help_text)
    help_text = "instead, step environments in workers for this long and count wrong values"
    parser.add_argument("--hand-overs", type=float, metavar="SECONDS", help=help_text)
    options = parser.parse_args(arguments)
    try:
        n_workers, seconds = worker_count(options.n_workers), options.hand_overs
        checks = [_tried("hand-overs", hand_overs, seconds)] if seconds else [*examine(n_workers)]
    except SpecError as error:
        parser.exit(2, f"python -m rlpool doctor: {error.what}\n")
    width = max(len(check.name) for check in checks)
    for check in checks:
        sys.stdout.write(f"{check.status:<4}  {check.name:<{width}}  {check.what}\n")
        if check.fix:
            sys.stdout.write(f"{'':<{width + 8}}fix: {check.fix}\n")
    return 1 if any(check.status == FAIL for check in checks) else 0
