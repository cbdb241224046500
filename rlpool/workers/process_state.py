"""What a process that is spawned has from its parent, for one that was forked from another.

Everything that the kernel hands over from a process to what it starts, as it is at that moment, and
that can be changed in a running process. What cannot be changed, or is read once when a program or
a library starts, tells templates apart instead: see ``identity``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path
from typing import Any

_VOLATILE = frozenset({b"COLUMNS", b"LINES", b"OLDPWD", b"PYTEST_CURRENT_TEST", b"SHLVL", b"_"})
"""Variables that change while a program runs and say nothing to the libraries of a worker."""

_ALWAYS_IGNORED = {signal.SIGPIPE, signal.SIGXFSZ}
"""Which every Python process ignores, whatever it got."""

_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})


def identity() -> tuple[Any, ...]:
    """What a template has to have in common with a worker from its start.

    The interpreter, the environment variables, where modules are looked for, the working directory,
    the session, whose process it is, the size of its threads' stacks and what it can never raise.
    """
    try:
        directory = os.getcwd()
    except OSError:  # it was removed: starting a worker will say so
        directory = ""
    environment = {k: v for k, v in os.environb.items() if k not in _VOLATILE}
    hard = [resource.getrlimit(limit)[1] for limit in _LIMITS]
    return (
        spawn.get_executable(),
        search_path(),
        directory,
        frozenset(environment.items()),
        os.getsid(0),
        (os.getresuid(), os.getresgid(), tuple(os.getgroups())),
        (resource.getrlimit(resource.RLIMIT_STACK), *hard),
    )


def search_path() -> str:
    """Where this process looks for modules, as JSON."""
    first = multiprocessing.process.ORIGINAL_DIR or "."  # type: ignore[attr-defined]
    return json.dumps([str(entry) or first for entry in sys.path])


@dataclass(frozen=True)
class ProcessState:
    """What a process hands over to what it starts.

    Attributes:
        environment: Environment variables.
        umask: Permissions that new files do not get.
        ignored: Signals that are ignored, as a mask.
        blocked: Signals that are blocked.
        nice: Nice value.
        cores: Cores that it may use.
        limits: Soft and hard limit of each resource.
    """

    environment: dict[bytes, bytes]
    umask: int
    ignored: int
    blocked: frozenset[int]
    nice: int
    cores: frozenset[int]
    limits: dict[int, tuple[int, int]]

    @classmethod
    def now(cls) -> ProcessState:
        """That of the calling thread."""
        status = _status()
        return cls(
            dict(os.environb),
            int(status["Umask"], 8),
            int(status["SigIgn"], 16),
            frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            os.getpriority(os.PRIO_PROCESS, 0),
            frozenset(os.sched_getaffinity(0)),
            {limit: resource.getrlimit(limit) for limit in _LIMITS},
        )

    def take_over(self) -> None:
        """Have all of it in this process."""
        _set_environment(self.environment)
        os.umask(self.umask)
        self._take_over_signals()
        if os.getpriority(os.PRIO_PROCESS, 0) != self.nice:
            with suppress(PermissionError):  # its owner has given up that right meanwhile
                os.setpriority(os.PRIO_PROCESS, 0, self.nice)
        os.sched_setaffinity(0, self.cores)
        for limit, values in self.limits.items():
            if resource.getrlimit(limit) != values:
                resource.setrlimit(limit, values)

    def _take_over_signals(self) -> None:
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if self.ignored >> (number - 1) & 1 or number in _ALWAYS_IGNORED:
                signal.signal(number, signal.SIG_IGN)
            elif number == signal.SIGINT:
                signal.signal(number, signal.default_int_handler)
            else:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)


def _set_environment(wanted: dict[bytes, bytes]) -> None:
    for name in os.environb.keys() - wanted.keys():
        del os.environb[name]
    for name, value in wanted.items():
        if os.environb.get(name) != value:
            os.environb[name] = value


def _status() -> dict[str, str]:
    """The kernel's words on this process."""
    lines = Path("/proc/thread-self/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
