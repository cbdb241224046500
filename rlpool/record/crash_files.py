"""Writes crash capsules to files, in the caller's process, as errors arrive."""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path
from typing import overload

from rlpool.errors import EnvError, RlpoolError, SpecError, WorkerError
from rlpool.record.crash_capsule import CrashCapsule
from rlpool.record.failures import DEBUG_HINT, LOCAL_HINT, described

_LOG = logging.getLogger("rlpool")

CrashDir = str | os.PathLike[str] | None


class CrashFiles:
    """A directory of capsules.

    Args:
        directory: The directory, made if it is missing; ``None`` to write nothing.

    Raises:
        SpecError: If it is no path, or no directory and cannot be made one.
    """

    def __init__(self, directory: CrashDir) -> None:
        self._directory: Path | None = None
        if directory is None:
            return
        if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
            raise SpecError(f"crash_dir should be a path or None, got {directory!r}")
        path = Path(os.path.abspath(directory))  # the caller may go elsewhere before a failure
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecError(
                f"crash_dir {str(path)!r} is no directory and cannot be made one: {error}",
                fix="pass a directory that this process may write to",
            ) from error
        self._directory = path

    @overload
    def with_file(self, error: EnvError) -> EnvError: ...

    @overload
    def with_file(self, error: WorkerError) -> WorkerError: ...

    @overload
    def with_file(self, error: RlpoolError) -> RlpoolError: ...

    def with_file(self, error: RlpoolError) -> RlpoolError:
        """Write the capsule of an error, if it has one, and let its message name the file.

        Returns:
            The error as it was, if there is nothing to write or it cannot be written.
        """
        if self._directory is None or not isinstance(error, WorkerError):
            return error
        capsule = error.capsule
        if not isinstance(capsule, CrashCapsule):
            return error
        try:
            path = self._written(capsule, self._directory)
        except Exception as failure:  # the error itself is worth more than its file
            _LOG.warning(
                "no crash file in %s for '%s': %s", self._directory, error.what, described(failure)
            )
            return error
        hint = f"repeat it in this process to debug: rlpool.replay_crash({str(path)!r}, create_env)"
        fix = error.fix
        return error.reworded(
            what=error.what, fix=hint if fix in ("", DEBUG_HINT, LOCAL_HINT) else f"{fix}; {hint}"
        )

    @staticmethod
    def _written(capsule: CrashCapsule, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        where = capsule.where
        episode = where.episode if where.episode is not None else f"lane{where.lane}"
        for number in itertools.count():
            path = directory / f"crash-{where.worker or 0}-{episode}-{number}.npz"
            try:
                path.touch(exist_ok=False)  # several processes may write to one directory
            except FileExistsError:
                continue
            try:
                return capsule.save(path)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        raise LookupError("ran out of numbers")
