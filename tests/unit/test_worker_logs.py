"""Records from workers to the caller, within one process."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlpool.workers import logs as logs_module
from rlpool.workers.log_file import MAX_UNREAD_BYTES, LogFile
from rlpool.workers.logs import Logs, decode, encode, set_levels

pytestmark = pytest.mark.promise("I9")

TALK = logging.getLogger("talk")


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.react: Callable[[logging.LogRecord], None] = lambda record: None

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.react(record)

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def kept() -> Iterator[Kept]:
    """A handler of the loggers ``talk``, where INFO is wanted, and ``rlpool``."""
    handler, loggers = Kept(), [TALK, logging.getLogger("rlpool")]
    TALK.setLevel(logging.INFO)
    for logger in loggers:
        logger.addHandler(handler)
    yield handler
    for logger in loggers:
        logger.removeHandler(handler)
    TALK.setLevel(logging.NOTSET)


@pytest.fixture
def logs() -> Logs:
    return Logs(2)


def record(message: Any, *arguments: Any, level: int = logging.INFO) -> logging.LogRecord:
    return TALK.makeRecord("talk", level, __file__, 1, message, arguments, None, "record")


def file_of(logs: Logs) -> LogFile:
    return logs.of_worker(0)._file


def post(logs: Logs, message: Any, worker: int = 1, level: int = logging.INFO) -> None:
    file_of(logs).append(worker, encode(record(message, level=level), worker))


def write(logs: Logs, text: bytes) -> None:
    """As a worker that is killed before it can point to what it wrote."""
    os.write(file_of(logs)._fd, text)


def test_a_line_that_is_no_record_is_told_apart() -> None:
    arrived = decode(encode(record("%s of %d", "one", 2), 3))
    assert arrived is not None
    assert (arrived.getMessage(), arrived.worker, arrived.funcName) == ("one of 2", 3, "record")
    for line in (b"", b"{", b"[]", b"{}", b'{"name": "x"}', b"\xff", b"null", b'"text"', b"3"):
        assert decode(line) is None


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def test_what_json_does_not_know_arrives_as_text(kept: Kept, logs: Logs) -> None:
    unfit = decode(encode(record("two %s %s", "arguments"), 0))
    assert "two %s %s [the message could not be put together: Type" in unfit.getMessage()
    circle: list[Any] = []
    circle.append(circle)
    odd = record("100 % as it is")
    odd.circle = circle
    arrived = decode(encode(odd, 0))
    assert (arrived.getMessage(), arrived.circle) == ("100 % as it is", "[[...]]")
    with pytest.raises(RuntimeError, match="no text"):  # which WorkerLogs counts as dropped
        encode(record(Unprintable()), 0)


def test_a_line_that_was_cut_off_is_counted_and_spoils_no_other(kept: Kept, logs: Logs) -> None:
    cut_off = "1 log record cut off by the end of a worker"
    post(logs, "before")
    post(logs, "too fine for the caller", level=logging.DEBUG)
    write(logs, b"\n" + encode(record("torn"), 1)[:40])  # then it was killed
    post(logs, "after")
    logs.deliver()
    assert kept.messages == ["before", cut_off, "after"]
    line = b"\n" + encode(record("in pieces"), 1) + b"\n"
    for start in range(0, len(line), 7):
        assert len(kept.messages) == 3
        write(logs, line[start : start + 7])
        logs.deliver()
    write(logs, b"\n" + encode(record("torn, too"), 1)[:-1])
    logs.finish()
    assert kept.messages[3:] == ["in pieces", cut_off]


def test_dropped_records_are_counted_and_memory_is_given_back(kept: Kept, logs: Logs) -> None:
    def n_bytes() -> int:
        return 512 * os.fstat(file_of(logs)._fd).st_blocks

    least, half, n_sent = n_bytes(), "x" * 500_000, 0
    while not sum(file_of(logs).dropped()):
        assert n_sent * len(half) < MAX_UNREAD_BYTES
        post(logs, half)
        n_sent += 1
    post(logs, half, worker=0)
    logs.deliver()
    arrived = kept.messages
    assert arrived[: n_sent - 1] == [half] * (n_sent - 1)
    assert [m.partition(" logged")[0] for m in arrived[n_sent - 1 :]] == [
        "1 log record dropped: worker 0",
        "1 log record dropped: worker 1",
    ]
    assert (n_sent - 1) * len(half) > MAX_UNREAD_BYTES - 2 * len(half)
    for _ in range(40):
        post(logs, half)
        logs.deliver()
        assert n_bytes() < least + 2**20
    assert kept.messages[n_sent + 1 :] == [half] * 40


@pytest.mark.parametrize("react", [Logs.deliver, Logs.finish])
def test_a_handler_may_deliver_and_close(
    react: Callable[[Logs], None], kept: Kept, logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs_module, "_PATIENCE_S", 0.01)
    texts = [f"record {number}" for number in range(2000)]  # more than calls can be nested
    kept.react = lambda _: react(logs)
    for text in texts:
        post(logs, text)
    logs.deliver()
    assert kept.messages == texts
    assert file_of(logs).closed == (react is Logs.finish)


def test_finish_hands_over_everything_before_it_raises(kept: Kept, logs: Logs) -> None:
    def fail(record: logging.LogRecord) -> None:
        raise OSError(record.getMessage())

    kept.react = fail
    for number in range(3):
        post(logs, f"record {number}")
    with pytest.raises(OSError, match="record 0"):
        logs.finish()
    assert kept.messages == ["record 0", "record 1", "record 2"]
    logs.finish()
    logs.deliver()
    assert file_of(logs).closed


def test_a_forked_copy_hands_nothing_over(kept: Kept, logs: Logs) -> None:
    post(logs, "for the owner")
    pid = os.fork()
    if not pid:
        try:
            logs.deliver()
            logs.finish()
        finally:
            os._exit(len(kept.records))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    logs.deliver()
    assert kept.messages == ["for the owner"]


def test_levels_travel_whenever_they_change_and_are_taken_back(logs: Logs) -> None:
    edition = file_of(logs).edition
    logs.deliver()
    assert file_of(logs).edition == edition
    deep = logging.getLogger("talk.deep.down")
    deep.setLevel(logging.DEBUG)
    try:
        for _ in range(2):
            logs.deliver()
            assert file_of(logs).edition == edition + 1
        before = json.loads(file_of(logs).published())
        assert before["talk.deep.down"] == logging.DEBUG
    finally:
        deep.setLevel(logging.NOTSET)
    logs.deliver()
    set_levels({}, before)  # as a worker does
    assert deep.level == logging.DEBUG
    set_levels(before, json.loads(file_of(logs).published()))
    assert deep.level == logging.NOTSET
