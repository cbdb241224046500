"""Whatever fails, wherever it fails: the right error, soon, and nothing left behind.

Every kind of fault in every phase of a worker's life. With ``on_worker_failure="raise"`` each
surfaces as what it is; with ``"restart"`` those that are deaths, hangs or, on request, errors of
environments cost nothing but time.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from process.watching import Struck, assert_equal, is_running, shared_files, wait_until, worker_pids

import rlpool
from rlpool import DictTensor, EpisodeBatcher, TemporalDictTensor
from rlpool.batch.plans import RequestPlan

from support.faults import (
    DEATHS,
    RAISES,
    WRONG,
    WRONG_STEPS,
    create_agent,
    create_env,
    faults,
    faults_at,
    strike,
)
from support.variants import variants

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left"),
    pytest.mark.timeout(120),
    pytest.mark.promise("I3"),
]

REPORT_S = 4.0
"""A fault surfaces within this time."""

CLOSE_S = 7.0
"""close() takes less than this even if a worker has to be killed."""

HANG_TIMEOUT_S = 0.7
"""``timeout`` where workers hang, many times what healthy ones take for a step."""

FACTORIES = ("create_env", "create_agent")
CALLS = ("reset", "step", "first_call", "later_call", "update")
CLOSES = ("close_env", "close_agent")
STEPS = {"reset": -1, "step": 2, "first_call": 0, "later_call": 2}

ROW = 3
"""The episode that is hit. With two lanes it runs in lane 1."""


def expected_error(kind: str, place: str) -> type[rlpool.WorkerError] | None:
    """What a fault is to surface as."""
    if place in CLOSES:
        return None
    if kind in DEATHS:
        return rlpool.WorkerDiedError
    if kind == "hang":
        return rlpool.WorkerTimeoutError
    if place in FACTORIES:
        return rlpool.WorkerStartupError
    is_wrong = kind in (*WRONG, *WRONG_STEPS)
    if place in ("reset", "step"):
        return rlpool.EnvSpecError if is_wrong else rlpool.EnvError
    return rlpool.AgentSpecError if is_wrong else rlpool.AgentError


def open_batcher(
    struck: Struck,
    n_threads: int = 1,
    place: str = "",
    kind: str = "none",
    n_lanes: int = 2,
    once: bool = False,
    **options: Any,
) -> EpisodeBatcher:
    """A batcher that is struck when it starts or ends, if that is the place."""
    common: dict[str, Any] = {"struck_at": struck.path, "once": once}
    # An agent is called with all lanes at once: whose row is at fault it cannot tell.
    env_args = {**common, "n_lanes": 1 if place.endswith("call") else n_lanes}
    agent_args = {**common}
    if place in (*FACTORIES, *CLOSES):
        key = "fault" if place in FACTORIES else "close_fault"
        (env_args if place.endswith("env") else agent_args)[key] = kind
    options = {
        "n_slots": 8,
        "on_worker_failure": "raise",
        "timeout": HANG_TIMEOUT_S if kind == "hang" else 60.0,
        **options,
    }
    return EpisodeBatcher(
        n_timesteps=4,
        create_agent=create_agent,
        agent_args=agent_args,
        create_env=create_env,
        env_args=env_args,
        n_threads=n_threads,
        seeds=7,
        **options,
    )


def result_of(batcher: EpisodeBatcher) -> TemporalDictTensor:
    result = batcher.get()
    assert result is not None
    return result


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
    return result_of(batcher)


def assert_works(batcher: EpisodeBatcher) -> None:
    """Run a request whose every row can be written down."""
    lengths = [1, 6, 3, 4, 9]
    batcher.update(5)
    batcher.execute(
        5, env_info=DictTensor({"id": torch.arange(5) + 10, "length": torch.tensor(lengths)})
    )
    result = result_of(batcher)
    assert result.lengths.tolist() == lengths
    for row, length in enumerate(lengths):
        assert result["frame"][row, :length].tolist() == [[10 + row, t] for t in range(length)]
        assert result["_reward"][row, :length].tolist() == list(range(1, length + 1))
        assert (result["version"][row, :length] == 5).all()


def assert_closes(batcher: EpisodeBatcher, limit_s: float = CLOSE_S) -> None:
    """Close, twice, in bounded time; nothing works afterwards."""
    start_s = time.monotonic()
    batcher.close()
    assert time.monotonic() - start_s < limit_s
    batcher.close()
    with pytest.raises(rlpool.UsageError, match="closed"):
        batcher.get()


def assert_tells(error: rlpool.WorkerError, place: str, kind: str, struck: Struck) -> None:
    """Check what an error is, what it says about where, and that it says so elsewhere."""
    assert type(error) is expected_error(kind, place)
    where = error.where
    assert where.worker in (0, 1)
    if place in STEPS:
        is_call = place.endswith("call")
        assert (where.lane, where.row) == (0 if is_call else 1, ROW)
        assert where.seed is not None
        assert is_call or where.seed == struck.seed
        assert where.env_info is not None
        assert where.env_info["length"] == 6
        if place != "reset" and kind not in DEATHS and kind != "hang":
            assert where.step == STEPS[place]
    if isinstance(error, rlpool.WorkerDiedError):
        assert (error.exitcode, error.signal_name) == DEATHS[kind]
        assert (error.signal_name or str(error.exitcode)) in str(error)
    if kind in RAISES:
        assert place.endswith("call") or place in str(error)
        text = "".join(traceback.format_exception(error.__cause__))
        assert "support/faults.py" in text
        assert "in strike" in text
        names = {"unprintable": "UnprintableError", "sys_exit": "SystemExit"}
        assert names.get(kind, "struck") in text
    if kind == "hang":
        assert isinstance(error, TimeoutError)
        assert "faults.py" in str(error.__cause__)  # the stack that it was in
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
    [*itertools.product(CALLS, (*RAISES, *WRONG)), *(("step", kind) for kind in WRONG_STEPS)],
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


# Faults that end a worker, or come when it starts or ends --------------------------------------


@pytest.fixture
def no_memory_left() -> Iterator[None]:
    """Fail a test after which this process still has memory of a batcher."""
    before = shared_files(os.getpid())
    yield
    if shared_files(os.getpid()) - before:
        gc.collect()
        assert not shared_files(os.getpid()) - before


CELLS = {
    *((1, *cell) for cell in itertools.product((*RAISES, *WRONG), (*FACTORIES, *CLOSES))),
    *((1, *cell) for cell in itertools.product((*DEATHS, "hang"), (*FACTORIES, *CALLS, *CLOSES))),
}
IN_THIS_PROCESS = list(itertools.product((0,), RAISES, (*FACTORIES, *CLOSES)))
REPRESENTATIVES = [
    *((1, "raise", "create_env"), (1, "wrong_shape", "create_agent")),
    *((1, "segfault", "create_agent"), (1, "os_exit", "reset"), (1, "sigkill", "step")),
    *((1, "segfault", "later_call"), (1, "hang", "step")),
    *((1, "sigkill", "update"), (1, "unpicklable", "close_env"), (1, "hang", "close_agent")),
]


@pytest.mark.usefixtures("no_memory_left", "short_patience")
@pytest.mark.parametrize(
    ("n_threads", "kind", "place"), variants(IN_THIS_PROCESS + REPRESENTATIVES, sorted(CELLS))
)
def test_a_fault_surfaces_as_what_it_is(
    struck: Struck, n_threads: int, kind: str, place: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = worker_pids()
    with contextlib.ExitStack() as stack:

        def live() -> EpisodeBatcher:
            batcher = open_batcher(struck, n_threads, place, kind)
            stack.callback(assert_closes, batcher)
            request(batcher, place, kind)
            return batcher

        if place in CLOSES:
            assert_works(live())
        else:
            with pytest.raises(rlpool.WorkerError) as caught:
                live()
            assert struck.seconds_ago < REPORT_S + (HANG_TIMEOUT_S if kind == "hang" else 0.0)
            assert_tells(caught.value, place, kind, struck)
    assert worker_pids() == before
    if kind not in WRONG:
        assert struck.is_there
        assert (struck.pid == os.getpid()) == (n_threads == 0)
    assert capfd.readouterr() == ("", "")


SURVIVABLE = [
    (kind, place)
    for place in (*FACTORIES, *CALLS)
    for kind in (*RAISES, *WRONG, *DEATHS, "hang")
    if kind in (*DEATHS, "hang") or place in ("reset", "step")
]


@pytest.mark.parametrize(
    ("kind", "place"),
    variants(
        [
            *(("sigkill", "create_env"), ("raise", "reset"), ("wrong_shape", "step")),
            *(("os_exit", "update"), ("hang", "later_call")),
        ],
        SURVIVABLE,
    ),
)
def test_a_fault_that_strikes_once_costs_time(struck: Struck, kind: str, place: str) -> None:
    policy = {"on_worker_failure": "restart", "on_env_error": "restart"}
    with open_batcher(struck, 1, place, kind, once=True, **policy) as batcher:
        batcher.update(4)
        result = request(batcher, place, kind)
        assert not is_running(struck.pid)
        # The same in this process, where nothing strikes, as it has struck.
        with open_batcher(struck, 0, place, kind, once=True) as undisturbed:
            undisturbed.update(4)
            assert_equal(result, request(undisturbed, place, kind))
        assert_works(batcher)


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


def test_a_death_leaves_the_other_worker_alone_and_names_lane_and_step(struck: Struck) -> None:
    others = worker_pids()
    with open_batcher(struck, 2) as batcher:
        before = worker_pids() - others
        batcher.execute(4)
        kept = result_of(batcher)
        frames = kept["frame"].clone()
        batcher.execute(6, env_info=faults_at(6, ROW, "sigkill", 4, length=50, sleep_ms=1))
        with pytest.raises(rlpool.WorkerDiedError) as caught:
            batcher.get()
        where = caught.value.where
        assert (where.lane, where.row, where.step) == (1, ROW, 4)
        (survivor,) = before - {struck.pid}
        assert is_running(survivor)
        assert torch.equal(kept["frame"], frames)
        with pytest.raises(rlpool.WorkerDiedError):
            assert_works(batcher)
        assert_closes(batcher)


# No hang --------------------------------------------------------------------------------------


@pytest.mark.promise("I4")
def test_many_slow_environments_of_one_worker_are_no_hang_but_one_that_hangs_is(
    struck: Struck,
) -> None:
    # Each reset and each step takes 0.1 s, those of all lanes together more than the timeout.
    with open_batcher(struck, timeout=0.4, n_lanes=5) as batcher:
        batcher.execute(5, env_info=faults(5, {}, sleep_ms=100, length=1))
        assert result_of(batcher).lengths.tolist() == [1] * 5
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


@pytest.mark.promise("I4")
def test_more_chunks_than_fit_into_the_pipes_do_not_block_both_sides() -> None:
    with EpisodeBatcher(1, 2500, create_agent, {}, create_env, {}, n_threads=1) as batcher:
        batcher.execute(1, env_info=DictTensor({"length": torch.tensor([2000])}))
        assert result_of(batcher)["frame"][0, :, 1].tolist() == list(range(2000))


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
                results.append(result_of(batcher))
    for died, expected in zip(results[:2], results[2:], strict=True):
        assert_equal(died, expected)


@pytest.mark.promise("I4")
def test_fewer_slots_than_workers_never_deadlock(struck: Struck) -> None:
    options = {"n_lanes": 2, "n_slots": 2, "timeout": 10.0}
    with (
        contextlib.suppress(rlpool.SpecError),  # refused with a clear error: as good
        open_batcher(struck, 3, **options) as batcher,
    ):
        assert_works(batcher)


@pytest.mark.promise("I4")
def test_the_timeout_does_not_count_what_a_worker_imports(
    struck: Struck, as_main: Callable[[str], None]
) -> None:
    as_main(f"import time\nif __name__ != '__main__':\n    time.sleep({2 * HANG_TIMEOUT_S})")
    with open_batcher(struck, timeout=HANG_TIMEOUT_S) as batcher:
        assert_works(batcher)
