"""What all workers are doing, told on request or on a signal."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import Any, Literal, Protocol
from weakref import WeakSet

from rlpool.errors import SpecError, UsageError, Where
from rlpool.machine.interrupts import mark_as_harmless
from rlpool.workers.stacks import Stacks, printing_signals

StackFile = Any
"""Where stacks go: a text file, ``STDERR``, or ``None`` for nowhere."""

STDERR: Literal["stderr"] = "stderr"
"""What ``sys.stderr`` is when stacks are dumped, not when this module was imported."""


class StackSource(Protocol):
    """Whoever has workers that can be asked for their stacks."""

    def worker_stacks(self) -> str:
        """What its worker processes are doing; empty if it has none, or none any more."""


_sources: WeakSet[StackSource] = WeakSet()


def note_source(source: StackSource) -> None:
    """Have workers asked when a signal says so; they are forgotten with their owner."""
    _sources.add(source)


def described(answers: Iterable[Stacks], where: Callable[[int], Where]) -> str:
    """What workers answered, as text: a line that says where each one is, and its stacks.

    Args:
        answers: The answers.
        where: What a worker is running.
    """
    parts = []
    for answer in answers:
        try:
            place = str(where(answer.worker)._replace(worker=None))
        except Exception:  # asked by a signal handler, in the middle of whatever it changes
            place = ""
        head = f"worker {answer.worker}"
        if answer.pid is not None:
            head += f" (pid {answer.pid})"
        if answer.state:
            head += f" {answer.state}"
        parts.append(f"{head}: {place or 'no episode'}\n{answer.text}")
    return "\n".join(parts)


class DumpsStacks(ABC):
    """Owners of workers that can be asked what their workers are doing."""

    @abstractmethod
    def _stacks(self) -> str:
        """What each worker is doing; ``UsageError`` if closed."""

    def dump_stacks(self, file: StackFile = STDERR) -> str:
        """Tell what each worker is doing: where it is, and the stacks of its threads.

        Workers answer from within a signal handler in C, so it works whatever they do: sleep, loop
        without end, or run C code that holds Python's lock. They go on as if nothing had happened.
        One that cannot answer (stopped, still importing, dead) is said to be so; at most 2 s are
        waited. With ``n_threads=0``, it is the stacks of this process. To get this while your
        program is stuck, see ``rlpool.dump_stacks_on_signal``.

        Args:
            file: Text file to write to as well, by default ``sys.stderr``; ``None`` for none.

        Returns:
            The text.

        Raises:
            UsageError: If this is closed.
        """
        target = sys.stderr if file is STDERR else file
        if target is not None and not hasattr(target, "write"):
            raise SpecError(
                f"file should be a text file, got {file!r}",
                fix="pass sys.stderr, an open file, or None to get the text only",
            )
        text = self._stacks()
        if target is not None:
            target.write(text)
            if hasattr(target, "flush"):
                target.flush()
        return text


class _Registration:
    """What one signal was registered for, and what it was before.

    Args:
        signum: The signal.
        file: Where stacks go: something with a descriptor.
    """

    def __init__(self, signum: int, file: Any) -> None:
        self._signum = signum
        self._file = file  # kept open
        self._fd = file.fileno()
        self._previous = signal.getsignal(signum)
        # First Python's handler, then, in C and in front of it, that of the caller's own stacks:
        # it also answers while C code holds Python's lock.
        signal.signal(signum, self._tell)
        try:
            faulthandler.register(signum, file=file, all_threads=True, chain=True)
        except BaseException:
            self._restore()
            raise

    def undo(self) -> None:
        """Restore the signal's handler. May be repeated."""
        if _registered.get(self._signum) is self:
            _refuse_other_threads()
            del _registered[self._signum], printing_signals[self._signum]
            faulthandler.unregister(self._signum)
            self._restore()

    def _restore(self) -> None:
        # A handler that was not set from Python is unknown to it.
        previous = signal.SIG_DFL if self._previous is None else self._previous
        signal.signal(self._signum, previous)

    @mark_as_harmless
    def _tell(self, signum: int, frame: FrameType | None) -> None:
        """Write the workers' stacks; never raises."""
        for source in _open_sources():
            try:
                text = source.worker_stacks()
            except Exception as error:
                text = f"the stacks of workers could not be read: {error!r}\n"
            self._write(text)

    def _write(self, text: str) -> None:
        # Not through the file, whose buffer the main thread may be just about to fill.
        data = f"\n{text}".encode(errors="backslashreplace") if text else b""
        with suppress(OSError):
            while data:
                data = data[os.write(self._fd, data) :]


_registered: dict[int, _Registration] = {}


def dump_stacks_on_signal(signum: int = signal.SIGUSR1, file: Any = None) -> Callable[[], None]:
    """From now on, let a signal print what this process and all workers are doing.

    After ``rlpool.dump_stacks_on_signal()``, ``kill -USR1 <pid>`` prints the stacks of all threads
    of this process, and then, of every open batcher and ``ParallelEnvManager``, what each worker
    runs and its stacks, also while this process waits in ``get()``. Nothing else is disturbed.

    This process's own stacks are printed whatever it is doing. The workers' follow as soon as
    Python can run its signal handlers: not before C code that holds Python's lock, or blocks the
    main thread, returns. Until then workers that were started after this call print their stacks
    when the same signal is sent to them: ``pkill -USR1 -P <pid> -f rlpool-worker``.

    Args:
        signum: The signal. What it did before it does not do any more.
        file: Where to print: an open file with a descriptor, by default ``sys.stderr``.

    Returns:
        A function that undoes this: it restores the signal's handler, and may be repeated.

    Raises:
        UsageError: Outside of the main thread, where Python can set no signal handlers.
        SpecError: For a signal that cannot be handled, or a file without a descriptor.

    Example::

        undo = rlpool.dump_stacks_on_signal()
    """
    _refuse_other_threads()
    number = _checked_signal(signum)
    file = _with_descriptor(file)
    if number in _registered:
        _registered[number].undo()
    try:
        registration = _Registration(number, file)
    except (OSError, RuntimeError, ValueError) as error:
        raise SpecError(
            f"signal {number} cannot be handled: {error}",
            fix="use signal.SIGUSR1 or signal.SIGUSR2",
        ) from error
    _registered[number] = registration
    printing_signals[number] = file.fileno()
    return registration.undo


def _open_sources() -> list[StackSource]:
    for _ in range(3):
        with suppress(RuntimeError):  # another thread makes or drops one
            return list(_sources)
    return []


def _refuse_other_threads() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "signal handlers can only be set in the main thread",
            fix="call dump_stacks_on_signal() there, before other threads are started",
        )


def _checked_signal(signum: Any) -> int:
    if isinstance(signum, bool) or not isinstance(signum, int) or signum < 1:
        raise SpecError(f"signum should be a signal such as signal.SIGUSR1, got {signum!r}")
    return int(signum)


def _with_descriptor(file: Any) -> Any:
    """The file, or standard error as far as it has a descriptor: that of a notebook has none."""
    candidates: list[Any] = [sys.stderr, sys.__stderr__] if file is None else [file]
    for candidate in candidates:
        try:
            candidate.fileno()
        except (AttributeError, OSError, ValueError):
            continue
        return candidate
    raise SpecError(
        f"file should have a descriptor, got {file!r}",
        fix="pass an open file such as open('stacks.txt', 'w')",
    )
