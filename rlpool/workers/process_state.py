"""What a spawned process gets from its parent, for a worker that was forked from the template.

``ProcessState`` is what a running process can take over. What is fixed when a process starts, or is
read only once by a library, is ``identity``: if it differs, another template is needed.

A few differences from a spawned process remain:

- Modules that the template imported were imported before the main module, and so was what they did,
  such as adding warning filters. The garbage collector does not list their objects.
- Workers of one template share addresses and the hashes of strings, unless ``PYTHONHASHSEED`` is
  set, which fixes the hashes in spawned workers as well.
- ``/proc/<pid>/environ`` shows the variables that the template was started with. Cgroup,
  namespaces, scheduling, I/O priority, and NUMA policy are those that the caller had then.
- At the end of a worker, ``atexit`` handlers run and streams are flushed, but objects and libraries
  are not finalized.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from contextlib import suppress
from multiprocessing import spawn, util
from pathlib import Path
from typing import Any, NamedTuple

_VOLATILE = b"PYTEST_CURRENT_TEST"
"""A variable that changes all the time and means nothing to the libraries of a worker."""

_TAKEN_OVER = (_VOLATILE, b"OPENBLAS_NUM_THREADS")
"""Variables in which a worker may differ from the template."""

_ALWAYS_IGNORED = {signal.SIGPIPE, signal.SIGXFSZ}
"""Every Python process ignores these, whatever it inherits."""

_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})

_PRIVILEGES = ("Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp")
"""Beginnings of the lines of ``/proc/thread-self/status`` that say what a process may do."""


def identity() -> tuple[Any, ...]:
    """What a template must have in common with its workers from its start.

    The interpreter and its flags, environment variables, search path, working directory, session,
    privileges, the number of cores (libraries start as many threads), and hard limits.
    """
    return (
        spawn.get_executable(),
        tuple(util._args_from_interpreter_flags()),  # type: ignore[attr-defined]
        tuple(search_path()),
        os.readlink("/proc/self/cwd"),  # which works for a directory that was removed, too
        frozenset(item for item in os.environb.items() if item[0] != _VOLATILE),
        os.getsid(0),
        frozenset(item for item in _kernel_status().items() if item[0].startswith(_PRIVILEGES)),
        len(os.sched_getaffinity(0)),
        tuple(resource.getrlimit(limit)[1] for limit in _LIMITS),
    )


def _kernel_status() -> dict[str, str]:
    """What the kernel reports about this thread."""
    lines = Path("/proc/thread-self/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def search_path() -> list[str]:
    """Where this process looks for modules."""
    return [str(entry) or "." for entry in sys.path]


class ProcessState(NamedTuple):
    """What a process hands over to what it starts.

    Attributes:
        environment: The environment variables that may differ from those of the template.
        umask: Permissions that new files do not get.
        ignored: Signals that are ignored.
        blocked: Signals that are blocked.
        nice: Nice value.
        cores: Cores that it may use.
        limits: Soft and hard limit of each resource.
    """

    environment: dict[bytes, bytes | None]
    umask: int
    ignored: set[int]
    blocked: set[int]
    nice: int
    cores: set[int]
    limits: dict[int, tuple[int, int]]

    @classmethod
    def now(cls) -> ProcessState:
        """That of the calling thread."""
        return cls(
            {name: os.environb.get(name) for name in _TAKEN_OVER},
            int(_kernel_status()["Umask"], 8),
            {n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN},
            set(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            os.getpriority(os.PRIO_PROCESS, 0),
            os.sched_getaffinity(0),
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
        with suppress(PermissionError):  # the user has given up that right since
            os.setpriority(os.PRIO_PROCESS, 0, self.nice)
        os.sched_setaffinity(0, self.cores)
        for limit, values in self.limits.items():
            resource.setrlimit(limit, values)

    def _take_over_signals(self) -> None:
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            is_ignored = number in self.ignored | _ALWAYS_IGNORED
            handler = signal.getsignal(number)
            # Other handlers come from interpreter flags or modules, as in any process.
            if is_ignored and handler == signal.SIG_DFL:
                signal.signal(number, signal.SIG_IGN)
            elif handler == signal.SIG_IGN and not is_ignored:
                is_ctrl_c = number == signal.SIGINT
                signal.signal(number, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
