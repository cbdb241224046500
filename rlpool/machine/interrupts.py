"""Bookkeeping that Ctrl-C and other signals do not tear apart.

Python runs signal handlers between any two instructions of the main thread, and a handler that
raises, as the one of Ctrl-C does, leaves half-done whatever it hits: a message taken off a pipe
and acted upon by nobody. Waiting may be interrupted anywhere; what follows waiting may not.
"""

from __future__ import annotations

import signal
import threading
import time

# What ``signal`` wraps. Without the enums, asking for the handlers of all signals takes 2 us.
from _signal import getsignal as _handler_of  # type: ignore[import-not-found]
from _signal import signal as _handle_by
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

_PATIENCE_S = 1.0
"""A section takes microseconds to milliseconds. One that takes longer is stuck, and whoever
presses Ctrl-C then wants out of it."""

_SIGNALS = tuple(int(number) for number in signal.valid_signals())


@contextmanager
def blocked_interrupts() -> Iterator[None]:
    """Let processes start with Ctrl-C blocked, until they ignore it themselves."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_Handler = TypeVar("_Handler", bound=Callable[..., Any])


def mark_as_harmless(handler: _Handler) -> _Handler:
    """Mark a signal handler that tears nothing apart: it only reads, and never raises.

    It is let through everywhere. Holding it would also take away what stands before it in C, such
    as a handler of ``faulthandler``.
    """
    handler._rlpool_is_harmless = True  # type: ignore[attr-defined]
    return handler


class InterruptsHeld:
    """A ``with`` section that the caller's Python signal handlers wait for.

    They run, in order, when the section ends, and may raise there. Sections may be nested: the
    outermost one counts. In other threads than the main one it does nothing, as handlers only run
    in the main thread.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._held: list[int] = []
        self._is_active = False
        self._deadline = 0.0

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._is_active = True
        self._deadline = time.monotonic() + _PATIENCE_S
        try:
            for number, handler in zip(_SIGNALS, map(_handler_of, _SIGNALS), strict=True):
                if type(handler) is int or handler is None:  # the default, ignored, or none of ours
                    continue
                if not _is_holding(handler) and not _is_harmless(handler):
                    self._handlers[number] = handler
                    _handle_by(number, self._hold)
        except BaseException:  # a handler that was not held yet
            self._restore()
            raise

    def __exit__(self, *_: object) -> None:
        if not self._is_active:
            return
        try:
            self._restore()
        finally:
            _raise_all(self._held)

    def _restore(self) -> None:
        # First, so that a handler that raises during the loop leaves none of them held.
        self._is_active = False
        for number, handler in self._handlers.items():
            _handle_by(number, handler)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._is_active and time.monotonic() < self._deadline:
            self._held.append(number)
            return
        handler = self._handlers[number]
        if not self._is_active:
            _handle_by(number, handler)
        handler(number, frame)


def _raise_all(numbers: Sequence[int]) -> None:
    """Run the handlers of signals, all of them, even if one raises.

    No frame of it refers to what is raised (those of an ``ExitStack`` would): whoever owns
    processes and is waited for here shall be dropped with the exception, not some time later.
    """
    if numbers:
        try:
            signal.raise_signal(numbers[0])
        finally:
            _raise_all(numbers[1:])


def _is_holding(handler: Any) -> bool:
    section = getattr(handler, "__self__", None)
    return isinstance(section, InterruptsHeld) and section._is_active


def _is_harmless(handler: Any) -> bool:
    return getattr(handler, "_rlpool_is_harmless", False) is True
