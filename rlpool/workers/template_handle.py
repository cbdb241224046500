"""The caller's side of the template: start it, have workers forked from it, replace it.

A worker forked from the template must be like a spawned one. So a template serves only as long as
the state that a process inherits from its parent is the same as at the template's start
(``identity``). A few differences remain:

- Modules were imported by the template before the main module, including side effects such as
  warning filters. The garbage collector does not list their objects.
- Workers of one template share addresses and string hashes, unless ``PYTHONHASHSEED`` is set, which
  also fixes the hashes in spawned workers.
- The kernel shows the environment variables of the template's start. Cgroup, namespaces,
  scheduling, I/O priority, and NUMA policy are the caller's at that time.
- At the end of a worker, environments and agent are deleted, ``atexit`` handlers run and files are
  flushed, but other objects and libraries are not finalized.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import spawn, util
from typing import Any

from rlpool.machine.interrupts import blocked_interrupts, defer_signals
from rlpool.machine.platform import file_of, inherited
from rlpool.workers.template import BOOT, MAX_MESSAGE_BYTES

_LOG = logging.getLogger("rlpool")

IMPORT_S = 120.0
"""Time limit for any one import of a template."""

_FORK_S = 20.0
"""Time limit for a fork: far more than it takes unless memory is short."""

_MAX_TRIES = 3
"""Templates that may end in a row without having started a worker; then workers are spawned."""

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37

_VOLATILE = b"PYTEST_CURRENT_TEST"
"""A variable that changes all the time and does not concern the libraries of a worker."""


def identity() -> tuple[Any, ...]:
    """Return the state that a process inherits, which another running one cannot take over.

    The interpreter and its flags, search path, environment variables, and ``inherited()``.
    """
    return (
        spawn.get_executable(),
        tuple(util._args_from_interpreter_flags()),  # type: ignore[attr-defined]
        tuple(_search_path()),
        frozenset(item for item in os.environb.items() if item[0] != _VOLATILE),
        *inherited(),
    )


def _search_path() -> list[str]:
    return [str(entry) or "." for entry in sys.path]


class UnsafeError(Exception):
    """Forking from a template is unsafe or impossible, for the reason given."""


class TemplateLostError(UnsafeError):
    """The template ended or does not reply; the next one may serve."""


class Template:
    """This process's only template, or why it has none. It costs a descriptor while it runs.

    Attributes:
        reason: Why workers are spawned, empty if they are not.
        lock: Held by the thread that starts, uses, or ends the template.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self.reason = ""
        self.lock = threading.RLock()
        self._modules = tuple(modules)
        self._process: Any = None  # until the first start
        self._socket: Any = None
        self._fits: Any = None  # the identity and modules for which it was started
        self._refused: Any = None  # the identity and modules for which there can be none
        self._n_lost = 0  # in a row, without having started a worker

    def is_up(self) -> bool:
        """Whether it runs, even if it no longer fits; reaps one that has died."""
        with defer_signals():  # Popen would keep its lock for ever
            return self._process is not None and self._process.poll() is None

    def add_modules(self, modules: Sequence[str]) -> None:
        """Add modules for the next process to import."""
        with self.lock:
            self._modules = tuple(dict.fromkeys([*self._modules, *modules]))

    def ready(self) -> bool:
        """Start a process that fits this one if none runs; returns whether there can be one."""
        with self.lock:
            while (wanted := why_impossible() or (identity(), self._modules)) != self._refused:
                if wanted == self._fits and self.is_up():
                    return True
                try:
                    if isinstance(wanted, str):
                        raise UnsafeError(wanted)
                    self._start()
                    return True
                except UnsafeError as error:
                    self._failed(wanted, error)
            return False

    def fork(self, fds: Sequence[int]) -> int:
        """Fork a worker, a child of this process; returns its process number.

        Args:
            fds: Descriptors to pass in addition to the standard ones.

        Raises:
            UnsafeError: If that is not possible; then there is no worker.
            OSError: If the system allows no further process or descriptor.
        """
        with self.lock:
            while self.ready():
                try:
                    return self._fork(fds)
                except UnsafeError as error:
                    self._failed(self._fits, error)
            raise UnsafeError(self.reason)

    def _fork(self, fds: Sequence[int]) -> int:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            request = pickle.dumps(list(map(int, blocked)))
            with _adopting_orphans():
                socket.send_fds(self._socket, [request], [0, 1, 2, *fds])
                pid, parent = self._received(_FORK_S)
                if pid > 0:
                    self._wait_for(parent)
        except OSError as error:
            raise TemplateLostError(str(error)) from error
        except BaseException:
            self.end()  # otherwise its reply would be taken for the reply to the next request
            raise
        if pid < 0:
            refusal = os.strerror(-pid)
            if -pid in (errno.EPERM, errno.ENOSYS):
                raise UnsafeError(f"the system does not fork for it: {refusal}")
            raise OSError(-pid, refusal)
        self._n_lost = 0
        return int(pid)

    def _wait_for(self, parent: int) -> None:
        """Wait for the end of a worker's parent, which this process may have adopted."""
        try:
            self._received(_FORK_S)
        except TemplateLostError:
            self.end()
            with suppress(ChildProcessError):
                os.waitpid(parent, 0)

    def _failed(self, wanted: Any, error: UnsafeError) -> None:
        """End a process that cannot serve; the next one may, unless there can be none."""
        self.end()
        if isinstance(error, TemplateLostError):
            self._n_lost += 1
            if self._n_lost < _MAX_TRIES:
                return
        self._refused, self._n_lost = wanted, 0
        if str(error) != self.reason:  # logged once
            # As text: a handler that keeps records would also keep the objects in the error's
            # traceback, including the memory of the batcher that requested a worker.
            self.reason = str(error)
            _LOG.warning("workers are spawned, not forked from a template: %s", self.reason)

    def _start(self) -> None:
        """Start another process, and again without each module that fails.

        Raises:
            UnsafeError: If there can be none, or it was lost.
        """
        self.end()
        self._fits, kind, module, text = None, "importing", "", ""
        with _adopting_orphans():
            pass  # a refusal here would apply to every worker
        try:
            self._start_process()
            while kind == "importing":
                module = text
                kind, text = self._received(IMPORT_S)
            if kind != "ready":
                raise UnsafeError(text)
        except UnsafeError as error:
            if not module:
                raise
            _LOG.warning("preload: %s is left out, workers import it: %s", module, str(error))
            self._modules = tuple(name for name in self._modules if name != module)
            self._start()
        else:
            self._fits, self.reason = (identity(), self._modules), ""

    def _start_process(self) -> None:
        flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
        about: dict[str, Any] = {"path": _search_path(), "argv": list(map(str, sys.argv))}
        with defer_signals(), blocked_interrupts():
            try:
                self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with there:
                    fd = there.fileno()
                    about.update(fd=fd, parent_pid=os.getpid(), modules=self._modules)
                    command = [spawn.get_executable(), *flags, "-c", BOOT, json.dumps(about)]
                    self._process = subprocess.Popen(command, pass_fds=[fd])
            except OSError as error:
                raise TemplateLostError(f"it cannot be started: {error}") from error

    def _received(self, timeout_s: float) -> Any:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        if not poller.poll(timeout_s * 1000):
            raise TemplateLostError(f"it takes longer than {timeout_s:g} s")
        words = b""
        with defer_signals(), suppress(OSError):
            words = self._socket.recv(MAX_MESSAGE_BYTES)
        if not words:
            self.end()
            raise TemplateLostError(f"it ended the process (exit code {self._process.returncode})")
        return pickle.loads(words)

    def end(self) -> None:
        """End the process, if there is one. Can be repeated."""
        with defer_signals():
            if self._process is not None:
                self._socket.close()
                with suppress(PermissionError):  # it ends by itself, as its socket is closed
                    self._process.kill()
                self._process.wait()

    def shutdown(self) -> None:
        """End the process, and forget the reason for having none."""
        with self.lock:
            self.end()
            self._refused, self._n_lost = None, 0

    def after_fork(self) -> None:
        """Reset the state in a forked process, which is not the template's parent."""
        if self._process is not None:
            self._socket.close()
            self._process.returncode = 0  # it is not a child of this process
        self.__init__(self._modules)  # type: ignore[misc]


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Become the parent of descendants whose parents end in the meantime.

    Raises:
        UnsafeError: If the system does not allow it.
    """
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    if prctl(_PR_SET_CHILD_SUBREAPER, 1):
        raise UnsafeError("the system does not let this process adopt orphans")
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, before)


def why_impossible() -> str:
    """Why this platform allows no template; ``""`` if it does."""
    if getattr(sys, "frozen", False):
        return "this program is frozen, so its interpreter cannot be started separately"
    is_complete = all(os.path.exists(file_of(fd)) for fd in range(3))
    return "" if is_complete else "a standard stream of this process is closed"
