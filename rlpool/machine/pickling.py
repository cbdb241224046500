"""Pickles what travels to workers; says which part of it cannot be pickled, and where that is.

The pickler itself tells the culprit: it announces every object before it looks into it, and the
last one announced is the one that it failed at. What remains is a path from what the user passed to
that very object, found by looking where picklers look: items, attributes, slots, closures, bound
methods, partials, and the globals of functions that are not imported by name.
"""

from __future__ import annotations

import functools
import io
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np

from rlpool.errors import WorkerStartupError

_DEPTH = 32
"""Longest path that is looked for: nobody reads a longer one."""

_N_OBJECTS = 200_000
"""Objects that are looked at: a fraction of a second."""

_TRAIL = 64
"""Objects that a pickler began with last: enough to hold what is around the culprit."""

_ATOMS = (str, bytes, bytearray, int, float, complex, bool, type(None), types.ModuleType)
"""What refers to nothing that could be a culprit."""


def pickled(parts: Mapping[str, Any], value: Any, *, fix: str, what: str = "") -> bytes:
    """The pickle of an object for another process.

    Args:
        parts: What the object consists of, by the names that its user knows.
        value: The object.
        fix: What to do about a part that cannot be pickled.
        what: What an error calls the part, if that is not its name.

    Raises:
        WorkerStartupError: Naming the part, the attribute path and the type of what cannot be
            pickled.
    """
    try:
        words: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise WorkerStartupError(why_not(parts, error, what=what), fix=fix) from error
    return words


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
        failure = _failure(part, kind)
        if failure is not None:
            place = _place(name, part, failure, kind)
            cause = _text(failure.error)
            return (
                f"{what or name} cannot be pickled: {place} {_kind_of(failure.culprit)} ({cause})"
            )
    return f"{what or ', '.join(parts)} cannot be pickled: {_text(error)}"


@dataclass(frozen=True)
class _Failure:
    """How a pickler failed.

    Attributes:
        trail: The last objects that it began with; the very last is the culprit.
        error: What it raised.
    """

    trail: Sequence[Any]
    error: Exception

    @property
    def culprit(self) -> Any:
        return self.trail[-1]


def _failure(value: Any, kind: type[Any]) -> _Failure | None:
    """How a pickler fails at a value; ``None`` if it does not fail."""
    trail: deque[Any] = deque([value], maxlen=_TRAIL)

    class Announcing(kind):  # type: ignore[misc]
        def persistent_id(self, inner: Any) -> None:
            if not isinstance(inner, _ATOMS):
                trail.append(inner)

    try:
        Announcing(_Nowhere()).dump(value)
    except Exception as error:
        return _Failure(trail, error)
    return None


def _place(name: str, part: Any, failure: _Failure, kind: type[Any]) -> str:
    """Where the culprit is, up to and including the verb."""
    path = _path(part, failure.culprit)
    if path is not None:
        return f"{name}{path} is" if path else "it is"
    # Made while pickling, such as by a __getstate__: the nearest of its holders must do.
    for holder in reversed(failure.trail):
        path = None if _failure(holder, kind) is None else _path(part, holder)
        if path is not None:
            return f"what {name}{path} hands to the pickler has"
    return "something in it is"


class _Nowhere(io.RawIOBase):
    """A file that keeps nothing: only the error is of interest."""

    def write(self, words: Any) -> int:
        return len(words)


def _path(value: Any, culprit: Any) -> str | None:
    """The shortest path from a value to an object in it; ``None`` if none is found."""
    for everywhere in (False, True):
        path = _shortest(value, culprit, everywhere=everywhere)
        if path is not None:
            return path
    return None


def _shortest(value: Any, culprit: Any, *, everywhere: bool) -> str | None:
    queue = deque([("", value, 0)])
    seen = {id(value): value}  # the objects too: some are made on the way, and ids used again
    while queue:
        path, outer, depth = queue.popleft()
        if outer is culprit:
            return path
        if depth == _DEPTH or len(seen) > _N_OBJECTS:
            continue
        for step, inner in _safely(_parts(outer, everywhere=everywhere)):
            if inner is culprit:
                return path + step
            if id(inner) not in seen:
                seen[id(inner)] = inner
                queue.append((path + step, inner, depth + 1))
    return None


def _safely(parts: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Parts up to the first that cannot be had: a search must not hide the error it explains."""
    try:
        for step, inner in parts:
            if not isinstance(inner, _ATOMS):
                yield step, inner
    except Exception:
        return


def _parts(value: Any, *, everywhere: bool) -> Iterator[tuple[str, Any]]:
    """What a pickler finds in an object, with the step that leads there.

    Args:
        value: The object.
        everywhere: Also what is in functions and classes that are imported by name.
    """
    if isinstance(value, types.FunctionType):
        if everywhere or _goes_by_value(value):
            yield from _parts_of_function(value)
        return
    if isinstance(value, types.MethodType):
        yield from ((".__self__", value.__self__), (".__func__", value.__func__))
        return
    if isinstance(value, type):
        if everywhere or _goes_by_value(value):
            yield from _parts_of_class(value)
        return
    yield from _items(value)
    yield from _attributes(value)
    yield ".__class__", type(value)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """What is in a container, or in one of those objects of Python that hide what they hold."""
    if isinstance(value, dict):
        for key, inner in dict.items(value):
            yield f"[{_short(key)}]", inner
        for key in dict.keys(value):
            yield f".<key {_short(key)}>", key
        yield ".default_factory", getattr(value, "default_factory", None)
    elif isinstance(value, types.MappingProxyType):
        yield from _items(dict(value))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{name}", inner) for name, inner in zip(value._fields, value, strict=False))
    elif isinstance(value, list | tuple | deque):
        inners = ((n, inner) for n, inner in enumerate(value) if not isinstance(inner, _ATOMS))
        yield from ((f"[{number}]", inner) for number, inner in inners)
    elif isinstance(value, set | frozenset):
        yield from ((".<element>", inner) for inner in value)
    elif isinstance(value, np.ndarray) and value.dtype == object:
        yield from ((f".flat[{number}]", inner) for number, inner in enumerate(value.flat))
    elif isinstance(value, functools.partial):
        yield ".func", value.func
        yield from ((f".args[{number}]", inner) for number, inner in enumerate(value.args))
        yield from ((f".keywords[{name!r}]", inner) for name, inner in value.keywords.items())
    elif isinstance(value, staticmethod | classmethod):
        yield ".__func__", value.__func__
    elif isinstance(value, property):
        yield from ((f".{name}", getattr(value, name)) for name in ("fget", "fset", "fdel"))
    elif isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
        yield ".__self__", value.__self__


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Attributes that are stored, never computed: nothing of the user's code runs."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        attributes = {}
    if isinstance(attributes, dict):
        for name, inner in attributes.items():
            yield f".{name}", inner
    for owner in type(value).__mro__:
        for name, slot in vars(owner).items():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    yield f".{name}", slot.__get__(value)
                except (AttributeError, TypeError):  # an empty slot
                    continue


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=False):
        try:
            yield f".<closure {name!r}>", cell.cell_contents
        except ValueError:  # not bound yet
            continue
    defaults = enumerate(function.__defaults__ or ())
    yield from ((f".__defaults__[{number}]", inner) for number, inner in defaults)
    named = (function.__kwdefaults__ or {}).items()
    yield from ((f".__kwdefaults__[{name!r}]", inner) for name, inner in named)
    yield from ((f".{name}", inner) for name, inner in vars(function).items())
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield f".<global {name!r}>", function.__globals__[name]


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _parts_of_class(kind: type) -> Iterator[tuple[str, Any]]:
    yield from ((f".{name}", inner) for name, inner in vars(kind).items())
    yield from ((f".__bases__[{number}]", base) for number, base in enumerate(kind.__bases__))


def _goes_by_value(value: Callable[..., Any]) -> bool:
    """Whether a function or class travels as a whole, since receivers cannot import it."""
    module = sys.modules.get(value.__module__ or "")
    if module is None or value.__module__ == "__main__":
        return True
    found: Any = module
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is not value


def _kind_of(value: Any) -> str:
    """What an object is, such as ``"a _thread.lock"``."""
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    kind = type(value)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _text(error: Exception) -> str:
    """An error in one line."""
    try:
        words = " ".join(str(error).split())
    except Exception:
        words = ""
    return f"{type(error).__name__}: {words}"[:300]


def _short(key: Any) -> str:
    return repr(key) if isinstance(key, _ATOMS) else f"<{type(key).__qualname__}>"
