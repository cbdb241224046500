"""The Python stacks of worker processes, on request.

``faulthandler`` writes them within a signal handler in C, so that a worker answers whatever it is
doing: asleep, in an endless loop, or in C code that holds Python's lock. It writes to an anonymous
file of its own, which the caller opens through ``/proc``.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import NamedTuple

from rlpool.data.storage import anonymous_file
from rlpool.errors import Where
from rlpool.machine.limits import stat_fields

STACKS_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Makes a worker write its stacks. Nothing else uses this number: not the C library, which takes
the first real-time signals, nor Python, nor CUDA."""

PATIENCE_S = 2.0
"""How long all workers together may take to answer."""

_POLL_S = 0.002

_FILE = "rlpool-stacks"
"""The name by which the file is found among a worker's descriptors."""

_OWN_THREAD = re.compile(r'workers/process_end\.py", line \d+ in watch$', re.MULTILINE)
"""A line in the stack of the thread that watches the worker's parent."""


class Stacks(NamedTuple):
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


def answer_questions() -> None:
    """Let this process, a worker's, answer from now on."""
    fd = anonymous_file(_FILE)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True, chain=False)


def own_stacks() -> str:
    """The stacks of this process's threads."""
    fd = anonymous_file(_FILE)
    try:
        faulthandler.dump_traceback(fd, all_threads=True)
        return _text_in(fd)
    finally:
        os.close(fd)


def described(answers: Iterable[Stacks], where: Callable[[int], Where]) -> str:
    """What workers answered, as text: a line that says where each one is, and its stacks.

    Args:
        answers: The answers.
        where: What a worker is running.
    """
    parts = []
    for worker, pid, text, state in answers:
        place = ""
        with suppress(Exception):  # a signal handler may ask while that changes
            place = str(where(worker)._replace(worker=None))
        process = "" if pid is None else f" (pid {pid})"
        head = " ".join(filter(None, [f"worker {worker}{process}", state]))
        parts.append(f"{head}: {place or 'no episode'}\n{text}")
    return "\n".join(parts)


def ask(workers: Sequence[int], processes: Sequence[SpawnProcess]) -> list[Stacks]:
    """Ask worker processes for their stacks, all at once, and wait for their answers.

    It has no side effects on this process, so a signal handler may call it.

    Args:
        workers: Numbers of the workers.
        processes: The process of each of them; some may not have been started.

    Returns:
        One answer per worker.
    """
    deadline = time.monotonic() + PATIENCE_S
    questions = [_Question(process) for process in processes]
    try:
        answers = [question.answer(deadline) for question in questions]
    finally:
        for question in questions:
            question.close()
    return [
        Stacks(worker, question.pid, *answer)
        for worker, question, answer in zip(workers, questions, answers, strict=False)
    ]


class _Question:
    """A process that was asked for its stacks, or cannot be asked."""

    def __init__(self, process: SpawnProcess) -> None:
        self.pid: int | None = None
        with suppress(ValueError):  # it ended and was closed
            self.pid = process.pid
        self._fd = -1
        self._refusal = ""
        try:
            self._ask()
        except OSError as error:
            self._refusal = f"cannot be asked: {error}"

    def _ask(self) -> None:
        state = _state_of(self.pid)
        if state == "gone" or self.pid is None:
            self._refusal = "is gone"
        elif state in "Tt":
            self._refusal = "is stopped, as by SIGSTOP or a debugger, and cannot answer"
        elif not _is_in_mask(f"/proc/{self.pid}/status", "SigCgt"):  # the signal would end it
            self._refusal = "is starting: it imports what it needs"
        else:
            self._fd = os.open(_stacks_file(self.pid), os.O_RDWR | os.O_CLOEXEC)
            os.ftruncate(self._fd, 0)
            # Threads that block all signals, as those of some libraries do, are not answering.
            self._blocking = _threads_that_block(self.pid)
            os.kill(self.pid, STACKS_SIGNAL)

    def answer(self, deadline: float) -> tuple[str, str]:
        """Wait for the answer, until the deadline at most; returns stacks and state."""
        if self._refusal or self.pid is None:
            return "", self._refusal
        # While a handler runs, its thread has the signal blocked.
        while not os.fstat(self._fd).st_size or _threads_that_block(self.pid) - self._blocking:
            if _state_of(self.pid) == "gone":
                return _text_in(self._fd), "is gone"
            if time.monotonic() > deadline:
                return _text_in(self._fd), f"did not answer within {PATIENCE_S:g} s"
            time.sleep(_POLL_S)
        threads = _text_in(self._fd).split("\n\n")
        others = [thread for thread in threads if not _OWN_THREAD.search(thread)]
        return "\n\n".join(others).rstrip("\n") + "\n", ""

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)


def _stacks_file(pid: int) -> str:
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{fd}"
        with suppress(OSError):  # it was closed meanwhile
            if os.readlink(path).startswith(f"/memfd:{_FILE}"):
                return path
    raise OSError("it has closed the file for its stacks")


def _state_of(pid: int | None) -> str:
    """The letter for the state of a child of this process, or ``"gone"``.

    Asking ``multiprocessing`` could take its end from somebody who is waiting for it.
    """
    state, parent_pid, *_ = stat_fields(pid) or ("X", "")
    return "gone" if state in "ZXx" or parent_pid != str(os.getpid()) else state


def _threads_that_block(pid: int) -> set[str]:
    """Threads of a process that have the signal blocked."""
    with suppress(OSError):
        threads = os.listdir(f"/proc/{pid}/task")
        return {t for t in threads if _is_in_mask(f"/proc/{pid}/task/{t}/status", "SigBlk")}
    return set()


def _is_in_mask(path: str, name: str) -> bool:
    """Whether the signal is in a mask of a process or thread; no if that has ended."""
    with suppress(OSError):
        mask = Path(path).read_text().partition(f"\n{name}:")[2].split(None, 1)[0]
        return bool(int(mask, 16) >> (STACKS_SIGNAL - 1) & 1)
    return False


def _text_in(fd: int) -> str:
    return os.pread(fd, os.fstat(fd).st_size, 0).decode("utf-8", "replace")
