"""The caller's side of a template process: start it, follow its imports, let it fork, end it."""

from __future__ import annotations

import fcntl
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
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from multiprocessing import spawn, util
from typing import Any

from rlpool.machine.interrupts import InterruptsHeld, blocked_interrupts
from rlpool.memory.storage import anonymous_file
from rlpool.workers.leash import Leash
from rlpool.workers.process_state import is_inherited, search_path
from rlpool.workers.template import BOOT, REQUEST, SHORTAGES

IMPORT_S = 120.0
"""How long a template may take for any one import."""

_FORK_S = 20.0
"""How long it may take to fork: far more than it does, short of a machine without memory."""

_LOOK_S = 0.1
"""How often it is looked at while it is waited for."""


class UnsafeError(Exception):
    """Forking from a template is not safe, or not possible; says why."""


class TemplateLostError(Exception):
    """The template ended, or there is none, which is no fault of what it was asked."""


class TemplateSilentError(TemplateLostError):
    """The template does not answer."""


class Template:
    """The template process, from the caller's side.

    It costs three descriptors, from ``start`` to ``end``. Whatever interrupts the former, the
    latter cleans up.

    Attributes:
        search_path: ``sys.path`` if the imports of the user's modules changed it, once it is ready.
    """

    def __init__(self) -> None:
        self.search_path: list[str] | None = None
        self._pid = 0
        self._code: int | None = None
        self._lock = threading.RLock()
        self._leash: Leash | None = None
        self._socket: socket.socket | None = None
        self._note_fd = -1

    def start(self, modules: Sequence[str]) -> None:
        """Start the process, once; ``told`` follows it from then on.

        Args:
            modules: What it imports for the user.

        Raises:
            TemplateLostError: If it cannot be started.
        """
        executable = spawn.get_executable()
        flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
        # Modules may look at the arguments of the program, as they do in workers.
        argv = [str(argument) for argument in sys.argv] if modules else ["-c"]
        main_file = os.path.realpath(getattr(sys.modules["__main__"], "__file__", None) or "")
        about = {"path": search_path(), "argv": argv, "main": main_file}
        command = [executable, *flags, "-c", BOOT, json.dumps(about), str(os.getpid())]
        with InterruptsHeld(), blocked_interrupts():
            try:
                self._leash = Leash()
                self._note_fd = anonymous_file("rlpool-template")
                os.ftruncate(self._note_fd, mmap.PAGESIZE)
                self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with there, closing(self._leash.end()) as leash_end, ExitStack() as passed:
                    fds = []
                    for fd in (there.fileno(), self._note_fd, leash_end.fileno()):
                        # The places of the standard streams may be free in this process.
                        fds.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3))
                        passed.callback(os.close, fds[-1])
                    command += [*map(str, fds), *modules]
                    self._pid = util.spawnv_passfds(os.fsencode(executable), command, sorted(fds))
                    leash_end.tie(self._pid)
            except OSError as error:
                raise TemplateLostError(f"it cannot be started: {error}") from error

    def told(self) -> tuple[Any, ...]:
        """What it says next while it starts; nothing more once that is ``"ready"``.

        Raises:
            TemplateLostError: If it says nothing more.
            TemplateSilentError: If it says nothing for long.
            UnsafeError: If what it forks is not a child of this process.
        """
        kind, *words = pickle.loads(self._received(IMPORT_S))
        if kind == "ready":
            self.search_path, parent_pid = words
            with InterruptsHeld():
                self._end_unanswered()  # the fork that has said so
            if parent_pid != os.getpid():
                raise UnsafeError("what it forks is not a child of this process")
        return kind, *words

    def fork(self, fds: Sequence[int]) -> int:
        """Fork a worker; returns its process number. It is a child of this process.

        Args:
            fds: Descriptors that it gets besides the standard ones.

        Raises:
            OSError: If the system allows no further process.
            TemplateLostError: If there is no answer; there is no worker then.
            UnsafeError: If the system offers no way to do it.
        """
        standard = [fd for fd in range(3) if is_inherited(fd)]
        passed = [*standard, *fds]
        mask = sum(1 << fd for fd in standard)
        most_processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        request = REQUEST.pack(mask, len(passed), most_processes)
        with self._lock:
            try:
                self._send(request, passed)
                (answer,) = struct.unpack("!i", self._received(_FORK_S))
                self._forget_note()
            except BaseException:
                self.end()
                raise
        if answer > 0:
            return int(answer)
        if -answer in SHORTAGES:
            raise OSError(-answer, os.strerror(-answer))
        raise UnsafeError(f"the system does not fork for it: {os.strerror(-answer)}")

    def _send(self, words: bytes, fds: Sequence[int]) -> None:
        with self._talking() as connection:
            socket.send_fds(connection, [words], fds)

    def _received(self, timeout_s: float) -> bytes:
        with self._talking() as connection:
            fd = connection.fileno()
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        deadline = time.monotonic() + timeout_s
        while not poller.poll(_LOOK_S * 1000):
            if time.monotonic() > deadline:
                raise TemplateSilentError(f"no answer for {timeout_s:g} s")
            # What it has forked may keep its end of the socket; its last words may be there by now.
            if not self.is_alive() and not poller.poll(0):
                raise TemplateLostError("it ended")
            self._signal(signal.SIGCONT)  # somebody may have stopped it
        with self._talking() as connection:
            words = connection.recv(2**16)
        if not words:
            raise TemplateLostError("it ended")
        return words

    @contextmanager
    def _talking(self) -> Iterator[socket.socket]:
        """The socket, whose errors are turned, unlike those that signal handlers raise."""
        with InterruptsHeld():
            try:
                if self._socket is None:
                    raise TemplateLostError("it was ended")
                yield self._socket
            except OSError as error:
                raise TemplateLostError(str(error)) from error

    def is_alive(self) -> bool:
        """Whether it runs."""
        with self._lock:
            self._wait(os.WNOHANG)
            return bool(self._pid) and self._code is None

    def _wait(self, options: int) -> None:
        """Wait for its end, unless that was done; notes its exit code."""
        if self._pid and self._code is None:
            try:
                pid, status = os.waitpid(self._pid, options)
            except ChildProcessError:  # somebody else has waited for it
                self._code = -signal.SIGKILL
            else:
                self._code = os.waitstatus_to_exitcode(status) if pid else None

    def end(self) -> int:
        """End it if it runs; returns its exit code, 0 if it was never started. May be repeated."""
        with InterruptsHeld(), self._lock:
            if self.is_alive():
                self._signal(signal.SIGKILL)
            self._close_lines()
            self._wait(0)  # before the note is read: it may be about to fork
            self._end_unanswered()
            self.forget()
            return self._code or 0

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # this process may have changed users
            os.kill(self._pid, number)

    def _end_unanswered(self) -> None:
        """End what was forked last and not asked for by an answer: the kernel has noted it."""
        note = os.pread(self._note_fd, 4, 0) if self._note_fd >= 0 else b""
        if any(note):
            (pid,) = struct.unpack("i", note)
            end_child(pid)
            self._forget_note()

    def _forget_note(self) -> None:
        os.pwrite(self._note_fd, bytes(4), 0)

    def forget(self) -> None:
        """Close the descriptors, which is all there is to do in a fork of the caller."""
        self._close_lines()
        fd, self._note_fd = self._note_fd, -1
        if fd >= 0:
            os.close(fd)

    def _close_lines(self) -> None:
        """Let the template see that nobody will ask it any more, and the kernel end it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._leash is not None:
            self._leash.close()


def end_child(pid: int) -> None:
    """End a process that this one has started, at once."""
    with suppress(ChildProcessError, ProcessLookupError):  # somebody else has waited for it
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
