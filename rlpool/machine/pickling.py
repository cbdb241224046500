"""Names the part of what is sent to workers that cannot be pickled.

The search descends from what the user passed, through items, attributes and closures, while one of
them alone cannot be pickled either.
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
"""Modules whose objects are named as a whole: their users do not know what is in a queue."""


def why_not(
    parts: Mapping[str, Any],
    error: Exception,
    *,
    label: str = "",
    dumps: Callable[[Any], Any] = cloudpickle.dumps,
) -> str:
    """One line that says which part cannot be pickled, and why.

    Args:
        parts: What was pickled, by the names that its user knows.
        error: What the pickler raised.
        label: What the line calls the part, if that is not its name.
        dumps: What pickles.
    """
    for name, part in parts.items():
        if found := _culprit(name, part, dumps):
            path, text = found
            return f"{label or name} cannot be pickled: {'it' if path == name else path} is {text}"
    return f"{label or ', '.join(parts)} cannot be pickled: {described(error):.300}"


def _culprit(
    path: str, value: Any, dumps: Callable[[Any], Any], *above: Any
) -> tuple[str, str] | None:
    """The innermost part that cannot be pickled, and what it is; ``None`` if all can.

    Args:
        path: The way here.
        value: Where to search.
        dumps: What pickles.
        *above: The objects on the way here.
    """
    if any(value is one for one in above):
        return None
    try:
        dumps(value)
        return None
    except Exception as error:
        text = f"{_described(value)} ({described(error):.300})"
    if len(above) < _DEPTH and not type(value).__module__.startswith(_WHOLE):
        with suppress(Exception):  # whatever users' containers and attributes raise when read
            for step, inner in _contents(value):
                if found := _culprit(path + step, inner, dumps, *above, value):
                    return found
    return path, text


def _contents(value: Any) -> Iterable[tuple[str, Any]]:
    """What an object holds, each with the step of the path that leads there."""
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
