"""A simulated system other than Linux, for single-process code: ``pytest -p support.elsewhere``.

Modules, names in modules and kernel files that macOS or Windows lack are hidden from rlpool, but
not from tests and other packages. A test that is refused because it needs Linux is skipped.
"""

from __future__ import annotations

import builtins
import os
import re
import select
import signal
import socket
import sys
from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any

import gymnasium  # noqa: F401 (what asks for the platform is imported before that changes)
import pytest
import torch.multiprocessing  # noqa: F401

MODULES = ("fcntl", "resource", "termios")

NAMES = {
    os: (
        *("EFD_", "MFD_", "O_CLOEXEC", "PRIO_", "SCHED_", "environb", "eventfd", "fork", "getpg"),
        *("getpriority", "getsid", "getuid", "killpg", "memfd", "posix_", "pread", "pwrite"),
        *("register_at_fork", "sched_", "setpgid", "uname", "wait"),
    ),
    select: ("EPOLL", "POLL", "epoll", "poll"),
    signal: ("SIGALRM", "SIGCHLD", "SIGKILL", "SIGPIPE", "SIGRT", "SIGUSR", "pthread_"),
    socket: ("AF_UNIX", "MSG_NOSIGNAL", "SCM_", "SOCK_SEQPACKET", "recv_fds", "send_fds"),
}
"""Prefixes of names that other systems lack, mostly Windows."""

NEEDS_LINUX = re.compile(
    r"(n_workers=[1-9]|ParallelEnvManager|Pool\(env\)|RayEpisodeBatcher|on_env_error=\"restart\"|"
    "storage='(shared|memmap)') needs Linux"
)
MOST_REFUSED = 60
refused: list[str] = []


class Elsewhere(ModuleType):
    """A module without its Linux-only names."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module.__name__)
        self.__real = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith(NAMES[self.__real]):
            raise AttributeError(f"module {self.__name__!r} has no {name!r} on this system")
        return getattr(self.__real, name)


_import: Callable[..., Any] = builtins.__import__
_modules = {module.__name__: Elsewhere(module) for module in NAMES}


def _is_ours(frame_globals: Any) -> bool:
    return str((frame_globals or {}).get("__name__")).partition(".")[0] == "rlpool"


def _import_here(name: str, into: Any = None, *rest: Any, **named: Any) -> Any:
    if _is_ours(into):
        if name in MODULES:
            raise ImportError(f"no module named {name!r} on this system")
        if name in _modules:
            return _modules[name]
    return _import(name, into, *rest, **named)


def _refuse_kernel_files(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith("/proc"):
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_globals["__name__"] in ("pathlib", "os", "io"):
            frame = frame.f_back
        if frame is not None and _is_ours(frame.f_globals):
            raise FileNotFoundError(arguments[0])


builtins.__import__ = _import_here
sys.addaudithook(_refuse_kernel_files)
sys.platform = "darwin"
import rlpool  # noqa: E402

sys.platform = "linux"  # for all other callers


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Skip a test that is refused because it needs Linux."""
    try:
        return (yield)
    except rlpool.RlpoolError as error:
        if not NEEDS_LINUX.search(error.what):
            raise
        refused.append(error.what)
        assert len(refused) <= MOST_REFUSED, "something is refused that should work anywhere"
        pytest.skip(error.what)
