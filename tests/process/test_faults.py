"""Whatever fails, wherever it fails: the right error, soon, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from process.watching import Struck, is_running, wait_until, worker_pids

from rlpool import (
    AgentError,
    AgentSpecError,
    Batcher,
    DictTensor,
    EnvError,
    EnvSpecError,
    EpisodeBatcher,
    GymEnv,
    SpecError,
    TemporalDictTensor,
    UsageError,
    WorkerDiedError,
    WorkerError,
    WorkerStartupError,
    WorkerTimeoutError,
)

from support.faults import (
    EXIT_CODE,
    FaultyAgent,
    FaultyEnv,
    create_agent,
    create_env,
    faults_at,
)

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(90)]

Workers = Callable[[], set[int]]
"""What the fixture ``workers`` gives: the workers that the test has started and that still run."""

REPORT_S = 2.0
"""A fault surfaces within this time."""

CLOSE_S = 7.0
"""close() takes less than this even if a worker has to be killed."""

HANG_TIMEOUT_S = 0.7
"""``timeout`` of batchers whose workers hang, many times what healthy ones take for a step."""

RAISES = ("raise", "unpicklable", "unprintable", "sys_exit")
WRONG = ("wrong_shape", "wrong_dtype")
DEATHS = {
    "os_exit": (EXIT_CODE, None),
    "sigkill": (-signal.SIGKILL, "SIGKILL"),
    "segfault": (-signal.SIGSEGV, "SIGSEGV"),
}


def open_batcher(
    struck: Struck,
    n_threads: int = 1,
    n_slots: int = 8,
    env_args: dict[str, Any] | None = None,
    agent_args: dict[str, Any] | None = None,
    on_worker_failure: str = "raise",
    **options: Any,
) -> EpisodeBatcher:
    return EpisodeBatcher(
        n_timesteps=4,
        n_slots=n_slots,
        create_agent=create_agent,
        agent_args={"struck_at": struck.path, **(agent_args or {})},
        create_env=create_env,
        env_args={"struck_at": struck.path, **(env_args or {})},
        n_threads=n_threads,
        seeds=7,
        on_worker_failure=on_worker_failure,
        **options,
    )


def run(batcher: EpisodeBatcher | Batcher, *arguments: Any) -> TemporalDictTensor:
    batcher.execute(*arguments)
    return result_of(batcher)


def result_of(batcher: EpisodeBatcher | Batcher) -> TemporalDictTensor:
    result = batcher.get()
    assert result is not None
    return result


def assert_works(batcher: EpisodeBatcher) -> None:
    """Run a request whose every row can be written down."""
    ids, lengths = torch.arange(5) + 10, torch.tensor([1, 6, 3, 4, 9])
    batcher.execute(5, env_info=DictTensor({"id": ids, "length": lengths}))
    result = result_of(batcher)
    assert result.lengths.tolist() == lengths.tolist()
    for row, length in enumerate(lengths.tolist()):
        assert result["frame"][row, :length, 0].tolist() == [10 + row] * length
        assert result["frame"][row, :length, 1].tolist() == list(range(length))
        assert result["_reward"][row, :length].tolist() == list(range(1, length + 1))


def assert_reports(error: WorkerError, kind: str) -> None:
    """Check that an error carries the remote traceback and travels itself."""
    assert error.__cause__ is not None
    text = "".join(traceback.format_exception(error.__cause__))
    if kind in RAISES:
        assert "support/faults.py" in text
        assert "in strike" in text
        assert {"unprintable": "UnprintableError", "sys_exit": "SystemExit"}.get(
            kind, "struck"
        ) in text
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.where) == (type(error), str(error), error.where)


def close_twice(batcher: EpisodeBatcher | Batcher) -> float:
    """Close; returns how long that took."""
    start = time.monotonic()
    batcher.close()
    took = time.monotonic() - start
    batcher.close()
    with pytest.raises(UsageError, match="closed"):
        batcher.get()
    return took


# Faults after which the batcher goes on ------------------------------------------------------


@pytest.fixture(scope="module")
def lasting_struck(tmp_path_factory: pytest.TempPathFactory) -> Struck:
    return Struck(str(tmp_path_factory.mktemp("faults") / "struck"))


@pytest.fixture(scope="module", params=[0, 2], ids=["in_this_process", "two_workers"])
def lanes_batcher(
    request: pytest.FixtureRequest, lasting_struck: Struck
) -> Iterator[EpisodeBatcher]:
    """Two lanes per worker, for all recoverable faults of environments."""
    with open_batcher(lasting_struck, request.param, env_args={"n_lanes": 2}) as batcher:
        yield batcher


@pytest.fixture(scope="module", params=[0, 2], ids=["in_this_process", "two_workers"])
def agents_batcher(
    request: pytest.FixtureRequest, lasting_struck: Struck
) -> Iterator[EpisodeBatcher]:
    """One lane per worker, for all recoverable faults of agents."""
    with open_batcher(lasting_struck, request.param) as batcher:
        yield batcher


@pytest.mark.parametrize(
    ("place", "kind"),
    [(place, kind) for place in ("reset", "step") for kind in (*RAISES, *WRONG)]
    + [("step", kind) for kind in ("wrong_reward", "wrong_flag", "huge_reward", "nan_flag")],
)
def test_a_failing_environment_raises_env_error_and_the_batcher_goes_on(
    lanes_batcher: EpisodeBatcher, lasting_struck: Struck, place: str, kind: str
) -> None:
    before = worker_pids()
    step = {"reset": -1, "step": 2}[place]
    row = 3
    lanes_batcher.execute(6, env_info=faults_at(6, row, kind, step, length=6))
    with pytest.raises(EnvError) as caught:
        lanes_batcher.get()
    error = caught.value
    assert lasting_struck.seconds_ago < REPORT_S
    assert isinstance(error, EnvSpecError) == isinstance(error, SpecError) == (kind not in RAISES)
    where = error.where
    assert where.worker in (0, 1)
    assert (where.lane, where.episode, where.step) == (row % 2, row, max(step, 0))
    assert where.seed == lasting_struck.seed
    assert where.env_info is not None
    assert dict(where.env_info) == {
        "fault": faults_at(6, row, kind, step)["fault"][row].item(),
        "fault_step": step,
        "length": 6,
    }
    assert_reports(error, kind)
    assert place in str(error)
    assert_works(lanes_batcher)
    assert worker_pids() == before


@pytest.mark.parametrize("step", [0, 2], ids=["first_call", "later_call"])
@pytest.mark.parametrize("kind", [*RAISES, *WRONG])
def test_a_failing_agent_raises_agent_error_and_the_batcher_goes_on(
    agents_batcher: EpisodeBatcher, lasting_struck: Struck, kind: str, step: int
) -> None:
    before = worker_pids()
    env_info = DictTensor({"length": torch.full((4,), 5), "id": torch.arange(4)})
    agents_batcher.execute(4, agent_info=faults_at(4, 2, kind, step), env_info=env_info)
    with pytest.raises(AgentError) as caught:
        agents_batcher.get()
    error = caught.value
    assert lasting_struck.seconds_ago < REPORT_S
    assert isinstance(error, AgentSpecError) == isinstance(error, SpecError) == (kind in WRONG)
    where = error.where
    assert where.worker in (0, 1)
    assert (where.lane, where.episode, where.step) == (0, 2, step)
    assert where.env_info == {"length": 5, "id": 2}
    assert where.seed is not None
    assert_reports(error, kind)
    assert_works(agents_batcher)
    assert worker_pids() == before


@pytest.mark.parametrize("kind", RAISES)
def test_a_failing_update_raises_agent_error_in_get_and_the_batcher_goes_on(
    agents_batcher: EpisodeBatcher, lasting_struck: Struck, kind: str
) -> None:
    before = worker_pids()
    agents_batcher.update(kind)
    agents_batcher.execute(2)
    with pytest.raises(AgentError, match="update") as caught:
        agents_batcher.get()
    assert lasting_struck.seconds_ago < REPORT_S
    assert caught.value.where.worker in (0, 1)
    assert_reports(caught.value, kind)
    agents_batcher.update(5)
    agents_batcher.execute(2)
    assert (result_of(agents_batcher)["version"][:, 0] == 5).all()
    assert_works(agents_batcher)
    assert worker_pids() == before


def test_queued_requests_survive_the_failure_of_one_between_them(
    lanes_batcher: EpisodeBatcher,
) -> None:
    for number in range(5):
        info = faults_at(3, 1, "raise" if number == 2 else "none", 1, id=number)
        lanes_batcher.execute(3, env_info=info)
    for number in range(5):
        if number == 2:
            with pytest.raises(EnvError):
                lanes_batcher.get()
            continue
        result = result_of(lanes_batcher)
        assert result.lengths.tolist() == [3, 3, 3]
        assert (result["frame"][:, :, 0] == number).all()


def test_a_failure_of_an_environment_that_lacks_slots_raises_too(
    lanes_batcher: EpisodeBatcher,
) -> None:
    lanes_batcher.execute(40, env_info=faults_at(40, 30, "raise", 13, length=15))
    with pytest.raises(EnvError) as caught:
        lanes_batcher.get()
    assert (caught.value.where.episode, caught.value.where.step) == (30, 13)
    assert_works(lanes_batcher)


def test_failures_are_polled_without_blocking(lanes_batcher: EpisodeBatcher) -> None:
    lanes_batcher.execute(2, env_info=faults_at(2, 1, "raise", 0))
    with pytest.raises(EnvError):
        wait_until(lambda: lanes_batcher.get(blocking=False) is not None)
    assert_works(lanes_batcher)


def test_what_follows_a_failure_is_the_same_for_any_number_of_workers(struck: Struck) -> None:
    results = []
    for n_threads in (0, 2):
        with open_batcher(struck, n_threads, env_args={"n_lanes": 2}) as batcher:
            batcher.execute(4)
            result_of(batcher)
            batcher.execute(4, env_info=faults_at(4, 1, "raise", 1))
            with pytest.raises(EnvError):
                batcher.get()
            batcher.execute(4)
            results.append(result_of(batcher))
    assert results[0].info["seed"].tolist() == results[1].info["seed"].tolist()
    for key, values in results[0].items():
        assert torch.equal(values, results[1][key])


def test_an_update_is_not_lost_with_the_request_it_came_with() -> None:
    with EpisodeBatcher(
        4, 8, FaultyAgent, {}, create_env_that_needs_its_id, n_threads=0
    ) as batcher:
        batcher.update(5)
        batcher.execute(2)
        with pytest.raises(EnvError):
            batcher.get()
        batcher.execute(2, env_info=DictTensor({"id": torch.arange(2)}))
        result = result_of(batcher)
    assert result.info["policy_version"].tolist() == [1, 1]
    assert (result["version"][:, 0] == 5).all()


class NeedyEnv(FaultyEnv):
    """Cannot be reset without ``id``."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed, options={"id": (options or {})["id"]})


def create_env_that_needs_its_id(seed: int) -> GymEnv:
    return GymEnv([NeedyEnv()], seed)


def test_results_never_claim_a_policy_whose_update_failed(struck: Struck) -> None:
    with open_batcher(struck, 0) as batcher:
        batcher.update(5)
        batcher.execute(2)
        result_of(batcher)
        batcher.update("raise")
        batcher.execute(2)
        with pytest.raises(AgentError):
            batcher.get()
        batcher.execute(2)
        with contextlib.suppress(AgentError):
            # Refusing to go on without the update is as good as saying which policy was used.
            result = result_of(batcher)
            assert result.info["policy_version"].tolist() == [1, 1]


def test_a_late_report_of_a_failed_update_does_not_hit_the_next_one(struck: Struck) -> None:
    with open_batcher(struck, 2) as batcher:
        for number in range(20):
            batcher.update("raise")
            batcher.execute(2)
            with pytest.raises(AgentError):
                batcher.get()
            batcher.update(number)
            assert (run(batcher, 2)["version"][:, 0] == number).all()


def test_windows_after_a_failure_are_refused_before_reset(struck: Struck) -> None:
    batcher = Batcher(
        2, None, create_agent, {}, create_env, {"n_lanes": 2, "struck_at": struck.path}, 0, 3
    )
    with batcher:
        batcher.reset(env_info=faults_at(2, 1, "raise", 3, length=9))
        batcher.execute()
        assert result_of(batcher).lengths.tolist() == [2, 2]
        batcher.execute()
        with pytest.raises(EnvError) as caught:
            batcher.get()
        assert (caught.value.where.lane, caught.value.where.step) == (1, 3)
        with pytest.raises(UsageError, match="reset"):
            run(batcher)
        batcher.reset()
        batcher.execute()
        assert result_of(batcher).lengths.tolist() == [2, 2]


def test_ctrl_c_in_this_process_is_not_taken_for_a_failure_of_the_environment() -> None:
    with EpisodeBatcher(
        4, 8, FaultyAgent, {}, create_env_that_is_interrupted, n_threads=0, seeds=1
    ) as batcher:
        batcher.execute(1, env_info=DictTensor({"interrupt": torch.ones(1)}))
        with pytest.raises(KeyboardInterrupt):
            batcher.get()


class InterruptedEnv(FaultyEnv):
    """The user presses Ctrl-C while it steps."""

    def step(self, action: Any) -> Any:
        if "interrupt" in self._options:
            signal.raise_signal(signal.SIGINT)
        return super().step(action)


def create_env_that_is_interrupted(seed: int) -> GymEnv:
    return GymEnv([InterruptedEnv()], seed)


@pytest.mark.parametrize("value", [None, "1.0", 1j], ids=repr)
def test_a_reward_that_is_no_number_raises_env_spec_error(value: Any) -> None:
    with EpisodeBatcher(
        4, 8, FaultyAgent, {}, create_env_with_reward, {"reward": value}, n_threads=0
    ) as batcher:
        batcher.execute(2)
        with pytest.raises(EnvSpecError, match="reward"):
            batcher.get()


class RewardingEnv(FaultyEnv):
    """Gives the reward that it is told to give."""

    def __init__(self, reward: Any) -> None:
        super().__init__()
        self._reward = reward

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, self._reward, *rest


def create_env_with_reward(seed: int, reward: Any) -> GymEnv:
    return GymEnv([RewardingEnv(reward), RewardingEnv(reward)], seed)


@pytest.fixture
def workers() -> Workers:
    before = worker_pids()
    return lambda: worker_pids() - before


# Faults at the start --------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["create_env", "create_agent"])
@pytest.mark.parametrize("kind", [*RAISES, "wrong_shape"])
def test_a_failing_factory_raises_worker_startup_error(
    struck: Struck, place: str, kind: str
) -> None:
    for n_threads in (0, 1):
        with pytest.raises(WorkerStartupError, match=place) as caught:
            open_failing(struck, place, kind, n_threads)
        assert struck.seconds_ago < REPORT_S
        assert caught.value.where.worker == 0
        if kind in RAISES:
            assert_reports(caught.value, kind)


@pytest.mark.parametrize("place", ["create_env", "create_agent"])
@pytest.mark.parametrize("kind", list(DEATHS))
def test_a_death_in_a_factory_raises_worker_died_error(
    struck: Struck, place: str, kind: str
) -> None:
    with pytest.raises(WorkerDiedError) as caught:
        open_failing(struck, place, kind, 1)
    assert struck.seconds_ago < REPORT_S
    assert_is_death(caught.value, kind)
    assert caught.value.where.worker == 0


def open_failing(struck: Struck, place: str, kind: str, n_threads: int, **options: Any) -> Any:
    return open_batcher(
        struck,
        n_threads,
        env_args={"fault": kind} if place == "create_env" else {},
        agent_args={"fault": kind} if place == "create_agent" else {},
        **options,
    )


def test_a_failing_start_does_not_wait_for_slower_workers(struck: Struck, tmp_path: Path) -> None:
    env_args = {"fault": "raise", "first": str(tmp_path / "first")}
    with pytest.raises(WorkerStartupError):
        open_batcher(struck, 2, env_args=env_args)
    assert struck.seconds_ago < REPORT_S


def test_what_cannot_be_pickled_raises_worker_startup_error() -> None:
    with pytest.raises(WorkerStartupError, match="pickle"):
        EpisodeBatcher(
            4, 8, create_agent, {}, create_env, {"struck_at": (i for i in range(3))}, n_threads=1
        )


def test_workers_that_disagree_raise_spec_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="environments"):
        EpisodeBatcher(
            4, 8, create_agent, {}, create_unequal_envs, {"first": tmp_path / "1"}, n_threads=2
        )


def create_unequal_envs(seed: int, first: Path) -> GymEnv:
    try:
        first.touch(exist_ok=False)
        return create_env(seed, n_lanes=2)
    except FileExistsError:
        return create_env(seed, n_lanes=3)


# Deaths ---------------------------------------------------------------------------------------


def assert_is_death(error: WorkerError, kind: str) -> None:
    assert isinstance(error, WorkerDiedError)
    assert (error.exitcode, error.signal_name) == DEATHS[kind]
    again = pickle.loads(pickle.dumps(error))
    assert (again.exitcode, again.signal_name, again.where) == (
        error.exitcode,
        error.signal_name,
        error.where,
    )
    name = error.signal_name or str(error.exitcode)
    assert name in str(error)


@pytest.mark.parametrize("place", ["reset", "step", "agent", "update"])
@pytest.mark.parametrize("kind", list(DEATHS))
def test_a_death_raises_worker_died_error(
    struck: Struck, workers: Workers, place: str, kind: str
) -> None:
    with open_batcher(struck) as batcher:
        (worker,) = workers()
        plain = DictTensor({"fault": torch.zeros(3, dtype=torch.int64), "id": torch.arange(3)})
        if place == "update":
            batcher.update(kind)
            batcher.execute(3)
        elif place == "agent":
            batcher.execute(3, agent_info=faults_at(3, 1, kind, 2), env_info=plain)
        else:
            step = {"reset": -1, "step": 2}[place]
            batcher.execute(3, env_info=faults_at(3, 1, kind, step, length=7))
        with pytest.raises(WorkerDiedError) as caught:
            batcher.get()
        assert struck.seconds_ago < REPORT_S
        assert struck.pid == worker
        where = caught.value.where
        assert_is_death(caught.value, kind)
        assert where.worker == 0
        if place != "update":
            assert (where.lane, where.episode) == (0, 1)
            assert where.env_info is not None
            assert dict(where.env_info).get("id", 1) == 1
        if place in ("reset", "step"):
            assert where.seed == struck.seed
        assert close_twice(batcher) < REPORT_S
    assert not is_running(worker)


def test_a_death_leaves_the_other_worker_alone_and_names_lane_and_step(
    struck: Struck, workers: Workers
) -> None:
    with open_batcher(struck, 2, env_args={"n_lanes": 2}) as batcher:
        before = workers()
        batcher.execute(4)
        kept = result_of(batcher)
        frames = kept["frame"].clone()
        batcher.execute(6, env_info=faults_at(6, 3, "sigkill", 4, length=50, sleep_ms=1))
        with pytest.raises(WorkerDiedError) as caught:
            batcher.get()
        where = caught.value.where
        assert (where.lane, where.episode, where.seed) == (1, 3, struck.seed)
        (survivor,) = before - {struck.pid}
        assert is_running(survivor)
        assert torch.equal(kept["frame"], frames)
        with pytest.raises(WorkerDiedError):
            run(batcher, 1)
        assert close_twice(batcher) < CLOSE_S
    assert where.step == 4


def test_a_death_while_nothing_is_requested_is_told_by_the_next_call(
    struck: Struck, workers: Workers
) -> None:
    with open_batcher(struck) as batcher:
        (worker,) = workers()
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(WorkerDiedError) as caught:
            run(batcher, 1)
        assert caught.value.signal_name == "SIGKILL"


def test_a_death_is_noticed_though_a_child_of_the_environment_lives_on(struck: Struck) -> None:
    # The child has inherited the worker's descriptors: no end of file tells of the death.
    with open_batcher(struck, timeout=HANG_TIMEOUT_S) as batcher:
        batcher.execute(2, env_info=faults_at(2, 1, "fork_and_sigkill", 0))
        try:
            with pytest.raises(WorkerDiedError) as caught:
                batcher.get()
            assert struck.seconds_ago < REPORT_S
            assert caught.value.signal_name == "SIGKILL"
        finally:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                os.kill(int(Path(f"{struck.path}.child").read_text()), signal.SIGKILL)


# Hangs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "places", [("create_env", "create_agent", "reset"), ("step", "agent", "update")], ids=str
)
def test_a_hang_raises_worker_timeout_error(places: tuple[str, ...], tmp_path: Path) -> None:
    # In threads: what takes long is waiting.
    with ThreadPoolExecutor(len(places)) as pool:
        files = [Struck(str(tmp_path / place)) for place in places]
        for _ in pool.map(hang, places, files):
            pass


def hang(place: str, struck: Struck) -> None:
    with contextlib.ExitStack() as stack:
        with pytest.raises(WorkerTimeoutError) as caught:
            open_and_hang(place, struck, stack)
        assert HANG_TIMEOUT_S / 2 < struck.seconds_ago < HANG_TIMEOUT_S + REPORT_S
    assert not is_running(struck.pid)
    assert isinstance(caught.value, TimeoutError)
    assert "faults.py" in str(caught.value.__cause__)  # the stack that it was in
    where = caught.value.where
    assert where.worker == 0
    if place in ("reset", "step", "agent"):
        assert (where.lane, where.episode) == (0, 1)
    if place in ("reset", "step"):
        assert where.seed == struck.seed


def open_and_hang(place: str, struck: Struck, stack: contextlib.ExitStack) -> None:
    batcher = open_failing(struck, place, "hang", 1, timeout=HANG_TIMEOUT_S)
    stack.enter_context(batcher)
    info = faults_at(2, 1, "hang", -1 if place == "reset" else 1)
    if place == "update":
        batcher.update("hang")
    batcher.execute(
        2,
        agent_info=info if place == "agent" else None,
        env_info=info if place in ("reset", "step") else None,
    )
    batcher.get()


def test_a_hang_is_noticed_by_polling_without_blocking(struck: Struck) -> None:
    with open_batcher(struck, timeout=HANG_TIMEOUT_S) as batcher:
        batcher.execute(1, env_info=faults_at(1, 0, "hang", 1))
        with pytest.raises(WorkerTimeoutError):
            wait_until(lambda: batcher.get(blocking=False) is not None, HANG_TIMEOUT_S + REPORT_S)


def test_many_slow_environments_of_one_worker_are_no_hang(struck: Struck) -> None:
    # Each reset and each step takes 0.1 s, those of all lanes together more than the timeout.
    info = {"sleep_ms": torch.full((8,), 100), "length": torch.ones(8, dtype=torch.int64)}
    with open_batcher(struck, timeout=0.5, env_args={"n_lanes": 8}) as batcher:
        batcher.execute(8, env_info=DictTensor(info))
        assert result_of(batcher).lengths.tolist() == [1] * 8


def test_a_hang_in_a_failed_request_does_not_block_the_next_one_for_ever(
    struck: Struck, workers: Workers
) -> None:
    with open_batcher(struck, 2, n_slots=2, timeout=HANG_TIMEOUT_S) as batcher:
        info = faults_at(2, 0, "hang", 0)
        info["fault"][1] = faults_at(1, 0, "raise", 0)["fault"][0]
        batcher.execute(2, env_info=info)
        with pytest.raises(EnvError):
            batcher.get()
        batcher.execute(2)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(batcher.get)
            try:
                with pytest.raises(WorkerTimeoutError):
                    future.result(timeout=HANG_TIMEOUT_S + REPORT_S)
            finally:
                kill(workers())  # lets the thread end, whatever happened


def kill(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_more_chunks_than_fit_into_the_pipes_do_not_block_both_sides(
    struck: Struck, workers: Workers
) -> None:
    with EpisodeBatcher(1, 2500, create_agent, {}, create_env, {}, n_threads=1) as batcher:
        batcher.execute(1, env_info=DictTensor({"length": torch.tensor([2000])}))
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(batcher.get)
            try:
                result = future.result(timeout=20.0)
            finally:
                if not future.done():
                    kill(workers())
    assert result.lengths.tolist() == [2000]
    assert result["frame"][0, :, 1].tolist() == list(range(2000))


@pytest.mark.parametrize(("n_slots", "n_threads", "n_lanes"), [(1, 2, 1), (2, 3, 2)])
def test_fewer_slots_than_workers_never_deadlock(
    struck: Struck, n_slots: int, n_threads: int, n_lanes: int
) -> None:
    with contextlib.ExitStack() as stack:
        try:
            batcher = open_batcher(
                struck,
                n_threads,
                n_slots,
                {"n_lanes": n_lanes},
                timeout=HANG_TIMEOUT_S,
            )
        except SpecError:
            return  # refused with a clear error: as good
        stack.enter_context(batcher)
        assert_works(batcher)


def test_the_timeout_does_not_count_what_a_worker_imports(
    struck: Struck, as_main: Callable[[str], None]
) -> None:
    as_main(f"import time\nif __name__ != '__main__':\n    time.sleep({2 * HANG_TIMEOUT_S})")
    with open_batcher(struck, timeout=HANG_TIMEOUT_S) as batcher:
        assert_works(batcher)


# Faults at the end ----------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["env", "agent"])
@pytest.mark.parametrize("kind", [*RAISES, *DEATHS])
def test_a_fault_in_close_disturbs_nobody(
    struck: Struck, workers: Workers, place: str, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = {f"{place}_args": {"close_fault": kind}}
    batcher = open_batcher(struck, **arguments)
    (worker,) = workers()
    assert_works(batcher)
    assert close_twice(batcher) < REPORT_S
    assert struck.pid == worker
    assert not is_running(worker)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", RAISES)
def test_a_fault_in_close_disturbs_nobody_in_this_process(struck: Struck, kind: str) -> None:
    batcher = open_batcher(struck, 0, env_args={"close_fault": kind})
    assert_works(batcher)
    close_twice(batcher)
    assert struck.is_there


def test_a_failing_environment_does_not_keep_the_agent_from_being_closed(
    struck: Struck, tmp_path: Path
) -> None:
    closed = Struck(str(tmp_path / "closed"))
    with open_batcher(
        struck,
        env_args={"close_fault": "raise"},
        agent_args={"struck_at": closed.path, "close_fault": "raise"},
    ) as batcher:
        assert_works(batcher)
    assert struck.is_there
    assert closed.is_there


def test_workers_that_are_stopped_or_hang_in_close_are_ended_by_it(
    struck: Struck, workers: Workers
) -> None:
    batcher = open_batcher(struck, 2, env_args={"close_fault": "hang"})
    assert_works(batcher)
    stopped, hanging = workers()
    os.kill(stopped, signal.SIGSTOP)
    batcher.execute(1)
    assert close_twice(batcher) < CLOSE_S
    assert struck.pid == hanging
    assert not is_running(stopped)
    assert not is_running(hanging)
