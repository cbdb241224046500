"""What nodes log reaches the caller's ``logging``, whenever the caller has asked for it."""

from __future__ import annotations

import logging
from collections import deque

from rlpool.workers.logs import decode, encode

_LOG = logging.getLogger("rlpool")

_MOST_RECORDS = 10_000
"""Records that wait for the caller to ask; further ones are dropped and counted."""

Said = tuple[list[bytes], int]
"""Lines of logs, and how many were dropped."""


class KeptRecords(logging.Handler):
    """Keeps what the process of a node logs until the caller asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[bytes] = deque()
        self._n_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record, of this process or of a worker."""
        if len(self._lines) >= _MOST_RECORDS:
            self._n_dropped += 1
            return
        try:
            self._lines.append(encode(record, getattr(record, "worker", -1)))
        except Exception:  # from the user's objects
            self._n_dropped += 1

    def take(self) -> Said:
        """The lines since the last time, and how many were dropped."""
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        n_dropped, self._n_dropped = self._n_dropped, 0
        return lines, n_dropped


class NodeLogs:
    """What the caller has got from nodes and its loggers have not."""

    def __init__(self) -> None:
        self._lines: deque[tuple[str, bytes]] = deque()  # with the node that has logged them
        self._n_dropped = 0

    def hear(self, node: str, said: Said) -> None:
        """Take what a node has logged."""
        self._lines += [(node, line) for line in said[0]]
        self._n_dropped += said[1]

    def deliver(self) -> None:
        """Hand it to the loggers of this process."""
        while self._lines:
            node, line = self._lines.popleft()
            record = decode(line)
            if record is not None and logging.getLogger(record.name).isEnabledFor(record.levelno):
                record.node = node
                logging.getLogger(record.name).handle(record)
        if self._n_dropped:
            n_dropped, self._n_dropped = self._n_dropped, 0
            _LOG.warning("%d log records of nodes were dropped", n_dropped)
