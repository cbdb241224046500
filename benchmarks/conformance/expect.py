"""Comparisons for checks. Their errors give the expected and the actual value."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import numpy as np


class Unexpected(BaseException):
    """An unexpected value: a red cell. It is not an error of a library, which checks may expect."""


def equal(what: str, got: Any, expected: Any) -> None:
    """Compare numbers or arrays of any dtype."""
    got, expected = np.asarray(got), np.asarray(expected)
    if got.shape != expected.shape or not (got == expected).all():
        raise Unexpected(f"{what}: expected {expected.tolist()}, got {got.tolist()}")


def holds(what: str, condition: Any) -> None:
    """Expect a condition that is described in words."""
    if not condition:
        raise Unexpected(f"expected {what}")


def error_of(call: Callable[..., Any], *args: Any) -> BaseException:
    """Return the exception that a call must raise; ``SystemExit`` counts as well."""
    try:
        call(*args)
    except (KeyboardInterrupt, Unexpected):
        raise
    except BaseException as error:
        return error
    raise Unexpected("expected an error, the call returned as if nothing had happened")


def text_of(error: BaseException) -> str:
    """Return the text of an error and its causes, with notes and tracebacks."""
    return "".join(traceback.format_exception(error))
