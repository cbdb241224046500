"""Pickles what is sent to workers, and names the part of it that cannot be pickled.

The search goes down from what the user passed, through items, attributes and closures, for as long
as one of them alone cannot be pickled either.
"""

from __future__ import annotations

import functools
import inspect
import io
import types
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import cloudpickle

from rlpool.errors import WorkerStartupError

_DEPTH = 8
"""Longest path that is named."""

_ATOMS = (str, bytes, bytearray, int, float, complex, bool, type(None), types.ModuleType)
"""What can always be pickled."""


def pickled(parts: Mapping[str, Any], value: Any, *, fix: str, what: str = "") -> bytes:
    """The pickle of an object for another process.

    Args:
        parts: What the object consists of, by the names that its user knows.
        value: The object.
        fix: What to do about a part that cannot be pickled.
        what: What an error calls the part, if that is not its name.

    Raises:
        WorkerStartupError: Naming the part, the path in it and the type of what cannot be pickled.
    """
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise WorkerStartupError(why_not(parts, error, what=what), fix=fix) from error
    return data


def why_not(
    parts: Mapping[str, Any],
    error: Exception,
    *,
    what: str = "",
    kind: type[Any] = cloudpickle.Pickler,
) -> str:
    """One line that says which part cannot be pickled, and why.

    Args:
        parts: What was pickled, by the names that its user knows.
        error: What the pickler raised.
        what: What the line calls the part, if that is not its name.
        kind: The class of the pickler.
    """
    for name, part in parts.items():
        if (cause := _failure(part, kind)) is not None:
            place, passed = name, [part]
            while len(passed) <= _DEPTH and (found := _failing_content(passed, kind)) is not None:
                place, cause = place + found[0], found[2]
                passed.append(found[1])
            place = place if len(passed) > 1 else "it"
            is_what = f"{place} is {_described(passed[-1])} ({_one_line(cause)})"
            return f"{what or name} cannot be pickled: {is_what}"
    return f"{what or ', '.join(parts)} cannot be pickled: {_one_line(error)}"


def _failure(value: Any, kind: type[Any]) -> Exception | None:
    """What the pickler raises at a value, if it raises."""
    if not isinstance(value, _ATOMS):
        try:
            kind(io.BytesIO()).dump(value)
        except Exception as error:
            return error
    return None


def _failing_content(passed: Sequence[Any], kind: type[Any]) -> tuple[str, Any, Exception] | None:
    """What the last of some objects holds that cannot be pickled: the step there, it, and why."""
    with suppress(Exception):  # of what containers and attributes of the user's do when read
        for step, inner in _contents(passed[-1]):
            error = _failure(inner, kind)
            if error is not None and all(inner is not known for known in passed):
                return step, inner, error
    return None


def _contents(value: Any) -> Iterable[tuple[str, Any]]:
    """What an object holds, with the step that leads there."""
    if isinstance(value, Mapping):
        return ((f"[{key!r}]", inner) for key, inner in value.items())
    if isinstance(value, tuple | list):
        return ((f"[{number}]", inner) for number, inner in enumerate(value))
    if isinstance(value, functools.partial):
        parts = {".func": value.func, ".args": value.args, ".keywords": value.keywords}
        return parts.items()
    if isinstance(value, types.FunctionType):
        names = inspect.getclosurevars(value)
        found = [(f".<closure {name!r}>", inner) for name, inner in names.nonlocals.items()]
        return found + [(f".<global {name!r}>", inner) for name, inner in names.globals.items()]
    hidden = ("__dict__", "__weakref__")  # of a class, which pickles itself without them
    return [(f".{name}", inner) for name, inner in vars(value).items() if name not in hidden]


def _described(value: Any) -> str:
    """What an object is, such as ``"a _thread.lock"``."""
    kind = type(value)
    has_plain_name = kind.__module__ in ("builtins", "__main__")
    name = kind.__qualname__ if has_plain_name else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _one_line(error: Exception) -> str:
    """An error in one line."""
    words = ""
    with suppress(Exception):
        words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:300]
