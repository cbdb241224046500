"""How worker processes start: forked from a template that has imported everything, or spawned.

A process has at most one template, started with the first worker. Where forking is not proved safe
or not possible, workers are spawned, and the log says why; otherwise only time tells the
difference.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import (
    context,
    popen_forkserver,
    popen_spawn_posix,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from multiprocessing.context import SpawnProcess
from typing import Any

from rlpool.errors import SpecError
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.machine.worker_limits import FORKED_WORKER_BYTES, WORKER_BYTES
from rlpool.workers.parent_death import kill_when_closed
from rlpool.workers.process_state import identity
from rlpool.workers.template_handle import Template, TemplateLostError, UnsafeError

_LOG = logging.getLogger("rlpool")

_MAX_TRIES = 3
"""How often a template is started, or asked for a worker, that is lost meanwhile."""


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
        return _as_is, (reduction.DupFd(self._fd),)


def _as_is(value: Any) -> Any:
    return value


def process_class(start_method: str) -> type[SpawnProcess]:
    """What starts workers with a start method; also starts the template that it needs.

    Args:
        start_method: One of ``START_METHODS``.
    """
    with InterruptsHeld():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        resource_tracker.getfd()  # which unblocks signals when it starts its process
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if start_method == "spawn":
        return SpawnedProcess
    _templates.ready()
    return ForkedProcess


def bury() -> None:
    """Reap a template that has died."""
    _templates.is_up()


def why_spawned() -> str:
    """Why workers are spawned; ``""`` if there is a template, which is started for that."""
    return "" if _templates.ready() is not None else _templates.reason


def why_impossible() -> str:
    """Why this platform allows no template; ``""`` where it does."""
    if sys.platform != "linux":
        return f"that needs Linux, this is {sys.platform}"
    if getattr(sys, "frozen", False):
        return "this program is frozen, its interpreter cannot be started for that"
    try:
        is_complete = all(map(os.get_inheritable, range(3)))
    except OSError:
        is_complete = False
    return "" if is_complete else "a standard stream of this process is closed"


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


class ForkedProcess(SpawnedProcess):
    """The same, forked from the template where that is possible."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802
        with _templates.lock:
            for _ in range(_MAX_TRIES):
                template = _templates.ready()
                if template is None:
                    break
                with suppress(TemplateLostError):
                    return _ForkingPopen(process_obj, template)
        return _Popen(process_obj)


class _Popen(popen_spawn_posix.Popen):
    """Starts a process as multiprocessing does, which ends with this one from the start."""

    _fds: list[int]

    def _start(self, *fds: Any) -> int:
        """Start what runs in it; returns its process number.

        Args:
            fds: The resource tracker's descriptor, the pipe from which the process reads what it is
                given, and the pipe that is open while it lives.
        """
        executable: Any = spawn.get_executable()
        command: Any = spawn.get_command_line(tracker_fd=fds[0], pipe_handle=fds[1])
        kept = [*fds, *self._fds]
        pid: int = util.spawnv_passfds(executable, command, kept)
        return pid

    def _launch(self, process_obj: Any) -> None:
        given = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj._name), given)
            reduction.dump(process_obj, given)
        finally:
            context.set_spawning_popen(None)
        ends: list[int] = []
        try:
            ends += os.pipe()
            ends += os.pipe()
            child_reads, here_writes, self.sentinel, child_holds = ends
            self.pid = self._start(resource_tracker.getfd(), child_reads, child_holds)
            kill_when_closed(child_holds, self.pid)
        except BaseException:
            util.close_fds(*ends)  # type: ignore[attr-defined]
            raise
        util.close_fds(child_reads, child_holds)  # type: ignore[attr-defined]
        kept = here_writes, self.sentinel
        self.finalizer = util.Finalize(self, util.close_fds, kept)  # type: ignore[attr-defined]
        # It may have ended already, as the pipe tells.
        with suppress(BrokenPipeError), open(here_writes, "wb", closefd=False) as pipe:
            pipe.write(given.getbuffer())


class _ForkingPopen(_Popen):
    """The same, except that the interpreter is forked."""

    method = "template"
    DupFd = popen_forkserver._DupFd  # type: ignore[assignment]

    def __init__(self, process_obj: Any, template: Template) -> None:
        self._template = template
        super().__init__(process_obj)

    def duplicate_for_child(self, fd: int) -> int:
        """Send a descriptor along; returns its place, which stands for it in the pickle."""
        self._fds.append(fd)
        return len(self._fds) - 1

    def _start(self, *fds: int) -> int:
        return self._template.fork([*fds, *self._fds])


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
        self._refused: Any = None  # for which identity there is none

    def is_up(self) -> bool:
        """Whether there is one, though it may have to make way for another; reaps a dead one."""
        return self._template.is_alive()

    def add_modules(self, modules: Sequence[str]) -> None:
        """Let the next template import these as well."""
        with self.lock:
            self._modules = tuple(dict.fromkeys([*self._modules, *modules]))

    def ready(self) -> Template | None:
        """A template that fits this process; ``None`` if there cannot be one."""
        with self.lock:
            wanted = why_impossible() or (identity(), self._modules)
            if wanted == self._refused:
                return None
            try:
                if isinstance(wanted, str):
                    raise UnsafeError(wanted)
                if wanted != self._identity or not self._template.is_alive():
                    self._identity = None
                    self._start()
                    self._identity = wanted
            except UnsafeError as error:
                self._template.end()
                self._refused, why = wanted, str(error)
                if why != self.reason:  # logged once
                    _LOG.warning("workers are spawned, not forked from a template: %s", why)
                self.reason = why
                return None
            self.reason = ""
            return self._template

    def _start(self) -> None:
        """Start another template, again without each module that it cannot have.

        Raises:
            UnsafeError: If there can be none, or it was lost again and again.
        """
        n_left = _MAX_TRIES
        while True:
            self._template.end()
            self._template = template = Template()
            module = ""
            try:
                template.start([name for name in self._modules if name not in self._left_out])
                for module in template.imports():  # noqa: B007 (read below)
                    pass
                return
            except UnsafeError as error:
                if module:
                    self._left_out.add(module)
                    _LOG.warning("preload: %s is left out, workers import it: %s", module, error)
                    continue
                n_left -= 1
                if not n_left or not isinstance(error, TemplateLostError):
                    raise

    def shutdown(self) -> None:
        """End the template, and forget what was found out about others."""
        with self.lock:
            self._template.end()
            self._left_out.clear()
            self._refused = None

    def after_fork(self) -> None:
        """Start afresh in a process that was forked from this one: the template is not its own."""
        template = self._template
        self.__init__(self._modules)  # type: ignore[misc]
        template.forget()


_templates = _Templates()
atexit.register(_templates.shutdown)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_templates.after_fork)
