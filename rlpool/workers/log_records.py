"""Log records as lines of text, and back.

What crosses is text and numbers: the message is put together where it was logged, an exception
becomes its traceback, and what a user's own formatter looks for, ``extra={...}``, comes along as
far as JSON knows it, else as text.
"""

from __future__ import annotations

import json
import logging
import time
import traceback
from typing import Any

MAX_CHARACTERS = 2**20
"""Longest message, traceback or stack of a record, in characters; the rest is cut off."""

_PLAIN = (str, int, float, type(None))

_TOLD_OTHERWISE = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {
    "message",
    "asctime",
    "worker",
}
"""Attributes that are told by name, or follow from others."""


def encode(record: logging.LogRecord, worker: int) -> bytes:
    """One line for a record of a worker, without its end.

    Nothing of the user's that fails on the way makes this fail: it says so in the text.
    """
    fields: dict[str, Any] = {
        "worker": worker,
        "name": record.name,
        "level": record.levelno,
        "message": _cut(_message_of(record)),
        "path": record.pathname,
        "line": record.lineno,
        "created": record.created,
        "pid": record.process,
        "thread": [record.thread, record.threadName],
    }
    optional = {
        "function": record.funcName,
        "level_name": record.levelname,
        "process_name": record.processName,
        "exception": _traceback_of(record),
        "stack": record.stack_info and _cut(_text_of(record.stack_info)),
    }
    fields.update((key, value) for key, value in optional.items() if value)
    extra = {str(k): v for k, v in vars(record).items() if k not in _TOLD_OTHERWISE}
    if extra:
        fields["extra"] = extra
    try:
        text = json.dumps(fields, default=_text_of, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):  # keys that are no text, circles
        fields["extra"] = {
            key: value if isinstance(value, _PLAIN) else _text_of(value)
            for key, value in extra.items()
        }
        text = json.dumps(fields, default=_text_of, separators=(",", ":"))
    return text.encode("ascii")


def decode(line: bytes) -> logging.LogRecord | None:
    """The record of a line, with an attribute ``worker``; ``None`` if the line was torn."""
    try:
        fields = json.loads(line)
        return _record(fields)
    except (ValueError, KeyError, TypeError):
        return None


def _record(fields: dict[str, Any]) -> logging.LogRecord:
    record = logging.getLogRecordFactory()(
        fields["name"],
        fields["level"],
        fields["path"],
        fields["line"],
        fields["message"],
        (),
        None,
        fields.get("function"),
        fields.get("stack"),
    )
    created = fields["created"]
    record.relativeCreated -= 1000 * (record.created - created)
    record.created = created
    record.msecs = float(int((created - int(created)) * 1000))
    record.levelname = fields.get("level_name", record.levelname)
    record.process, record.processName = fields["pid"], fields.get("process_name")
    record.thread, record.threadName = fields["thread"]
    record.exc_text = fields.get("exception")
    vars(record).update(fields.get("extra", {}))
    record.worker = fields["worker"]
    return record


def notice(level: int, message: str, worker: int | None) -> logging.LogRecord:
    """A record of rlpool's own that looks as if a worker had logged it."""
    line = {
        "worker": worker,
        "name": "rlpool",
        "level": level,
        "message": message,
        "path": __file__,
        "line": 0,
        "created": time.time(),
        "pid": None,
        "process_name": None if worker is None else f"rlpool-worker-{worker}",
        "thread": [None, None],
    }
    return _record(line)


def _message_of(record: logging.LogRecord) -> str:
    try:
        return str(record.getMessage())
    except Exception as error:
        why = f"{type(error).__name__}: {_text_of(error)}"
        return f"{_text_of(record.msg)} [the message could not be put together: {why}]"


def _traceback_of(record: logging.LogRecord) -> str | None:
    if record.exc_text:
        return _cut(_text_of(record.exc_text))
    if not record.exc_info or record.exc_info[0] is None:
        return None
    try:
        return _cut("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))
    except Exception as error:
        return f"{record.exc_info[0].__name__} [its traceback failed: {type(error).__name__}]"


def _text_of(value: Any) -> str:
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__} that cannot be printed>"


def _cut(text: str) -> str:
    n_more = len(text) - MAX_CHARACTERS
    return text if n_more <= 0 else f"{text[:MAX_CHARACTERS]} [and {n_more} characters more]"
