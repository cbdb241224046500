"""Processes started by environments end with their worker, however it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from process.watching import is_running, wait_until

from rlpool import EpisodeBatcher, ParallelEnvManager

from support.agents import ConstantAgent
from support.parents import N_STARTED, ParentEnv, create_env

pytestmark = [
    pytest.mark.promise("I5"),
    pytest.mark.usefixtures("no_shared_memory_left"),
    pytest.mark.timeout(120),
]

GONE_S = 3.0


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "notes"
    directory.mkdir()
    yield directory
    for pid in started(directory):
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


def started(notes: Path) -> set[int]:
    return {int(note.name) for note in notes.iterdir()}


def open_batcher(notes: Path, n_workers: int = 1, **env_args: Any) -> EpisodeBatcher:
    env_args = {"notes": str(notes), **env_args}
    return EpisodeBatcher(4, 8, ConstantAgent, {}, create_env, env_args, n_workers, seeds=1)


def n_running(pids: set[int]) -> int:
    return sum(map(is_running, pids))


def test_processes_started_by_environments_end_on_close(notes: Path) -> None:
    with open_batcher(notes) as batcher:
        batcher.execute(3)
        assert batcher.get().lengths.tolist() == [3, 3, 3]
        children = started(notes)
        assert n_running(children) == len(children) == N_STARTED
    wait_until(lambda: not n_running(children), GONE_S)


def test_processes_started_under_a_manager_or_a_killed_worker_end_with_it(notes: Path) -> None:
    with ParallelEnvManager([partial(ParentEnv, str(notes))] * 2, seed=1) as manager:
        manager.reset()
        before = started(notes)
        os.kill(manager.workers[0].pid, signal.SIGKILL)
        manager.reset()
        assert n_running(before) == N_STARTED, "those of the surviving worker continue"
        children = started(notes)
        assert len(children) == 3 * N_STARTED
    wait_until(lambda: not n_running(children), GONE_S)


def test_processes_started_by_a_killed_worker_end_while_the_caller_is_busy(notes: Path) -> None:
    with open_batcher(notes, 2) as batcher:
        children = started(notes)
        os.kill(batcher.stats().workers[0].pid, signal.SIGKILL)
        # From here on the caller makes no rlpool calls and does not learn of the death.
        wait_until(lambda: n_running(children) == N_STARTED, GONE_S)


def test_environments_may_end_their_own_processes(notes: Path) -> None:
    with open_batcher(notes, 2, ends_it=True) as batcher:
        batcher.execute(3)
        batcher.get()
    codes = [note.read_text() for note in notes.iterdir()]
    assert sorted(filter(None, codes)) == ["7", "7"], "ended by its environment, and waited for"
