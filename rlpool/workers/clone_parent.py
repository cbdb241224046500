"""Forks that become children of this process's parent (``CLONE_PARENT``).

``os.fork`` makes a child of the calling process. What the template forks must be a child of the
caller instead, so that the kernel reports its end to the caller whatever becomes of the template.
The C library does not offer that, so the system call is made from here, with what the C library and
the interpreter do around the fork of a process that has one thread.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
from typing import Any

_CLONE_FLAGS = 0x00008000 | 0x00200000 | 0x01000000  # CLONE_PARENT, _CHILD_CLEARTID, _CHILD_SETTID
_PR_GET_TID_ADDRESS = 40

_SYSCALLS = {"x86_64": (56, 273, 274), "aarch64": (220, 99, 100)}
"""Numbers of clone, set_robust_list, and get_robust_list."""


class ParentForks:
    """Forks this process, which must have one thread, into children of its parent.

    Raises:
        OSError: If this platform does not offer it.
    """

    def __init__(self) -> None:
        machine = platform.machine()
        if machine not in _SYSCALLS or sys.maxsize < 2**32:
            raise OSError(f"forks on {machine} cannot be children of the caller")
        self._clone, self._set_robust_list, get_robust_list = _SYSCALLS[machine]
        self._libc = ctypes.PyDLL(None, use_errno=True)  # does not release Python's lock
        self._robust_list = ctypes.c_void_p(), ctypes.c_size_t()
        self._call(get_robust_list, 0, *map(ctypes.byref, self._robust_list))
        # The C library keeps the number of its thread, which changes in the fork.
        tid_address = ctypes.c_void_p()
        self._libc.prctl(
            _PR_GET_TID_ADDRESS, ctypes.byref(tid_address), *map(ctypes.c_long, [0] * 3)
        )
        address = tid_address.value
        if not address or ctypes.c_int.from_address(address).value != os.getpid():
            raise OSError("the kernel lacks PR_GET_TID_ADDRESS (CONFIG_CHECKPOINT_RESTORE)")
        # The address of the number comes before the thread-local storage or after it.
        self._last = (0, address) if machine == "aarch64" else (address, 0)

    def _call(self, *arguments: Any) -> int:
        words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
        result: int = self._libc.syscall(*words)
        return result

    def fork(self) -> int:
        """Fork; returns 0 in the child, its process number here.

        Raises:
            OSError: As ``os.fork``.
        """
        python = ctypes.pythonapi
        python.PyOS_BeforeFork()
        pid = self._call(self._clone, _CLONE_FLAGS | signal.SIGCHLD, 0, 0, *self._last)
        if pid == 0:
            head, length = self._robust_list
            self._call(self._set_robust_list, head.value or 0, length.value)
            python.PyOS_AfterFork_Child()
            return 0
        number = ctypes.get_errno()
        python.PyOS_AfterFork_Parent()
        if pid < 0:
            raise OSError(number, os.strerror(number))
        return pid
