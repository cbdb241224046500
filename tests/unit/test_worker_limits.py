"""How many workers there may be."""

from __future__ import annotations

import os
import resource

import pytest

from rlpool import SpecError, worker_count, worker_limits
from rlpool.limits import Bound


@pytest.mark.parametrize(("n_cores", "expected"), [(1, 1), (2, 1), (3, 1), (4, 2), (64, 62)])
def test_auto_leaves_two_cores(
    monkeypatch: pytest.MonkeyPatch, n_cores: int, expected: int
) -> None:
    monkeypatch.setattr(worker_limits, "n_cores", lambda: n_cores)
    assert worker_count("auto") == expected


def test_cores_are_those_that_this_process_may_use() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert worker_limits.n_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert worker_limits.n_cores() == len(before)


@pytest.mark.parametrize("number", [0, -1, True, "many", 1.5, None])
def test_counts_that_are_none_are_refused(number: object) -> None:
    with pytest.raises(SpecError, match="num_workers should be"):
        worker_count(number)  # type: ignore[arg-type]
    assert worker_count(3) == 3


def test_more_workers_than_descriptors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (120, 4096))
    monkeypatch.setattr(worker_limits, "n_open_descriptors", lambda: 48)
    worker_limits.check_workers(10, 4, "use fewer")  # 10 * 4 + 32 are just those that are left
    with pytest.raises(SpecError) as caught:
        worker_limits.check_workers(11, 4, "use fewer")
    text = str(caught.value)
    assert "11 workers need 76 file descriptors, but of the 120 that" in text
    assert "48 are in use" in text
    assert (
        "fix:   use fewer (10 would fit), or raise the limit before starting Python: ulimit -n 128"
    ) in text


def test_more_workers_than_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 3 * worker_limits.WORKER_BYTES
    bounds = [
        Bound("this machine has", 2**40, 2**39, 2**40),
        Bound("the cage has", 2**30, free, 2**30),
    ]
    monkeypatch.setattr(worker_limits, "shared_bounds", lambda root: bounds)
    worker_limits.check_workers(3, 4, "use fewer")
    with pytest.raises(SpecError) as caught:
        worker_limits.check_workers(4, 4, "use fewer")
    what, fix = str(caught.value).splitlines()
    assert what == (
        "4 workers need at least 400 MiB of memory, but of the 1 GiB that the cage has 300 MiB "
        "are free"
    )
    assert fix == "  fix:   use fewer (3 would fit), or free memory"


def test_the_remedy_is_one_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_limits.resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(SpecError, match="hard limit, which is 64"):
        worker_limits.check_workers(100, 4, "use fewer")


def test_no_limit_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    infinite = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (infinite, infinite))
    worker_limits.check_workers(1, 10**9, "use fewer")
