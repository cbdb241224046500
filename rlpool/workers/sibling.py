"""Forks that become children of this process's parent.

``os.fork`` makes a child of the process that calls it. What the template forks has to be a child of
the caller instead: the caller is told of its end and how it ended by the kernel itself, whatever
becomes of the template meanwhile. Linux offers that (``CLONE_PARENT``), the C library does not, so
the system call is made from here, with what the C library and the interpreter do around a fork of a
process with one thread.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import signal
import sys
from typing import Any

_CLONE_PARENT = 0x00008000
_CLONE_PARENT_SETTID = 0x00100000
_CLONE_CHILD_CLEARTID = 0x00200000
_CLONE_CHILD_SETTID = 0x01000000

_PR_GET_TID_ADDRESS = 40

_SYSCALLS = {"x86_64": (56, 273, 274), "aarch64": (220, 99, 100)}
"""Numbers of clone, set_robust_list, get_robust_list; the last two arguments of clone, the address
of the thread's number and the thread-local storage, come in either order."""

_TLS_FIRST = ("aarch64",)


class SiblingForks:
    """Forks this process, which must have one thread, into children of its parent.

    Args:
        noted: Shared memory where the kernel notes the number of each new process, as an int,
            before that runs and whatever happens to this one.

    Raises:
        OSError: If this platform does not offer it.
    """

    def __init__(self, noted: mmap.mmap) -> None:
        machine = platform.machine()
        is_wide = sys.maxsize > 2**32
        if sys.platform != "linux" or machine not in _SYSCALLS or not is_wide:
            bits = "64" if is_wide else "32"
            raise OSError(f"no way to fork a sibling on {sys.platform}, {machine}, {bits} bits")
        self._numbers = _SYSCALLS[machine]
        self._noted = ctypes.c_int.from_buffer(noted)  # which keeps the memory mapped
        self._libc = ctypes.PyDLL(None, use_errno=True)  # which keeps Python's lock
        self._tid_address = self._address_of_tid()
        self._robust_list = ctypes.c_void_p(), ctypes.c_size_t()
        self._call(self._numbers[2], 0, *map(ctypes.byref, self._robust_list))
        flags = _CLONE_PARENT | _CLONE_PARENT_SETTID | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID
        last = (self._tid_address, 0)
        if machine in _TLS_FIRST:
            last = (0, self._tid_address)
        self._arguments = (
            flags | signal.SIGCHLD,
            0,
            ctypes.addressof(self._noted),
            *last,
        )

    def _address_of_tid(self) -> int:
        """Where the C library keeps the number of this thread, which is another one in a fork.

        Raises:
            OSError: If it is not to be found.
        """
        address = ctypes.c_void_p()
        where = ctypes.byref(address), *(ctypes.c_void_p() for _ in range(3))
        found = self._libc.prctl(_PR_GET_TID_ADDRESS, *where) == 0 and address.value
        if not found or ctypes.c_int.from_address(found).value != os.getpid():
            raise OSError(
                "the kernel does not tell where the C library keeps the number of a thread "
                "(CONFIG_CHECKPOINT_RESTORE)"
            )
        return found

    def _call(self, *arguments: Any) -> int:
        result: int = self._libc.syscall(*(_as_word(argument) for argument in arguments))
        return result

    def fork(self) -> int:
        """Fork; returns 0 in the child, its process number here.

        Raises:
            OSError: As ``os.fork``.
        """
        python = ctypes.pythonapi
        python.PyOS_BeforeFork()
        pid = self._call(self._numbers[0], *self._arguments)
        if pid == 0:
            head, length = self._robust_list
            self._call(self._numbers[1], head.value or 0, length.value)
            python.PyOS_AfterFork_Child()
            return 0
        number = ctypes.get_errno()
        python.PyOS_AfterFork_Parent()
        if pid < 0:
            raise OSError(number, os.strerror(number))
        return pid


def _as_word(argument: Any) -> Any:
    return ctypes.c_long(argument) if isinstance(argument, int) else argument
