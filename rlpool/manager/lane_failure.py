"""Failures of environments in workers, as the caller's exceptions."""

from __future__ import annotations

from typing import Any

from rlpool.envs.lanes import LaneError
from rlpool.errors import EnvError, EnvSpecError, SpecError, Where
from rlpool.record.capsule_files import CrashFiles
from rlpool.record.crash_capsule import CrashCapsule
from rlpool.record.failures import ENV_HINT, attempted
from rlpool.record.tape import Tape


class LaneFailure(EnvError, LaneError):
    """An ``EnvError`` of a lane, as callers of the lane contract expect it.

    Attributes:
        lane: The lane.
        call: ``"reset"`` or ``"step"``.
    """

    lane: int
    call: str

    def __reduce__(self) -> Any:
        kind = EnvSpecError if isinstance(self, EnvSpecError) else EnvError
        return kind(**self._constructor_arguments()).__reduce__()


class LaneSpecFailure(LaneFailure, EnvSpecError):
    """An ``EnvSpecError`` of a lane."""


def lane_failure(
    error: EnvError, call: str, where: Where, tape: Tape | None, n_lanes: int, files: CrashFiles
) -> LaneFailure:
    """A worker's report about a lane as an exception, with a capsule and its file.

    Args:
        error: What the worker reports.
        call: What failed.
        where: Where it did.
        tape: The lane's episode, the failing step included; ``None`` if it cannot be repeated.
        n_lanes: Lanes of all workers.
        files: Where capsules are written.
    """
    capsule = None
    if tape is not None and not tape.why_lost:
        capsule = _capsule(tape, call, where, n_lanes)
    kind = LaneSpecFailure if isinstance(error, SpecError) else LaneFailure
    failure = files.with_file(
        kind(
            error.what,
            where=where,
            fix=error.own_fix,
            hint=ENV_HINT,
            traceback_text=error.traceback_text,
            reason=error.reason,
            capsule=capsule and capsule.told(error.what, error.traceback_text),
        )
    )
    failure.lane, failure.call = where.lane or 0, call
    return failure


@attempted
def _capsule(tape: Tape, call: str, where: Where, n_lanes: int) -> CrashCapsule:
    before, failing = tape.without_last() if call == "step" else (tape, {})
    return CrashCapsule.of_tape(
        before, call, where, failing, n_lanes=n_lanes, env_type="ParallelEnvManager"
    )
