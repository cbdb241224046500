"""What workers log reaches the caller's ``logging``.

In a worker every record that its logger lets through is written to a file that all workers share,
whatever handlers there are; handlers that print to the worker's own stdout or stderr are skipped,
as the caller has handlers of its own. In the caller the records go to the loggers of the same
names, whose levels, filters, and handlers decide. Nothing runs in the background there: records are
handed over whenever the caller is inside rlpool.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections import deque
from itertools import count
from typing import Any, NamedTuple

from rlpool.machine.interrupts import InterruptsHeld
from rlpool.workers.log_file import MAX_TEXT_BYTES, LogFile
from rlpool.workers.log_records import decode, encode, notice

_PATIENCE_S = 1.0
"""How long to wait for a thread that hands records over to a slow handler."""

_unused_levels = count(-20260101, -1)
"""Levels that nobody logs at. ``logging`` remembers that it was asked about one until any level is
changed: it forgets all answers then."""


class Levels(NamedTuple):
    """The caller's levels, by which workers tell what is worth sending.

    Attributes:
        root: Level of the root logger.
        disabled: What ``logging.disable`` was called with.
        named: Levels of the loggers that have one.
    """

    root: int
    disabled: int
    named: dict[str, int]

    @classmethod
    def now(cls) -> Levels:
        """The levels of this process."""
        manager = logging.root.manager
        named = {
            name: logger.level
            for name, logger in list(manager.loggerDict.items())
            if isinstance(logger, logging.Logger) and logger.level
        }
        return cls(logging.root.level, manager.disable, named)

    def encoded(self) -> bytes:
        """For workers. With too many levels they send what the least one lets through."""
        text = json.dumps(self).encode()
        if len(text) > MAX_TEXT_BYTES:
            text = json.dumps((min(self.root, *self.named.values()), self.disabled, {})).encode()
        return text

    def apply(self, before: Levels | None) -> None:
        """Set them in this process, where others may have been set before."""
        # Only what differs: each change makes logging forget what it knows of all loggers.
        if logging.root.manager.disable != self.disabled:
            logging.disable(self.disabled)
        gone = dict.fromkeys(before.named, logging.NOTSET) if before else {}
        for name, level in {"root": self.root, **gone, **self.named}.items():
            if (logger := logging.getLogger(name)).level != level:
                logger.setLevel(level)


class WorkerLogs:
    """A worker's end: pickled to the worker, it is connected there.

    Args:
        file: Where to write.
        worker: Number of the worker.
    """

    def __init__(self, file: LogFile, worker: int) -> None:
        self._file = file
        self._worker = worker
        self._edition = -1
        self._levels: Levels | None = None

    def connect(self) -> None:
        """Let this process log into the file.

        Handlers that exist already come from the caller's main module, which a worker imports
        first. They are removed: the caller's handle the same records.
        """
        for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
            if isinstance(logger, logging.Logger):
                logger.handlers.clear()
        self._follow_levels()
        is_enabled_for_ = logging.Logger.isEnabledFor

        def is_enabled_for(logger: logging.Logger, level: int) -> bool:
            self._follow_levels()
            return is_enabled_for_(logger, level)

        def call_handlers(logger: logging.Logger, record: logging.LogRecord) -> None:
            self._send(record)
            _call_own_handlers(logger, record)

        # Not a handler of the root logger: loggers that do not propagate would not reach it, and a
        # user's configuration may remove it.
        logging.Logger.callHandlers = call_handlers  # type: ignore[method-assign, assignment]
        logging.Logger.isEnabledFor = is_enabled_for  # type: ignore[method-assign, assignment]
        logging.captureWarnings(True)

    def _follow_levels(self) -> None:
        if self._file.edition != self._edition and (published := self._file.published()):
            self._edition, text = published
            before, self._levels = self._levels, Levels(*json.loads(text))
            self._levels.apply(before)

    def _send(self, record: logging.LogRecord) -> None:
        try:
            line = encode(record, self._worker)
        except Exception:  # of the user's objects; the number of such records is all there is
            self._file.drop(self._worker)
        else:
            self._file.append(self._worker, line)


def _call_own_handlers(logger: logging.Logger | None, record: logging.LogRecord) -> None:
    """Call handlers that the user added in the worker, except for those that print."""
    printed = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    while logger is not None:
        for handler in logger.handlers:
            stream: Any = getattr(handler, "stream", None)
            prints = stream is not None and any(stream is other for other in printed)
            if record.levelno >= handler.level and not prints:
                handler.handle(record)
        logger = logger.parent if logger.propagate else None


class Logs:
    """The caller's end: hands the workers' records to the caller's loggers.

    It costs one descriptor, whatever the number of workers.

    Args:
        n_workers: Number of workers.
    """

    def __init__(self, n_workers: int) -> None:
        self._file = LogFile(n_workers)
        self._records: deque[logging.LogRecord] = deque()  # read and not handed over yet
        self._n_told = [0] * n_workers
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._deliverer = 0  # the thread that has the lock
        self._is_finishing = False
        self._levels: Levels | None = None
        self._unused_level = next(_unused_levels)
        self._publish_levels()

    def of_worker(self, worker: int) -> WorkerLogs:
        """What a worker is given when it starts."""
        return WorkerLogs(self._file, worker)

    def expect_last_words(self) -> None:
        """A worker died: look for records that it had no time to point out."""
        self._file.expect_news()

    def deliver(self) -> None:
        """Hand over what was written since the last time, and let workers know today's levels.

        Raises:
            Exception: What a filter or handler of the caller raises, as if the caller had logged.
                That record is gone, the next call hands over those after it.
        """
        if not self._is_mine():
            return
        self._publish_levels()
        has_news = self._records or self._file.has_news()
        # A handler may call rlpool again, from this thread or another.
        if not has_news or not self._lock.acquire(blocking=False):
            return
        self._deliverer = threading.get_ident()
        try:
            # What is written from here on is left to the next call: workers may write faster.
            stop = self._file.size()
            self._hand_over()
            while not self._file.closed and self._file.has_news():
                with InterruptsHeld():
                    self._fetch()
                self._hand_over()
                if self._file.has_read(stop):
                    break
        finally:
            self._deliverer = 0
            self._lock.release()

    def finish(self) -> None:
        """Hand over all that is left, now that all workers have ended, and close the file.

        Raises:
            Exception: The first that a filter or handler of the caller raised.
        """
        if not self._is_mine() or self._is_finishing:
            return
        self._is_finishing = True
        first_error = None
        # Another thread may be handing records over. If this one is, a handler has called close().
        is_mine = self._deliverer == threading.get_ident()
        is_locked = not is_mine and self._lock.acquire(timeout=_PATIENCE_S)
        try:
            self.expect_last_words()
            while self._file.has_news() or self._records:
                self._fetch(is_last=True)
                try:
                    self._hand_over()
                except Exception as error:
                    first_error = first_error or error
        finally:
            self._file.close()
            if is_locked:
                self._lock.release()
        if first_error is not None:
            raise first_error

    def _is_mine(self) -> bool:
        return not self._file.closed and os.getpid() == self._owner_pid

    def _publish_levels(self) -> None:
        """Let the workers know this process's levels, if they have changed."""
        if self._unused_level in getattr(logging.root, "_cache", ()):
            return
        with InterruptsHeld():
            logging.root.isEnabledFor(self._unused_level)
            levels = Levels.now()
            if levels != self._levels:
                self._levels = levels
                self._file.publish(levels.encoded())

    def _fetch(self, *, is_last: bool = False) -> None:
        """Read some records, and once all are read report those that were lost."""
        if not self._file.has_news():
            return
        records = [decode(line) for line in self._file.read()]
        self._records += [record for record in records if record is not None]
        n_torn = records.count(None)
        is_all = not self._file.has_news()
        if is_all and is_last:
            n_torn += self._file.drop_rest()
        if n_torn:
            self._records.append(notice(f"{_n(n_torn)} cut off by the end of a worker", None))
        if not is_all:
            return
        for worker, n_dropped in enumerate(self._file.dropped()):
            n_new, self._n_told[worker] = n_dropped - self._n_told[worker], n_dropped
            if n_new:
                why = f"worker {worker} logged more than is kept while nobody calls rlpool"
                self._records.append(notice(f"{_n(n_new)} dropped: {why}", worker))

    def _hand_over(self) -> None:
        while self._records:
            record = self._records.popleft()
            logger = logging.getLogger(record.name)
            if logger.isEnabledFor(record.levelno):
                logger.handle(record)


def _n(number: int) -> str:
    return f"{number} log record{'' if number == 1 else 's'}"
