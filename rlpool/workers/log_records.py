"""Log records as lines of JSON, and back.

The message is formatted where it was logged, and an exception becomes its traceback. What was added
with ``extra={...}`` arrives as numbers, text, lists, and dicts; anything else becomes text.
"""

from __future__ import annotations

import json
import logging
import traceback
from typing import Any

_PLAIN = (str, int, float, type(None))


def encode(record: logging.LogRecord, worker: int) -> bytes:
    """One line for a record of a worker, without its end.

    A message or an attribute that cannot be formatted says so in its place.
    """
    text = record.exc_text
    if not text and record.exc_info and record.exc_info[0]:
        text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
    fields = {
        **vars(record),
        "msg": _message_of(record),
        "args": None,
        "exc_info": None,
        "exc_text": text,
        "worker": worker,
    }
    fields.pop("message", None)
    try:
        return json.dumps(fields, default=_text_of).encode("ascii")
    except (TypeError, ValueError, RecursionError):  # keys that are no text, circles
        plain = {str(k): v if isinstance(v, _PLAIN) else _text_of(v) for k, v in fields.items()}
        return json.dumps(plain).encode("ascii")


def decode(line: bytes) -> logging.LogRecord | None:
    """The record of a line; ``None`` if the line was torn."""
    try:
        return _record(**json.loads(line))
    except (ValueError, TypeError):
        return None


def _record(created: float, **fields: Any) -> logging.LogRecord:
    record = logging.makeLogRecord({})
    since_start = record.relativeCreated - 1000 * (record.created - created)
    return logging.makeLogRecord({**fields, "created": created, "relativeCreated": since_start})


def notice(message: str, worker: int | None) -> logging.LogRecord:
    """A warning of rlpool's own that looks as if a worker had logged it."""
    fields = {"name": "rlpool", "levelno": logging.WARNING, "levelname": "WARNING"}
    return logging.makeLogRecord({**fields, "msg": message, "worker": worker})


def _message_of(record: logging.LogRecord) -> str:
    try:
        return str(record.getMessage())
    except Exception as error:
        why = f"{type(error).__name__}: {_text_of(error)}"
        return f"{_text_of(record.msg)} [the message could not be put together: {why}]"


def _text_of(value: Any) -> str:
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__} that cannot be printed>"
