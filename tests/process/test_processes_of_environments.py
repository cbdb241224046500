"""Processes that environments start end with their worker, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from process.watching import Script, is_running, wait_until

from rlpool import EpisodeBatcher

from support.agents import ConstantAgent
from support.parents import WAYS, create_env, open_manager
from support.variants import variants

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


def open_batcher(notes: Path, n_threads: int = 1, **options: Any) -> EpisodeBatcher:
    env_args = {"notes": str(notes), **options.pop("env_args", {})}
    return EpisodeBatcher(
        4, 8, ConstantAgent, {}, create_env, env_args, n_threads, seeds=1, **options
    )


def assert_gone(pids: set[int], since_s: float) -> None:
    wait_until(lambda: not any(map(is_running, pids)), GONE_S - (time.monotonic() - since_s))


@pytest.mark.parametrize("way", variants(["grandchild"], WAYS))
def test_what_environments_started_ends_with_close(notes: Path, way: str) -> None:
    with open_batcher(notes, env_args={"way": way}) as batcher:
        batcher.execute(3)
        assert batcher.get().lengths.tolist() == [3, 3, 3]
        (child,) = started(notes)
        assert is_running(child)
        start_s = time.monotonic()
    assert_gone({child}, start_s)


def test_what_a_manager_and_a_killed_worker_had_started_ends_with_them(notes: Path) -> None:
    with open_manager(notes=str(notes)) as manager:
        manager.reset()
        before = started(notes)
        os.kill(manager.workers[0].pid, signal.SIGKILL)
        manager.reset()
        assert sum(map(is_running, before)) == 1, "that of the worker that lives goes on"
        children = started(notes)
        assert len(children) == 3
        start_s = time.monotonic()
    assert_gone(children, start_s)


def test_what_a_recycled_worker_had_started_ends_with_it(notes: Path) -> None:
    with open_batcher(notes, max_episodes_per_worker=2) as batcher:
        batcher.execute(6)
        batcher.get()
        assert len(started(notes)) >= 3
        wait_until(lambda: sum(map(is_running, started(notes))) <= 1, GONE_S)


def test_environments_that_end_their_processes_are_not_disturbed(notes: Path) -> None:
    with open_batcher(notes, 2, env_args={"ends_it": True}) as batcher:
        batcher.execute(3)
        batcher.get()
    codes = [note.read_text() for note in notes.iterdir()]
    assert codes == ["7", "7"], "each was ended by its environment, and waited for"


CALLER = """
import sys, time
from rlpool import EpisodeBatcher
from support.agents import ConstantAgent
from support.parents import WAYS, create_env

def main(notes, start_method):
    opened = []
    for way in WAYS:
        env_args = {"notes": notes, "way": way}
        opened.append(EpisodeBatcher(
            4, 8, ConstantAgent, {}, create_env, env_args,
            n_workers=2, seeds=1, start_method=start_method,
        ))
    print("there", flush=True)
    time.sleep(1000)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("start_method", "number"),
    variants([("auto", signal.SIGKILL)], [("spawn", signal.SIGTERM), ("auto", signal.SIGINT)]),
)
def test_what_environments_started_ends_with_a_worker_whose_caller_is_busy_and_with_the_caller(
    run_script: Callable[..., Script], notes: Path, start_method: str, number: signal.Signals
) -> None:
    script = run_script(CALLER, str(notes), start_method)
    script.wait_for_line("there")
    children = started(notes)
    assert len(children) == 2 * len(WAYS)
    workers = [
        process
        for process in script.family
        if process.name().startswith("rlpool-worker") and process.pid not in children
    ]
    assert len(workers) == len(children)
    for worker in workers[::2]:
        worker.kill()
    # It does nothing of rlpool, and learns of no death.
    wait_until(lambda: sum(map(is_running, children)) == len(WAYS), GONE_S)
    assert script.returncode is None
    script.signal(number)
    assert_gone(children, time.monotonic())


PR_SET_CHILD_SUBREAPER = 36


def zombies() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if child.status() == psutil.STATUS_ZOMBIE]


@pytest.fixture
def first_of_a_container() -> Iterator[None]:
    """A process that inherits those whose parents have ended."""
    for is_one in (1, 0):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, is_one, 0, 0, 0)
        if is_one:
            yield


@pytest.mark.usefixtures("first_of_a_container")
def test_a_caller_that_inherits_what_a_worker_leaves_has_no_zombies(notes: Path) -> None:
    with open_batcher(notes) as batcher:
        children = psutil.Process().children()
        (worker,) = [child for child in children if child.name().startswith("rlpool-worker")]
        for process in (*worker.children(), worker):
            process.kill()
            wait_until(lambda process=process: not is_running(process.pid))
        wait_until(lambda: (batcher.execute(3), batcher.get()) and not zombies(), 5.0)
    assert not zombies()
