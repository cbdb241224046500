"""Records from workers to the caller, within one process."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlpool.workers.log_file import MAX_UNREAD_BYTES, LogFile
from rlpool.workers.log_records import decode, encode
from rlpool.workers.logs import Levels, Logs

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
    os.write(file_of(logs)._open_fd(), text)


def test_a_record_survives_the_way_there() -> None:
    sent = record("%s of %d", "one", 2)
    arrived = decode(encode(sent, 3))
    assert arrived is not None
    assert arrived.worker == 3
    lost = {"args", "msg", "relativeCreated", "worker", "exc_text"}
    assert arrived.getMessage() == "one of 2"
    assert {k: v for k, v in vars(arrived).items() if k not in lost} == {
        k: v for k, v in vars(sent).items() if k not in lost
    }
    assert arrived.relativeCreated == pytest.approx(sent.relativeCreated, abs=1)
    for line in (b"", b"{", b"[]", b"{}", b'{"name": "x"}', b"\xff", b"null", b'"text"'):
        assert decode(line) is None


def test_a_line_that_was_cut_off_is_counted_and_spoils_no_other(kept: Kept, logs: Logs) -> None:
    post(logs, "before")
    write(logs, b"\n" + encode(record("torn"), 1)[:40])  # then it was killed
    post(logs, "after")
    logs.deliver()
    assert kept.messages == ["before", "after", "1 log record cut off by the end of a worker"]
    line = b"\n" + encode(record("in pieces"), 1) + b"\n"
    for start in range(0, len(line), 7):
        assert len(kept.messages) == 3
        write(logs, line[start : start + 7])
        logs.expect_last_words()
        logs.deliver()
    write(logs, b"\n" + encode(record("last words"), 1) + b"\n")
    logs.deliver()
    assert kept.messages[3:] == ["in pieces"]  # a death makes the caller look for more
    logs.expect_last_words()
    logs.deliver()
    write(logs, b"\n" + encode(record("torn, too"), 1)[:-1])
    logs.finish()
    assert kept.messages[4:] == ["last words", "1 log record cut off by the end of a worker"]


def test_dropped_records_are_counted_and_memory_is_given_back(kept: Kept, logs: Logs) -> None:
    def n_bytes() -> int:
        return 512 * os.fstat(file_of(logs)._open_fd()).st_blocks

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


def test_the_levels_of_the_caller_decide(kept: Kept, logs: Logs) -> None:
    post(logs, "fine", level=logging.DEBUG)
    post(logs, "coarse")
    logs.deliver()
    assert kept.messages == ["coarse"]
    TALK.disabled = True
    try:
        post(logs, "nobody listens", level=logging.ERROR)
        logs.deliver()
    finally:
        TALK.disabled = False
    assert kept.messages == ["coarse"]


def test_a_handler_may_deliver_and_close(kept: Kept, logs: Logs) -> None:
    texts = [f"record {number}" for number in range(2000)]  # more than calls can be nested
    for react in (Logs.deliver, Logs.finish):
        kept.react = lambda record, react=react: react(logs)
        kept.records.clear()
        for text in texts:
            post(logs, text)
        logs.deliver()
        assert kept.messages == texts
    assert file_of(logs).closed


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


def test_threads_that_log_at_once_mix_nothing_up(kept: Kept, logs: Logs) -> None:
    text = {worker: str(worker) * 3000 for worker in (0, 1)}

    def log(worker: int) -> None:
        for _ in range(200):
            post(logs, text[worker], worker)

    threads = [threading.Thread(target=log, args=(worker,)) for worker in (0, 1)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        logs.deliver()
    logs.finish()
    assert sorted(kept.messages) == [text[0]] * 200 + [text[1]] * 200


def published(logs: Logs) -> Levels:
    found = file_of(logs).published()
    assert found is not None
    return Levels(*json.loads(found[1]))


def test_levels_travel_whenever_they_change_and_are_taken_back(logs: Logs) -> None:
    edition = file_of(logs).edition
    logs.deliver()
    assert file_of(logs).edition == edition
    deep = logging.getLogger("talk.deep.down")
    deep.setLevel(logging.DEBUG)
    try:
        for _ in range(2):
            logs.deliver()
            assert file_of(logs).edition == edition + 2
        before = published(logs)
        assert before.named["talk.deep.down"] == logging.DEBUG
    finally:
        deep.setLevel(logging.NOTSET)
    logs.deliver()
    now = published(logs)
    before.apply(None)  # as a worker does
    assert deep.level == logging.DEBUG
    now.apply(before)
    assert deep.level == logging.NOTSET
    named = {f"logger.{number:05}": logging.ERROR for number in range(5000)}
    many = Levels(logging.WARNING, 0, {**named, "one": logging.DEBUG})
    assert Levels(*json.loads(many.encoded())) == (logging.DEBUG, 0, {})
