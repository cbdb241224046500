"""Calls of objects that own processes: one at a time, and crash-only.

A signal handler that raises may end a call at any line. Nothing is mended then: the object knows
that it was interrupted, and begins again with new processes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any, TypeVar

from rlpool.errors import RlpoolError, UsageError

_Call = TypeVar("_Call", bound=Callable[..., Any])


class CrashOnly:
    """An object whose calls, decorated with ``whole``, may be interrupted.

    A call that ends neither by returning nor by an ``RlpoolError`` leaves it interrupted. It is for
    the object to drop what was in flight, and to call ``forget_interrupt`` once it has begun again.

    Calls of an object whose attribute ``_calls`` is another one count as calls of that one.
    """

    _thread_inside: int | None = None  # the thread that is in a call, or was interrupted in one
    _was_interrupted = False

    @property
    def is_interrupted(self) -> bool:
        """Whether a call was interrupted since ``forget_interrupt``."""
        thread = self._thread_inside
        if thread is not None and not self._is_inside(thread, sys._getframe(1)):
            self._was_interrupted, self._thread_inside = True, None
        return self._was_interrupted

    def forget_interrupt(self) -> None:
        """Let the object count as whole again."""
        self._was_interrupted = False

    def _abandon(self) -> None:
        """End what runs for a call that was interrupted; a second interrupt may prevent it."""
        return

    def _begin_call(self, caller: Any, name: str) -> None:
        """Begin a call of the current thread.

        Raises:
            UsageError: If a thread is inside another one.
        """
        thread, me = self._thread_inside, threading.get_ident()
        if thread is not None:
            if self._is_inside(thread, sys._getframe(2)):
                call = f"{type(caller).__name__}.{name}()"
                if thread == me:
                    what = f"{call} was called inside another call of the same object"
                    raise UsageError(what, fix="call it when that one has returned")
                raise UsageError(
                    f"{call} was called in thread {threading.current_thread().name!r} while "
                    "another thread is inside a call",
                    fix="hold a threading.Lock around the calls of all threads; only close() and "
                    "stats() may be called meanwhile",
                )
            self._was_interrupted = True
        self._thread_inside = me

    def _is_inside(self, thread: int, frame: FrameType | None) -> bool:
        """Whether a thread is inside a call; ``frame`` is where to look if it is this thread.

        Another thread is while it lives, though its call may have been interrupted.
        """
        if thread != threading.get_ident():
            return thread in sys._current_frames()
        while frame is not None:
            if frame.f_code is _GUARDED and frame.f_locals.get("owner") is self:
                return True
            frame = frame.f_back
        return False


def whole(call: _Call) -> _Call:
    """Decorate a method of a ``CrashOnly`` object, or of one that belongs to it.

    Where it is interrupted halfway, the object knows.
    """

    @wraps(call)
    def guarded(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = self.__dict__.get("_calls", self)
        owner._begin_call(self, call.__name__)
        try:
            result = call(self, *args, **kwargs)
            owner._thread_inside = None
            return result
        except RlpoolError:
            owner._thread_inside = None
            raise
        except BaseException as error:
            # Python itself refuses wrong arguments, before the call begins.
            began = error.__traceback__ is None or error.__traceback__.tb_next is not None
            owner._was_interrupted = owner._was_interrupted or began
            owner._thread_inside = None
            if began:
                owner._abandon()
            raise

    return guarded  # type: ignore[return-value]


_GUARDED = whole(lambda self: None).__code__
