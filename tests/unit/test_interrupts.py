"""What signals do to a section that holds them."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from rlpool.machine import interrupts
from rlpool.machine.interrupts import InterruptsHeld

TESTS = Path(__file__).resolve().parents[1]


class Interrupt(Exception):
    pass


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """Signals that a handler saw; the handler of SIGUSR2 raises, too."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if number == signal.SIGUSR2:
            raise Interrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


def test_handlers_run_at_the_end_of_the_section_and_may_raise(handled: list[int]) -> None:
    seen_within: list[int] = [0]

    def strike() -> None:
        with InterruptsHeld():
            signal.raise_signal(signal.SIGUSR2)
            signal.raise_signal(signal.SIGUSR1)
            seen_within[:] = handled

    with pytest.raises(Interrupt):
        strike()
    assert seen_within == []
    assert handled == [signal.SIGUSR2, signal.SIGUSR1]  # also what came after the one that raised


def test_handlers_are_as_before_after_the_section(handled: list[int]) -> None:
    numbers = set(signal.valid_signals())
    before = {number: signal.getsignal(number) for number in numbers}
    with pytest.raises(ValueError, match="within"), InterruptsHeld():
        raise ValueError("within")
    assert {number: signal.getsignal(number) for number in numbers} == before


def test_the_outermost_section_counts(handled: list[int]) -> None:
    with InterruptsHeld():
        with InterruptsHeld():
            signal.raise_signal(signal.SIGUSR1)
        assert handled == []
    assert handled == [signal.SIGUSR1]


def test_a_section_that_is_stuck_may_be_interrupted(
    handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "_PATIENCE_S", 0.0)
    steps: list[str] = []

    def strike() -> None:
        with InterruptsHeld():
            signal.raise_signal(signal.SIGUSR2)
            steps.append("not reached")

    with pytest.raises(Interrupt):
        strike()
    assert steps == []


def test_other_threads_are_left_alone() -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with InterruptsHeld():
                pass
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert errors == []


def test_what_a_handler_raises_is_in_no_cycle() -> None:
    class Canary:
        pass

    def interrupted() -> None:
        canary = Canary()
        alive.append(weakref.ref(canary))
        with InterruptsHeld():
            signal.raise_signal(signal.SIGINT)

    alive: list[weakref.ref[Canary]] = []
    gc.collect()
    gc.disable()
    was_interrupted = False
    try:
        try:
            interrupted()
        except KeyboardInterrupt:
            was_interrupted = True
        assert was_interrupted
        assert alive[0]() is None
    finally:
        gc.enable()


def test_ctrl_c_ends_what_tests_start() -> None:
    assert subprocess.run(["sh", "-c", "kill -INT $$"]).returncode == -signal.SIGINT


@pytest.mark.timeout(120)
def test_ctrl_c_is_tested_where_a_shell_lets_commands_ignore_it() -> None:
    tests = (test_what_a_handler_raises_is_in_no_cycle, test_ctrl_c_ends_what_tests_start)
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *pytest_]
        + [f"{__file__}::{test.__name__}" for test in tests],
        capture_output=True,
        text=True,
        cwd=TESTS.parent,
    )
    assert "2 passed" in run.stdout, run.stdout
