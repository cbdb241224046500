"""The states of Python's and NumPy's global generators, read and written in a fraction of the time.

``random.getstate`` and ``numpy.random.get_state`` convert 624 words one by one, which takes longer
than a step of a small environment. Here the words are copied as memory. A normal variable that may
be kept for the next call is an attribute of Python's generator; of NumPy's ``RandomState`` it is
copied as memory, too, with the flag before it that tells whether there is one.

That is not part of their interfaces, which have no cheaper way (NumPy's ``set_bit_generator``
exchanges the words at no cost, but drops the variable that is kept, and only ``get_state`` tells
it). So it is tried on generators of our own first, in one of which the variable is looked for;
where it does not give what the interfaces give, or a global generator is of another kind, the
interfaces are used.

Reference:
    Matsumoto, Nishimura, "Mersenne twister", ACM TOMACS 8 (1), 1998: 624 words and a position.
"""

from __future__ import annotations

import _random
import ctypes
import functools
import random
import struct
import sys
from array import array
from typing import Any, NamedTuple

import numpy as np

_N_BYTES = 624 * 4 + 4
"""The words, and the position in them."""

_WORDS = ctypes.c_char * _N_BYTES
_KEPT = ctypes.c_char * 16
"""A flag, four unused bytes, and a float64."""
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
        rest: Whether a variable is kept, and which, as memory; or what NumPy gives.
    """

    generator: Any
    words: bytes | None
    rest: Any


def numpy_state() -> NumpyState:
    """The state of ``numpy.random``, a copy."""
    generator = _RANDOM.get_bit_generator()
    if type(generator) is np.random.MT19937 and kept_at():
        return _read(_GLOBAL, kept_at())
    return NumpyState(generator, None, _GLOBAL.get_state(legacy=False))


def set_numpy_state(state: NumpyState) -> None:
    """Let ``numpy.random`` continue from a state of ``numpy_state``."""
    if _RANDOM.get_bit_generator() is not state.generator:
        _RANDOM.set_bit_generator(state.generator)
    if state.words is None:
        _GLOBAL.set_state(state.rest)
    else:
        _write(_GLOBAL, kept_at(), state.words, state.rest)


def _read(random: Any, start: int) -> NumpyState:
    generator = random._bit_generator
    words = _WORDS.from_address(generator.ctypes.state_address)
    return NumpyState(generator, words.raw, _KEPT.from_address(id(random) + start).raw)


def _write(random: Any, start: int, words: bytes, kept: bytes) -> None:
    _WORDS.from_address(random._bit_generator.ctypes.state_address).raw = words
    _KEPT.from_address(id(random) + start).raw = kept


@functools.cache
def kept_at() -> int:
    """Where in a ``RandomState`` the variable is that it keeps; 0 if this NumPy's is unknown."""
    try:
        none, one, other = (np.random.RandomState(seed) for seed in (1, 2, 3))
        one.normal(size=625)  # an odd number: one variable is kept
        memory = ctypes.string_at(id(one), type(one).__basicsize__)
        kept = struct.pack("d", one.get_state(legacy=False)["gauss"])
        if memory.count(kept) != 1:
            return 0
        start = memory.index(kept) - ctypes.sizeof(_KEPT) + len(kept)
        for random in (one, none):
            _, words, rest = _read(random, start)
            _write(other, start, words or b"", rest)
            if _all(random) != _all(other):
                return 0
        return start
    except (AttributeError, TypeError, ValueError):
        return 0


def _all(random: Any) -> Any:
    """The whole state as NumPy gives it, to be compared."""
    state = random.get_state(legacy=False)
    inner = state.pop("state")
    return state, inner["pos"], inner["key"].tolist()
