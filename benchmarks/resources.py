"""What this process and its workers hold: memory, mappings, descriptors, processes, threads."""

from __future__ import annotations

import contextlib
import gc
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True)
class Held:
    """What is held at a moment.

    Attributes:
        n_descriptors: Open descriptors of this process.
        n_threads: Threads of this process.
        n_processes: Its workers and what they have started.
        n_mappings: Mappings of rlpool's anonymous shared memory in this process.
        in_dev_shm: Names in ``/dev/shm``.
    """

    n_descriptors: int
    n_threads: int
    n_processes: int
    n_mappings: int
    in_dev_shm: frozenset[str]

    def left_since(self, before: Held) -> dict[str, Any]:
        """What there is more of than before; empty values mean that nothing is left."""
        left: dict[str, Any] = {
            name: max(0, value - getattr(before, name))
            for name, value in asdict(self).items()
            if isinstance(value, int)
        }
        left["in_dev_shm"] = sorted(self.in_dev_shm - before.in_dev_shm)
        return left


def held() -> Held:
    """What this process holds now, garbage aside."""
    gc.collect()
    return Held(
        len(os.listdir("/proc/self/fd")) - 1,  # one is the listing's own
        psutil.Process().num_threads(),
        len(workers()),
        Path("/proc/self/maps").read_text().count("memfd:rlpool"),
        # Semaphores of multiprocessing come and go with other programs; rlpool makes none.
        frozenset(n for n in os.listdir("/dev/shm") if not n.startswith("sem.mp-")),
    )


def workers() -> list[psutil.Process]:
    """Processes that this one has, but for those that live as long as it.

    Which are the tracker that multiprocessing keeps, and the template of workers.
    """
    return [p for p in psutil.Process().children(recursive=True) if not _is(p, *_STAY)]


def templates() -> list[psutil.Process]:
    """The template from which workers are forked, if there is one."""
    return [p for p in psutil.Process().children() if _is(p, *_TEMPLATE)]


_TEMPLATE = ("rlpool-template", "rlpool.workers.template")
_STAY = ("multiprocessing.resource_tracker", *_TEMPLATE)


def _is(process: psutil.Process, *names: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(name in part for part in process.cmdline() for name in names)
    return False


def memory_mib(process: psutil.Process) -> dict[str, float]:
    """Resident memory of a process: all, what is its own, and shared memory; zero if it is gone.

    The proportional share that systems tell of does not serve: it grows while other programs end
    that had the same libraries mapped.
    """
    sizes = {"VmRSS:": 0.0, "RssAnon:": 0.0, "RssShmem:": 0.0}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            name, *words = line.split()
            if name in sizes:
                sizes[name] = int(words[0]) / 1024
    return {"rss": sizes["VmRSS:"], "own": sizes["RssAnon:"], "shared": sizes["RssShmem:"]}
