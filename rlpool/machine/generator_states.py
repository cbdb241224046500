"""The states of Python's and NumPy's global generators, read and written in a fraction of the time.

``random.getstate`` and ``numpy.random.get_state`` convert 624 words one by one, which takes longer
than a step of a small environment. Here the words are copied as memory. A normal variable that may
be kept for the next call is an attribute of Python's generator; NumPy's goes through NumPy, whose
``RandomState`` is shown a bit generator without words meanwhile.

That is not part of their interfaces, which have no cheaper way (NumPy's ``set_bit_generator``
exchanges the words at no cost, but drops the variable that is kept, and only ``get_state`` tells
it). So it is tried on generators of our own first; where it does not give what the interfaces give,
or a global generator is of another kind, the interfaces are used.

Reference:
    Matsumoto, Nishimura, "Mersenne twister", ACM TOMACS 8 (1), 1998: 624 words and a position.
"""

from __future__ import annotations

import _random
import ctypes
import functools
import random
import sys
import threading
from array import array
from typing import Any, NamedTuple

import numpy as np

_N_BYTES = 624 * 4 + 4
"""The words, and the position in them."""

_WORDS = ctypes.c_char * _N_BYTES
_PYTHON: Any = random._inst  # draws for the functions of the module

_RANDOM: Any = np.random  # its stubs lack some of what it has
_GLOBAL = _RANDOM.mtrand._rand


class PythonState(NamedTuple):
    """A state of a ``random.Random``.

    Attributes:
        words: The position and the words; ``None`` if ``rest`` is all of the state.
        rest: What Python gives.
    """

    words: bytes | None
    rest: Any


def python_state() -> PythonState:
    """The state of ``random``, a copy."""
    if python_has_words():
        return PythonState(_words_of(_PYTHON).raw, _PYTHON.gauss_next)
    return PythonState(None, _PYTHON.getstate())


def set_python_state(state: PythonState) -> None:
    """Let ``random`` continue from a state of ``python_state``."""
    if state.words is None:
        _PYTHON.setstate(state.rest)
    else:
        _words_of(_PYTHON).raw = state.words
        _PYTHON.gauss_next = state.rest


def _words_of(generator: Any) -> Any:
    """The memory of a generator: an object's header, the position, the words."""
    return _WORDS.from_address(id(generator) + object.__basicsize__)


@functools.cache
def python_has_words() -> bool:
    """Whether this Python's generator can be read and written that way."""
    n_bytes = _random.Random.__basicsize__ - object.__basicsize__
    if sys.implementation.name != "cpython" or not _N_BYTES <= n_bytes < _N_BYTES + 8:
        return False
    one, other = random.Random(1), random.Random(2)
    position, *words = array("I", _words_of(one).raw)
    if (*words, position) != one.getstate()[1]:
        return False
    _words_of(other).raw = _words_of(one).raw
    return other.getstate() == one.getstate()


class NumpyState(NamedTuple):
    """A state of a ``RandomState``.

    Attributes:
        generator: Its bit generator.
        words: The words and the position; ``None`` if ``rest`` is all of the state.
        rest: What NumPy gives.
    """

    generator: Any
    words: bytes | None
    rest: Any


def numpy_state() -> NumpyState:
    """The state of ``numpy.random``, a copy."""
    generator = _RANDOM.get_bit_generator()
    if type(generator) is np.random.MT19937 and numpy_has_words():
        return _read(_GLOBAL)
    return NumpyState(generator, None, _GLOBAL.get_state(legacy=False))


def set_numpy_state(state: NumpyState) -> None:
    """Let ``numpy.random`` continue from a state of ``numpy_state``."""
    if _RANDOM.get_bit_generator() is not state.generator:
        _RANDOM.set_bit_generator(state.generator)
    if state.words is None:
        _GLOBAL.set_state(state.rest)
    else:
        _write(_GLOBAL, state.words, state.rest)


class _WithoutWords:
    """A bit generator that has no words in its ``state``, in this thread."""

    def __init__(self, generator: Any) -> None:
        self._generator, self._thread = generator, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    @property
    def state(self) -> Any:
        if threading.get_ident() != self._thread:
            return self._generator.state
        return {"bit_generator": "MT19937", "state": {}}

    @state.setter
    def state(self, value: Any) -> None:
        if threading.get_ident() != self._thread:
            self._generator.state = value


def _read(random: Any) -> NumpyState:
    generator = random._bit_generator
    words = ctypes.string_at(generator.ctypes.state_address, _N_BYTES)
    random._bit_generator = _WithoutWords(generator)
    try:
        return NumpyState(generator, words, random.get_state(legacy=False))
    finally:
        random._bit_generator = generator


def _write(random: Any, words: bytes, rest: Any) -> None:
    generator = random._bit_generator
    random._bit_generator = _WithoutWords(generator)
    try:
        random.set_state(rest)
    finally:
        random._bit_generator = generator
    ctypes.memmove(generator.ctypes.state_address, words, _N_BYTES)


@functools.cache
def numpy_has_words() -> bool:
    """Whether this version of NumPy can be read and written that way."""
    try:
        one, other = np.random.RandomState(1), np.random.RandomState(2)
        one.normal(size=625)  # an odd number: one variable is kept
        _, words, rest = _read(one)
        _write(other, words or b"", rest)
        return bool(_all(one) == _all(other))
    except (AttributeError, TypeError, ValueError):
        return False


def _all(random: Any) -> Any:
    """The whole state as NumPy gives it, to be compared."""
    state = random.get_state(legacy=False)
    inner = state.pop("state")
    return state, inner["pos"], inner["key"].tolist()
