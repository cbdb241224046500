"""The exceptions: their classes, their messages, their way through a pickle."""

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
    UsageError,
    Where,
    WorkerDiedError,
    WorkerError,
    WorkerStartupError,
    WorkerTimeoutError,
    compose,
)

WHERE = Where(worker=3, lane=14, episode=27, step=112, seed=1703251, env_info={"task": 5})
REPORTS: dict[str, Any] = {"where": WHERE, "fix": "look there", "traceback_text": "Traceback: x\n"}

WORKER_ERRORS: list[WorkerError] = [
    kind("it broke", **REPORTS)
    for kind in (
        WorkerError,
        WorkerStartupError,
        EnvError,
        EnvSpecError,
        AgentError,
        AgentSpecError,
        WorkerTimeoutError,
    )
] + [WorkerDiedError("it broke", exitcode=-9, signal_name="SIGKILL", **REPORTS)]

by_class = pytest.mark.parametrize("error", WORKER_ERRORS, ids=lambda error: type(error).__name__)


@pytest.mark.parametrize(
    ("kind", "bases"),
    [
        (UsageError, (RuntimeError,)),
        (SpecError, (ValueError,)),
        (NotEnoughDataError, (ValueError,)),
        (WorkerError, (RuntimeError,)),
        (WorkerStartupError, (WorkerError,)),
        (EnvError, (WorkerError,)),
        (EnvSpecError, (EnvError, SpecError, ValueError)),
        (AgentError, (WorkerError,)),
        (AgentSpecError, (AgentError, SpecError, ValueError)),
        (WorkerDiedError, (WorkerError,)),
        (WorkerTimeoutError, (WorkerError, TimeoutError)),
    ],
)
def test_every_exception_can_be_caught_by_what_it_is(
    kind: type[Exception], bases: tuple[type[Exception], ...]
) -> None:
    assert issubclass(kind, (RlpoolError, *bases)[0])
    assert all(issubclass(kind, base) for base in bases)


def test_environment_and_agent_errors_are_told_apart() -> None:
    assert not issubclass(EnvError, AgentError)
    assert not issubclass(AgentError, EnvError)
    assert not issubclass(WorkerError, SpecError)


def test_every_public_exception_is_an_rlpool_error() -> None:
    kinds = [value for value in vars(errors).values() if isinstance(value, type)]
    found = [kind for kind in kinds if issubclass(kind, Exception)]
    assert len(found) >= 12
    outsiders = [kind for kind in found if not issubclass(kind, RlpoolError)]
    assert [kind.__name__ for kind in outsiders] == ["RemoteTraceback"]


@by_class
def test_a_message_has_three_lines(error: WorkerError) -> None:
    assert str(error).splitlines() == [
        "it broke",
        "  where: worker 3, lane 14, episode 27, step 112, seed 1703251, env_info {'task': 5}",
        "  fix:   look there",
    ]


@by_class
def test_every_exception_survives_pickling(error: WorkerError) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.where == error.where == WHERE
        assert isinstance(again.where, Where)
        assert (again.what, again.fix) == ("it broke", "look there")
        assert again.traceback_text == error.traceback_text
        assert str(again.__cause__) == str(error.__cause__)


@pytest.mark.parametrize("kind", [UsageError, SpecError, NotEnoughDataError, RlpoolError])
def test_plain_exceptions_survive_pickling(kind: type[Exception]) -> None:
    again = pickle.loads(pickle.dumps(kind("what\n  fix:   that")))
    assert type(again) is kind
    assert str(again) == "what\n  fix:   that"


def test_a_pickled_death_keeps_exit_code_and_signal() -> None:
    again = pickle.loads(pickle.dumps(WORKER_ERRORS[-1]))
    assert (again.exitcode, again.signal_name) == (-9, "SIGKILL")


@by_class
def test_exceptions_can_be_copied(error: WorkerError) -> None:
    assert str(copy.copy(error)) == str(error)


def test_the_remote_traceback_is_printed_with_the_exception() -> None:
    error = EnvError("it broke", traceback_text="Traceback (most recent call last):\n  in worker\n")
    printed = "".join(traceback.format_exception(error))
    assert "in worker" in printed
    assert "direct cause" in printed


def test_without_a_remote_traceback_there_is_no_cause() -> None:
    assert EnvError("it broke").__cause__ is None


def test_parts_that_are_empty_take_no_line() -> None:
    assert str(WorkerError("it broke")) == "it broke"
    assert compose("what", fix="do") == "what\n  fix:   do"
    assert compose("what", where="there") == "what\n  where: there"
    assert compose("what") == "what"


def test_a_place_names_what_it_knows() -> None:
    assert str(Where()) == ""
    assert str(Where(worker=0, step=0)) == "worker 0, step 0"
    assert str(Where(lane=2, env_info={"a": 1.5})) == "lane 2, env_info {'a': 1.5}"


def test_an_error_without_a_place_has_an_empty_one() -> None:
    assert WorkerError("x").where == Where()


@pytest.mark.parametrize("error", WORKER_ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_can_be_told_in_other_words(error: WorkerError) -> None:
    other = error.reworded(what="it broke down", fix="look here")
    assert type(other) is type(error)
    assert (other.what, other.fix, other.where) == ("it broke down", "look here", error.where)
    assert str(other.__cause__) == str(error.__cause__)
    assert vars(other).keys() == vars(error).keys()
