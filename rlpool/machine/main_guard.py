"""Scripts that start workers without an ``if __name__ == "__main__":`` guard.

A worker imports the caller's main module. Without the guard it gets to the line that starts
workers, too. It then exits with a code by which the caller knows the reason.
"""

from __future__ import annotations

from multiprocessing import process

from rlpool.errors import UsageError

_EXIT_CODE = 76


def refuse_during_import() -> None:
    """Refuse to start workers while a worker imports the caller's main module.

    Without this, children would start children without end.

    Raises:
        SystemExit: With an exit code that ``missing_guard_error`` knows.
    """
    if getattr(process.current_process(), "_inheriting", False):
        raise SystemExit(_EXIT_CODE)


def missing_guard_error(exitcode: int | None) -> UsageError | None:
    """The error to raise if a worker ended because of a missing ``__main__`` guard.

    Args:
        exitcode: The worker's exit code.
    """
    if exitcode != _EXIT_CODE:
        return None
    return UsageError(
        "the script starts workers when it is imported: each worker imports the main module, and "
        'would start workers in turn, because there is no `if __name__ == "__main__":` guard',
        fix="put everything but definitions into a function and call it below "
        '`if __name__ == "__main__":`',
    )
