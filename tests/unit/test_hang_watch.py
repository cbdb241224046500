"""When a worker counts as hanging."""

from __future__ import annotations

import pytest

from rlpool.workers import hang_watch
from rlpool.workers.hang_watch import HangWatch


@pytest.mark.parametrize("timeout_s", [0.2, 3.0, 600.0])
def test_looks_that_are_far_apart_prove_no_hang(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> None:
    now_s = 0.0
    monkeypatch.setattr(hang_watch.time, "monotonic", lambda: now_s)
    watch = HangWatch(timeout_s)
    for _ in range(4):
        assert watch.hanging([5], {0}) is None
        now_s += 1000.0  # this process was stopped, or did something else


@pytest.mark.parametrize("timeout_s", [0.2, 3.0])
def test_a_worker_that_is_watched_without_a_step_hangs_after_the_timeout(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> None:
    now_s = 0.0
    monkeypatch.setattr(hang_watch.time, "monotonic", lambda: now_s)
    watch = HangWatch(timeout_s)
    while watch.hanging([5, int(now_s * 1000) + 1], {0, 1}) is None:
        now_s += watch.patience_s
        assert now_s < 2 * timeout_s
    assert now_s >= timeout_s
