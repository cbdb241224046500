"""A signal handler that raises in a call of a ``ParallelEnvManager``: ``reset`` begins again."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch
from process.watching import is_running, n_descriptors, worker_pids

from rlpool import (
    DictTensor,
    ParallelEnvManager,
    SpecError,
    UsageError,
)

from support.parallel import create_manager, create_serial, make_cartpole
from support.striking import Alarm, Strike, alarms

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left"),
    pytest.mark.timeout(120),
    pytest.mark.promise("I4"),
]

LANES = [0, 1, 2]
N_STRIKES = 8
"""Of each call, at random points."""

STALL_S = 10.0
"""Only a call that waits for something that never happens takes this long."""


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    with alarms():
        yield


def open_manager() -> ParallelEnvManager:
    return create_manager(1, make_cartpole, 3, restarts=True, envs_per_worker=2)


def actions(number: int = 0) -> dict[str, Any]:
    return {"action": np.random.default_rng(number).integers(0, 2, 3)}


def remote(manager: ParallelEnvManager) -> None:
    for request in (("reset", {"seed": 7}), ("step", 1), ("get_attr", {"attr": "spec"})):
        manager.remotes[1].send(request)
        assert manager.remotes[1].recv()[0] != "error"


def begin_again(manager: ParallelEnvManager) -> None:
    manager._lanes.is_interrupted = True
    manager.reset()


CALLS: dict[str, Callable[[ParallelEnvManager], Any]] = {
    "reset": lambda manager: manager.reset(),
    "reset after an interrupt": begin_again,
    "step": lambda manager: manager.step(DictTensor({"action": torch.tensor([0, 1, 0])})),
    "reset_lanes": lambda manager: manager.reset_lanes([1, 2], [5, 6], [None, None]),
    "step_lanes": lambda manager: manager.step_lanes(LANES, actions()),
    "step_some": lambda manager: manager.step_some(1, [0, 2], actions()),
    "remote": remote,
}


@contextmanager
def without_stall() -> Iterator[None]:
    start_s = time.monotonic()
    yield
    assert time.monotonic() - start_s < STALL_S


def numbers(call: Callable[[], Any], name: str) -> list[int]:
    """The numbers of some points of a call."""
    with Strike(10**9) as strike:
        call()
    assert strike.n_points
    return random.Random(name).sample(range(strike.n_points), min(N_STRIKES, strike.n_points))


def struck(call: Callable[[], Any], number: int) -> None:
    try:
        with without_stall(), Strike(number):
            call()
    except (Alarm, SpecError):  # raised in a conversion, it is reported as an action's
        return


def states(env: Any) -> Iterator[dict[str, bytes]]:
    """What environments show in two steps."""
    env.reset_lanes(LANES, LANES, [None] * 3)
    for number in range(2):
        env.step_lanes(LANES, actions(number))
        yield {key: array.tobytes() for key, array in sorted(env.current.items())}


@pytest.mark.parametrize("name", CALLS)
def test_after_an_interrupt_a_reset_begins_with_new_workers(name: str) -> None:
    serial, n_interrupted = create_serial(1, make_cartpole, 3), 0
    serial.reset()  # declares the actions, as a manager's does
    expected = list(states(serial))
    with open_manager() as manager:
        manager.reset()
        points = numbers(lambda: CALLS[name](manager), name)
        n_fds = n_descriptors()
        for number in points:
            manager.reset()
            before = [worker.pid for worker in manager.workers]
            struck(lambda: CALLS[name](manager), number)
            if manager._lanes.is_interrupted:
                n_interrupted += 1
                for refused in CALLS["step_lanes"], CALLS["step_some"], CALLS["step"], remote:
                    with pytest.raises(UsageError, match="interrupted") as caught:
                        refused(manager)
                    assert "call reset()" in caught.value.fix
                manager.reset()
                assert not any(is_running(pid or 0) for pid in before)
            else:  # before it had begun
                manager.step_some(3)
                with suppress(UsageError):
                    manager.remotes[1].recv()
            assert list(states(manager)) == expected, f"point {number}"
        gc.collect()
        assert n_descriptors() == n_fds
    assert n_interrupted  # others were struck before they had begun, or while they waited


def test_an_interrupted_constructor_or_close_leaves_nothing() -> None:
    others, n_fds = worker_pids(), n_descriptors()
    for number in range(12):  # before there are workers
        with pytest.raises(Alarm), Strike(number, files=["/wake.py", "/crew.py"]):
            open_manager()
    for number in numbers(lambda: open_manager().close(), "constructor"):
        struck(lambda: open_manager().close(), number)
        gc.collect()
        assert worker_pids() == others
    manager = open_manager()
    for number in (1, 20, 60):
        struck(manager.close, number)
    manager.close()
    assert worker_pids() == others
    assert n_descriptors() <= n_fds + 2  # the tracker of multiprocessing
