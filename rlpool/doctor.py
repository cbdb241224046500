"""What this machine offers to workers, and which of its limits would be hit.

``python -m rlpool doctor`` prints one line per check. It changes nothing and uses little: it starts
the template of workers, if possible, and a worker process that resets one environment.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import cloudpickle
import gymnasium
import numpy as np
import torch

from rlpool.errors import RlpoolError, SpecError
from rlpool.machine.arguments import whole_number
from rlpool.machine.imports import refuse_during_import
from rlpool.machine.limits import (
    FILE_SIZE_REMEDY,
    ROOT,
    address_space_bounds,
    file_size_limit,
    human,
    n_cores,
    size_warning,
)
from rlpool.machine.worker_limits import (
    WORKER_BYTES,
    WORKER_DESCRIPTORS,
    worker_count,
    worker_quotas,
)
from rlpool.manager.parallel_env import ParallelEnvManager
from rlpool.workers.process_start import memory_of, why_spawned
from rlpool.workers.template_handle import why_impossible

OK, WARN, FAIL = "ok", "warn", "FAIL"

_STEP_BYTES = 24
"""What a step takes beside its observation: reward, action, last action and flags."""

_TIMEOUT_S = 120.0
"""A worker without progress for this long counts as hanging."""


@dataclass(frozen=True)
class Check:
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


def examine(
    workers: int | None = None,
    slots: int = 128,
    timesteps: int = 128,
    observation_bytes: int = 1024,
    *,
    start_worker: bool = True,
    root: Path = ROOT,
) -> list[Check]:
    """Check what this machine offers.

    Args:
        workers: Worker processes to check for, by default ``worker_count("auto")``.
        slots: Slots of the batcher's blocks.
        timesteps: Steps per slot.
        observation_bytes: Bytes of an observation, such as ``84 * 84 * 4``.
        start_worker: Whether to start processes, the template of workers and a worker, which takes
            seconds. Otherwise the start method is derived from the platform alone.
        root: Where ``/proc`` and ``/sys`` are; another directory stands for another machine.

    Returns:
        One ``Check`` per subject, in the order in which to read them.

    Raises:
        SpecError: For numbers below 1.
    """
    refuse_during_import()
    workers = worker_count("auto") if workers is None else workers
    numbers = {"workers": workers, "slots": slots, "timesteps": timesteps}
    for name, number in {**numbers, "observation_bytes": observation_bytes}.items():
        whole_number(name, number, 1, fix=f"pass a number from 1 on as {name}, or leave it out")
    start_method = _start_method(start_worker)
    checks = [
        _versions(),
        _cores(workers),
        start_method,
        *_quotas(workers, "spawn" if start_method.status == WARN else "auto", root),
        *_address_space(root),
        *_file_size(slots * timesteps * (observation_bytes + _STEP_BYTES)),
        _block(slots, timesteps, observation_bytes, root),
    ]
    return [*checks, _worker()] if start_worker else checks


def has_problems(checks: Sequence[Check]) -> bool:
    """Whether any check failed."""
    return any(check.status == FAIL for check in checks)


def main(arguments: Sequence[str] | None = None, *, root: Path = ROOT) -> int:
    """Run ``python -m rlpool``; returns the exit code.

    Args:
        arguments: What follows ``python -m rlpool``, by default that of this process.
        root: As for ``examine``.
    """
    parser = argparse.ArgumentParser(prog="python -m rlpool")
    text = "print what this machine offers and which of its limits would be hit"
    version = f"rlpool {sys.modules['rlpool'].__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="command")
    doctor = commands.add_parser("doctor", help=text, description=f"{text} (exit code 1)")
    commands.add_parser("demo", help="learn CartPole in ten seconds, with a curve")
    commands.add_parser("top", help="show what the workers of a running program do, by its pid")
    commands.add_parser("evaluate", help="evaluate an agent, show figures, write a record")
    commands.add_parser("compare", help="compare two records, episode by episode of one seed")
    commands.add_parser("verify", help="run some episodes of a record again")
    add_number = partial(doctor.add_argument, type=int, metavar="N")
    add_number(
        "--n-workers",
        "--workers",
        dest="workers",
        help="worker processes (default: all cores but two)",
    )
    add_number("--slots", default=128, help="n_slots of a batcher (default: 128)")
    add_number("--timesteps", default=128, help="n_timesteps of a batcher (default: 128)")
    add_number("--observation-bytes", default=1024, help="of one observation (default: 1024)")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    options = vars(parser.parse_args(arguments))
    as_json = options.pop("json")
    try:
        checks = examine(**options, root=root)
    except SpecError as error:
        parser.exit(2, f"python -m rlpool doctor: {error.what}; {error.fix}\n")
    if as_json:
        report = {"ok": not has_problems(checks), "checks": [asdict(check) for check in checks]}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        sys.stdout.write(_as_text(checks))
    return 1 if has_problems(checks) else 0


def _as_text(checks: Sequence[Check]) -> str:
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<4}  {check.name:<{width}}  {check.what}")
        if check.fix:
            lines.append(f"{'':<{width + 8}}fix: {check.fix}")
    n_failed, n_warned = (sum(c.status == status for c in checks) for status in (FAIL, WARN))
    return "\n".join([*lines, f"problems: {n_failed}, warnings: {n_warned}\n"])


# The checks ----------------------------------------------------------------------------------


def _versions() -> Check:
    packages = [sys.modules["rlpool"], torch, np, gymnasium, cloudpickle]
    found = [f"{package.__name__} {package.__version__}" for package in packages]
    python = f"Python {platform.python_version()} on {platform.platform()}"
    return Check("versions", OK, ", ".join([python, *found]))


def _cores(workers: int) -> Check:
    usable = n_cores()
    what = f"{usable} of {os.cpu_count() or 1} may be used"
    if workers <= usable:
        return Check("cores", OK, what)
    fix = "workers beyond the number of cores help only environments that wait"
    return Check("cores", WARN, f"{what}, for {workers} workers", fix)


def _start_method(may_start: bool) -> Check:
    """How workers are started, and why; without starting the template, what is possible."""
    why = why_spawned() if may_start else why_impossible()
    if why:
        what = f"workers are spawned, not forked from a template: {why}"
        fix = "it only costs time and memory; docs/start_methods.md says what a template needs"
        return Check("start method", WARN, what, fix)
    proof = ", which has proved that this is safe"
    if not may_start:
        proof = " if that, once started, proves that it is safe"
    return Check("start method", OK, f"workers are forked from a template{proof}")


def _quotas(workers: int, start_method: str, root: Path) -> Iterator[Check]:
    """How many workers fit, by each of the limits."""
    quotas = worker_quotas(workers, WORKER_DESCRIPTORS, memory_of(start_method), root)
    for quota in quotas:
        if quota.room < workers:
            yield Check(quota.noun, FAIL, quota.complaint(workers), quota.fix("use fewer workers"))
        else:
            yield Check(quota.noun, OK, f"{quota.bound}: room for {quota.room} workers")
    for noun in ("file descriptors", "processes and threads"):
        if all(quota.noun != noun for quota in quotas):
            yield Check(noun, OK, "no limit")
    room = min(quota.room for quota in quotas)
    what = f"{room} fit, {workers} wanted"
    yield Check("workers", OK if room >= workers else FAIL, what)


def _address_space(root: Path) -> Iterator[Check]:
    for bound in address_space_bounds(root):
        status = FAIL if bound.free < WORKER_BYTES else WARN
        fix = "raise it before starting Python: ulimit -v unlimited"
        yield Check("address space", status, str(bound), fix)


def _file_size(block_bytes: int) -> Iterator[Check]:
    limit = file_size_limit()
    if limit is not None:
        what = f"shared memory may have {human(limit)} (RLIMIT_FSIZE)"
        yield Check("file size", FAIL if limit < block_bytes else WARN, what, FILE_SIZE_REMEDY)


def _block(slots: int, timesteps: int, observation_bytes: int, root: Path) -> Check:
    """Whether a block of slots fits."""
    steps = slots * timesteps
    sizes = {"observation": steps * observation_bytes, "other keys": steps * _STEP_BYTES}
    block = f"{slots} slots of {timesteps} steps with observations of {human(observation_bytes)}"
    try:
        fix = "lower n_slots or n_timesteps, or use smaller observations"
        warning = size_warning(sizes, lambda _: fix, block, root)
    except SpecError as error:
        return Check("slots", FAIL, *_parts(error))
    if warning is not None:
        return Check("slots", WARN, *warning)
    return Check("slots", OK, f"{human(sum(sizes.values()))} for {block}")


def _worker() -> Check:
    """Whether a worker process starts and shares its memory, and how long that takes."""
    try:
        took_s = _seconds_of_a_worker()
    except (RlpoolError, OSError, RuntimeError) as error:
        return Check("worker process", FAIL, *_parts(error))
    what = f"started, reset an environment and answered after {took_s:.1f} s"
    return Check("worker process", OK, what)


def _seconds_of_a_worker() -> float:
    """Start a worker, let it reset an environment, and return the seconds until it has."""
    start_s = time.monotonic()
    env_fns = [partial(gymnasium.make, "CartPole-v1")]
    with ParallelEnvManager(env_fns, timeout=_TIMEOUT_S) as env:
        env.reset()
        return time.monotonic() - start_s


def _parts(error: Exception) -> tuple[str, str]:
    """What an error says, and its fix."""
    if isinstance(error, RlpoolError):
        return error.what.splitlines()[0], error.fix
    return (str(error) or type(error).__name__).splitlines()[0], ""
