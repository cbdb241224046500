"""A process's report about itself."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing

_STATUS = ("Uid", "Gid", "Groups", "SigBlk", "Cap", "NoNewPrivs", "Seccomp")


def report() -> dict[str, Any]:
    """Return the state that processes started in the same way share."""
    umask = os.umask(0)
    os.umask(umask)
    status = dict(line.split(":", 1) for line in _read("status").splitlines())
    process, main = multiprocessing.current_process(), sys.modules["__main__"]
    return {
        "status": {k: v for k, v in status.items() if k.startswith(_STATUS)},
        "environment": [str(variable) for variable in os.environb.items()],
        "directory": os.getcwd(),
        "umask": umask,
        "search path": sys.path,
        "arguments": sys.argv,
        "flags": [list(sys.flags), sys._xoptions, sys.warnoptions, sys.dont_write_bytecode],
        "handlers": {n: str(signal.getsignal(n)).split(" at ")[0] for n in signal.valid_signals()},
        "streams": [_stream(name) for name in ("stdin", "stdout", "stderr")],
        "limits": [resource.getrlimit(number) for number in range(16)],
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "cores": sorted(os.sched_getaffinity(0)),
        "session": [os.getsid(0), os.getppid()],
        "garbage": [gc.isenabled(), gc.get_threshold()],
        "process": [process.name, process.daemon, process._parent_pid, process.authkey.hex()],
        "main": [main.__name__, getattr(main, "__file__", "")],
        "names of main": sorted(vars(main).keys() - {"spawn_main"}),
        "main thread": _of_main_thread(),
        "torch": [torch.get_num_threads(), torch.get_num_interop_threads()],
    }


def report_late() -> dict[str, Any]:
    """Return the state that they share once all modules are imported."""
    return {
        **report(),
        "in ps": [_read("comm"), _read("cmdline").strip("\0\1")],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "n threads": len(os.listdir("/proc/self/task")),
        "descriptors": sorted(_descriptors()),
        "filters": [[f[0], str(f[1]), f[2].__name__, str(f[3]), f[4]] for f in warnings.filters],
    }


def drawn() -> dict[str, Any]:
    """Return the state that differs between any two processes."""
    return {
        "random": random.getstate()[1][:3],
        "NumPy": np.random.get_state()[1][:3].tolist(),  # noqa: NPY002 (users' code may)
        "torch": torch.initial_seed(),
    }


def started() -> list[Any]:
    """Start processes and return two exit codes and the data written by one of them."""
    shared = torch.zeros(3).share_memory_()
    process = torch.multiprocessing.get_context("fork").Process(target=shared.add_, args=(2,))
    process.start()
    process.join()
    if not (pid := os.fork()):
        os._exit(7)
    return [
        process.exitcode,
        shared.tolist(),
        os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]),
    ]


def _read(name: str) -> str:
    return Path("/proc/self", name).read_text()


def _stream(name: str) -> Any:
    stream = getattr(sys, name)
    if stream is None or stream.closed:
        return stream and "closed"
    where = os.readlink(f"/proc/self/fd/{stream.fileno()}")
    return [stream is getattr(sys, f"__{name}__"), where, stream.mode, stream.line_buffering]


def _descriptors() -> list[Any]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            kind = os.readlink(f"/proc/self/fd/{name}").split(":")[0]
            found.append((kind, os.get_inheritable(int(name))))
        except OSError:  # that of the listing
            continue
    return found


def _of_main_thread() -> list[Any]:
    """Whether Python and the C library know the main thread."""
    main = threading.main_thread()
    is_main = main is threading.current_thread() and main.native_id == os.getpid()
    return [is_main, main.ident == threading.get_ident(), signal.pthread_kill(main.ident, 0)]
