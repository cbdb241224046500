"""Failures of workers: arguments, budget, delays, giving up."""

from __future__ import annotations

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

SIGNALS = ("SIGKILL", "SIGSEGV", "SIGSTOP")
START_ERROR = WorkerStartupError("create_env raised KeyError: 3", where=Where(worker=0))
HANG = WorkerTimeoutError("worker 0 made no progress for 5 s")


class Clocked(Restarts):
    """Two workers' restarts, with a clock that goes on when a test says so."""

    def __init__(self, max_restarts: int | None = None) -> None:
        self.now_s = 100.0
        super().__init__(2, max_restarts, lambda: self.now_s)

    def fail_ready(self, worker: int = 0) -> float:
        """Let a worker fail that gets ready again."""
        delay_s = self.delay_s(worker, death(worker))
        self.note_ready(worker)
        return delay_s

    def fail_to_start(self, failure: WorkerError, most: int = 100) -> tuple[int, float]:
        """Starts of worker 0 until it is given up, and how long that took."""
        start_s = self.now_s
        for number in range(1, most + 1):
            self.now_s += 5.0
            try:
                self.now_s += self.delay_s(0, failure)
            except WorkerDiedError:
                return number, self.now_s - start_s
        return most, self.now_s - start_s


def death(worker: int = 0, signal_name: str | None = "SIGKILL") -> WorkerDiedError:
    what, where = f"worker {worker} died ({signal_name})", Where(worker=worker, lane=3, seed=17)
    return WorkerDiedError(what, exitcode=-9, signal_name=signal_name, where=where, fix="step it")


def test_the_first_restart_is_at_once_and_delays_double_from_a_tenth_to_five_seconds() -> None:
    restarts = Clocked()
    delays = [restarts.fail_ready() for _ in range(10)]
    assert delays == pytest.approx([0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5])
    assert restarts.fail_ready(1) == 0.0
    restarts.note_success(0)
    assert restarts.fail_ready() == 0.0
    assert restarts.fail_ready() == pytest.approx(0.1)


def test_the_budget_counts_the_restarts_of_all_workers() -> None:
    restarts = Clocked(2)
    restarts.fail_ready(0)
    restarts.fail_ready(1)
    restarts.note_success(0)
    with pytest.raises(WorkerDiedError, match=r"worker 0 died \(SIGKILL\) after 2 .*max_rest") as e:
        restarts.delay_s(0, death())
    error = pickle.loads(pickle.dumps(e.value))
    assert (error.exitcode, error.signal_name) == (-9, "SIGKILL")
    assert error.where == Where(worker=0, lane=3, seed=17)
    assert [failure.where.worker for failure in error.history] == [0, 1, 0]
    assert error.reworded(what="other", fix="").history[2].signal_name == "SIGKILL"
    with pytest.raises(WorkerDiedError, match="max_restarts=0"):
        Clocked(0).delay_s(0, death())


@pytest.mark.parametrize(
    ("failure", "most"),
    [(START_ERROR, 3), (death(signal_name="SIGSEGV"), 3), (HANG, 3), (death(), 10)],
    ids=["raises", "crashes", "hangs", "is killed"],
)
def test_a_worker_that_never_gets_ready_is_given_up(failure: WorkerError, most: int) -> None:
    restarts = Clocked()
    assert restarts.fail_to_start(failure)[0] == most
    with pytest.raises(WorkerDiedError, match=f"{most + 1} times before it was ready"):
        restarts.delay_s(0, failure)


def test_the_death_of_a_worker_that_was_ready_is_no_failed_start() -> None:
    restarts = Clocked()
    restarts.note_ready(0)
    restarts.delay_s(0, death())
    assert restarts.fail_to_start(START_ERROR)[0] == 3


@pytest.mark.parametrize("signal_name", SIGNALS)
def test_signals_that_hit_every_start_are_survived_for_a_minute_and_a_half(
    signal_name: str,
) -> None:
    restarts = Clocked()
    restarts.note_ready(0)
    restarts.delay_s(0, death())
    n_failed, took_s = restarts.fail_to_start(death(signal_name=signal_name))
    assert 10 < n_failed < 30
    assert 90 <= took_s <= 100


def test_steps_of_another_worker_renew_the_patience_with_signals() -> None:
    restarts = Clocked()
    restarts.note_ready(0)
    restarts.note_ready(1)
    restarts.delay_s(0, death())
    for n_steps in range(50):
        restarts.look_at({1: n_steps})
        assert restarts.fail_to_start(death(), most=1)[0] == 1
    assert restarts.n_restarts == 51
    assert 80 <= restarts.fail_to_start(death())[1] <= 100


def test_signals_in_between_do_not_hide_a_start_that_fails_by_itself() -> None:
    restarts = Clocked()
    restarts.note_ready(0)
    restarts.delay_s(0, death())
    for _ in range(2):
        restarts.fail_to_start(START_ERROR, most=1)
        restarts.fail_to_start(death(), most=3)
    with pytest.raises(WorkerDiedError, match="9 times before it was ready"):
        restarts.delay_s(0, START_ERROR)


def test_where_another_worker_succeeds_one_that_does_not_get_ready_is_not_given_up() -> None:
    restarts = Clocked()
    for _ in range(20):
        restarts.delay_s(0, death(0, "SIGSEGV"))
        restarts.note_success(1)
    assert restarts.n_restarts == 20


def test_failures_that_are_no_deaths_keep_what_they_say() -> None:
    with pytest.raises(WorkerDiedError, match=r"^worker 0 made no progress for 5 s") as caught:
        Clocked(0).delay_s(0, HANG)
    assert (caught.value.exitcode, caught.value.signal_name) == (None, None)
    assert isinstance(caught.value.history[0], WorkerTimeoutError)
    with pytest.raises(WorkerDiedError) as caught:
        Clocked(0).delay_s(1, EnvError("env.step raised X", traceback_text="Traceback: X"))
    assert "Traceback: X" in str(caught.value.__cause__)


def test_the_history_is_bounded() -> None:
    restarts = Clocked(1100)
    for _ in range(1100):
        restarts.fail_ready()
    with pytest.raises(WorkerDiedError) as caught:
        restarts.delay_s(0, death())
    assert len(caught.value.history) == 1000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("on_worker_failure", "retry"),
        ("on_worker_failure", ["restart"]),
        ("on_env_error", True),
        ("max_restarts", -1),
        ("max_restarts", True),
        ("max_restarts", "16"),
        ("max_episodes_per_worker", 0),
        ("max_episodes_per_worker", 2.0),
        ("max_rss_bytes", 512),
        ("start_method", "fork"),
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
