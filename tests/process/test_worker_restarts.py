"""Workers die and are replaced, and results are bit-identical to an undisturbed run."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from process.watching import assert_all_equal

import rlpool
from rlpool import Batcher, EpisodeBatcher, TemporalDictTensor

from support.faults import ENDINGS, faults
from support.fragile import RecurrentAgent, create_fragile
from support.variants import variants

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left"),
    pytest.mark.timeout(120),
    pytest.mark.promise("I3"),
    pytest.mark.promise("I1"),
]

CLOSE_S = 7.0
"""close() takes less than this even if a worker has to be killed."""


@pytest.fixture
def created_in(tmp_path: Path) -> Path:
    """Directory in which each process that creates environments leaves a file."""
    (tmp_path / "created_in").mkdir()
    return tmp_path / "created_in"


def open_batcher(env_args: dict[str, Any], n_workers: int = 2, **options: Any) -> EpisodeBatcher:
    arguments = 4, 24, RecurrentAgent, {}, create_fragile, env_args, n_workers, 11
    return EpisodeBatcher(*arguments, **options)


def collect(batcher: EpisodeBatcher) -> list[TemporalDictTensor]:
    """Send requests with updates in between, all before fetching the first result."""
    for number in range(3):
        batcher.update(number / 10)
        batcher.execute(10, {"gain": 1 + torch.arange(10) / 100}, {"length": [7] * 10})
    return [batcher.get() for _ in range(3)]


# Episodes ------------------------------------------------------------------------------------


def test_an_exhausted_restart_budget_raises_with_the_failures(tmp_path: Path) -> None:
    env_args = {"marks": str(tmp_path), "n_lanes": 1, "times": 2}
    options = {"max_restarts": 1, "max_episode_restarts": None}
    with open_batcher(env_args, 1, **options) as batcher:
        batcher.execute(6, env_info=faults(6, {2: ("sigkill", 0)}, length=9))
        with pytest.raises(rlpool.WorkerDiedError, match="max_restarts") as caught:
            batcher.get()
        with pytest.raises(rlpool.WorkerDiedError):
            batcher.execute(1)
    assert [failure.where.row for failure in caught.value.history] == [2, 2]


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("ending", variants(["linger"], ENDINGS))
def test_an_environment_that_raises_and_kills_its_worker_counts_as_one_failure(
    tmp_path: Path, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    env_args = {"marks": str(tmp_path), "close_fault": ending}
    options = {"on_env_error": "restart", "max_restarts": 1, "timeout": None}
    with open_batcher(env_args, 1, **options) as batcher, caplog.at_level(logging.WARNING):
        batcher.execute(6, {"gain": [1.0] * 6}, faults(6, {3: ("raise", 1)}, length=7))
        assert batcher.get().lengths.tolist() == [7] * 6
    assert len(caplog.records) == 1


@pytest.mark.promise("I8")
def test_workers_are_replaced_after_a_given_number_of_episodes(created_in: Path) -> None:
    env_args = {"created_in": str(created_in)}
    limits = {"max_episodes_per_worker": 9, "max_restarts": 0}
    with open_batcher(env_args, **limits) as batcher, open_batcher({}, 0) as undisturbed:
        assert_all_equal(collect(batcher), collect(undisturbed))
    # 30 episodes, distributed dynamically over two workers:
    assert len(list(created_in.iterdir())) in (4, 5)


# Windows -------------------------------------------------------------------------------------


def open_windows(
    env_args: dict[str, Any], agent_args: dict[str, Any] | None = None, **options: Any
) -> Batcher:
    arguments = 5, None, RecurrentAgent, agent_args, create_fragile
    return Batcher(*arguments, {"restarts": True, **env_args}, 2, 5, **options)


def windows(env_args: dict[str, Any], **options: Any) -> list[TemporalDictTensor]:
    """Return windows after each of two resets."""
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


def test_windows_of_an_agent_with_history_are_dropped_but_not_the_update(tmp_path: Path) -> None:
    with open_windows({"marks": str(tmp_path)}, {"wants_history": True}) as batcher:
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
    assert window["bias"].unique().tolist() == [0.5]
    assert window.info["policy_version"].unique().tolist() == [1]


@pytest.mark.promise("I8")
@pytest.mark.promise("I4")
@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("ending", variants(["segfault"], ("none", *ENDINGS)))
def test_recycled_workers_hand_over_their_windows_even_if_close_fails(
    created_in: Path, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    env_args = {"created_in": str(created_in), "close_fault": ending}
    options = {"max_episodes_per_worker": 4, "max_restarts": 0, "timeout": None}
    start_s = time.monotonic()
    with caplog.at_level(logging.WARNING, "rlpool"):
        results = windows(env_args, **options)
    assert not caplog.records
    assert time.monotonic() - start_s < 2 * CLOSE_S
    assert_all_equal(results, windows({}))
    assert len(list(created_in.iterdir())) > 2
