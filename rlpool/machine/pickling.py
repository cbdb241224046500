"""Finds the part of an object for workers that cannot be pickled.

The search descends from the user's object through items, attributes and closures, as long as one of
them cannot be pickled by itself.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import cloudpickle

from rlpool.errors import described

_DEPTH = 8
"""Longest path that is named."""

_WHOLE = ("multiprocessing.", "torch.multiprocessing.")
"""Modules whose objects are not searched: their users do not know the contents of a queue."""


def why_not(
    parts: Mapping[str, Any],
    error: Exception,
    *,
    label: str = "",
    dumps: Callable[[Any], Any] = cloudpickle.dumps,
) -> str:
    """Return one line that names the part that cannot be pickled, and why.

    Args:
        parts: The pickled parts, by the names known to the user.
        error: The pickler's exception.
        label: Name of the part in the line, if different.
        dumps: The pickling function.
    """
    for name, part in parts.items():
        if found := _culprit(name, part, dumps):
            path, text = found
            return f"{label or name} cannot be pickled: {'it' if path == name else path} is {text}"
    return f"{label or ', '.join(parts)} cannot be pickled: {described(error):.300}"


def _culprit(
    path: str, value: Any, dumps: Callable[[Any], Any], *above: Any
) -> tuple[str, str] | None:
    """Find path and description of the innermost part that cannot be pickled; ``None`` if all can.

    Args:
        path: The path to the value.
        value: The value to search.
        dumps: The pickling function.
        *above: The objects on the path.
    """
    if any(value is one for one in above):
        return None
    try:
        dumps(value)
        return None
    except Exception as error:
        text = f"{_described(value)} ({described(error):.300})"
    if len(above) < _DEPTH and not type(value).__module__.startswith(_WHOLE):
        with suppress(Exception):  # users' containers and attributes may raise anything when read
            for step, inner in _contents(value):
                if found := _culprit(path + step, inner, dumps, *above, value):
                    return found
    return path, text


def _contents(value: Any) -> Iterable[tuple[str, Any]]:
    """Return the contents of an object, each with its step of the path."""
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
    hidden = ("__dict__", "__weakref__")  # of a class, which is pickled without them
    return [(f".{name}", inner) for name, inner in vars(value).items() if name not in hidden]


def _described(value: Any) -> str:
    """Describe the type of an object, such as ``"a _thread.lock"``."""
    kind = type(value)
    has_plain_name = kind.__module__ in ("builtins", "__main__")
    name = kind.__qualname__ if has_plain_name else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
