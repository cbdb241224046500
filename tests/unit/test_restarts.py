"""Failures of workers: budget, delays, giving up, arguments."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from rlpool.errors import (
    EnvError,
    SpecError,
    Where,
    WorkerDiedError,
    WorkerError,
    WorkerStartupError,
    WorkerTimeoutError,
)
from rlpool.workers.failure_policy import FailurePolicy, Restarts


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def death(worker: int = 0, signal_name: str | None = "SIGKILL") -> WorkerDiedError:
    return WorkerDiedError(
        f"worker {worker} died ({signal_name})",
        exitcode=-9,
        signal_name=signal_name,
        where=Where(worker=worker, lane=3, seed=17),
        fix="step it here",
    )


def restarts(max_restarts: int | None = 16) -> tuple[Restarts, Clock]:
    clock = Clock()
    return Restarts(max_restarts, clock), clock


def delay_s(restarts: Restarts, clock: Clock, worker: int = 0) -> float:
    """Let a worker fail, and tell how long its restart was put off."""
    assert restarts.note(worker, death(worker)) is None
    wait_s = restarts.next_due_s()
    assert wait_s is not None
    clock.now_s += wait_s
    assert restarts.due() == [worker]
    restarts.ready(worker)
    return wait_s


def test_a_first_failure_is_followed_by_a_restart_at_once() -> None:
    some, _ = restarts()
    assert some.note(2, death(2)) is None
    assert some.is_waiting(2)
    assert not some.is_waiting(1)
    assert some.next_due_s() == 0.0
    assert some.due() == [2]
    assert not some.is_waiting(2)
    assert some.due() == []
    assert some.next_due_s() is None
    assert some.n_restarts == 1


def test_delays_double_from_a_tenth_to_five_seconds() -> None:
    some, clock = restarts(None)
    delays = [delay_s(some, clock) for _ in range(10)]
    assert delays == pytest.approx([0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5])


def test_a_restart_is_not_due_before_its_time() -> None:
    some, clock = restarts()
    delay_s(some, clock)
    some.note(0, death())
    clock.now_s += 0.09
    assert some.due() == []
    assert some.next_due_s() == pytest.approx(0.01)
    clock.now_s += 0.011
    assert some.due() == [0]


def test_success_and_other_workers_count_anew() -> None:
    some, clock = restarts()
    for _ in range(3):
        delay_s(some, clock, 0)
    assert delay_s(some, clock, 1) == 0.0
    some.succeeded(0)
    assert delay_s(some, clock, 0) == 0.0
    assert delay_s(some, clock, 0) == pytest.approx(0.1)


def test_workers_that_are_due_together_are_told_in_order() -> None:
    some, _ = restarts()
    for worker in (3, 1):
        some.note(worker, death(worker))
    assert some.due() == [1, 3]


def test_the_budget_counts_the_restarts_of_all_workers() -> None:
    some, clock = restarts(2)
    delay_s(some, clock, 0)
    delay_s(some, clock, 1)
    some.succeeded(0)
    error = some.note(0, death())
    assert isinstance(error, WorkerDiedError)
    assert "worker 0 died (SIGKILL) after 2 restarts in all" in str(error)
    assert "max_restarts" in str(error)
    assert (error.exitcode, error.signal_name) == (-9, "SIGKILL")
    assert error.where == Where(worker=0, lane=3, seed=17)
    assert [failure.where.worker for failure in error.history] == [0, 1, 0]
    assert some.due() == []


def test_no_restart_is_a_budget_as_well() -> None:
    some, _ = restarts(0)
    error = some.note(0, death())
    assert error is not None
    assert "max_restarts=0" in str(error)
    assert len(error.history) == 1


@pytest.mark.parametrize(("signal_name", "most"), [("SIGSEGV", 3), ("SIGKILL", 10)])
def test_a_worker_that_never_gets_ready_is_given_up(signal_name: str, most: int) -> None:
    some, clock = restarts(None)
    for _ in range(most - 1):
        assert some.note(0, death(0, signal_name)) is None
        clock.now_s += 10
        some.due()
    error = some.note(0, death(0, signal_name))
    assert error is not None
    assert f"{most} times before it was ready" in str(error)


def start_error(worker: int = 0) -> WorkerStartupError:
    return WorkerStartupError("create_env raised KeyError: 3", where=Where(worker=worker))


def fail_to_start(
    some: Restarts, clock: Clock, failure: WorkerError, most: int = 100
) -> tuple[int, float]:
    """Failures until worker 0 is given up, and how long that took; as many as ``most``."""
    start_s = clock.now_s
    for number in range(1, most + 1):
        clock.now_s += 5.0
        if some.note(0, failure) is not None:
            return number, clock.now_s - start_s
        clock.now_s += some.next_due_s() or 0.0
        assert some.due() == [0]
    return most, clock.now_s - start_s


@pytest.mark.parametrize("failure", [start_error(), death(signal_name=None)])
def test_the_death_of_a_worker_that_was_ready_is_no_failed_start(failure: WorkerError) -> None:
    some, clock = restarts(None)
    some.ready(0)
    some.note(0, death())
    some.due()
    assert fail_to_start(some, clock, failure)[0] == 3


SIGNALS = ("SIGKILL", "SIGTERM", "SIGSEGV", "SIGABRT", "SIGSTOP")


@pytest.mark.parametrize("signal_name", SIGNALS)
def test_signals_that_hit_every_start_for_a_minute_are_survived(signal_name: str) -> None:
    some, clock = restarts(None)
    some.ready(0)
    start_s = clock.now_s
    while clock.now_s < start_s + 60:
        assert some.note(0, death(signal_name=signal_name)) is None
        clock.now_s += 0.9 + (some.next_due_s() or 0.0)
        some.due()
    assert some.n_restarts > 10
    some.ready(0)
    assert some.note(0, death()) is None


@pytest.mark.parametrize("signal_name", SIGNALS)
def test_a_start_that_always_ends_with_a_signal_is_given_up_though_it_worked_before(
    signal_name: str,
) -> None:
    some, clock = restarts(None)
    some.ready(0)
    some.note(0, death())
    some.due()
    n_failed, took_s = fail_to_start(some, clock, death(signal_name=signal_name))
    assert n_failed < 30
    assert 90 <= took_s <= 100


def test_steps_of_another_worker_renew_the_patience_with_signals() -> None:
    some, clock = restarts(None)
    for worker in (0, 1):
        some.ready(worker)
    some.note(0, death())
    some.due()
    for n_steps in range(200):
        some.look_at({1: n_steps})
        fail_to_start(some, clock, death(), most=1)
        assert some.n_restarts == n_steps + 2
    took_s = fail_to_start(some, clock, death())[1]
    assert 80 <= took_s <= 100


def test_signals_in_between_do_not_hide_a_start_that_fails_by_itself() -> None:
    some, clock = restarts(None)
    some.ready(0)
    some.note(0, death())
    some.due()
    for _ in range(2):
        fail_to_start(some, clock, start_error(), most=1)
        fail_to_start(some, clock, death(), most=3)
    assert "9 times before it was ready" in str(some.note(0, start_error()))


def test_where_another_worker_succeeds_one_that_never_gets_ready_is_not_given_up() -> None:
    some, clock = restarts(None)
    for _ in range(20):
        assert some.note(0, death(0, "SIGSEGV")) is None
        clock.now_s += 10
        some.due()
        some.succeeded(1)


def test_a_worker_that_gets_ready_in_between_is_not_given_up() -> None:
    some, clock = restarts(None)
    for _ in range(20):
        delay_s(some, clock)
    assert some.n_restarts == 20


def test_failures_that_are_no_deaths_have_no_exit_code() -> None:
    some, _ = restarts(0)
    error = some.note(1, WorkerTimeoutError("worker 1 made no progress for 5 s"))
    assert error is not None
    assert error.exitcode is None
    assert error.signal_name is None
    assert isinstance(error.history[0], WorkerTimeoutError)
    assert str(error).startswith("worker 1 made no progress for 5 s")
    error = some.note(1, EnvError("env.step raised X", traceback_text="Traceback: X"))
    assert error is not None
    assert "Traceback: X" in str(error.__cause__)
    assert len(error.history) == 2


def test_the_history_is_bounded() -> None:
    some, clock = restarts(None)
    for _ in range(1100):
        delay_s(some, clock)
    assert len(some.history) == 1000


@pytest.mark.parametrize("how", ["pickle", "copy", "reworded"])
def test_the_history_survives(how: str) -> None:
    some, _ = restarts(0)
    error: Any = some.note(0, death())
    ways: dict[str, Any] = {
        "pickle": lambda e: pickle.loads(pickle.dumps(e)),
        "copy": copy.deepcopy,
        "reworded": lambda e: e.reworded(what="other words", fix=""),
    }
    again = ways[how](error)
    assert [str(failure) for failure in again.history] == [str(death())]
    assert again.history[0].signal_name == "SIGKILL"


def test_errors_without_restarts_have_no_history() -> None:
    assert death().history == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("on_worker_failure", "retry"),
        ("on_worker_failure", None),
        ("on_worker_failure", ["restart"]),
        ("on_env_error", "ignore"),
        ("on_env_error", True),
        ("max_restarts", -1),
        ("max_restarts", True),
        ("max_restarts", 1.5),
        ("max_restarts", "16"),
        ("max_episodes_per_worker", 0),
        ("max_episodes_per_worker", 2.0),
        ("max_rss_bytes", 512),
        ("max_rss_bytes", 1e9),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(SpecError, match=f"^{name} should be "):
        FailurePolicy(**{name: value})


def test_arguments_that_make_sense_are_taken() -> None:
    policy = FailurePolicy()
    assert policy.restarts_workers
    assert not policy.restarts_on_env_errors
    assert not policy.recycles
    policy = FailurePolicy("raise", 0, "restart", 1, 2**20)
    assert not policy.restarts_workers
    assert policy.restarts_on_env_errors
    assert policy.recycles
    assert FailurePolicy(max_restarts=None, max_rss_bytes=np.int64(2**30)).recycles
