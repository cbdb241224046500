"""Failures of workers: arguments, budget, delays, giving up."""

from __future__ import annotations

import pytest

from rlpool.errors import (
    EnvError,
    SpecError,
    Where,
    WorkerDiedError,
    WorkerStartupError,
    WorkerTimeoutError,
)
from rlpool.workers.failure_policy import FailurePolicy, Restarts

START_ERROR = WorkerStartupError("create_env raised KeyError: 3", where=Where(worker=0))
HANG = WorkerTimeoutError("worker 0 made no progress for 5 s")


def started(n_workers: int, max_restarts: int | None) -> Restarts:
    restarts = Restarts(n_workers, FailurePolicy(max_restarts=max_restarts))
    restarts.has_started = True
    return restarts


def death(worker: int = 0, signal_name: str | None = "SIGKILL") -> WorkerDiedError:
    what, where = f"worker {worker} died ({signal_name})", Where(worker=worker, lane=3, seed=17)
    return WorkerDiedError(what, exitcode=-9, signal_name=signal_name, where=where, fix="step it")


def test_the_first_restart_is_immediate_and_delays_double_up_to_two_seconds() -> None:
    restarts = started(2, None)
    delays = [restarts.judge(0, death())[0] for _ in range(8)]
    assert delays == pytest.approx([0, 0.1, 0.2, 0.4, 0.8, 1.6, 2, 2])
    assert restarts.judge(1, death())[0] == 0.0
    restarts.note_success(0)
    assert restarts.judge(0, death())[0] == 0.0
    assert restarts.judge(0, death())[0] == pytest.approx(0.1)


@pytest.mark.parametrize(("has_started", "most"), [(False, 3), (True, 10)])
def test_a_worker_without_progress_is_given_up(has_started: bool, most: int) -> None:
    restarts = Restarts(2, FailurePolicy(max_restarts=None))
    restarts.has_started = has_started
    restarts.judge(1, death(1))
    for _ in range(most - 1):
        restarts.judge(0, START_ERROR)
        restarts.note_success(1)
    with pytest.raises(WorkerDiedError, match=f"failed {most} times"):
        restarts.judge(0, START_ERROR)


def test_the_budget_counts_the_restarts_of_all_workers() -> None:
    restarts = started(2, 2)
    restarts.judge(0, death(0))
    restarts.judge(1, death(1))
    restarts.note_success(0)
    with pytest.raises(WorkerDiedError, match="max_restarts") as caught:
        restarts.judge(0, death())
    error = caught.value
    assert (error.exitcode, error.signal_name) == (-9, "SIGKILL")
    assert error.where == Where(worker=0, lane=3, seed=17)
    assert [failure.where.worker for failure in error.history] == [0, 1, 0]
    with pytest.raises(WorkerDiedError, match="max_restarts=0"):
        Restarts(2, FailurePolicy(max_restarts=0)).judge(0, death())


def test_failures_of_a_truncated_episode_do_not_count() -> None:
    restarts = started(1, 1)
    for _ in range(5):
        assert not restarts.abandons(death())
        restarts.judge(0, death())
        assert restarts.abandons(death())
        restarts.judge(0, death(), is_abandoned=True)
        assert restarts.n_restarts == 0


def test_an_episode_is_truncated_if_it_repeatedly_fails_at_the_same_step() -> None:
    restarts = started(1, None)
    at = [HANG.reworded(where=Where(worker=0, row=2, step=step, seed=9)) for step in range(3)]
    other = HANG.reworded(where=Where(worker=0, row=3, step=0, seed=8))
    failures = [at[0], at[1], at[0], other, at[2], at[2]]
    assert [restarts.abandons(failure) for failure in failures] == [False] * 5 + [True]


def test_a_failure_other_than_death_keeps_its_traceback() -> None:
    failure = EnvError("env.step raised X", traceback_text="Traceback: X")
    with pytest.raises(WorkerDiedError) as caught:
        Restarts(2, FailurePolicy(max_restarts=0)).judge(1, failure)
    assert (caught.value.exitcode, caught.value.signal_name) == (None, None)
    assert "Traceback: X" in str(caught.value.__cause__)


def test_the_history_is_bounded() -> None:
    restarts = started(1, 1100)
    with pytest.raises(WorkerDiedError) as caught:  # noqa: PT012
        for _ in range(1101):
            restarts.judge(0, death())
            restarts.note_success(0)
    assert len(caught.value.history) == 1000


def test_invalid_arguments_are_refused_by_name() -> None:
    for name, value in {
        "on_worker_failure": "retry",
        "on_env_error": True,
        "max_restarts": -1,
        "max_episode_restarts": 0,
        "max_episodes_per_worker": 2.0,
        "start_method": "fork",
    }.items():
        with pytest.raises(SpecError, match=name):
            FailurePolicy(**{name: value})  # type: ignore[arg-type]


def test_worker_and_environment_failures_are_restarted_by_separate_arguments() -> None:
    in_env = EnvError("env.step raised X")
    policy = FailurePolicy()
    assert (policy.restarts_on(death()), policy.restarts_on(in_env)) == (True, False)
    policy = FailurePolicy(on_worker_failure="raise", on_env_error="restart")
    assert (policy.restarts_on(death()), policy.restarts_on(in_env)) == (False, True)
