"""Logging in worker processes ends in the caller's ``logging``.

In a worker every record that its logger lets through is written to the outbox, whatever handlers
there are and whoever configured them; handlers that print to the worker's own stdout or stderr are
left out, as the caller has handlers of its own. In the caller the records go to the loggers of
the same names, whose levels, filters and handlers decide. Nothing runs in the background there:
records are handed over whenever the caller is inside of rlpool.
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
from rlpool.workers.log_records import decode, encode, notice
from rlpool.workers.outbox import MAX_TEXT_BYTES, Outbox


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
        """As bytes, for workers. What does not fit is sent, and left to the caller to sort out."""
        text = json.dumps(self).encode()
        if len(text) > MAX_TEXT_BYTES:
            least = min(self.root, *self.named.values())
            text = json.dumps(Levels(least, self.disabled, {})).encode()
        return text

    def apply(self, before: Levels | None) -> None:
        """Set them in this process, where others may have been set before."""
        # Only what differs: each change makes logging forget what it knows of all loggers.
        if logging.root.manager.disable != self.disabled:
            logging.disable(self.disabled)
        gone = before.named.keys() - self.named.keys() if before else ()
        wanted = {"root": self.root, **dict.fromkeys(gone, logging.NOTSET), **self.named}
        for name, level in wanted.items():
            if (logger := logging.getLogger(name)).level != level:
                logger.setLevel(level)


class _Published:
    """In a worker: levels follow the caller's.

    Args:
        outbox: Where the caller publishes them.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._edition = -1
        self._levels: Levels | None = None

    def follow(self) -> None:
        """Take over what the caller has changed."""
        edition = self._outbox.edition
        if edition == self._edition or edition % 2:
            return
        text = self._outbox.text()
        if self._outbox.edition == edition:
            self._edition = edition
            before, self._levels = self._levels, Levels(*json.loads(text))
            self._levels.apply(before)


def send_logs(outbox: Outbox, worker: int) -> None:
    """Let this worker process log into the outbox.

    Handlers that exist already came with the caller's main module, which a worker imports before
    anything else. They are taken away: what they handle the caller's handle, too.
    """
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        if isinstance(logger, logging.Logger):
            logger.handlers.clear()
    published = _Published(outbox)
    published.follow()
    is_enabled_for_ = logging.Logger.isEnabledFor

    def is_enabled_for(self: logging.Logger, level: int) -> bool:
        published.follow()
        return is_enabled_for_(self, level)

    def call_handlers(self: logging.Logger, record: logging.LogRecord) -> None:
        try:
            line = encode(record, worker)
        except Exception:  # nobody can be told but by its number
            outbox.drop(worker)
        else:
            outbox.append(worker, line)
        _call_own_handlers(self, record)

    # Not a handler of the root logger, which loggers that do not propagate would not reach and a
    # user's configuration may remove.
    logging.Logger.callHandlers = call_handlers  # type: ignore[method-assign]
    logging.Logger.isEnabledFor = is_enabled_for  # type: ignore[method-assign]
    logging.captureWarnings(True)


def _call_own_handlers(logger: logging.Logger | None, record: logging.LogRecord) -> None:
    """Call handlers that the user added in the worker, but for those that print."""
    while logger is not None:
        for handler in logger.handlers:
            if record.levelno >= handler.level and not _prints(handler):
                handler.handle(record)
        logger = logger.parent if logger.propagate else None


def _prints(handler: logging.Handler) -> bool:
    stream: Any = getattr(handler, "stream", None)
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return stream is not None and any(stream is other for other in streams)


_PATIENCE_S = 1.0
"""How long to wait for a thread that hands records over to a slow handler."""

_unused_levels = count(-20260101, -1)
"""Levels that nobody logs at. Whether logging remembers that it was asked about such a level tells
whether any level has been changed since: it forgets all answers then."""


class LogReader:
    """Hands the workers' records to the caller's loggers.

    Args:
        outbox: What the workers write to.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._records: deque[logging.LogRecord] = deque()  # read and not handed over yet
        self._n_told = [0] * outbox.n_workers
        self._n_torn = 0
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._deliverer = 0  # the thread that has the lock
        self._is_finishing = False
        self._levels: Levels | None = None
        self._unused_level = next(_unused_levels)
        self._publish_levels()

    def _publish_levels(self) -> None:
        """Let the workers know this process's levels, if they have changed."""
        if self._unused_level in getattr(logging.root, "_cache", ()):
            return
        with InterruptsHeld():
            logging.root.isEnabledFor(self._unused_level)
            levels = Levels.now()
            if levels != self._levels:
                self._levels = levels
                self._outbox.publish(levels.encoded())

    def expect_last_words(self) -> None:
        """A worker died: look for records that it had no time to point out."""
        self._outbox.expect_news()

    def deliver(self) -> None:
        """Hand over what was written since the last time, and let workers know today's levels.

        Raises:
            Exception: What a filter or handler of the caller raises, as if the caller had logged.
                The record is gone, those after it will be handed over by the next call.
        """
        if os.getpid() != self._owner_pid or self._outbox.closed:
            return
        self._publish_levels()
        if not self._outbox.has_news() and not self._records:
            return
        # Someone else's handler may call rlpool again, from this thread or another.
        if not self._lock.acquire(blocking=False):
            return
        self._deliverer = threading.get_ident()
        try:
            # What is written from here on is left to the next call: workers may write faster.
            stop = self._outbox.size()
            self._hand_over()
            while not self._outbox.closed and self._outbox.has_news():
                with InterruptsHeld():
                    self._fetch()
                self._hand_over()
                if self._outbox.has_read(stop):
                    break
        finally:
            self._deliverer = 0
            self._lock.release()

    def finish(self) -> None:
        """Hand over all that is left, now that all workers have ended, and close the outbox.

        Raises:
            Exception: The first that a filter or handler of the caller raised.
        """
        if os.getpid() != self._owner_pid or self._outbox.closed or self._is_finishing:
            return
        self._is_finishing = True
        first_error = None
        # Another thread may be handing records over. If this one is, a handler has called close().
        is_mine = self._deliverer == threading.get_ident()
        is_locked = not is_mine and self._lock.acquire(timeout=_PATIENCE_S)
        try:
            self.expect_last_words()
            while self._outbox.has_news() or self._records:
                self._fetch()
                if not self._outbox.has_news():
                    self._n_torn += bool(self._outbox.take_rest())
                    self._tell_losses()
                try:
                    self._hand_over()
                except Exception as error:
                    first_error = first_error or error
        finally:
            self._outbox.close()
            if is_locked:
                self._lock.release()
        if first_error is not None:
            raise first_error

    def _fetch(self) -> None:
        if not self._outbox.has_news():
            return
        for line in self._outbox.read():
            record = decode(line)
            if record is None:
                self._n_torn += 1
            else:
                self._records.append(record)
        if not self._outbox.has_news():
            self._tell_losses()

    def _tell_losses(self) -> None:
        """Report what was lost, once all that was not is read."""
        for worker, n_dropped in enumerate(self._outbox.dropped()):
            n_new = n_dropped - self._n_told[worker]
            if n_new:
                self._n_told[worker] = n_dropped
                message = (
                    f"{_n_records(n_new)} dropped: worker {worker} logged more than is kept while "
                    "nobody calls rlpool"
                )
                self._records.append(notice(logging.WARNING, message, worker))
        if self._n_torn:
            message = f"{_n_records(self._n_torn)} cut off by the end of a worker"
            self._n_torn = 0
            self._records.append(notice(logging.WARNING, message, None))

    def _hand_over(self) -> None:
        while self._records:
            record = self._records.popleft()
            logger = logging.getLogger(record.name)
            if logger.isEnabledFor(record.levelno):
                logger.handle(record)


def _n_records(number: int) -> str:
    return f"{number} log record{'' if number == 1 else 's'}"
