"""Which keyword arguments functions of the user's take."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any


def takes_keyword(function: Callable[..., Any], name: str, *, otherwise: bool = True) -> bool:
    """Whether a function, class or callable object can be called with a keyword argument.

    Args:
        function: The function.
        name: The keyword.
        otherwise: What to say where the name is not given, but nothing keeps it out: of
            ``**kwargs``, unless ``functools.wraps`` tells what they are handed on to, and of
            what has no signature.
    """
    wrapped: Any = function
    while wrapped is not None:
        try:
            parameters = inspect.signature(wrapped, follow_wrapped=False).parameters
        except (TypeError, ValueError):
            return otherwise
        if name in parameters:
            return parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY
        if all(each.kind is not each.VAR_KEYWORD for each in parameters.values()):
            return False
        wrapped = _wrapped(wrapped)
    return otherwise


def takes_position(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with an argument that is not named."""
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return True
    named_only = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return any(parameter.kind not in named_only for parameter in parameters)


def called_with_seed(
    create: Callable[..., Any], seed: int | None, arguments: Mapping[str, Any]
) -> Any:
    """Call a factory with a seed, if it takes one; ``seed`` among its arguments comes first."""
    if takes_keyword(create, "seed"):
        return create(**{"seed": seed, **arguments})
    return create(**arguments)


def _wrapped(function: Any) -> Any:
    """What a function was put around with ``functools.wraps``, ``None`` if that is not known."""
    if isinstance(function, functools.partial):
        function = function.func
    if inspect.isclass(function):
        function = function.__init__
    elif not inspect.isroutine(function):
        function = type(function).__call__
    return getattr(function, "__wrapped__", None)
