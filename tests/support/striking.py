"""A signal that arrives at any point of a call at which CPython would run its handler."""

from __future__ import annotations

import dis
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Alarm(Exception):
    """What the handler raises."""


@contextmanager
def alarms() -> Iterator[None]:
    """Let SIGALRM raise an ``Alarm``."""

    def raise_alarm(*_: Any) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, raise_alarm)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


_CHECKING = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
"""After instructions of these kinds CPython looks whether a signal has arrived. (``CALL`` also
matches ``CALL_FUNCTION_EX``, in which ``*args`` are passed on.)"""


class Strike:
    """Raises SIGALRM once, at one of the points of rlpool at which CPython looks for signals.

    Not where a Python function returns that was called without ``*args``: since Python 3.11 its
    caller goes on without looking.

    Args:
        number: At which point, counted from 0.
        only: Count only points in functions with these names.

    Attributes:
        has_struck: Whether it came to that.
        n_points: Points that there were so far.
    """

    def __init__(self, number: int, only: Collection[str] = ()) -> None:
        self.has_struck, self.n_points = False, 0
        self._number, self._only = number, only
        self._returned: FrameType | None = None  # to which a function has just returned
        self._opcodes: dict[Any, Any] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if "/rlpool/" not in code.co_filename or code.co_filename.endswith("interrupts.py"):
            return None
        if self.has_struck or (self._only and code.co_name not in self._only):
            return None
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "return":
            self._returned = frame.f_back
        elif event == "opcode":
            self._look(frame)
        return self

    def _look(self, frame: FrameType) -> None:
        names = self._opcodes.get(frame.f_code)
        if names is None:
            found = list(dis.get_instructions(frame.f_code))
            before = [""] + [each.opname for each in found]
            names = {each.offset: name for each, name in zip(found, before, strict=False)}
            self._opcodes[frame.f_code] = names
        name = names.get(frame.f_lasti, "")
        is_inlined = self._returned is frame and name != "CALL_FUNCTION_EX"
        self._returned = None
        if not name.startswith(_CHECKING) or is_inlined:
            return
        self.n_points += 1
        if self.n_points > self._number and not is_hidden(frame):
            self.has_struck = True
            signal.raise_signal(signal.SIGALRM)

    def __enter__(self) -> Strike:
        self._before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)


def is_hidden(frame: FrameType | None) -> bool:
    """Whether Python ignores what is raised there, since a ``__del__`` is at work."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def until_done(call: Callable[[], Any], strike: Strike) -> Any:
    """What a function returns, called again if a handler has raised in it."""
    try:
        with strike:
            return call()
    except Alarm:
        return call()
