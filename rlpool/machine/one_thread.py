"""Objects that one thread at a time may use: two at once would wait for each other's messages."""

from __future__ import annotations

import sys
import threading
from itertools import accumulate, chain, repeat, takewhile
from types import FrameType
from typing import Any

from rlpool.errors import UsageError
from rlpool.machine.interrupts import InterruptsHeld


class OneThread:
    """Refuses a call that begins while another thread is inside one.

    It knows which thread called last, and looks at the stack of that one only if another calls. So
    a call costs a comparison, and none has to say when it ends, however it ends.

    Args:
        opens: Names of the functions that compare ``thread`` with the calling one. What calls
            them, on objects whose ``_one_thread`` this is, is such a call.

    Attributes:
        thread: The thread that called last.
    """

    def __init__(self, *opens: str) -> None:
        self.thread = threading.get_ident()
        self._opens = frozenset(opens)
        self._lock = threading.RLock()

    def hand_over(self) -> None:
        """Let this thread be the one that calls.

        Raises:
            UsageError: If the last one is inside a call.
        """
        me = threading.get_ident()
        with InterruptsHeld(), self._lock:
            # First, so that the other thread asks as well if it calls now.
            last, self.thread = self.thread, me
            inside = self._call_in(last) if last != me else ""
            if not inside:
                return
            self.thread = last
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        mine = self._call_in(me)
        raise UsageError(
            f"{mine} was called in thread {names.get(me, me)!r} while thread "
            f"{names.get(last, last)!r} is inside {inside}",
            fix="hold a threading.Lock around the calls of all threads; only close() and "
            "stats() may be called meanwhile",
        )

    def _call_in(self, thread: int) -> str:
        """The outermost of the calls in which a thread is, ``""`` if it is in none."""
        found = ""
        for frame in _stack_of(thread):
            if self._opens.intersection(frame.f_code.co_names):
                me: Any = frame.f_locals.get("self")
                if getattr(me, "_one_thread", None) is self:
                    found = f"{type(me).__name__}.{frame.f_code.co_name}"
        return found


def _stack_of(thread: int) -> list[FrameType]:
    """The frames of a thread, the innermost first; none if it has ended.

    All in functions in C, during which no other thread runs: a generator that gives its next value
    while Python code looks from frame to frame is cut off from those that called it.
    """
    innermost = map(dict.get, iter(sys._current_frames, None), [thread])
    frames: Any = accumulate(chain(innermost, repeat("f_back")), getattr)  # type: ignore[arg-type]
    return list(takewhile(bool, frames))
