"""States of the global generators are those that Python's and NumPy's own calls give."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from rlpool.machine import generator_states as module
from rlpool.machine.generator_states import (
    numpy_state,
    python_state,
    set_numpy_state,
    set_python_state,
)

RANDOM = np.random  # the legacy generator, which users' code draws from


@pytest.fixture(autouse=True)
def _callers_state() -> Iterator[None]:
    generator, state, pythons = RANDOM.get_bit_generator(), RANDOM.get_state(), random.getstate()
    yield
    random.setstate(pythons)
    RANDOM.set_bit_generator(generator)
    RANDOM.set_state(state)


def drawn() -> list[float]:
    return [*RANDOM.randn(3), *RANDOM.rand(2), *RANDOM.randn(1000)]


@pytest.mark.promise("I6")
@pytest.mark.parametrize("has_words", [True, False])
@pytest.mark.parametrize("n_normal", [0, 1, 2, 1001])  # after an odd number one is kept
def test_a_generator_goes_on_from_its_state(
    monkeypatch: pytest.MonkeyPatch, has_words: bool, n_normal: int
) -> None:
    assert module.kept_at()
    if not has_words:
        monkeypatch.setattr(module, "kept_at", lambda: 0)
    RANDOM.seed(3)
    RANDOM.randn(n_normal)
    state = numpy_state()
    assert (state.words is not None) is has_words
    expected = drawn()
    RANDOM.seed(4)
    RANDOM.randn(1)
    set_numpy_state(state)
    assert drawn() == expected


@pytest.mark.promise("I6")
def test_a_generator_that_the_user_put_in_its_place_is_put_back() -> None:
    before = numpy_state()
    expected = drawn()
    other = RANDOM.PCG64(1)
    RANDOM.set_bit_generator(other)
    state = numpy_state()
    theirs = drawn()
    set_numpy_state(before)
    assert drawn() == expected
    set_numpy_state(state)
    assert RANDOM.get_bit_generator() is other
    assert drawn() == theirs


@pytest.mark.promise("I6")
@pytest.mark.parametrize("has_words", [True, False])
@pytest.mark.parametrize("n_normal", [0, 1])  # after an odd number one is kept
def test_pythons_generator_goes_on_from_its_state(
    monkeypatch: pytest.MonkeyPatch, has_words: bool, n_normal: int
) -> None:
    assert module.python_has_words()
    monkeypatch.setattr(module, "python_has_words", lambda: has_words)
    random.seed(3)
    for _ in range(700 + n_normal):
        random.gauss(0.0, 1.0)
    theirs, state = random.getstate(), python_state()
    assert (state.words is not None) is has_words
    expected = [random.gauss(0.0, 1.0) for _ in range(1000)]
    random.seed(4)
    random.gauss(0.0, 1.0)
    set_python_state(state)
    assert random.getstate() == theirs
    assert [random.gauss(0.0, 1.0) for _ in range(1000)] == expected
