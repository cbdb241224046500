"""Services of the operating system; code that runs everywhere uses no others.

Worker processes and shared memory need Linux; ``require_linux`` refuses them elsewhere. Work in a
single process runs everywhere. Functions for Linux alone are called in workers, or to start them.
Limits of control groups are those of version 2.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from rlpool.errors import UsageError

IS_LINUX = sys.platform == "linux"

if sys.platform == "linux":
    import fcntl
    import resource
    import termios

HAS_ORDERED_STORES = platform.machine() in ("x86_64", "AMD64", "i686")
"""Whether all cores see a core's writes in their order. On other processors, data that one
process writes and another reads is passed on under a ``FileLock``."""

HELD_SIGNALS = tuple(
    int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name)
)
"""Signals whose handlers may raise anywhere: from Ctrl-C, job managers, and timers."""

STACKS_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 7
"""Makes a worker write its stacks. Nothing else uses this number: not the C library, which takes
the first real-time signals, nor Python, nor CUDA."""

ROOT = Path("/")
"""Directory of ``/proc`` and ``/sys``; tests use another one to simulate another machine."""


def require_linux(feature: str, fix: str) -> None:
    """Refuse a feature that needs Linux on another system.

    Args:
        feature: The feature, the subject of the message.
        fix: An alternative that works here.

    Raises:
        UsageError: If this is not Linux.
    """
    if not IS_LINUX:
        raise UsageError(f"{feature} needs Linux, and this is {platform.system()}", fix=fix)


# Files and locks ----------------------------------------------------------------------------------


def anonymous_file(name: str) -> int:
    """Create a file in memory, outside of any directory; returns its descriptor."""
    return os.memfd_create(name, os.MFD_CLOEXEC)


def anonymous_files(pid: int | None, name: str) -> Iterator[Path]:
    """Find the open files of a process with that name; OSError if access is denied."""
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if os.readlink(file) == f"/memfd:{name} (deleted)":
                yield file


def file_of(fd: int, pid: int | str = "self") -> str:
    """Return a path through which another process can open the file of a descriptor."""
    return f"/proc/{pid}/fd/{fd}"


NO_LOCK: AbstractContextManager[None] = nullcontext()
"""In place of a ``FileLock`` where there is only one process."""


class FileLock:
    """A ``with`` section that one process runs at a time; the kernel unlocks it if that one dies.

    Args:
        fd: Descriptor of a file that all processes lock.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that it runs within the section."""

        def called_alone(*arguments: Any) -> Any:
            with self:
                return call(*arguments)

        return called_alone


def append_only(fd: int) -> None:
    """Make every write append to the file."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)


def n_unread_bytes(fd: int) -> int:
    """Return the bytes that the kernel holds for a socket's reader, including its own overhead."""
    return int.from_bytes(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def max_descriptors() -> int:
    """Return the maximum number of descriptors of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def n_open_descriptors() -> int:
    """Return the number of open descriptors of this process."""
    return len(os.listdir("/dev/fd")) - 1  # one is the listing's own


# Processes ----------------------------------------------------------------------------------------


def kill_when_closed(fd: int, pid: int) -> None:
    """Let the kernel kill a process when the other end of a pair of sockets is closed.

    Args:
        fd: One end of a pair that carries no data.
        pid: The process, which need not hold the descriptor; negative for a process group.
    """
    fcntl.fcntl(fd, fcntl.F_SETOWN, pid)
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | fcntl.FASYNC)


def kill_group(group: int) -> None:
    """Kill a process group; 0 is that of this process."""
    os.killpg(group, signal.SIGKILL)


def end_without_reader() -> None:
    """Let this process end when its output has no reader any more, as commands do."""
    if IS_LINUX:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def at_fork(**calls: Callable[[], object]) -> None:
    """Like ``os.register_at_fork``; does nothing on systems without forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**calls)


_INHERITED = ("Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp", "Umask", "SigIgn")
"""Prefixes of the lines of ``/proc/thread-self/status`` that a new process inherits."""


def inherited() -> tuple[Any, ...]:
    """Return the state that a process inherits, which another running process cannot take over.

    The working directory, session, privileges, umask, ignored signals, nice value, cores, and
    limits.
    """
    status = Path("/proc/thread-self/status").read_text().splitlines()
    limits = sorted({getattr(resource, name) for name in dir(resource) if name[:7] == "RLIMIT_"})
    return (
        os.readlink("/proc/self/cwd"),  # also works for a directory that was removed
        tuple(line for line in status if line.startswith(_INHERITED)),
        os.getsid(0),
        os.getpriority(os.PRIO_PROCESS, 0),
        frozenset(os.sched_getaffinity(0)),
        tuple(map(resource.getrlimit, limits)),
    )


_MAX_COMM_BYTES = 15
_ARG_START = 45  # in /proc/self/stat, counted from the field after the name


def set_title(title: str) -> None:
    """Rename this process, where possible.

    Args:
        title: ASCII. The kernel's short name has 15 bytes: it keeps the end of the title, which
            distinguishes workers.
    """
    words = title.encode()
    head, _, tail = words.rpartition(b"-")
    short = head[: _MAX_COMM_BYTES - 1 - len(tail)] + b"-" + tail
    with suppress(OSError, ValueError, IndexError):  # not allowed
        Path("/proc/self/comm").write_bytes(short)
        start, end = map(int, stat_fields("self")[_ARG_START : _ARG_START + 2])
        if 0 < start < end:
            # The command line is read from this process's memory, up to its first zero if its last
            # byte is not zero.
            ctypes.memset(start, 0, end - start)
            ctypes.memmove(start, words, min(len(words), end - start - 2))
            ctypes.memset(end - 1, 1, 1)


def own_processes() -> Iterator[int]:
    """Return the processes of this user."""
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if directory.stat().st_uid == os.getuid():
                yield int(directory.name)


def command_of(pid: int) -> str:
    """Return the command line of a process; ``""`` if it does not exist."""
    return _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()


def n_threads() -> int:
    """Count the threads of this process, including those of libraries."""
    return len(os.listdir("/proc/self/task"))


def stat_fields(pid: int | str | None) -> list[str]:
    """Return the kernel's status of a process, its state first; empty if it does not exist."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def process_activity(pid: int | None) -> int:
    """Sum CPU time and page faults of a process: a number that grows with any activity.

    Returns:
        At least 1; 0 where the system does not provide it.
    """
    fields = stat_fields(pid)
    # Minor and major faults, user and system time.
    return 1 + sum(int(fields[n]) for n in (7, 9, 11, 12)) if fields else 0


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process without shared blocks; 0 if unknown."""
    file = Path(f"/proc/{pid}/status")
    return _kilobytes(file, "RssAnon") + _kilobytes(file, "RssFile")


def n_oom_kills() -> int:
    """Count the processes killed by the kernel for lack of memory since boot; 0 if unknown."""
    return int(_field(ROOT / "proc/vmstat", "oom_kill") or 0)


def has_ended(pid: int) -> bool:
    """Whether a process has ended, even if its parent has not reaped it yet."""
    fields = stat_fields(pid)
    return IS_LINUX and (not fields or fields[0] in "ZX")


# The machine --------------------------------------------------------------------------------------


def human(n_bytes: int) -> str:
    """Format a size for messages, such as ``"1.5 GiB"``."""
    size, units = float(n_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if size >= 1000 else f"{size:.3g} {units[0]}"


class Bound(NamedTuple):
    """A memory limit: its source, its size, and the memory free without swapping."""

    name: str
    total: int
    free: int

    def __str__(self) -> str:
        return f"{human(self.free)} of the {human(self.total)} that {self.name} are free"


def memory_bounds(root: Path = ROOT) -> list[Bound]:
    """Return the limits of memory: the machine, and the containers around this process.

    On systems other than Linux, memory is unknown.
    """
    file = root / "proc/meminfo"
    total, free = _kilobytes(file, "MemTotal"), _kilobytes(file, "MemAvailable")
    bounds = [Bound("this machine has", total or sys.maxsize, free or sys.maxsize)]
    for group in _control_groups(root):
        limit = _read(group / "memory.max").strip()
        if not limit.isdecimal():  # "max", or no such file
            continue
        used = int(_read(group / "memory.current") or 0)
        # The kernel's own estimate, MemAvailable, counts half of the active page cache as free.
        used -= int(_field(group / "memory.stat", "inactive_file") or 0)
        used -= int(_field(group / "memory.stat", "active_file") or 0) // 2
        name = f"the control group of this process allows ({group / 'memory.max'})"
        bounds.append(Bound(name, int(limit), max(0, int(limit) - max(0, used))))
    return bounds


def n_cores(root: Path = ROOT) -> int:
    """Count the cores that this process may use, by affinity and quotas of its control groups."""
    n = len(os.sched_getaffinity(0)) if IS_LINUX else os.cpu_count() or 1
    for group in _control_groups(root):
        quota, _, period = _read(group / "cpu.max").strip().partition(" ")
        if quota.isdecimal():  # else "max", or no such file
            n = min(n, -(-int(quota) // int(period)))
    return max(1, n)


def _control_groups(root: Path) -> Iterator[Path]:
    """Find the directories of this process's control group and of its ancestors.

    A container sees its own group as the topmost directory; the path may be the host's, which does
    not exist here.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, _, path = line.partition("::")
        if hierarchy == "0":
            own = PurePosixPath("" if ".." in path else path.lstrip("/"))
            for directory in (own, *own.parents):
                yield root / "sys/fs/cgroup" / directory


def _kilobytes(file: Path, name: str) -> int:
    """Return a size in bytes that a kernel file gives in kilobytes; 0 if missing."""
    return int(_field(file, name) or 0) * 1024


def _field(file: Path, name: str) -> str:
    """Return the first word after a name in a kernel file; ``""`` if missing."""
    for words in map(str.split, _read(file).splitlines()):
        if len(words) > 1 and words[0].rstrip(":") == name:
            return words[1]
    return ""


def _read(file: Path) -> str:
    """Return the text of a kernel file; ``""`` if it cannot be read."""
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
