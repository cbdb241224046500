"""Starts workers: forked from a template that has imported everything, or spawned.

There is one template per process, made when the first worker is started. It costs this process
three descriptors. Where forking is not proved safe, or is not possible, workers are spawned, and
the log says why; a worker cannot tell the difference but by how long it took.
"""

from __future__ import annotations

import atexit
import io
import logging
import math
import os
import pickle
import signal
import struct
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import popen_spawn_posix, spawn, util
from multiprocessing.context import SpawnProcess, set_spawning_popen
from multiprocessing.reduction import dump
from multiprocessing.resource_tracker import getfd as tracker_fd
from typing import Any

from rlpool.errors import SpecError
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.machine.worker_limits import FORKED_WORKER_BYTES, WORKER_BYTES
from rlpool.workers.leash import CAN_KILL
from rlpool.workers.process_state import ProcessState, has_umask, identity
from rlpool.workers.template import PassedFd
from rlpool.workers.template_handle import (
    IMPORT_S,
    Template,
    TemplateLostError,
    TemplateSilentError,
    UnsafeError,
    end_child,
)

_LOG = logging.getLogger("rlpool")

_MAX_TRIES = 3
"""How often a template is started that somebody ends meanwhile."""

_PATIENCE = 10
"""How many times as long as it took to find out that there is no template the next try waits."""

_CRASHES = frozenset(
    getattr(signal, f"SIG{name}") for name in ("SEGV", "BUS", "ILL", "FPE", "ABRT", "SYS", "TRAP")
)
"""Signals that a process brings upon itself. Any other says nothing about what it imports."""


def preload(*modules: str) -> None:
    """Let workers start with modules imported, so that they need not import them one by one.

    The template process imports them, once, before the next worker is started. Their import must
    not start threads or use a GPU; one that does, or fails, is named in the log and left out: the
    workers import it when they need it. What an import does to environment variables, ``sys.path``
    and signal handlers holds in every worker, and what it leaves to ``atexit`` every worker does;
    what it does to the working directory, the umask and limits does not hold. What is changed in
    the modules' files later is seen after ``shutdown()`` only.

    Args:
        modules: Names, such as ``"mujoco"`` or ``"my_package.envs"``. Those of earlier calls stay.

    Raises:
        SpecError: If one is not the name of a module that can be imported by name.
    """
    for name in modules:
        is_name = isinstance(name, str) and all(part.isidentifier() for part in name.split("."))
        if not is_name or name.split(".")[0] in ("__main__", "__mp_main__"):
            raise SpecError(
                f"{name!r} is not the name of a module that can be imported",
                fix='pass names, such as "my_package.envs"; put what your script defines into '
                "a module of its own",
            )
    _templates.add_modules(modules)


def shutdown() -> None:
    """End the template process, if there is one; the next worker starts another.

    Workers that run go on. Called when Python exits.
    """
    _templates.shutdown()


class WorkerProcess(SpawnProcess):
    """A process as if spawned, forked from a template where that is possible."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802
        began_s = time.monotonic()
        for n_left in reversed(range(_MAX_TRIES)):
            template = _templates.ready()
            if template is None:
                break
            try:
                return _Popen(process_obj, template)
            except (TemplateLostError, UnsafeError) as error:
                if not n_left or isinstance(error, UnsafeError):
                    _templates.refuse(error, began_s)
        return popen_spawn_posix.Popen(process_obj)


def process_class(start_method: str) -> type[SpawnProcess]:
    """What starts workers with a start method; makes sure that a template is there if need be.

    Args:
        start_method: One of ``START_METHODS``.
    """
    with InterruptsHeld():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        tracker_fd()  # which unblocks signals when it starts its process
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if start_method == "spawn":
        return SpawnProcess
    _templates.ready()
    return WorkerProcess


def bury() -> None:
    """Clear away a template that died meanwhile, of which the system keeps a trace until then."""
    _templates.end_unless_busy(only_dead=True)


def why_spawned() -> str:
    """Why workers are spawned; ``""`` if there is a template, which is started for that."""
    return "" if _templates.ready() is not None else _templates.reason


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def why_impossible() -> str:
    """Why this platform allows no template; ``""`` where it does."""
    if sys.platform != "linux":
        return f"that needs Linux, this is {sys.platform}"
    if not CAN_KILL:
        return "this Python cannot let the kernel end processes: fcntl lacks F_SETSIG"
    if not has_umask():
        return "that needs Linux 4.7 with /proc"
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the working directory was removed"
    if getattr(sys, "frozen", False):
        return "this program is frozen, its interpreter cannot be started for that"
    return ""


def memory_of(start_method: str) -> tuple[int, int]:
    """What workers take at the least: bytes of each, and of all together besides.

    Args:
        start_method: One of ``START_METHODS``. What ``"auto"`` ends in is not known before it is
            tried: it is what a template and its workers take, which is less.
    """
    if start_method == "spawn" or why_impossible():
        return WORKER_BYTES, 0
    # What a template that runs takes is not free any more.
    return FORKED_WORKER_BYTES, 0 if _templates.is_up() else WORKER_BYTES - FORKED_WORKER_BYTES


class _Popen(popen_spawn_posix.Popen):
    """Starts a process as ``multiprocessing`` does, but for the interpreter, which is forked."""

    method = "template"
    DupFd = PassedFd  # type: ignore[assignment]

    def __init__(self, process_obj: Any, template: Template) -> None:
        self._passed: list[int] = []
        self._template: Template | None = template
        super().__init__(process_obj)

    def duplicate_for_child(self, fd: int) -> int:
        """Send a descriptor along; returns what stands for it in the pickle."""
        self._passed.append(fd)
        return len(self._passed) - 1

    def _launch(self, process_obj: Any) -> None:
        template, self._template = self._template, None
        ends: list[int] = []
        pid = 0
        try:
            ends += (pipe := os.pipe())
            ends += (sentinel := os.pipe())
            self._passed += [pipe[0], tracker_fd()]  # type: ignore[list-item]
            payload = self._payload(process_obj, template.search_path)  # type: ignore[union-attr]
            self._passed.append(sentinel[1])  # which is open as long as the worker lives
            pid = template.fork(self._passed)  # type: ignore[union-attr]
            for end in (pipe[0], sentinel[1]):
                ends.remove(end)
                os.close(end)
            with suppress(BrokenPipeError), open(pipe[1], "wb", closefd=False) as stream:
                stream.write(payload)
        except BaseException:
            if pid:
                end_child(pid)
            for end in ends:
                os.close(end)
            raise
        self.pid = pid
        self.sentinel = sentinel[0]
        # The other end of its pipe tells the worker that this process lives.
        self.finalizer = util.Finalize(self, util.close_fds, ends)  # type: ignore[attr-defined]

    def _payload(self, process_obj: Any, search_path: list[str] | None) -> bytes:
        """What the worker reads: its state, and then what a spawned process does."""
        preparation = spawn.get_preparation_data(process_obj._name)
        if search_path is not None:
            preparation["sys_path"] = search_path
        state = pickle.dumps(ProcessState.now())
        stream = io.BytesIO()
        stream.write(struct.pack("!i", len(state)) + state)  # as a Connection receives it
        set_spawning_popen(self)
        try:
            dump(preparation, stream)
            dump(process_obj, stream)
        finally:
            set_spawning_popen(None)
        return stream.getvalue()


class _Templates:
    """The one template of this process, or why there is none.

    Attributes:
        reason: Why workers were spawned last.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self.reason = ""
        self._lock = threading.RLock()
        self._modules = tuple(modules)
        self._left_out: set[str] = set()
        self._template = Template()
        self._identity: Any = None  # of what it is like, once it is ready
        self._refused: Any = ()  # what there is no template for
        self._refused_until = 0.0

    def is_up(self) -> bool:
        """Whether there is one, though it may have to make way for another."""
        with self._lock:
            return self._template.is_alive()

    def add_modules(self, modules: Sequence[str]) -> None:
        """Let the next template import these as well."""
        with self._lock:
            self._modules = tuple(dict.fromkeys([*self._modules, *modules]))

    def ready(self) -> Template | None:
        """A template that is like this process; ``None`` if there cannot be one."""
        with self._lock:
            wanted = self._wanted()
            began_s = time.monotonic()
            if wanted == self._refused and began_s < self._refused_until:
                return None
            try:
                if wanted is None:
                    raise UnsafeError(why_impossible())
                if wanted != self._identity or not self._template.is_alive():
                    self._start()
                    self._identity = wanted
            except (TemplateLostError, UnsafeError) as error:
                self.refuse(error, began_s)
                return None
            self.reason = ""
            return self._template

    def _wanted(self) -> Any:
        """What a template is to be like, ``None`` if there can be none here."""
        with InterruptsHeld():  # whose errors could be taken for those of /proc
            return None if why_impossible() else (identity(), self._modules)

    def refuse(self, error: Exception, began_s: float) -> None:
        """Do without a template: for some time if it was lost, for good if none is safe.

        Args:
            error: Which of both.
            began_s: When it was tried, on the monotonic clock.
        """
        with self._lock:
            self._end()
            self._refused = self._wanted()
            now_s = time.monotonic()
            self._refused_until = math.inf
            if isinstance(error, TemplateLostError):
                took_s = now_s - began_s
                self._refused_until = now_s + _PATIENCE * took_s
            if str(error) != self.reason:  # told once
                _LOG.warning("workers are spawned, not forked from a template: %s", str(error))
            self.reason = str(error)

    def _start(self) -> None:
        """Start another template.

        Raises:
            UnsafeError: If there can be none.
            TemplateLostError: If there is none this time.
        """
        n_tries = 0
        while n_tries < _MAX_TRIES:
            n_tries += 1
            modules = [m for m in self._modules if m not in self._left_out]
            self._end()  # the one before; or that of a signal handler that came in between
            self._template = Template()
            try:
                self._template.start(modules)
                if self._follow_imports(self._template, n_tries == _MAX_TRIES):
                    return
            except BaseException:
                self._end()
                raise
            if self._left_out.intersection(modules):
                n_tries = 0
        raise TemplateLostError("it was killed while it started")

    def _follow_imports(self, template: Template, is_last_try: bool) -> bool:
        """Follow a template's imports; returns whether it has started, else another one may.

        Raises:
            UnsafeError: If no other one will.
        """
        module = ""
        try:
            while True:
                kind, *words = template.told()
                if kind == "ready":
                    return True
                module = words[0]
                if kind != "importing":
                    self._leave_out(module, words[1])
                if kind == "refused":
                    template.end()
                    return False
        except TemplateSilentError:
            template.end()
            self._leave_out(module, f"{_importing(module)} takes longer than {IMPORT_S:g} s")
        except TemplateLostError:
            code = template.end()
            if code >= 0 or -code in _CRASHES or (module and is_last_try):
                how = f"exit code {code}" if code >= 0 else _name_of(-code)
                self._leave_out(module, f"{_importing(module)} ended the process ({how})")
        return False

    def _leave_out(self, module: str, why: str) -> None:
        """Do without a module of the user's.

        Raises:
            UnsafeError: If it is none, but what every worker needs.
        """
        if not module:
            raise UnsafeError(why)
        self._left_out.add(module)
        _LOG.warning("preload: %s is left out, workers import it: %s", module, why)

    def shutdown(self) -> None:
        """End the template, and forget what was found out about others."""
        with self._lock:
            self._end()
            self._left_out.clear()
            self._refused = ()

    def end_unless_busy(self, *, only_dead: bool = False) -> None:
        """End the template, or clear it away if it died; one that a thread is starting stays.

        Args:
            only_dead: Leave it alone while it lives.
        """
        if self._lock.acquire(blocking=False):
            try:
                if not (only_dead and self._template.is_alive()):
                    self._end()
            finally:
                self._lock.release()

    def _end(self) -> None:
        self._identity = None
        self._template.end()

    def after_fork(self) -> None:
        """Begin anew in a process that was forked from this one: the template is not its own."""
        template = self._template
        self.__init__(self._modules)  # type: ignore[misc]
        template.forget()


def _importing(module: str) -> str:
    return "importing it" if module else "importing what every worker needs"


_templates = _Templates()
atexit.register(_templates.end_unless_busy)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_templates.after_fork)
