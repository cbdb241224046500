"""What a spawned process gets from its parent, for a worker that was forked from the template.

``ProcessState`` is what a running process can take over. What is fixed when a process starts, or is
read only once by a library, is ``identity``: if it differs, another template is needed.

A few differences from a spawned process remain:

- Modules that the template imported were imported before the main module, and so was what they did,
  such as adding warning filters. The garbage collector does not list their objects.
- Workers of one template share addresses and the hashes of strings, unless ``PYTHONHASHSEED`` is
  set, which fixes the hashes in spawned workers as well.
- ``/proc/<pid>/environ`` shows the variables that the template was started with. I/O priority, NUMA
  policy, and timer slack are those that the caller had then.
- At the end of a worker, ``atexit`` handlers run and streams are flushed, but objects and libraries
  are not finalized.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, takewhile
from multiprocessing import spawn, util
from pathlib import Path
from typing import Any

_VOLATILE = frozenset({b"COLUMNS", b"LINES", b"OLDPWD", b"PYTEST_CURRENT_TEST", b"SHLVL", b"_"})
"""Variables that change while a program runs and mean nothing to the libraries of a worker."""

_TAKEN_OVER = (*_VOLATILE, b"OPENBLAS_NUM_THREADS")
"""Variables in which a worker may differ from the template."""

_ALWAYS_IGNORED = {signal.SIGPIPE, signal.SIGXFSZ}
"""Every Python process ignores these, whatever it inherits."""

_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})

_PRIVILEGES = ("Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp", "Mems_allowed_list", "THP_")
"""Beginnings of the lines of ``/proc/thread-self/status`` that say what a process may do."""

_KERNEL_FILES = (
    *("thread-self/cgroup", "thread-self/personality"),
    *("self/coredump_filter", "self/oom_score_adj"),
)
"""Files in /proc with what else a process passes on."""


def identity() -> tuple[Any, ...]:
    """What a template must have in common with its workers from its start.

    The interpreter and its flags, environment variables, search path, working directory, which
    standard streams exist, session, privileges, cgroup and namespaces, scheduling, the number of
    cores (libraries start as many threads), the size of thread stacks, and hard limits.
    """
    directory = ""
    with suppress(OSError):  # it was removed, which starting a worker reports
        directory = os.getcwd()
    variables = environment_variables()
    return (
        spawn.get_executable(),
        tuple(util._args_from_interpreter_flags()),  # type: ignore[attr-defined]
        tuple(search_path()),
        directory,
        frozenset((name, variables[name]) for name in variables.keys() - _VOLATILE),
        tuple(is_inherited(fd) for fd in range(3)),
        os.getsid(0),
        _kernel_state(),
        (os.sched_getscheduler(0), os.sched_getparam(0).sched_priority),
        len(os.sched_getaffinity(0)),
        resource.getrlimit(resource.RLIMIT_STACK),
        hard_limits(),
    )


def hard_limits() -> tuple[int, ...]:
    """Limits that a process can lower but mostly not raise again."""
    return tuple(resource.getrlimit(limit)[1] for limit in _LIMITS)


def environment_variables() -> dict[bytes, bytes]:
    """The variables that a program started now would get.

    They are those of the C library: libraries and ``os.putenv`` change them behind Python's back.
    """
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    if not entries:
        return {}
    variables: dict[bytes, bytes] = {}
    for entry in takewhile(lambda entry: entry is not None, map(entries.__getitem__, count())):
        name, _, value = entry.partition(b"=")
        variables.setdefault(name, value)  # the first of two counts
    return variables


def is_inherited(fd: int) -> bool:
    """Whether a program that this process starts gets a descriptor."""
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


def _kernel_state() -> tuple[Any, ...]:
    """Privileges of this process, and where the kernel keeps it."""
    found: list[Any] = []
    with suppress(OSError):  # without /proc there is no template
        found += [value for value in kernel_status().items() if value[0].startswith(_PRIVILEGES)]
    for name in _KERNEL_FILES:
        with suppress(OSError), open(f"/proc/{name}", "rb", buffering=0) as file:
            found.append(file.read())
    with suppress(OSError):  # a process that changed users is not shown all of it
        namespaces = Path("/proc/thread-self/ns")
        found += [os.readlink(path) for path in sorted(namespaces.iterdir())]
        found.append(os.readlink("/proc/thread-self/root"))
    return tuple(found)


def kernel_status() -> dict[str, str]:
    """What the kernel reports about this thread."""
    lines = Path("/proc/thread-self/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def search_path() -> list[str]:
    """Where this process looks for modules."""
    first = multiprocessing.process.ORIGINAL_DIR or "."  # type: ignore[attr-defined]
    return [str(entry) or first for entry in sys.path]


@dataclass(frozen=True)
class ProcessState:
    """What a process hands over to what it starts.

    Attributes:
        environment: The environment variables that may differ from those of the template.
        umask: Permissions that new files do not get.
        ignored: Signals that are ignored, as a mask.
        blocked: Signals that are blocked.
        group: Process group.
        nice: Nice value.
        cores: Cores that it may use.
        limits: Soft and hard limit of each resource.
    """

    environment: dict[bytes, bytes | None]
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
        status, variables = kernel_status(), environment_variables()
        return cls(
            {name: variables.get(name) for name in _TAKEN_OVER},
            int(status["Umask"], 8),
            int(status["SigIgn"], 16),
            frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            os.getpgrp(),
            os.getpriority(os.PRIO_PROCESS, 0),
            frozenset(os.sched_getaffinity(0)),
            {limit: resource.getrlimit(limit) for limit in _LIMITS},
        )

    def take_over(self) -> None:
        """Apply all of it to this process."""
        for name, value in self.environment.items():
            if value is not None:
                os.environb[name] = value
            else:
                os.environb.pop(name, None)
        os.umask(self.umask)
        self._take_over_signals()
        if os.getpgrp() != self.group:
            with suppress(PermissionError):  # it is gone, and the caller with it
                os.setpgid(0, self.group)
        with suppress(PermissionError):  # the user has given up that right since
            os.setpriority(os.PRIO_PROCESS, 0, self.nice)
        os.sched_setaffinity(0, self.cores)
        for limit, values in self.limits.items():
            if resource.getrlimit(limit) != values:
                resource.setrlimit(limit, values)

    def _take_over_signals(self) -> None:
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            is_ignored = self.ignored >> (number - 1) & 1 or number in _ALWAYS_IGNORED
            handler = signal.getsignal(number)
            # Other handlers come from interpreter flags or modules, as in any process.
            if is_ignored and handler == signal.SIG_DFL:
                signal.signal(number, signal.SIG_IGN)
            elif handler == signal.SIG_IGN and not is_ignored:
                is_ctrl_c = number == signal.SIGINT
                signal.signal(number, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
