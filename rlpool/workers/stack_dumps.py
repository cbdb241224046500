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
from typing import Any, Literal
from weakref import WeakSet

from rlpool.errors import SpecError, UsageError
from rlpool.machine.arguments import whole_number
from rlpool.machine.interrupts import mark_as_harmless

StackFile = Any
"""Where stacks go: a text file, ``STDERR``, or ``None`` for nowhere."""

STDERR: Literal["stderr"] = "stderr"
"""What ``sys.stderr`` is when stacks are dumped, not when this module was imported."""

stack_sources: WeakSet[Any] = WeakSet()
"""What tells, by a method ``stacks``, what worker processes of this process are doing."""

os.register_at_fork(after_in_child=stack_sources.clear)


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
        so; this waits 2 s at most. With ``n_workers=0`` it is the stacks of this process. To get
        stacks while your program is stuck, see ``rlpool.dump_stacks_on_signal``.

        Args:
            file: Text file to write to as well, by default ``sys.stderr``; ``None`` for none.

        Returns:
            The text.

        Raises:
            UsageError: If this is closed.

        Example:
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0)
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
    main thread, returns. Until then, ``py-spy dump --pid`` shows those of a worker. Send the signal
    to this process only: it ends a worker.

    Args:
        signum: The signal. Its previous handler is not called any more.
        file: Where to print: an open file with a descriptor, by default the standard error.

    Returns:
        A function that undoes this: it restores the signal's handler, and may be repeated.

    Raises:
        UsageError: Outside of the main thread, where Python can set no signal handlers.
        SpecError: For a signal that cannot be handled, or a file without a descriptor.

    Example:
        >>> undo = dump_stacks_on_signal()  # from now on: kill -USR1 <pid>
        >>> undo()
    """
    if threading.current_thread() is not threading.main_thread():
        what = "signal handlers can only be set in the main thread"
        raise UsageError(what, fix="call dump_stacks_on_signal() there")
    number = whole_number("signum", signum, 1, fix="pass a signal such as signal.SIGUSR1")
    try:
        fd = 2 if file is None else file.fileno()
        if number in _undo_of:
            _undo_of[number]()
        faulthandler.unregister(number)  # which refuses what cannot be registered
        previous = signal.signal(number, _printer_to(fd)) or signal.SIG_DFL
        # Last, to be called first: it answers even while C code holds Python's lock. It is given
        # the file rather than the descriptor to keep it open.
        faulthandler.register(number, file or fd, all_threads=True, chain=True)
    except (AttributeError, OSError, RuntimeError, ValueError) as error:
        what = f"stacks cannot be printed to {file!r} on signal {number}: {error}"
        fix = "use signal.SIGUSR1 or signal.SIGUSR2, and an open file with a descriptor"
        raise SpecError(what, fix=fix) from error

    def undo() -> None:
        if _undo_of.get(number) is undo:
            faulthandler.unregister(number)
            signal.signal(number, previous)
            del _undo_of[number]

    _undo_of[number] = undo
    return undo


_undo_of: dict[int, Callable[[], None]] = {}


def _printer_to(fd: int) -> Callable[[int, FrameType | None], None]:
    """A signal handler that prints the workers' stacks; it never raises."""

    @mark_as_harmless
    def print_stacks(signum: int, frame: FrameType | None) -> None:
        try:
            text = "\n".join(source.stacks() for source in stack_sources)
        except Exception as error:  # another thread makes or drops one
            text = f"the stacks of workers could not be read: {error!r}\n"
        # Not through the file, whose buffer the main thread may be just about to fill.
        with suppress(OSError), open(fd, "w", closefd=False, errors="backslashreplace") as out:
            out.write(f"\n{text}")

    return print_stacks
