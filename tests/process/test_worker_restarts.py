"""Workers die and are replaced; the caller gets the bits that it would have got without."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from process.watching import assert_all_equal, is_running, wait_until, worker_pids

import rlpool
from rlpool import Batcher, DictTensor, EpisodeBatcher, TemporalDictTensor

from support.faults import ENDINGS, create_agent, create_env, faults
from support.fragile import ChancyEnv, RecurrentAgent, create_fragile
from support.variants import variants

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left"),
    pytest.mark.timeout(120),
    pytest.mark.promise("I3"),
    pytest.mark.promise("I1"),
]

CLOSE_S = 7.0
"""close() takes less than this even if a worker has to be killed."""

SIZES = (10, 16, 5)
"""Episodes of the requests of ``collect``."""

Results = list[TemporalDictTensor]
Hits = dict[int, tuple[str, int]]


@pytest.fixture
def ran_in(tmp_path: Path) -> Path:
    """Where each process in which environments were reset leaves a file."""
    (tmp_path / "ran_in").mkdir()
    return tmp_path / "ran_in"


@pytest.fixture
def strikes(tmp_path: Path, ran_in: Path) -> dict[str, str]:
    """Arguments of environments that fail where they are told to."""
    (tmp_path / "marks").mkdir()
    return {"marks": str(tmp_path / "marks"), "noted_in": str(ran_in)}


def n_processes(ran_in: Path) -> int:
    return len(list(ran_in.iterdir()))


def open_batcher(env_args: dict[str, Any], n_threads: int = 2, **options: Any) -> EpisodeBatcher:
    options = {"n_slots": 24, **options}
    return EpisodeBatcher(
        n_timesteps=4,
        create_agent=RecurrentAgent,
        create_env=create_fragile,
        env_args=env_args,
        n_threads=n_threads,
        seeds=11,
        **options,
    )


def begin(batcher: EpisodeBatcher, number: int, hits: Hits) -> None:
    """A request with a policy of its own; the hits count episodes of all requests."""
    first, size = sum(SIZES[:number]), SIZES[number]
    rows = {row - first: hit for row, hit in hits.items() if 0 <= row - first < size}
    length = 1 + torch.arange(first, first + size) % 9
    batcher.update(number / 10)
    batcher.execute(
        size,
        agent_info=DictTensor({"gain": 1 + torch.arange(size) / 100}),
        env_info=faults(size, rows, length=length),
    )


def collect(batcher: EpisodeBatcher, hits: Hits) -> Results:
    """Requests with updates in between, all sent before the first is fetched."""
    for number in range(len(SIZES)):
        begin(batcher, number, hits)
    results = [batcher.get() for _ in SIZES]
    return [result for result in results if result is not None]


def undisturbed(hits: Hits, **options: Any) -> Results:
    with open_batcher({}, 0, **options) as batcher:
        return collect(batcher, hits)


# Episodes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "step", "kind"),
    variants(
        [
            (13, -1, "sigkill"),  # in a reset, with another policy than that of the third request
            (30, 0, "fork_and_sigkill"),  # in the last request
        ],
        [
            (13, 0, "hold_the_lock"),
            (7, 2, "os_exit"),
            (8, 1, "raise"),
            (12, 1, "hang"),
            (16, 5, "segfault"),
        ],
    ),
)
def test_episodes_of_a_dead_worker_are_run_again_with_the_same_bits(
    strikes: dict[str, str],
    ran_in: Path,
    caplog: pytest.LogCaptureFixture,
    row: int,
    step: int,
    kind: str,
) -> None:
    hits = {row: (kind, step)}
    before = worker_pids()
    options = {"on_env_error": "restart", "timeout": 0.5 if kind.startswith("h") else 60.0}
    with open_batcher(strikes, **options) as batcher, caplog.at_level(logging.WARNING, "rlpool"):
        assert_all_equal(collect(batcher, hits), undisturbed(hits))
        left = worker_pids() - before
    for pid in left:  # what the environment had forked
        if is_running(pid):
            psutil.Process(pid).kill()
    assert n_processes(ran_in) == 3
    (record,) = [r for r in caplog.records if r.name == "rlpool"]
    words = {"raise": "struck", "hold_the_lock": "progress", "hang": "progress"}
    assert words.get(kind, "died") in record.getMessage()


def test_an_idle_worker_that_dies_is_replaced_by_the_next_request() -> None:
    before, results = worker_pids(), []
    with open_batcher({}) as batcher:
        for number in range(len(SIZES)):
            there = sorted(worker_pids() - before)  # one, if it could do all of the last request
            victim = psutil.Process(there[number % len(there)])
            victim.kill()
            wait_until(lambda pid=victim.pid: not is_running(pid))
            begin(batcher, number, {})
            results.append(batcher.get())
    assert_all_equal([r for r in results if r is not None], undisturbed({}))


def test_a_hang_costs_one_restart(strikes: dict[str, str]) -> None:
    # The successor makes the step at which its predecessor was given up within one look.
    with open_batcher({**strikes, "n_lanes": 1}, 1, max_restarts=1, timeout=0.5) as batcher:
        batcher.execute(6, env_info=faults(6, {0: ("hang", 0)}, length=9))
        assert batcher.get().n_elems() == 6


@pytest.mark.parametrize(
    ("hits", "history"),
    variants(
        [
            (
                {1: ("hang", 0), 2: ("sigkill", 1)},
                [rlpool.WorkerTimeoutError, rlpool.WorkerDiedError],
            )
        ],
        [
            ({2: ("sigkill", 0)}, [rlpool.WorkerDiedError, rlpool.WorkerDiedError]),
            ({2: ("raise", 0)}, [rlpool.EnvError, rlpool.EnvError]),
        ],
    ),
)
def test_a_budget_that_is_used_up_is_an_error_with_the_failures(
    strikes: dict[str, str], hits: Hits, history: list[type[rlpool.WorkerError]]
) -> None:
    env_args = {**strikes, "n_lanes": 1, "times": 3 - len(hits)}
    options = {
        "max_restarts": 1,
        "on_env_error": "restart",
        "timeout": 0.5,
        "max_episode_restarts": None,
    }
    with open_batcher(env_args, 1, **options) as batcher:
        batcher.execute(6, env_info=faults(6, hits, length=9))
        with pytest.raises(rlpool.WorkerDiedError, match="max_restarts") as caught:
            batcher.get()
        with pytest.raises(rlpool.WorkerDiedError):
            batcher.execute(1)
    error = caught.value
    assert [type(failure) for failure in error.history] == history
    assert {failure.where.row for failure in error.history} == set(hits)
    assert error.where.seed is not None
    if history[-1] is rlpool.EnvError:
        assert "struck" in str(error.__cause__)
    else:
        assert (error.exitcode, error.signal_name) == (-9, "SIGKILL")


def test_a_start_that_always_fails_is_given_up() -> None:
    start_s = time.monotonic()
    env_args = {"fault": "os_exit"}
    with pytest.raises(rlpool.WorkerDiedError, match="3 times without having done") as caught:
        EpisodeBatcher(4, 8, create_agent, {}, create_env, env_args, 1, max_restarts=None)
    assert time.monotonic() - start_s < 60
    assert len(caught.value.history) == 3


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("ending", variants(["linger"], ("none", *ENDINGS)))
def test_an_environment_that_raises_and_takes_its_worker_down_is_one_failure(
    strikes: dict[str, str], ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind = "raise_and_die" if ending == "none" else "raise"
    env_args = {**strikes, "close_fault": ending}
    options = {
        "on_env_error": "restart",
        "max_restarts": 1,
        "timeout": None,
        "max_episode_restarts": None,
    }
    with open_batcher(env_args, 1, **options) as batcher, caplog.at_level(logging.WARNING):
        assert len(collect(batcher, {3: (kind, 1)})) == 3
    assert len(caplog.records) == 1


# Windows -------------------------------------------------------------------------------------


def open_windows(env_args: dict[str, Any], **options: Any) -> Batcher:
    options = {"n_threads": 2, "agent_args": {}, **options}
    return Batcher(
        n_timesteps=5,
        create_agent=RecurrentAgent,
        create_env=create_fragile,
        env_args=env_args,
        seeds=5,
        **options,
    )


def reset(batcher: Batcher, hits: Hits) -> None:
    n = batcher.n_lanes
    info = faults(n, hits, length=13 + torch.arange(n))
    batcher.reset(agent_info=DictTensor({"gain": 1 + torch.arange(n) / 100}), env_info=info)


def windows(
    env_args: dict[str, Any], hits: tuple[Hits, Hits], between: Any = None, **options: Any
) -> Results:
    """Windows after each of two resets; ``between`` is called after the second of them."""
    results = []
    with open_windows(env_args, **options) as batcher:
        for of_reset in hits:
            reset(batcher, of_reset)
            for number in range(4):
                if batcher.all_stopped:
                    break
                batcher.update(number / 10)
                other = {"gain": torch.linspace(2, 3, batcher.n_lanes)}
                batcher.execute(agent_info=other if number == 2 else None)
                result = batcher.get()
                assert result is not None
                results.append(result)
                if between is not None and number == 1:
                    between()
    return results


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("restarts", variants([True], [False]))
def test_windows_go_on_after_a_death_with_the_same_bits(
    strikes: dict[str, str], ran_in: Path, restarts: bool
) -> None:
    hits: tuple[Hits, Hits] = ({1: ("sigkill", 7)}, {3: ("os_exit", -1), 2: ("hang", 12)})
    before = worker_pids()

    def kill_one() -> None:
        psutil.Process(min(worker_pids() - before)).kill()

    expected = windows({"restarts": restarts}, hits)
    env_args = {**strikes, "restarts": restarts}
    assert_all_equal(windows(env_args, hits, kill_one, timeout=0.7), expected)
    assert n_processes(ran_in) >= 2 + 3 + 2  # and with those that the next episode hits as well


@pytest.mark.promise("I2")
def test_an_environment_that_does_not_repeat_itself_is_reported() -> None:
    before = worker_pids()
    env_args = {"kind": ChancyEnv, "restarts": True, "n_lanes": 1}
    with open_windows(env_args, n_threads=1) as batcher:
        batcher.reset(env_info=DictTensor({"length": torch.tensor([50])}))
        batcher.execute()
        assert batcher.get() is not None
        psutil.Process(*(worker_pids() - before)).kill()
        batcher.execute()
        with pytest.raises(rlpool.EnvError, match="did not repeat an episode: 'frame'") as caught:
            batcher.get()
        assert (caught.value.where.worker, caught.value.where.lane) == (0, 0)
        batcher.reset()
        batcher.execute()
        assert batcher.get() is not None


@pytest.mark.parametrize(
    ("kind", "error"),
    variants([("sigkill", rlpool.WorkerDiedError)], [("raise", rlpool.EnvError)]),
)
def test_windows_of_an_agent_with_history_are_given_up_but_not_the_update(
    strikes: dict[str, str], kind: str, error: type[Exception]
) -> None:
    env_args = {**strikes, "restarts": True}
    with open_windows(env_args, agent_args={"wants_history": True}) as batcher:
        batcher.reset(env_info=faults(4, {0: (kind, 6)}, length=50))
        batcher.execute()
        batcher.execute()
        batcher.update(0.5)
        batcher.execute()
        assert batcher.get() is not None
        with pytest.raises(error):
            batcher.get()
        batcher.reset()
        batcher.execute()
        window = batcher.get()
    assert window is not None
    assert window["bias"].unique().tolist() == [0.5]
    assert window.info["policy_version"].unique().tolist() == [1]


# Recycled workers ------------------------------------------------------------------------------


@pytest.mark.promise("I8")
def test_workers_are_replaced_after_so_many_episodes(strikes: dict[str, str], ran_in: Path) -> None:
    expected = undisturbed({})
    with open_batcher(strikes, max_episodes_per_worker=9, max_restarts=0) as batcher:
        assert_all_equal(collect(batcher, {}), expected)
    assert n_processes(ran_in) in (4, 5)  # 31 episodes, dealt out to two workers as it comes


@pytest.mark.promise("I4")
@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("ending", variants(["segfault"], ("none", *ENDINGS)))
def test_recycled_workers_hand_their_windows_on_whatever_they_do_while_they_close(
    strikes: dict[str, str], ran_in: Path, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    start_s = time.monotonic()
    options = {"max_episodes_per_worker": 4, "max_restarts": 0, "timeout": None}
    env_args = {"restarts": True}
    with caplog.at_level(logging.WARNING, "rlpool"):
        results = windows({**env_args, **strikes, "close_fault": ending}, ({}, {}), **options)
    assert not caplog.records
    assert time.monotonic() - start_s < 2 * CLOSE_S
    assert_all_equal(results, windows(env_args, ({}, {})))
    assert n_processes(ran_in) > 2
