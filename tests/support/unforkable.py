"""A module that lets the forks of a process that imports it fail, if a variable says how.

What the kernel does when it has no memory or no process left is done here by a filter of its own
for the one kind of ``clone`` that a template uses.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

VARIABLE = "RLPOOL_TEST_FORK_ERRNO"
IS_POSSIBLE = platform.machine() == "x86_64"

_CLONE, _CLONE_PARENT = 56, 0x8000
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_FIRST_ARGUMENT = 16  # where it lies in what a filter sees; the number of the call comes first
_FAIL, _ALLOW = 0x00050000, 0x7FFF0000
_NO_NEW_PRIVILEGES, _SET_FILTER = 38, 22


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def _let_forks_fail(number: int) -> None:
    instructions = [
        (_LOAD, 0, 0, 0),
        (_JUMP_IF_EQUAL, 0, 3, _CLONE),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_JUMP_IF_SET, 0, 1, _CLONE_PARENT),
        (_RETURN, 0, 0, _FAIL | number),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *i) for i in instructions))
    program = _Program(len(instructions), ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or prctl(_SET_FILTER, 2, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "no filter")


if VARIABLE in os.environ:
    _let_forks_fail(int(os.environ[VARIABLE]))
