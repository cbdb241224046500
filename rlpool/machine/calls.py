"""Calls of objects that own processes: one at a time, and crash-only.

A signal handler that raises may end a call at any line. No state is repaired then: the object
records that it was interrupted, and starts again with new processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from rlpool.errors import RlpoolError, UsageError

_Call = TypeVar("_Call", bound=Callable[..., Any])


class CrashOnly:
    """An object whose calls, decorated with ``crash_only``, may be interrupted.

    A call that neither returns nor raises an ``RlpoolError`` leaves the object interrupted. The
    object itself drops its work in flight, and resets the flag when it has started again.

    If the attribute ``_calls`` is another object, calls count as calls of that one.

    Attributes:
        is_interrupted: Whether a call was interrupted since the last start.
    """

    is_interrupted = False
    _is_inside = False  # whether a thread is in a call

    def _abandon(self) -> None:
        """End the work of an interrupted call; a second interrupt may prevent it."""
        return

    def _refuse_call(self, caller: Any, name: str) -> None:
        """Refuse a call inside another one.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            f"{type(caller).__name__}.{name}() was called in thread "
            f"{threading.current_thread().name!r} while another call of the same object is running",
            fix="hold a threading.Lock around the calls of all threads; only close() and stats() "
            "may be called in parallel",
        )


def crash_only(call: _Call) -> _Call:
    """Decorate a method of a ``CrashOnly`` object, or of one that belongs to it.

    An interruption in the middle of the call is recorded. (Python checks for signals after calls
    and at jumps back, so not between ``try`` or ``except`` and the first statement there.)
    """

    @wraps(call)
    def guarded(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = self.__dict__.get("_calls", self)
        if owner._is_inside:
            owner._refuse_call(self, call.__name__)
        try:
            owner._is_inside = True
            result = call(self, *args, **kwargs)
            owner._is_inside = False
            return result
        except RlpoolError:
            owner._is_inside = False
            raise
        except BaseException as error:
            # Python itself rejects wrong arguments before the call begins.
            began = error.__traceback__ is None or error.__traceback__.tb_next is not None
            owner.is_interrupted = owner.is_interrupted or began
            owner._is_inside = False
            if began:
                owner._abandon()
            raise

    return guarded  # type: ignore[return-value]
