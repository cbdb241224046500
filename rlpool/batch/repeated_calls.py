"""Calls of batchers that do their work once, even if they are repeated after a signal.

A handler may run when a function has returned, before its caller goes on. So what a call has done
is remembered until nothing can come between it and the user: until the last act of the outermost
function, which calls nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from rlpool.batch.requests import Policy
from rlpool.data.infos import Infos
from rlpool.errors import RlpoolError

_NONE = Policy()
_Call = TypeVar("_Call", bound=Callable[..., Any])


def once(call: _Call) -> _Call:
    """Decorate a method of a batcher.

    The oldest request stays where it is until its outcome is handed out here. What else the method
    has done is ``_unconfirmed`` until then.
    """
    checked = call

    @wraps(call)
    def outermost(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        pending = () if self._dispatcher is None else self._dispatcher.pending
        try:
            result = checked(self, *args, **kwargs)
        except RlpoolError as error:
            self._unconfirmed = None
            if pending and pending[0].error is error:
                pending[0].policy = _NONE  # it and its error refer to each other for a while
                del pending[0]
            raise
        self._unconfirmed = None
        if result is not None and pending and pending[0].trajectories is result:
            del pending[0]
        return result

    return outermost  # type: ignore[return-value]


def is_repeated(unconfirmed: tuple[Any, Infos] | None, asked: Any, infos: Infos) -> bool:
    """Whether a call is asked for what an interrupted one has done."""
    if unconfirmed is None:
        return False
    return bool(unconfirmed[0] == asked) and _plain(unconfirmed[1]) == _plain(infos)


def _plain(infos: Infos) -> Any:
    """Infos in a form that can be compared."""
    return [[(k, a.dtype, a.shape, a.tobytes()) for k, a in part.items()] for part in infos]
