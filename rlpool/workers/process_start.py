"""The start of worker processes: forked from a template that has imported everything, or spawned.

A process has at most one template, started with the first worker. Where forking is impossible or
not known to be safe, workers are spawned and the log says why. Both kinds behave the same, but
forked workers start faster and share the memory of the imports.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
from rlpool.machine.interrupts import blocked_interrupts, defer_signals
from rlpool.machine.platform import at_fork, kill_when_closed
from rlpool.workers.logs import current_levels
from rlpool.workers.template_handle import Template, UnsafeError
from rlpool.workers.wire import CallerPipe, Inherited, pipe_ends
from rlpool.workers.worker_process import Place, WorkerMain, run_connected


def preload(*modules: str) -> None:
    """Import modules once for all workers instead of in each of them.

    The template process imports them before the next worker starts. An import must not start
    threads or use a GPU. A module that does so or fails is named in the log and left out; workers
    then import it when they need it. Effects of an import on environment variables, the umask and
    signal handlers apply in every worker, and each worker runs the ``atexit`` handlers that it
    registers. Effects on ``sys.path``, the working directory and limits do not. Later changes to
    the modules' files take effect only after ``shutdown()``.

    Args:
        modules: Names such as ``"mujoco"`` or ``"my_package.envs"``, in addition to those of
            earlier calls.

    Raises:
        SpecError: If one is not a module's name, or is that of the main module.

    Example:
        >>> preload("json", "logging.handlers")  # imported once, before the next worker starts
    """
    for name in modules:
        is_name = isinstance(name, str) and all(part.isidentifier() for part in name.split("."))
        if not is_name or name.split(".")[0] in ("__main__", "__mp_main__"):
            raise SpecError(
                f"{name!r} is not the name of a module that can be imported",
                fix='pass names, such as "my_package.envs"; move definitions of your script into '
                "a separate module",
            )
    _template.add_modules(modules)


def shutdown() -> None:
    """End the template process, if there is one; the next worker starts another.

    Running workers continue. Also called when Python exits.

    Example:
        >>> shutdown()  # after a change to a module that was given to preload()
    """
    _template.shutdown()


def prepare(start_method: str) -> None:
    """Start the helper processes that a worker needs, which may take seconds.

    Args:
        start_method: ``"auto"`` or ``"spawn"``.
    """
    with defer_signals():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        resource_tracker.getfd()  # which unblocks signals when it starts its process
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if start_method != "spawn":
        _template.ready()


def why_spawned() -> str:
    """Why workers are spawned; ``""`` if there is a template. Starts one to find out."""
    return "" if _template.ready() else _template.reason


def launch(
    run: WorkerMain, place: Place, control_fd: int, start_method: str
) -> tuple[CallerPipe, SpawnProcess]:
    """Start a worker process; to be called within ``starting_processes``.

    Args:
        run: Main function of the process.
        place: Which worker it is.
        control_fd: Descriptor of the shared record.
        start_method: ``"auto"`` or ``"spawn"``.

    Raises:
        OSError: If the system allows no further process or descriptor.
    """
    here, there = pipe_ends()
    with there:  # must not stay open here, so that the worker's death is an end of file
        try:
            worker = _Process(
                target=run_connected,
                args=(current_levels(), run, place, there, Inherited(control_fd)),
                name=f"rlpool-worker-{place.worker}",
                daemon=False,  # environments may start processes of their own
            )
            worker.is_forked = start_method != "spawn"
            worker.start()
        except BaseException:
            here.close()
            raise
    return CallerPipe(here), worker


_one_at_a_time = threading.RLock()
"""Starting a process changes global state and opens descriptors that no fork must inherit."""


@contextmanager
def starting_processes() -> Iterator[None]:
    """Hold back signal handlers, other threads and forks while processes start.

    Without this, starting a process would set the caller's default start method if it is undecided,
    refuse a daemonic caller, such as a worker of a ``DataLoader`` (such a process is killed and
    would leave children of multiprocessing behind, but these end with it), and let workers import a
    main module that is not a file, such as ``<stdin>``.
    """
    main_module = vars(sys.modules["__main__"])
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    with defer_signals(), _one_at_a_time, blocked_interrupts():
        method: Any = multiprocessing.get_start_method(allow_none=True)  # None, whatever its type
        daemon = {"daemon": config.pop("daemon")} if "daemon" in config else {}
        path = main_module.get("__file__")
        is_hidden = path is not None and not os.path.exists(path)
        if is_hidden:
            del main_module["__file__"]
        try:
            yield
        finally:
            config.update(daemon)
            if is_hidden:
                main_module["__file__"] = path
            if method is None:
                multiprocessing.set_start_method(None, force=True)


class _Process(SpawnProcess):
    """A process that ends with the process that started it.

    Attributes:
        is_forked: Whether it is forked from the template where possible.
        life_line: One end of a pair of sockets, held only by the process, see ``end_with_parent``.
    """

    is_forked = False
    life_line: Inherited | int
    _start_method: Any = None  # the default in the process is the same as here

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802
        if process_obj.is_forked:
            with suppress(UnsafeError):
                return _ForkingPopen(process_obj)
        return _Popen(process_obj)


class _Popen(popen_spawn_posix.Popen):
    """Starts a process as multiprocessing does; it ends with this one from its first moment."""

    _fds: list[int]

    def _start(self, *fds: Any) -> int:
        """Start the interpreter; returns its process number.

        Args:
            fds: The resource tracker's descriptor, and the pipe from which the process reads its
                arguments.
        """
        executable: Any = spawn.get_executable()
        command: Any = spawn.get_command_line(tracker_fd=fds[0], pipe_handle=fds[1])
        kept = [*fds, *self._fds]
        pid: int = util.spawnv_passfds(executable, command, kept)
        return pid

    def _launch(self, process_obj: Any) -> None:
        given = io.BytesIO()
        ends: list[int] = []
        try:
            ends += os.pipe()
            ends += (end.detach() for end in socket.socketpair())
            child_reads, here_writes, self.sentinel, child_holds = ends
            context.set_spawning_popen(self)
            try:
                process_obj.life_line = Inherited(child_holds)
                reduction.dump(spawn.get_preparation_data(process_obj._name), given)
                reduction.dump(process_obj, given)
            finally:
                context.set_spawning_popen(None)
            self.pid = self._start(resource_tracker.getfd(), child_reads)
            kill_when_closed(child_holds, self.pid)
            # Its process group ends with it, even if this process is busy or ends before it
            # notices. One pair of sockets serves both directions: closing either end notifies the
            # other.
            kill_when_closed(self.sentinel, -self.pid)
        except BaseException:
            util.close_fds(*ends)  # type: ignore[attr-defined]
            raise
        util.close_fds(child_reads, child_holds)  # type: ignore[attr-defined]
        kept = here_writes, self.sentinel
        self.finalizer = util.Finalize(self, util.close_fds, kept)  # type: ignore[attr-defined]
        # It may have ended already; then the pipe is broken.
        with suppress(BrokenPipeError), open(here_writes, "wb", closefd=False) as pipe:
            pipe.write(given.getvalue())


class _ForkingPopen(_Popen):
    """The same, with an interpreter forked from the template."""

    method = "template"  # for processes forked from it
    DupFd = popen_forkserver._DupFd  # type: ignore[assignment]

    def duplicate_for_child(self, fd: int) -> int:
        """Send a descriptor along; returns its position, which represents it in the pickle."""
        self._fds.append(fd)
        return len(self._fds) - 1

    def _start(self, *fds: int) -> int:
        return _template.fork([*fds, *self._fds])


_template = Template()
atexit.register(_template.shutdown)
at_fork(
    before=_one_at_a_time.acquire,
    after_in_parent=_one_at_a_time.release,
    after_in_child=_one_at_a_time.release,
)
at_fork(after_in_child=_template.after_fork)
