"""Workers die and are replaced; the caller gets the bits that it would have got without."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from process.watching import assert_all_equal, worker_pids

import rlpool
from rlpool import Batcher, DictTensor, EpisodeBatcher, TemporalDictTensor

from support.faults import ENDINGS, faults
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


def collect(batcher: EpisodeBatcher, hits: Hits | None = None) -> list[TemporalDictTensor]:
    """Requests with updates in between, all sent before the first is fetched."""
    for number in range(3):
        batcher.update(number / 10)
        infos = {"gain": 1 + torch.arange(10) / 100}, faults(10, hits or {}, length=7)
        batcher.execute(10, *infos)
    return [batcher.get() for _ in range(3)]


# Episodes ------------------------------------------------------------------------------------


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


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("ending", variants(["linger"], ENDINGS))
def test_an_environment_that_raises_and_takes_its_worker_down_is_one_failure(
    strikes: dict[str, str], ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    env_args = {**strikes, "close_fault": ending}
    options = {"on_env_error": "restart", "max_restarts": 3, "timeout": None}
    with open_batcher(env_args, 1, **options) as batcher, caplog.at_level(logging.WARNING):
        assert len(collect(batcher, {3: ("raise", 1)})) == 3
    assert len(caplog.records) == 3  # one for each request


# Windows -------------------------------------------------------------------------------------


def open_windows(env_args: dict[str, Any], **options: Any) -> Batcher:
    options = {"n_threads": 2, "agent_args": {}, "seeds": 5, **options}
    kinds = {"create_agent": RecurrentAgent, "create_env": create_fragile}
    return Batcher(n_timesteps=5, env_args={"restarts": True, **env_args}, **kinds, **options)


def windows(env_args: dict[str, Any], **options: Any) -> list[TemporalDictTensor]:
    """Windows after each of two resets."""
    results = []
    with open_windows(env_args, **options) as batcher:
        for number in range(8):
            if number % 4 == 0:
                gain = torch.linspace(1, 1.5, batcher.n_lanes)
                batcher.reset({"gain": gain}, {"length": 13 + torch.arange(batcher.n_lanes)})
            batcher.update(number / 10)
            batcher.execute()
            results.append(batcher.get())
    return results


@pytest.mark.promise("I2")
def test_an_environment_that_does_not_repeat_itself_is_reported() -> None:
    before = worker_pids()
    env_args = {"kind": ChancyEnv, "n_lanes": 1}
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


def test_windows_of_an_agent_with_history_are_given_up_but_not_the_update(
    strikes: dict[str, str],
) -> None:
    with open_windows(strikes, agent_args={"wants_history": True}) as batcher:
        batcher.reset(env_info=faults(4, {0: ("sigkill", 6)}, length=50))
        batcher.execute()
        batcher.execute()
        batcher.update(0.5)
        batcher.execute()
        assert batcher.get() is not None
        with pytest.raises(rlpool.WorkerDiedError):
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
    limits = {"max_episodes_per_worker": 9, "max_restarts": 0}
    with open_batcher(strikes, **limits) as batcher, open_batcher({}, 0) as undisturbed:
        assert_all_equal(collect(batcher), collect(undisturbed))
    assert n_processes(ran_in) in (4, 5)  # 30 episodes, dealt out to two workers as it comes


@pytest.mark.promise("I4")
@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("ending", variants(["segfault"], ("none", *ENDINGS)))
def test_recycled_workers_hand_their_windows_on_whatever_they_do_while_they_close(
    strikes: dict[str, str], ran_in: Path, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"max_episodes_per_worker": 4, "max_restarts": 0, "timeout": None}
    start_s = time.monotonic()
    with caplog.at_level(logging.WARNING, "rlpool"):
        results = windows({**strikes, "close_fault": ending}, **options)
    assert not caplog.records
    assert time.monotonic() - start_s < 2 * CLOSE_S
    assert_all_equal(results, windows({}))
    assert n_processes(ran_in) > 2
