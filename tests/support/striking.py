"""A signal that arrives at any point of a call at which CPython would run its handler."""

from __future__ import annotations

import dis
import functools
import linecache
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import rlpool


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


@contextmanager
def traced(trace: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    """Trace a section, and nothing after it."""
    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # else Python 3.12 shows none in functions called first
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
    """Raises a signal once, at one of the points of rlpool at which CPython looks for signals.

    Not where a Python function returns that was called without ``*args``: since Python 3.11 its
    caller goes on without looking.

    Args:
        number: At which point, counted from 0.
        only: Count only points in functions with these names.
        files: Count only points in files with one of these in their paths below ``rlpool/``; by
            default in all but ``interrupts.py``, which holds signals back.
        signal_number: The signal.
        lines: Count lines instead, but those with a ``return``: functions begin, loops repeat and
            calls end in others. That is many times as fast.

    Attributes:
        has_struck: Whether it came to that.
        n_points: Points that there were so far.
    """

    def __init__(
        self,
        number: int,
        only: Collection[str] = (),
        *,
        files: Collection[str] = (),
        signal_number: int = signal.SIGALRM,
        lines: bool = False,
    ) -> None:
        self.has_struck, self.n_points = False, 0
        self._number, self._only, self._files = number, only, files
        self._signal_number, self._lines = signal_number, lines
        self._returned: FrameType | None = None  # to which a function has just returned
        self._opcodes: dict[Any, Any] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if self.has_struck or (event == "call" and not self._is_counted(frame)):
            return None
        is_point = False
        if event == "call":
            frame.f_trace = self  # else Python 3.13 shows opcodes from the next call on
            frame.f_trace_opcodes, frame.f_trace_lines = not self._lines, self._lines
        elif event == "return":
            self._returned = frame.f_back
        elif event == "opcode":
            is_point = self._is_checking(frame)
        elif event == "line":
            is_point = not is_return(frame.f_code.co_filename, frame.f_lineno)
        if is_point:
            self._count(frame)
        return self

    def _is_counted(self, frame: FrameType) -> bool:
        path = frame.f_code.co_filename
        if not path.startswith(LIBRARY) or (self._only and frame.f_code.co_name not in self._only):
            return False
        path = path.removeprefix(LIBRARY)
        if not self._files:
            return not path.endswith("/interrupts.py")
        return any(part in path for part in self._files)

    def _is_checking(self, frame: FrameType) -> bool:
        names = self._opcodes.get(frame.f_code)
        if names is None:
            found = list(dis.get_instructions(frame.f_code))
            before = [""] + [each.opname for each in found]
            names = {each.offset: name for each, name in zip(found, before, strict=False)}
            self._opcodes[frame.f_code] = names
        name = names.get(frame.f_lasti, "")
        is_inlined = self._returned is frame and name != "CALL_FUNCTION_EX"
        self._returned = None
        return name.startswith(_CHECKING) and not is_inlined

    def _count(self, frame: FrameType) -> None:
        self.n_points += 1
        if self.n_points > self._number and not is_hidden(frame):
            self.has_struck = True
            signal.raise_signal(self._signal_number)

    def __enter__(self) -> Strike:
        self._section = traced(self)
        self._section.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._section.__exit__(None, None, None)


@functools.cache
def is_return(path: str, number: int) -> bool:
    return linecache.getline(path, number).lstrip().startswith("return")


def is_hidden(frame: FrameType | None) -> bool:
    """Whether Python ignores what is raised there, since a ``__del__`` is at work."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False
