"""Writes crash capsules to files, in the caller's process, as errors arrive."""

from __future__ import annotations

import itertools
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from rlpool.errors import RlpoolError, SpecError, WorkerError, described
from rlpool.record.crash_capsule import CrashCapsule

_LOG = logging.getLogger("rlpool")

_Error = TypeVar("_Error", bound=RlpoolError)

CrashDir = str | os.PathLike[str] | None


class CrashFiles:
    """A directory of capsules.

    Args:
        directory: The directory, made if it is missing; ``None`` to write nothing.

    Raises:
        SpecError: If it is not a path, or not a directory and cannot be created.
    """

    def __init__(self, directory: CrashDir) -> None:
        self._directory: Path | None = None
        if directory is None:
            return
        if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
            raise SpecError(f"crash_dir should be a path or None, got {directory!r}")
        # The caller may change its directory before a failure.
        self._directory = path = Path(os.path.abspath(directory))
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecError(
                f"crash_dir {str(path)!r} is not a directory and cannot be created: {error}",
                fix="pass a directory that this process may write to",
            ) from error

    def with_file(self, error: _Error) -> _Error:
        """Write the capsule of an error, if it has one, and name the file in its message.

        Returns:
            The error as it was, if there is nothing to write or it cannot be written.
        """
        if self._directory is None or not isinstance(error, WorkerError) or not error.capsule:
            return error
        try:
            path = _written(error.capsule, self._directory)
        except Exception as failure:  # the error itself is worth more than its file
            why = described(failure)
            _LOG.warning("no crash file in %s for '%s': %s", self._directory, error.what, why)
            return error
        fix = f"repeat it in this process to debug: rlpool.replay_crash({str(path)!r}, create_env)"
        if error.own_fix:
            fix = f"{error.own_fix}; {fix}"
        return error.reworded(fix=fix)  # type: ignore[return-value]


def _written(capsule: CrashCapsule, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    where = capsule.where
    episode = where.episode if where.episode is not None else f"lane{where.lane}"
    for number in itertools.count():
        path = directory / f"crash-{where.worker or 0}-{episode}-{number}.npz"
        with suppress(FileExistsError):  # several processes may write to one directory
            path.touch(exist_ok=False)
            break
    try:
        return capsule.save(path)
    except BaseException:
        path.unlink()
        raise
