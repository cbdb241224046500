"""Signal handlers wait for critical sections; interrupted calls leave a mark."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from rlpool import SpecError, UsageError
from rlpool.machine import interrupts
from rlpool.machine.calls import CrashOnly, crash_only
from rlpool.machine.interrupts import defer_signals

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


class Interrupt(Exception):
    pass


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """Return the signals that a handler received; the one for SIGTERM also raises."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if number == signal.SIGTERM:
            raise Interrupt

    before = {number: signal.signal(number, note) for number in NUMBERS}
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.linux
def test_handlers_run_at_the_end_of_the_section_and_may_raise(handled: list[int]) -> None:
    seen_within = [0]

    def interrupted() -> None:
        with defer_signals():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
                signal.raise_signal(number)
            seen_within[:] = handled

    with pytest.raises(Interrupt):
        interrupted()
    assert seen_within == []
    assert handled == [signal.SIGTERM, signal.SIGINT, signal.SIGALRM]  # even after one that raised


def test_the_outermost_section_counts_and_restores_the_handlers(handled: list[int]) -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    with suppress(Interrupt), defer_signals():
        with defer_signals():
            signal.raise_signal(signal.SIGINT)
        assert handled == []
        raise Interrupt
    assert handled == [signal.SIGINT]
    assert [signal.getsignal(number) for number in NUMBERS] == before


def test_a_stuck_section_can_be_interrupted(
    handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "_PATIENCE_S", 0.0)
    with suppress(Interrupt), defer_signals():
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("not interrupted")


def test_other_threads_are_unaffected() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(defer_signals().__enter__).result()


# Calls ----------------------------------------------------------------------------------------


class Owner(CrashOnly):
    @crash_only
    def run(self, do: Callable[[], Any] = lambda: 3) -> Any:
        return do()


def raising(error: BaseException) -> Callable[[], Any]:
    def do() -> None:
        raise error

    return do


def test_only_foreign_exceptions_mark_an_object_as_interrupted() -> None:
    owner = Owner()
    assert owner.run() == 3
    with pytest.raises(SpecError):
        owner.run(raising(SpecError("no")))
    with pytest.raises(TypeError):
        owner.run(1, 2, 3)  # type: ignore[call-arg]
    assert not owner.is_interrupted
    for error in (KeyboardInterrupt(), ZeroDivisionError()):
        with pytest.raises(type(error)):
            owner.run(raising(error))
        assert owner.is_interrupted
        owner.run()
        assert owner.is_interrupted
        owner.is_interrupted = False


def test_a_nested_call_is_refused_in_any_thread() -> None:
    owner = Owner()
    with ThreadPoolExecutor(1) as pool:
        for call in (owner.run, lambda: pool.submit(owner.run).result()):
            with pytest.raises(UsageError, match="while another call"):
                owner.run(lambda call=call: call())
            owner.is_interrupted = False
            assert call() == 3
