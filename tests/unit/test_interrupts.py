"""Signal handlers wait for sections of bookkeeping."""

from __future__ import annotations

import gc
import signal
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType

import pytest

from rlpool.machine import interrupts
from rlpool.machine.interrupts import InterruptsHeld

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


class Interrupt(Exception):
    pass


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """Signals that a handler saw; that of SIGTERM raises, too."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if number == signal.SIGTERM:
            raise Interrupt

    before = {number: signal.signal(number, note) for number in NUMBERS}
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


def test_handlers_run_at_the_end_of_the_section_and_may_raise(handled: list[int]) -> None:
    seen_within = [0]

    def interrupted() -> None:
        with InterruptsHeld():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
                signal.raise_signal(number)
            seen_within[:] = handled

    with pytest.raises(Interrupt):
        interrupted()
    assert seen_within == []
    assert handled == [signal.SIGTERM, signal.SIGINT, signal.SIGALRM]  # also after one that raised


def test_the_outermost_section_counts_and_restores_the_handlers(handled: list[int]) -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    with suppress(Interrupt), InterruptsHeld():
        with InterruptsHeld():
            signal.raise_signal(signal.SIGINT)
        assert handled == []
        raise Interrupt
    assert handled == [signal.SIGINT]
    assert [signal.getsignal(number) for number in NUMBERS] == before


def test_a_section_that_is_stuck_may_be_interrupted(
    handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "_PATIENCE_S", 0.0)
    with suppress(Interrupt), InterruptsHeld():
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("not interrupted")


def test_other_threads_are_left_alone() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(InterruptsHeld().__enter__).result()


def test_what_a_handler_raises_is_in_no_cycle() -> None:
    class Canary:
        pass

    def interrupted() -> None:
        canary = Canary()
        alive.append(weakref.ref(canary))
        with InterruptsHeld():
            signal.raise_signal(signal.SIGINT)

    alive: list[weakref.ref[Canary]] = []
    gc.disable()
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            interrupted()
        del caught
        assert alive[0]() is None
    finally:
        gc.enable()
