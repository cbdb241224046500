"""Checks of arguments: alternative names, numbers, choices, and the keywords of functions."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from typing import Any, TypeVar

from rlpool.errors import SpecError

if sys.version_info >= (3, 14):
    import annotationlib

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_LIMITS = {
    "above 0": (math.ulp(0.0), math.inf),
    "from 0 to 1": (0.0, 1.0),
    "from 0 on, and finite": (0.0, sys.float_info.max),
    "that is finite": (-sys.float_info.max, sys.float_info.max),
}
"""The smallest and the largest number allowed for an argument."""


def whole_number(name: str, value: Any, least: int, *, fix: str = "") -> int:
    """Convert an argument to an int. NumPy's and torch's integers are accepted, bools are not.

    Args:
        name: Name of the argument.
        value: The argument.
        least: The smallest number allowed.
        fix: Fix for the error message.

    Raises:
        SpecError: If it is not such a number.
    """
    try:
        number = operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # of tensors: fractions, several, no values
        number = least - 1
    if number < least or isinstance(value, bool) or bool(getattr(value, "shape", None)):
        raise SpecError(f"{name} should be an int of at least {least}, got {value!r}", fix=fix)
    return number


def optional_number(name: str, value: Any, least: int) -> int | None:
    """Like ``whole_number``, for an argument that may be ``None``."""
    return None if value is None else whole_number(name, value, least)


def real_number(name: str, value: Any, limits: str, *, fix: str = "") -> float:
    """Convert an argument to a float. Numbers of NumPy and torch are accepted, bools are not.

    Args:
        name: Name of the argument.
        value: The argument.
        limits: The allowed numbers, a key of ``_LIMITS``.
        fix: Fix for the error message.

    Raises:
        SpecError: If it is not such a number.
    """
    number = _python_number(value)
    least, most = _LIMITS[limits]
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    with suppress(OverflowError):  # an int may be larger than any float
        if is_number and least <= number <= most:
            return float(number)
    raise SpecError(f"{name} should be a number {limits}, got {value!r:.60}", fix=fix)


def keywords(name: str, value: Any) -> dict[str, Any]:
    """Copy a dict of arguments by name, ``{}`` for ``None``; SpecError for anything else."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        message = f"{name} should be a dict of arguments by name, got {value!r:.60}"
        raise SpecError(message, fix=f"pass {name}={{'name': value}}")
    return dict(value)


def checked_timeout(timeout: Any, limits: str = "above 0") -> float | None:
    """Check a timeout in seconds, ``None`` for no limit; raises SpecError unless it is positive."""
    if timeout is None:
        return None
    fix = "pass seconds, or timeout=None for no limit"
    return real_number("timeout", timeout, limits, fix=fix)


def check_choice(name: str, value: Any, choices: Sequence[str | bool], *, fix: str = "") -> None:
    """Raise SpecError unless the value is one of ``choices``; NumPy's bools are accepted.

    Raises:
        SpecError: If it is not one of them.
    """
    choice = _python_number(value)
    if not isinstance(choice, str | bool) or choice not in choices:
        *others, last = map(repr, choices)
        raise SpecError(f"{name} should be {', '.join(others)} or {last}, got {value!r}", fix=fix)


def _python_number(value: Any) -> Any:
    """Convert a scalar of NumPy or torch to a Python number; return anything else unchanged."""
    if getattr(value, "shape", None) == ():
        with suppress(RuntimeError):  # for torch's meta tensors, which have no values
            return value.item()
    return value


def also_takes(**meant: str) -> Callable[[FunctionT], FunctionT]:
    """Decorate a function that accepts alternative names for some of its arguments.

    Args:
        **meant: The name of the argument in the signature, by its alternative name.

    Raises:
        SpecError: By the function, if an argument is given by both names.
    """

    def decorated(function: FunctionT) -> FunctionT:
        @functools.wraps(function)
        def renamed(*args: Any, **kwargs: Any) -> Any:
            for name in meant.keys() & kwargs.keys():
                target = meant[name]
                if target in kwargs:
                    message = f"both {target} and {name} are given, two names of the same argument"
                    raise SpecError(message, fix=f"pass {target} alone")
                kwargs[target] = kwargs.pop(name)
            return function(*args, **kwargs)

        return renamed  # type: ignore[return-value]

    return decorated


def signature_of(function: Callable[..., Any], **options: Any) -> inspect.Signature:
    """Like ``inspect.signature``, even if annotations name objects that are not imported."""
    if sys.version_info >= (3, 14):  # evaluates annotations on access
        options["annotation_format"] = annotationlib.Format.FORWARDREF
    return inspect.signature(function, **options)


def takes_keyword(function: Callable[..., Any], name: str, *, otherwise: bool = True) -> bool:
    """Whether a function, class or callable object can be called with a keyword argument.

    Args:
        function: The function.
        name: The keyword.
        otherwise: The answer if the signature does not decide it: for ``**kwargs``, unless
            ``functools.wraps`` shows where they go, and for objects without a signature.
    """
    for follow_wrapped in (False, True):
        try:
            parameters = signature_of(function, follow_wrapped=follow_wrapped).parameters
        except (TypeError, ValueError):
            return otherwise
        if name in parameters:
            return parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY
        if all(each.kind is not each.VAR_KEYWORD for each in parameters.values()):
            return False
    return otherwise


def called_with_seed(
    create: Callable[..., Any], seed: int | None, arguments: Mapping[str, Any]
) -> Any:
    """Call a factory, with a seed if it takes one; a ``seed`` among its arguments has priority."""
    if takes_keyword(create, "seed"):
        return create(**{"seed": seed, **arguments})
    return create(**arguments)
