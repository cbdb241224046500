"""The template: a process that has imported everything a worker needs, and only forks workers.

It creates no environment, computes nothing with torch, starts no thread, and does not contain the
user's program. So a fork of it is like a freshly spawned process, except that all forks share the
memory of the imports. ``template_handle`` is the caller's side.

For each worker the caller sends descriptors. The template replies with the worker's process number,
or with a negative number if it cannot fork. In the worker, ``serve`` returns the function to run
next, which is the same as in a process spawned by multiprocessing.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import gc
import importlib
import multiprocessing
import os
import pickle
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
from multiprocessing import forkserver, spawn
from typing import Any, NoReturn

import numpy as np
import torch

from rlpool.errors import described
from rlpool.machine.platform import n_threads, set_title

_BOOT = """\
import gc, json, sys
gc.disable()
about = json.loads(sys.argv[1])
sys.path[:], sys.argv[:] = about.pop("path"), about.pop("argv")
from rlpool.workers.template import serve
run = serve(**about)
run()
"""
BOOT = f"exec({_BOOT!r}, {{}})"
"""Code of its interpreter, which leaves no name in ``__main__``. The garbage collector is off from
the start, because a collection would leave holes in memory that workers fill, each with a copy of
the page."""

_NEEDED = ("cloudpickle", "gymnasium.envs.classic_control", "rlpool", "runpy")
"""Modules that nearly every worker needs and that this file does not import."""

MAX_MESSAGE_BYTES = 2**16

_MAX_FDS = 32
"""A worker gets about ten descriptors, whatever the user shares with it."""

_is_ready = False  # whether this process is a template with all imports done, or a fork of one

_PARENT_CHECK_MS = 1000
"""How often the template checks its parent, whose other children may keep the socket open."""

_THREAD_END_S = 0.1
"""The system may list a thread for some time after it was joined, but less than this."""


def serve(parent_pid: int, fd: int, modules: Sequence[str]) -> Callable[[], None]:
    """Fork workers until the caller is gone; returns only in workers, with their next function.

    Args:
        parent_pid: The caller, which starts this process with SIGINT blocked.
        fd: A socket to the caller for pickled pairs: ``("importing", module)``, with ``""`` after
            the last module; ``("refused", why)``, at any time, if this template cannot serve;
            otherwise ``("ready", "")`` at the end.
        modules: Modules to import for the user.
    """
    set_title("rlpool-template")
    caller = socket.socket(fileno=fd)
    caller.set_inheritable(False)
    worker = None
    try:
        _prepare(caller, modules)
    except Exception as error:
        with suppress(OSError):  # the caller is gone
            _send(caller, "refused", str(error) or type(error).__name__)
    else:
        _send(caller, "ready", "")
        worker = _serve_requests(caller, parent_pid)
    return worker or os._exit(0)


def _send(caller: socket.socket, *words: Any) -> None:
    caller.send(pickle.dumps(words))


def _prepare(caller: socket.socket, modules: Sequence[str]) -> None:
    """Import everything.

    Raises:
        OSError: If forking would not be safe.
    """
    global _is_ready
    for name in _NEEDED:
        importlib.import_module(name)
    _refuse_if_unsafe()
    _import_all(caller, modules)
    # Their clean-up would affect all workers, and finalizing torch's tables takes 50 ms.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    _drop_stdio(0, 1, 2)
    importlib.invalidate_caches()  # once for all workers
    gc.freeze()
    _is_ready = True


def is_forked() -> bool:
    """Whether this process was forked from a template, whose imports are frozen.

    Counting frozen objects (``gc.get_freeze_count``) would take a worker 0.1 s.
    """
    return _is_ready


def _import_all(caller: socket.socket, modules: Sequence[str]) -> None:
    """Import modules for the user.

    Raises:
        OSError: If one fails or makes forking unsafe. It may be half imported, so the caller
            starts another template without it.
    """
    _drop_stdio(0)  # spawned workers have no input either
    # As in a worker, an import must not start processes.
    this_process: Any = multiprocessing.current_process()
    this_process._inheriting = True
    for name in modules:
        _send(caller, "importing", name)
        try:
            importlib.import_module(name)
        except BaseException as error:
            raise OSError(described(error)[:300]) from error
        _refuse_if_unsafe()
    _send(caller, "importing", "")
    del this_process._inheriting
    gc.disable()  # an import may have enabled it


def _refuse_if_unsafe() -> None:
    """Raise ``OSError`` if this process cannot or should not be forked."""
    pid = os.fork()  # OpenBLAS ends its threads first, and restarts them when it computes
    if not pid:
        os._exit(0)
    if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        raise OSError(f"a fork of it fails (exit code {code})")
    deadline_s = time.monotonic() + _THREAD_END_S
    while (n := n_threads()) > 1:
        if time.monotonic() > deadline_s:
            raise OSError(f"it has {n} threads")
        time.sleep(0.001)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise OSError("it has a CUDA context")


def _drop_stdio(*fds: int) -> None:
    """Replace the caller's standard streams by the null device; workers are sent the real ones."""
    _flush()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        os.dup2(nowhere, fd)
    os.close(nowhere)
    _flush()  # otherwise every worker would print what is still buffered


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # there may be none, or no reader
            stream.flush()


def _serve_requests(caller: socket.socket, parent_pid: int) -> Callable[[], None] | None:
    """Fork on request; returns the function to run in workers, ``None`` once the caller is gone."""
    poller = select.poll()
    poller.register(caller, select.POLLIN)
    while os.getppid() == parent_pid:
        if not poller.poll(_PARENT_CHECK_MS):
            continue
        request, fds, flags, _ = socket.recv_fds(caller, MAX_MESSAGE_BYTES, _MAX_FDS)
        if not request:
            return None
        is_worker, code = False, 0
        try:
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, "")
            is_worker = fork_orphan(caller)
        except OSError as error:
            code = error.errno or errno.EAGAIN
        if is_worker:
            set_title("rlpool-worker")
            caller.close()
            return _begin_worker(fds, pickle.loads(request))
        _send(caller, -code, 0)
        for fd in fds:
            os.close(fd)
    return None


def _begin_worker(fds: Sequence[int], blocked: Iterable[int]) -> Callable[[], None]:
    """Make this fork like a freshly spawned process; returns the function to run.

    Args:
        fds: The standard streams, the resource tracker's, the pipe from which the worker reads its
            arguments, and those that the arguments refer to.
        blocked: Signals that are blocked.
    """
    for fd, passed in enumerate(fds[:3]):
        os.dup2(passed, fd)
        os.close(passed)
    tracker_fd, pipe, *named = fds[3:]
    forkserver._forkserver._inherited_fds = named  # type: ignore[attr-defined]
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    gc.enable()
    np.random.seed()  # noqa: NPY002 (the global generator)
    torch.default_generator.seed()
    main_thread: Any = threading.main_thread()
    main_thread._set_native_id()
    sys.argv = ["-c", "--multiprocessing-fork"]
    return partial(_run_as_spawned, pipe, tracker_fd)


def _run_as_spawned(pipe: int, tracker_fd: int) -> NoReturn:
    """Run the main function of a process spawned by multiprocessing, and end in the same way.

    The interpreter is not finalized, which would copy most of the shared memory.
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


def fork_orphan(caller: socket.socket) -> bool:
    """Fork a process whose parent ends at once, so that the caller adopts it.

    The kernel then reports its end to the caller, whatever happens to the template. The parent
    sends the caller both process numbers, because the caller also adopts the parent if the template
    has died.

    Returns:
        Whether this is the new process.

    Raises:
        OSError: As ``os.fork``.
    """
    parent = os.fork()
    if parent:
        code = os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1])
        if code:
            raise OSError(code if code > 0 else errno.EAGAIN, "")
        return False
    try:
        pid = os.fork()
        if not pid:
            return True
        _send(caller, pid, os.getpid())
    except OSError as error:
        os._exit(error.errno or errno.EAGAIN)
    os._exit(0)
