"""The template: a process that has imported what every worker needs, and only forks workers.

It creates no environment, computes nothing with torch, starts no thread, and knows nothing of the
user's program. So a fork of it is like a freshly spawned process, except that all forks share the
memory of the imports. ``process_start`` is the caller's side.

For each worker the caller sends descriptors. The new worker answers with its process number, or the
template with minus an error number. In the worker ``serve`` returns what runs next, which is what
runs in a process that multiprocessing spawned.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import gc
import importlib.util
import multiprocessing
import os
import pickle
import re
import resource
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import spawn
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from rlpool.workers.clone_parent import ParentForks
from rlpool.workers.process_state import ProcessState, hard_limits, kernel_status
from rlpool.workers.process_title import set_title

_BOOT = """\
import gc, json, os, sys
gc.disable()
os.environ["OPENBLAS_NUM_THREADS"] = "1"
about = json.loads(sys.argv[1])
sys.path[:], sys.argv[:] = about.pop("path"), about.pop("argv")
from rlpool.workers.template import serve
run = serve(**about)
run()
"""
BOOT = f"exec({_BOOT!r}, {{}})"
"""What its interpreter runs, without a name left in ``__main__``. The garbage collector is off from
the start: a collection would leave holes in memory that workers fill, each with a copy of the page.
OpenBLAS starts its threads when NumPy is imported."""

_NEEDED = (
    "cloudpickle",
    "gymnasium.envs.classic_control",
    "multiprocessing.popen_spawn_posix",
    "multiprocessing.resource_tracker",
    "rlpool",
    "runpy",
)
"""Modules that (nearly) every worker needs and that this one does not import."""

MAX_MESSAGE_BYTES = 2**16

SHORTAGES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""Errors of a system that can fork, but not now."""

_MAX_FDS = 250
"""The kernel lets one message carry 253."""

_PARENT_CHECK_MS = 1000
"""How often the template checks its parent, in case a process that this forked keeps the socket."""

_THREAD_END_S = 0.1
"""The system may show a thread for some time after it was joined, but less than this."""

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
    """A descriptor in the pickle that a forked worker gets.

    Args:
        index: Its place among those that came with the request.
    """

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        """Its number in this process."""
        return _passed[self._index]


_passed: list[int] = []
"""In a forked worker: descriptors that came with the request for it."""


def serve(
    parent_pid: int, fd: int, life_fd: int, modules: Sequence[str], main_file: str
) -> Callable[[], None]:
    """Fork workers until the caller is gone; returns in workers only, with what they run next.

    Args:
        parent_pid: The caller.
        fd: A socket to the caller, which is sent pickled tuples: ``("importing", module)``,
            ``("refused", why)`` if this template cannot serve, and, from a first fork,
            ``("ready", its parent, its process number)``.
        life_fd: A pipe by which the kernel kills this process when the caller ends.
        modules: Names of modules of the user's choice, to be imported too.
        main_file: The file of the caller's main module, which is never imported.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_title("rlpool-template")
    # However few the caller may open: a worker gets the caller's limits later.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    caller = socket.socket(fileno=fd)
    worker = None
    try:
        forks = _prepare(caller, modules, main_file)
    except Exception as error:
        with suppress(OSError):  # the caller is gone
            _tell(caller, "refused", str(error) or type(error).__name__)
    else:
        worker = _serve_requests(caller, forks, parent_pid)
    if worker is None:
        os._exit(0)
    os.close(life_fd)
    return worker


def _tell(caller: socket.socket, *words: Any) -> None:
    caller.send(pickle.dumps(words))


def _prepare(caller: socket.socket, modules: Sequence[str], main_file: str) -> ParentForks:
    """Import everything and prove that forking works; returns what forks workers.

    Raises:
        OSError: If forking would not be safe or does not work.
    """
    forks = ParentForks()
    for name in _NEEDED:
        importlib.import_module(name)
    _refuse_if_unsafe()
    path_before = list(sys.path)
    _import_all(caller, modules, main_file)
    # What they clean up belongs to all workers; and finalizing torch's tables takes 50 ms.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    _drop_stdio(range(3))
    importlib.invalidate_caches()  # once for all workers
    gc.freeze()
    if sys.path != path_before:
        _keep_search_path(list(map(str, sys.path)))
    try:
        if forks.fork() == 0:
            _tell(caller, "ready", os.getppid(), os.getpid())
            os._exit(0)
    except OSError as error:
        if error.errno not in SHORTAGES:
            raise OSError(f"the system does not fork for it: {error.strerror}") from error
        _tell(caller, "ready", os.getppid(), 0)  # workers will prove it
    return forks


def _import_all(caller: socket.socket, modules: Sequence[str], main_file: str) -> None:
    """Import modules of the user's choice.

    Raises:
        OSError: If one fails or makes forking unsafe. It may have done half of its work, so that
            another template must do without it.
    """
    _drop_stdio(range(1))  # spawned workers have no input either
    directory = os.getcwd()
    before = hard_limits(), os.getpriority(os.PRIO_PROCESS, 0)
    # An import that starts processes is refused, as in a worker.
    this_process: Any = multiprocessing.current_process()
    this_process._inheriting = True
    for name in modules:
        _tell(caller, "importing", name)
        try:
            spec = importlib.util.find_spec(name)
            if spec and spec.origin and os.path.realpath(spec.origin) == main_file:
                raise ImportError("it is the main module, which each worker imports by itself")
            importlib.import_module(name)
        except BaseException as error:
            raise OSError(" ".join(f"{type(error).__name__}: {error}".split())[:300]) from error
        _refuse_if_unsafe()
        if (hard_limits(), os.getpriority(os.PRIO_PROCESS, 0)) != before:
            raise OSError("it changes hard limits or the nice value, for all workers")
        # It may have changed what this process depends on.
        os.chdir(directory)
        gc.disable()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _tell(caller, "importing", "")
    del this_process._inheriting


def _keep_search_path(path: list[str]) -> None:
    """Let workers have what imports made of ``sys.path``, not the caller's."""
    prepare = spawn.prepare

    def prepare_with_path(data: Any) -> None:
        prepare({**data, "sys_path": path})

    spawn.prepare = prepare_with_path


def _refuse_if_unsafe() -> None:
    """Raise ``OSError`` if this process should not be forked."""
    deadline_s = time.monotonic() + _THREAD_END_S
    while (n_threads := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    if n_threads != 1:
        raise OSError(f"it has {n_threads} threads")
    if "Umask" not in kernel_status():
        raise OSError("that needs Linux 4.7 with /proc")
    has_context: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing
            has_context |= os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/nvidia")
    if has_context:
        raise OSError("it has a CUDA context")
    _set_blas_threads(1)  # which shows that it is possible


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
        with suppress(Exception):  # there may be none, or no reader
            stream.flush()


def _serve_requests(
    caller: socket.socket, forks: ParentForks, parent_pid: int
) -> Callable[[], None] | None:
    """Fork on request; returns in workers what to run, here ``None`` when the caller is gone."""
    poller = select.poll()
    poller.register(caller, select.POLLIN)
    while os.getppid() == parent_pid:
        if not poller.poll(_PARENT_CHECK_MS):
            continue
        words, fds, _, _ = socket.recv_fds(caller, MAX_MESSAGE_BYTES, _MAX_FDS)
        if not words:
            return None
        standard, n_fds, most_processes, state = pickle.loads(words)
        try:
            if len(fds) < len(standard) + n_fds:
                raise OSError(errno.EMFILE, "")
            hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
            resource.setrlimit(resource.RLIMIT_NPROC, (most_processes, hard))
            is_worker = forks.fork() == 0
        except OSError as error:
            is_worker = False
            _tell(caller, -(error.errno or errno.EAGAIN))
        if is_worker:
            set_title("rlpool-worker")
            _tell(caller, os.getpid())
            caller.close()
            return _begin_worker(standard, fds, state)
        for fd in fds:
            os.close(fd)
    return None


def _begin_worker(
    standard: Sequence[int], fds: list[int], state: ProcessState
) -> Callable[[], None]:
    """Make this fork like a process that was just spawned; returns what that would run.

    Args:
        standard: The standard streams there are, whose descriptors come first in ``fds``.
        fds: Those, then the resource tracker's, those that are named in what the worker is given,
            the pipe from which it reads that, and the pipe that is open while it lives.
        state: What it takes over from the caller.
    """
    _take_over_stdio(standard, fds)
    tracker_fd, *_, pipe, _ = _passed[:] = fds[len(standard) :]
    state.take_over()
    gc.enable()
    np.random.seed()  # noqa: NPY002 (the one that everybody shares)
    torch.default_generator.seed()
    if (n_threads := _wanted_blas_threads()) > 1:
        _set_blas_threads(n_threads)
    main_thread: Any = threading.main_thread()
    main_thread._set_native_id()
    sys.argv = ["-c", "--multiprocessing-fork"]
    return partial(_run_as_spawned, pipe, tracker_fd)


def _run_as_spawned(pipe: int, tracker_fd: int) -> NoReturn:
    """Run what a process that multiprocessing spawned runs, and end as it does.

    But without finalizing the interpreter, which would copy most of the memory that is shared.
    """
    code = 1
    try:
        spawn.spawn_main(pipe_handle=pipe, tracker_fd=tracker_fd)
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


def _take_over_stdio(standard: Sequence[int], fds: Sequence[int]) -> None:
    """Put the caller's standard descriptors in their places."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if fd in standard:
            passed = fds[standard.index(fd)]
            os.dup2(passed, fd)
            os.close(passed)
        else:
            os.close(fd)
            setattr(sys, name, None)
            setattr(sys, f"__{name}__", None)
