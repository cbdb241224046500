"""States of Python's global generator are those that Python's own calls give."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from rlpool.machine import python_state as module
from rlpool.machine.python_state import python_state, set_python_state


@pytest.fixture(autouse=True)
def _callers_state() -> Iterator[None]:
    state = random.getstate()
    yield
    random.setstate(state)


def drawn() -> list[float]:
    return [random.gauss(0, 1), *(random.random() for _ in range(700)), random.gauss(0, 1)]


@pytest.mark.promise("I6")
@pytest.mark.parametrize("has_words", [True, False])
@pytest.mark.parametrize("n_normal", [0, 1, 2])  # after an odd number one is kept
def test_a_generator_goes_on_from_its_state(
    monkeypatch: pytest.MonkeyPatch, has_words: bool, n_normal: int
) -> None:
    assert module._has_words()
    monkeypatch.setattr(module, "_has_words", lambda: has_words)
    random.seed(3)
    for _ in range(n_normal):
        random.gauss(0, 1)
    state = python_state()
    assert (state.words is not None) is has_words
    expected = random.getstate()
    drawn()
    set_python_state(state)
    assert random.getstate() == expected
    first = drawn()
    set_python_state(state)
    assert drawn() == first


def test_a_generator_whose_memory_is_another_is_read_by_pythons_own_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_HEAD_BYTES", module._HEAD_BYTES - 8)
    module._has_words.cache_clear()
    try:
        assert not module._has_words()
    finally:
        module._has_words.cache_clear()
