"""A signal that arrives at any point of a call where CPython would run its handler."""

from __future__ import annotations

import dis
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import rlpool


class Alarm(Exception):
    """Exception raised by the handler."""


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


@contextmanager
def traced(trace: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    """Trace a section, and nothing after it."""
    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # else Python 3.12 traces none in functions called first
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


LIBRARY = str(Path(rlpool.__file__).parent)

_CHECKING = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
"""After instructions of these kinds CPython looks whether a signal has arrived. (``CALL`` also
matches ``CALL_FUNCTION_EX``, in which ``*args`` are passed on.)"""


class Strike:
    """Raises a signal once, at one of the points in rlpool where CPython checks for signals.

    Other points are excluded. An exception raised at the end of an ``except`` clause, for example,
    would keep the handled exception current forever, with all objects its frames refer to. Since
    Python 3.11, a return from a function called without ``*args`` is not followed by a check.

    Args:
        number: Index of the point, from 0.
        files: Count only points in files with one of these in their paths below ``rlpool/``; by
            default in all but ``interrupts.py``, which holds signals back.
        signal_number: The signal.

    Attributes:
        has_struck: Whether the signal was raised.
        n_points: Number of points so far.
    """

    def __init__(
        self,
        number: int,
        *,
        files: Collection[str] = (),
        signal_number: int = signal.SIGALRM,
    ) -> None:
        self.has_struck, self.n_points = False, 0
        self._number, self._files, self._signal_number = number, files, signal_number
        self._names: dict[Any, dict[int, str]] = {}  # of instructions
        self._last: dict[FrameType | None, str] = {}  # the instruction that each frame executes

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if self.has_struck or (event == "call" and not self._is_counted(frame)):
            return None
        if event == "call":
            frame.f_trace = self  # else Python 3.13 traces opcodes only from the next call on
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            last, self._last[frame] = self._last.get(frame, ""), self._name(frame)
            # CPython does not check where a discarded generator ends, which has no line.
            if last.startswith(_CHECKING) and frame.f_lineno is not None:
                self._count(frame)
        elif event == "exception":
            self._last[frame] = ""
        elif event == "return":
            self._last.pop(frame, None)
            if self._last.get(frame.f_back, "CALL_FUNCTION_EX") != "CALL_FUNCTION_EX":
                self._last[frame.f_back] = ""
        return self

    def _is_counted(self, frame: FrameType) -> bool:
        path = frame.f_code.co_filename
        if not path.startswith(LIBRARY):
            return False
        path = path.removeprefix(LIBRARY)
        if not self._files:
            return not path.endswith("/interrupts.py")
        return any(part in path for part in self._files)

    def _name(self, frame: FrameType) -> str:
        names = self._names.get(frame.f_code)
        if names is None:
            found = dis.get_instructions(frame.f_code)
            names = self._names[frame.f_code] = {each.offset: each.opname for each in found}
        return names[frame.f_lasti]

    def _count(self, frame: FrameType) -> None:
        self.n_points += 1
        if self.n_points > self._number and not is_hidden(frame):
            self.has_struck = True
            self._last.clear()
            signal.raise_signal(self._signal_number)

    def __enter__(self) -> Strike:
        self._section = traced(self)
        self._section.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._section.__exit__(None, None, None)


def is_hidden(frame: FrameType | None) -> bool:
    """Whether Python ignores an exception raised here because a ``__del__`` is running."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False
