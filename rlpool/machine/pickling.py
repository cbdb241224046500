"""Pickles what is sent to workers, and names the part of it that cannot be pickled.

The search descends from what the user passed, through items, attributes and closures, while one of
them alone cannot be pickled either.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import cloudpickle

from rlpool.errors import RlpoolError, SpecError, WorkerStartupError, described

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


class ByValue:
    """Data of the user on its way to a worker, where it unpickles to the data itself.

    Pickled as functions that make environments are: a class of a script or notebook is the same
    for both. Later changes of the data do not travel.

    Args:
        name: What errors call the data.
        value: The data.

    Raises:
        SpecError: Naming what cannot be pickled.
    """

    def __init__(self, name: str, value: Any) -> None:
        try:
            self._data: bytes = cloudpickle.dumps(value)
        except Exception as error:
            raise SpecError(
                why_not({name: value}, error),
                fix="pass numbers, arrays, or other objects without open files and locks",
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._data,)


def why_not(parts: Mapping[str, Any], error: Exception, *, what: str = "") -> str:
    """One line that says which part cannot be pickled, and why.

    Args:
        parts: What was pickled, by the names that its user knows.
        error: What the pickler raised.
        what: What the line calls the part, if that is not its name.
    """
    for name, part in parts.items():
        if (found := _culprit(part)) is not None:
            path, culprit, error = found
            place = f"{name}{path}" if path else "it"
            is_what = f"{place} is {_described(culprit)} ({described(error):.300})"
            return f"{what or name} cannot be pickled: {is_what}"
    return f"{what or ', '.join(parts)} cannot be pickled: {described(error):.300}"


def _culprit(value: Any, above: tuple[Any, ...] = ()) -> tuple[str, Any, Exception] | None:
    """The innermost part that cannot be pickled: path, part and error; ``None`` if all can.

    Args:
        value: Where to search.
        above: The objects on the way here.
    """
    if isinstance(value, _ATOMS) or any(value is one for one in above):
        return None
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        cause = error
    else:
        return None
    if len(above) < _DEPTH and not _says_why(value):
        with suppress(Exception):  # whatever users' containers and attributes raise when read
            for step, inner in _contents(value):
                if (found := _culprit(inner, (*above, value))) is not None:
                    return step + found[0], *found[1:]
    return "", value, cause


def _says_why(value: Any) -> bool:
    """Whether an object refuses by itself, so that nothing in it is to blame."""
    try:
        value.__reduce__()
    except RlpoolError:
        return True
    except Exception:
        return False
    return False


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
