"""Stacks of processes that are asked, and signals that ask."""

from __future__ import annotations

import faulthandler
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlpool import SpecError, UsageError, dump_stacks_on_signal
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.workers import stacks
from rlpool.workers.stack_dumps import note_source
from rlpool.workers.stacks import STACKS_SIGNAL, Stacks, ask, printing_signals


@contextmanager
def child(source: str) -> Iterator[Any]:
    """A process that has printed a line."""
    command = [sys.executable, "-c", source]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline()
        yield process
        process.kill()


def test_a_process_that_cannot_answer_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with child("print('up', flush=True); print(input())") as process:
        # The signal would end it.
        assert ask([3], [process]) == [
            Stacks(3, process.pid, "", "is starting: it imports what it needs")
        ]
        assert process.communicate("still here\n")[0] == "still here\n"
    assert ask([0], [process])[0].state == "is gone"
    monkeypatch.setattr(stacks, "PATIENCE_S", 0.2)
    blocked = (
        "import faulthandler, os, signal, time; "
        f"faulthandler.register({STACKS_SIGNAL}, os.memfd_create('rlpool-stacks')); "
        f"signal.pthread_sigmask(signal.SIG_BLOCK, {{{STACKS_SIGNAL}}}); "
        "print('up', flush=True); time.sleep(1000)"
    )
    with child(blocked) as process:
        answer = Stacks(0, process.pid, "", "did not answer within 0.2 s")
        assert ask([0], [process]) == [answer]


class Source:
    def __init__(self, text: str) -> None:
        self._text = text

    def worker_stacks(self) -> str:
        if self._text == "raise":
            raise LookupError("in the middle of something")
        return self._text


def test_a_signal_prints_own_stacks_and_those_of_workers_until_undone(tmp_path: Path) -> None:
    # Nothing is registered unless it is asked for.
    assert not faulthandler.unregister(signal.SIGUSR1)
    assert not faulthandler.unregister(STACKS_SIGNAL)
    calls: list[int] = []

    def mine(number: int, frame: Any) -> None:
        calls.append(number)

    before = signal.signal(signal.SIGUSR2, mine)
    sources = [Source("worker 0 is fine\n"), Source("raise"), Source("")]
    for source in sources:
        note_source(source)
    try:
        with open(tmp_path / "first", "w") as first, open(tmp_path / "stacks", "w") as file:
            undo_first = dump_stacks_on_signal(signal.SIGUSR2, first)
            undo = dump_stacks_on_signal(signal.SIGUSR2, file)  # takes its place
            undo_first()
            assert printing_signals == {signal.SIGUSR2: file.fileno()}
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
        assert (tmp_path / "first").read_text() == ""
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize(
    ("number", "file", "message"),
    [
        ("SIGUSR1", None, "signum should be a signal such as signal.SIGUSR1, got 'SIGUSR1'"),
        (signal.SIGKILL, None, "signal 9 cannot be handled"),
        (signal.SIGSEGV, None, "signal 11 cannot be handled"),
        (signal.SIGUSR2, "stacks.txt", "file should have a descriptor, got 'stacks.txt'"),
    ],
)
def test_what_cannot_be_registered_is_refused(number: Any, file: Any, message: str) -> None:
    handlers = {n: signal.getsignal(n) for n in (signal.SIGSEGV, signal.SIGUSR2)}
    with pytest.raises(SpecError, match=message):
        dump_stacks_on_signal(number, file)
    with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="in the main thread"):
        pool.submit(dump_stacks_on_signal).result()
    assert {n: signal.getsignal(n) for n in handlers} == handlers
