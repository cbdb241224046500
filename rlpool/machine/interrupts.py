"""Sections that Ctrl-C, SIGTERM and SIGALRM do not interrupt.

Python runs signal handlers between any two instructions of the main thread. A handler that raises,
like that of Ctrl-C, may leave a process, a descriptor or memory behind that nothing refers to yet,
or a pool half written.
"""

from __future__ import annotations

import signal
import threading
import time

# The functions that ``signal`` wraps: its conversion to enums costs a microsecond per signal.
from _signal import getsignal as _get_handler  # type: ignore[import-not-found]
from _signal import signal as _set_handler
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rlpool.machine.platform import HELD_SIGNALS

_PATIENCE_S = 1.0
"""A section takes microseconds to milliseconds. A longer one is stuck and may be interrupted."""


@contextmanager
def blocked_interrupts() -> Iterator[None]:
    """Start processes with SIGINT blocked, until they ignore it themselves."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_ctrl_c: tuple[type[BaseException], ...] = (KeyboardInterrupt,)


def ctrl_c() -> tuple[type[BaseException], ...]:
    """Return the exceptions of Ctrl-C in this process, for an ``except`` clause; none in a worker.

    There a ``KeyboardInterrupt`` comes from the user's code, like any other exception.
    """
    return _ctrl_c


def ignore_ctrl_c() -> None:
    """Ignore Ctrl-C in this worker: the whole group receives it, and the caller decides for all."""
    global _ctrl_c
    _ctrl_c = ()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class defer_signals:  # noqa: N801 (like contextlib.suppress)
    """A ``with`` section that delays the handlers of SIGINT, SIGTERM and SIGALRM to its end.

    They then run in the order in which the signals arrived, and may raise. In nested sections they
    run at the end of the outermost one. Outside the main thread, where no handlers run, a section
    does nothing.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._held: list[int] = []
        self._deadline = 0.0  # end of holding signals; 0 outside of the section

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._deadline = time.monotonic() + _PATIENCE_S
        try:
            for number in HELD_SIGNALS:
                handler = _get_handler(number)
                # Not the default (an int), not ignored, and not held by an outer section already.
                if callable(handler) and not _is_held(handler):
                    self._handlers[number] = handler
                    _set_handler(number, self._hold)
        except BaseException:  # from a handler that was not held yet
            self._restore()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._restore()
        finally:
            _raise_all(self._held)

    def _restore(self) -> None:
        # Before the loop, so that a handler that raises in it leaves no other one held.
        self._deadline = 0.0
        for number, handler in self._handlers.items():
            _set_handler(number, handler)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() < self._deadline:
            self._held.append(number)
            return
        handler = self._handlers[number]
        if not self._deadline:
            _set_handler(number, handler)
        handler(number, frame)


def _raise_all(numbers: Sequence[int]) -> None:
    """Run the handlers of all signals, even if one raises.

    Recursive, because an ``ExitStack`` would put the exception into a reference cycle, so that an
    owner of processes in its frames could not be freed at once.
    """
    if numbers:
        try:
            signal.raise_signal(numbers[0])
        finally:
            _raise_all(numbers[1:])


def _is_held(handler: Any) -> bool:
    section = getattr(handler, "__self__", None)
    return isinstance(section, defer_signals) and section._deadline > 0
