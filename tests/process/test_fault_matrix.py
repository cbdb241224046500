"""Every kind of fault in every phase of a worker's life: none is forgotten.

With ``on_worker_failure="raise"`` each surfaces as what it is; with ``"restart"`` those that are
deaths, hangs or, on request, errors of environments cost nothing but time.
"""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from process.watching import Struck, is_running, shared_files, worker_pids

from rlpool import (
    AgentError,
    AgentSpecError,
    Batcher,
    DictTensor,
    EnvError,
    EnvSpecError,
    EpisodeBatcher,
    GymEnv,
    TemporalDictTensor,
    UsageError,
    WorkerDiedError,
    WorkerError,
    WorkerStartupError,
    WorkerTimeoutError,
)

from support.faults import EXIT_CODE, FaultyEnv, create_agent, create_env, faults_at

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left", "no_memory_left"),
    pytest.mark.timeout(120),
]

REPORT_S = 2.0
"""A fault surfaces within this time."""

CLOSE_S = 7.0
"""close() takes less than this even if a worker has to be killed."""

HANG_TIMEOUT_S = 0.7
"""``timeout`` where workers hang, many times what healthy ones take for a step."""

RAISES = ("raise", "unpicklable", "sys_exit")
DEATHS = {
    "os_exit": (EXIT_CODE, None),
    "sigkill": (-signal.SIGKILL, "SIGKILL"),
    "segfault": (-signal.SIGSEGV, "SIGSEGV"),
}
WRONG = ("wrong_shape", "wrong_dtype")
KINDS = (*RAISES, *DEATHS, "hang", *WRONG)
FACTORIES = ("create_env", "create_agent")
CALLS = ("reset", "agent", "step", "update")
CLOSES = ("close_env", "close_agent")
PLACES = (*FACTORIES, *CALLS, *CLOSES)

N_EPISODES = 5
ROW = 3
"""The episode that is hit. With two lanes it runs in lane 1."""


class Cell(NamedTuple):
    """What a fault leads to.

    Attributes:
        error: What is raised, ``None`` for nothing.
        goes_on: Whether the batcher still works.
    """

    error: type[WorkerError] | None
    goes_on: bool


def cells() -> dict[tuple[str, str], Cell]:
    """What is expected of each kind of fault in each place."""
    expected = {}
    for kind, place in itertools.product(KINDS, PLACES):
        error: type[WorkerError] | None
        if place in CLOSES:
            error = None
        elif kind in DEATHS:
            error = WorkerDiedError
        elif kind == "hang":
            error = WorkerTimeoutError
        elif place in FACTORIES:
            error = WorkerStartupError
        elif place in ("reset", "step"):
            error = EnvSpecError if kind in WRONG else EnvError
        else:
            error = AgentSpecError if kind in WRONG else AgentError
        goes_on = place in CALLS and kind in (*RAISES, *WRONG)
        expected[kind, place] = Cell(error, goes_on)
    return expected


MATRIX = cells()


def arguments(place: str, kind: str, struck: Struck, once: bool = False) -> dict[str, Any]:
    """Arguments of a batcher that is struck when it starts or ends, if that is the place."""
    common = {"struck_at": struck.path, "once": once}
    # An agent is called with all lanes at once: whose row is at fault it cannot tell.
    env_args: dict[str, Any] = {**common, "n_lanes": 1 if place == "agent" else 2}
    agent_args: dict[str, Any] = {**common}
    key = "fault" if place in FACTORIES else "close_fault"
    if place in (*FACTORIES, *CLOSES):
        (env_args if place.endswith("env") else agent_args)[key] = kind
    return {
        "create_agent": create_agent,
        "agent_args": agent_args,
        "create_env": create_env,
        "env_args": env_args,
        "seeds": 7,
        "timeout": HANG_TIMEOUT_S if kind == "hang" else 60.0,
    }


def infos(n_rows: int, place: str, kind: str) -> dict[str, DictTensor]:
    """Infos of rows one of which is struck, if the place is in an episode."""
    step = {"reset": -1, "step": 2, "agent": 2}.get(place, 0)
    columns = {"length": 6}
    struck = faults_at(n_rows, min(ROW, n_rows - 1), kind, step, **columns)
    plain = faults_at(n_rows, 0, "none", 0, **columns)
    return {
        "env_info": struck if place in ("reset", "step") else plain,
        "agent_info": struck if place == "agent" else plain,
    }


def request(batcher: EpisodeBatcher, place: str, kind: str) -> TemporalDictTensor:
    """Run episodes one of which is struck, if the place is in them."""
    if place == "update":
        batcher.update(kind)
    batcher.execute(N_EPISODES, **infos(N_EPISODES, place, kind))
    result = batcher.get()
    assert result is not None
    return result


def assert_works(batcher: EpisodeBatcher) -> None:
    """Run a request whose every row can be written down."""
    batcher.update(5)
    batcher.execute(3, env_info=DictTensor({"id": torch.arange(3) + 10}))
    result = batcher.get()
    assert result is not None
    assert result["frame"].tolist() == [[[10 + i, t] for t in range(3)] for i in range(3)]
    assert (result["version"] == 5).all()


def assert_closes(batcher: EpisodeBatcher | Batcher) -> None:
    """Close, twice, in bounded time; nothing works afterwards."""
    start = time.monotonic()
    batcher.close()
    assert time.monotonic() - start < CLOSE_S
    batcher.close()
    assert not worker_pids()
    with pytest.raises(UsageError, match="closed"):
        batcher.get()


@pytest.fixture
def no_memory_left() -> Iterator[None]:
    """Fail a test after which this process still has memory of a batcher."""
    before = shared_files(os.getpid())
    yield
    if shared_files(os.getpid()) - before:
        gc.collect()
        assert not shared_files(os.getpid()) - before


def test_no_cell_is_missing() -> None:
    marks = {
        test.__name__: {
            mark.args[0]: mark.args[1] for mark in test.pytestmark if mark.name == "parametrize"
        }
        for test in (test_a_fault_surfaces_as_what_it_is, test_a_fault_that_strikes_once_costs_time)
    }
    product = set(itertools.product(KINDS, PLACES))
    (surfacing,) = marks["test_a_fault_surfaces_as_what_it_is"].values()
    assert set(surfacing) == product
    assert len(surfacing) == len(product) == 9 * 8
    (repeated,) = marks["test_a_fault_that_strikes_once_costs_time"].values()
    survivable = {
        (kind, place)
        for kind, place in product
        if kind in (*DEATHS, "hang") or (place in ("reset", "step"))
    }
    assert set(repeated) == survivable - {(kind, place) for kind in KINDS for place in CLOSES}


@pytest.mark.parametrize(("kind", "place"), list(MATRIX))
def test_a_fault_surfaces_as_what_it_is(struck: Struck, kind: str, place: str) -> None:
    expected = MATRIX[kind, place]
    options = arguments(place, kind, struck)
    batcher: EpisodeBatcher | None = None

    def live() -> None:
        nonlocal batcher
        batcher = EpisodeBatcher(4, 8, n_threads=1, on_worker_failure="raise", **options)
        request(batcher, place, kind)

    if expected.error is None:
        live()
        assert batcher is not None
        assert_closes(batcher)
        # An agent that hangs in close() ends with its worker, and so on: where it struck says so.
        assert struck.is_there
        assert not is_running(struck.pid)
        return
    with pytest.raises(expected.error) as caught:
        live()
    patience_s = HANG_TIMEOUT_S if kind == "hang" else 0.0
    assert struck.seconds_ago < patience_s + REPORT_S
    assert type(caught.value) is expected.error
    assert_tells_where(caught.value, kind, place, struck)
    if batcher is None:
        assert not worker_pids()
        return
    if expected.goes_on:
        assert_works(batcher)
        assert is_running(struck.pid)
    assert_closes(batcher)


def assert_tells_where(error: WorkerError, kind: str, place: str, struck: Struck) -> None:
    """Check what an error says, and that it says it elsewhere."""
    where = error.where
    assert where.worker == 0
    if place in ("reset", "agent", "step"):
        assert (where.lane, where.episode) == (0 if place == "agent" else 1, ROW)
        assert where.env_info is not None
        assert where.env_info["length"] == 6
        assert where.seed is not None
    if place in ("reset", "step"):
        assert where.seed == struck.seed
    if place in ("agent", "step"):
        assert where.step == 2
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.where) == (type(error), str(error), where)
    if isinstance(error, WorkerDiedError):
        assert (error.exitcode, error.signal_name) == DEATHS[kind]
    if kind in RAISES:
        assert "in strike" in str(error.__cause__)


# The restart column ---------------------------------------------------------------------------

SURVIVABLE = [
    (kind, place)
    for place in (*FACTORIES, *CALLS)
    for kind in KINDS
    if kind in (*DEATHS, "hang") or place in ("reset", "step")
]


@pytest.mark.parametrize(("kind", "place"), SURVIVABLE)
def test_a_fault_that_strikes_once_costs_time(struck: Struck, kind: str, place: str) -> None:
    options = arguments(place, kind, struck, once=True)
    policy = {"on_worker_failure": "restart", "on_env_error": "restart"}
    with EpisodeBatcher(4, 8, n_threads=1, **policy, **options) as batcher:
        batcher.update(4)
        result = request(batcher, place, kind)
        assert struck.is_there
        assert not is_running(struck.pid)
        undisturbed = batcher_of_this_process(options)
        undisturbed.update(4)
        expected = request(undisturbed, place, kind)
        assert_equal(result, expected)
        assert_works(batcher)
        assert_closes(batcher)


def batcher_of_this_process(options: dict[str, Any]) -> EpisodeBatcher:
    """The same batcher, in which nothing strikes, as it has struck."""
    return EpisodeBatcher(4, 8, n_threads=0, **options)


def assert_equal(result: TemporalDictTensor, expected: TemporalDictTensor) -> None:
    """Check that two results are the same, bit by bit."""
    assert set(result.keys()) == set(expected.keys())
    assert result.lengths.tolist() == expected.lengths.tolist()
    for key, values in expected.items():
        assert torch.equal(result[key], values), key
    assert result.info is not None
    assert expected.info is not None
    for key, values in expected.info.items():
        assert torch.equal(result.info[key], values), key


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (kind, place)
        for place in ("reset", "agent", "step", "update")
        for kind in ("sigkill", "hang", "os_exit")
    ],
)
def test_windows_go_on_after_a_fault(struck: Struck, kind: str, place: str) -> None:
    windows = []
    for n_threads in (2, 0):
        options = arguments(place, kind, struck, once=True)
        options["env_args"] |= {"restarts": True, "n_lanes": 2 if n_threads else 4}
        policy = {"on_worker_failure": "restart"} if n_threads else {}
        with Batcher(4, None, n_threads=n_threads, **policy, **options) as batcher:
            batcher.reset(**infos(4, place, kind))
            got = []
            for number in range(4):
                if place == "update" and number == 1:
                    batcher.update(kind)
                batcher.execute()
                got.append(batcher.get())
            windows.append(got)
    assert struck.is_there
    for result, expected in zip(*windows, strict=True):
        assert result is not None
        assert expected is not None
        assert_equal(result, expected)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("sigkill", "step"),
        ("hang", "step"),
        ("os_exit", "reset"),
        ("segfault", "agent"),
        ("sigkill", "update"),
        ("os_exit", "create_env"),
    ],
)
def test_a_fault_that_strikes_again_and_again_is_reported_in_the_end(
    struck: Struck, kind: str, place: str, tmp_path: Path
) -> None:
    options = arguments(place, kind, struck)
    start = time.monotonic()
    with pytest.raises(WorkerDiedError) as caught:  # noqa: SIM117
        with EpisodeBatcher(
            4, 8, n_threads=1, on_worker_failure="restart", max_restarts=2, **options
        ) as batcher:
            request(batcher, place, kind)
    assert time.monotonic() - start < 60
    error = caught.value
    history = error.history
    assert len(history) == 3
    expected = WorkerTimeoutError if kind == "hang" else WorkerDiedError
    assert all(isinstance(failure, expected) for failure in history)
    for failure in (*history, error):
        assert failure.where.worker == 0
        if place in ("reset", "step", "agent"):
            assert failure.where.episode == ROW
    assert not worker_pids()
    again = pickle.loads(pickle.dumps(error))
    assert [str(failure) for failure in again.history] == [str(failure) for failure in history]


class ThreadedEnv(FaultyEnv):
    """Starts a thread that nobody ends, as simulators do."""

    def __init__(self, struck_at: str) -> None:
        super().__init__(struck_at, once=True)
        threading.Thread(target=time.sleep, args=(1000.0,)).start()


def create_threaded(seed: int, struck_at: str) -> GymEnv:
    return GymEnv([ThreadedEnv(struck_at)], seed)


def test_threads_of_an_environment_do_not_keep_its_worker(struck: Struck) -> None:
    policy = {"on_env_error": "restart", "max_episodes_per_worker": N_EPISODES}
    with EpisodeBatcher(
        4, 8, create_agent, {}, create_threaded, {"struck_at": struck.path}, 1, 7, **policy
    ) as batcher:
        before = worker_pids()
        for kind in ("raise", "none"):  # replaced for its failure, and for what it has done
            result = request(batcher, "step", kind)
            assert result.lengths.tolist() == [6] * N_EPISODES
            assert len(worker_pids()) == 1
            assert worker_pids() != before
            before = worker_pids()
        assert_closes(batcher)
