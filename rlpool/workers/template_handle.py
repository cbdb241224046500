"""The caller's side of a template process: start it, follow its imports, let it fork, end it."""

from __future__ import annotations

import json
import mmap
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import spawn, util
from typing import Any

from rlpool.interrupts import blocked_interrupts
from rlpool.workers.leash import Leash
from rlpool.workers.process_state import search_path
from rlpool.workers.template import BOOT, REQUEST

IMPORT_S = 120.0
"""How long a template may take for any one import."""

_FORK_S = 20.0
"""How long it may take to fork: far more than it does, short of a machine without memory."""


class TemplateLostError(Exception):
    """The template ended, or does not answer, which is no fault of what it was asked."""


class Template:
    """The template process, from the caller's side.

    Args:
        modules: What it imports for the user.

    Attributes:
        search_path: ``sys.path`` if the imports of those changed it, once it is ready.

    Raises:
        OSError: If it cannot be started.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self.search_path: list[str] | None = None
        self._pid = 0
        self._lock = threading.RLock()
        self._leash = Leash()
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        leash_end = self._leash.end()
        word_fd = os.memfd_create("rlpool-template", os.MFD_CLOEXEC)
        try:
            os.ftruncate(word_fd, mmap.PAGESIZE)
            self._word = mmap.mmap(word_fd, mmap.PAGESIZE)
            executable = spawn.get_executable()
            flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
            # Modules may look at the arguments of the program, as they do in workers.
            argv = [str(argument) for argument in sys.argv] if modules else ["-c"]
            command = [executable, *flags, "-c", BOOT, json.dumps([search_path(), argv])]
            command += [str(there.fileno()), str(word_fd), *modules]
            with blocked_interrupts():
                self._pid = util.spawnv_passfds(
                    os.fsencode(executable),
                    command,
                    sorted([there.fileno(), word_fd, leash_end.fileno()]),
                )
                leash_end.tie(self._pid)
        except BaseException:
            self.end()
            raise
        finally:
            leash_end.close()
            there.close()
            os.close(word_fd)

    def told(self) -> tuple[Any, ...]:
        """What it says next while it starts.

        Raises:
            TemplateLostError: If it says nothing more.
            TimeoutError: If it says nothing for long.
        """
        words: tuple[Any, ...] = pickle.loads(self._received(IMPORT_S))
        return words

    def fork(self, fds: Sequence[int]) -> int:
        """Fork a worker; returns its process number. It is a child of this process.

        Args:
            fds: Descriptors that it gets besides the standard ones.

        Raises:
            OSError: If the system allows no further process.
            TemplateLostError: If there is no answer; there is no worker then.
        """
        standard = [fd for fd in range(3) if _is_open(fd)]
        passed = [*standard, *fds]
        mask = sum(1 << fd for fd in standard)
        most_processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        request = REQUEST.pack(mask, len(passed), most_processes)
        with self._lock:
            self._word[:4] = bytes(4)
            try:
                socket.send_fds(self._socket, [request], passed)
                (number,) = struct.unpack("!i", self._received(_FORK_S))
            except BaseException as error:
                self.end()
                self._end_forked()
                if isinstance(error, OSError):
                    raise TemplateLostError(str(error)) from error
                raise
            if number:
                raise OSError(number, os.strerror(number))
            if not (pid := self._forked()):
                raise TemplateLostError("the kernel has not noted the number of the worker")
            return pid

    def _forked(self) -> int:
        """The process that it forked last, which the kernel has noted; 0 if it did not."""
        (pid,) = struct.unpack("i", self._word[:4])
        return int(pid)

    def _end_forked(self) -> None:
        """End a worker that was forked although there was no answer."""
        if pid := self._forked():
            with suppress(ChildProcessError, ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _received(self, timeout_s: float) -> bytes:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        if not poller.poll(timeout_s * 1000):
            raise TimeoutError(f"no answer for {timeout_s:g} s")
        try:
            words = self._socket.recv(2**16)
        except ConnectionError as error:
            raise TemplateLostError(str(error)) from error
        if not words:
            raise TemplateLostError("it ended")
        return words

    def is_alive(self) -> bool:
        """Whether it runs."""
        with self._lock:
            return bool(self._pid) and self._exit_code(os.WNOHANG) is None

    def _exit_code(self, options: int) -> int | None:
        """Wait for its end; ``None`` while it runs."""
        try:
            pid, status = os.waitpid(self._pid, options)
        except ChildProcessError:  # somebody else has waited for it
            self._pid = 0
            return -signal.SIGKILL
        if pid == 0:
            return None
        self._pid = 0
        return os.waitstatus_to_exitcode(status)

    def end(self) -> int:
        """End it if it runs; returns its exit code. May be repeated."""
        with self._lock:
            code: int | None = 0
            if self._pid:
                code = self._exit_code(os.WNOHANG)
            if code is None:
                os.kill(self._pid, signal.SIGKILL)
                code = self._exit_code(0)
            self.forget()
            return code or 0

    def forget(self) -> None:
        """Close the descriptors, which is all there is to do in a fork of the caller."""
        self._socket.close()
        self._leash.close()


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
