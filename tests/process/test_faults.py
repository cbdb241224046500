"""Failing starts and hangs that block nothing, in addition to ``test_fault_matrix``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from process.watching import Struck, assert_equal, wait_until

import rlpool
from rlpool import DictTensor, EpisodeBatcher, TemporalDictTensor
from rlpool.batch.plans import RequestPlan

from support.faults import create_agent, create_env, faults, faults_at, strike

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left"),
    pytest.mark.timeout(120),
    pytest.mark.promise("I3"),
    pytest.mark.promise("I4"),
]

REPORT_S = 4.0
"""A fault surfaces within this time."""

HANG_TIMEOUT_S = 0.7
"""``timeout`` where workers hang, many times what healthy ones take for a step."""


def open_batcher(struck: Struck, n_workers: int = 1, n_lanes: int = 1, **options: Any) -> Any:
    args = {"struck_at": struck.path}
    arguments = create_agent, args, create_env, {**args, "n_lanes": n_lanes}, n_workers, 7
    return EpisodeBatcher(4, 8, *arguments, on_worker_failure="raise", **options)


def create_one_that_fails(seed: int, mark: str, kind: str) -> Any:
    """Fail in the first worker, or differ from the next one, which may hang."""
    try:
        Path(mark).touch(exist_ok=False)
    except FileExistsError:
        strike("hang" if kind == "raise" else "none")
        return create_env(seed, n_lanes=3)
    strike(kind)
    return create_env(seed, n_lanes=2)


@pytest.mark.parametrize(
    ("kind", "error"), [("raise", rlpool.WorkerStartupError), ("none", rlpool.SpecError)]
)
def test_startup_fails_promptly_and_when_workers_disagree(
    kind: str, error: type[Exception], tmp_path: Path
) -> None:
    start_s = time.monotonic()
    env_args = {"mark": str(tmp_path / "mark"), "kind": kind}
    with pytest.raises(error, match="struck" if kind == "raise" else "environments"):
        EpisodeBatcher(4, 8, create_agent, {}, create_one_that_fails, env_args, n_threads=2)
    assert time.monotonic() - start_s < 2 * REPORT_S


def test_many_slow_environments_in_one_worker_are_not_a_hang_but_a_hung_one_is(
    struck: Struck,
) -> None:
    # Each reset and step takes 0.1 s; all lanes together take longer than the timeout.
    with open_batcher(struck, timeout=0.4, n_lanes=5) as batcher:
        batcher.execute(5, env_info=faults(5, {}, sleep_ms=100, length=1))
        assert batcher.get().lengths.tolist() == [1] * 5
        batcher.execute(1, env_info=faults_at(1, 0, "hang", 1))
        with pytest.raises(rlpool.WorkerTimeoutError):
            wait_until(lambda: batcher.get(blocking=False) is not None, 0.4 + REPORT_S)


def test_a_hang_in_a_failed_request_does_not_block_the_next_one_forever(struck: Struck) -> None:
    with open_batcher(struck, 2, timeout=HANG_TIMEOUT_S) as batcher:
        # The second fails while the first one hangs.
        batcher.execute(2, env_info=faults(2, {0: ("hang", 0), 1: ("raise_second", 0)}))
        with pytest.raises(rlpool.EnvError):
            batcher.get()
        stats = batcher.stats()
        assert stats.requests == ()  # the request is over, although a worker hangs in it
        assert 1 in [lane.request for worker in stats.workers for lane in worker.lanes]
        batcher.execute(2)
        with pytest.raises(rlpool.WorkerTimeoutError):
            wait_until(lambda: batcher.get(blocking=False) is not None, HANG_TIMEOUT_S + REPORT_S)


@pytest.mark.slow
def test_more_chunks_than_fit_into_the_pipes_do_not_deadlock() -> None:
    with EpisodeBatcher(1, 2500, create_agent, {}, create_env, {}, n_threads=1) as batcher:
        batcher.execute(1, env_info=DictTensor({"length": torch.tensor([2000])}))
        assert batcher.get()["frame"][0, :, 1].tolist() == list(range(2000))


def create_lanes_of_a_worker_that_dies_before_its_report(seed: int) -> Any:
    """Create lanes whose worker, if it is the last of a request, dies before reporting the end."""
    ends = RequestPlan.ends

    def noted(plan: RequestPlan) -> bool:
        if ends(plan):
            os._exit(1)
        return False

    RequestPlan.ends = noted  # type: ignore[method-assign]
    return create_env(seed, n_lanes=2)


def test_a_last_worker_that_dies_before_reporting_the_end_does_not_block_the_request() -> None:
    results: list[TemporalDictTensor] = []
    for n_threads, make in (
        (2, create_lanes_of_a_worker_that_dies_before_its_report),
        (0, create_env),
    ):
        env_args = {} if n_threads else {"n_lanes": 2}
        with EpisodeBatcher(4, 8, create_agent, {}, make, env_args, n_threads, 7) as batcher:
            for _ in range(2):
                batcher.execute(5)
                results.append(batcher.get())
    for died, expected in zip(results[:2], results[2:], strict=True):
        assert_equal(died, expected)


def test_the_timeout_does_not_include_a_workers_imports(
    struck: Struck, as_main: Callable[[str], None]
) -> None:
    as_main(f"import time\nif __name__ != '__main__':\n    time.sleep({2 * HANG_TIMEOUT_S})")
    with open_batcher(struck, timeout=HANG_TIMEOUT_S) as batcher:
        batcher.execute(2)
        assert batcher.get().lengths.tolist() == [3, 3]
