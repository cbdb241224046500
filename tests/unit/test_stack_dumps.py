"""Stacks of processes that are asked, and signals that ask."""

from __future__ import annotations

import faulthandler
import io
import os
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
from rlpool.workers import stacks
from rlpool.workers.stack_dumps import stack_sources
from rlpool.workers.stacks import STACKS_SIGNAL, Stacks, ask


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
    is_broken = False

    def stacks(self) -> str:
        if self.is_broken:
            raise LookupError("in the middle of something")
        return "worker 0 is fine\n"


def test_a_signal_prints_own_stacks_and_those_of_workers_until_undone(tmp_path: Path) -> None:
    # Nothing is registered unless it is asked for.
    assert not faulthandler.unregister(signal.SIGUSR1)
    assert not faulthandler.unregister(STACKS_SIGNAL)
    calls: list[int] = []

    def mine(number: int, frame: Any) -> None:
        calls.append(number)

    before = signal.signal(signal.SIGUSR2, mine)
    source = Source()
    stack_sources.add(source)
    try:
        with open(tmp_path / "first", "w") as first, open(tmp_path / "stacks", "w") as file:
            undo_first = dump_stacks_on_signal(signal.SIGUSR2, first)
            undo = dump_stacks_on_signal(signal.SIGUSR2, file)  # takes its place
            undo_first()
            for source.is_broken in (False, True):
                signal.raise_signal(signal.SIGUSR2)
            text = (tmp_path / "stacks").read_text()
            assert text.count(" in test_a_signal_prints_own_stacks") == 2
            assert text.count("\nworker 0 is fine\n") == 1
            assert text.count("could not be read: LookupError('in the middle of something')") == 1
            assert calls == []
            undo()
            undo()
        assert not faulthandler.unregister(signal.SIGUSR2)
        assert signal.getsignal(signal.SIGUSR2) is mine
        signal.raise_signal(signal.SIGUSR2)
        assert calls == [signal.SIGUSR2]
        assert (tmp_path / "stacks").read_text() == text
        assert (tmp_path / "first").read_text() == ""
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_forked_copy_of_this_process_has_no_workers_to_tell_of(tmp_path: Path) -> None:
    source = Source()
    stack_sources.add(source)
    with open(tmp_path / "stacks", "w") as file:
        undo = dump_stacks_on_signal(signal.SIGUSR2, file)
        child = os.fork()
        if not child:
            signal.raise_signal(signal.SIGUSR2)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        undo()
    text = (tmp_path / "stacks").read_text()
    assert " in test_a_forked_copy" in text
    assert "worker 0" not in text


def test_a_file_that_is_refused_leaves_an_earlier_one_in_place(tmp_path: Path) -> None:
    with open(tmp_path / "stacks", "w") as file:
        undo = dump_stacks_on_signal(signal.SIGUSR2, file)
        with pytest.raises(SpecError, match="to 'other'"):
            dump_stacks_on_signal(signal.SIGUSR2, "other")
        signal.raise_signal(signal.SIGUSR2)
        undo()
    assert " in test_a_file_that_is_refused" in (tmp_path / "stacks").read_text()


@pytest.mark.parametrize(
    ("number", "file", "message"),
    [
        ("SIGUSR1", None, "signum should be an int .* got 'SIGUSR1'\n.* such as signal.SIGUSR1"),
        (signal.SIGKILL, None, "on signal 9: .*\n.*use signal.SIGUSR1"),
        (signal.SIGSEGV, None, "on signal 11: .*\n.*use signal.SIGUSR1"),
        (10_000, None, "on signal 10000: .*\n.*use signal.SIGUSR1"),
        (signal.SIGUSR2, "stacks.txt", "to 'stacks.txt' .*\n.*open file with a descriptor"),
        (signal.SIGUSR2, io.StringIO(), "to <.*StringIO.* on .*\n.*open file with a descriptor"),
    ],
)
def test_what_cannot_be_registered_is_refused(number: Any, file: Any, message: str) -> None:
    handlers = {n: signal.getsignal(n) for n in (signal.SIGSEGV, signal.SIGUSR2)}
    with pytest.raises(SpecError, match=message):
        dump_stacks_on_signal(number, file)
    with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="in the main thread"):
        pool.submit(dump_stacks_on_signal).result()
    assert {n: signal.getsignal(n) for n in handlers} == handlers
