"""The template: a process that has imported what every worker needs, and only forks workers.

It runs nothing else. It makes no environment, computes nothing with torch, starts no thread, and
knows nothing of the user's program, so that a fork of it is like a process that was just spawned,
but for the imports, whose memory all of them share. ``warm_start`` is the caller's side.

Its caller sends descriptors for each worker and is answered with the worker's process number, or
with minus an error number. In the fork ``serve`` returns, and what runs next is what runs in a
process that multiprocessing spawned.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import gc
import importlib.util
import io
import mmap
import multiprocessing
import os
import pickle
import re
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import spawn
from multiprocessing.connection import Connection
from multiprocessing.spawn import spawn_main
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from rlpool.workers.process_state import ProcessState, hard_limits
from rlpool.workers.process_title import set_title
from rlpool.workers.sibling import SiblingForks

BOOT = (
    "import gc, json, os, sys; gc.disable(); "
    'os.environ["OPENBLAS_NUM_THREADS"] = "1"; '
    "caller, numbers, modules = json.loads(sys.argv[1]), sys.argv[2:6], sys.argv[6:]; "
    'sys.path[:], sys.argv[:] = caller["path"], caller["argv"]; '
    "from rlpool.workers.template import serve; "
    'run = serve(*map(int, numbers), modules, caller["main"]); run()'
)
"""What its interpreter runs. The garbage collector is off from the start: a collection would leave
holes in memory that workers fill, each with a copy of the page. OpenBLAS starts its threads when
NumPy is imported."""

_NEEDED = (
    "cloudpickle",
    "gymnasium.envs.classic_control",
    "multiprocessing.popen_spawn_posix",
    "multiprocessing.resource_tracker",
    "rlpool",
    "runpy",
)
"""Modules that (nearly) every worker needs and that are not imported by this one."""

REQUEST = struct.Struct("!BBq")
"""Which of the standard descriptors are sent, as a mask; how many descriptors in all; how many
processes the caller's user may have."""

MAX_FDS = 250
"""What the kernel lets one message carry is 253."""

SHORTAGES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""Errors of a system that can fork, but not now."""

_PARENT_CHECK_MS = 1000
"""How often the template looks whether its parent changed, in case its socket's other end lives on
in some process that the parent forked."""

_THREAD_END_S = 0.1
"""How long the system may show a thread that has been joined: far more than it does."""

_BLAS_VARIABLES = (
    *("OPENBLAS_NUM_THREADS", "OPENBLAS_DEFAULT_NUM_THREADS"),
    *("GOTO_NUM_THREADS", "OMP_NUM_THREADS"),
)
"""Where OpenBLAS looks for its number of threads, in this order."""

_BLAS_NAMES = tuple(
    f"{prefix}openblas_set_num_threads{suffix}"
    for prefix in ("", "scipy_")
    for suffix in ("", "64_", "_64")
)


class PassedFd:
    """A descriptor in the pickle of what a forked worker is given.

    Args:
        index: Which of those that were sent with the request.
    """

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        """Its number in this process."""
        return _passed[self._index]


_passed: list[int] = []
"""In a forked worker: descriptors that came with the request for it."""


def serve(
    parent_pid: int, fd: int, note_fd: int, leash_fd: int, modules: Sequence[str], main_file: str
) -> Callable[[], None]:
    """Fork workers until the caller is gone; returns in workers only, with what they go on with.

    Args:
        parent_pid: The caller.
        fd: A socket whose other end the caller has. It is told, as pickled tuples, ``importing``
            and ``missing`` for modules, ``refused`` if this template cannot serve, and ``ready``,
            by a first fork, with ``sys.path`` if the imports of modules changed it and with the
            fork's parent.
        note_fd: Memory to which the number of each new process is written.
        leash_fd: What ends this process with the caller, and is to be kept open.
        modules: Names of modules of the user's choice, to be imported too.
        main_file: The file of the caller's main module, which is none of them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_title("rlpool-template")
    # However few the caller may open: a worker gets its limits in time.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    caller = socket.socket(fileno=fd)
    try:
        forks = _proved_forks(caller, note_fd, modules, main_file)
    except Exception as error:
        with suppress(OSError):  # the caller is gone
            _tell(caller, "refused", "", str(error) or type(error).__name__)
        os._exit(0)
    worker = _Server(caller, forks, parent_pid).run()
    if worker is None:
        os._exit(0)
    os.close(leash_fd)
    return worker


def _proved_forks(
    caller: socket.socket, note_fd: int, modules: Sequence[str], main_file: str
) -> SiblingForks:
    """Import everything; what forks workers after that.

    Raises:
        OSError: If that would not be safe, or cannot be done.
    """
    forks = SiblingForks(mmap.mmap(note_fd, mmap.PAGESIZE))
    os.close(note_fd)
    for name in _NEEDED:
        importlib.import_module(name)
    if reason := _unsafe():
        raise OSError(reason)
    path_before = list(sys.path)
    _import_all(caller, modules, main_file)
    # What they clean up is everybody's; and torch takes its tables to pieces, which takes 50 ms.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    _drop_stdio(range(3))
    importlib.invalidate_caches()  # once for all workers, who look for modules' files themselves
    gc.freeze()
    ready = "ready", None if sys.path == path_before else list(map(str, sys.path))
    try:
        if forks.fork() == 0:
            _tell(caller, *ready, os.getppid())
            os._exit(0)
    except OSError as error:
        if error.errno not in SHORTAGES:
            raise OSError(f"the system does not fork for it: {error.strerror}") from error
        _tell(caller, *ready, os.getppid())  # this is proved another time
    return forks


def _import_all(caller: socket.socket, modules: Sequence[str], main_file: str) -> None:
    """Import modules of the user's.

    Ends this process, so that another one does without, if a module fails or makes forking unsafe:
    it may have done half of what it does.
    """
    _drop_stdio(range(1))  # spawned workers have no input either
    directory = os.getcwd()
    before = hard_limits(), os.getpriority(os.PRIO_PROCESS, 0)
    # What starts processes when it is imported is refused, as in a worker.
    this_process: Any = multiprocessing.current_process()
    this_process._inheriting = True
    for name in modules:
        _tell(caller, "importing", name)
        kind = why = ""
        try:
            spec = importlib.util.find_spec(name)
            if spec and spec.origin and os.path.realpath(spec.origin) == main_file:
                raise ImportError("it is the main module, which each worker imports for itself")
            importlib.import_module(name)
        except BaseException as error:
            kind, why = "refused", " ".join(f"{type(error).__name__}: {error}".split())[:300]
            if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
                kind = "missing"
        if reason := _unsafe():
            kind, why = "refused", reason
        elif (hard_limits(), os.getpriority(os.PRIO_PROCESS, 0)) != before:
            kind, why = "refused", "it changes hard limits or the nice value, for all workers"
        if kind:
            _tell(caller, kind, name, why)
        if kind == "refused":
            os._exit(0)
        # It may have changed what this process depends on.
        os.chdir(directory)
        gc.disable()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    del this_process._inheriting


def _tell(caller: socket.socket, *words: Any) -> None:
    caller.send(pickle.dumps(words))


def _unsafe() -> str:
    """Why this process should not be forked, ``""`` if nothing speaks against it."""
    deadline_s = time.monotonic() + _THREAD_END_S
    while (n_threads := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    if n_threads != 1:
        return f"it has {n_threads} threads"
    has_context: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if has_context or any(name.startswith("/dev/nvidia") for name in _open_files()):
        return "it has a CUDA context"
    try:
        _set_blas_threads(1)  # by which it is known to be possible
    except OSError as error:
        return str(error)
    return ""


def _open_files() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing
            yield os.readlink(f"/proc/self/fd/{fd}")


def _set_blas_threads(number: int) -> None:
    """Set the number of threads of every OpenBLAS in this process.

    Raises:
        OSError: If one of them offers no way.
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[5] for line in lines if "openblas" in line}
    for path in sorted(path for path in files if "openblas" in os.path.basename(path)):
        library = ctypes.CDLL(path)
        found = [getattr(library, name) for name in _BLAS_NAMES if hasattr(library, name)]
        if not found:
            raise OSError(f"{path} has no function that sets its number of threads")
        found[0](number)


def _wanted_blas_threads() -> int:
    """How many threads OpenBLAS starts in a process with these variables and cores."""
    n_cores = len(os.sched_getaffinity(0))
    for name in _BLAS_VARIABLES:
        # As C reads numbers: "2,1", which says something to OpenMP, is 2.
        digits = re.match(r"\s*\+?(\d+)", os.environ.get(name, ""))
        if digits and (number := int(digits[1])) > 0:
            return min(number, n_cores)
    return n_cores


def _drop_stdio(fds: Iterable[int]) -> None:
    """Keep nothing open that the caller reads or writes; workers are sent the real ones."""
    _flush()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        os.dup2(nowhere, fd)
    if nowhere > 2:
        os.close(nowhere)
    _flush()  # what nobody took: every worker would print it


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # there may be none, or nobody at its other end
            stream.flush()


class _Server:
    """Answers requests.

    Args:
        caller: Where they come from.
        forks: What forks.
        parent_pid: The caller, while it lives.
    """

    def __init__(self, caller: socket.socket, forks: SiblingForks, parent_pid: int) -> None:
        self._caller = caller
        self._forks = forks
        self._parent_pid = parent_pid

    def run(self) -> Callable[[], None] | None:
        """Serve; returns in workers what to go on with, and ``None`` when the caller is gone."""
        poller = select.poll()
        poller.register(self._caller, select.POLLIN)
        while os.getppid() == self._parent_pid:
            if not poller.poll(_PARENT_CHECK_MS):
                continue
            words, fds, _, _ = socket.recv_fds(self._caller, REQUEST.size, MAX_FDS)
            if not words:
                return None
            standard, n_fds, most_processes = REQUEST.unpack(words)
            answer = -errno.EMFILE
            if len(fds) == n_fds:
                answer = self._fork(most_processes)
            if answer == 0:
                self._caller.close()
                return _begin_worker(standard, fds)
            for fd in fds:
                os.close(fd)
            self._caller.send(struct.pack("!i", answer))
        return None

    def _fork(self, most_processes: int) -> int:
        """Fork; returns 0 in the worker, and its number here, or minus that of an error."""
        try:
            hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
            resource.setrlimit(resource.RLIMIT_NPROC, (most_processes, hard))
            return self._forks.fork()
        except OSError as error:
            return -(error.errno or errno.EAGAIN)


def _begin_worker(standard: int, fds: list[int]) -> Callable[[], None]:
    """Make this fork like a process that was just spawned; returns what that would run.

    Args:
        standard: Mask of the standard descriptors that come first in ``fds``.
        fds: Those, then the pipe with what the worker is given, then the resource tracker's, then
            those that are named in what it is given.
    """
    set_title("rlpool-worker")
    fds = _take_over_stdio(standard, fds)
    pipe, tracker_fd = fds[:2]
    _passed[:] = fds
    try:
        with Connection(os.dup(pipe), writable=False) as connection:
            state: ProcessState = connection.recv()
    except (EOFError, OSError):
        os._exit(0)  # the caller is gone or has given up
    state.take_over()
    gc.enable()
    np.random.seed()  # noqa: NPY002 (the one that everybody shares)
    torch.default_generator.seed()
    if (n_threads := _wanted_blas_threads()) > 1:
        _set_blas_threads(n_threads)
    return partial(_run_as_spawned, pipe, tracker_fd)


def _run_as_spawned(pipe: int, tracker_fd: int) -> NoReturn:
    """Run what a process that multiprocessing spawned runs, and end as it does.

    But for taking the interpreter to pieces, which would first copy most of what is shared.
    """
    _describe_as_spawned(spawn.get_command_line(tracker_fd=tracker_fd, pipe_handle=pipe))
    code = 1
    try:
        spawn_main(pipe_handle=pipe, tracker_fd=tracker_fd)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            code = end.code or 0
        else:
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _flush()
        ctypes.CDLL(None).fflush(None)  # for libraries in C
        os._exit(code & 0xFF)


def _describe_as_spawned(command: Sequence[str | bytes]) -> None:
    """Let Python know this process as one that such a command started."""
    main_thread: Any = threading.main_thread()
    main_thread._set_native_id()
    sys.orig_argv = [os.fsdecode(word) for word in command]
    sys.argv = ["-c", "--multiprocessing-fork"]
    main = vars(sys.modules["__main__"])
    for name in [name for name in main if not name.startswith("__")]:
        del main[name]
    main["spawn_main"] = spawn_main


def _take_over_stdio(standard: int, fds: list[int]) -> list[int]:
    """Put the caller's standard descriptors in their places; returns the others."""
    fds = list(fds)
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if standard >> fd & 1:
            passed = fds.pop(0)
            os.dup2(passed, fd)
            os.close(passed)
            stream = getattr(sys, name)
            if fd and isinstance(stream, io.TextIOWrapper):
                is_direct = fd == 2 or stream.isatty()
                stream.reconfigure(line_buffering=is_direct and not stream.write_through)
        else:
            os.close(fd)
            setattr(sys, name, None)
            setattr(sys, f"__{name}__", None)
    return fds
