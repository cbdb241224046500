"""The exceptions: their classes, their messages, and that they survive pickling."""

from __future__ import annotations

import copy
import pickle
import traceback
from typing import Any

import pytest

from rlpool import errors
from rlpool.errors import (
    AgentError,
    AgentSpecError,
    BatcherClosedError,
    EnvError,
    EnvSpecError,
    NotEnoughDataError,
    NotRepeatedError,
    ResultTimeoutError,
    RlpoolError,
    SpecError,
    UsageError,
    Where,
    WorkerDiedError,
    WorkerError,
    WorkerStartupError,
    WorkerTimeoutError,
)

WHERE = Where(worker=3, lane=14, row=7, episode=27, step=112, seed=17, env_info={"task": 5})
REPORT: dict[str, Any] = {
    "where": WHERE,
    "fix": "look there",
    "options": {"task": 5},
    "actions": (1, 2),
}
DEATH = {"exitcode": -9, "signal_name": "SIGKILL", "history": (EnvError("before"),)}

BASES: dict[type[RlpoolError], set[type[Exception]]] = {
    UsageError: {RuntimeError},
    BatcherClosedError: {UsageError, ValueError},
    ResultTimeoutError: {TimeoutError},
    SpecError: {ValueError},
    NotEnoughDataError: {ValueError},
    WorkerError: {RuntimeError},
    WorkerStartupError: {WorkerError},
    EnvError: {WorkerError},
    EnvSpecError: {EnvError, SpecError},
    NotRepeatedError: {EnvError},
    AgentError: {WorkerError},
    AgentSpecError: {AgentError, SpecError},
    WorkerDiedError: {WorkerError},
    WorkerTimeoutError: {WorkerError, TimeoutError},
}


def test_every_exception_can_be_caught_by_what_it_is_and_by_nothing_else() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    found = {kind for kind in kinds if issubclass(kind, RlpoolError)} - {RlpoolError}
    assert {kind: set(kind.__bases__) - {RlpoolError} for kind in found} == BASES


def test_messages_say_what_where_and_fix_as_far_as_they_are_known() -> None:
    assert str(WorkerError("it broke", **REPORT)).splitlines() == [
        "it broke",
        "  where: worker 3, lane 14, row 7, episode 27, step 112, seed 17, env_info {'task': 5}",
        "  fix:   look there",
    ]
    assert str(WorkerError("it broke", where=Where(step=0))) == "it broke\n  where: step 0"
    assert (str(EnvError("it broke")), EnvError("it broke").where) == ("it broke", Where())
    assert str(SpecError("what", fix="do")) == "what\n  fix:   do"


@pytest.mark.parametrize("kind", BASES)
def test_every_exception_survives_pickling_and_shows_its_remote_traceback(
    kind: type[RlpoolError],
) -> None:
    if not issubclass(kind, WorkerError):
        again = pickle.loads(pickle.dumps(kind("what", fix="that")))
        assert (type(again), str(again)) == (kind, "what\n  fix:   that")
        return
    more: Any = DEATH if kind is WorkerDiedError else {}
    error = kind("it broke", **REPORT, traceback_text="Traceback:\n  in worker\n", **more)
    reworded = error.reworded(what="it broke down", fix="look here")
    assert (reworded.what, reworded.fix) == ("it broke down", "look here")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), reworded):
        assert type(other) is kind
        for name in vars(error).keys() - ({"what", "fix"} if other is reworded else set()):
            assert repr(getattr(other, name)) == repr(getattr(error, name)), name
        printed = "".join(traceback.format_exception(other))
        assert "in worker" in printed
        assert "direct cause" in printed
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
