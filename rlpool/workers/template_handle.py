"""The caller's handle of a template process: start it, follow its imports, fork workers, end it."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import spawn, util
from typing import Any

from rlpool.machine.interrupts import InterruptsHeld, blocked_interrupts
from rlpool.workers.process_state import ProcessState, search_path
from rlpool.workers.template import BOOT, MAX_MESSAGE_BYTES

_LOOK_S = 0.5
"""A template that is silent for so long may have been stopped, and is told to continue."""

IMPORT_S = 120.0
"""How long a template may take for any one import."""

_FORK_S = 20.0
"""How long it may take to fork: far more than it does, unless memory is short."""


class UnsafeError(Exception):
    """Forking from a template is not safe, or not possible; says why."""


class TemplateLostError(UnsafeError):
    """The template ended or does not answer, which may be no fault of what it was asked."""


class Template:
    """The template process. It costs one descriptor, from ``start`` to ``end``."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self, modules: Sequence[str]) -> None:
        """Start the process, once; ``imports`` follows it from then on.

        Args:
            modules: What it imports for the user.

        Raises:
            TemplateLostError: If it cannot be started.
        """
        flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
        about: dict[str, Any] = {"path": search_path(), "argv": list(map(str, sys.argv))}
        with InterruptsHeld(), blocked_interrupts():
            try:
                self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with there:
                    fd = there.fileno()
                    about.update(fd=fd, parent_pid=os.getpid(), modules=list(modules))
                    command = [spawn.get_executable(), *flags, "-c", BOOT, json.dumps(about)]
                    self._process = subprocess.Popen(command, pass_fds=[fd])
            except OSError as error:
                raise TemplateLostError(f"it cannot be started: {error}") from error

    def imports(self) -> Iterator[str]:
        """The modules of the user's that it imports, then ``""``; ends when it is ready.

        Raises:
            UnsafeError: If it cannot serve, as by what it imported last.
        """
        while True:
            kind, *words = self._received(IMPORT_S)
            if kind == "refused":
                raise UnsafeError(words[0])
            if kind == "ready":
                parent_pid, pid = words
                with suppress(ChildProcessError):  # it is another's, or SIGCHLD is ignored
                    os.waitpid(pid, 0)
                if parent_pid != os.getpid():
                    raise UnsafeError("what it forks is not a child of this process")
                return
            yield words[0]

    def fork(self, fds: Sequence[int]) -> int:
        """Fork a worker, a child of this process; returns its process number.

        Args:
            fds: Descriptors that it gets besides the standard ones, see ``template.serve``.

        Raises:
            OSError: If the system allows no further process.
            TemplateLostError: If there is no answer; there is no worker then.
        """
        try:
            request = pickle.dumps((len(fds), ProcessState.now()))
            with InterruptsHeld():
                try:
                    socket.send_fds(self._connection, [request], [0, 1, 2, *fds])
                except OSError as error:
                    raise TemplateLostError(str(error)) from error
            (answer,) = self._received(_FORK_S)
        except BaseException:
            self.end()
            raise
        if answer < 0:
            raise OSError(-answer, os.strerror(-answer))
        return int(answer)

    @property
    def _connection(self) -> socket.socket:
        if self._socket is None:
            raise TemplateLostError("it was ended")
        return self._socket

    def _received(self, timeout_s: float) -> Any:
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        deadline_s = time.monotonic() + timeout_s
        while not poller.poll(_LOOK_S * 1000):
            if time.monotonic() > deadline_s:
                raise TemplateLostError(f"it takes longer than {timeout_s:g} s")
            if self._process is not None:
                with suppress(OSError):  # whoever stopped it: the caller waits for it
                    self._process.send_signal(signal.SIGCONT)
        words = b""
        with InterruptsHeld(), suppress(OSError):
            words = self._connection.recv(MAX_MESSAGE_BYTES)
        if not words:
            raise TemplateLostError(f"it ended the process (exit code {self.end()})")
        return pickle.loads(words)

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def end(self) -> int:
        """End it if it runs; returns its exit code, 0 if it was never started. May be repeated."""
        with InterruptsHeld():
            self._close()
            if self._process is None:
                return 0
            with suppress(PermissionError):  # it ends by itself, as nobody talks to it any more
                self._process.kill()
            return self._process.wait()

    def forget(self) -> None:
        """Close the descriptor, which is all there is to do in a fork of the caller."""
        if self._process is not None:
            self._process.returncode = 0  # it is nobody's child here
        self._close()

    def _close(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()
