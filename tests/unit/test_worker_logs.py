"""Records from one end of the outbox to the other, within one process."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rlpool.workers.log_records import MAX_CHARACTERS, decode, encode
from rlpool.workers.logs import Levels, LogReader
from rlpool.workers.outbox import MAX_TEXT_BYTES, MAX_UNREAD_BYTES, Outbox


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def kept() -> Iterator[Kept]:
    """A handler of the loggers ``talk``, where INFO is wanted, and ``rlpool``."""
    handler = Kept()
    loggers = [logging.getLogger("talk"), logging.getLogger("rlpool")]
    loggers[0].setLevel(logging.INFO)
    for logger in loggers:
        logger.addHandler(handler)
    yield handler
    for logger in loggers:
        logger.removeHandler(handler)
    loggers[0].setLevel(logging.NOTSET)


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    outbox = Outbox(2)
    yield outbox
    outbox.close()


def record(message: Any, *arguments: Any, level: int = logging.INFO) -> logging.LogRecord:
    return logging.getLogger("talk").makeRecord(
        "talk", level, __file__, 1, message, arguments, None, "record"
    )


def post(outbox: Outbox, message: Any, worker: int = 1, level: int = logging.INFO) -> None:
    outbox.append(worker, encode(record(message, level=level), worker))


def n_blocks(outbox: Outbox) -> int:
    return os.fstat(outbox._open_fd()).st_blocks


def test_a_record_survives_the_way_there() -> None:
    sent = record("%s of %d", "one", 2)
    line = encode(sent, 3)
    assert b"\n" not in line
    arrived = decode(line)
    assert arrived is not None
    assert arrived.worker == 3
    lost = {"args", "msg", "relativeCreated", "worker", "exc_text"}
    assert arrived.getMessage() == "one of 2"
    assert {k: v for k, v in vars(arrived).items() if k not in lost} == {
        k: v for k, v in vars(sent).items() if k not in lost
    }
    assert arrived.relativeCreated == pytest.approx(sent.relativeCreated, abs=1)


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[]", b"{}", b'{"name": "x"}', b"\xff", b"null", b'"text"']
)
def test_what_is_no_record_is_none(line: bytes) -> None:
    assert decode(line) is None


def test_messages_beyond_a_million_characters_are_cut_and_say_so() -> None:
    arrived = decode(encode(record("x" * MAX_CHARACTERS + "the end"), 0))
    assert arrived is not None
    assert arrived.getMessage() == "x" * MAX_CHARACTERS + " [and 7 characters more]"


def test_a_line_that_was_cut_off_spoils_no_other(kept: Kept, outbox: Outbox) -> None:
    reader = LogReader(outbox)
    post(outbox, "before")
    os.write(outbox._open_fd(), b"\n" + encode(record("torn"), 1)[:40])  # then it was killed
    post(outbox, "after")
    reader.deliver()
    assert kept.messages == [
        "before",
        "after",
        "1 log record cut off by the end of a worker",
    ]
    os.write(outbox._open_fd(), b"\n" + encode(record("torn, too"), 1)[:-1])
    reader.expect_last_words()
    reader.deliver()
    assert len(kept.records) == 3  # it might go on
    reader.finish()
    assert kept.messages[3:] == ["1 log record cut off by the end of a worker"]


def test_a_line_may_arrive_in_pieces(kept: Kept, outbox: Outbox) -> None:
    reader = LogReader(outbox)
    line = b"\n" + encode(record("whole"), 1) + b"\n"
    for start in range(0, len(line), 7):
        assert kept.messages == []
        os.write(outbox._open_fd(), line[start : start + 7])
        reader.expect_last_words()
        reader.deliver()
    assert kept.messages == ["whole"]


def test_what_was_not_announced_is_found_after_a_death(kept: Kept, outbox: Outbox) -> None:
    reader = LogReader(outbox)
    os.write(outbox._open_fd(), b"\n" + encode(record("last words"), 1) + b"\n")
    reader.deliver()
    assert kept.messages == []
    reader.expect_last_words()
    reader.deliver()
    assert kept.messages == ["last words"]


def test_dropped_records_are_counted_and_told_once(kept: Kept, outbox: Outbox) -> None:
    reader = LogReader(outbox)
    half = "x" * (MAX_CHARACTERS // 2)
    n_sent = 0
    while not sum(outbox.dropped()):
        post(outbox, half)
        n_sent += 1
    post(outbox, half, worker=0)
    reader.deliver()
    arrived = kept.messages
    assert arrived[: n_sent - 1] == [half] * (n_sent - 1)
    assert [m.partition(" logged")[0] for m in arrived[n_sent - 1 :]] == [
        "1 log record dropped: worker 0",
        "1 log record dropped: worker 1",
    ]
    assert (n_sent - 1) * len(half) > MAX_UNREAD_BYTES - 2 * len(half)
    post(outbox, "there is room again")
    reader.deliver()
    assert kept.messages[n_sent + 1 :] == ["there is room again"]


def test_memory_is_given_back_when_records_were_read(kept: Kept, outbox: Outbox) -> None:
    reader = LogReader(outbox)
    least = n_blocks(outbox)
    most = 0
    for _ in range(40):
        post(outbox, "x" * 500_000)
        most = max(most, n_blocks(outbox))
        reader.deliver()
        kept.records.clear()
    assert most * 512 < 2 * 2**20
    assert n_blocks(outbox) * 512 < least * 512 + 2**19
    assert outbox.size() > 40 * 500_000


def test_the_levels_of_the_caller_decide(kept: Kept, outbox: Outbox) -> None:
    reader = LogReader(outbox)
    post(outbox, "fine", level=logging.DEBUG)
    post(outbox, "coarse", level=logging.INFO)
    reader.deliver()
    assert kept.messages == ["coarse"]
    logging.getLogger("talk").disabled = True
    try:
        post(outbox, "nobody listens", level=logging.ERROR)
        reader.deliver()
    finally:
        logging.getLogger("talk").disabled = False
    assert kept.messages == ["coarse"]


def test_a_handler_that_logs_and_delivers_ends_nowhere_else(kept: Kept, outbox: Outbox) -> None:
    reader = LogReader(outbox)

    class Nested(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            reader.deliver()

    nested = Nested()
    logging.getLogger("talk").addHandler(nested)
    try:
        for number in range(3):
            post(outbox, f"record {number}")
        reader.deliver()
    finally:
        logging.getLogger("talk").removeHandler(nested)
    assert kept.messages == ["record 0", "record 1", "record 2"]


def test_a_handler_may_close(kept: Kept, outbox: Outbox) -> None:
    reader = LogReader(outbox)

    class Closing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            reader.finish()

    closing = Closing()
    logging.getLogger("talk").addHandler(closing)
    try:
        for number in range(2000):  # more than calls can be nested
            post(outbox, f"record {number}")
        reader.deliver()
    finally:
        logging.getLogger("talk").removeHandler(closing)
    assert kept.messages == [f"record {number}" for number in range(2000)]
    assert outbox.closed


def test_finish_hands_over_everything_before_it_raises(kept: Kept, outbox: Outbox) -> None:
    reader = LogReader(outbox)

    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError(record.getMessage())

    failing = Failing()
    logging.getLogger("talk").addHandler(failing)
    try:
        for number in range(3):
            post(outbox, f"record {number}")
        with pytest.raises(OSError, match="record 0"):
            reader.finish()
    finally:
        logging.getLogger("talk").removeHandler(failing)
    assert kept.messages == ["record 0", "record 1", "record 2"]
    assert outbox.closed
    reader.finish()
    reader.deliver()


def test_a_forked_copy_hands_nothing_over(kept: Kept, outbox: Outbox) -> None:
    reader = LogReader(outbox)
    post(outbox, "for the owner")
    pid = os.fork()
    if not pid:
        try:
            reader.deliver()
            reader.finish()
        finally:
            os._exit(len(kept.records))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    reader.deliver()
    assert kept.messages == ["for the owner"]


def test_threads_that_log_at_once_mix_nothing_up(kept: Kept, outbox: Outbox) -> None:
    reader = LogReader(outbox)
    text = {worker: str(worker) * 3000 for worker in (0, 1)}

    def log(worker: int) -> None:
        for _ in range(200):
            post(outbox, text[worker], worker)

    threads = [threading.Thread(target=log, args=(worker,)) for worker in (0, 1)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        reader.deliver()
    reader.finish()
    assert sorted(kept.messages) == [text[0]] * 200 + [text[1]] * 200


def test_levels_travel_whenever_they_change(outbox: Outbox) -> None:
    reader = LogReader(outbox)
    edition = outbox.edition
    reader.deliver()
    assert outbox.edition == edition
    logger = logging.getLogger("talk.deep.down")
    logger.setLevel(logging.DEBUG)
    try:
        reader.deliver()
        assert outbox.edition == edition + 2
        assert Levels(*json.loads(outbox.text())).named["talk.deep.down"] == logging.DEBUG
        logger.setLevel(logging.DEBUG)
        reader.deliver()
        assert outbox.edition == edition + 2
    finally:
        logger.setLevel(logging.NOTSET)
    reader.deliver()
    assert "talk.deep.down" not in Levels(*json.loads(outbox.text())).named


def test_levels_of_too_many_loggers_become_the_least_of_them() -> None:
    named = {f"logger.{number:05}": logging.ERROR for number in range(5000)}
    levels = Levels(logging.WARNING, 0, {**named, "one": logging.DEBUG})
    assert len(levels.encoded()) < MAX_TEXT_BYTES
    assert Levels(*json.loads(levels.encoded())) == (logging.DEBUG, 0, {})


def test_levels_that_are_gone_are_taken_back() -> None:
    logger, root = logging.getLogger("talk.here"), logging.root.level
    now = Levels.now()
    before = now._replace(named={**now.named, "talk.here": logging.ERROR})
    before.apply(None)
    assert logger.level == logging.ERROR
    now.apply(before)
    assert logger.level == logging.NOTSET
    assert logging.root.level == root
