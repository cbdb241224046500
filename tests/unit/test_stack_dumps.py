"""Stacks of processes that are asked, and signals that ask."""

from __future__ import annotations

import faulthandler
import io
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlpool import SpecError, UsageError, dump_stacks_on_signal
from rlpool.errors import Where
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.workers import stacks
from rlpool.workers.outbox import Outbox
from rlpool.workers.stack_dumps import described, note_source
from rlpool.workers.stacks import STACKS_SIGNAL, Stacks, ask, printing_signals


class Child:
    """A process that answers or does not, as ``multiprocessing`` would show it."""

    def __init__(self, source: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    outbox = Outbox(1)
    yield outbox
    outbox.close()


def ask_one(process: Any, outbox: Outbox) -> Stacks:
    (answer,) = ask([0], [process], outbox)
    return answer


def test_a_process_that_has_not_registered_is_not_signalled(outbox: Outbox) -> None:
    child = Child("print('up', flush=True); print(input())")
    try:
        assert child.line() == "up"
        assert ask_one(child, outbox).state == "is starting: it imports what it needs"
        assert child.process.communicate("still here\n")[0] == "still here\n"
    finally:
        child.end()
    assert ask_one(child, outbox).state == "is gone"


def test_a_process_that_does_not_answer_is_given_up(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "PATIENCE_S", 0.2)
    blocked = (
        "import os, signal, time; "
        f"signal.pthread_sigmask(signal.SIG_BLOCK, {{{STACKS_SIGNAL}}}); "
        "print(os.memfd_create('x'), flush=True); time.sleep(1000)"
    )
    child = Child(blocked)
    try:
        outbox._row[1] = (0, int(child.line()), child.pid, 0)
        answer = ask_one(child, outbox)
    finally:
        child.end()
    assert answer == Stacks(0, child.pid, "", "did not answer within 0.2 s")


def test_what_cannot_be_said_is_left_out() -> None:
    def where(worker: int) -> Where:
        if worker == 1:
            raise LookupError("asked in the middle of something")
        return Where(worker, 2, seed=5) if worker else Where(worker)

    answers = [Stacks(0, 10, "a\n"), Stacks(1, 11, "b\n"), Stacks(2, None, "", "is gone")]
    assert described(answers, where) == (
        "worker 0 (pid 10): no episode\na\n\n"
        "worker 1 (pid 11): no episode\nb\n\n"
        "worker 2 is gone: lane 2, seed 5\n"
    )


class Source:
    def __init__(self, text: str) -> None:
        self._text = text

    def worker_stacks(self) -> str:
        if self._text == "raise":
            raise LookupError("in the middle of something")
        return self._text


def test_a_signal_prints_own_stacks_and_those_of_workers_until_undone(tmp_path: Path) -> None:
    calls: list[int] = []

    def mine(number: int, frame: Any) -> None:
        calls.append(number)

    before = signal.signal(signal.SIGUSR2, mine)
    sources = [Source("worker 0 is fine\n"), Source("raise"), Source("")]
    for source in sources:
        note_source(source)
    try:
        with open(tmp_path / "stacks", "w") as file:
            undo = dump_stacks_on_signal(signal.SIGUSR2, file)
            assert signal.SIGUSR2 in printing_signals
            with InterruptsHeld():
                signal.raise_signal(signal.SIGUSR2)
            signal.raise_signal(signal.SIGUSR2)
            text = (tmp_path / "stacks").read_text()
            assert text.count(" in test_a_signal_prints_own_stacks") == 2
            assert text.count("\nworker 0 is fine\n") == 2
            assert text.count("could not be read: LookupError('in the middle of something')") == 2
            assert calls == []
            undo()
            undo()
        assert printing_signals == {}
        assert not faulthandler.unregister(signal.SIGUSR2)
        assert signal.getsignal(signal.SIGUSR2) is mine
        signal.raise_signal(signal.SIGUSR2)
        assert calls == [signal.SIGUSR2]
        assert (tmp_path / "stacks").read_text() == text
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_asking_for_the_same_signal_again_takes_the_new_file(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with open(tmp_path / "first", "w") as first, open(tmp_path / "second", "w") as second:
        undo_first = dump_stacks_on_signal(signal.SIGUSR2, first)
        undo_second = dump_stacks_on_signal(signal.SIGUSR2, second)
        undo_first()  # which has no meaning any more
        signal.raise_signal(signal.SIGUSR2)
        undo_second()
    assert (tmp_path / "first").read_text() == ""
    assert "most recent call first" in (tmp_path / "second").read_text()
    assert signal.getsignal(signal.SIGUSR2) is before


def test_nothing_is_registered_unless_it_is_asked_for() -> None:
    # Python's own default, with none of faulthandler in front of it.
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert not faulthandler.unregister(signal.SIGUSR1)
    assert not faulthandler.unregister(STACKS_SIGNAL)


@pytest.mark.parametrize(
    ("number", "file", "message"),
    [
        ("SIGUSR1", None, "signum should be a signal such as signal.SIGUSR1, got 'SIGUSR1'"),
        (True, None, "signum should be"),
        (0, None, "signum should be"),
        (signal.SIGKILL, None, "signal 9 cannot be handled"),
        (signal.SIGSEGV, None, "signal 11 cannot be handled"),
        (1000, None, "signal 1000 cannot be handled"),
        (signal.SIGUSR2, io.StringIO(), "file should have a descriptor"),
        (signal.SIGUSR2, "stacks.txt", "file should have a descriptor, got 'stacks.txt'"),
    ],
)
def test_what_cannot_be_registered_is_refused(number: Any, file: Any, message: str) -> None:
    handlers = {n: signal.getsignal(n) for n in (signal.SIGSEGV, signal.SIGUSR2)}
    with pytest.raises(SpecError, match=message):
        dump_stacks_on_signal(number, file)
    assert {n: signal.getsignal(n) for n in handlers} == handlers


def test_other_threads_are_refused() -> None:
    errors: list[BaseException] = []

    def call() -> None:
        with suppress(UsageError):
            try:
                dump_stacks_on_signal(signal.SIGUSR2)
            except UsageError as error:
                errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "can only be set in the main thread" in str(errors[0])
