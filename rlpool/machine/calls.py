"""Calls of objects that own processes: one at a time, and crash-only.

A signal handler that raises may end a call at any line. Nothing is mended then: the object knows
that it was interrupted, and begins again with new processes.
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

    A call that ends neither by returning nor by an ``RlpoolError`` leaves it interrupted. It is for
    the object to drop what was in flight, and to say when it has begun again.

    Calls of an object whose attribute ``_calls`` is another one count as calls of that one.

    Attributes:
        is_interrupted: Whether a call was interrupted since it was begun last.
    """

    is_interrupted = False
    _is_inside = False  # whether a thread is in a call

    def _abandon(self) -> None:
        """End what runs for a call that was interrupted; a second interrupt may prevent it."""
        return

    def _refuse_call(self, caller: Any, name: str) -> None:
        """Refuse a call inside another one.

        Raises:
            UsageError: In any case.
        """
        raise UsageError(
            f"{type(caller).__name__}.{name}() was called in thread "
            f"{threading.current_thread().name!r} while another call of the same object is running",
            fix="hold a threading.Lock around the calls of all threads; only close() and stats() "
            "may be called meanwhile",
        )


def crash_only(call: _Call) -> _Call:
    """Decorate a method of a ``CrashOnly`` object, or of one that belongs to it.

    Where it is interrupted halfway, the object knows. (Python looks for signals after calls and at
    jumps back, so none is noticed between ``try`` or ``except`` and the first statement there.)
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
            # Python itself refuses wrong arguments, before the call begins.
            began = error.__traceback__ is None or error.__traceback__.tb_next is not None
            owner.is_interrupted = owner.is_interrupted or began
            owner._is_inside = False
            if began:
                owner._abandon()
            raise

    return guarded  # type: ignore[return-value]
