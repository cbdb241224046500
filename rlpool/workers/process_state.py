"""What a process that is spawned has from its parent, for one that was forked from another.

Everything that the kernel hands over from a process to what it starts, as it is at that moment, and
that can be changed in a running process. What cannot be changed, or is read once when a program or
a library starts, tells templates apart instead: see ``identity``.

These differences are left:

- Modules that the template has imported were imported before the main module, and so was what they
  did, such as adding filters of warnings. The garbage collector does not show their objects.
- Workers of one template have the same addresses and the same hashes of strings, unless
  ``PYTHONHASHSEED`` is set, which makes the latter the same in spawned ones, too.
- ``/proc/<pid>/environ`` shows the variables that the template was started with. The I/O priority,
  the NUMA policy and the timer slack are those that the caller had then.
- At its end a worker runs what is registered with ``atexit`` and flushes what was printed, but does
  not take objects and libraries to pieces.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, takewhile
from multiprocessing import spawn, util
from pathlib import Path
from typing import Any

_VOLATILE = frozenset({b"COLUMNS", b"LINES", b"OLDPWD", b"PYTEST_CURRENT_TEST", b"SHLVL", b"_"})
"""Variables that change while a program runs and say nothing to the libraries of a worker."""

_ALWAYS_IGNORED = {signal.SIGPIPE, signal.SIGXFSZ}
"""Which every Python process ignores, whatever it got."""

_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})

_CREDENTIALS = (
    *("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"),
    *("NoNewPrivs", "Seccomp", "Seccomp_filters", "Mems_allowed_list", "THP_enabled"),
)
"""Lines of a process's status that say what it may do."""

_PR_GET_SECUREBITS = 27

_PASSED_ON = (
    *("thread-self/cgroup", "thread-self/personality"),
    *("self/coredump_filter", "self/oom_score_adj"),
)
"""Files in /proc that say what else a process passes on to what it starts."""


def identity() -> tuple[Any, ...]:
    """What a template has to have in common with a worker from its start.

    The interpreter and its flags, the environment variables, where modules are looked for, the
    working directory, which standard streams there are, the session, whose process it is and what
    it may do, where the kernel keeps it, how it is scheduled and on how many cores, for which
    libraries start threads, the size of its threads' stacks and what it can never raise.
    """
    try:
        directory = os.getcwd()
    except OSError:  # it was removed: starting a worker will say so
        directory = ""
    environment = {k: v for k, v in environment_variables().items() if k not in _VOLATILE}
    return (
        spawn.get_executable(),
        tuple(util._args_from_interpreter_flags()),  # type: ignore[attr-defined]
        tuple(search_path()),
        directory,
        frozenset(environment.items()),
        tuple(is_inherited(fd) for fd in range(3)),
        os.getsid(0),
        _whereabouts(),
        ctypes.CDLL(None).prctl(_PR_GET_SECUREBITS, 0, 0, 0, 0),
        (os.sched_getscheduler(0), os.sched_getparam(0).sched_priority),
        len(os.sched_getaffinity(0)),
        resource.getrlimit(resource.RLIMIT_STACK),
        hard_limits(),
    )


def hard_limits() -> tuple[int, ...]:
    """Limits that a process can lower, and mostly not raise again."""
    return tuple(resource.getrlimit(limit)[1] for limit in _LIMITS)


def environment_variables() -> dict[bytes, bytes]:
    """The variables of a program that this process would start now.

    They are the C library's: libraries and ``os.putenv`` change those without telling Python.
    """
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    if not entries:
        return {}
    all_entries = map(entries.__getitem__, count())
    return _variables(takewhile(lambda entry: entry is not None, all_entries))


def is_inherited(fd: int) -> bool:
    """Whether a program that this process starts gets a descriptor."""
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


def _whereabouts() -> tuple[Any, ...]:
    """Whose process this is, and where the kernel keeps it."""
    found: list[Any] = []
    with suppress(OSError):  # without /proc there is no template
        status = _status()
        found += [status.get(name) for name in _CREDENTIALS]
    for name in _PASSED_ON:
        with suppress(OSError), open(f"/proc/{name}", "rb", buffering=0) as file:
            found.append(file.read())
    with suppress(OSError):  # who has changed users is not shown all of it
        namespaces = "/proc/thread-self/ns/"
        found += [os.readlink(namespaces + name) for name in sorted(os.listdir(namespaces))]
        found.append(os.readlink("/proc/thread-self/root"))
    return tuple(found)


def has_umask() -> bool:
    """Whether the kernel tells what ``ProcessState`` asks it for."""
    try:
        return "Umask" in _status()
    except FileNotFoundError:
        return False
    except OSError:  # no descriptor is left, of which starting a worker will tell
        return True


def search_path() -> list[str]:
    """Where this process looks for modules."""
    first = multiprocessing.process.ORIGINAL_DIR or "."  # type: ignore[attr-defined]
    return [str(entry) or first for entry in sys.path]


@dataclass(frozen=True)
class ProcessState:
    """What a process hands over to what it starts.

    Attributes:
        environment: Environment variables.
        umask: Permissions that new files do not get.
        ignored: Signals that are ignored, as a mask.
        blocked: Signals that are blocked.
        group: Process group.
        nice: Nice value.
        cores: Cores that it may use.
        limits: Soft and hard limit of each resource.
    """

    environment: dict[bytes, bytes]
    umask: int
    ignored: int
    blocked: frozenset[int]
    group: int
    nice: int
    cores: frozenset[int]
    limits: dict[int, tuple[int, int]]

    @classmethod
    def now(cls) -> ProcessState:
        """That of the calling thread."""
        status = _status()
        return cls(
            environment_variables(),
            int(status["Umask"], 8),
            int(status["SigIgn"], 16),
            frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            os.getpgrp(),
            os.getpriority(os.PRIO_PROCESS, 0),
            frozenset(os.sched_getaffinity(0)),
            {limit: resource.getrlimit(limit) for limit in _LIMITS},
        )

    def take_over(self) -> None:
        """Have all of it in this process."""
        _set_environment(self.environment)
        os.umask(self.umask)
        self._take_over_signals()
        if os.getpgrp() != self.group:
            with suppress(PermissionError):  # it is gone, and the caller with it
                os.setpgid(0, self.group)
        if os.getpriority(os.PRIO_PROCESS, 0) != self.nice:
            with suppress(PermissionError):  # its owner has given up that right meanwhile
                os.setpriority(os.PRIO_PROCESS, 0, self.nice)
        os.sched_setaffinity(0, self.cores)
        for limit, values in self.limits.items():
            if resource.getrlimit(limit) != values:
                resource.setrlimit(limit, values)

    def _take_over_signals(self) -> None:
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            is_ignored = self.ignored >> (number - 1) & 1 or number in _ALWAYS_IGNORED
            handler = signal.getsignal(number)
            # Any other comes from the interpreter's flags, or from a module, as in any process.
            if is_ignored and handler == signal.SIG_DFL:
                signal.signal(number, signal.SIG_IGN)
            elif handler == signal.SIG_IGN and not is_ignored:
                is_interrupt = number == signal.SIGINT
                signal.signal(
                    number, signal.default_int_handler if is_interrupt else signal.SIG_DFL
                )
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)


def _set_environment(wanted: dict[bytes, bytes]) -> None:
    """Make good what is not as it was when the template was started.

    What the interpreter itself set, for a better locale, it would set in any process.
    """
    started_with = _variables(Path("/proc/self/environ").read_bytes().split(b"\0"))
    for name in started_with.keys() | wanted.keys() | {b"OPENBLAS_NUM_THREADS"}:
        value = wanted.get(name)
        if value == started_with.get(name) and name != b"OPENBLAS_NUM_THREADS":
            continue
        if value is not None:
            os.environb[name] = value
        elif name in os.environb:
            del os.environb[name]


def _variables(entries: Iterable[bytes]) -> dict[bytes, bytes]:
    """Of a variable that is there twice the first counts."""
    variables: dict[bytes, bytes] = {}
    for entry in entries:
        name, _, value = entry.partition(b"=")
        if name:
            variables.setdefault(name, value)
    return variables


def _status() -> dict[str, str]:
    """The kernel's words on this thread."""
    with open("/proc/thread-self/status") as file:
        lines = file.read().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
