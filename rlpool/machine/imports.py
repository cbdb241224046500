"""Imports that may fail: optional packages, and a main script that cannot be imported.

A worker imports the caller's main module. A script without an ``if __name__ == "__main__":`` guard
then also reaches the line that starts workers. Such a worker exits with a code from which the
caller recognises the cause.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import process
from typing import Any

from rlpool.errors import UsageError, compose

_EXIT_CODE = 76


def import_extra(module: str, extra: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: Its full name.
        extra: The extra of rlpool that installs the package.

    Raises:
        ImportError: If the package is not installed; names the extra.
    """
    with imports_of(extra):
        return importlib.import_module(module)


@contextmanager
def imports_of(extra: str) -> Iterator[None]:
    """A section that imports packages of an extra, with the errors of ``import_extra``."""
    try:
        yield
    except ImportError as error:
        message = f"{error.name} is not installed" if error.name else str(error)
        raise ImportError(compose(message, fix=f"pip install 'rlpool[{extra}]'")) from error


def refuse_during_import() -> None:
    """Refuse to start workers while a worker imports the caller's main module.

    Without this, children would start children without end.

    Raises:
        SystemExit: With the exit code recognised by ``missing_guard_error``.
    """
    if getattr(process.current_process(), "_inheriting", False):
        raise SystemExit(_EXIT_CODE)


def missing_guard_error(exitcode: int | None) -> UsageError | None:
    """Make the error for a worker that ended because of a missing ``__main__`` guard.

    Args:
        exitcode: The worker's exit code.
    """
    if exitcode != _EXIT_CODE:
        return None
    return UsageError(
        "the script starts workers when it is imported: each worker imports the main module, and "
        'would start workers in turn, because the guard `if __name__ == "__main__":` is missing',
        fix="put everything but definitions into a function and call it below "
        '`if __name__ == "__main__":`',
    )
