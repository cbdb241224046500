"""What this machine offers to workers, and which of its limits would bite.

``python -m rlpool doctor`` prints one line per check. Nothing is changed, and little is used: the
template is started, if there can be one, and a worker process, which runs an episode and ends.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import numpy as np

from rlpool.envs.vec_env import FLAGS
from rlpool.errors import RlpoolError, SpecError
from rlpool.machine.cgroups import ROOT
from rlpool.machine.limits import human, own_bounds
from rlpool.machine.worker_limits import (
    WORKER_BYTES,
    WORKER_DESCRIPTORS,
    Quota,
    how_to_raise,
    n_cores,
    worker_count,
    worker_quotas,
)
from rlpool.memory.storage import Memory
from rlpool.slots.blocks import Layout, StepSpecs
from rlpool.slots.preflight import block_warning
from rlpool.specs import TensorSpec
from rlpool.worker_trial import seconds_of_an_episode
from rlpool.workers.launch import refuse_during_import
from rlpool.workers.warm_start import memory_of, why_impossible, why_spawned

OK, WARN, FAIL = "ok", "warn", "FAIL"

_PROGRAM_DESCRIPTORS = 64
"""What a training program opens besides: libraries, log files, data loaders."""

_SLOW_START_S = 20.0
"""A worker that takes longer probably reads torch from a slow disk."""


@dataclass(frozen=True)
class Check:
    """What was looked at, and what was found.

    Attributes:
        name: What was looked at.
        status: ``"ok"``, ``"warn"``, or ``"FAIL"`` if work would fail or be refused.
        what: What was found.
        fix: What to do about it, ``""`` where nothing is to be done.
    """

    name: str
    status: str
    what: str
    fix: str = ""


@dataclass(frozen=True)
class Plan:
    """What the machine is to be fit for.

    Attributes:
        workers: Worker processes.
        slots: Slots of a block.
        timesteps: Steps of a slot.
        observation_bytes: Bytes of one observation.
    """

    workers: int
    slots: int
    timesteps: int
    observation_bytes: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecError(f"{name} should be an int of at least 1, got {value!r}")


def examine(
    workers: int | None = None,
    slots: int = 128,
    timesteps: int = 128,
    observation_bytes: int = 1024,
    *,
    start_worker: bool = True,
    root: Path = ROOT,
) -> list[Check]:
    """Look at what this machine offers.

    Args:
        workers: Worker processes that it is to be fit for, by default what
            ``worker_count("auto")`` says.
        slots: Slots of the batcher's blocks.
        timesteps: Steps per slot.
        observation_bytes: Bytes of an observation, such as ``84 * 84 * 4``.
        start_worker: Whether to start processes, the template of workers and a worker, which takes
            seconds. Otherwise only what the platform allows is known of the start method.
        root: Where ``/proc`` and ``/sys`` lie; another directory stands for another machine.

    Returns:
        One ``Check`` per thing that was looked at, in the order in which to read them.

    Raises:
        SpecError: For numbers below 1.
    """
    refuse_during_import()
    plan = Plan(
        worker_count("auto") if workers is None else workers, slots, timesteps, observation_bytes
    )
    start_method = _start_method(start_worker)
    checks = [
        Check("versions", OK, _versions()),
        _platform(),
        _cores(plan),
        start_method,
        *_quotas(plan, start_method, root),
        *_own_memory(root),
        _block(plan, root),
        _shared_memory(),
        _dev_shm(),
    ]
    if start_worker:
        checks.append(_worker())
    return checks


def would_bite(checks: Sequence[Check]) -> bool:
    """Whether any check failed."""
    return any(check.status == FAIL for check in checks)


def main(arguments: Sequence[str] | None = None, *, root: Path = ROOT) -> int:
    """Run ``python -m rlpool``; returns the exit code.

    Args:
        arguments: What follows ``python -m rlpool``, by default those of this process.
        root: As for ``examine``.
    """
    options = _parser().parse_args(arguments)
    checks = examine(
        options.workers, options.slots, options.timesteps, options.observation_bytes, root=root
    )
    bites = would_bite(checks)
    if options.json:
        report = {"ok": not bites, "checks": [asdict(check) for check in checks]}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        sys.stdout.write(_as_text(checks))
    return 1 if bites else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rlpool")
    commands = parser.add_subparsers(required=True, metavar="command")
    doctor = commands.add_parser(
        "doctor",
        help="print what this machine offers and which limits would bite",
        description="Print what this machine offers and which limits would bite. "
        "Exit code 1 if one would.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    numbers: dict[str, tuple[int | None, str]] = {
        "workers": (None, "worker processes to be fit for; None: all cores but two"),
        "slots": (128, "n_slots of a batcher"),
        "timesteps": (128, "n_timesteps of a batcher"),
        "observation-bytes": (1024, "bytes of one observation"),
    }
    for name, (default, text) in numbers.items():
        doctor.add_argument(f"--{name}", type=_count, default=default, metavar="N", help=text)
    doctor.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def _as_text(checks: Sequence[Check]) -> str:
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<4}  {check.name:<{width}}  {check.what}")
        if check.fix:
            lines.append(f"{'':<{width + 8}}fix: {check.fix}")
    n_failed = sum(check.status == FAIL for check in checks)
    n_warned = sum(check.status == WARN for check in checks)
    found = [f"{n_failed} would bite"] if n_failed else ["nothing would bite"]
    found += [f"{n_warned} to know about"] if n_warned else []
    return "\n".join([*lines, ", ".join(found)]) + "\n"


# What there is --------------------------------------------------------------------------------


def _versions() -> str:
    names = ("torch", "numpy", "gymnasium", "cloudpickle")
    # Of the package that runs, which need not be the one that is installed.
    found = [f"Python {platform.python_version()}", f"rlpool {sys.modules['rlpool'].__version__}"]
    for name in names:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} (not installed)")
    return ", ".join(found)


def _platform() -> Check:
    what = platform.platform()
    if platform.system() == "Linux":
        return Check("platform", OK, what)
    return Check("platform", WARN, what, "rlpool is tested on Linux only")


def _cores(plan: Plan) -> Check:
    usable, there = n_cores(), os.cpu_count() or 1
    what = f"{usable} of {there} may be used"
    if plan.workers > usable:
        fix = "workers beyond the number of cores help only environments that wait"
        return Check("cores", WARN, f"{what}, for {plan.workers} workers", fix)
    return Check("cores", OK, what)


def _start_method(may_start: bool) -> Check:
    """How workers are started, and why; without a template's start only what could be."""
    name, why = "start method", why_spawned() if may_start else why_impossible()
    if why:
        fix = (
            "nothing is lost but time and memory; docs/start_methods.md says what a template needs"
        )
        return Check(name, WARN, f"workers are spawned, not forked from a template: {why}", fix)
    what = "workers are forked from a template, which has proved that this is safe"
    if not may_start:
        what = "workers are forked from a template if that, once started, proves that it is safe"
    return Check(name, OK, what)


def _quotas(plan: Plan, start_method: Check, root: Path) -> Iterator[Check]:
    """How many workers fit, by each of the limits."""
    memory = memory_of("spawn" if start_method.status == WARN else "auto")
    quotas = worker_quotas(plan.workers, WORKER_DESCRIPTORS, memory, root)
    for noun in ("memory", "file descriptors", "processes and threads"):
        own = [quota for quota in quotas if quota.noun == noun]
        if not own:
            yield Check(noun, OK, "no limit")
        for quota in own:
            if noun == "file descriptors":
                yield _descriptors(quota, plan)
            elif quota.room < plan.workers:
                yield Check(noun, FAIL, quota.complaint(plan.workers), quota.remedy)
            else:
                yield Check(noun, OK, _offer(quota))
    workers = min(quota.room for quota in quotas)
    status = OK if workers >= plan.workers else FAIL
    yield Check("workers", status, f"{workers} would fit, {plan.workers} are asked for")


def _descriptors(quota: Quota, plan: Plan) -> Check:
    wanted = quota.in_use + quota.wanted(plan.workers) + _PROGRAM_DESCRIPTORS
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = "no limit" if hard == resource.RLIM_INFINITY else str(hard)
    what = f"{_offer(quota)} (hard limit: {most})"
    if wanted <= quota.limit:
        return Check(quota.noun, OK, what)
    fix = how_to_raise("n", wanted, hard)
    what += f"; a training program with so many workers ({plan.workers}) wants {wanted}"
    return Check(quota.noun, FAIL, what, fix)


def _offer(quota: Quota) -> str:
    if quota.noun == "memory":
        free, limit = human(quota.limit - quota.in_use), human(quota.limit)
        amounts = f"{free} are free of the {limit}"
    else:
        amounts = f"{quota.in_use} are in use of the {quota.limit}"
    return f"{amounts} that {quota.of_limit}: room for {quota.room} workers"


def _own_memory(root: Path) -> Iterator[Check]:
    for bound in own_bounds(private=True, root=root):
        what, fix = str(bound), "raise it before starting Python: ulimit -v or -d unlimited"
        yield Check("address space", FAIL if bound.free < WORKER_BYTES else WARN, what, fix)


def _block(plan: Plan, root: Path) -> Check:
    """Whether a block of slots fits."""
    specs = StepSpecs(
        n_lanes=1,
        auto_reset=False,
        observation={
            "observation": TensorSpec((plan.observation_bytes,), np.dtype(np.uint8)),
            "reward": TensorSpec((), np.dtype(np.float32)),
            "last_action": TensorSpec((), np.dtype(np.int64)),
            **{flag: TensorSpec((), np.dtype(bool)) for flag in FLAGS},
        },
        output={"action": TensorSpec((), np.dtype(np.int64))},
        state={},
    )
    layout = Layout(specs, plan.slots, plan.timesteps, plan.workers)
    what = (
        f"{human(layout.n_bytes)} for {plan.slots} slots of {plan.timesteps} steps with "
        f"observations of {human(plan.observation_bytes)}"
    )
    try:
        warning = block_warning(layout, ("n_slots", "n_timesteps"), root)
    except SpecError as error:
        return Check("slots", FAIL, *_parts(error))
    if warning is None:
        return Check("slots", OK, what)
    return Check("slots", WARN, *warning)


def _shared_memory() -> Check:
    """Whether memory can be shared with workers."""
    name = "shared memory"
    kind = "memfd" if hasattr(os, "memfd_create") else f"a file in {tempfile.gettempdir()}"
    try:
        memory = Memory.shared(mmap.PAGESIZE)
        memory.root()[:] = 1
        memory.close()
    except (OSError, RuntimeError) as error:
        fix = "allow memfd_create, or set TMPDIR to a directory that can be written to"
        return Check(name, FAIL, f"{kind} does not work: {error}", fix)
    if kind == "memfd":
        return Check(name, OK, "memfd works")
    return Check(name, WARN, f"no memfd here; {kind} is used instead, and written to the disk")


def _dev_shm() -> Check:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return Check("/dev/shm", OK, "not there; rlpool does not use it")
    what = f"{human(usage.free)} are free of {human(usage.total)}; rlpool does not use it"
    return Check("/dev/shm", OK, what)


def _worker() -> Check:
    """Whether a worker process starts, runs an episode, and how long that takes."""
    name = "worker process"
    try:
        took_s = seconds_of_an_episode()
    except (RlpoolError, OSError, RuntimeError) as error:
        return Check(name, FAIL, *_parts(error))
    what = f"started, ran an episode and answered after {took_s:.1f} s"
    if took_s > _SLOW_START_S:
        fix = "most of it is the import of torch: put Python's packages on a local disk"
        return Check(name, WARN, what, fix)
    return Check(name, OK, what)


def _parts(error: Exception) -> tuple[str, str]:
    """What an error says, and its fix."""
    lines = str(error).splitlines() or [type(error).__name__]
    fixes = [line.partition("fix:")[2].strip() for line in lines if line.startswith("  fix:")]
    return lines[0], " ".join(fixes)
