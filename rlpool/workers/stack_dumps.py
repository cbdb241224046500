"""``dump_stacks`` and ``dump_stacks_on_signal``: what all workers are doing."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Literal, Protocol
from weakref import WeakSet

from rlpool.errors import SpecError, UsageError
from rlpool.machine.interrupts import mark_as_harmless
from rlpool.workers.stacks import printing_signals

StackFile = Any
"""Where stacks go: a text file, ``STDERR``, or ``None`` for nowhere."""

STDERR: Literal["stderr"] = "stderr"
"""What ``sys.stderr`` is when stacks are dumped, not when this module was imported."""


class StackSource(Protocol):
    """An owner of workers that can be asked for their stacks."""

    def worker_stacks(self) -> str:
        """What its worker processes are doing; empty if it has none, or none any more."""


_sources: WeakSet[StackSource] = WeakSet()


def note_source(source: StackSource) -> None:
    """Include an owner's workers when a signal asks for stacks, as long as the owner lives."""
    _sources.add(source)


class DumpsStacks(ABC):
    """Owners of workers that can be asked what their workers are doing."""

    @abstractmethod
    def _stacks(self) -> str:
        """What each worker is doing; ``UsageError`` if closed."""

    def dump_stacks(self, file: StackFile = STDERR) -> str:
        """Print what each worker is doing: where it is, and the stacks of its threads.

        Workers answer from within a signal handler in C, so this works whatever they do: sleep,
        loop endlessly, or run C code that holds Python's lock. They go on as if nothing had
        happened. If a worker cannot answer (it is stopped, still importing, or dead), the text says
        so; this waits 2 s at most. With ``n_threads=0`` it is the stacks of this process. To get
        stacks while your program is stuck, see ``rlpool.dump_stacks_on_signal``.

        Args:
            file: Text file to write to as well, by default ``sys.stderr``; ``None`` for none.

        Returns:
            The text.

        Raises:
            UsageError: If this is closed.

        Example:
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_threads=0)
            >>> text = batcher.dump_stacks(file=None)
            >>> "most recent call" in text
            True
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


def dump_stacks_on_signal(signum: int = signal.SIGUSR1, file: Any = None) -> Callable[[], None]:
    """Print what this process and all workers are doing whenever a signal arrives.

    After ``rlpool.dump_stacks_on_signal()``, ``kill -USR1 <pid>`` prints the stacks of all threads
    of this process, and then, for every open batcher and ``ParallelEnvManager``, what each worker
    runs and its stacks, also while this process waits in ``get()``. Nothing else is disturbed.

    This process's own stacks are printed whatever it is doing. The workers' follow as soon as
    Python can run its signal handlers: not before C code that holds Python's lock, or blocks the
    main thread, returns. Until then, workers that were started after this call print their stacks
    when the same signal is sent to them: ``pkill -USR1 -P <pid> -f rlpool-worker``.

    Args:
        signum: The signal. Its previous handler is not called any more.
        file: Where to print: an open file with a descriptor, by default ``sys.stderr``.

    Returns:
        A function that undoes this: it restores the signal's handler, and may be repeated.

    Raises:
        UsageError: Outside of the main thread, where Python can set no signal handlers.
        SpecError: For a signal that cannot be handled, or a file without a descriptor.

    Example:
        >>> undo = dump_stacks_on_signal()  # from now on: kill -USR1 <pid>
        >>> undo()
    """
    _refuse_other_threads()
    if isinstance(signum, bool) or not isinstance(signum, int) or signum < 1:
        raise SpecError(f"signum should be a signal such as signal.SIGUSR1, got {signum!r}")
    number, file = int(signum), _with_descriptor(file)
    if number in _undo_of:
        _undo_of[number]()
    previous: Any = signal.SIG_DFL  # a handler that was not set from Python
    try:
        previous = signal.getsignal(number) or previous
        # First Python's handler, then, in C and in front of it, that of the caller's own stacks:
        # it also answers while C code holds Python's lock.
        signal.signal(number, _printer_to(file.fileno()))
        faulthandler.register(number, file=file, all_threads=True, chain=True)
    except (OSError, RuntimeError, ValueError) as error:
        with suppress(OSError, ValueError):
            signal.signal(number, previous)
        raise SpecError(
            f"signal {number} cannot be handled: {error}",
            fix="use signal.SIGUSR1 or signal.SIGUSR2",
        ) from error
    printing_signals[number] = file.fileno()

    def undo() -> None:
        if _undo_of.get(number) is undo:
            _refuse_other_threads()
            del _undo_of[number], printing_signals[number]
            faulthandler.unregister(number)  # which has kept the file open
            signal.signal(number, previous)

    _undo_of[number] = undo
    return undo


_undo_of: dict[int, Callable[[], None]] = {}


def _printer_to(fd: int) -> Callable[[int, FrameType | None], None]:
    """A signal handler that writes the workers' stacks; it never raises."""

    @mark_as_harmless
    def print_stacks(signum: int, frame: FrameType | None) -> None:
        sources: list[StackSource] = []
        for _ in range(3):
            with suppress(RuntimeError):  # another thread makes or drops one
                sources = list(_sources)
                break
        for source in sources:
            try:
                text = source.worker_stacks()
            except Exception as error:
                text = f"the stacks of workers could not be read: {error!r}\n"
            # Not through the file, whose buffer the main thread may be just about to fill.
            data = f"\n{text}".encode(errors="backslashreplace") if text else b""
            with suppress(OSError):
                while data:
                    data = data[os.write(fd, data) :]

    return print_stacks


def _refuse_other_threads() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "signal handlers can only be set in the main thread",
            fix="call dump_stacks_on_signal() there, before other threads are started",
        )


def _with_descriptor(file: Any) -> Any:
    """The file, by default a standard error with a descriptor, which a notebook's lacks."""
    candidates: list[Any] = [sys.stderr, sys.__stderr__] if file is None else [file]
    for candidate in candidates:
        with suppress(AttributeError, OSError, ValueError):
            candidate.fileno()
            return candidate
    raise SpecError(
        f"file should have a descriptor, got {file!r}",
        fix="pass an open file such as open('stacks.txt', 'w')",
    )
