"""What workers log reaches the caller's ``logging``.

In a worker every record that its logger lets through becomes a line of an anonymous file that all
workers of a caller append to (``LogFile``), whatever handlers there are. In the caller the records
go to the loggers of the same names, whose levels, filters, and handlers decide. Nothing runs in the
background there: records are handed over whenever the caller is inside rlpool.

The message is formatted where it was logged, and an exception becomes its traceback. What was added
with ``extra={...}`` arrives as numbers, text, lists, and dicts; anything else becomes text.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections import deque
from contextlib import suppress
from itertools import count
from typing import Any

from rlpool.machine.interrupts import InterruptsHeld
from rlpool.workers.log_file import LogFile

_LOG = logging.getLogger("rlpool")

_PATIENCE_S = 1.0
"""How long to wait for a thread that hands records over to a slow handler."""

_CUT_OFF = "cut off by the end of a worker"

_unused_levels = count(-20260101, -1)
"""Levels that nobody logs at. ``logging`` remembers that it was asked about one until any level is
changed: it forgets all answers then."""

Levels = dict[str, int]
"""Levels of the loggers that have one, and ``""``: what ``logging.disable`` was called with."""


class WorkerLogs:
    """A worker's end: pickled to the worker, it is connected there.

    Args:
        file: Where to write.
        worker: Number of the worker.
    """

    def __init__(self, file: LogFile, worker: int) -> None:
        self._file = file
        self._worker = worker
        self._edition = 0
        self._levels: Levels = {}

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
            try:
                self._file.append(self._worker, encode(record, self._worker))
            except Exception:  # from the user's objects
                self._file.drop(self._worker)
            _call_own_handlers(logger, record)

        # Not a handler of the root logger: loggers that do not propagate would not reach it, and a
        # user's configuration may remove it.
        logging.Logger.callHandlers = call_handlers  # type: ignore[method-assign, assignment]
        logging.Logger.isEnabledFor = is_enabled_for  # type: ignore[method-assign, assignment]
        logging.captureWarnings(True)

    def _follow_levels(self) -> None:
        edition = self._file.edition
        if edition != self._edition:
            with suppress(ValueError):  # the caller is writing it just now
                levels: Levels = json.loads(self._file.published())
                set_levels(self._levels, levels)
                self._levels, self._edition = levels, edition


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


def current_levels() -> Levels:
    """The levels of this process, by which workers know what is worth sending."""
    manager = logging.root.manager
    named = {
        name: logger.level
        for name, logger in list(manager.loggerDict.items())
        if isinstance(logger, logging.Logger) and logger.level
    }
    return {**named, "root": logging.root.level, "": manager.disable}


def set_levels(before: Levels, now: Levels) -> None:
    """Set levels in this process, and reset those that were set before."""
    # Only what differs: each change makes logging forget what it knows of all loggers.
    for name, level in {**dict.fromkeys(before, logging.NOTSET), **now}.items():
        if not name:
            logging.disable(level)
        elif (logger := logging.getLogger(name)).level != level:
            logger.setLevel(level)


def encode(record: logging.LogRecord, worker: int) -> bytes:
    """One line for a record of a worker, without its end.

    Raises:
        Exception: If an object that was logged cannot be printed.
    """
    try:
        message = record.getMessage()
    except (TypeError, ValueError, KeyError) as error:  # arguments that do not fit the format
        message = f"{record.msg} [the message could not be put together: {error!r}]"
    text = record.exc_text
    if not text and record.exc_info and record.exc_info[0]:
        text = logging.Formatter().formatException(record.exc_info)
    changed = {"msg": message, "args": None, "exc_info": None, "exc_text": text}
    fields = {**vars(record), **changed, "worker": worker}
    try:
        return json.dumps(fields, default=str).encode("ascii")
    except (TypeError, ValueError, RecursionError):  # keys that are not text, circles
        plain = (str, int, float, type(None))
        fields = {str(k): v if isinstance(v, plain) else str(v) for k, v in fields.items()}
        return json.dumps(fields).encode("ascii")


def decode(line: bytes) -> logging.LogRecord | None:
    """The record of a line; ``None`` if the line is incomplete."""
    try:
        record = logging.makeLogRecord(json.loads(line))
    except (ValueError, TypeError):
        return None
    return record if hasattr(record, "worker") else None


class Logs:
    """The caller's end: hands the workers' records to the caller's loggers.

    It costs one descriptor, whatever the number of workers.

    Args:
        n_workers: Number of workers.
    """

    def __init__(self, n_workers: int) -> None:
        self._file = LogFile(n_workers)
        self._lines: deque[bytes] = deque()  # read and not handed over yet
        self._n_told = [0] * n_workers
        self._told_once: set[str] = set()
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._is_finishing = False
        self._unused_level = next(_unused_levels)
        self._publish_levels()

    def of_worker(self, worker: int) -> WorkerLogs:
        """What a worker is given when it starts."""
        return WorkerLogs(self._file, worker)

    def deliver(self) -> None:
        """Hand over what was written since the last time, and publish the current levels.

        Raises:
            Exception: What a filter or handler of the caller raises, as if the caller had logged.
                That record is gone, the next call hands over those after it.
        """
        if not self._is_mine():
            return
        self._publish_levels()
        has_news = self._lines or self._file.has_news()
        # A handler may call rlpool again, from this thread or another.
        if has_news and self._lock.acquire(blocking=False):
            try:
                self._hand_over()
            finally:
                self._lock.release()

    def finish(self) -> None:
        """Hand over all that is left, now that all workers have ended, and close the file.

        Raises:
            Exception: The first that a filter or handler of the caller raised.
        """
        if not self._is_mine() or self._is_finishing:
            return
        self._is_finishing = True
        errors = []
        # Another thread may be handing records over, or this one, if a handler calls close().
        is_locked = self._lock.acquire(timeout=_PATIENCE_S)
        try:
            is_all = False
            while not is_all:
                try:
                    self._hand_over()
                    is_all = not self._file.has_news()
                except Exception as error:
                    errors.append(error)
            self._warn_of_lost(bool(self._file.tail), _CUT_OFF)
        finally:
            self._file.close()
            if is_locked:
                self._lock.release()
        if errors:
            raise errors[0]

    def _is_mine(self) -> bool:
        return not self._file.closed and os.getpid() == self._owner_pid

    def _publish_levels(self) -> None:
        """Let the workers know this process's levels, if they may have changed."""
        if self._unused_level not in getattr(logging.root, "_cache", ()):
            with InterruptsHeld():
                logging.root.isEnabledFor(self._unused_level)
                self._file.publish(json.dumps(current_levels()).encode())

    def _hand_over(self) -> None:
        with InterruptsHeld():
            self._lines += self._file.read()
        while self._lines:
            record = decode(self._lines.popleft())
            if record is None:
                self._warn_of_lost(1, _CUT_OFF)
            elif self._is_repeated(record):
                continue
            elif (logger := logging.getLogger(record.name)).isEnabledFor(record.levelno):
                logger.handle(record)
        for worker, n_dropped in enumerate(self._file.dropped()):
            n_new, self._n_told[worker] = n_dropped - self._n_told[worker], n_dropped
            why = f"dropped: worker {worker} logged too much between two calls, or cannot print it"
            self._warn_of_lost(n_new, why, worker)

    def _is_repeated(self, record: logging.LogRecord) -> bool:
        """Whether rlpool in another worker has said the same, of which one is enough."""
        what = getattr(record, "once", None)
        if record.name != _LOG.name or not isinstance(what, str):
            return False
        is_repeated = what in self._told_once
        self._told_once.add(what)
        return is_repeated

    def _warn_of_lost(self, number: int, why: str, worker: int | None = None) -> None:
        if number:
            records = "1 log record" if number == 1 else f"{number} log records"
            _LOG.warning("%s %s", records, why, extra={"worker": worker})
