"""States of NumPy's global generator are those that NumPy's own calls give."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rlpool.machine import numpy_state as module
from rlpool.machine.numpy_state import numpy_state, set_numpy_state

RANDOM = np.random  # the legacy generator, which users' code draws from


@pytest.fixture(autouse=True)
def _callers_state() -> Iterator[None]:
    generator, state = RANDOM.get_bit_generator(), RANDOM.get_state()
    yield
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
    assert module._has_words()
    monkeypatch.setattr(module, "_has_words", lambda: has_words)
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
