"""How worker processes start: forked from a template that has imported everything, or spawned.

A process has at most one template, started with the first worker. Where forking is not proved safe
or not possible, workers are spawned, and the log says why; otherwise only time tells the
difference.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import popen_spawn_posix, util
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import DupFd
from multiprocessing.resource_tracker import getfd as tracker_fd
from types import FunctionType, SimpleNamespace
from typing import Any

from rlpool.errors import SpecError
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.machine.worker_limits import FORKED_WORKER_BYTES, WORKER_BYTES
from rlpool.workers.parent_death import kill_when_closed
from rlpool.workers.process_state import identity
from rlpool.workers.template import PassedFd
from rlpool.workers.template_handle import (
    IMPORT_S,
    Template,
    TemplateLostError,
    TemplateSilentError,
    UnsafeError,
)

_LOG = logging.getLogger("rlpool")

_MAX_TRIES = 3
"""How often a template is started that is killed meanwhile."""

_PATIENCE = 10
"""How many times as long as it took to lose a template the next try waits."""


def preload(*modules: str) -> None:
    """Let workers start with modules imported, so that they need not import them one by one.

    The template process imports them, once, before the next worker starts. An import must not start
    threads or use a GPU. A module that does, or fails, is named in the log and left out: workers
    import it when they need it. What an import does to environment variables, ``sys.path``, and
    signal handlers holds in every worker, and each worker runs the ``atexit`` handlers that it
    registers; what it does to the working directory, the umask, and limits does not hold. Later
    changes to the modules' files are seen after ``shutdown()`` only.

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


class Inherited:
    """A descriptor that a worker gets when it starts: there, ``detach()`` gives its number.

    Args:
        fd: The descriptor.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_is, (DupFd(self._fd),)


def _as_is(value: Any) -> Any:
    return value


def process_class(start_method: str) -> type[SpawnProcess]:
    """What starts workers with a start method; also starts the template that it needs.

    Args:
        start_method: One of ``START_METHODS``.
    """
    with InterruptsHeld():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        tracker_fd()  # which unblocks signals when it starts its process
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if start_method == "spawn":
        return SpawnedProcess
    _templates.ready()
    return WorkerProcess


def bury() -> None:
    """Reap a template that has died, unless a thread is starting one."""
    _templates.end_unless_busy(only_dead=True)


def why_spawned() -> str:
    """Why workers are spawned; ``""`` if there is a template, which is started for that."""
    return "" if _templates.ready() is not None else _templates.reason


def why_impossible() -> str:
    """Why this platform allows no template; ``""`` where it does."""
    if sys.platform != "linux":
        return f"that needs Linux, this is {sys.platform}"
    if getattr(sys, "frozen", False):
        return "this program is frozen, its interpreter cannot be started for that"
    return ""


def memory_of(start_method: str) -> tuple[int, int]:
    """What workers take at the least: bytes of each, and bytes of all together besides.

    Args:
        start_method: One of ``START_METHODS``. For ``"auto"`` it is what a template and its workers
            take, which is less than what spawned ones do.
    """
    if start_method == "spawn" or why_impossible():
        return WORKER_BYTES, 0
    # What a template that runs takes is not free any more.
    return FORKED_WORKER_BYTES, 0 if _templates.is_up() else WORKER_BYTES - FORKED_WORKER_BYTES


class SpawnedProcess(SpawnProcess):
    """A spawned process that ends with the process that started it."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802
        return _Popen(process_obj)


class WorkerProcess(SpawnedProcess):
    """The same, forked from the template where that is possible."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802
        began_s = time.monotonic()
        with _templates.lock:
            for n_left in reversed(range(_MAX_TRIES)):
                template = _templates.ready()
                if template is None:
                    break
                try:
                    return _ForkingPopen(process_obj, template)
                except (TemplateLostError, UnsafeError) as error:
                    if not n_left or isinstance(error, UnsafeError):
                        _templates.refuse(error, began_s)
        return _Popen(process_obj)


class _Popen(popen_spawn_posix.Popen):
    """Starts a process as multiprocessing does."""

    def _start(self, path: Any, command: Any, fds: list[int]) -> int:
        pid: int = util.spawnv_passfds(path, command, fds)
        return pid

    def _launch(self, process_obj: Any) -> None:
        def start(path: Any, command: Any, fds: list[int]) -> int:
            pid = self._start(path, command, fds)
            # The last is one end of the pipe by which this process sees that the other one lives.
            kill_when_closed(fds[-1], pid)
            return pid

        # The standard library's own method, except for the call that starts a program.
        names = {**vars(popen_spawn_posix), "util": SimpleNamespace(**vars(util))}
        names["util"].spawnv_passfds = start
        launch: Any = super()._launch  # type: ignore[misc]
        with suppress(BrokenPipeError):  # it has ended already, as the pipe tells
            FunctionType(launch.__code__, names)(self, process_obj)


class _ForkingPopen(_Popen):
    """The same, except that the interpreter is forked."""

    method = "template"
    DupFd = PassedFd  # type: ignore[assignment]

    def __init__(self, process_obj: Any, template: Template) -> None:
        self._fds: list[int]
        self._template = template
        super().__init__(process_obj)

    def duplicate_for_child(self, fd: int) -> int:
        """Send a descriptor along; returns its place, which stands for it in the pickle."""
        self._fds.append(fd)
        return len(self._fds) - 1

    def _start(self, path: Any, command: Any, fds: list[int]) -> int:
        return self._template.fork(fds)


class _Templates:
    """The one template of this process, or why there is none.

    Attributes:
        reason: Why workers were spawned last.
        lock: Taken by whoever starts, uses, or ends the template.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self.reason = ""
        self.lock = threading.RLock()
        self._modules = tuple(modules)
        self._left_out: set[str] = set()
        self._template = Template()
        self._identity: Any = None  # what it has in common with its workers, once it is ready
        self._refused: Any = ()  # for which identity there is none
        self._refused_until = 0.0

    def is_up(self) -> bool:
        """Whether there is one, though it may have to make way for another."""
        with self.lock:
            return self._template.is_alive()

    def add_modules(self, modules: Sequence[str]) -> None:
        """Let the next template import these as well."""
        with self.lock:
            self._modules = tuple(dict.fromkeys([*self._modules, *modules]))

    def ready(self) -> Template | None:
        """A template that fits this process; ``None`` if there cannot be one."""
        with self.lock:
            wanted, began_s = self._wanted(), time.monotonic()
            if wanted == self._refused and began_s < self._refused_until:
                return None
            try:
                if isinstance(wanted, str):
                    raise UnsafeError(wanted)
                if wanted != self._identity or not self._template.is_alive():
                    self._start()
                    self._identity = wanted
            except (TemplateLostError, UnsafeError) as error:
                self.refuse(error, began_s)
                return None
            self.reason = ""
            return self._template

    def _wanted(self) -> Any:
        """What a template must have in common with this process, or why there can be none."""
        with InterruptsHeld():  # whose errors could be taken for those of /proc
            return why_impossible() or (identity(), self._modules)

    def refuse(self, error: Exception, began_s: float) -> None:
        """Do without a template: for some time if it was lost, for good if none is safe.

        Args:
            error: Which of both.
            began_s: When it was tried, on the monotonic clock.
        """
        with self.lock:
            self._template.end()
            self._refused, self._refused_until = self._wanted(), math.inf
            if isinstance(error, TemplateLostError):
                now_s = time.monotonic()
                self._refused_until = now_s + _PATIENCE * (now_s - began_s)
            if str(error) != self.reason:  # logged once
                _LOG.warning("workers are spawned, not forked from a template: %s", str(error))
            self.reason = str(error)

    def _start(self) -> None:
        """Start another template, again without each module that it cannot have.

        Raises:
            UnsafeError: If there can be none.
            TemplateLostError: If it was killed again and again.
        """
        n_killed = 0
        while True:
            modules = [module for module in self._modules if module not in self._left_out]
            self._template.end()  # the one before, or that of a signal handler that came in between
            self._template = template = Template()
            try:
                template.start(modules)
                module, why, was_killed = _follow_imports(template)
                if not why:
                    return
            except BaseException:
                template.end()
                raise
            n_killed += was_killed
            if was_killed and n_killed < _MAX_TRIES:
                continue
            if not module:
                raise (TemplateLostError if was_killed else UnsafeError)(why)
            n_killed = 0
            self._left_out.add(module)
            _LOG.warning("preload: %s is left out, workers import it: %s", module, why)

    def shutdown(self) -> None:
        """End the template, and forget what was found out about others."""
        with self.lock:
            self._template.end()
            self._left_out.clear()
            self._refused = ()

    def end_unless_busy(self, *, only_dead: bool = False) -> None:
        """End the template, unless another thread is using it.

        Args:
            only_dead: Leave it alone while it lives.
        """
        if self.lock.acquire(blocking=False):
            try:
                if not (only_dead and self._template.is_alive()):
                    self._template.end()
            finally:
                self.lock.release()

    def after_fork(self) -> None:
        """Start afresh in a process that was forked from this one: the template is not its own."""
        template = self._template
        self.__init__(self._modules)  # type: ignore[misc]
        template.forget()


def _follow_imports(template: Template) -> tuple[str, str, bool]:
    """Wait until a template is ready.

    Returns:
        If it will not be: which of the user's modules it was importing (``""`` for none), what went
        wrong, and whether somebody killed it. Else nothing is wrong.
    """
    module = ""
    try:
        while True:
            kind, *words = template.told()
            if kind == "ready":
                return "", "", False
            if kind == "refused":
                return module, words[0], False
            module = words[0]
    except TemplateLostError as error:
        doing = "importing it" if module else "importing what every worker needs"
        if isinstance(error, TemplateSilentError):
            return module, f"{doing} takes longer than {IMPORT_S:g} s", False
        code = template.end()
        return module, f"{doing} ended the process (exit code {code})", code < 0


_templates = _Templates()
atexit.register(_templates.end_unless_busy)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_templates.after_fork)
