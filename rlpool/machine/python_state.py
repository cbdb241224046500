"""The state of Python's global generator, read and written in a fraction of the time.

``random.getstate`` and ``setstate`` convert 624 words one by one, which takes longer than anything
else around a small step. Here the generator's memory is copied: the position and the words, which
follow the head of the object in C. The normal variable that may be kept for the next call of
``random.gauss`` is an attribute.

That is not part of Python's interface. So it is tried on a generator of its own first; where it
does not give what Python's own calls give, these are used.

Reference:
    Matsumoto, Nishimura, "Mersenne twister", ACM TOMACS 8 (1), 1998: 624 words and a position.
"""

from __future__ import annotations

import ctypes
import functools
import random
from typing import Any, NamedTuple

_N_BYTES = 4 + 624 * 4
"""The position and the words."""

_HEAD_BYTES = object.__basicsize__
_GLOBAL: Any = getattr(random.getstate, "__self__", None)


class PythonState(NamedTuple):
    """A state of a ``random.Random``.

    Attributes:
        words: The position and the words; ``None`` if ``rest`` is all of the state.
        rest: The normal variable that is kept, or what Python gives.
    """

    words: bytes | None
    rest: Any


def python_state() -> PythonState:
    """The state of ``random``, a copy."""
    if _has_words():
        return _read(_GLOBAL)
    return PythonState(None, random.getstate())


def set_python_state(state: PythonState) -> None:
    """Let ``random`` continue from a state of ``python_state``."""
    if state.words is None:
        random.setstate(state.rest)
    else:
        _write(_GLOBAL, state)


def _read(generator: Any) -> PythonState:
    words = ctypes.string_at(id(generator) + _HEAD_BYTES, _N_BYTES)
    return PythonState(words, generator.gauss_next)


def _write(generator: Any, state: PythonState) -> None:
    ctypes.memmove(id(generator) + _HEAD_BYTES, state.words, _N_BYTES)
    generator.gauss_next = state.rest


@functools.cache
def _has_words() -> bool:
    """Whether this version of Python can be read and written that way."""
    try:
        kind: Any = random.Random.__base__
        if type(_GLOBAL) is not random.Random or kind.__basicsize__ < _HEAD_BYTES + _N_BYTES:
            return False
        one, other = random.Random(1), random.Random(2)
        one.gauss(0, 1)  # one variable is kept
        before = one.getstate()
        # Written only if the words are where they are expected: the position is the last in Python.
        *words, position = before[1]
        if _read(one).words != bytes(ctypes.c_uint32(position)) + bytes(_words(words)):
            return False
        _write(other, _read(one))
        return other.getstate() == before == one.getstate()
    except (AttributeError, TypeError, ValueError):
        return False


def _words(numbers: list[int]) -> Any:
    return (ctypes.c_uint32 * len(numbers))(*numbers)
