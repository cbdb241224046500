"""Forwarding of workers' log records to the caller's ``logging``, over the workers' pipes.

In a worker, a handler of the root logger sends every record to the caller, whose loggers of the
same names handle it. It never waits: if the caller does not read for long, records are dropped
and counted. Messages are formatted in the worker, and exceptions become tracebacks.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from logging.handlers import QueueHandler

from rlpool.workers.wire import Dropped, Logged, Pipe

_LOG = logging.getLogger("rlpool")

_PLAIN = (str, int, float, bool, type(None))
"""Types of record fields that are sent unchanged; others are sent as text."""

Levels = Mapping[str, int]
"""Levels of the loggers that have one."""


class PipeHandler(QueueHandler):
    """Sends records to the caller.

    Args:
        worker: Number of the worker.
        pipe: Its end of the pipe.
    """

    def __init__(self, worker: int, pipe: Pipe) -> None:
        super().__init__(pipe)  # type: ignore[arg-type]
        self._worker = worker
        self._pipe = pipe

    def enqueue(self, record: logging.LogRecord) -> None:
        """Send a record, unless the caller reads too slowly."""
        fields = {
            name: value if type(value) in _PLAIN else str(value)
            for name, value in vars(record).items()
        }
        with suppress(ConnectionError):  # the caller is gone
            self._pipe.offer(Logged({**fields, "worker": self._worker}))


def current_levels() -> Levels:
    """Return the levels of this process, from which a new worker knows which records to send."""
    named = {
        name: logger.level
        for name, logger in list(logging.root.manager.loggerDict.items())
        if isinstance(logger, logging.Logger) and logger.level
    }
    return {**named, "root": logging.root.level}


def connect(handler: PipeHandler, levels: Levels) -> None:
    """Make this worker process log through a handler.

    Existing handlers come from the caller's main module, which a worker imports first. They are
    removed, because the caller's own handlers handle the same records.
    """
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        if isinstance(logger, logging.Logger):
            logger.handlers.clear()
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    logging.root.addHandler(handler)
    logging.captureWarnings(True)
    # The pipe belongs to this process alone.
    os.register_at_fork(after_in_child=lambda: logging.root.removeHandler(handler))


class Logs:
    """The caller's side: records that have arrived and are not handled yet."""

    def __init__(self) -> None:
        self._arrived: deque[tuple[int, Logged | Dropped]] = deque()
        SAID.clear()

    def add(self, worker: int, message: Logged | Dropped) -> None:
        """Keep a message of a worker."""
        self._arrived.append((worker, message))

    def deliver(self) -> None:
        """Let the caller's loggers handle the records that have arrived.

        Raises:
            Exception: Any error of the caller's filters and handlers, as if the caller had logged.
        """
        while self._arrived:  # a handler may call rlpool again
            worker, message = self._arrived.popleft()
            if isinstance(message, Dropped):
                text = "worker %d dropped %d log records: it logged faster than they were read"
                _LOG.warning(text, worker, message.n_records, extra={"worker": worker})
                continue
            record = logging.makeLogRecord(message.fields)
            logger = logging.getLogger(record.name)
            if logger.isEnabledFor(record.levelno):
                logger.handle(record)


SAID: dict[str, int | None] = {}
"""Key or text of records logged once by a batcher and all its workers, to their process."""

SAID_OF_MACHINE: dict[str, int | None] = {}
"""Text of records logged once by a program, to the process that logged them."""


def _is_new(record: logging.LogRecord) -> bool:
    """Whether no other process has logged the same, for records that are logged once.

    These are warnings, which the process that issued them may repeat, and records of rlpool with
    ``extra={"once": key}``, where ``""`` stands for the text, once in the whole program.
    """
    once = getattr(record, "once", None)
    if once is None and record.name == _LOG.name:
        return True
    key, said = once or record.getMessage(), SAID_OF_MACHINE if once == "" else SAID
    is_new = key not in said
    return said.setdefault(key, record.process) == record.process and (is_new or once is None)


for _logger in (_LOG, logging.getLogger("py.warnings")):
    _logger.addFilter(_is_new)
