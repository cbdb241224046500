"""Every kind of failure surfaces as what it is and where it was, and nothing waits for ever."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from process.watching import Struck, assert_equal, wait_until, worker_pids

import rlpool
from rlpool import DictTensor, EpisodeBatcher, TemporalDictTensor
from rlpool.batch.plans import RequestPlan

from support.faults import (
    RAISES,
    WRONG,
    WRONG_STEPS,
    create_agent,
    create_env,
    faults,
    faults_at,
    strike,
)

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left"),
    pytest.mark.timeout(120),
    pytest.mark.promise("I3"),
]

REPORT_S = 4.0
"""A fault surfaces within this time."""

HANG_TIMEOUT_S = 0.7
"""``timeout`` where workers hang, many times what healthy ones take for a step."""

CALLS = ("reset", "step", "first_call", "later_call", "update")
STEPS = {"reset": -1, "step": 2, "first_call": 0, "later_call": 2}

ROW = 3
"""The episode that is hit. With two lanes it runs in lane 1."""


def open_batcher(struck: Struck, n_threads: int = 1, n_lanes: int = 2, **options: Any) -> Any:
    args = {"struck_at": struck.path}
    options = {"n_slots": 8, "on_worker_failure": "raise", "seeds": 7, **options}
    env_args = {**args, "n_lanes": n_lanes}
    arguments = create_agent, args, create_env, env_args, n_threads
    return EpisodeBatcher(4, options.pop("n_slots"), *arguments, **options)


def request(batcher: EpisodeBatcher, place: str, kind: str) -> TemporalDictTensor:
    """Run episodes one of which is struck, if the place is in them."""
    struck, plain = (faults_at(5, ROW, k, STEPS.get(place, 0), length=6) for k in (kind, "none"))
    if place == "update":
        batcher.update(kind)
    batcher.execute(
        5,
        env_info=struck if place in ("reset", "step") else plain,
        agent_info=struck if place.endswith("call") else plain,
    )
    return batcher.get()


def assert_works(batcher: EpisodeBatcher) -> None:
    """Run a request whose every row can be written down."""
    lengths = [1, 6, 3, 4, 9]
    batcher.update(5)
    batcher.execute(
        5, env_info=DictTensor({"id": torch.arange(5) + 10, "length": torch.tensor(lengths)})
    )
    result = batcher.get()
    assert result.lengths.tolist() == lengths
    for row, length in enumerate(lengths):
        assert result["frame"][row, :length].tolist() == [[10 + row, t] for t in range(length)]
        assert result["_reward"][row, :length].tolist() == list(range(1, length + 1))
        assert (result["version"][row, :length] == 5).all()


def assert_tells(error: rlpool.WorkerError, place: str, kind: str, struck: Struck) -> None:
    """Check what an error is, what it says about where, and that it says so elsewhere."""
    is_call, is_env = place.endswith("call"), place in ("reset", "step")
    error_class = {
        (True, True): rlpool.EnvError,
        (True, False): rlpool.EnvSpecError,
        (False, True): rlpool.AgentError,
        (False, False): rlpool.AgentSpecError,
    }[is_env, kind in RAISES]
    assert type(error) is error_class
    where = error.where
    if place in STEPS:
        # An agent is called with all lanes at once: whose row is at fault it cannot tell.
        assert (where.lane, where.row) == (0 if is_call else 1, ROW)
        assert where.seed is not None
        assert is_call or where.seed == struck.seed
        assert where.env_info is not None
        assert where.env_info["length"] == 6
        assert place == "reset" or where.step == STEPS[place]
    if kind in RAISES:
        assert is_call or place in str(error)
        text = "".join(traceback.format_exception(error.__cause__))
        assert "in strike" in text
        names = {"unprintable": "UnprintableError", "sys_exit": "SystemExit"}
        assert names.get(kind, "struck") in text
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.where) == (type(error), str(error), where)


# Faults after which the batcher goes on ------------------------------------------------------


@pytest.fixture(scope="module")
def lasting_struck(tmp_path_factory: pytest.TempPathFactory) -> Struck:
    return Struck(str(tmp_path_factory.mktemp("faults") / "struck"))


@pytest.fixture(scope="module", params=[0, 2], ids=["in_this_process", "two_workers"])
def shared(
    request: pytest.FixtureRequest, lasting_struck: Struck
) -> Iterator[Callable[[str], EpisodeBatcher]]:
    """Batchers that are hit many times: which one for faults at a place."""
    with (
        open_batcher(lasting_struck, request.param) as of_lanes,
        open_batcher(lasting_struck, request.param, n_lanes=1) as of_one,
    ):
        yield lambda place: of_one if place.endswith("call") else of_lanes


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        *((place, "raise") for place in CALLS),
        *(("step", kind) for kind in (*RAISES[1:], *WRONG, *WRONG_STEPS)),
        *((place, "wrong_shape") for place in ("reset", "first_call", "update")),
        *(("later_call", kind) for kind in ("unpicklable", "sys_exit", "wrong_dtype")),
    ],
)
def test_a_failure_says_where_and_the_batcher_goes_on(
    shared: Callable[[str], EpisodeBatcher], lasting_struck: Struck, place: str, kind: str
) -> None:
    batcher, before = shared(place), worker_pids()
    with pytest.raises(rlpool.WorkerError) as caught:
        request(batcher, place, kind)
    assert lasting_struck.seconds_ago < REPORT_S
    assert_tells(caught.value, place, kind, lasting_struck)
    assert_works(batcher)
    assert worker_pids() == before


def create_one_that_fails(seed: int, mark: str, kind: str) -> Any:
    """The first worker fails, or has other environments, than the next, which may hang."""
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
def test_a_start_fails_soon_and_where_workers_disagree(
    kind: str, error: type[Exception], tmp_path: Path
) -> None:
    start_s = time.monotonic()
    env_args = {"mark": str(tmp_path / "mark"), "kind": kind}
    with pytest.raises(error, match="struck" if kind == "raise" else "environments"):
        EpisodeBatcher(4, 8, create_agent, {}, create_one_that_fails, env_args, n_threads=2)
    assert time.monotonic() - start_s < 2 * REPORT_S


# No hang --------------------------------------------------------------------------------------


@pytest.mark.promise("I4")
def test_many_slow_environments_of_one_worker_are_no_hang_but_one_that_hangs_is(
    struck: Struck,
) -> None:
    # Each reset and each step takes 0.1 s, those of all lanes together more than the timeout.
    with open_batcher(struck, timeout=0.4, n_lanes=5) as batcher:
        batcher.execute(5, env_info=faults(5, {}, sleep_ms=100, length=1))
        assert batcher.get().lengths.tolist() == [1] * 5
        batcher.execute(1, env_info=faults_at(1, 0, "hang", 1))
        with pytest.raises(rlpool.WorkerTimeoutError):
            wait_until(lambda: batcher.get(blocking=False) is not None, 0.4 + REPORT_S)


@pytest.mark.promise("I4")
def test_a_hang_in_a_failed_request_does_not_block_the_next_one_for_ever(struck: Struck) -> None:
    with open_batcher(struck, 2, n_lanes=1, n_slots=2, timeout=HANG_TIMEOUT_S) as batcher:
        # The second fails when the first one hangs.
        batcher.execute(2, env_info=faults(2, {0: ("hang", 0), 1: ("raise_second", 0)}))
        with pytest.raises(rlpool.EnvError):
            batcher.get()
        stats = batcher.stats()
        assert stats.requests == ()  # it is over, although a worker hangs in it
        assert 1 in [lane.request for worker in stats.workers for lane in worker.lanes]
        batcher.execute(2)
        with pytest.raises(rlpool.WorkerTimeoutError):
            wait_until(lambda: batcher.get(blocking=False) is not None, HANG_TIMEOUT_S + REPORT_S)


@pytest.mark.slow
@pytest.mark.promise("I4")
def test_more_chunks_than_fit_into_the_pipes_do_not_block_both_sides() -> None:
    with EpisodeBatcher(1, 2500, create_agent, {}, create_env, {}, n_threads=1) as batcher:
        batcher.execute(1, env_info=DictTensor({"length": torch.tensor([2000])}))
        assert batcher.get()["frame"][0, :, 1].tolist() == list(range(2000))


def create_lanes_of_a_worker_that_dies_before_its_report(seed: int) -> Any:
    """Let the last worker of a request die before it reports the end."""
    ends = RequestPlan.ends

    def noted(plan: RequestPlan) -> bool:
        if ends(plan):
            os._exit(1)
        return False

    RequestPlan.ends = noted  # type: ignore[method-assign]
    return create_env(seed, n_lanes=2)


@pytest.mark.promise("I4")
def test_a_last_worker_that_dies_before_it_reports_the_end_blocks_no_request() -> None:
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


@pytest.mark.promise("I4")
def test_the_timeout_does_not_count_what_a_worker_imports(
    struck: Struck, as_main: Callable[[str], None]
) -> None:
    as_main(f"import time\nif __name__ != '__main__':\n    time.sleep({2 * HANG_TIMEOUT_S})")
    with open_batcher(struck, timeout=HANG_TIMEOUT_S) as batcher:
        assert_works(batcher)
