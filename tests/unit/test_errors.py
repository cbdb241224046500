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
    EnvError,
    EnvSpecError,
    NotEnoughDataError,
    RlpoolError,
    SpecError,
    UnknownArgumentError,
    UsageError,
    Where,
    WorkerDiedError,
    WorkerError,
    WorkerStartupError,
    WorkerTimeoutError,
)

WHERE = Where(worker=3, lane=14, episode=27, step=112, seed=1703251, env_info={"task": 5})
REPORT: dict[str, Any] = {
    "where": WHERE,
    "fix": "look there",
    "traceback_text": "Traceback: x\n",
    "capsule": "a capsule",
}
DEATH = {"exitcode": -9, "signal_name": "SIGKILL", "history": (EnvError("before"),)}

BASES: dict[type[RlpoolError], tuple[type[Exception], ...]] = {
    UsageError: (RuntimeError,),
    SpecError: (ValueError,),
    UnknownArgumentError: (SpecError, TypeError),
    NotEnoughDataError: (ValueError,),
    WorkerError: (RuntimeError,),
    WorkerStartupError: (WorkerError,),
    EnvError: (WorkerError,),
    EnvSpecError: (EnvError, SpecError),
    AgentError: (WorkerError,),
    AgentSpecError: (AgentError, SpecError),
    WorkerDiedError: (WorkerError,),
    WorkerTimeoutError: (WorkerError, TimeoutError),
}


@pytest.fixture(params=[kind for kind in BASES if issubclass(kind, WorkerError)])
def error(request: pytest.FixtureRequest) -> WorkerError:
    more = DEATH if request.param is WorkerDiedError else {}
    made: WorkerError = request.param("it broke", **REPORT, **more)
    return made


def test_every_exception_can_be_caught_by_what_it_is() -> None:
    for kind, bases in BASES.items():
        assert all(issubclass(kind, base) for base in (RlpoolError, *bases))
    assert not issubclass(EnvError, AgentError)
    assert not issubclass(AgentError, EnvError)
    assert not issubclass(WorkerError, SpecError)
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type)}
    found = {kind for kind in kinds if issubclass(kind, Exception)}
    assert found - {RlpoolError, errors.RemoteTraceback} == set(BASES)


def test_a_message_says_what_where_and_fix(error: WorkerError) -> None:
    assert str(error).splitlines() == [
        "it broke",
        "  where: worker 3, lane 14, episode 27, step 112, seed 1703251, env_info {'task': 5}",
        "  fix:   look there",
    ]
    assert str(WorkerError("it broke")) == "it broke"
    assert str(SpecError("what", fix="do")) == "what\n  fix:   do"
    assert str(UsageError("what", where="there")) == "what\n  where: there"


def test_a_place_names_what_it_knows() -> None:
    assert WorkerError("x").where == Where()
    assert str(Where()) == ""
    assert str(Where(worker=0, step=0)) == "worker 0, step 0"


@pytest.mark.parametrize("copied", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_every_exception_survives_pickling(error: WorkerError, copied: Any) -> None:
    again = copied(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert isinstance(again.where, Where)
    history = [str(failure) for failure in getattr(error, "history", ())]
    assert [str(failure) for failure in getattr(again, "history", ())] == history
    for name in vars(error).keys() - {"history"}:
        assert getattr(again, name) == getattr(error, name)
    assert str(again.__cause__) == str(error.__cause__)


@pytest.mark.parametrize("kind", [UsageError, SpecError, NotEnoughDataError, RlpoolError])
def test_plain_exceptions_survive_pickling(kind: type[RlpoolError]) -> None:
    again = pickle.loads(pickle.dumps(kind("what", fix="that")))
    assert type(again) is kind
    assert str(again) == "what\n  fix:   that"


def test_the_remote_traceback_is_printed_with_the_exception() -> None:
    error = EnvError("it broke", traceback_text="Traceback (most recent call last):\n  in worker\n")
    printed = "".join(traceback.format_exception(error))
    assert "in worker" in printed
    assert "direct cause" in printed
    assert EnvError("it broke").__cause__ is None


def test_an_error_can_be_reworded(error: WorkerError) -> None:
    other = error.reworded(what="it broke down", fix="look here")
    assert type(other) is type(error)
    assert (other.what, other.fix, other.where) == ("it broke down", "look here", error.where)
    assert str(other.__cause__) == str(error.__cause__)
    assert vars(other).keys() == vars(error).keys()
