"""A call made during another thread's call is refused, and the error names both."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from process.watching import wait_until, worker_pids

from rlpool import (
    EpisodeBatcher,
    GymEnv,
    ParallelEnvManager,
    UsageError,
)

from support.agents import ConstantAgent
from support.envs import CountingEnv
from support.parallel import no_actions

pytestmark = [pytest.mark.timeout(60), pytest.mark.promise("I4")]


class WaitingEnv(CountingEnv):
    """Environment whose steps wait for a write to a named pipe."""

    def __init__(self, path: Path) -> None:
        super().__init__(length=1)
        self.path = path

    def step(self, action: Any) -> Any:
        with open(self.path):
            return super().step(action)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


def create_env(seed: int, path: Path) -> GymEnv:
    return GymEnv([WaitingEnv(path)], seed)


@contextmanager
def inside(user: Any, call: Callable[[], Any], gate: Path) -> Iterator[list[Any]]:
    """Keep another thread inside a call during this context, and return its result then."""
    result: list[Any] = []
    other = threading.Thread(target=lambda: result.append(call()), name="collector")
    other.start()
    wait_until(lambda: getattr(user, "_lanes", user)._is_inside)
    yield result
    with open(gate, "w"):  # waits for the reader
        pass
    other.join()


def open_episodes(path: Path, n_threads: int = 1) -> EpisodeBatcher:
    return EpisodeBatcher(4, 4, ConstantAgent, {}, create_env, {"path": path}, n_threads=n_threads)


@pytest.mark.parametrize("n_threads", [0, 1])
def test_batcher_calls_from_another_thread_are_refused(gate: Path, n_threads: int) -> None:
    with open_episodes(gate, n_threads) as batcher:
        batcher.execute(1)
        with inside(batcher, batcher.get, gate) as result:
            calls: dict[str, Callable[[], Any]] = {
                "execute": lambda: batcher.execute(1),
                "reexecute": batcher.reexecute,
                "get": lambda: batcher.get(blocking=False),
                "update": lambda: batcher.update({}),
                "progress": lambda: batcher.progress,
                "state_dict": batcher.state_dict,
            }
            for name, call in calls.items():
                with pytest.raises(UsageError, match=f"{name}.*'MainThread'"):
                    call()
            assert batcher.stats().workers[0].n_episodes == 0
            assert not batcher.closed
        assert result[0].lengths.tolist() == [1]


def test_manager_and_remote_calls_from_another_thread_are_refused(gate: Path) -> None:
    with ParallelEnvManager([partial(WaitingEnv, gate), CountingEnv]) as manager:
        manager.reset()
        zeros = no_actions(manager)
        with inside(manager, lambda: manager.step_lanes([0, 1], zeros), gate):
            for call in (
                manager.reset,
                lambda: manager.step_lanes([0], zeros),
                lambda: manager.remotes[1].send(("reset", None)),
                manager.remotes[1].poll,
            ):
                with pytest.raises(UsageError, match="while another call"):
                    call()
            assert manager.stats().workers[0].state == "alive"
        manager.reset()


@pytest.mark.usefixtures("short_patience")
def test_a_batcher_may_be_closed_while_another_thread_is_inside_a_call(gate: Path) -> None:
    batcher, errors = open_episodes(gate), list[str]()
    batcher.execute(1)

    def get() -> None:
        with pytest.raises(UsageError) as caught:
            batcher.get()
        errors.append(str(caught.value))

    thread = threading.Thread(target=get)
    thread.start()
    wait_until(lambda: batcher._is_inside)
    batcher.close()
    thread.join()
    assert "closed" in errors[0]
    assert not worker_pids()
