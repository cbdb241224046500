"""What worker processes are doing: the Python stacks of their threads, on a signal.

The stacks are written by ``faulthandler`` within the signal handler itself, in C, so that a worker
tells where it is whatever it is doing: asleep, in an endless loop, or in C code that holds Python's
lock. It writes to an anonymous file of its own; whoever asks opens that by way of ``/proc``, which
costs the caller no descriptor.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path

from rlpool.memory.storage import anonymous_file
from rlpool.workers.outbox import Outbox

STACKS_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""On which a worker writes its stacks. One of the numbers that nobody has a use for: neither the C
library, which takes the first ones, nor Python, nor CUDA."""

PATIENCE_S = 2.0
"""How long all workers together may take to answer."""

_POLL_S = 0.002

_OWN_THREAD = re.compile(r'workers/child\.py", line \d+ in watch$', re.MULTILINE)
"""A line in the stack of the thread by which a worker watches its parent."""


printing_signals: dict[int, int] = {}
"""Signals on which this process prints stacks, and the descriptors to which it does."""


@dataclass(frozen=True)
class Stacks:
    """What a worker answered.

    Attributes:
        worker: Number of the worker.
        pid: Its process, ``None`` if it has none.
        text: The stacks of its threads; empty if there are none.
        state: Why there are none, or not all; empty otherwise.
    """

    worker: int
    pid: int | None
    text: str
    state: str = ""


def register_stacks() -> int:
    """Let this process write its stacks when it is asked to; returns the descriptor."""
    fd = anonymous_file("rlpool-stacks")
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True, chain=False)
    return fd


def register_signals(signals: dict[int, int]) -> None:
    """Let this worker print its stacks on the signals on which its caller does.

    Args:
        signals: Signal to descriptor.
    """
    for number, fd in signals.items():
        faulthandler.register(number, file=fd, all_threads=True, chain=False)


def own_stacks() -> str:
    """The stacks of this process's threads."""
    fd = anonymous_file("rlpool-stacks")
    try:
        faulthandler.dump_traceback(fd, all_threads=True)
        return _text_in(fd)
    finally:
        os.close(fd)


def ask(workers: Sequence[int], processes: Sequence[SpawnProcess], outbox: Outbox) -> list[Stacks]:
    """Ask worker processes for their stacks, all at once, and wait for their answers.

    It changes nothing that anybody else relies on, so that a signal handler may call it.

    Args:
        workers: Numbers of the workers.
        processes: The process of each of them.
        outbox: Where the workers said how they answer.

    Returns:
        One answer per worker.
    """
    deadline = time.monotonic() + PATIENCE_S
    each = zip(workers, processes, strict=False)  # some may not have been started
    questions = [_Question(worker, process, outbox) for worker, process in each]
    try:
        return [question.answer(deadline) for question in questions]
    finally:
        for question in questions:
            question.close()


class _Question:
    """A worker that was asked, or cannot be."""

    def __init__(self, worker: int, process: SpawnProcess, outbox: Outbox) -> None:
        self._worker = worker
        self._fd: int | None = None
        try:
            self._pid = process.pid
        except ValueError:  # it ended and was closed
            self._pid = None
        self._refusal = self._reason_not_to_ask(outbox) or self._ask()

    def _reason_not_to_ask(self, outbox: Outbox) -> str:
        state = _state_of(self._pid)
        if state == "gone":
            return "is gone"
        if state in "Tt":
            return "is stopped, as by SIGSTOP or a debugger, and cannot answer"
        fd = outbox.stacks_fd(self._worker, self._pid)
        if fd is None:
            return "is starting: it imports what it needs"  # the signal would end it
        try:
            self._fd = os.open(f"/proc/{self._pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            os.ftruncate(self._fd, 0)
        except OSError as error:
            return f"cannot be asked: {error}"
        return ""

    def _ask(self) -> str:
        if self._pid is None:
            return "is gone"
        # Threads that block all signals, as those of some libraries do, are not answering.
        self._blocking = _threads_that_block(self._pid)
        try:
            os.kill(self._pid, STACKS_SIGNAL)
        except OSError as error:
            return f"cannot be asked: {error}"
        return ""

    def answer(self, deadline: float) -> Stacks:
        """Wait for the answer, until the deadline at most."""
        if self._fd is None or self._pid is None or self._refusal:
            return Stacks(self._worker, self._pid, "", self._refusal)
        while not self._has_answered(self._fd, self._pid):
            if _state_of(self._pid) == "gone":
                return Stacks(self._worker, self._pid, _text_in(self._fd), "is gone")
            if time.monotonic() > deadline:
                state = f"did not answer within {PATIENCE_S:g} s"
                return Stacks(self._worker, self._pid, _text_in(self._fd), state)
            time.sleep(_POLL_S)
        return Stacks(self._worker, self._pid, _without_own_thread(_text_in(self._fd)))

    def _has_answered(self, fd: int, pid: int) -> bool:
        """Whether the stacks are there, and the handler that writes them has returned."""
        if os.fstat(fd).st_size == 0:
            return False
        # While a handler runs, its thread has the signal blocked.
        return not _threads_that_block(pid) - self._blocking

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd is not None:
            os.close(self._fd)


def _state_of(pid: int | None) -> str:
    """The letter for the state of a child of this process, or ``"gone"``.

    Asking ``multiprocessing`` could take its end from somebody who is waiting for it.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "gone"
    state, parent_pid = fields[0], int(fields[1])
    return "gone" if state in "ZXx" or parent_pid != os.getpid() else state


def _threads_that_block(pid: int) -> set[str]:
    """Threads of a process that have the signal blocked."""
    blocking = set()
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):  # it ended meanwhile
                status = Path(f"/proc/{pid}/task/{thread}/status").read_text()
                mask = int(status.partition("\nSigBlk:")[2].split(None, 1)[0], 16)
                if mask >> (STACKS_SIGNAL - 1) & 1:
                    blocking.add(thread)
    return blocking


def _text_in(fd: int) -> str:
    return os.pread(fd, os.fstat(fd).st_size, 0).decode("utf-8", "replace")


def _without_own_thread(text: str) -> str:
    """The stacks without that of the thread that every worker has."""
    threads = [part for part in text.split("\n\n") if not _OWN_THREAD.search(part)]
    return "\n\n".join(threads).rstrip("\n") + "\n"
