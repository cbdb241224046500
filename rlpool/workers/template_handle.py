"""The caller's handle of a template process: start it, follow its imports, fork workers, end it."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import spawn, util

from rlpool.machine.interrupts import InterruptsHeld, blocked_interrupts
from rlpool.workers.parent_death import kill_when_closed
from rlpool.workers.process_state import ProcessState, is_inherited, search_path
from rlpool.workers.template import BOOT, MAX_MESSAGE_BYTES, SHORTAGES

IMPORT_S = 120.0
"""How long a template may take for any one import."""

_FORK_S = 20.0
"""How long it may take to fork: far more than it does, unless memory is short."""

_LOOK_S = 0.1
"""How often it is checked while it is waited for."""

_LAST_WORDS_S = 1.0
"""How long a worker may take to answer whose template has ended."""


class UnsafeError(Exception):
    """Forking from a template is not safe, or not possible; says why."""


class TemplateLostError(Exception):
    """The template ended, which is no fault of what it was asked."""


class TemplateSilentError(TemplateLostError):
    """The template runs but does not answer."""


class Template:
    """The template process. It costs two descriptors, from ``start`` to ``end``."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._life_fd = -1

    def start(self, modules: Sequence[str]) -> None:
        """Start the process, once; ``told`` follows it from then on.

        Args:
            modules: What it imports for the user.

        Raises:
            TemplateLostError: If it cannot be started.
        """
        about = {
            "path": search_path(),
            # Modules may look at the arguments of the program, as they do in workers.
            "argv": list(map(str, sys.argv)) if modules else ["-c"],
            "main_file": os.path.realpath(getattr(sys.modules["__main__"], "__file__", None) or ""),
            "modules": list(modules),
            "parent_pid": os.getpid(),
        }
        with InterruptsHeld(), blocked_interrupts(), ExitStack() as passed:
            try:
                self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                passed.callback(there.close)
                life_fd, self._life_fd = os.pipe()
                passed.callback(os.close, life_fd)
                fds = []
                for fd in (there.fileno(), life_fd):
                    # The places of the standard streams may be free in this process.
                    fds.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3))
                    passed.callback(os.close, fds[-1])
                about["fd"], about["life_fd"] = fds
                flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
                command = [spawn.get_executable(), *flags, "-c", BOOT, json.dumps(about)]
                self._process = subprocess.Popen(command, pass_fds=fds)
                kill_when_closed(life_fd, self._process.pid)
            except OSError as error:
                raise TemplateLostError(f"it cannot be started: {error}") from error

    def told(self) -> tuple[str, str]:
        """What it says next while it starts, two words; ``"ready"`` is the last.

        Raises:
            TemplateLostError: If it ends.
            TemplateSilentError: If it says nothing for ``IMPORT_S``.
            UnsafeError: If what it forks is not a child of this process.
        """
        kind, *words = pickle.loads(self._received(IMPORT_S))
        if kind != "ready":
            return kind, words[0]
        parent_pid, pid = words
        if pid:
            _end_child(pid)  # the fork that has said so
        if parent_pid != os.getpid():
            raise UnsafeError("what it forks is not a child of this process")
        return kind, ""

    def fork(self, fds: Sequence[int]) -> int:
        """Fork a worker, a child of this process; returns its process number.

        Args:
            fds: Descriptors that it gets besides the standard ones, see ``template.serve``.

        Raises:
            OSError: If the system allows no further process.
            TemplateLostError: If there is no answer; there is no worker then.
            UnsafeError: If the system offers no way to do it.
        """
        standard = [fd for fd in range(3) if is_inherited(fd)]
        most_processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        request = standard, len(fds), most_processes, ProcessState.now()
        try:
            with self._talking() as connection:
                socket.send_fds(connection, [pickle.dumps(request)], [*standard, *fds])
            (answer,) = pickle.loads(self._received(_FORK_S))
        except BaseException:
            self.end()
            raise
        if answer > 0:
            return int(answer)
        if -answer in SHORTAGES:
            raise OSError(-answer, os.strerror(-answer))
        raise UnsafeError(f"the system does not fork for it: {os.strerror(-answer)}")

    def _received(self, timeout_s: float) -> bytes:
        poller = select.poll()
        with self._talking() as connection:
            poller.register(connection, select.POLLIN)
        deadline = time.monotonic() + timeout_s
        while not poller.poll(_LOOK_S * 1000):
            if time.monotonic() > deadline:
                raise TemplateSilentError(f"no answer for {timeout_s:g} s")
            # What it has forked may keep its end of the socket; its last words may be there by now.
            if not self.is_alive() and not poller.poll(0):
                raise TemplateLostError("it ended")
            if self._process is not None:
                self._process.send_signal(signal.SIGCONT)  # somebody may have stopped it
        with self._talking() as connection:
            words = connection.recv(MAX_MESSAGE_BYTES)
        if not words:
            raise TemplateLostError("it ended")
        return words

    @contextmanager
    def _talking(self) -> Iterator[socket.socket]:
        """The socket. Its errors are converted, those that signal handlers raise are not."""
        with InterruptsHeld():
            try:
                if self._socket is None:
                    raise TemplateLostError("it was ended")
                yield self._socket
            except OSError as error:
                raise TemplateLostError(str(error)) from error

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def end(self) -> int:
        """End it if it runs; returns its exit code, 0 if it was never started. May be repeated."""
        with InterruptsHeld():
            code = 0
            if self._process is not None:
                fd, self._life_fd = self._life_fd, -1
                if fd >= 0:
                    os.close(fd)  # by which the kernel ends it, whoever this process is by now
                with suppress(PermissionError):
                    self._process.kill()
                code = self._process.wait()
            if self._process is not None and self._socket is not None:
                # End what it forked last, if nobody read the answer.
                self._socket.settimeout(_LAST_WORDS_S)
                with suppress(OSError):
                    while words := self._socket.recv(MAX_MESSAGE_BYTES):
                        *_, pid = pickle.loads(words)
                        if isinstance(pid, int) and pid > 0:
                            _end_child(pid)
            self._close()
            return code

    def forget(self) -> None:
        """Close the descriptors, which is all there is to do in a fork of the caller."""
        if self._process is not None:
            self._process.returncode = 0  # it is nobody's child here
        self._close()

    def _close(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()
        fd, self._life_fd = self._life_fd, -1
        if fd >= 0:
            os.close(fd)


def _end_child(pid: int) -> None:
    """End a process that this one has started, at once."""
    with suppress(ChildProcessError, ProcessLookupError):  # somebody else has waited for it
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
